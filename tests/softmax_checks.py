"""How far a softmax is from float64, and PyTorch's; how short rows can take any path.

Errors are measured against the size of what a row is made of, its *scale*:

              forward                       backward
softmax       the row's largest y           max |y| · max |dy|
log-softmax   the row's largest |y|         max |dy| · max(1, √n · max exp(y))

The last is the size of dy and of exp(y)·Σ dy before anything cancels: partial sums of n numbers of
either sign grow like √n.

float32 is held to BOUND, and to 1.5 times PyTorch's own largest error on the same input. That may
be 0, by luck or because rows have one element, so FLOOR is allowed in any case, two units in the
last place of the scale: exponential, sum and division each round, and none is right in every last
digit. For float16 and bfloat16 the same BOUND holds beyond the one rounding to
the dtype, half a unit in the last place; so a result is PyTorch's, or its neighbour where
the truth lies within BOUND of the middle between the two.
"""

import contextlib
import math
from unittest import mock

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, reference
from course_lib.kernels import operation, softmax
from course_lib.kernels.blocks import row_plan
from course_lib.kernels.softmax import plan

PLACE = "cpu" if SIMULATED else "cuda"
OPERATIONS = list(softmax.OPERATIONS.values())
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BOUND, FLOOR, TIMES_PYTORCH = 1e-6, 2**-22, 1.5
# log2 of 1/(unit in the last place of 1), and of the smallest number above 0
FRACTION_BITS = {torch.float16: (10, -24), torch.bfloat16: (7, -133)}
CANARY, N_CANARIES = 7.0, 32

both = pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)


def check(operation, x, dy, variant, start=0):
    """Both directions of `operation` against float64 and PyTorch: (y, dx).

    `start` moves the results off their 16-byte boundary, by as many elements.
    """
    y = run(operation.forward, (x,), variant, start)
    y_torch = getattr(torch, operation.name)(x, -1)
    with np.errstate(divide="ignore"):
        truth = getattr(reference, operation.name)(rows_of(x))
    hold(y, y_torch, truth, np.abs(truth))
    if variant not in (*operation.BACKWARD.variants, "auto"):
        return y, None
    dx = run(operation.backward, (dy, y), variant, start)
    backward = getattr(torch, f"_{operation.name}_backward_data")
    dx_torch = backward(dy, y, -1, y.dtype)
    dy64, y64 = rows_of(dy), rows_of(y)
    truth = getattr(reference, f"{operation.name}_backward")(dy64, y64)
    if operation.name == "softmax":
        size = largest(np.abs(y64)) * largest(np.abs(dy64))
    else:
        partial_sum = math.sqrt(dy64.shape[-1])
        size = largest(np.abs(dy64)) * np.maximum(1, partial_sum * largest(np.exp(y64)))
    hold(dx, dx_torch, truth, size)
    return y, dx


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(PLACE, dtype)


def run(function, inputs, variant, start=0):
    """What `function` makes of `inputs`: it writes all of its result and nothing else."""
    before = [array.clone() for array in inputs]
    shape, n = inputs[0].shape, inputs[0].numel()
    buffer = inputs[0].new_full((n + 2 * N_CANARIES + start,), CANARY)
    inside = buffer[N_CANARIES + start : N_CANARIES + start + n]
    inside.fill_(math.nan)
    result = inside.view(shape)
    assert function(*inputs, variant=variant, out=result) is result
    assert buffer[: N_CANARIES + start].eq(CANARY).all(), "written before out"
    assert buffer[N_CANARIES + start + n :].eq(CANARY).all(), "written past out"
    for array, copy in zip(inputs, before, strict=True):
        assert identical(array, copy), "an input was changed"
    return result


@np.errstate(over="ignore")
def hold(found, found_torch, truth, size):
    """Assert that `found` is as near to `truth` as the head of this file says."""
    expected = rows_of(torch.from_numpy(truth).to(found.dtype))
    values, values_torch = rows_of(found), rows_of(found_torch)
    for kind in (np.isnan, np.isposinf, np.isneginf):  # what overflows the dtype is an infinity
        assert np.array_equal(kind(values), kind(expected)), kind.__name__
        assert np.array_equal(kind(values_torch), kind(expected)), f"PyTorch, {kind.__name__}"
    scale = np.broadcast_to(largest(np.where(np.isfinite(size), size, 0)), truth.shape)
    error, error_torch = (worst(v, truth, expected, scale) for v in (values, values_torch))
    if found.dtype == torch.float32:
        assert error <= BOUND, f"{error:.3g} of the scale"
        assert error <= max(TIMES_PYTORCH * error_torch, FLOOR), f"{error:.3g}, {error_torch:.3g}"
    else:
        beyond = worst(values, truth, expected, scale, half_unit(truth, found.dtype))
        assert beyond <= BOUND, f"{beyond:.3g} of the scale beyond one rounding"
        # A tie that falls otherwise: BOUND to one side of the middle, and to the other.
        assert error <= error_torch + 2 * BOUND, f"{error:.3g}, {error_torch:.3g}"


def worst(values, truth, expected, scale, allowed=0.0):
    """The largest of |values − truth| − allowed over the scale, where `expected` is finite."""
    finite = np.isfinite(expected)
    with np.errstate(invalid="ignore", divide="ignore"):
        error = np.maximum(np.abs(np.where(finite, values - truth, 0)) - allowed, 0)
        return np.max(np.divide(error, scale, out=np.zeros_like(error), where=error > 0), initial=0)


def half_unit(truth, dtype):
    """Half the distance of neighbouring numbers of `dtype`, at `truth`."""
    bits, lowest = FRACTION_BITS[dtype]
    exponent = np.frexp(np.where(np.isfinite(truth), truth, 0))[1] - 1
    return 0.5 * 2.0 ** np.maximum(exponent - bits, lowest)


def largest(values):
    """Of each row, kept as a column."""
    return values.max(-1, keepdims=True, initial=0)


def rows_of(tensor):
    """float64 copy of a tensor as rows of its last axis."""
    values = tensor.detach().double().cpu().numpy()
    return values.reshape(math.prod(values.shape[:-1]), values.shape[-1] if values.ndim else 1)


def identical(a, b):
    """Equal bit for bit."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    return torch.equal(a.contiguous().view(kind), b.contiguous().view(kind))


@contextlib.contextmanager
def parts_of_a_row(n_cols, itemsize, n_parts):
    """`split` shares rows of `n_cols` among a cluster of `n_parts` blocks; None: they are streamed.

    Each block takes several strides through its part.
    """

    def forced(problem, chip, part_bits):
        if n_parts is None or part_bits != n_parts.bit_length() - 1:
            return None
        n_bytes = row_plan.part_length(problem.reach, part_bits) * itemsize * problem.n_arrays
        return part(problem, chip._replace(shared_bytes=plan.SHARED_RESERVE + n_bytes), part_bits)

    part = plan.part
    with (
        mock.patch.object(plan, "part", forced),
        mock.patch.object(plan, "SPLIT_THREADS", {1: 32, 2: 32}),
        mock.patch.object(row_plan, "STREAM_PART", n_cols // 2),
        mock.patch.object(row_plan, "STREAM_THREADS", 32),
        mock.patch.object(operation, "_chosen", operation._chosen.__wrapped__),
    ):
        yield
