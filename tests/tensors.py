"""Tensors for the tests of operators, where kernels run here, and how they are compared."""

import contextlib

import numpy as np
import torch

from course_lib import SIMULATED
from course_lib.kernels.operation import Ladder

PLACE = "cpu" if SIMULATED else "cuda"
# Half a unit in the last place of the output, and float32 arithmetic relative to the largest terms.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
FLOOR = {torch.float32: 1e-37, torch.float16: 2**-25, torch.bfloat16: 1e-37}
ARITHMETIC = 1e-6


def double(tensor):
    """As a float64 array on the host; None where there is none."""
    return None if tensor is None else tensor.detach().double().cpu().numpy()


def randn(*shape, **options):
    return torch.randn(*shape, device=PLACE, **options)


def close(found, expected, scale=1):
    """Equal in kind, and in value within a few roundings of the dtype."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    tolerance = 4 * scale * torch.finfo(expected.dtype).eps
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance, equal_nan=True)


def rounded_once(actual, expected, magnitude):
    """Equal but for one rounding and ARITHMETIC times `magnitude`, the size of the terms."""
    values = double(actual)
    assert values.shape == expected.shape
    assert np.array_equal(np.isnan(values), np.isnan(expected))
    finite = np.isfinite(expected)
    error = np.abs(values - expected)[finite]
    size, magnitude = np.abs(expected)[finite], np.broadcast_to(magnitude, expected.shape)[finite]
    limit = 1.01 * ROUNDING[actual.dtype] * size + ARITHMETIC * magnitude + FLOOR[actual.dtype]
    assert (error <= limit).all(), f"worst {np.max(error / limit):.3g} times the limit"


@contextlib.contextmanager
def choosing(name, *operations):
    """In this block the simulator gets the rung called `name` of these operations' ladders.

    One that it runs quickly, for tests that are not about kernels. A GPU takes its own choice.
    """
    ladders = {
        id(each): each for operation in operations for each in vars(operation).values()
        if isinstance(each, Ladder) and name in each
    }  # fmt: skip
    with contextlib.ExitStack() as stack:
        for ladder in ladders.values() if SIMULATED else ():
            stack.enter_context(ladder.choosing(name))
        yield


@contextlib.contextmanager
def never_waiting():
    """In this block, what makes the host wait for the GPU raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
