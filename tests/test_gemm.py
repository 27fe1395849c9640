"""`kernels.gemm`: the tiles of each rung, for every way that its inputs lie in memory."""

import itertools

import numpy as np
import pytest
import torch
from turns import in_turns

from course_lib import SIMULATED, simulator
from course_lib.kernels import gemm, operation
from course_lib.kernels.blocks.options import PRECISIONS
from course_lib.kernels.gemm import plan
from course_lib.runtime.host.launch import Chip

PLACE = "cpu" if SIMULATED else "cuda"
ERRORS = {"narrow": 1e-6, "tf32": 1.1e-3, "split": 1e-6}
MODES = {
    "narrow": [torch.float16, torch.bfloat16],
    "tf32": [torch.float32],
    "split": [torch.float32],
}
LAYOUTS = list(itertools.product((True, False), repeat=2))
BY_K = ("by_k", "by_k")
T4 = Chip((7, 5), 64 << 10, 40, 4 << 20, "T4")
A100 = Chip((8, 0), 163 << 10, 108, 40 << 20, "A100")
H200 = Chip((9, 0), 227 << 10, 132, 60 << 20, "H200")
SMALL = H200._replace(shared_bytes=99 << 10)
B200 = Chip((10, 0), 227 << 10, 148, 126 << 20, "B200")


def operands(M, N, K, dtype, a_by_k, b_by_k, shift=0):
    """a and b as they lie in memory, `shift` elements past a boundary; and both as float64."""
    found = []
    for rows, by_k in ((M, a_by_k), (N, b_by_k)):
        shape = (rows, K) if by_k else (K, rows)
        flat = torch.randn(rows * K + shift).to(PLACE, dtype)[shift:]
        x = flat.view(shape)
        found += [x, (x if by_k else x.t()).double().cpu().numpy()]
    return found[0], found[2], found[1], found[3]


def check(c, a, b, bias, relu, error):
    """c against the float64 product, to a share of what was added up and the dtype's rounding."""
    expected, terms = a @ b.T, np.abs(a) @ np.abs(b).T
    if bias is not None:
        bias = bias.double().cpu().numpy()
        expected, terms = expected + bias, terms + np.abs(bias)
    if relu:
        expected = np.maximum(expected, 0)
    limit = error * terms + torch.finfo(c.dtype).eps * np.abs(expected) / 2 * 1.01 + 1e-7
    ratio = np.abs(c.double().cpu().numpy() - expected) / limit
    assert (ratio <= 1).all(), f"worst {ratio.max():.3g} times the limit"


def forced(monkeypatch, shape, n_splits, K, itemsize, in_cluster=False):
    """Makes ways use this shape of tile, and so many parts of k; returns the way that does."""
    k_size = plan.K_BYTES // itemsize
    length = -(-K // n_splits // k_size) * k_size if n_splits > 1 else K
    found = shape, -(-K // length), length, in_cluster
    monkeypatch.setattr(plan, "best", lambda problem, chip, **_: plan.Plan(problem, *found))
    monkeypatch.setattr(operation, "_chosen", operation._chosen.__wrapped__)
    split = "split_k_cluster" if in_cluster else "split_k"
    return f"tensor_core/{split if n_splits > 1 else 'mma'}"


#: (mode, dtype); the simulator takes long, and float16 goes the ways of bfloat16.
PAIRS = [
    (mode, dtype) for mode in MODES for dtype in MODES[mode]
    if not SIMULATED or dtype != torch.float16
]  # fmt: skip
CASES = [
    (mode, dtype, shape, layout, shift)
    for mode, dtype in PAIRS for shape in plan.SHAPES[mode]
    for layout, shift in [*((layout, 0) for layout in LAYOUTS), ((True, True), 1)]
    # Large tiles take the simulator long, and differ in size alone.
    if shape is plan.SHAPES[mode][-1] or not SIMULATED or (layout, shift) == ((True, False), 0)
]  # fmt: skip


@pytest.mark.parametrize("mode, dtype, shape, layout, shift", CASES)
def test_every_tile(monkeypatch, mode, dtype, shape, layout, shift):
    # A whole tile along m and a part along n, so that both ways of copying one are seen.
    M, N, K = shape.m, shape.n - 8, 104 if shape is plan.SHAPES[mode][-1] else 72
    variant = forced(monkeypatch, shape, 1, K, dtype.itemsize)
    a, b, *exact = operands(M, N, K, dtype, *layout, shift)
    c = torch.full((M, N), np.nan, dtype=dtype, device=PLACE)
    precision = "tf32" if mode == "tf32" else "float32"
    gemm.multiply(
        a, b, c, M, N, K, a_by_k=layout[0], b_by_k=layout[1], precision=precision,
        variant=variant,
    )  # fmt: skip
    check(c, *exact, None, False, ERRORS[mode])


@pytest.mark.parametrize("dtype, layout", [
    (torch.float32, (True, False)), (torch.bfloat16, (False, True)),
])  # fmt: skip
def test_the_tile_of_vectorised(dtype, layout):
    M, N, K = 128, 120, 40
    a, b, *exact = operands(M, N, K, dtype, *layout)
    bias = torch.randn(N).to(PLACE, dtype)
    c = torch.full((M, N), np.nan, dtype=dtype, device=PLACE)
    gemm.multiply(
        a, b, c, M, N, K, a_by_k=layout[0], b_by_k=layout[1], bias=bias, variant="vectorised"
    )  # fmt: skip
    check(c, *exact, bias, False, 1e-6)


@pytest.mark.parametrize("variant", ["tiled", "register_tiled"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_tiles_of_the_first_rungs(variant, layout):
    M, N, K = 65, 66, 33
    a, b, *exact = operands(M, N, K, torch.float32, *layout)
    c = torch.full((M, N), np.nan, device=PLACE)
    gemm.multiply(a, b, c, M, N, K, a_by_k=layout[0], b_by_k=layout[1], variant=variant)
    check(c, *exact, None, False, 1e-6)


@pytest.mark.parametrize("mode, dtype", PAIRS)
@pytest.mark.parametrize("M, N, K, n_splits, relu, in_cluster", [
    (9, 8, 160, 3, True, False), (9, 40, 160, 3, False, True), (1, 3, 70, 2, False, False),
])  # fmt: skip
def test_parts_of_k(monkeypatch, mode, dtype, M, N, K, n_splits, relu, in_cluster):
    if in_cluster and not SIMULATED and torch.cuda.get_device_capability() < plan.CLUSTERS:
        pytest.skip("this GPU has no clusters")
    shape = plan.SHAPES[mode][-1]
    variant = forced(monkeypatch, shape, n_splits, K, dtype.itemsize, in_cluster)
    a, b, *exact = operands(M, N, K, dtype, True, True)
    bias = torch.randn(N).to(PLACE, dtype)
    c = torch.full((M, N), np.nan, dtype=dtype, device=PLACE)
    gemm.multiply(
        a, b, c, M, N, K, bias=bias, relu=relu, variant=variant,
        precision="tf32" if mode == "tf32" else "float32",
    )  # fmt: skip
    check(c, *exact, bias, relu, ERRORS[mode])


def test_split_numbers_are_as_good_as_float32():
    """Sums of many terms of one sign, and of both: no further off than NumPy's float32."""
    for offset in (0, 3):
        M, N, K = 8, 8, 256
        a, b, *exact = operands(M, N, K, torch.float32, True, True)
        a, b = a + offset, b + offset
        exact = [x.double().cpu().numpy() for x in (a, b)]
        c = torch.empty(M, N, device=PLACE)
        gemm.multiply(a, b, c, M, N, K, variant="tensor_core")
        truth = exact[0] @ exact[1].T
        theirs = (exact[0].astype("f4")[:, None] * exact[1].astype("f4")).cumsum(-1)[..., -1]
        ours = np.abs(c.double().cpu().numpy() - truth).max()
        assert ours <= np.abs(theirs - truth).max()


def test_numbers_without_a_rest_are_exact():
    M, N, K = 16, 24, 64
    a, b = (torch.randint(-8, 9, (rows, K)).float().to(PLACE) for rows in (M, N))
    c = torch.empty(M, N, device=PLACE)
    for precision in PRECISIONS:
        gemm.multiply(a, b, c, M, N, K, precision=precision, variant="tensor_core")
        assert torch.equal(c, (a.double() @ b.double().t()).float())


@pytest.mark.parametrize("value, in_cluster", [
    (np.inf, False), (-np.inf, True), (np.nan, False), (3.4e38, True),
])  # fmt: skip
def test_what_is_not_finite_spreads_as_in_float32(value, in_cluster):
    M, N, K = 5, 9, 40
    if in_cluster and not SIMULATED and torch.cuda.get_device_capability() < plan.CLUSTERS:
        pytest.skip("this GPU has no clusters")
    variant = "tensor_core/split_k_cluster" if in_cluster else "tensor_core"
    a, b, *_ = operands(M, N, K, torch.float32, True, True)
    a[2, 7] = value
    b[4, 7], b[5, 7] = 0, 1
    bias, c = torch.randn(N, device=PLACE), torch.empty(M, N, device=PLACE)
    gemm.multiply(a, b, c, M, N, K, bias=bias, variant=variant)
    expected = torch.nn.functional.linear(a.cpu(), b.cpu(), bias.cpu())
    torch.testing.assert_close(c.cpu(), expected, equal_nan=True, rtol=1e-5, atol=1e-5)


def test_plans_cover_every_size():
    sizes = [1, 10, 31, 32, 33, 64, 200, 256, 1000, 3200, 4096, 100_000]
    for mode, itemsize in (("narrow", 2), ("tf32", 4), ("split", 4)):
        k_size = plan.K_BYTES // itemsize
        for M, N, K in itertools.product(sizes, sizes, [0, *sizes]):
            chip = H200 if (M + N + K) % 2 == 0 else A100
            found = plan.best(plan.Problem(M, N, K, itemsize, mode, BY_K), chip)
            assert not found.in_cluster or (chip is H200 and found.n_splits <= 8)
            assert found.shape in plan.SHAPES[mode]
            assert found.n_splits * found.length >= K
            assert found.n_splits == 1 or (found.n_splits - 1) * found.length < K
            assert found.n_splits == 1 or found.length % k_size == 0
    large = plan.Problem(4096, 4096, 4096, 4, "split", BY_K)
    assert plan.best(large, A100).shape.m == 128
    # A chip with less shared memory gets smaller tiles.
    small = plan.best(large, A100._replace(shared_bytes=99 << 10))
    assert small.shape.m == 64 and small.n_splits == 1


def ways(M, N, K, chip, itemsize=2, mode="narrow", sources=BY_K):
    """{way of `tensor_core`: its plan, or why it refuses}, what is preferred first."""
    lies = BY_K if "any" in sources else sources
    problem = plan.Problem(M, N, K, itemsize, mode, sources, lies)
    rung = gemm.FORWARD["tensor_core"]
    found = {way.name: way.plan(problem, chip) for way in rung.preferred(problem, chip)}
    return found | {way.name: way.plan(problem, chip) for way in rung.ways}


def preferred(*args, **options):
    found = ways(*args, **options)
    return next(n for n, plan in found.items() if not isinstance(plan, operation.Refusal))


@pytest.mark.parametrize("chip, names", [
    (H200, ("few_rows", "split_k_cluster", "wgmma", "mma", "split_k")),
    (A100, ("few_rows", "split_k", "mma", "mma", "split_k")),
], ids=["H200", "A100"])  # fmt: skip
def test_which_way_a_product_goes(chip, names):
    sizes = (8, 64, 4096), (32, 256, 3200), (4096, 4096, 4096), (200, 200, 64), (9, 40, 65536)
    assert tuple(preferred(*size, chip) for size in sizes) == names


def test_a_long_k_is_shared_by_a_cluster_before_tiles_get_smaller():
    """As where a layer's few weights get their gradient from many rows."""
    rounded = dict(itemsize=4, mode="tf32", sources=("by_row", "by_row"))
    found = ways(768, 192, 6304, H200, **rounded)["split_k_cluster"]
    assert found.shape.m == 128 and found.n_splits == 8 and found.in_cluster
    exact = ways(768, 192, 6304, H200, **rounded | dict(mode="split"))["mma"]
    assert exact.shape.m < 128  # three products make the larger tile no faster


@pytest.mark.parametrize("way, size, options, reason", [
    ("few_rows", (9, 40, 64), {}, "takes an a of at most 8 rows, not 9"),
    ("few_rows", (8, 40, 64), dict(sources=("by_k", "by_row")), "lie by k"),
    ("wgmma", (64, 64, 64), dict(mode="split", itemsize=4), "which precision='tf32' allows"),
    ("wgmma", (64, 64, 64), dict(sources=("any", "any")), "begin on 16-byte boundaries"),
    ("wgmma", (64, 64, 64), dict(chip=A100), "needs compute capability 9.0, and this GPU has 8.0"),
    ("wgmma", (64, 64, 64), dict(chip=B200), "compute capability 9.0 alone"),
    ("wgmma", (64, 64, 64), dict(chip=H200._replace(shared_bytes=64 << 10)), "fit 65,536 bytes"),
    ("thin", (64, 17, 64), {}, "of at most 16 outputs"),
    ("wgmma_padded", (64, 64, 64), dict(mode="split", itemsize=4), "takes 16-bit numbers"),
    ("split_k_cluster", (64, 64, 64), dict(chip=A100), "needs compute capability 9.0"),
])  # fmt: skip
def test_a_way_refuses_what_is_impossible_alone(way, size, options, reason):
    found = ways(*size, **dict(chip=H200) | options)
    assert reason in found.pop(way).reason
    assert ways(64, 64, 0, H200)["split_k"].n_splits == 2  # slow, and possible
    assert not isinstance(ways(1, 1, 8, H200)["wgmma"], operation.Refusal)


@pytest.mark.parametrize("M, N, K", [
    (64, 256, 3200), (4096, 4096, 4096), (9, 40, 65536), (9, 40, 5), (9, 40, 0),
])  # fmt: skip
def test_parts_of_k_by_name(M, N, K):
    """As many as are preferred, but for what a cluster holds; two where none are."""
    found = ways(M, N, K, H200)
    one, parts, cluster = found["mma"], found["split_k"], found["split_k_cluster"]
    assert one.n_splits == 1 and not parts.in_cluster and cluster.in_cluster
    assert parts.n_splits >= cluster.n_splits >= 2 and cluster.n_splits <= 8
    assert all(each.n_splits * each.length >= K for each in (one, parts, cluster))


def test_chips_without_tensor_cores_take_another_rung(monkeypatch):
    x = torch.zeros(1, device=PLACE)
    monkeypatch.setattr(operation, "chip_of", lambda array: A100)
    assert gemm.FORWARD.rung("auto", x).name == "tensor_core"
    monkeypatch.setattr(operation, "chip_of", lambda array: T4)
    assert gemm.FORWARD.rung("auto", x).name == "vectorised"
    assert gemm.FORWARD.rung("naive", x).name == "naive"
    with pytest.raises(ValueError, match=r"needs compute capability 8.0, and this GPU has 7.5"):
        gemm.FORWARD.rung("tensor_core", x)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer works on the simulator")
@pytest.mark.parametrize("mode, dtype", [("split", torch.float32), ("narrow", torch.bfloat16)])
def test_clean_under_the_sanitizer(monkeypatch, mode, dtype):
    M, N, K = 9, 24, 136
    shape = plan.SHAPES[mode][-1]
    variant = forced(monkeypatch, shape, 2, K, dtype.itemsize, mode == "narrow")
    a, b, *_ = operands(M, N, K, dtype, True, False)
    c = torch.empty(M, N, dtype=dtype)
    with simulator.sanitize() as report:
        gemm.multiply(a, b, c, M, N, K, b_by_k=False, variant=variant)
    assert not report.findings, report


@pytest.mark.gpu
@pytest.mark.parametrize("mode, dtype", [(mode, dtype) for mode in MODES for dtype in MODES[mode]])
@pytest.mark.parametrize("M, N, K", [(4096, 4096, 4096), (32, 256, 3200), (777, 1001, 1234)])
def test_large_products(mode, dtype, M, N, K):
    a, b = (torch.randn(rows, K, device=PLACE).to(dtype) for rows in (M, N))
    c = torch.empty(M, N, dtype=dtype, device=PLACE)
    precision = "tf32" if mode == "tf32" else "float32"
    gemm.multiply(a, b, c, M, N, K, precision=precision, variant="tensor_core")
    truth = a.double() @ b.double().t()
    error = (c.double() - truth).norm() / truth.norm()
    if mode == "split":
        theirs = (a @ b.t()).double()
        assert error <= 4 * (theirs - truth).norm() / truth.norm()
    else:
        assert error <= {"tf32": 5e-4, "narrow": torch.finfo(dtype).eps}[mode]


@pytest.mark.parametrize("M, N, K, relu, dtype", in_turns(
    [(2, 1, 8, False), (4, 5, 3200, True), (1, 10, 1032, False), (8, 1, 8, False),
     (3, 10, 1032, True), (7, 5, 1032, False), (2, 3, 515, False), (4, 9, 29, False)],
    [torch.float32, torch.float16, torch.bfloat16],
), ids=str)  # fmt: skip
def test_few_rows(M, N, K, relu, dtype):
    """A warp for each column, or a block where k is long; by vectors, or elements of odd rows."""
    a, b, *exact = operands(M, N, K, dtype, True, True, shift=int(relu))
    bias = torch.randn(N).to(PLACE, dtype) if relu else None
    c = torch.full((M, N), np.nan, dtype=dtype, device=PLACE)
    gemm.multiply(a, b, c, M, N, K, bias=bias, relu=relu, variant="tensor_core/few_rows")
    check(c, *exact, bias, relu, 2e-7)
