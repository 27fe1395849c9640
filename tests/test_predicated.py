"""`intrinsics.predicated`: loads that happen or not, on both sides."""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import store, store_vector, vector_width
from course_lib.runtime.intrinsics.predicated import load_if, load_vector_if, load_vector_once_if

PLACE = "cpu" if SIMULATED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@cuda.jit
def first_vectors_kernel(x, y, n_vectors, once):
    """The first vectors of x, and zeros in place of the others."""
    values = cuda.local.array(8, np.float32)
    tid = cuda.threadIdx.x
    at = tid * vector_width(x)
    for k in range(8):
        values[k] = 7
    # Where nothing is loaded, the place may be anywhere.
    place = at if tid < n_vectors else (1 << 60) + at
    if once:
        load_vector_once_if(values, x, place, tid < n_vectors)
    else:
        load_vector_if(values, x, place, tid < n_vectors)
    store_vector(y, at, values)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("n_vectors", [0, 1, 31, 32])
def test_what_is_not_loaded_is_zero(dtype, once, n_vectors):
    width = 16 // dtype.itemsize
    x = torch.randn(n_vectors * width + 1, device=PLACE).to(dtype)
    y = torch.full((32 * width,), 5.0, device=PLACE, dtype=dtype)
    launch(first_vectors_kernel, 1, 32, x, y, n_vectors, once)
    assert torch.equal(y[: n_vectors * width], x[:-1])
    assert not y[n_vectors * width :].any()


@cuda.jit
def first_elements_kernel(x, y, n):
    """The first elements of x, and zeros in place of the others."""
    i = cuda.threadIdx.x
    store(y, i, load_if(x, i if i < n else (1 << 60) + i, i < n))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 31, 32])
def test_an_element_that_is_not_loaded_is_zero(dtype, n):
    x = torch.randn(n + 1, device=PLACE).to(dtype)
    y = torch.full((32,), 5.0, device=PLACE, dtype=dtype)
    launch(first_elements_kernel, 1, 32, x, y, n)
    assert torch.equal(y[:n], x[:-1]) and not y[n:].any()


@pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive this")
def test_a_place_between_two_vectors_is_refused_unless_nothing_is_loaded():
    x, y = torch.randn(129)[1:], torch.empty(128)
    launch(first_vectors_kernel, 1, 32, x, y, 0, False)
    with pytest.raises(ValueError, match="misaligned 16-byte access: element 0"):
        launch(first_vectors_kernel, 1, 32, x, y, 1, False)
