"""`intrinsics.warpgroup` and the kernels of `gemm.warpgroup`: products by four warps together."""

import itertools
import json
import math

import ml_dtypes
import numpy as np
import pytest
import torch
from turns import in_turns

from course_lib import SIMULATED, cuda, simulator
from course_lib.kernels import gemm
from course_lib.kernels.blocks.mma.epilogue import ADD_BIAS, RELU, VECTORS
from course_lib.kernels.blocks.mma.warpgroup_stream import ahead_of
from course_lib.kernels.gemm import plan, warpgroup, warpgroup_plan
from course_lib.runtime.host.launch import Chip, chip_of, launch, recorded
from course_lib.runtime.intrinsics.warpgroup import (
    A_BY_ROW,
    B_BY_ROW,
    multiply_halves,
    multiply_tiles,
    show_to_products,
    tiles_in_shared,
    wait_for_earlier_products,
    wait_for_products,
)

PLACE = "cpu" if SIMULATED else "cuda"
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
simulated_only = pytest.mark.skipif(not SIMULATED, reason="a GPU's context does not survive this")


def has_them():
    return SIMULATED or chip_of(torch.empty(1, device=PLACE))[0] == (9, 0)


pytestmark = pytest.mark.skipif(not has_them(), reason="compute capability 9.0 alone has wgmma")


# ---- one instruction --------------------------------------------------------------------------


def product_kernel(columns, by_row):
    """found[thread, r] = acc[r] of twice A·Bᵀ, given tiles of 64 and `columns` rows in x.

    What x has as rows of 128 bytes, lies in the tiles with its chunks in their places.
    """
    n_sums = columns // 2

    @cuda.jit
    def kernel(x, found):
        tiles, tid = tiles_in_shared(x), cuda.threadIdx.x
        size = x.size // (64 + columns)
        width = size // 8
        for i in range(tid, x.size, 128):
            row, k = i // size, i % size
            tiles[row * size + (k // width ^ row % 8) * width + k % width] = x[i]
        acc = cuda.local.array(n_sums, np.float32)
        for r in range(n_sums):
            acc[r] = np.float32(0)
        show_to_products()
        cuda.syncthreads()
        multiply_tiles(acc, tiles, 0, 64 * size, columns, by_row)
        multiply_tiles(acc, tiles, 0, 64 * size, columns, by_row)
        wait_for_earlier_products()
        wait_for_products(acc, columns)
        for r in range(n_sums):
            found[tid, r] = acc[r]

    return kernel


def in_panels(rows):
    """A tile of 16-bit numbers by rows: the rows of 128 bytes that lie in shared memory."""
    return rows.reshape(-1, 64, 64).transpose(1, 2).reshape(-1, 64)


def one_product(dtype, columns, values=None, by_row=0):
    """(what the threads hold, laid out as a matrix; what it should be)."""
    size = 128 // dtype.itemsize
    if values is None:
        generator = torch.Generator().manual_seed(columns)
        values = torch.randint(-3, 4, (64 + columns, size), generator=generator)
    a, b = values[:64].to(dtype), values[64:].to(dtype)
    lying = [in_panels(a) if by_row & A_BY_ROW else a, in_panels(b) if by_row & B_BY_ROW else b]
    x = torch.cat(lying).to(PLACE)
    found = torch.full((128, columns // 2), float("nan"), device=PLACE)
    n_bytes = (64 + columns) * 128
    launch(product_kernel(columns, by_row), 1, 128, x.reshape(-1), found, shared_bytes=n_bytes)
    return as_matrix(found, columns), 2 * a.double() @ b.double().T


def as_matrix(found, columns):
    """What the threads hold, laid out as a matrix."""
    found = found.cpu().reshape(4, 8, 4, columns // 8, 2, 2)  # warp, g, t, j, half, column
    return found.permute(0, 4, 1, 3, 2, 5).reshape(64, columns).double()


@pytest.mark.parametrize("columns", [8, 128, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_product_and_where_its_sums_are(dtype, columns):
    found, expected = one_product(dtype, columns)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("by_row", [A_BY_ROW, B_BY_ROW, A_BY_ROW + B_BY_ROW])
@pytest.mark.parametrize("dtype, columns", in_turns(DTYPES[1:], [64, 256]))
def test_a_product_of_tiles_by_rows(dtype, columns, by_row):
    found, expected = one_product(dtype, columns, by_row=by_row)
    assert torch.equal(found, expected)


def test_float32_is_cut_off_to_tf32():
    values = torch.zeros(64 + 8, 32)
    values[:64, 0], values[64:, 0] = 1 + 2**-10 + 2**-11, 1
    found, _ = one_product(torch.float32, 8, values)
    assert (found == 2 * (1 + 2**-10)).all()


@pytest.mark.parametrize("columns", [8, 104, 256])
def test_a_product_of_halves_in_an_array_of_float32(columns):
    """From 0 on, whatever the sums were; then a product of float32 is added."""
    n_sums, size = columns // 2, (64 + columns) * 32

    @cuda.jit
    def kernel(x, found):
        tiles, tid = tiles_in_shared(x), cuda.threadIdx.x
        for i in range(tid, x.size, 128):
            row, k = i // 32, i % 32
            tiles[row * 32 + (k // 4 ^ row % 8) * 4 + k % 4] = x[i]
        acc = cuda.local.array(n_sums, np.float32)
        for r in range(n_sums):
            acc[r] = np.float32(math.nan)
        show_to_products()
        cuda.syncthreads()
        multiply_halves(acc, tiles, 0, 64 * 32, columns)
        multiply_tiles(acc, tiles, size, size + 64 * 32, columns, 0)
        wait_for_products(acc, columns)
        for r in range(n_sums):
            found[tid, r] = acc[r]

    generator = torch.Generator().manual_seed(columns)
    halves = torch.randint(-3, 4, (64 + columns, 64), generator=generator).bfloat16()
    floats = torch.randint(-3, 4, (64 + columns, 32), generator=generator).float()
    x = torch.cat([halves.view(torch.float32), floats]).to(PLACE).reshape(-1)
    found = torch.full((128, n_sums), float("nan"), device=PLACE)
    launch(kernel, 1, 128, x, found, shared_bytes=2 * size * 4)
    expected = halves[:64].double() @ halves[64:].double().T
    expected += floats[:64].double() @ floats[64:].double().T
    assert torch.equal(as_matrix(found, columns), expected)


@simulated_only
def test_what_a_product_refuses():
    @cuda.jit
    def kernel(x, i, columns):
        acc = cuda.local.array(8, np.float32)
        multiply_tiles(acc, tiles_in_shared(x), i, 0, columns, 0)

    def start(dtype, i, columns):
        launch(kernel, 1, 128, np.zeros(8, dtype), i, columns, shared_bytes=32 << 10)

    with pytest.raises(ValueError, match="begins 16 bytes past a multiple of 128"):
        start(ml_dtypes.bfloat16, 8, 16)
    with pytest.raises(ValueError, match="not 12"):
        start(np.float32, 0, 12)
    with pytest.raises(ValueError, match="16 float32, not 8"):
        start(np.float32, 0, 32)
    with pytest.raises(TypeError, match="not float64"):
        start(np.float64, 0, 16)


# ---- whole matrices ---------------------------------------------------------------------------

#: (dtype, shape of tile) of all that there are; the simulator takes long, and float16 goes the ways
#: of bfloat16, so that one shape is enough there.
KINDS = [
    (dtype, shape) for dtype in DTYPES for shape in warpgroup.SHAPES[dtype.itemsize]
    if not SIMULATED or dtype != torch.float16 or shape == warpgroup.SHAPES[2][-1]
]  # fmt: skip
BY_K, BY_ROW = (True, True), (False, False)
#: Of a linear layer's three products: whether a, and b, have k fastest.
WAYS = [BY_K, (True, False), BY_ROW]
LIMIT = {torch.float32: 4e-4, torch.float16: 4e-4, torch.bfloat16: 3e-3}


def tensors(M, N, K, dtype):
    generator = torch.Generator().manual_seed(M + N + K)
    a, b, bias = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((M, K), (N, K), (N,))
    )
    return a.to(PLACE), b.to(PLACE), bias.to(PLACE)


def multiply(a, b, bias, options=0, shape=None, way=BY_K):
    (M, K), N = a.shape, b.shape[0]
    shape = shape or warpgroup.SHAPES[a.element_size()][-1]
    a, b = (x if by_k else x.t().contiguous() for x, by_k in zip((a, b), way, strict=True))
    c = torch.full((M, N), float("nan"), dtype=a.dtype, device=PLACE)
    sources = tuple("by_k" if by_k else "by_row" for by_k in way)
    kernel, shape, shared_bytes = warpgroup.kernel_for(shape, sources, a.element_size())
    n_tiles = warpgroup.n_blocks(shape, M, N)
    grid, numbers = n_tiles, ()
    if a.element_size() == 2:  # blocks with up to three tiles
        length = 64 * max(math.ceil(K / 64), ahead_of(shape))
        grid, numbers = math.ceil(n_tiles / 3), (length, a.shape[1], b.shape[1])
    launch(
        kernel, grid, shape.n_threads, a, b, bias, c, M, N, K, options, n_tiles, n_tiles, *numbers,
        shared_bytes=shared_bytes, flat=True,
    )  # fmt: skip
    return c


def true_product(a, b, bias, options=0):
    total = a.double() @ b.double().T
    total = total + bias.double() if options & ADD_BIAS else total
    return total.relu() if options & RELU else total


def error(found, expected):
    return ((found.double() - expected).norm() / (expected.norm() or 1)).item()


@pytest.mark.parametrize("dtype, shape, size, way", in_turns(
    KINDS, [(136, 72, 200), (72, 264, 40), (8, 8, 8)], WAYS
))  # fmt: skip
def test_a_product_of_matrices(dtype, shape, size, way):
    M, N, K = size
    arrays = tensors(M, N, K, dtype)
    options = VECTORS + (ADD_BIAS + RELU if M == 72 else 0)
    found = multiply(*arrays, options, shape, way)
    assert error(found, true_product(*arrays, options)) < LIMIT[dtype]


@pytest.mark.parametrize("M, N, K, dtype", in_turns(
    [(130, 67, 72), (5, 40, 72), (67, 131, 0)], DTYPES
))  # fmt: skip
def test_any_number_of_rows(M, N, K, dtype):
    arrays = tensors(M, N, K, dtype)
    found = multiply(*arrays, ADD_BIAS)
    assert error(found, true_product(*arrays, ADD_BIAS)) < LIMIT[dtype]


@pytest.mark.parametrize("dtype, way", in_turns(DTYPES[:1], WAYS) + in_turns(DTYPES[1:], WAYS))
def test_what_is_no_number_stays_in_its_row_and_column(dtype, way):
    a, b, bias = tensors(72, 72, 72, dtype)
    a[3, 71], a[71, 0], b[5, 71] = float("nan"), float("inf"), float("-inf")
    found, expected = multiply(a, b, bias, way=way), true_product(a, b, bias)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[found.isinf()].sign().double(), expected[expected.isinf()].sign())


@simulated_only
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sanitizer_finds_nothing(dtype, way):
    arrays = tensors(72, 40, 200, dtype)
    shape = warpgroup.SHAPES[dtype.itemsize][-1]._replace(n_stages=3)  # a ring that is used again
    with simulator.sanitize() as report:
        multiply(*arrays, ADD_BIAS, shape, way)
    assert not report.findings


# ---- which products take them, and what they are compiled for ----------------------------------

H200 = Chip((9, 0), 227 << 10, 132, 60 << 20, "H200")


def problem(M, N, K, itemsize=4, sources=("by_k", "by_k")):
    return plan.Problem(M, N, K, itemsize, "tf32" if itemsize == 4 else "narrow", sources)


def chosen(*size, **options):
    """The tile, or the name of the other way, where one of them is preferred."""
    made = problem(*size, **options)
    shape = warpgroup_plan.choose(made, H200)
    for way in warpgroup_plan.preferred(made, H200):
        return (shape.m, shape.n) if way == "wgmma" else way
    return None


def test_the_tiles_of_large_products():
    assert chosen(4096, 4096, 4096) == (256, 128)
    assert chosen(4096, 4096, 4096, itemsize=2) == (128, 256)


#: Tiles for a product, by (M, N, K): of float32 whose inputs come by k, of float32 by rows, and of
#: 16-bit numbers. As an H200 has shown which are best.
EDGES = {
    (2048, 2048, 2048): ((256, 128), (256, 128), (128, 256)),
    (1024, 1024, 1024): ((128, 64), (128, 64), (128, 64)),  # 128 tiles: a round
    (1056, 1024, 1024): ((128, 128), (128, 128), (128, 128)),  # 144 would be two
    (512, 4096, 4096): ((128, 128), (128, 128), (128, 128)),
    (1024, 3200, 256): ((256, 128), (256, 128), (128, 256)),
    (64, 3200, 256): ((128, 64), (128, 64), (128, 64)),
    (512, 512, 1024): ((128, 64), None, (128, 64)),  # the longer k, the better parts of k
    (512, 512, 4096): (None, None, "wgmma_split_k"),
    (768, 768, 6304): ((128, 64), (128, 64), "wgmma_split_k"),
    (64, 256, 12544): (None, None, "wgmma_split_k"),
    (64, 256, 3200): (None, None, None),
    (24, 4096, 64): ((128, 64), (128, 64), (128, 64)),
    (23, 4096, 64): (None, None, None),
    (4096, 23, 64): (None, None, None),
    (128, 961, 64): ((128, 64), (128, 64), (128, 64)),
    (128, 960, 64): (None, None, None),  # 15 tiles
}


@pytest.mark.parametrize("size", EDGES)
def test_tiles_at_the_edges(size):
    by_row = ("by_row", "by_row")
    narrow = {chosen(*size, itemsize=2, sources=s) for s in (("by_k",) * 2, by_row)}
    assert narrow == {EDGES[size][2]}
    assert (chosen(*size), chosen(*size, sources=by_row)) == EDGES[size][:2]


@pytest.mark.parametrize("itemsize", [4, 2])
def test_no_tile_is_chosen_that_is_known_to_take_longer(itemsize):
    sizes = itertools.product((1, 64, 500, 3000), (24, 200, 1000, 9000), (0, 7, 64, 5000))
    taken = []
    for size in sizes:
        made = problem(*size, itemsize)
        shape = warpgroup_plan.choose(made, H200)
        costs = [warpgroup_plan.cost(s, made, H200) for s in warpgroup.SHAPES[itemsize]]
        assert warpgroup_plan.cost(shape, made, H200) == min(costs)
        if "wgmma" in warpgroup_plan.preferred(made, H200):
            assert min(costs) < warpgroup_plan.others_cost(made, H200)
            taken.append(shape)
    assert set(taken) == set(warpgroup.SHAPES[itemsize])


@pytest.mark.parametrize("way", WAYS)
def test_multiply_takes_it_by_name(way):
    a, b, bias = tensors(200, 136, 40, torch.float32)
    lying = (x if by_k else x.t().contiguous() for x, by_k in zip((a, b), way, strict=True))
    c = torch.empty(200, 136, device=PLACE)
    by_k = dict(zip(("a_by_k", "b_by_k"), way, strict=True))
    options = dict(bias=bias, relu=True, precision="tf32", variant="tensor_core/wgmma")
    with recorded() as launches:
        gemm.multiply(*lying, c, 200, 136, 40, **options, **by_k)
    assert [kernel.__name__ for kernel, *_ in launches] == ["warpgroup_kernel"]
    assert error(c, true_product(a, b, bias, ADD_BIAS + RELU)) < LIMIT[torch.float32]


COMPILE = """
import json
from course_lib.kernels import gemm
from course_lib.kernels.gemm import warpgroup, warpgroup_plan
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import array_type, numba_type

kernel, _, _ = warpgroup.kernel_for(warpgroup.SHAPES[4][0], ("by_k", "by_k"), 4)
types = [array_type("float32")] * 4 + [numba_type("int64")] * 6
for chip, found, text in compiler.survey(kernel, types, [(9, 0), (8, 0), (10, 0)]):
    print(json.dumps([chip, found["stack_bytes"], text]))
print(json.dumps([(9, 0), 0, compiler.ptx(kernel, types, (9, 0))]))
for _, kernel, _ in warpgroup.specialisations(["float32"]):
    library, _ = compiler._prepare(kernel, types, (9, 0))
    library.get_cubin(cc=(9, 0, "a"))
    print(json.dumps(library.get_linkerinfo((9, 0, "a"))))
"""


def test_the_target_it_is_compiled_for(tmp_path):
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
    from test_compiler import run

    found = map(json.loads, run(COMPILE, tmp_path).splitlines())
    hopper, ampere, blackwell, text_alone, *told = found
    # A call in the kernel, if only of a division, makes each product wait for the one before it.
    assert len(told) == 9 and not any("serialized" in text for text in told)
    for _, stack_bytes, text in (hopper, text_alone):
        assert stack_bytes == 0 and ".target sm_90a" in text
        assert text.count("wgmma.mma_async.sync.aligned.m64n128k8.f32.tf32.tf32") == 4
    for _, _, text in (ampere, blackwell):
        assert "wgmma" not in text and "trap;" in text


@pytest.mark.gpu
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "M, N, K", [(4096, 4096, 4096), (4104, 4088, 4104), (200, 5000, 72), (5000, 264, 2048)]
)
def test_large_products(M, N, K, dtype, way):
    arrays = tensors(M, N, K, dtype)
    expected = true_product(*arrays)
    for shape in warpgroup.SHAPES[dtype.itemsize]:
        for _ in range(3):
            assert error(multiply(*arrays, shape=shape, way=way), expected) < LIMIT[dtype]
