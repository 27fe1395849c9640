"""The kernels that lesson 4 measures compute what they claim; the profiler's table is read."""

import csv

import numpy as np
import pytest
from benched import each_once, without_a_gpu

from course_lib import bench, reference, simulator
from course_lib.benchmarks import lesson_04, profile_softmax


def rows_of(shape):
    return (np.random.default_rng(0).normal(size=shape) * 3).astype(np.float32)


def test_chase_follows_the_chain():
    order = np.random.default_rng(0).permutation(16).astype(np.int32)
    chain = np.zeros(16, dtype=np.int32)
    chain[order] = np.roll(order, -1)
    place = order[:1].copy()
    simulator.run(lesson_04.chase_kernel, 1, 1, chain, place, 5)
    assert place[0] == order[5]


@pytest.mark.parametrize("n_loads", lesson_04.READERS)
def test_readers_read_everything_once(n_loads):
    x = np.arange(64 * 4 * n_loads * 3, dtype=np.float32)
    y = np.zeros(64, dtype=np.float32)
    with simulator.trace() as trace:
        lesson_04.READERS[n_loads][2, 32](x, y)
    assert y.sum() == x.sum()
    assert trace.sites[0].bytes_moved == x.nbytes


@pytest.mark.parametrize("kernel", [lesson_04.held_narrow_kernel, lesson_04.held_wide_kernel])
def test_held_rows(kernel):
    x = rows_of((1, 4096))
    y = np.zeros(4096, dtype=np.float32)
    simulator.run(kernel, 1, lesson_04.BLOCK_SIZE, x.ravel(), y, 4096)
    np.testing.assert_allclose(y, reference.softmax(x)[0], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("team", [8, 16, 32])
def test_teams(team):
    x = rows_of((5, 64))
    y = np.zeros_like(x)
    simulator.run(lesson_04.teams_kernel, 2, 96, x, y, team)
    np.testing.assert_allclose(y, reference.softmax(x), rtol=1e-5, atol=1e-9)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """Let the benchmark run without a GPU, on a chip of one multiprocessor, with made-up times."""
    without_a_gpu(monkeypatch)
    monkeypatch.setattr(lesson_04, "DEVICE", "cpu")
    monkeypatch.setattr(bench, "device_times", each_once)
    monkeypatch.setattr(bench, "device_facts", lambda: {"multiprocessors": 1})
    monkeypatch.setattr(bench, "buffer_sets", lambda n_bytes: 1)


def test_latency_is_that_of_one_load(on_the_cpu, monkeypatch):
    monkeypatch.setattr(lesson_04, "FOOTPRINTS", {"near": 1024, "far": 4096})
    record = lesson_04.latency(n_steps=5)
    assert [row["label"] for row in record["rows"]] == ["near", "far"]
    assert record["rows"][0]["nanoseconds"] == 2000  # 10 µs for 5 steps
    assert record["kernel_hash"] == lesson_04.kernel_hashes()["lesson_04.latency"]


def test_in_flight_counts_whole_rounds(on_the_cpu, monkeypatch):
    monkeypatch.setattr(lesson_04, "IN_FLIGHT", [(1, 4, 256), (2, 16, 256)])
    rows = lesson_04.in_flight(n=5000)["rows"]
    assert [row["in_flight"] for row in rows] == [1024, 8192]
    assert [row["bytes"] for row in rows] == [4 * 19 * 256, 4 * 2 * 2048]
    assert rows[1]["gbps"] == pytest.approx(4 * 4096 / 10 / 1e3, abs=0.1)


def test_softmax_is_checked_and_timed(on_the_cpu, monkeypatch):
    record = lesson_04.teams(shape=(5, 64))
    assert [row["label"] for row in record["rows"]][1:4] == [
        "a team of 32 lanes", "a team of 16 lanes", "a team of 8 lanes"]
    assert record["bytes"] == 2 * 4 * 320 and record["copy_gbps"] > 0
    assert len(lesson_04.steps(n_rows=1)["rows"]) == 4


def test_what_is_wrong_is_not_timed(on_the_cpu, monkeypatch):
    monkeypatch.setattr(lesson_04, "launch", lambda *arguments: None)
    with pytest.raises(AssertionError, match="a team of 32 lanes is wrong, so it is not timed"):
        lesson_04.teams(shape=(5, 64))


#: ncu's names of the rungs' kernels, as it demangles numba's or leaves them, and PyTorch's.
NAMES = {
    "naive": "course_lib::kernels::softmax::ladder::forward_kernels::naive_kernel[abi:v1][abi:x]",
    "shared": "_ZN10course_lib7kernels7softmax6ladder15forward_kernels13shared_kernelB2v2B1xE",
    "warp": "forward_kernels::warp_kernel[abi:v3](Array<float, 1, C>)",
    "online": "forward_kernels::online_kernel[abi:v4](Array<float, 1, C>)",
    "registers": "forward_kernels::block_kernel[abi:v5](Array<float, 1, C>)",
    "split": "forward_kernel::split_kernel[abi:v6](Array<float, 1, C>)",
    "PyTorch eager": "void at::native::cunn_SoftMaxForwardSmem<4, float, float>(float *)",
}


def write(path, names=NAMES, units=None, without=()):
    """A file as ncu prints it, in which every count of the n-th kernel is 1,000 · (n + 1)."""
    metrics = [metric for metric in profile_softmax.METRICS.values() if metric not in without]
    known = {"gpu__time_duration.sum": "ns", "dram__bytes_read.sum": "byte",
             "dram__bytes_write.sum": "byte"}
    units = known | (units or {})
    with open(path, "w", newline="") as file:
        file.write("==PROF== Connected to process 1\n")
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerow(["ID", "Kernel Name", *metrics])
        writer.writerow(["", "", *(units.get(metric, "") for metric in metrics)])
        writer.writerow([0, "void distribution_elementwise(float *)", *("7" for _ in metrics)])
        for n, name in enumerate(names):
            writer.writerow([n + 1, name, *(f"{n + 1},000" for _ in metrics)])
    return path


def test_profile_is_read(tmp_path):
    rows = profile_softmax.read(write(tmp_path / "ncu.csv", NAMES.values()))
    assert [row["label"] for row in rows] == list(NAMES)
    assert [row["kind"] for row in rows] == ["ours"] * 6 + ["peer"]
    online = rows[3]
    assert online["microseconds"] == 4 and online["registers"] == 4000
    assert online["load_sectors_per_request"] == 1
    assert online["gbps"] == pytest.approx(2 * 4 * 8192 * 4096 / 4e3)
    assert "online" in profile_softmax.table(rows)
    record = profile_softmax.record(rows)
    assert record["kernel_hash"] == lesson_04.kernel_hashes()[record["name"]]


def test_profile_in_other_units(tmp_path):
    units = {"gpu__time_duration.sum": "us", "dram__bytes_read.sum": "Mbyte"}
    row = profile_softmax.read(write(tmp_path / "ncu.csv", NAMES.values(), units))[0]
    assert row["microseconds"] == 1000 and row["dram_read_bytes"] == 1e9


@pytest.mark.parametrize(
    "change, says",
    [
        ({"names": list(NAMES.values())[1:]}, "no kernel of naive"),
        ({"names": [*NAMES.values(), NAMES["warp"]]}, "two kernels of warp"),
        ({"without": ["dram__bytes_read.sum"]}, "has no dram__bytes_read.sum"),
        ({"units": {"gpu__time_duration.sum": "year"}}, "'year'"),
    ],
)
def test_profile_that_is_not_what_it_should_be(tmp_path, change, says):
    with pytest.raises(ValueError, match=says):
        profile_softmax.read(write(tmp_path / "ncu.csv", **{"names": NAMES.values()} | change))
