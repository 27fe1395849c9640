"""What our optimisers have in common: which tensors go where, and what a step remembers.

A step must find every parameter's gradient and states, because any of them may be a new tensor.
What it need not do again is to write their addresses into the GPU's memory: a `Table` is kept for
each set of addresses that has been seen. Gradients that are made anew in every step soon come to
lie where earlier ones lay.
"""

import torch

from course_lib.kernels import optimizers
from course_lib.ops.registration import simulate_on_cpu
from course_lib.runtime.arrays import is_dense, laid_out_like

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_TABLES = 32  # of an optimiser; past it, all are filled anew


class Fused:
    """Comes before an optimiser of `torch.optim` among the bases of one on our kernels.

    The class says what PyTorch's is (`theirs`) and how parameters are updated (`_kind`, `_update`).
    On the CPU and on MPS, a step is PyTorch's own.
    """

    theirs = None
    # PyTorch's fused optimisers take over a GradScaler's unscaling. Ours leave it to the scaler.
    _step_supports_amp_scaling = property(lambda self: False, lambda self, value: None)

    def __setstate__(self, state):
        super().__setstate__(state)
        self.__dict__.pop("_tables", None)

    def step(self, closure=None):
        """One step, as PyTorch's; `closure` computes the loss again, and its result is returned."""
        if not self._on_our_kernels():
            return self._step_by_torch(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                self._step_group(group)
        return loss

    def _on_our_kernels(self):
        on_gpu = [p.is_cuda for group in self.param_groups for p in group["params"]]
        if all(on_gpu) or simulate_on_cpu:
            return True
        if any(on_gpu):
            places = {str(p.device) for group in self.param_groups for p in group["params"]}
            raise RuntimeError(
                f"parameters must all be on a GPU or none, but are on {', '.join(sorted(places))}"
            )
        return False

    def _step_by_torch(self, closure):
        step = self.theirs.step
        # PyTorch wraps the step of each class that it has made an optimiser of; ours is wrapped.
        return (step.__wrapped__ if getattr(step, "hooked", False) else step)(self, closure)

    def _step_group(self, group):
        if group["differentiable"]:
            raise RuntimeError(
                f"course_lib's {type(self).__name__} can't be differentiated: use torch.optim's"
            )
        buckets = {}
        for p in group["params"]:
            if (gradient := p.grad) is not None:
                if not self._is_plain(p, gradient):
                    self._check(p, gradient)
                    if gradient.stride() != p.stride():
                        gradient = laid_out_like(gradient, p)
                parameters, gradients = buckets.setdefault(self._kind(p, group), ([], []))
                parameters.append(p)
                gradients.append(gradient)
        for kind, (parameters, gradients) in buckets.items():
            self._update(group, kind, parameters, gradients)
            # PyTorch doesn't see what a kernel writes; it checks that where gradients depend on it.
            torch.autograd.graph.increment_version(parameters)

    def _is_plain(self, p, gradient):
        """Whether both are what nearly all are: contiguous tensors of one dtype that we take."""
        return (
            gradient.layout is torch.strided
            and gradient.dtype is p.dtype
            and p.dtype in _FLOATS
            and p.is_contiguous()
            and gradient.is_contiguous()
        )

    def _check(self, p, gradient):
        name = f"course_lib's {type(self).__name__}"
        if gradient.layout is not torch.strided:
            raise RuntimeError(f"{name} takes no sparse gradients: use torch.optim's")
        if p.dtype not in _FLOATS or gradient.dtype is not p.dtype:
            raise RuntimeError(
                f"{name} takes parameters of {', '.join(map(str, _FLOATS))} with gradients of "
                f"the same dtype, not {p.dtype} with {gradient.dtype}"
            )
        if not p.is_contiguous() and not is_dense(p):
            raise RuntimeError(
                f"{name} takes parameters that fill one stretch of memory; one of shape "
                f"{tuple(p.shape)} has strides {p.stride()}"
            )

    def _kind(self, p, group):
        """Parameters of which this differs are updated apart: their device, and more.

        Makes the states that are missing.
        """
        raise NotImplementedError

    def _update(self, group, kind, parameters, gradients):
        raise NotImplementedError

    def _refuse_capture(self, p):
        if p.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first step of course_lib's {type(self).__name__} makes its states, and must "
                "come before a CUDA graph is captured: replays would make them again"
            )

    def _table(self, parameters, gradients, states):
        """(the `Table` of these tensors, whether it holds their addresses already)."""
        lists = parameters, gradients, *states
        key = tuple([x.data_ptr() for tensors in lists for x in tensors])
        key += tuple([(p.dtype, p.shape) for p in parameters])
        tables, captured = self.__dict__.setdefault("_tables", ({}, []))
        capturing = parameters[0].is_cuda and torch.cuda.is_current_stream_capturing()
        table = tables.get(key)
        again = table is not None
        if not again:
            table = optimizers.Table()
            if not capturing:  # else the table is filled when the graph is replayed, not here
                if len(tables) >= MOST_TABLES:
                    tables.clear()
                tables[key] = table
        if capturing:
            captured.append(table)  # which the graph reads, as long as there is this optimiser
        return table, again

    def _states(self, parameters, name):
        """The states of this name, in their parameters' memory layout."""
        found = []
        for p in parameters:
            state = self.state[p]
            tensor = state[name]
            if not (p.is_contiguous() and tensor.is_contiguous()):
                tensor = state[name] = laid_out_like(tensor, p)
            found.append(tensor)
        return found


def rate(lr, p):
    """A learning rate as the kernels take it: a float, or what lies on p's device."""
    if not isinstance(lr, torch.Tensor):
        return lr
    if lr.device != p.device:
        return lr.item() if lr.device.type == "cpu" else lr.to(p.device, torch.float32)
    return lr if lr.dtype is torch.float32 else lr.float()
