"""`intrinsics.shared`: dynamic shared memory and asynchronous copies, on both sides."""

import inspect
import json

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda, simulator
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import load, store, vector_width
from course_lib.runtime.intrinsics.shared import copy_async, dynamic_shared, wait_for_copies

PLACE = "cpu" if SIMULATED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
simulated_only = pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive this")


@cuda.jit
def stage_kernel(x, y, n_vectors):
    """y = x, `n_vectors` vectors per thread by way of shared memory, copied all at once."""
    cache = dynamic_shared(x)
    width, stride = vector_width(x), cuda.blockDim.x * vector_width(x)
    first = cuda.threadIdx.x * width
    start = cuda.blockIdx.x * stride * n_vectors
    for u in range(n_vectors):
        copy_async(cache, first + u * stride, x, start + first + u * stride)
    wait_for_copies()
    for u in range(n_vectors):
        for k in range(width):
            i = first + u * stride + k
            store(y, start + i, load(cache, i))


@cuda.jit
def reverse_kernel(x, y):
    """The block's elements the other way round: what other threads copied, after a barrier."""
    cache = dynamic_shared(x)
    width, tid = vector_width(x), cuda.threadIdx.x
    n = cuda.blockDim.x * width
    copy_async(cache, tid * width, x, cuda.blockIdx.x * n + tid * width)
    wait_for_copies()
    cuda.syncthreads()
    for k in range(tid, n, cuda.blockDim.x):
        y[cuda.blockIdx.x * n + k] = cache[n - 1 - k]


@cuda.jit
def early_kernel(x, before, after):
    cache = dynamic_shared(x)
    tid = cuda.threadIdx.x
    for k in range(4):
        cache[4 * tid + k] = -1
    copy_async(cache, 4 * tid, x, 4 * tid)
    before[tid] = cache[4 * tid]
    wait_for_copies()
    after[tid] = cache[4 * tid]


@cuda.jit
def unwritten_kernel(x, y):
    cache = dynamic_shared(x)
    copy_async(cache, 4 * cuda.threadIdx.x, x, 4 * cuda.threadIdx.x)
    y[cuda.threadIdx.x] = cache[4 * cuda.threadIdx.x]
    wait_for_copies()


@cuda.jit
def unshared_kernel(x, y):
    """Reads another thread's copy without a barrier."""
    cache = dynamic_shared(x)
    tid = cuda.threadIdx.x
    copy_async(cache, 4 * tid, x, 4 * tid)
    wait_for_copies()
    y[tid] = cache[4 * (cuda.blockDim.x - 1 - tid)]


@cuda.jit
def shifted_kernel(x, to, origin):
    copy_async(dynamic_shared(x), to, x, origin)
    wait_for_copies()


@cuda.jit
def size_kernel(x, sizes):
    sizes[0] = dynamic_shared(x).shape[0]


def randn(n, dtype=torch.float32):
    return torch.randn(n, device=PLACE).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_vectors", [1, 3])
def test_copies_arrive(dtype, n_vectors):
    n = 2 * 64 * n_vectors * (16 // dtype.itemsize)
    x, y = randn(n, dtype), torch.zeros(n, dtype=dtype, device=PLACE)
    launch(stage_kernel, 2, 64, x, y, n_vectors, shared_bytes=64 * 16 * n_vectors)
    assert torch.equal(y, x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_after_a_barrier_other_threads_read_them(dtype):
    n = 3 * 64 * (16 // dtype.itemsize)
    x, y = randn(n, dtype), torch.zeros(n, dtype=dtype, device=PLACE)
    launch(reverse_kernel, 3, 64, x, y, shared_bytes=64 * 16)
    assert torch.equal(y.view(3, -1), x.view(3, -1).flip(1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_array_is_as_long_as_the_launch_says(dtype):
    sizes = torch.zeros(1, dtype=torch.int64, device=PLACE)
    for shared_bytes in (16, 4096, 40_000):
        launch(size_kernel, 1, 32, randn(4, dtype), sizes, shared_bytes=shared_bytes)
        assert sizes.item() == shared_bytes // dtype.itemsize


@simulated_only
@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_copy_lands_when_it_is_waited_for(order):
    x, before, after = randn(128), randn(32), randn(32)
    with simulator.options(order=order):
        launch(early_kernel, 1, 32, x, before, after, shared_bytes=512)
    assert before.eq(-1).all()
    assert torch.equal(after, x[::4])


@simulated_only
def test_the_sanitizer_sees_a_read_before_the_wait():
    x, y = randn(128), torch.empty(32)
    with simulator.sanitize() as report:
        launch(unwritten_kernel, 1, 32, x, y, shared_bytes=512)
    assert report.kinds() == ["uninitialised-read"]
    assert y.isnan().all()


@simulated_only
def test_the_sanitizer_sees_a_missing_barrier():
    with simulator.sanitize() as report:
        launch(unshared_kernel, 1, 64, randn(256), torch.empty(64), shared_bytes=1024)
    assert "race" in report.kinds()


@cuda.jit
def reused_kernel(x, y, fault):
    """Two rounds through one buffer; each `fault` leaves out what keeps them apart."""
    cache = dynamic_shared(x)
    tid, n = cuda.threadIdx.x, 4 * cuda.blockDim.x
    for turn in range(2):
        copy_async(cache, 4 * tid, x, 4 * tid)  # begin
        if fault == 1:
            cache[4 * tid] = 0  # store
        if fault == 2:
            x[4 * tid] += 1  # change
        if fault == 3:
            cuda.syncthreads()
            x[(4 * tid + 4) % n] = 0  # others
        if fault == 4 and turn:
            y[tid] = cache[4 * tid + 1]  # early
        if fault == 5:
            cuda.syncthreads()
        wait_for_copies()  # wait
        cuda.syncthreads()
        y[tid] = cache[(4 * tid + 4) % n]  # use
        if fault != 5:
            cuda.syncthreads()


@simulated_only
@pytest.mark.parametrize("fault, lines", [
    (0, []), (1, ["store", "begin"]), (2, ["change", "begin"]), (3, ["others", "begin", "wait"]),
    (4, ["early", "begin"]), (5, ["begin", "use"])])
def test_the_sanitizer_sees_what_meets_a_copy_under_way(fault, lines):
    text, first = inspect.getsourcelines(reused_kernel.py_func)
    marks = {line.split("# ")[1].strip(): first + k
             for k, line in enumerate(text) if "  # " in line}
    for order in ("forward", "reverse", "random"):
        with simulator.options(order=order), simulator.sanitize() as report:
            launch(reused_kernel, 1, 64, randn(256), torch.empty(64), fault, shared_bytes=1024)
        assert report.kinds() == ["race"] * bool(lines), report
        assert all(set(each.lines) <= {marks[mark] for mark in lines} for each in report), report
        assert all(marks[lines[0]] in each.lines for each in report), report


@simulated_only
def test_the_sanitizer_finds_nothing_in_a_right_kernel():
    x = randn(2 * 64 * 4)
    with simulator.sanitize() as report:
        launch(stage_kernel, 2, 64, x, torch.empty_like(x), 1, shared_bytes=1024)
        launch(reverse_kernel, 2, 64, x, torch.empty_like(x), shared_bytes=1024)
    assert not report, report


@simulated_only
@pytest.mark.parametrize("to, origin, bytes_", [(1, 0, 4), (0, 2, 8), (4, 7, 12), (3, 4, 12)])
def test_copies_off_their_boundaries_are_refused(to, origin, bytes_):
    x = torch.from_numpy(aligned(64))
    wrong = to if to % 4 else origin
    with pytest.raises(
        ValueError, match=f"misaligned 16-byte access: element {wrong} lies {bytes_} bytes past"
    ):
        launch(shifted_kernel, 1, 1, x, to, origin, shared_bytes=256)


def aligned(n):
    """n float32 numbers from a 16-byte boundary on."""
    whole = np.arange(n + 4, dtype=np.float32)
    first = -whole.ctypes.data % 16 // 4
    return whole[first : first + n]


COMPILE = """
import json, sys
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import array_type, numba_type
from test_shared import stage_kernel
for dtype in ("float32", "float16", "bfloat16"):
    types = [array_type(dtype), array_type(dtype), numba_type("int64")]
    # Each by itself: the code depends on the chip.
    for chip in ((7, 5), (8, 0), (9, 0)):
        ((_, found, text),) = compiler.survey(stage_kernel, types, [chip])
        dynamic = [line for line in text.splitlines() if "course_lib_dynamic_shared" in line]
        print(json.dumps([dtype, chip, "cp.async.cg.shared.global" in text,
                          "cp.async.wait_all" in text, ".align 16" in dynamic[0],
                          found["stack_bytes"]]))
"""


def test_copies_are_asynchronous_from_sm_80_on(tmp_path):
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
    from test_compiler import ROOT, run

    done = run(f"import sys; sys.path.insert(0, {str(ROOT / 'tests')!r})\n{COMPILE}", tmp_path)
    lines = [json.loads(line) for line in done.splitlines()]
    assert len(lines) == 9
    for dtype, chip, copies, waits, on_boundary, stack_bytes in lines:
        newer = chip >= [8, 0]
        assert copies == newer and waits == newer, (dtype, chip)
        assert on_boundary and stack_bytes == 0, (dtype, chip)


WRONG = """
import numpy as np
from course_lib import cuda
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import array_type
from course_lib.runtime.intrinsics.shared import copy_async, dynamic_shared, wait_for_copies
@cuda.jit
def mixed(x, z):
    copy_async(dynamic_shared(x), 0, z, 0)
@cuda.jit
def whole(x, z):
    dynamic_shared(z)[0] = 1
for types in (("float32", "float16"), ("float16", "bfloat16")):
    try:
        compiler.ptx(mixed, [array_type(t) for t in types], (9, 0))
    except Exception as error:
        print("one dtype" in str(error))
for kind in ("int32", "float64"):
    try:
        compiler.ptx(whole, [array_type("float32"), array_type(kind)], (9, 0))
    except Exception as error:
        print("dynamic_shared" in str(error))
"""


def test_wrong_dtypes_are_refused_by_the_compiler(tmp_path):
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
    from test_compiler import run

    assert run(WRONG, tmp_path).split() == ["True"] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_up_to_the_chips_limit(dtype):
    from course_lib.runtime.host import device

    shared_bytes = device.properties(0).shared_bytes_per_block_optin
    n_vectors = shared_bytes // (256 * 16)
    n = 500 * 256 * n_vectors * (16 // dtype.itemsize)
    x, y = randn(n, dtype), torch.zeros(n, dtype=dtype, device=PLACE)
    launch(stage_kernel, 500, 256, x, y, n_vectors, shared_bytes=256 * 16 * n_vectors)
    assert torch.equal(y, x)
    launch(reverse_kernel, n // (256 * (16 // dtype.itemsize)), 256, x, y, shared_bytes=4096)
    width = 256 * (16 // dtype.itemsize)
    assert torch.equal(y.view(-1, width), x.view(-1, width).flip(1))
