"""The tracer: requests, sectors, banks, lanes aligned across loops, branches and calls."""

import csv
import functools

import numpy as np
import pytest

from course_lib import simulator
from course_lib.benchmarks import tracer
from course_lib.benchmarks.tracer_patterns import BLOCK_SIZE, PATTERNS, N
from course_lib.simulator import cuda
from course_lib.simulator.observe.observer import Observer
from course_lib.simulator.observe.real import observing_with
from course_lib.simulator.tracing.counts import IDLE, sectors, wavefronts

LANES = np.arange(32)


def traced(kernel, grid, block, *args, **options):
    with simulator.trace(**options) as t:
        simulator.run(kernel, grid, block, *args)
    return t


def site(t, source, op=None):
    (found,) = [s for s in t.sites if s.source == source and op in (None, s.op)]
    return found


@pytest.mark.parametrize("addresses, size, expected", [
    (LANES * 4, 4, 4), (LANES * 4 + 4, 4, 5), (LANES * 8, 4, 8), (LANES * 128, 4, 32),
    (LANES * 0, 4, 1), (LANES * 2, 2, 2), (LANES * 8, 8, 8), (LANES * 16, 16, 16),
    (np.where(LANES < 3, LANES * 4, IDLE), 4, 1), (LANES * 32 + 28, 8, 33), (LANES * 64, 64, 64),
])
def test_sectors(addresses, size, expected):
    assert sectors(np.stack([addresses, addresses]), size).tolist() == [expected] * 2


@pytest.mark.parametrize("addresses, size, turns, fewest", [
    (LANES * 4, 4, 1, 1), (LANES * 128, 4, 32, 1), (LANES * 132, 4, 1, 1), (LANES * 8, 4, 2, 1),
    (LANES * 0, 4, 1, 1), (LANES // 2 * 4, 4, 1, 1), (LANES, 1, 1, 1), (LANES * 8, 8, 2, 2),
    (LANES * 16, 16, 4, 4), (LANES * 16, 8, 4, 2),
    (np.where(LANES < 8, LANES * 16, IDLE), 16, 1, 1),
    (np.where(LANES == 5, 0, IDLE), 4, 1, 1),
])
def test_turns_of_the_banks(addresses, size, turns, fewest):
    found = wavefronts(np.stack([addresses, addresses]), size)
    assert [part.tolist() for part in found] == [[turns] * 2, [fewest] * 2]


#: pattern -> global load requests and sectors each, store sectors each, and conflicts: by hand
EXPECTED = {
    "coalesced": (N // 32, 4, 4, 0), "stride_2": (N // 32, 8, 4, 0),
    "stride_32": (N // 32, 32, 4, 0), "offset_1": (N // 32, 5, 4, 0),
    "broadcast": (N // 32, 1, 4, 0), "by_column": (512, 32, 32, 0),
    "tile_by_column": (2048, 4, 4, 2048 * 31), "padded_tile_by_column": (2048, 4, 4, 0),
    "shared_stride_2": (512, 4, 4, 1024), "shared_broadcast": (512, 4, 4, 0),
    "shared_float64": (512, 8, 8, 0), "vector_128_bit": (N // 32, 16, 16, 0),
    "elements_64_bit": (N // 32, 8, 8, 0), "offset_64_bit": (N // 32, 9, 8, 0),
    "elements_16_bit": (N // 32, 2, 2, 0), "partial_warp": (169, 3, 3, 0),
    "linked_list": (8 * N // 32, 6, 8, 0),
}


predicted = functools.cache(tracer.predicted)


@pytest.fixture
def known_counts(monkeypatch):
    """Let each pattern be run once for all that these tests ask of it."""
    monkeypatch.setattr(tracer, "predicted", predicted)


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p.name in EXPECTED],
                         ids=lambda pattern: pattern.name)
def test_patterns(pattern, known_counts):
    requests, load, store, conflicts = EXPECTED[pattern.name]
    counts = tracer.predicted(pattern)
    assert counts["global load requests"] == requests
    assert counts["global load sectors"] == requests * load
    assert counts["global store sectors"] == counts["global store requests"] * store
    assert counts["shared load conflicts"] + counts["shared store conflicts"] == conflicts


def test_what_a_site_tells():
    @cuda.jit
    def copy(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i]

    x, y = np.arange(70, dtype=np.float32), np.zeros(70, np.float32)
    t = traced(copy, 1, 96, x, y)
    load = site(t, "x[i]")
    assert (load.op, load.space, load.array, load.function.rpartition(".")[2]) == (
        "load", "global", "x", "copy")
    assert load.filename == __file__ and "y[i] = x[i]" in _line(load)
    assert (load.requests, load.sectors, load.bytes, load.bytes_moved) == (3, 9, 280, 288)
    assert load.sectors_per_request == 3 and load.active_lanes == pytest.approx(70 / 3)
    assert load.bank_ways == 0
    assert load.warps.tolist() == [[0, 0], [0, 1], [0, 2]]
    assert (load.addresses[0] - load.base).tolist() == (LANES * 4).tolist()
    assert load.addresses[2, 6:].tolist() == [-1] * 26
    assert site(t, "y[i]").op == "store"
    np.testing.assert_array_equal(x, y)
    (branch,) = t.branches
    assert (branch.source, branch.executions, branch.divergent) == ("i < x.size", 3, 1)


def _line(found):
    with open(found.filename, encoding="utf-8") as file:
        return file.read().splitlines()[found.line - 1]


# -- alignment -----------------------------------------------------------------------------------


def test_lanes_are_aligned_by_iteration_and_not_by_count():
    @cuda.jit
    def every_other(x, y):
        lane = cuda.threadIdx.x
        for k in range(4):
            if (k + lane) % 2 == 0:
                y[32 * k + lane] = x[32 * k + lane]

    t = traced(every_other, 1, 32, np.ones(128, np.float32), np.zeros(128, np.float32))
    load = site(t, "x[32 * k + lane]")
    assert (load.requests, load.active_lanes) == (4, 16)
    assert [branch.divergent for branch in t.branches] == [0, 4]
    assert [branch.executions for branch in t.branches] == [5, 4]


def test_nested_loops_with_different_trip_counts():
    @cuda.jit
    def triangle(x, y):
        lane = cuda.threadIdx.x
        for row in range(3):
            col = 0
            while col < (lane + row) % 4:
                y[lane] += x[128 * row + 32 * col + lane]
                col += 1

    t = traced(triangle, 1, 32, np.ones(512, np.float32), np.zeros(32, np.float32))
    load = site(t, "x[128 * row + 32 * col + lane]")
    assert load.requests == 9  # three rows, in each at most three columns
    assert load.lanes == sum((lane + row) % 4 for row in range(3) for lane in range(32))
    # Lanes in one request are in one row and column, so their addresses lie close together.
    assert all(np.ptp(line[line >= 0]) < 128 for line in load.addresses)


def test_loops_left_by_break_and_return_begin_anew():
    @cuda.jit(device=True)
    def first_from(x, start, lane):
        k = start
        while True:
            if x[k] >= lane:
                return k
            k += 1

    @cuda.jit
    def search(x, y):
        lane = cuda.threadIdx.x
        for turn in range(2):
            k = 0
            while k < 40:
                if x[k] > 2 * turn + lane % 2:
                    break
                k += 1
            y[lane] = k + first_from(x, 4 * turn, lane % 3)

    t = traced(search, 1, 32, np.arange(64, dtype=np.float32), np.zeros(32, np.float32))
    in_loop, in_function = [s for s in t.sites if s.source == "x[k]"][::-1]
    assert in_loop.requests == 3 + 5 and in_loop.lanes == 16 * (2 + 3 + 4 + 5) - 32 * 0 - 0
    assert in_function.requests == 3 + 1
    assert in_function.lanes == sum(lane % 3 + 1 for lane in range(32)) + 32


def test_calls_from_two_places_are_two_requests():
    @cuda.jit(device=True)
    def fetch(x, i):
        return x[i]

    @cuda.jit
    def twice(x, y):
        lane = cuda.threadIdx.x
        value = np.float32(0)
        if lane < 8:
            value += fetch(x, lane)
        value += fetch(x, 32 + lane)
        y[lane] = value

    t = traced(twice, 1, 32, np.ones(64, np.float32), np.zeros(32, np.float32))
    load = site(t, "x[i]")
    assert (load.requests, load.lanes) == (2, 40)
    assert sorted((line >= 0).sum() for line in load.addresses) == [8, 32]


def test_a_thread_that_leaves_early_takes_no_part_afterwards():
    @cuda.jit
    def leave(x, y):
        i = cuda.grid(1)
        for k in range(3):
            if i % 4 == k:
                return
            y[i] = x[i]

    t = traced(leave, 1, 64, np.ones(64, np.float32), np.zeros(64, np.float32))
    load = site(t, "x[i]")
    assert (load.requests, load.lanes) == (6, 2 * (24 + 16 + 8))


def test_barriers_and_order_change_no_count():
    @cuda.jit
    def reverse(x, y):
        shared = cuda.shared.array(64, np.float32)
        tid = cuda.threadIdx.x
        shared[tid] = x[tid]
        cuda.syncthreads()
        y[tid] = shared[63 - tid]

    tables = []
    for order in ("forward", "reverse", "random"):
        with simulator.options(order=order):
            y = np.zeros(64, np.float32)
            t = traced(reverse, 2, 64, np.arange(64, dtype=np.float32), y)
        assert y[0] == 63
        tables.append(t.table())
    assert tables[0] == tables[1] == tables[2]
    assert site(t, "shared[tid]").bank_ways == 1


# -- other accesses ------------------------------------------------------------------------------


def test_a_view_keeps_its_place_in_its_allocation():
    @cuda.jit
    def copy(x, y):
        i = cuda.grid(1)
        y[i] = x[i]

    t = traced(copy, 1, 32, np.ones(64, np.float32)[1:], np.zeros(32, np.float32))
    assert site(t, "x[i]").sectors_per_request == 5
    assert site(t, "y[i]").sectors_per_request == 4


def test_atomics_updates_tuples_and_slices():
    @cuda.jit
    def many(pair, bins, wide):
        i = cuda.grid(1)
        cuda.atomic.add(bins, i % 2, np.int32(1))
        pair[0][i] += pair[1][i]
        wide[i, 0, 0] = wide[i, 0, 1]

    pair = np.ones(32, np.float32), np.ones(32, np.float64)
    t = traced(many, 1, 32, pair, np.zeros(2, np.int32), np.zeros((32, 1, 2), np.int16))
    atomic = site(t, "cuda.atomic.add(bins, i % 2, np.int32(1))")
    assert (atomic.op, atomic.requests, atomic.sectors, atomic.array) == ("atomic", 1, 16, "bins")
    assert site(t, "pair[0][i]", "load").sectors == site(t, "pair[0][i]", "store").sectors == 4
    assert site(t, "pair[1][i]").sectors == 8
    assert site(t, "wide[i, 0, 1]").sectors == site(t, "wide[i, 0, 0]").sectors == 4


def test_indices_of_every_kind_of_integer():
    @cuda.jit
    def gather(x, y, places, square):
        i = cuda.grid(1)
        y[i] = x[places[i]]
        square[places[i], np.uint8(0)] = y[np.int64(i)]

    places = np.arange(32, dtype=np.int32)[::-1].copy()
    t = traced(gather, 2, 16, np.ones(32, np.int8), np.zeros(32, np.float32), places,
               np.zeros((32, 8), np.float32))
    assert site(t, "x[places[i]]").sectors == 2
    assert site(t, "square[places[i], np.uint8(0)]").sectors == 32
    assert (site(t, "x[places[i]]").addresses[0, :16] - site(t, "x[places[i]]").base).tolist() == (
        list(range(31, 15, -1)))
    with pytest.raises(simulator.OutOfBounds, match=r"x\[places\[i\]\] .* index -1"):
        traced(gather, 2, 16, np.ones(32, np.int8), np.zeros(32, np.float32), places - 1,
               np.zeros((32, 8), np.float32))


def test_local_arrays_are_not_memory():
    @cuda.jit
    def local(y):
        mine = cuda.local.array(2, np.float32)
        mine[0] = 1
        y[cuda.grid(1)] = mine[0]

    t = traced(local, 1, 32, np.zeros(32, np.float32))
    assert [s.source for s in t.sites] == ["y[cuda.grid(1)]"]


@pytest.mark.parametrize("blocks, requests", [(None, 6), (2, 2), ([0, (5, 0), 9], 2), ([], 0)])
def test_blocks_to_trace(blocks, requests):
    @cuda.jit
    def fill(y):
        y[cuda.grid(1)] = 1

    y = np.zeros(192, np.float32)
    t = traced(fill, 6, 32, y, blocks=blocks)
    assert sum(s.requests for s in t.sites) == requests
    assert y.all()


def test_launches_add_up():
    @cuda.jit
    def fill(y):
        y[cuda.grid(1)] = 1

    with simulator.trace() as t:
        for _ in range(3):
            simulator.run(fill, 2, 32, np.zeros(64, np.float32))
    assert t.sites[0].requests == 6
    simulator.run(fill, 2, 32, np.zeros(64, np.float32))
    assert t.sites[0].requests == 6


def test_an_error_in_the_kernel_comes_through():
    @cuda.jit
    def beyond(y):
        y[cuda.grid(1)] = 1

    with pytest.raises(simulator.OutOfBounds), simulator.trace():
        simulator.run(beyond, 1, 32, np.zeros(31, np.float32))


def test_only_one_may_watch():
    @cuda.jit
    def fill(y):
        y[cuda.grid(1)] = 1

    with simulator.trace(), observing_with(Observer()), pytest.raises(RuntimeError, match="once"):
        simulator.run(fill, 1, 32, np.zeros(32, np.float32))


def test_the_table():
    @cuda.jit
    def copy(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = x[i]

    t = traced(copy, 2, 32, np.ones(64, np.float32), np.zeros(64, np.float32))
    text = t.table()
    assert "x[i]" in text and "sectors/request" in text and "i < x.size" in text
    assert len({len(line) for line in text.split("\n\n")[1].splitlines()}) == 1
    assert t._repr_html_().count("<tr>") == 3 + 2
    with simulator.trace() as t:
        pass
    assert "nothing was traced" in t.table() and t.sites == t.branches == []


# -- the comparison with Nsight Compute ----------------------------------------------------------


def fake_ncu(path, changes=()):
    """A file such as ncu writes, with the counts that the tracer gives."""
    metrics = sorted({metric for names in tracer.METRICS.values() for metric in names})
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write("==PROF== Connected to process 7\n")
        table = csv.DictWriter(file, ["ID", "Kernel Name", *metrics], quoting=csv.QUOTE_ALL)
        table.writeheader()
        table.writerow(dict.fromkeys(metrics, "sector"))
        for number, pattern in enumerate(PATTERNS):
            row = dict.fromkeys(metrics, "0")
            for what, count in tracer.predicted(pattern).items():
                count += dict(changes).get((pattern.name, what), 0)
                row[tracer.METRICS[what][0]] = f"{count:,}"
            name = f"_ZN4some6module{len(pattern.name)}{pattern.name}B2v1B3abc" if number % 2 else (
                f"some::module::{pattern.name}[abi:v1](Array<float>)")
            table.writerow(row | {"ID": number, "Kernel Name": name})


def test_comparison_with_ncu(tmp_path, capsys, known_counts):
    fake_ncu(tmp_path / "ncu.csv")
    assert tracer.main(["--compare", str(tmp_path / "ncu.csv")]) == 0
    out = capsys.readouterr().out
    assert all(f"{pattern.name} " in out for pattern in PATTERNS) and "differ" not in out
    changes = {("coalesced", "global load sectors"): 1,
               ("padded_tile_by_column", "shared load conflicts"): 10,
               ("tile_by_column", "shared load conflicts"): -9000}
    fake_ncu(tmp_path / "ncu.csv", changes)
    rows = tracer.compare(tmp_path / "ncu.csv")
    assert {(p.name, what) for p, what, *_, agree in rows if not agree} == {
        ("coalesced", "global load sectors"), ("tile_by_column", "shared load conflicts")}
    record = tracer.records(rows)[0]
    assert record["name"] == "tracer.coalesced" and record["shape"] == [N]
    assert {"label": "global load sectors", "kind": "count", "predicted": N // 8,
            "measured": N // 8 + 1} in record["rows"]


def test_a_file_without_metrics_is_refused(tmp_path):
    (tmp_path / "empty.csv").write_text("==ERROR== no GPU\n")
    with pytest.raises(ValueError, match="no table"):
        tracer.compare(tmp_path / "empty.csv")


def test_metrics_are_printed_for_ncu(capsys):
    assert tracer.main(["--metrics"]) == 0
    printed = capsys.readouterr().out.strip().split(",")
    assert len(printed) == len(set(printed)) == 12
    assert BLOCK_SIZE % 32 == 0
