"""Activations: every rung, both directions, against float64."""

import contextlib
import functools
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tensors import PLACE, double
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import activation
from course_lib.runtime.host import arrays
from course_lib.runtime.host.arrays import ArrayError

OPERATIONS = list(activation.OPERATIONS.values())
VARIANTS = list(activation.relu.FORWARD)
# Half a unit in the last place of the output, and a few units of float32 arithmetic …
TOLERANCE = {torch.float32: 6e-7, torch.float16: 6e-4, torch.bfloat16: 4.5e-3}
# … and half the smallest float16; in float32, e⁻ˣ overflows where the result is below 1e-36.
FLOOR = {torch.float32: 1e-36, torch.float16: 3e-8, torch.bfloat16: 1e-36}

#: How much a rounding of x, or of what goes into an exponential, is magnified in y.
CONDITION = {"gelu": lambda x: 1 + x * x, "gelu_tanh": lambda x: 1 + np.abs(x) ** 3}
#: PyTorch's names.
PEERS = {
    "swish": F.silu, "hard_sigmoid": F.hardsigmoid, "hard_swish": F.hardswish,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
}  # fmt: skip

every_case = pytest.mark.parametrize("variant", VARIANTS)
every_operation = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.name)


def truth(operation, *inputs):
    suffix = "_backward" if len(inputs) == 2 else ""
    return getattr(reference, operation.name + suffix)(*map(double, inputs))


def assert_close(actual, expected, magnitude=None):
    """Equal to within TOLERANCE times `magnitude`, the size of the terms that were summed."""
    values = double(actual)
    magnitude = np.abs(expected) if magnitude is None else magnitude
    assert values.shape == expected.shape
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    finite = np.isfinite(expected)
    assert np.array_equal(values[~finite], expected[~finite], equal_nan=True)
    error = np.abs(values[finite] - expected[finite])
    limit = TOLERANCE[actual.dtype] * magnitude[finite] + FLOOR[actual.dtype]
    assert (error <= limit).all(), f"worst {np.max(error / limit):.3g} times the limit"


def check_forward(operation, y, x):
    expected = truth(operation, x)
    condition = CONDITION.get(operation.name, np.ones_like)(double(x))
    assert_close(y, expected, np.abs(expected) * condition)


def check_backward(operation, dx, dy, saved):
    # A gradient from x is a sum of terms that cancel: swish's near x = -1.28.
    terms = np.abs(double(dy)) * (1 + np.abs(double(saved))) if operation.saves == "x" else None
    assert_close(dx, truth(operation, dy, saved), terms)


def both_directions(operation, variant, x, dy):
    poison = torch.full_like(x, math.nan)
    y = operation.forward(x, variant=variant, out=poison)
    assert y is poison
    check_forward(operation, y, x)
    saved = x if operation.saves == "x" else y
    dx = operation.backward(dy, saved, variant=variant, out=torch.full_like(x, math.nan))
    check_backward(operation, dx, dy, saved)


@every_operation
@every_case
@settings(max_examples=12, deadline=None)
@given(
    shape=st.lists(st.integers(0, 9), max_size=4) | st.integers(1, 1500).map(lambda n: [n]),
    dtype=st.sampled_from(list(TOLERANCE)),
    scale=st.sampled_from([1e-3, 1.0, 30.0]),
    offset=st.sampled_from([0.0, -100.0, 100.0]),
    seed=st.integers(0, 2**31),
)
def test_random_shapes(operation, variant, shape, dtype, scale, offset, seed):
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(shape, generator=generator).mul(scale) for _ in range(2))
    both_directions(operation, variant, (x + offset).to(PLACE, dtype), dy.to(PLACE, dtype))


@every_operation
@every_case
def test_special_values(operation, variant):
    values = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-45, -1e-45, 88.0, -87.0, 1e4, -1e4, 3.0,
              -3.0, 6.0, 2.9999998, -2.9999998, -13.5]  # fmt: skip
    x = torch.tensor(values, device=PLACE, requires_grad=True)
    peer = PEERS.get(operation.name) or getattr(F, operation.name)
    ours = operation.forward(x.detach(), variant=variant)
    # One at a time: on a CPU, PyTorch's GELU of several numbers says NaN for inf, of one, inf.
    theirs = torch.cat([peer(each) for each in x.split(1)])
    assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6 if "gelu" in operation.name else 1e-44,
                          equal_nan=True)  # fmt: skip
    saved = x.detach() if operation.saves == "x" else ours
    dx = operation.backward(torch.full_like(ours, 2), saved, variant=variant)
    expected = torch.autograd.grad(theirs, x, torch.full_like(ours, 2))[0]
    assert torch.allclose(dx, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def test_gelu_keeps_its_digits_below_zero():
    """Where 1 + erf has few left: 30 % of them at -5."""
    x = torch.linspace(-12, -2, 101, device=PLACE)
    error = np.abs(double(activation.gelu.forward(x)) / truth(activation.gelu, x) - 1)
    assert error.max() < 2e-5 < np.abs(double(F.gelu(x)) / truth(activation.gelu, x) - 1).max()


def test_each_slope_has_kernels_of_its_own():
    x, dy = torch.randn(2, 70, device=PLACE)
    for slope in (0.2, 0.0, 1.5, -0.5):
        operation = activation.leaky_relu_of(slope)
        assert operation is activation.leaky_relu_of(slope)
        leaf = x.clone().requires_grad_()
        expected = F.leaky_relu(leaf, slope)
        assert torch.equal(operation.forward(x), expected)
        dx = operation.backward(dy, x)
        assert torch.equal(dx, torch.autograd.grad(expected, leaf, dy)[0])


@every_operation
def test_memory_formats(operation):
    x = torch.randn(2, 3, 5, 4, device=PLACE).to(memory_format=torch.channels_last)
    dy = torch.randn(2, 3, 5, 4, device=PLACE)  # lies in memory otherwise than x
    y = operation.forward(x)
    assert y.stride() == x.stride()
    check_forward(operation, y, x)
    saved = x if operation.saves == "x" else y
    check_backward(operation, operation.backward(dy, saved), dy, saved)
    for view in (x[:, :, ::2], x.expand(2, 3, 5, 4)[:, 1], x.mT, x[:1].expand(4, 3, 5, 4)):
        check_forward(operation, operation.forward(view), view)


SLICES = {
    "columns": lambda x: x[:, 1:-1], "halves": lambda x: x[:, 16:], "an end": lambda x: x[1:, :7],
    "every other": lambda x: x[:, ::2], "off a boundary": lambda x: x.flatten()[3:],
    "channels": lambda x: x.view(2, 2, 2, 4, 4).permute(0, 1, 4, 2, 3)[:, :, 1:3],
    "transposed": lambda x: x.mT[:9], "one": lambda x: x[3, 5], "none": lambda x: x[2:2, 1:],
}


@pytest.mark.parametrize("which, dtype", in_turns(list(SLICES), list(TOLERANCE)))
def test_slices(which, dtype, monkeypatch):
    """They are read where they lie, and what each thread reads and writes is its own."""
    x, dy = torch.randn(2, 4, 32, generator=torch.Generator().manual_seed(3)).to(PLACE, dtype)
    part = SLICES[which]
    for copied in ("dense", "laid_out_like"):
        monkeypatch.setattr(arrays, copied, lambda array, *_: array)
    with simulator.sanitize() if SIMULATED else contextlib.nullcontext() as report:
        for operation in (activation.gelu, activation.relu6):
            y = operation.forward(part(x))
            assert y.stride() == torch.empty_like(part(x)).stride()
            check_forward(operation, y, part(x))
            saved = part(x) if operation.saves == "x" else y
            for given in (part(dy), torch.empty_like(part(dy)).copy_(part(dy))):
                check_backward(operation, operation.backward(given, saved), given, saved)
    assert not SIMULATED or not report.findings, report


def test_errors_name_what_was_expected():
    with pytest.raises(ArrayError, match="x must be an array, not a list"):
        activation.relu.forward([1.0])


@pytest.mark.skipif(not SIMULATED, reason="NumPy arrays are for the simulator")
def test_read_only_arrays_in_the_simulator():
    x, frozen = np.ones((2, 3, 7), np.float32)
    frozen.flags.writeable = False
    with pytest.raises(ArrayError, match="out is read-only"):
        activation.sigmoid.forward(x, out=frozen)


@pytest.mark.gpu
@pytest.mark.gpu_memory(12)
@every_case
def test_more_than_two_billion_elements(variant):
    n = 2**31 + 13
    x = torch.empty(n, device=PLACE, dtype=torch.bfloat16).fill_(-1)
    x[-13:] = torch.arange(1, 14)
    y = activation.relu.forward(x, variant=variant)
    assert torch.equal(y[-14:].float().cpu(), torch.arange(14).float())
    assert y.count_nonzero() == 13
