"""A captured trainer for any network: a whole step of training in one CUDA graph.

A step of a small network keeps the host busier than the GPU: autograd, the layers and the optimiser
start hundreds of kernels one by one. Captured once, they are started together: forward and backward
pass, gradient scaling, clipping, the optimiser's step, dropout and running statistics.
What changes from step to step it finds in the GPU's memory: the batch, the learning rates, where
the random numbers stand, and whether a gradient has become infinite.
"""

import gc
import traceback
from typing import NamedTuple

import torch

from course_lib.kernels.optimizers.table import filled_later
from course_lib.runtime.host import device

from . import memory
from .capturing import capture as captured
from .randomness import random_state, set_random_state
from .rates import Rates, takes_tensors
from .schedules import require_whole
from .step import PRECISIONS, Step, arithmetic, scaler_for, why_not_captured

MOST_GRAPHS = 4
STATE = "model", "optimizer", "scaler", "steps", "rates", "random"


class Captured(NamedTuple):
    """A step's graph, and where it reads and writes."""

    graph: object
    inputs: list
    targets: list
    loss: object
    measured: object


class GraphTrainer:
    """``loss = GraphTrainer(model, optimizer, loss)(x, y)`` makes a step of training.

    model        in training mode, of layers of ours or of PyTorch's; all of it on one device, or
                 on two by its own `spread`, which cannot be captured: x and y are on the first
    optimizer    of `course_lib.optim`, or one of `torch.optim` that can be captured: with
                 ``capturable=True``, or SGD; for float16 and for a schedule with ``fused=True``
    loss         loss(output, target) -> a tensor of one number; 16-bit outputs come as float32
    precision    "float32", "tf32", or "bfloat16" and "float16" by autocast
    schedule     a function of the step's number (`train.schedules`), times each group's rate
    max_norm     to which the norm of all gradients together is clipped
    accumulate   parts into which a batch is divided for forward and backward pass; their gradients
                 are added up as of one batch. Batch normalisation sees parts
    scaler       a `torch.amp.GradScaler`; None: one for float16, none else
    measure      measure(output, target) -> a tensor, summed over the parts of a batch, such as
                 `right_answers`; found in `measured` after each step
    capture      False: the very same step, started kernel by kernel. None: captured on a GPU
    most_graphs  sizes of batches that are captured; further ones are not

    The first batch of each size is trained on without a graph, which makes the optimiser's states
    and loads the kernels; the second is captured. Capturing runs nothing: each step is made once.
    A graph holds what the network did then: after ``model.eval()`` on a part of it, or after a
    parameter has come to lie elsewhere, call `recapture`. Dropout draws its seeds from the device's
    generator, captured or not. Where PyTorch's process group is initialised, all its ranks make
    each step, and gradients are averaged over them, in the graph too; the loss is this rank's.
    Raises ValueError for what does not go together.
    """

    def __init__(
        self, model, optimizer, loss, *, precision="float32", schedule=None, max_norm=None,
        accumulate=1, scaler=None, measure=None, capture=None, most_graphs=MOST_GRAPHS,
    ):  # fmt: skip
        self.device, alone = _device_of(model, optimizer)
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be {', '.join(PRECISIONS)}, not {precision!r}")
        require_whole("accumulate", accumulate, 1)
        require_whole("most_graphs", most_graphs, 1)
        if max_norm is not None and not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, not {max_norm!r}")
        on_gpu = self.device.type == "cuda"
        able = on_gpu and alone and device.count() > 0
        self.capture = able if capture is None else bool(capture)
        if self.capture and not on_gpu:
            raise ValueError(f"a CUDA graph needs a GPU, and the model is on {self.device}")
        if self.capture and not alone:
            raise ValueError("a CUDA graph is of one GPU, and the model is on two: capture=False")
        scaler = scaler_for(self.device, precision, scaler)
        if self.capture:
            fault = why_not_captured(optimizer, scaler.is_enabled(), schedule is not None)
            if fault is not None:
                raise ValueError(f"{fault}; or train with capture=False")
        self.model, self.optimizer, self.most_graphs = model, optimizer, most_graphs
        self.rates = Rates(optimizer, schedule, self.device, on_gpu and takes_tensors(optimizer))
        self.train_step = Step(
            model, optimizer, loss, precision=precision, scaler=scaler, max_norm=max_norm,
            accumulate=accumulate, measure=measure, capture=self.capture,
        )  # fmt: skip
        self.steps, self.measured = 0, None
        self.graphs, self.seen, self.pool = {}, set(), None
        self.stream = torch.cuda.Stream(self.device) if self.capture else None
        self.looks = None  # of the samples: shapes without their number, and dtypes

    @property
    def scaler(self):
        """The `torch.amp.GradScaler`."""
        return self.train_step.scaler

    def __call__(self, x, y):
        return self.step(x, y)

    def step(self, x, y):
        """One step of training on a batch; its loss, a float32 tensor on the device.

        x, y  a tensor, or a tuple of several: the model is called as ``model(*x)`` and the loss as
              ``loss(output, *y)``. On the model's device

        On a GPU the loss, and `measured`, lie where the next step writes: `clone` what must last.
        Raises ValueError for a batch on another device, or whose samples look otherwise than those
        of the first; TrainingError where memory does not suffice; RuntimeError, with the line that
        is at fault, for a step that cannot be captured. Then no step has been made.
        """
        inputs, targets = _listed(x, "x"), _listed(y, "y")
        looks = self._require_fitting(inputs, targets)
        if self.rates.set(self.steps):
            self.graphs.clear()  # which hold the rate as a plain number
        kept = self._captured(inputs, targets)
        if kept is None:
            loss, self.measured = self._uncaptured(inputs, targets)
        else:
            for mine, given in zip(kept.inputs + kept.targets, inputs + targets, strict=True):
                mine.copy_(given, non_blocking=True)
            kept.graph.replay()
            loss, self.measured = kept.loss, kept.measured
        self.steps, self.looks = self.steps + 1, looks
        return loss

    @torch.no_grad()
    def evaluate(self, batches):
        """What the model makes of `batches` of (x, y), in evaluation mode and without a step.

        {"loss": the mean over all samples, "samples": how many, "measured": the sum of what
        `measure` found, a tensor, or None}. Raises ValueError for no samples.
        """
        modes = [(module, module.training) for module in self.model.modules()]
        n, losses, measured = [], [], None
        self.model.eval()
        try:
            with arithmetic(self.train_step.precision):
                for x, y in batches:
                    inputs, targets = _listed(x, "x"), _listed(y, "y")
                    _require_on(self.device, inputs, targets)
                    loss, found = self.train_step.of(inputs, targets)
                    n.append(len(inputs[0]))
                    losses.append(loss)
                    measured = found if measured is None else measured + found
        finally:
            for module, training in modes:
                module.training = training
        if sum(n) == 0:
            raise ValueError("there are no samples to evaluate on")
        mean = torch.stack(losses).cpu().double() @ torch.tensor(n).double() / sum(n)
        return {"loss": mean.item(), "samples": sum(n), "measured": measured}

    def recapture(self):
        """Give up the graphs: each size of batch is captured anew."""
        self.graphs.clear()
        self.seen.clear()
        self.train_step.began = False

    def state_dict(self):
        """Everything that the next steps depend on, so that a resumed run makes the same ones."""
        optimizer, rates = self.optimizer.state_dict(), self.rates.of_groups()
        groups = zip(optimizer["param_groups"], rates, strict=True)
        optimizer["param_groups"] = [group | {"lr": rate} for group, rate in groups]
        found = (
            self.model.state_dict(), optimizer, self.scaler.state_dict(), self.steps, rates,
            random_state(self.device),
        )  # fmt: skip
        return dict(zip(STATE, found, strict=True))

    def load_state_dict(self, state):
        """Go on where `state` was taken. Raises ValueError for another model's, and changes nothing
        then."""
        self._require_same(state)
        self.optimizer.load_state_dict(state["optimizer"])
        self.model.load_state_dict(state["model"])
        self.scaler.load_state_dict(state["scaler"])
        self.rates.restore(state["rates"])
        self.steps = state["steps"]
        set_random_state(state["random"], self.device)
        self.recapture()  # the optimiser's states are new tensors

    # ---- how a step is made ----------------------------------------------------------------

    def _uncaptured(self, inputs, targets):
        looks, step = _looks(inputs, targets), self.train_step
        # The first time, what goes wrong is most often the network's fault: all is put back.
        first = not (step.began and looks in self.seen)
        before = self._moved_by_forward() if first else None
        try:
            found = self._on_stream(inputs, targets)
        except BaseException as error:
            step.forget()
            if first:
                self._put_back(before)
            if memory.is_about_memory(error):
                self._tell(error, inputs)
            raise
        if step.began:
            self.seen.add(looks)
        return found

    def _moved_by_forward(self):
        """What a forward pass changes: copies of the buffers, and where the generators stand."""
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        return buffers, random_state(self.device)

    @torch.no_grad()
    def _put_back(self, before):
        for buffer, kept in zip(self.model.buffers(), before[0], strict=True):
            buffer.copy_(kept)
        set_random_state(before[1], self.device)

    def _on_stream(self, inputs, targets):
        """On the stream that is captured later, where autograd will look for what it knows."""
        if self.stream is None:
            return self.train_step(inputs, targets)
        current = torch.cuda.current_stream(self.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            found = self.train_step(inputs, targets)
        current.wait_stream(self.stream)
        return found

    def _captured(self, inputs, targets):
        """The graph for such a batch; None where it is to be trained on without."""
        if not self.capture:
            return None
        looks = _looks(inputs, targets)
        kept = self.graphs.get(looks)
        if kept is None and looks in self.seen and len(self.graphs) < self.most_graphs:
            kept = self.graphs[looks] = self._note(inputs, targets)
        return kept

    def _note(self, inputs, targets):
        """Note a step's launches in a graph. Nothing runs."""
        inputs, targets = ([t.detach().clone() for t in given] for given in (inputs, targets))
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        # Other threads, such as those that load images, may allocate memory meanwhile.
        options = dict(pool=self.pool, stream=self.stream, capture_error_mode="thread_local")
        try:
            with (
                torch.cuda.device(self.device), filled_later(self.train_step.parameters),
                captured(graph, **options),
            ):  # fmt: skip
                loss, measured = self.train_step(inputs, targets)
        except BaseException as error:
            self.train_step.forget()
            told = None if memory.is_about_memory(error) else _why(error)
            if told is None:
                self._tell(error, inputs)
            if not isinstance(error, RuntimeError):  # not CUDA's, but the step's own
                raise
            raise RuntimeError(told) from error
        return Captured(graph, inputs, targets, loss, measured)

    def _tell(self, error, inputs):
        """Raise TrainingError about memory."""
        told = memory.sentence(str(error), {"batch_size": len(inputs[0])})
        traceback.clear_frames(error.__traceback__)  # which hold the tensors that fill the memory
        gc.collect()
        raise memory.TrainingError(told) from None

    # ---- what is refused -------------------------------------------------------------------

    def _require_fitting(self, inputs, targets):
        _require_on(self.device, inputs, targets)
        n = len(inputs[0])
        if n == 0:
            raise ValueError("the batch is empty")
        for name, tensors in (("x", inputs), ("y", targets)):
            for tensor in tensors:
                if tensor.dim() and len(tensor) != n:
                    raise ValueError(
                        f"x has {n} samples, and {name} also a tensor of {tuple(tensor.shape)}"
                    )
        looks = [(t.dtype, tuple(t.shape[1:]), t.dim()) for t in (*inputs, *targets)]
        if self.looks not in (None, looks):
            told = f"{_said(self.looks)}, as at first, not {_said(looks)}"
            raise ValueError(f"samples must be {told}")
        return looks

    def _require_same(self, state):
        lacking = [name for name in STATE if name not in state]
        if lacking:
            raise ValueError(f"the state lacks {', '.join(lacking)}: it is no GraphTrainer's")
        mine = self.model.state_dict()
        theirs = state["model"]
        names = [
            name for name in mine.keys() | theirs.keys()
            if getattr(mine.get(name), "shape", None) != getattr(theirs.get(name), "shape", None)
        ]  # fmt: skip
        if names:
            told = ", ".join(sorted(names)[:5])
            raise ValueError(f"the state is of another model: {told} differ")
        if len(state["rates"]) != len(self.optimizer.param_groups):
            raise ValueError(
                f"the state is of an optimiser of {len(state['rates'])} groups, not of "
                f"{len(self.optimizer.param_groups)}"
            )
        if bool(state["scaler"]) != self.scaler.is_enabled():
            scaled = "was" if state["scaler"] else "was not"
            raise ValueError(f"the state {scaled} of a run with scaled gradients, unlike this one")


def right_answers(output, labels):
    """How many of the logits (N, classes) are largest at their label; to `measure`."""
    return (output.argmax(1) == labels).sum()


def _device_of(model, optimizer):
    """(The device of `model`, or the first of its two, whether all of it is there)."""
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    if not tensors:
        raise ValueError("the model has no parameters")
    places = {tensor.device for tensor in tensors.values()}
    spread = next((part.devices for part in model.modules() if hasattr(part, "spread")), ())
    if len(places) > 1 and places != set(spread):
        told = ", ".join(sorted(map(str, places)))
        raise ValueError(f"the model must lie on one device, and lies on {told}")
    place = spread[0] if len(places) > 1 else next(iter(places))
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.device not in places:
                raise ValueError(
                    f"the model is on {place}, and its optimiser has parameters on {p.device}: "
                    "make the optimiser after model.to(…)"
                )
    return place, len(places) == 1


def _listed(given, name):
    tensors = list(given) if isinstance(given, (tuple, list)) else [given]
    for tensor in tensors:
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a tensor or a tuple of them, not {type(tensor)}")
    if not tensors or name == "x" and tensors[0].dim() == 0:
        raise ValueError(f"{name} must have samples")
    return tensors


def _require_on(place, inputs, targets):
    for name, tensors in (("x", inputs), ("y", targets)):
        for tensor in tensors:
            if tensor.device != place:
                raise ValueError(f"{name} is on {tensor.device}, and the model on {place}")


def _looks(inputs, targets):
    return tuple((t.dtype, t.shape, t.stride()) for t in (*inputs, *targets))


def _said(looks):
    return ", ".join(f"{dtype} {shape}".removeprefix("torch.") for dtype, shape, _ in looks)


def _why(error):
    """What to say of an error while a step was captured: the line that it comes from."""
    # Where a capture is spoilt, its end raises another error.
    first = error
    while first.__context__ is not None:
        first = first.__context__
    place = traceback.extract_tb(first.__traceback__)[-1]
    reason = str(first).strip().partition("\n")[0]
    return (
        f"a CUDA graph cannot hold this step, because of {place.filename}, line {place.lineno}, "
        f"in {place.name}: `{place.line}` ({reason}). What reads a number from the GPU, or prints "
        "one, waits for it: leave it out, or train with capture=False. No step was made"
    )
