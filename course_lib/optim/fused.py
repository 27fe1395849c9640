"""What our optimisers have in common: which tensors go where, and what a step remembers.

A step must find every parameter's gradient and states, because any of them may be a new tensor.
What it need not do again, where all look and parameters and states lie as in an earlier step, is to
check them, and to write their addresses into the GPU's memory: what was `Seen` is kept for each set
of tensors. Gradients are made anew in every step, and may lie elsewhere each time: then their
addresses alone are written again.
"""

import functools

import torch

from course_lib.ops.registration import simulate_on_cpu
from course_lib.optim.seen import Seen
from course_lib.runtime.host.arrays import is_dense, laid_out_like

_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
MOST_TABLES = 32  # of an optimiser; past it, all are filled anew


class Fused:
    """Comes before an optimiser of `torch.optim` among the bases of one on our kernels.

    The class says what PyTorch's is (`theirs`) and how parameters are updated (`_kind`, `_update`).
    On the CPU and on MPS, a step is PyTorch's own.

    A GradScaler leaves two numbers on the optimiser, as on PyTorch's fused ones: `grad_scale`, by
    which gradients are then divided, and `found_inf`, which stops the step where it is not 0. Both
    are read on the GPU, so that the host need not wait and a captured CUDA graph may hold the step.
    """

    theirs = None
    # Whether a GradScaler leaves its numbers here. On the CPU, it looks at them itself.
    _step_supports_amp_scaling = property(
        lambda self: self._on_our_kernels(), lambda self, value: None
    )

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
        parameters, gradients = [], []
        for p in group["params"]:
            if (gradient := p.grad) is not None:
                parameters.append(p)
                gradients.append(gradient)
        strided = all([gradient.layout is torch.strided for gradient in gradients])
        scale = self._of_scaler("grad_scale")
        if strided and gradients and scale is not None:
            with torch.no_grad():
                torch._foreach_div_(gradients, scale.to(gradients[0].device))
        if not (strided and self._step_again(group, parameters, gradients)):
            self._step_anew(group, parameters, gradients)

    def _step_again(self, group, parameters, gradients):
        """Make the step, if one has been made with such tensors; whether it has been made."""
        state = self.state
        try:
            own = [state[p] for p in parameters]
            states = [[of_one[name] for of_one in own] for name in self._names(group)]
            key = key_of(parameters, gradients, states)
        except (KeyError, AttributeError):  # a state is missing, or is None
            return False
        tables, _ = self._known()
        seen = tables.get(key)
        if seen is None:
            return False
        if _is_captured(parameters[0]):
            if seen.addresses != [gradient.data_ptr() for gradient in gradients]:
                return False
            del tables[key]  # the graph will read these addresses, whatever later steps write down
        self._run(seen, group, parameters, gradients, states)
        return True

    @torch.no_grad()
    def _step_anew(self, group, parameters, gradients):
        buckets = {}
        for p, gradient in zip(parameters, gradients, strict=True):
            if not self._is_plain(p, gradient):
                self._check(p, gradient)
                if gradient.stride() != p.stride():
                    gradient = laid_out_like(gradient, p)
            of_kind = buckets.setdefault(self._kind(p, group), ([], []))
            of_kind[0].append(p)
            of_kind[1].append(gradient)
        for kind, of_kind in buckets.items():
            self._update(group, kind, *of_kind)

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

    def _names(self, group):
        """The states of a parameter."""
        raise NotImplementedError

    def _kind(self, p, group):
        """Parameters of which this differs are updated apart: their device, and more.

        Makes the states that are missing.
        """
        raise NotImplementedError

    def _numbers(self, group):
        """Numbers that the group's launches depend on."""
        raise NotImplementedError

    def _launch(self, group, parameters, gradients, states, **options):
        """Launch the kernels; `options` are the launcher's."""
        raise NotImplementedError

    def _update(self, group, kind, parameters, gradients):
        states = [self._states(parameters, name) for name in self._names(group)]
        self._run_new(group, parameters, gradients, states)

    def _run_new(self, group, parameters, gradients, states, **options):
        if _is_captured(parameters[0]):  # the table is filled as the graph is replayed
            self._run(Seen(), group, parameters, gradients, states, **options)
            return
        tables, _ = self._known()
        key = key_of(parameters, gradients, states)
        seen = tables.get(key) or Seen()
        self._run(seen, group, parameters, gradients, states, **options)
        if len(tables) >= MOST_TABLES:
            tables.clear()
        tables[key] = seen

    def _run(self, seen, group, parameters, gradients, states, **options):
        p = parameters[0]
        if (found_inf := self._of_scaler("found_inf")) is not None:
            options["found_inf"] = found_inf.to(p.device)
        if _is_captured(p):
            self._known()[1].append(seen)  # whose table the graph reads
        launcher = functools.partial(self._launch, group, parameters, gradients, states, **options)
        addresses = [gradient.data_ptr() for gradient in gradients]
        numbers = *self._numbers(group), *options.values()
        seen.run(launcher, addresses, numbers, p.get_device())
        # PyTorch doesn't see what a kernel writes; it checks that where gradients depend on it.
        torch.autograd.graph.increment_version(parameters)

    def _known(self):
        """({key: what was `Seen`}, those that graphs need, as long as there is this optimiser)."""
        return self.__dict__.setdefault("_tables", ({}, []))

    def _of_scaler(self, name):
        """A number that a GradScaler has left; None without one, which also asks for it."""
        return self.__dict__.get(name)

    def _refuse_capture(self, p):
        if p.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"the first step of course_lib's {type(self).__name__} makes its states, and must "
                "come before a CUDA graph is captured: replays would make them again"
            )

    def _states(self, parameters, name):
        """The states of this name, in their parameters' memory layout."""
        found = []
        for p in parameters:
            state = self.state[p]
            tensor = state[name]
            is_plain = p.is_contiguous() and tensor.is_contiguous()
            if tensor.dim() and not is_plain:  # a count of steps has no layout
                tensor = state[name] = laid_out_like(tensor, p)
            found.append(tensor)
        return found


def _is_captured(p):
    return p.is_cuda and torch.cuda.is_current_stream_capturing()


def key_of(parameters, gradients, states):
    """What the tensors look like, and where all but the gradients lie."""
    lists = parameters, *states
    return (
        *[x.data_ptr() for tensors in lists for x in tensors],
        *[
            (p.dtype, p.shape, p.stride(), gradient.dtype, gradient.stride())
            for p, gradient in zip(parameters, gradients, strict=True)
        ],
    )


def rate(lr, p):
    """A learning rate as the kernels take it: a float, or what lies on p's device."""
    if not isinstance(lr, torch.Tensor):
        return lr
    if lr.device != p.device:
        return lr.item() if lr.device.type == "cpu" else lr.to(p.device, torch.float32)
    return lr if lr.dtype is torch.float32 else lr.float()
