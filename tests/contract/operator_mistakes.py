"""Wrong operators in place of `ops.relu`: each is rejected by the promise that is meant for it.

The operator is made as all are, by `registration.Operator`. Without a fault it keeps every promise;
each of `MISTAKES` is one fault, of the operator or of the function that calls it.
"""

import contextlib
import functools
from unittest import mock

import torch
from contract.operators import SUBJECTS, Held

from course_lib import ops
from course_lib.kernels import activation
from course_lib.ops import checks, registration, tracing

#: What is wrong -> the promise that rejects it.
MISTAKES = {
    "numbers below zero pass": "values",
    "the result lies in memory otherwise": "values",
    "the gradient is doubled": "values",
    "the result is a view": "writable",
    "narrow numbers become float32": "dtypes",
    "a single number is refused": "ways_to_call",
    "gradients are read in the order of memory": "layouts",
    "an expanded gradient counts for nothing": "layouts",
    "NaN becomes zero": "extreme_numbers",
    "the result depends on the call": "bits",
    "no kernel is launched": "our_kernels",
    "no kernel is launched backward": "our_kernels",
    "None is taken": "refused",
    "integers are refused without a word": "worded",
    "a gradient of another shape is taken": "direct_calls",
    "the second gradient is zero": "second_gradients",
    "the second gradient is refused without a name": "second_gradients",
    "forward mode is ignored": "transforms",
    "the result forgets where it is from": "needed",
    "the result always requires a gradient": "recording",
    "the fake has another type": "opcheck",
    "the fake has another shape": "opcheck",
    "the fake lies in memory otherwise": "opcheck",
    "the input is written to": "opcheck",
    "the result is the input": "opcheck",
    "the graph breaks": "compiled",
    "a compiled call gives something else": "compiled",
    "samples are swapped": "mapped",
    "samples are called one by one": "mapped",
    "autocast narrows what PyTorch leaves": "autocast",
    "a proxy is computed with": "traced",
    "the short way gives something else": "dispatched",
    "a Mac has none": "on_a_mac",
}
ON_A_GPU = {
    "another stream is used": "streams",
    "a graph keeps the first numbers": "captured",
    "the host waits": "unwaiting",
    "PyTorch's kernels are launched": "alone",
}


def _forward(fault, calls, x):
    if fault == "narrow numbers become float32":
        x = x.float()
    if fault == "a single number is refused" and not x.dim():
        raise RuntimeError("too small")
    if fault == "integers are refused without a word" and not x.is_floating_point():
        raise TypeError("no")
    if fault == "a graph keeps the first numbers":
        calls.append(activation.relu.forward(x))
        return calls[0].clone() if torch.cuda.is_current_stream_capturing() else calls[-1]
    if fault in ("no kernel is launched", "PyTorch's kernels are launched"):
        return torch.relu(x)
    if fault == "numbers below zero pass":
        return x.clone()
    aside = fault == "another stream is used"
    with torch.cuda.stream(torch.cuda.Stream()) if aside else contextlib.nullcontext():
        y = activation.relu.forward(x)
    if fault == "NaN becomes zero":
        y = y.nan_to_num(0.0, torch.inf)
    if fault == "the result depends on the call":
        calls.append(1)
        y = y + len(calls)
    if fault == "the input is written to":
        x.mul_(2)
    if fault == "the host waits":
        y.sum().item()
    if fault == "the result lies in memory otherwise" and x.dim() > 1:
        y = y.transpose(0, 1).contiguous().transpose(0, 1)
    return x if fault == "the result is the input" else y


def _backward(fault, dy, y):
    if fault == "no kernel is launched backward":
        return dy * (y > 0)
    if fault == "the gradient is doubled":
        dy = 2 * dy
    if fault == "gradients are read in the order of memory" and dy._is_view() and dy.dim() > 1:
        dy = dy.as_strided(dy.shape, torch.empty(dy.shape).stride(), 0) if _fits(dy) else dy
    if fault == "an expanded gradient counts for nothing" and 0 in dy.stride():
        return torch.zeros_like(y)
    if fault == "a gradient of another shape is taken" and dy.shape != y.shape:
        dy = dy.reshape(-1)[:1].expand(y.shape)
    return activation.relu.backward(dy, y)


def _fits(x):
    return x.untyped_storage().nbytes() >= x.numel() * x.element_size()


def _fake(fault, x):
    if fault == "the fake has another type":
        return torch.empty_like(x, dtype=torch.float64)
    if fault == "the fake has another shape":
        return x.new_empty((*x.shape, 1))
    if fault == "the fake lies in memory otherwise":
        return x.new_empty(tuple(reversed(x.shape))).permute(*reversed(range(x.dim())))
    return torch.empty_like(x)


def _second(fault):
    """The gradient of the gradient; None for that of all operators, which refuses."""

    def refuse(ctx, *_):
        raise RuntimeError("no")

    return {
        "the second gradient is zero": lambda ctx, g: (torch.zeros_like(g), None),
        "the second gradient is refused without a name": refuse,
    }.get(fault)


class _Forwards(registration.Operator):
    """Says nothing of forward mode."""

    def no_jvp(self, ctx, *_):
        return None


def _registered(number, fault):
    """The operator with this fault."""
    impl, name = registration._library.impl, f"planted_{number}"

    def without_a_mac(name, function, place, **options):
        return None if place == "MPS" else impl(name, function, place, **options)

    check = None if fault == "a gradient of another shape is taken" else (
        lambda dy, y: checks.require(dy, "grad_output", shape=y.shape, dtypes=(y.dtype,))
    )  # fmt: skip
    vmap = {
        "samples are called one by one": None,
        "samples are swapped": lambda info, in_dims, x: (forward(x.flip(in_dims[0])), in_dims[0]),
    }.get(fault, lambda info, in_dims, x: (forward(x), in_dims[0]))
    kind = _Forwards if fault == "forward mode is ignored" else registration.Operator
    chosen = without_a_mac if fault == "a Mac has none" else impl
    with mock.patch.object(registration._library, "impl", chosen):
        backward = registration.Operator(
            f"{name}_backward", "(Tensor grad_output, Tensor y) -> Tensor",
            kernel=lambda dy, y: _backward(fault, dy, y), on_cpu=lambda dy, y: dy * (y > 0),
            fake=lambda dy, y: torch.empty_like(y), check=check, title="PlantedBackward",
            gradient=_second(fault),
        )  # fmt: skip
        forward = kind(
            name, "(Tensor x) -> Tensor", kernel=functools.partial(_forward, fault, []),
            on_cpu=torch.relu, fake=lambda x: _fake(fault, x), title="Planted", vmap=vmap,
            save=lambda ctx, inputs, y: ctx.save_for_backward(y),
            gradient=lambda ctx, dy: backward(dy, *ctx.saved_tensors),
            autocast=registration.in_autocast(1) if fault.startswith("autocast") else None,
        )  # fmt: skip
    return forward


@functools.cache
def _relu(fault):
    """`ops.relu` with this fault."""
    forward = _registered(["", *MISTAKES, *ON_A_GPU].index(fault), fault)

    def relu(input, inplace=False):
        if fault == "None is taken" and input is None:
            return None
        if fault == "the graph breaks" and float(input.sum()) == 0.1:
            return input
        y = forward(input)
        if fault == "a compiled call gives something else" and torch.compiler.is_compiling():
            y = y + 1
        if fault == "the short way gives something else" and registration.dispatcher_is_idle():
            y = y + 1
        if fault == "the result is a view":
            y = y.view(y.shape)
        if fault == "the result forgets where it is from":
            y = y.detach()
        if fault == "the result always requires a gradient":
            y = y.detach().requires_grad_()
        return y

    return relu if fault == "a proxy is computed with" else tracing.traceable(relu)


@contextlib.contextmanager
def planted(fault=""):
    """In this block `ops.relu` has this fault, or is right; what is held to the promises."""
    subject = next(subject for subject in SUBJECTS if subject.label == "relu")
    with mock.patch.object(ops, "relu", _relu(fault)):
        yield Held(subject)
