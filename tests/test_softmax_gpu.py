"""Softmax on a GPU: accuracy where it is used, huge arrays, graphs, streams."""

import pytest
import torch
from softmax_checks import DTYPES, both, check, identical

from course_lib.kernels import softmax
from course_lib.kernels.softmax import plan
from course_lib.runtime.host import device

VARIANTS = [variant for variant in softmax.FORWARD if variant != "strided"]
SHAPES = [
    (128, 200), (128, 1000), (1024, 10000), (49152, 512), (16384, 1024), (8192, 4096), (256, 50304),
    (64, 131072),
]  # fmt: skip

pytestmark = pytest.mark.gpu
every_variant = pytest.mark.parametrize("variant", ["auto", *VARIANTS])
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def randn(*shape, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@both
@every_variant
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_accuracy(operation, variant, dtype, shape):
    if variant == "registers" and shape[1] > plan.ROW_LIMIT[2]:
        pytest.skip(f"rows of {shape[1]:,} are too long for registers")
    # Every row is computed alike: some of them are enough for float64 on the host.
    n_rows = min(shape[0], max(8, 2**20 // shape[1]))
    x = randn(n_rows, shape[1], dtype=dtype) * 3
    check(operation, x, randn(*x.shape, dtype=dtype, seed=1), variant)


@both
@every_variant
@every_dtype
def test_all_rows_of_the_largest_grids(operation, variant, dtype):
    for n_rows, n_cols in ((49152, 512), (1_000_003, 7)):
        x = randn(n_rows, n_cols, dtype=dtype)
        y = operation.forward(x, variant=variant)
        # How far a row begins behind a boundary decides the order in which its numbers are added:
        # eight rows on, it is as far again.
        for first in (0, n_rows // 16 * 8, (n_rows - 50) // 8 * 8):
            part = slice(first, first + 58)
            assert identical(y[part], operation.forward(x[part].clone(), variant=variant))
        total = y.float() if operation.name == "softmax" else y.float().exp()
        tolerance = 1e-5 + torch.finfo(dtype).eps * (1 if operation.name == "softmax" else 8)
        assert (total.sum(-1) - 1).abs().max() < tolerance


def boundaries():
    """(dtype, length) where the way of a row changes on this chip, and one element further."""
    if device.count() == 0:
        return []
    available = device.properties(0).shared_bytes_per_block_optin - plan.SHARED_RESERVE
    found = set()
    for dtype in (torch.float32, torch.bfloat16):
        for n_arrays in (1, 2):
            size = dtype.itemsize * n_arrays
            lengths = (
                plan.ROW_LIMIT[n_arrays], available // size, plan.SHARED_SHARE // size << 2,
                available // size << 3,
            )  # fmt: skip
            found |= {(dtype, n + more) for n in lengths for more in (0, 1)}
    return sorted(found, key=str)


@both
@pytest.mark.parametrize("dtype, n_cols", boundaries(), ids=str)
def test_the_lengths_at_which_the_way_changes(operation, dtype, n_cols):
    x, dy = randn(2, n_cols, dtype=dtype) * 3, randn(2, n_cols, dtype=dtype, seed=1)
    check(operation, x, dy, "auto")
    check(operation, x, dy, "split", start=1)


@pytest.mark.gpu_memory(20)
@both
@pytest.mark.parametrize(
    "variant, n_cols",
    [
        *((variant, 4096) for variant in VARIANTS),
        ("registers", 8),
        ("registers", 100),
        ("split", 24),
    ],
)
def test_more_than_2_to_the_31_elements(operation, variant, n_cols):
    n_rows = 2**31 // n_cols + 3
    x = torch.zeros(n_rows, n_cols, dtype=torch.bfloat16, device="cuda")
    x[-3:] = randn(3, n_cols, dtype=torch.bfloat16)
    y = operation.forward(x, variant=variant)
    assert identical(y[-3:], operation.forward(x[-3:].clone(), variant=variant))
    assert identical(y[:1], operation.forward(x[:1].clone(), variant=variant))
    if variant in operation.BACKWARD:
        dx = operation.backward(x, y, variant=variant)
        assert identical(dx[-3:], operation.backward(x[-3:].clone(), y[-3:].clone(),
                                                     variant=variant))  # fmt: skip


# Teams of lanes, a block, a cluster, parts that are streamed.
LENGTHS = {"auto": (200, 3000, 60_000, 600_000), "split": (200, 60_000, 600_000)}
CASES = [(variant, n) for variant in VARIANTS for n in LENGTHS.get(variant, (200, 3000))]
CASES += [("auto", n) for n in LENGTHS["auto"]]


def calls(operation, variant, n_cols):
    """() -> results of both directions, for `variant` and rows of `n_cols`."""
    x, dy = randn(32, n_cols), randn(32, n_cols, seed=1)
    backward = variant in (*operation.BACKWARD, "auto")

    def call():
        y = operation.forward(x, variant=variant)
        return (y, operation.backward(dy, y, variant=variant)) if backward else (y,)

    return x, call


@both
@pytest.mark.parametrize("variant, n_cols", CASES)
def test_a_captured_graph_computes_anew(operation, variant, n_cols):
    x, call = calls(operation, variant, n_cols)
    call()  # compiled before the capture
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    for seed in (5, 6):
        x.copy_(randn(*x.shape, seed=seed))
        graph.replay()
        assert all(map(identical, captured, call()))


@both
@pytest.mark.parametrize("variant, n_cols", CASES)
def test_two_streams_do_not_disturb_each_other(operation, variant, n_cols):
    expected, streams, found = [], [torch.cuda.Stream() for _ in range(2)], []
    jobs = [calls(operation, variant, n_cols) for _ in streams]
    jobs[1][0].mul_(2)
    for _, call in jobs:
        expected.append(call())
    torch.cuda.synchronize()
    for _ in range(5):
        for stream, (_, call) in zip(streams, jobs, strict=True):
            with torch.cuda.stream(stream):
                found.append(call())
    torch.cuda.synchronize()
    for i, results in enumerate(found):
        assert all(map(identical, results, expected[i % 2]))
