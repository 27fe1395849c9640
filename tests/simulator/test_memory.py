"""Shared, local and constant memory; limits; atomics; uninitialised contents."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import simulator
from course_lib.simulator import LaunchError, cuda

BIG = 48 * 1024


def test_two_declarations_on_one_line_do_not_alias(jit):
    @jit
    def kernel(out):
        a, b = cuda.shared.array(4, np.int32), cuda.shared.array(4, np.int32)
        a[cuda.threadIdx.x] = 1
        b[cuda.threadIdx.x] = 2
        cuda.syncthreads()
        out[cuda.threadIdx.x] = a[cuda.threadIdx.x]

    out = np.zeros(4)
    kernel[1, 4](out)
    assert (out == 1).all()


def test_each_block_and_function_has_its_own(jit):
    @jit(device=True)
    def helper(value):
        s = cuda.shared.array(4, np.int32)
        s[cuda.threadIdx.x] = value
        cuda.syncthreads()
        return s[3 - cuda.threadIdx.x]

    @jit
    def kernel(out):
        s = cuda.shared.array(4, np.int32)
        s[cuda.threadIdx.x] = 100
        cuda.syncthreads()
        out[cuda.grid(1)] = helper(cuda.grid(1)) + s[0]

    out = np.zeros(8)
    kernel[2, 4](out)
    assert out.tolist() == [103, 102, 101, 100, 107, 106, 105, 104]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16,
                                   np.int8, np.uint32, np.int64, np.complex64])
def test_memory_starts_uninitialised(jit, dtype):
    @jit
    def kernel(out, sliced):
        s, own = cuda.shared.array((2, 2), dtype), cuda.local.array(2, dtype)
        listed = cuda.shared.array(2, dtype)
        sliced[0, :] = s[1, :]
        sliced[1, :] = own[:]
        out[0] = listed[1]

    out, sliced = np.zeros(1, dtype), np.zeros((2, 2), dtype)
    kernel[1, 1](out, sliced)
    everything = np.append(sliced.ravel(), out)
    if np.issubdtype(dtype, np.integer):
        assert set(everything.tobytes()) == {0xCD}
    else:
        assert np.isnan(everything).all()
    assert everything.dtype == dtype


def test_lists_round_like_arrays():
    @cuda.jit
    def kernel(x, out):
        s = cuda.shared.array(8, np.float32)
        small = cuda.shared.array(8, np.int8)
        tid = cuda.threadIdx.x
        s[tid] = x[tid]
        s[tid] += x[tid]
        s[tid], s[7 - tid] = s[7 - tid], s[tid]
        small[tid] = 127
        small[tid] += tid
        a = s[7 - tid] = s[tid] * 1
        out[tid, 0], out[tid, 1], out[tid, 2] = s[tid], small[tid], a

    x = np.random.default_rng(0).normal(size=8)
    out = np.zeros((8, 3))
    kernel[1, 8](x, out)
    alone = np.zeros((8, 3))
    s = np.full(8, np.nan, np.float32)
    small = np.zeros(8, np.int8)
    for tid in range(8):
        s[tid] = x[tid]
        s[tid] = s[tid] + x[tid]
        s[tid], s[7 - tid] = s[7 - tid], s[tid]
        small[tid] = np.int64(127 + tid).astype(np.int8)
        a = s[7 - tid] = s[tid] * 1
        alone[tid] = s[tid], small[tid], a
    np.testing.assert_array_equal(out, alone)


def test_arrays_that_are_passed_on_stay_arrays():
    @cuda.jit(device=True)
    def total(array):
        result = 0
        for i in range(array.size):
            result += array[i]
        return result

    @cuda.jit
    def kernel(out):
        mine = cuda.local.array(4, np.int32)
        counts = cuda.shared.array(1, np.int32)
        counts[0] = 0
        for i in range(4):
            mine[i] = i
        cuda.syncthreads()
        cuda.atomic.add(counts, 0, total(mine))
        cuda.syncthreads()
        out[0] = counts[0]

    out = np.zeros(1)
    kernel[1, 3](out)
    assert out[0] == 18


def test_dynamic_shared_memory(jit):
    @jit
    def kernel(out):
        floats = cuda.shared.array(0, np.float32)
        ints = cuda.shared.array(shape=0, dtype=np.int32)
        tid = cuda.threadIdx.x
        floats[tid] = 1
        cuda.syncthreads()
        out[tid, 0] = ints[3 - tid]
        out[tid, 1] = floats.size

    out = np.zeros((4, 2), np.int64)
    kernel[1, 4, 0, 64](out)
    assert (out[:, 0] == np.float32(1).view(np.int32)).all()
    assert (out[:, 1] == 16).all()


def test_static_shared_memory_has_a_limit(jit):
    @jit
    def fits():
        a = cuda.shared.array(BIG // 4, np.float32)
        a[0] = 0

    @jit
    def too_much():
        a = cuda.shared.array(BIG // 4, np.float32)
        b = cuda.shared.array(1, np.float32)
        a[0] = b[0] = 0

    fits[1, 1]()
    with pytest.raises(LaunchError, match="49,152 bytes.*declares 49,156"):
        too_much[1, 1]()


def test_dynamic_shared_memory_has_a_limit():
    @cuda.jit
    def kernel():
        a = cuda.shared.array(1, np.float64)
        a[0] = 0

    kernel[1, 1, 0, 227 * 1024 - 8]()
    with pytest.raises(LaunchError, match="232,448"):
        kernel[1, 1, 0, 227 * 1024]()
    with pytest.raises(LaunchError, match="232,449 bytes of dynamic.*232,448"):
        kernel[1, 1, 0, 227 * 1024 + 1]()
    with pytest.raises(LaunchError, match="shared_bytes"):
        kernel[1, 1, 0, -1]()


def test_shapes_must_be_integers():
    @cuda.jit
    def kernel(n):
        a = cuda.shared.array(n, np.float32)
        a[0] = 0

    with pytest.raises(LaunchError, match="shape"):
        kernel[1, 1](2.5)


def test_constant_memory(jit):
    table = np.array([3, 1, 2])

    @jit
    def kernel(out):
        constant = cuda.const.array_like(table)
        out[cuda.grid(1)] = constant[cuda.grid(1)]

    out = np.zeros(3)
    kernel[1, 3](out)
    assert out.tolist() == [3, 1, 2]


@pytest.mark.parametrize("name, start, value, expected", [
    ("add", 5, 3, 8), ("sub", 5, 3, 2), ("and_", 6, 3, 2), ("or_", 6, 3, 7), ("xor", 6, 3, 5),
    ("exch", 6, 3, 3), ("max", 6, 9, 9), ("max", 6, 3, 6), ("min", 6, 3, 3), ("min", 6, 9, 6),
    ("inc", 5, 7, 6), ("inc", 7, 7, 0), ("inc", 9, 7, 0), ("dec", 5, 7, 4), ("dec", 0, 7, 7),
    ("dec", 9, 7, 7),
])
@pytest.mark.parametrize("dtype", [np.int32, np.uint32, np.uint64])
def test_atomics(jit, name, start, value, expected, dtype):
    operation = getattr(cuda.atomic, name)

    @jit
    def kernel(x, old):
        old[0] = operation(x, 1, value)

    x, old = np.full(2, start, dtype), np.zeros(1)
    kernel[1, 1](x, old)
    assert (x[1], old[0], x[0]) == (expected, start, start)


def test_float_atomics_and_nans():
    nan = np.nan

    @cuda.jit
    def kernel(x):
        cuda.atomic.nanmax(x, 0, 1.0)
        cuda.atomic.nanmin(x, 1, 1.0)
        cuda.atomic.nanmax(x, 2, nan)
        cuda.atomic.add(x, (3,), 0.5)
        cuda.atomic.max(x, 4, -2.0)

    x = np.array([nan, nan, 2, 1, -3], np.float32)
    kernel[1, 1](x)
    assert x.tolist() == [1, 1, 2, 1.5, -2]


def test_integer_atomics_wrap():
    @cuda.jit
    def kernel(x):
        cuda.atomic.add(x, 0, 2**31 - 1)
        cuda.atomic.add(x, 0, 1)

    x = np.zeros(1, np.int32)
    kernel[1, 1](x)
    assert x[0] == -2**31


def test_compare_and_swap():
    @cuda.jit
    def kernel(x, old):
        old[0] = cuda.atomic.cas(x, 1, 5, 9)
        old[1] = cuda.atomic.cas(x, 1, 5, 7)
        old[2] = cuda.atomic.compare_and_swap(x, 1, 2)

    x, old = np.array([1, 5]), np.zeros(3)
    kernel[1, 1](x, old)
    assert x.tolist() == [2, 9] and old.tolist() == [5, 9, 1]


@given(st.lists(st.integers(0, 15), min_size=1, max_size=200))
@settings(max_examples=20, deadline=None)
def test_histogram(values):
    x, counts = np.array(values), np.zeros(16, np.int32)
    with simulator.options(order="random"):
        histogram[-(-x.size // 32), 32](x, counts)
    assert (counts == np.bincount(x, minlength=16)).all()


@cuda.jit
def histogram(x, counts):
    own = cuda.shared.array(16, np.int32)
    if cuda.threadIdx.x < 16:
        own[cuda.threadIdx.x] = 0
    cuda.syncthreads()
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(own, x[i], 1)
    cuda.syncthreads()
    if cuda.threadIdx.x < 16:
        cuda.atomic.add(counts, cuda.threadIdx.x, own[cuda.threadIdx.x])


def test_cache_hints():
    @cuda.jit
    def kernel(x):
        i = cuda.grid(1)
        cuda.stcg(x, i, cuda.ldca(x, i) + cuda.ldcv(x, i))

    x = np.arange(4.0)
    kernel[1, 4](x)
    assert x.tolist() == [0, 2, 4, 6]
