"""How softmax shares out rows: plans at their limits, every path that a row can take, no races."""

import pytest
import torch
from softmax_checks import DTYPES, both, check, identical, parts_of_a_row, randn, run
from turns import in_turns

from course_lib import SIMULATED, simulator
from course_lib.kernels import operation as operations
from course_lib.kernels import softmax
from course_lib.kernels.blocks import row_plan
from course_lib.kernels.softmax import plan
from course_lib.runtime.host.launch import Chip
from course_lib.runtime.intrinsics import VECTOR_BYTES

CHIPS = [(48 << 10, False), (64 << 10, False), (99 << 10, True), (163 << 10, False),
         (227 << 10, True)]  # fmt: skip

CHIP = Chip((9, 0), 227 << 10, 132, 50 << 20, "some")

simulated_only = pytest.mark.skipif(not SIMULATED, reason="the simulator's own checks")


def around(*numbers):
    return sorted({n + d for n in numbers for d in (-9, -8, -1, 0, 1, 7, 8) if n + d > 0})


def powers(low, high):
    return around(*(2**bits for bits in range(low, high)))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n_arrays", [1, 2])
def test_registers_hold_every_row_up_to_the_limit(itemsize, n_arrays):
    width, limit = VECTOR_BYTES // itemsize, plan.ROW_LIMIT[n_arrays]
    teams = set()
    for n_cols in [n for n in powers(0, 16) if n < limit] + [limit]:
        n_slots, team_bits, n_threads = row_plan.row_plan(n_cols, itemsize, n_arrays)
        assert n_slots in row_plan.usable_slots(itemsize)
        if team_bits is None:
            assert n_slots > 1  # what `specialisations` says
            assert n_threads % 32 == 0 and 64 <= n_threads <= plan.MOST_THREADS[n_arrays]
            held = n_slots * width * n_threads
        else:
            assert 0 <= team_bits <= 5 and row_plan.fits_team(n_slots, itemsize, n_arrays)
            held = n_slots * width << team_bits
            assert team_bits == 0 or held // 2 < -(-n_cols // width) * width, "lanes left idle"
        teams.add(team_bits)
        assert held >= n_cols
    assert teams == {None, 0, 1, 2, 3, 4, 5}


@pytest.mark.parametrize("shared_bytes, clusters", CHIPS)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("n_arrays", [1, 2])
def test_parts_cover_the_row_and_fit_shared_memory(shared_bytes, clusters, itemsize, n_arrays):
    limits = [
        (bytes_ - plan.SHARED_RESERVE) // (itemsize * n_arrays) << bits
        for bytes_ in (shared_bytes, plan.SHARED_SHARE + plan.SHARED_RESERVE)
        for bits in range(4)
    ]
    chip = Chip((9, 0) if clusters else (8, 0), shared_bytes, 8, 1 << 20, "some")
    ways = set()
    for n_cols in powers(0, 21) + around(*limits):
        problem = plan.Problem(3, n_cols, 1, itemsize, n_arrays, True)
        name, _, found = softmax.FORWARD.choose("split", problem, chip)
        ways.add(name)
        _, length, part_bits = found.numbers
        if name == "split/streamed":
            most = row_plan.part_length(problem.reach, plan.MOST_PART_BITS if clusters else 0)
            assert most * itemsize * n_arrays > shared_bytes - plan.SHARED_RESERVE
            assert found.n_threads == row_plan.STREAM_THREADS
            assert 0 <= part_bits <= row_plan.MOST_STREAM_PART_BITS
        else:
            assert (name == "split/shared") == (part_bits == 0) and part_bits <= plan.MOST_PART_BITS
            assert found.shared_bytes == length * itemsize * n_arrays
            assert found.shared_bytes <= shared_bytes - plan.SHARED_RESERVE
            assert found.n_threads % 32 == 0 and 32 <= found.n_threads <= 1024
        assert found.n_blocks == 3 << part_bits
        # Parts begin on 16-byte boundaries, and the last but one is not past the end.
        assert length * itemsize % VECTOR_BYTES == 0
        assert length << part_bits >= problem.reach >= n_cols
    every = {"split/shared", "split/streamed"} | ({"split/cluster"} if clusters else set())
    assert ways == every


@both
@pytest.mark.parametrize("n_parts, dtype", in_turns([1, 2, 4, 8, None], DTYPES))
def test_a_row_in_parts(operation, n_parts, dtype):
    # 600 and 520 columns start on 16-byte boundaries; 603 don't; 8 leave blocks without a part.
    for n_cols, start in ((600, 0), (520, 1), (603, 0), (8, 0), (3, 0)):
        x, dy = randn(2, n_cols, dtype=dtype), randn(2, n_cols, dtype=dtype, seed=1)
        x[1, : n_cols // 2] = -torch.inf  # a whole part without a number
        with parts_of_a_row(max(n_cols, 9), dtype.itemsize, n_parts):
            check(operation, x, dy, "split", start)
            if n_cols == 603:
                x[0, 5], x[1] = torch.nan, -torch.inf
                y, _ = check(operation, x, dy, "split")
                assert y.isnan().all()
                x[0, 5] = x[1, 602] = torch.inf
                assert check(operation, x, dy, "split")[0].isnan().all()


@both
@pytest.mark.parametrize("dtype", DTYPES)
def test_registers_with_every_number_of_slots(operation, dtype):
    seen = set()
    for n_cols in (1, 2, 5, 16, 17, 65, 128, 129, 256, 260, 512, 520, 1032, 1601, 2056):
        for n_arrays in (1, 2):
            problem = plan.Problem(3, n_cols, 1, dtype.itemsize, n_arrays, True)
            name, _, found = softmax.FORWARD.choose("registers", problem, CHIP)
            seen.add((n_arrays, found.kernel, name == "registers/block"))
        x, dy = randn(3, n_cols, dtype=dtype), randn(3, n_cols, dtype=dtype, seed=1)
        check(operation, x, dy, "registers", start=int(n_cols == 17))
    usable = row_plan.usable_slots(dtype.itemsize)
    assert {(n, k, True) for n in (1, 2) for k in usable if k > 1} <= seen
    for n_arrays in (1, 2):
        teams = {n for n in usable if row_plan.fits_team(n, dtype.itemsize, n_arrays)}
        assert {(n_arrays, n, False) for n in teams} <= seen


@simulated_only
@both
@pytest.mark.parametrize(
    "variant, n_cols", [("registers", plan.ROW_LIMIT[2]), ("split", 60_000), ("online", 20_000)]
)
def test_long_rows(operation, variant, n_cols):
    check(operation, randn(1, n_cols) * 3, randn(1, n_cols, seed=1), variant)


@both
@pytest.mark.parametrize("shared_bytes, clusters", [(48 << 10, False), (99 << 10, True)])
def test_small_chips(operation, shared_bytes, clusters, monkeypatch):
    chip = Chip((9, 0) if clusters else (8, 0), shared_bytes // 64, 8, 1 << 20, "small")
    monkeypatch.setattr(softmax, "chip_of", lambda array: chip)
    monkeypatch.setattr(operations, "_chosen", operations._chosen.__wrapped__)
    monkeypatch.setattr(plan, "SHARED_RESERVE", 64)
    monkeypatch.setattr(row_plan, "STREAM_PART", 128)
    monkeypatch.setattr(row_plan, "STREAM_THREADS", 32)
    for n_cols in (100, 300, 1000):
        check(operation, randn(2, n_cols), randn(2, n_cols, seed=1), "split")


def every_path(operation, dtype=torch.float32):
    """(x, dy, variant, context) of long rows: the contract has the short ones of each way."""
    x, dy = randn(1, 264, dtype=dtype), randn(1, 264, dtype=dtype, seed=1)
    yield x, dy, "registers", parts_of_a_row(264, dtype.itemsize, 1)
    for n_parts in (2, 4, None):
        yield x, dy, "split", parts_of_a_row(264, dtype.itemsize, n_parts)
        x, dy = (a[:, 1:].contiguous() for a in (x, dy))  # rows that end between boundaries


def both_passes(operation, x, dy, variant):
    y = run(operation.forward, (x,), variant)
    if variant not in operation.BACKWARD:
        return y, y
    return y, run(operation.backward, (dy, y), variant)


@simulated_only
@both
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_sanitizer_finds_nothing(operation, dtype):
    for x, dy, variant, path in every_path(operation, dtype):
        with path, simulator.sanitize() as report:
            both_passes(operation, x, dy, variant)
        assert not report.findings, f"{variant}: {report}"


@simulated_only
@both
def test_the_order_of_threads_does_not_matter(operation):
    for x, dy, variant, path in every_path(operation):
        with path:
            expected = both_passes(operation, x, dy, variant)
            for order, seed in (("reverse", 0), ("random", 1)):
                with simulator.options(order=order, seed=seed):
                    found = both_passes(operation, x, dy, variant)
                assert all(map(identical, found, expected)), (variant, order)
