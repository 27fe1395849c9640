"""Shared, local and constant memory; limits; atomics; uninitialised contents."""

import ml_dtypes
import numpy as np
import pytest

from course_lib.simulator import LaunchError, NotCompilable, cuda

BIG = 48 * 1024
MOST = BIG // 4


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
        last, all_own = s[1, :], own[:]
        for i in range(2):
            sliced[0, i] = last[i]
            sliced[1, i] = all_own[i]
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


def test_static_shared_memory_has_a_limit(jit):
    @jit
    def fits():
        a = cuda.shared.array(MOST, np.float32)
        a[0] = 0

    @jit
    def too_much():
        a = cuda.shared.array(MOST, np.float32)
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

    with pytest.raises(NotCompilable, match="shape, `n`, is no constant"):
        kernel[1, 1](2)


def test_cache_hints():
    @cuda.jit
    def kernel(x):
        i = cuda.grid(1)
        cuda.stcg(x, i, cuda.ldca(x, i) + cuda.ldcv(x, i))

    x = np.arange(4.0)
    kernel[1, 4](x)
    assert x.tolist() == [0, 2, 4, 6]
