"""One step of training, whatever the network: what a captured CUDA graph holds.

Nothing in it waits for the GPU, but the very first update where gradients are scaled.
"""

import contextlib
import importlib

import torch

from course_lib.optim.fused import Fused

from . import ranks

#: What the forward pass computes in: how float32 is rounded in products, or what autocast takes.
ROUNDING = {"float32": "ieee", "tf32": "tf32"}
AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS = (*ROUNDING, *AUTOCAST)
_dropout = importlib.import_module("course_lib.ops.dropout")  # `ops.dropout` is the function


class Step:
    """``loss, measured = step(inputs, targets)``: forward, backward, and the optimiser's step.

    The arguments are `GraphTrainer`'s; `inputs` and `targets` are lists of tensors. Gradients are
    averaged over the ranks while the backward pass goes on; where a graph may `capture` the step,
    by `ranks.Overlapped`.
    """

    def __init__(
        self, model, optimizer, loss, *, precision, scaler, max_norm, accumulate, measure,
        capture=False,
    ):  # fmt: skip
        self.capture, self.network = capture, ranks.wrapped(model, flat=capture)
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.device = next(model.parameters()).device
        self.precision, self.max_norm, self.accumulate = precision, max_norm, accumulate
        self.measure, self.scaler = measure, scaler
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        averaged = capture and ranks.are_joined()
        self.exchange = ranks.Overlapped(self.parameters) if averaged else None
        self.began = False  # whether the optimiser has made a step since this was made

    def __call__(self, inputs, targets):
        self.optimizer.zero_grad(set_to_none=True)
        with arithmetic(self.precision), _dropout.seeds_on_device():
            ranks.rehearse(self.network, lambda: self._backward(inputs, targets))
            total, measured = self._backward(inputs, targets)
            self._update()
        return total, measured

    def _backward(self, inputs, targets):
        total = measured = None
        for last, share, some_inputs, some_targets in self._parts(inputs, targets):
            with ranks.unsynchronised(self.network, not last):
                loss, found = self.of(some_inputs, some_targets)
                loss = loss * share if share != 1 else loss
                with self.exchange if last and self.exchange else contextlib.nullcontext():
                    self.scaler.scale(loss).backward()
            loss = loss.detach()
            total = loss if total is None else total + loss
            measured = found if measured is None else measured + found
        if not self.began:
            self._require_gradients()
        return total, measured

    def of(self, inputs, targets):
        """(loss, what `measure` says) of a batch; in evaluation, under `arithmetic`."""
        with autocast(self.device, self.precision):
            output = self.network(*inputs)
        output = _float32(output)
        loss = self.loss(output, *targets)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            found = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"the loss must be a tensor of one number, not {found}")
        measured = None
        if self.measure is not None:
            with torch.no_grad():
                measured = self.measure(output, *targets)
        return loss.reshape(()), measured

    def _parts(self, inputs, targets):
        """(is it the last, share of the samples, their inputs, their targets) of each part."""
        if self.accumulate == 1:
            yield True, 1, inputs, targets
            return
        n = len(inputs[0])
        size = -(-n // self.accumulate)
        for start in range(0, n, size):
            rows = slice(start, min(start + size, n))
            yield (
                rows.stop == n, (rows.stop - start) / n,
                [x[rows] for x in inputs],
                [y[rows] if y.dim() else y for y in targets],
            )

    def _require_gradients(self):
        lacking = {id(p) for p in self.parameters if p.requires_grad and p.grad is None}
        if not lacking:
            return
        named = [name for name, p in self.model.named_parameters() if id(p) in lacking]
        told = ", ".join(named[:5]) + (f" and {len(named) - 5} more" if len(named) > 5 else "")
        raise ValueError(
            f"the loss does not depend on {told or 'parameters of the optimiser'}: use them in "
            "`forward`, or leave them out with requires_grad_(False)"
        )

    def _update(self):
        scaler, optimizer = self.scaler, self.optimizer
        scaler.unscale_(optimizer)
        if self.max_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.max_norm)
        # An optimiser makes its states in its first step, which must be a whole one.
        if self.began or not self._overflowed():
            scaler.step(optimizer)
            self.began = True
        scaler.update()

    def _overflowed(self):
        """Whether a gradient is not finite. The host waits for the answer."""
        if not self.scaler.is_enabled():
            return False
        return any(
            found.item() for found in self.scaler._found_inf_per_device(self.optimizer).values()
        )

    def forget(self):
        """After a step that was broken off: nothing of it is left on optimiser and scaler."""
        self.optimizer.zero_grad(set_to_none=True)
        for name in ("grad_scale", "found_inf"):
            vars(self.optimizer).pop(name, None)
        if self.scaler.is_enabled():  # else it holds nothing
            self.scaler._per_optimizer_states.clear()


@contextlib.contextmanager
def arithmetic(precision):
    """How float32 is rounded in matrix products and convolutions, ours and PyTorch's."""
    if precision not in ROUNDING:
        yield
        return
    backends = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = ROUNDING[precision]
        yield
    finally:
        for backend, rounding in zip(backends, before, strict=True):
            backend.fp32_precision = rounding


def autocast(device, precision):
    """The context in which a network computes in `precision`, one of PRECISIONS."""
    dtype = AUTOCAST.get(precision)
    return torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)


def _float32(output):
    """16-bit tensors as float32, for the loss; also those in a tuple or list."""
    if isinstance(output, torch.Tensor):
        return output.float() if output.dtype in (torch.float16, torch.bfloat16) else output
    if type(output) in (tuple, list):
        return type(output)(map(_float32, output))
    return output


def scaler_for(device, precision, scaler):
    """The `GradScaler` of a step: the one given, one for float16, else one that does nothing."""
    if scaler is None:
        return torch.amp.GradScaler(device.type, enabled=precision == "float16")
    if not isinstance(scaler, torch.amp.GradScaler):
        raise TypeError(f"scaler must be a torch.amp.GradScaler, not a {type(scaler).__name__}")
    return scaler


def why_not_captured(optimizer, scaled, scheduled):
    """Why a CUDA graph cannot hold the steps of `optimizer`; None where it can.

    scaled     whether a GradScaler stops steps
    scheduled  whether learning rates change
    """
    kind = f"{type(optimizer).__module__}.{type(optimizer).__name__}"
    groups = optimizer.param_groups
    if isinstance(optimizer, Fused):
        return None
    if not isinstance(optimizer, torch.optim.SGD) and not all(g.get("capturable") for g in groups):
        able = "capturable" in groups[0]
        return (
            f"{kind} keeps its counts of steps on the host: make it with capturable=True" if able
            else f"{kind} has no capturable=True"
        )  # fmt: skip
    fused = all(g.get("fused") for g in groups)
    if scaled and not getattr(optimizer, "_step_supports_amp_scaling", False):
        return f"{kind} asks the host whether gradients are finite: make it with fused=True"
    if scheduled and not (fused or all(g.get("capturable") for g in groups)):
        return f"{kind} takes learning rates from the host: make it with fused=True"
    return None
