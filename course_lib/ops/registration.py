"""How a pair of kernels becomes a PyTorch operator; the one mechanism, used by every file here.

An `Operator` is registered as ``torch.ops.course_lib.<name>``: a schema, a fake implementation (so
that torch.compile traces it without a graph break), a gradient and a place in autocast, and an
implementation for each kind of tensor:

* on a GPU, our kernels;
* on the CPU and on MPS, PyTorch's own operator, so that a network runs without an NVIDIA GPU;
* on the CPU under ``COURSE_LIB_SIMULATOR=1``, our kernels in the simulator.

What does not go together is refused before anything runs, with PyTorch's own type of error: also
where the implementation by PyTorch is an inner function that no longer looks (`torch.native_…`
writes past the end of what is too short). Launchers of kernels look for themselves, once for each
kind of call where the launch cache has them; `check` then only says in PyTorch's words what they
refused.

PyTorch's dispatcher takes longer to call an operator written in Python than a GPU takes for a small
one. It is there for those who want a say in the call: torch.compile, vmap, modes, subclasses of
Tensor. Where there is nobody of them, `Operator.__call__` calls the implementation itself, after
what autocast asks for, and records the same node for autograd. (A profiler then shows the kernel
alone, without an operator around it.) What it costs either way: notebook 04.
"""

import functools
import os

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling

from course_lib.ops import checks
from course_lib.runtime.host.device import SIMULATOR_VARIABLE

_C = torch._C
_dispatch_keys = _C._dispatch_keys
_library = torch.library.Library("course_lib", "DEF")
#: Whether tensors on the CPU go to our kernels, in the simulator.
simulate_on_cpu = os.environ.get(SIMULATOR_VARIABLE) == "1"
_FLOATS = (torch.float32, torch.float16, torch.bfloat16)
#: {operator: what computes the same by operators of PyTorch's}, for programs that know only those.
DECOMPOSITIONS = {}
_PLAIN_TYPES = frozenset((torch.Tensor, torch.nn.Parameter))


def plain_keys(backend):
    """The dispatch keys of tensors on `backend` ("CUDA") with nothing unusual about them.

    First of a common one, then of one made in inference mode. Those of a sparse, conjugated,
    negated or vmapped one, or of one of another device, differ.
    """

    def key(name):
        return _C.DispatchKeySet(getattr(_C.DispatchKey, name))

    inference = key(backend) | key(f"Autocast{backend}")
    return inference | key("ADInplaceOrView") | key(f"Autograd{backend}"), inference


@functools.cache
def _autocast_key(device_type):
    return _C.DispatchKeySet(getattr(_C.DispatchKey, "Autocast" + device_type.upper()))


_direct_keys, _direct_type = plain_keys("CUDA"), "cuda"
#: What implementations run without: see `gradient_by_torch`.
_excluded_keys = _C._dispatch_tls_local_exclude_set()  # autocast's, where it is off
with _C._AutoDispatchBelowAutograd():
    _autograd_keys = _C._dispatch_tls_local_exclude_set() - _excluded_keys


def dispatcher_is_idle():
    """Whether nobody but autocast wants a say in calls on plain tensors, in this thread and now."""
    return not (
        is_dynamo_compiling()  # first: torch.compile stops reading here
        or _C._len_torch_dispatch_stack()  # FakeTensorMode, make_fx, a user's own mode
        or _C._len_torch_function_stack()  # TorchFunctionMode, torch.set_default_device
        or _C._are_functorch_transforms_active()  # vmap, grad, jvp
        or _C._is_tracing()  # torch.jit.trace
        or forward_ad._current_level >= 0
    )


class Operator:
    """``torch.ops.course_lib.<name>``, called as a function of its arguments, all positional.

    name      also the name of the node it leaves in autograd's graph
    schema    its arguments and results, as `torch.library.Library.define` takes them; tensors first
    kernel    the implementation on our kernels
    on_cpu    the implementation by PyTorch, for MPS too
    fake      shapes, dtypes and devices of the results, computed from such
    check     check(*inputs) raises what PyTorch raises for inputs that do not go together; without
              it they may be of any shape. That they are on one device is always checked
    on_host   names of the tensors that are on the CPU wherever the others are
    save      save(ctx, inputs, outputs) keeps what the gradient needs
    gradient  gradient(ctx, *grad_outputs) returns a gradient, or None, for each input; what has no
              gradient itself, as all outputs but the first, has None. Without it the operator is
              itself a gradient, and differentiating it again is refused
    title     what its node in the graph is called
    autocast  {device type: function of the inputs that returns those to compute with instead}
    vmap      vmap(info, in_dims, *inputs) as `torch.library.register_vmap` takes it; without it
              torch.vmap calls the operator for one sample after another, and warns
    tags      of `torch.Tag`
    """

    def __init__(
        self, name, schema, *, kernel, on_cpu, fake, title, check=None, on_host=(),
        save=None, gradient=None, autocast=None, vmap=None, tags=(),
    ):  # fmt: skip
        self.name, self._check, self._on_host = name, check, on_host
        self.kernel = self._explained(kernel)
        _library.define(f"{name}{schema}", tags=tags)
        self.overload = getattr(torch.ops.course_lib, name).default
        arguments = self.overload._schema.arguments
        self.tensors = slice(sum("Tensor" in str(argument.type) for argument in arguments))
        self._names = [argument.name for argument in arguments[self.tensors]]
        self._needed = [a.name for a in arguments[self.tensors] if str(a.type) == "Tensor"]
        DECOMPOSITIONS[self.overload] = on_cpu
        on_cpu = self._checked(on_cpu)
        _library.impl(name, self.kernel, "CUDA")
        _library.impl(name, self.kernel if simulate_on_cpu else on_cpu, "CPU")
        _library.impl(name, on_cpu, "MPS")
        torch.library.register_fake(f"course_lib::{name}", self._checked(fake), lib=_library)
        self._function = _autograd_function(title, save, gradient or self._refuse, self.no_jvp)
        # Function.apply sees to functorch; where `dispatcher_is_idle` there is none.
        self._record = super(torch.autograd.Function, self._function).apply
        _library.impl(name, self._below_autograd, "Autograd")
        self._converted = autocast or {}
        for device_type, converted in self._converted.items():
            self._register_autocast(device_type, converted)
        if vmap is not None:
            torch.library.register_vmap(f"course_lib::{name}", vmap, lib=_library)

    def __call__(self, *inputs):
        if not dispatcher_is_idle():
            return self.overload(*inputs)
        records = False
        for x in inputs[self.tensors]:
            if type(x) in _PLAIN_TYPES and _dispatch_keys(x) in _direct_keys:
                records = records or x.requires_grad
            elif x is not None:
                return self.overload(*inputs)
        call = self.kernel
        if records and torch.is_grad_enabled():
            call = functools.partial(self._record, self.kernel)
        if _C._is_any_autocast_enabled() and _C.is_autocast_enabled(_direct_type):
            if (converted := self._converted.get(_direct_type)) is not None:
                with _C._ExcludeDispatchKeyGuard(_autocast_key(_direct_type)):
                    return call(*converted(*inputs))
        return call(*inputs)

    def _explained(self, kernel):
        """`kernel`, which raises what PyTorch would where `check` refuses the same inputs."""

        def call(*inputs):
            try:
                return kernel(*inputs)
            except Exception:
                try:
                    self._require(inputs)
                except Exception as same:
                    raise same from None
                raise

        return call

    def _checked(self, implementation):
        def call(*inputs):
            self._require(inputs)
            return implementation(*inputs)

        return call

    def _require(self, inputs):
        tensors = dict(zip(self._names, inputs, strict=False))
        for name in self._needed:
            checks.require_tensor(tensors[name], name)
        checks.require_one_device({k: x for k, x in tensors.items() if k not in self._on_host})
        if self._check is not None:
            self._check(*inputs)

    def _register_autocast(self, device_type, converted):
        below = _autocast_key(device_type)

        def convert(*inputs):
            with _C._ExcludeDispatchKeyGuard(below):
                return self.overload(*converted(*inputs))

        _library.impl(self.name, convert, "Autocast" + device_type.upper())

    def _below_autograd(self, *inputs):
        if _C._are_functorch_transforms_active():
            raise RuntimeError(
                f"course_lib.{self.name} can't be transformed by torch.func (grad, jvp, vjp ...): "
                "use backward or torch.autograd.grad, or the function of torch.nn.functional"
            )
        return self._function.apply(self._dispatched, *inputs)

    def _dispatched(self, *inputs):
        with _C._AutoDispatchBelowAutograd():
            return self.overload(*inputs)

    def _refuse(self, ctx, *_):
        name = self.name.removesuffix("_backward")
        raise RuntimeError(f"course_lib.{name} has no second derivative; torch.nn.functional's has")

    def no_jvp(self, ctx, *_):
        raise NotImplementedError(
            f"course_lib.{self.name} has no forward-mode derivative; torch.nn.functional's has"
        )


def _autograd_function(title, save, gradient, jvp):
    """The node of autograd's graph. Its first argument is what computes the outputs.

    An output without a gradient, such as what only the backward pass reads, is not given one of
    zeros: autograd would launch a kernel to fill it.
    """

    def forward(ctx, implementation, *inputs):
        outputs = implementation(*inputs)
        ctx.set_materialize_grads(False)
        if save is not None:
            save(ctx, inputs, outputs)
        return outputs

    def backward(ctx, *grad_outputs):
        if all(each is None for each in grad_outputs):
            return (None,) * len(ctx.needs_input_grad)
        found = gradient(ctx, *grad_outputs)
        return (None, *found) if isinstance(found, tuple) else (None, found)

    # Made by a call, because what the graph shows is the name that the class is made with.
    methods = dict(forward=forward, backward=backward, jvp=jvp)
    methods = {name: staticmethod(method) for name, method in methods.items()}
    return type(torch.autograd.Function)(title, (torch.autograd.Function,), methods)


def gradient_by_torch(function, x, grad_output):
    """The gradient by `x` that PyTorch's autograd finds for ``function(x)``, in an `on_cpu`."""
    return gradients_by_torch(function, (x,), grad_output)[0]


def gradients_by_torch(function, inputs, grad_outputs):
    """Those by all of `inputs` that PyTorch's autograd finds for ``function(*inputs)``.

    Implementations run below autograd; its keys are taken in again, and gradients recorded. What
    autocast would convert, the forward pass has.
    """
    included = _C._dispatch_tls_local_include_set()
    excluded = _C._dispatch_tls_local_exclude_set() - _autograd_keys
    excluded = excluded | _autocast_key(inputs[0].device.type)
    with _C._ForceDispatchKeyGuard(included, excluded), torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in inputs]
        return torch.autograd.grad(function(*leaves), leaves, grad_outputs, materialize_grads=True)


def require_floating_point(name, dtype, *more):
    """Raise what PyTorch would, where `dtype` is none that kernels take and none of `more`."""
    if dtype not in _FLOATS and dtype not in more:
        spelling = torch.empty((), dtype=dtype).type().removeprefix("torch.").removesuffix("Tensor")
        raise NotImplementedError(
            f'"{name}" not implemented for {spelling!r}: expected {", ".join(map(str, _FLOATS))}; '
            "convert it first"
        )


def in_autocast(n):
    """`autocast` of an operator whose first `n` arguments are to be of autocast's dtype."""

    def of(device_type):
        def converted(*inputs):
            dtype = torch.get_autocast_dtype(device_type)
            return *(_eligible(x, dtype) for x in inputs[:n]), *inputs[n:]

        return converted

    return {device_type: of(device_type) for device_type in ("cuda", "cpu")}


def as_float32(x):
    """What autocast makes of an argument that it wants in float32."""
    return _eligible(x, torch.float32)


def _eligible(x, dtype):
    if x is None or not x.is_floating_point() or x.dtype is torch.float64:
        return x
    return x.to(dtype)
