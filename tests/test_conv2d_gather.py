"""`intrinsics.gather`: single elements into shared memory, on both sides."""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda, simulator
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics.gather import gather_async
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but

PLACE = "cpu" if SIMULATED else "cuda"
simulated_only = pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive this")


@cuda.jit
def gather_kernel(x, places, y):
    """y[i] = x[places[i]], or 0 where that is negative."""
    cache = cuda.shared.array(64, np.float32)
    tid = cuda.threadIdx.x
    i = cuda.grid(1)
    gather_async(cache, 63 - tid, x, places[i], places[i] >= 0)
    end_group()
    wait_for_groups_but(0)
    cuda.syncthreads()
    y[i] = cache[63 - tid]


@cuda.jit
def early_kernel(x, y):
    cache = cuda.shared.array(1, np.float32)
    cache[0] = -1
    gather_async(cache, 0, x, 0, True)
    y[0] = cache[0]
    end_group()
    wait_for_groups_but(0)
    y[1] = cache[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_elements_and_zeros(dtype):
    x = torch.randn(1000).to(PLACE, dtype)
    places = torch.randint(-300, 1000, (128,)).to(PLACE)
    y = torch.full((128,), torch.nan, device=PLACE)
    launch(gather_kernel, 2, 64, x, places, y)
    expected = torch.where(places >= 0, x[places.clamp(min=0)].float(), 0)
    assert torch.equal(y, expected) and (places < 0).any()


@simulated_only
def test_too_early_shows():
    x, y = np.array([7], np.float32), np.zeros(2, np.float32)
    launch(early_kernel, 1, 1, x, y)
    assert y.tolist() == [-1, 7]


@simulated_only
def test_what_lies_outside_is_found():
    x, y = np.ones(4, np.float32), np.zeros(64, np.float32)
    places = np.full(64, 4)
    with simulator.sanitize() as report:
        launch(gather_kernel, 1, 64, x, places, y)
    assert "out-of-bounds" in str(report) or "bounds" in str(report)
