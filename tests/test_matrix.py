"""`intrinsics.matrix`: products of small matrices by a warp, and what brings them there."""

import inspect
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from test_compiler import run

from course_lib import SIMULATED, cuda, simulator
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import store
from course_lib.runtime.intrinsics.matrix import (
    copy_one_async,
    copy_part_async,
    load_matrices,
    load_matrices_transposed,
    load_word,
    multiply_add,
    round_tf32,
    subtract_words,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

PLACE = "cpu" if SIMULATED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
simulated_only = pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive this")


@cuda.jit
def product_kernel(like, a, b, acc):
    """Each lane's registers from and to global memory."""
    lane = cuda.threadIdx.x
    words_a, words_b = cuda.local.array(4, np.uint32), cuda.local.array(2, np.uint32)
    sums = cuda.local.array(8, np.float32)
    for r in range(4):
        words_a[r] = a[lane, r]
        sums[r], sums[4 + r] = -1, acc[lane, r]
    for r in range(2):
        words_b[r] = b[lane, r]
    multiply_add(sums, 4, words_a, 0, words_b, 0, like)
    for r in range(4):
        acc[lane, r] = sums[4 + r]


@cuda.jit
def matrices_kernel(x, found, pitch, transposed):
    """Four matrices one after another, rows `pitch` apart; every lane's registers to `found`."""
    cache, lane = dynamic_shared(x), cuda.threadIdx.x
    for i in range(lane, 32 * pitch, 32):
        cache[i] = x[i]
    cuda.syncthreads()
    words = cuda.local.array(5, np.uint32)
    if transposed:
        load_matrices_transposed(words, 1, cache, lane * pitch)
    else:
        load_matrices(words, 1, cache, lane * pitch)
    for r in range(4):
        found[lane, r] = words[1 + r]


@cuda.jit
def plain_matrices_kernel(x, found, pitch):
    cache, lane = dynamic_shared(x), cuda.threadIdx.x
    for i in range(lane, 32 * pitch, 32):
        cache[i] = x[i]
    cuda.syncthreads()
    words = cuda.local.array(4, np.uint32)
    load_matrices(words, 0, cache, lane * pitch)
    for r in range(4):
        found[lane, r] = words[r]


@cuda.jit
def words_kernel(x, big, small):
    i = cuda.threadIdx.x
    word = load_word(x, i)
    big[i] = round_tf32(word)
    small[i] = subtract_words(word, big[i])


@cuda.jit
def part_kernel(x, y, n, before):
    cache, tid = dynamic_shared(x), cuda.threadIdx.x
    width = y.shape[0] // cuda.blockDim.x
    for k in range(width):
        store(cache, tid * width + k, 7)
    copy_part_async(cache, tid * width, x, tid * width, min(max(n - tid * width, 0), width))
    before[tid] = cache[tid * width]
    end_group()
    wait_for_groups_but(0)
    for k in range(width):
        y[tid * width + k] = cache[tid * width + k]


@cuda.jit
def ones_kernel(x, y, n):
    """y = x the other way round, zeros for what lies beyond x[:n]."""
    cache, tid = dynamic_shared(x), cuda.threadIdx.x
    place = cuda.blockDim.x - 1 - tid
    copy_one_async(cache, place, x, tid if tid < n else 0, tid < n)
    end_group()
    wait_for_groups_but(0)
    y[place] = cache[place]


def as_words(values, dtype):
    """The 32-bit words that make up rows of `values`, which are already of that dtype."""
    kind = {torch.float32: np.float32, torch.float16: np.float16}.get(dtype, ml_dtypes.bfloat16)
    return np.ascontiguousarray(values.astype(kind)).view(np.uint32)


def rounded(values, dtype):
    """`values` as the tensor core sees them, in float64."""
    if dtype is torch.float32:
        return (values.astype(np.float32).view(np.uint32) & 0xFFFFE000).view(np.float32).astype(
            np.float64)  # fmt: skip
    return torch.from_numpy(values).to(dtype).double().numpy()


def to(array):
    """On the device under test."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(PLACE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_products_lane_by_lane(dtype, seed):
    rng = np.random.default_rng(seed)
    depth = 8 if dtype is torch.float32 else 16
    A, B, C = (rng.normal(size=s) for s in ((16, depth), (depth, 8), (16, 8)))
    A, B, C = rounded(A, dtype), rounded(B, dtype), C.astype(np.float32)
    of_a, of_b = as_words(A, dtype), as_words(B.T, dtype)
    a, b, acc = np.zeros((32, 4), np.uint32), np.zeros((32, 2), np.uint32), np.zeros((32, 4), "f4")
    for lane in range(32):  # as the PTX ISA manual has it
        group, member = lane >> 2, lane % 4
        for i in range(4):
            row = group if i in (0, 2) else group + 8
            a[lane, i] = of_a[row, member if i < 2 else member + 4]
            acc[lane, i] = C[group if i < 2 else group + 8, member * 2 + (i & 1)]
        for i in range(2):
            b[lane, i] = of_b[group, member if i == 0 else member + 4]
    acc, like = to(acc), torch.zeros(1, dtype=dtype, device=PLACE)
    launch(product_kernel, 1, 32, like, to(a), to(b), acc)
    found = np.empty((16, 8))
    for lane in range(32):
        for i in range(4):
            row = (lane >> 2) if i < 2 else (lane >> 2) + 8
            found[row, (lane % 4) * 2 + (i & 1)] = acc[lane, i].item()
    size = np.abs(A) @ np.abs(B) + np.abs(C)
    assert (np.abs(found - (A @ B + C)) <= 2**-22 * size).all()


def test_a_tensor_core_sees_tf32_alone():
    """The lower 13 bits of a float32 do not count, whatever they are."""
    a = np.full((32, 4), np.float32(1).view(np.uint32) | 0x1FFF, np.uint32)
    b = np.full((32, 2), np.float32(2).view(np.uint32) | 0x0FFF, np.uint32)
    acc = torch.ones(32, 4, device=PLACE)
    launch(product_kernel, 1, 32, torch.zeros(1, device=PLACE), to(a), to(b), acc)
    assert (acc == 17).all()


def test_infinities_and_nan_pass():
    a, b = np.zeros((32, 4), np.float32), np.ones((32, 2), np.float32)
    a[0, 0], a[4, 0], a[8, 0], a[12, 0] = np.inf, -np.inf, np.nan, 3e38
    b[1, 0] = np.inf  # word 1 of column 0: 0 · inf in every row
    acc = torch.zeros(32, 4, device=PLACE)
    like = torch.zeros(1, device=PLACE)
    launch(product_kernel, 1, 32, like, to(a.view(np.uint32)), to(b.view(np.uint32)), acc)
    found = acc.cpu().numpy()
    assert np.isnan(found[[0, 4, 8, 12, 16], 0]).all()
    assert found[1, 0] == np.inf and found[5, 0] == -np.inf and np.isnan(found[9, 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding", [0, 1, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_matrices_lane_by_lane(dtype, padding, transposed):
    if dtype is torch.float32 and transposed:
        with pytest.raises(Exception, match="load_matrices_transposed takes 16-bit arrays"):
            launch(
                matrices_kernel, 1, 32, torch.zeros(128, device=PLACE),
                torch.zeros(32, 4, dtype=torch.uint32, device=PLACE), 4, True, shared_bytes=512,
            )  # fmt: skip
        return
    width = 16 // dtype.itemsize
    pitch = width * (1 + padding)
    x = torch.randn(32 * pitch).to(PLACE, dtype)
    found = torch.zeros(32, 4, dtype=torch.uint32, device=PLACE)
    bytes_ = 32 * pitch * dtype.itemsize
    if transposed:
        launch(matrices_kernel, 1, 32, x, found, pitch, True, shared_bytes=bytes_)
    else:
        launch(plain_matrices_kernel, 1, 32, x, found, pitch, shared_bytes=bytes_)
    matrices = x.cpu().view(32, pitch)[:, :width].reshape(4, 8, width)
    if transposed:
        matrices = matrices.transpose(1, 2)
    words = matrices.contiguous().view(torch.uint32)  # (matrix, row, word)
    for lane in range(32):
        for matrix in range(4):
            assert found[lane, matrix].item() == words[matrix, lane // 4, lane % 4].item()


def test_words():
    values = [
        1.0,
        -1.0,
        1 + 2**-11,
        1 + 2**-11 + 2**-20,
        1 + 3 * 2**-11,
        -1 - 2**-11,
        0.1,
        3.4028e38,
    ]
    values += [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-40, np.pi * 1e-30, 2 - 2**-23]
    x = np.array(values, np.float32)
    big, small = (torch.zeros(16, dtype=torch.uint32, device=PLACE) for _ in range(2))
    launch(words_kernel, 1, 16, to(x), big, small)
    big, small = (each.cpu().numpy().view(np.float32) for each in (big, small))
    tie = 1 if SIMULATED or torch.cuda.get_device_capability() >= (9, 0) else 1 + 2**-10
    wanted = np.array([1, -1, tie, 1 + 2**-10, 1 + 2 * 2**-10, -tie], np.float32)
    np.testing.assert_array_equal(big[:6], wanted)
    assert big[7] == np.inf and big[15] == 2
    np.testing.assert_array_equal(big[8:13], x[8:13])
    normal = [0, 1, 2, 3, 4, 5, 6, 14, 15]
    assert not (big[normal].view(np.uint32) & 0x1FFF).any()
    assert (np.abs(big[normal] - x[normal]) <= 2**-11 * np.abs(x[normal])).all()
    np.testing.assert_array_equal(big[normal] + small[normal], x[normal])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 5, 37, 64])
def test_parts_of_vectors_are_filled_up_with_zeros(dtype, n):
    n_threads, width = 16, 16 // dtype.itemsize
    size = n_threads * width
    x = torch.arange(1, size + 1).to(PLACE, dtype)
    y, before = torch.zeros_like(x), torch.zeros(n_threads, dtype=dtype, device=PLACE)
    launch(part_kernel, 1, n_threads, x, y, n, before, shared_bytes=size * dtype.itemsize)
    assert torch.equal(y[:n], x[:n]) and (y[n:] == 0).all()
    if SIMULATED:
        assert (before == 7).all()  # nothing has arrived before it is waited for


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", [0, 1, 31, 32])
def test_single_elements_need_no_boundary(dtype, n):
    x = torch.arange(33).to(PLACE, dtype)[1:]
    y = torch.full_like(x, -1)
    launch(ones_kernel, 1, 32, x, y, n, shared_bytes=32 * dtype.itemsize)
    expected = torch.where(torch.arange(32, device=PLACE) < n, x, 0)
    assert torch.equal(y, expected.flip(0))


@simulated_only
@pytest.mark.parametrize("n_threads", [1, 31, 40])
def test_a_warp_must_be_whole(n_threads):
    a, b, acc = (torch.zeros(n_threads, n) for n in (4, 2, 4))
    a, b = a.view(torch.uint32), b.view(torch.uint32)
    with pytest.raises(simulator.SimulatorError, match="multiply_add is carried out by all 32"):
        launch(product_kernel, 1, n_threads, torch.zeros(1), a, b, acc)
    x, found = torch.zeros(64 * 4), torch.zeros(n_threads, 4, dtype=torch.uint32)
    with pytest.raises(simulator.SimulatorError, match="load_matrices is carried out by all 32"):
        launch(plain_matrices_kernel, 1, n_threads, x, found, 4, shared_bytes=1024)


@cuda.jit
def misplaced_kernel(x, half):
    tile, words = dynamic_shared(x), cuda.local.array(4, np.uint32)
    tid = cuda.threadIdx.x
    for k in range(4):
        tile[4 * tid + k] = words[k] = 0
    cuda.syncwarp()
    if half:
        if tid < 16:
            load_matrices(words, 0, tile, 4 * tid)  # half
    else:
        load_matrices(words, 0, tile, 4 * tid + 4)  # outside


@simulated_only
@pytest.mark.parametrize("fault, kind", [("half", "shuffle-inactive-lane"),
                                         ("outside", "out-of-bounds")])
def test_the_sanitizer_names_the_line_of_the_call(fault, kind):
    lines, first = inspect.getsourcelines(misplaced_kernel.py_func)
    line = first + next(k for k, text in enumerate(lines) if f"# {fault}" in text)
    with simulator.sanitize() as report:
        launch(misplaced_kernel, 1, 32, torch.zeros(1), fault == "half", shared_bytes=512)
    assert [(each.kind, each.line, each.filename) for each in report] == [(kind, line, __file__)]


@simulated_only
def test_rows_begin_on_boundaries():
    x, found = torch.zeros(32 * 5), torch.zeros(32, 4, dtype=torch.uint32)
    with pytest.raises(ValueError, match="misaligned 16-byte access"):
        launch(plain_matrices_kernel, 1, 32, x, found, 5, shared_bytes=640)
    with pytest.raises(ValueError, match="misaligned 16-byte access"):
        launch(part_kernel, 1, 4, x[1:], torch.zeros(16), 16, torch.zeros(4), shared_bytes=64)


COMPILE = """
import json, re, sys
sys.path.insert(0, sys.argv[1])
import test_matrix
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import array_type, numba_type
words, number = array_type("uint32", 2), numba_type("int64")
cases = []
for dtype in ("float32", "float16", "bfloat16"):
    array = array_type(dtype)
    types = [array, words, words, array_type("float32", 2)]
    cases.append((dtype, test_matrix.product_kernel, types))
    if dtype != "float16":
        cases.append((dtype, test_matrix.part_kernel, [array, array, number, array]))
        cases.append((dtype, test_matrix.ones_kernel, [array, array, number]))
types = [array, words, number, numba_type("boolean")]
cases.append(("bfloat16", test_matrix.matrices_kernel, types))
flat = array_type("uint32")
cases.append(("float32", test_matrix.words_kernel, [array_type("float32"), flat, flat]))
pattern = r"(?:mma|ldmatrix|cp\\.async\\.c[ag]|cvt.rna?.tf)[\\w.:]*|trap"
for dtype, kernel, types in cases:
    chips = [(7, 5), (8, 0), (9, 0)][: 3 if kernel is test_matrix.words_kernel else 2]
    for chip, facts, text in compiler.survey(kernel, types, chips):
        found = sorted(set(re.findall(pattern, text)))
        print(json.dumps([dtype, kernel.py_func.__name__, chip[0], facts["stack_bytes"], found]))
"""
SHAPES = {
    "float32": "m16n8k8.row.col.f32.tf32.tf32.f32",
    "float16": "m16n8k16.row.col.f32.f16.f16.f32",
    "bfloat16": "m16n8k16.row.col.f32.bf16.bf16.f32",
}


def test_compiles_to_the_instructions_meant(tmp_path):
    found = {}
    for line in run(COMPILE, tmp_path, Path(__file__).parent).splitlines():
        dtype, name, chip, stack_bytes, instructions = json.loads(line)
        assert stack_bytes == 0
        found[dtype, name.removesuffix("_kernel"), chip] = instructions
    for dtype, shape in SHAPES.items():
        half = f"mma.sync.aligned.{shape}".replace("k16", "k8")
        assert found[dtype, "product", 7] == [half if dtype == "float16" else "trap"]
        assert found[dtype, "product", 8] == [f"mma.sync.aligned.{shape}"]
    for chip in (7, 8):
        load = "ldmatrix.sync.aligned.m8n8.x4"
        both = [f"{load}.shared.b16", f"{load}.trans.shared.b16"]
        assert found["bfloat16", "matrices", chip] == both
        assert found["bfloat16", "ones", chip] == []
    for dtype in ("float32", "bfloat16"):
        assert found[dtype, "part", 7] == []
        assert found[dtype, "part", 8] == ["cp.async.cg.shared.global.L2::128B"]
    assert found["float32", "ones", 8] == ["cp.async.ca.shared.global"]
    assert found["float32", "words", 7] == ["trap"]
    assert found["float32", "words", 8] == ["cvt.rna.tf32.f32"]
    assert found["float32", "words", 9] == ["cvt.rn.tf32.f32"]
