"""Records of measurements: how they are kept, and that none is older than its kernel."""


import pytest

from course_lib import bench, benchmarks
from course_lib.benchmarks import launch as launch_benchmark
from course_lib.benchmarks import launches, lesson_02, pictures
from course_lib.kernels import activation, softmax
from course_lib.runtime.compile.fingerprint import fingerprint
from course_lib.teach.exercises import suspects

COPY = bench.Timing(10.0, (9.0, 11.0))
COMMAND = "python -m course_lib bench activation --record"
DEVICE = {
    "name": "NVIDIA Test 9", "compute_capability": [9, 0], "multiprocessors": 132,
    "shared_bytes": 227 << 10,
}  # fmt: skip


def record(name="relu.forward", shape=(4, 5), microseconds=20.0):
    timing = bench.Timing(microseconds, (microseconds - 1, microseconds + 1))
    rows = [bench.row("naive", "ours", timing, 40_000, COPY)]
    return bench.make_record(name, shape, "float32", 40_000, COPY, rows, "hash", COMMAND)


def test_a_row_states_rate_and_share_of_the_copy():
    assert record()["rows"] == [
        {
            "label": "naive", "kind": "ours", "microseconds": 20.0, "quartiles": [19.0, 21.0],
            "gbps": 2.0, "percent_of_copy": 50.0,
        }
    ]  # fmt: skip
    assert record()["copy_gbps"] == 4.0


def test_records_replace_their_like_and_keep_the_rest(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "device_facts", lambda: DEVICE)
    path = launches.save([record(), record("swish.forward")], folder=tmp_path)
    assert path.name == "nvidia-test-9"
    launches.save([record(microseconds=30.0), record(shape=(7,))], folder=tmp_path)
    monkeypatch.setattr(bench, "RESULTS_FOLDER", tmp_path)
    held = bench.load_records(DEVICE["name"])
    assert held["device"] == DEVICE
    assert len(held["records"]) == 3
    (mine,) = bench.find(held, name="relu.forward", shape=(4, 5))
    assert mine["rows"][0]["microseconds"] == 30.0
    assert "kernel_hash" not in mine and not launches.stale(mine, DEVICE)[0]
    assert {file.name for file in path.iterdir()} == {"device.json", "relu.json", "swish.json"}
    lines = (path / "relu.json").read_text().splitlines()
    assert sum('"kernel": ' in line and '"scalars": ' in line for line in lines) == 2
    assert bench.find(held, name="relu.forward", dtype="float16") == []


def test_of_several_devices_the_fullest_is_shown_unless_the_one_here_has_as_much(
    tmp_path, monkeypatch
):
    fuller = DEVICE | {"name": "NVIDIA Test 10"}
    assert bench.load_records("NVIDIA Test 9") is None
    monkeypatch.setattr(bench, "RESULTS_FOLDER", tmp_path)
    assert bench.load_records() is None
    here, names = type("P", (), {"name": DEVICE["name"]}), ["relu.forward", "swish.forward"]

    def shown(n):
        monkeypatch.setattr(bench.device, "count", lambda: n)
        monkeypatch.setattr(bench.device, "properties", lambda: here)
        return bench.load_records()["device"]["name"]

    bench.save_records([record(name) for name in names], facts=fuller, folder=tmp_path)
    assert shown(0) == shown(1) == fuller["name"]  # nothing is recorded here
    bench.save_records([record(names[0])], facts=DEVICE, folder=tmp_path)
    assert shown(0) == shown(1) == fuller["name"]
    bench.save_records([record(names[1])], facts=DEVICE, folder=tmp_path)
    bench.save_records([record(names[0], shape=(9,))], facts=fuller, folder=tmp_path)
    assert (shown(0), shown(1)) == (fuller["name"], DEVICE["name"])
    assert [len(held["records"]) for held in bench.recordings()] == [3, 2]


def test_a_broken_file_of_records_is_not_overwritten(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "device_facts", lambda: DEVICE)
    path = tmp_path / "nvidia-test-9" / "relu.json"
    path.parent.mkdir()
    path.write_text("{ half a file")
    with pytest.raises(ValueError):
        bench.save_records([record()], folder=tmp_path)
    assert path.read_text() == "{ half a file"


def test_times_summarise_as_median_and_quartiles():
    timing = bench.Timing.of([5.0, 1.0, 2.0, 4.0, 3.0])
    assert timing.microseconds == 3.0
    assert timing.quartiles == (1.5, 4.5)


def test_buffers_outgrow_the_cache(monkeypatch):
    monkeypatch.setattr(bench.device, "properties", lambda index: type("P", (), {"l2_bytes": 100}))
    assert bench.buffer_sets(1000) == 2
    assert bench.buffer_sets(50) == 7
    assert bench.buffer_sets(1) == 24


def recorded():
    """(record, what its device is) of all that is recorded."""
    for held in bench.recordings():
        for found in held["records"]:
            yield found, held["device"]


def test_lesson_2_measures_the_suspects_that_its_exercise_shows():
    for name in ("first", "second", "third"):
        measured, shown = getattr(lesson_02, name), getattr(suspects, name)
        assert fingerprint(measured) == fingerprint(shown)


def which(record):
    return record["name"], record["dtype"], *record["shape"]


def test_no_record_is_older_than_its_kernel_unless_it_says_so():
    stale, said = set(), set()
    for found, facts in recorded():
        assert ("kernel_hash" in found) != ("launches" in found)
        if launches.stale(found, facts)[0]:
            stale.add(which(found))
        if found.get("stale"):
            said.add(which(found))
    fresh = "measure again: python -m course_lib bench … --record"
    assert stale == said, f"{fresh}; stale: {stale - said}; not stale, but said so: {said - stale}"


def test_records_say_how_they_were_made():
    for found, _ in recorded():
        assert found["command"].startswith(
            ("python -m course_lib bench ", "python -m course_lib.benchmarks."))
        assert found["commit"] not in ("", "unknown") and not found["commit"].endswith("+")
        assert {"torch", "numba", "numba-cuda", "python"} <= found["versions"].keys()




def softmax_record(name="softmax.forward", shape=(8192, 4096), **microseconds):
    times = {"naive": 900.0, "registers": 64.0, "PyTorch eager": 100.0} | microseconds
    n_bytes = 2 * 4 * shape[0] * shape[1]
    copied = bench.Timing(62.0, (61.0, 63.0))
    rows = [
        bench.row(label, "ours", bench.Timing(time, (time, time)), n_bytes, copied)
        for label, time in times.items()
    ]
    made = bench.make_record(name, shape, "float32", n_bytes, copied, rows, "hash", "a command")
    return made | {"default": "registers"}


def test_a_hash_tells_every_kernel_and_every_plan():
    def plan():
        return 1

    (kernel,) = activation.relu.FORWARD["naive"].kernels
    assert bench.kernel_hash([kernel]) == bench.kernel_hash((kernel,))
    assert bench.kernel_hash([kernel]) != bench.kernel_hash([kernel, plan])


def test_the_table_and_the_plots(tmp_path):
    host = bench.host_record("launch.host", (1,), "float32", [], "hash", "a command")
    text = benchmarks.table([record(), host])
    assert "relu.forward 4x5 float32: copy 4 GB/s | naive 20.00 µs (50% of copy)" in text
    device = {"name": "NVIDIA Test 9", "l2_bytes": 10}
    benchmarks.save_plots([record(), host], device, tmp_path / "new")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["relu.forward-4x5-float32.png"]


def test_rows_of_several_lengths_are_drawn_over_their_length(tmp_path):
    records = [softmax_record(shape=(4096, n_cols)) for n_cols in (1024, 64, 256)]
    device = {"name": "NVIDIA Test 9", "l2_bytes": 1}
    benchmarks.save_plots(records, device, tmp_path)
    assert (tmp_path / "softmax.forward-float32.png").exists()
    assert len(list(tmp_path.iterdir())) == 4
    figure = pictures.sweep(records, "NVIDIA Test 9", least_bytes=0)
    assert "naive 7 at 64, 7 at 256, 7 at 1,024" in figure.alt
    assert pictures.sweep(records, "NVIDIA Test 9", least_bytes=2 * 4 * 4096 * 256) is None
    twice = [softmax_record(shape=(1, 256), naive=62.0), *records]  # the larger of two counts
    assert pictures.sweep(twice, "", least_bytes=0).alt == figure.alt


def test_the_ladder_says_what_is_new_on_each_rung():
    noted = pictures.NOTES["softmax"]
    for operation in softmax.OPERATIONS.values():
        along_rows = [rung for rung in operation.FORWARD if rung != "strided"]
        assert list(noted) == along_rows
    figure = pictures.ladder(softmax_record(), "NVIDIA Test 9")
    words = [text.get_text() for text in figure.axes[0].texts]
    assert noted["naive"] in words and noted["registers"] in words


def test_times_as_fast_is_the_ratio_of_the_times():
    rows = [{"label": "a", "microseconds": 2.0}, {"label": "b", "microseconds": 5.0}]
    assert bench.times_as_fast({"rows": rows}, "a", "b") == 2.5
    with pytest.raises(KeyError, match="c"):
        bench.times_as_fast({"rows": rows}, "a", "c")


@pytest.mark.gpu
def test_device_and_host_times_on_a_gpu():
    import torch

    x = torch.randn(1 << 24, device="cuda")
    y = torch.empty_like(x)
    times = bench.device_times({"copy": lambda i: y.copy_(x)}, calls=5, rounds=5)
    gbps = 2 * x.nbytes / times["copy"].microseconds / 1e3
    assert 50 < gbps < 20_000
    found = bench.host_times({"launch": lambda: y.copy_(x)}, calls=20, rounds=5)
    assert 0.5 < found["launch"].microseconds < 500
    (launched,) = launch_benchmark.run(rounds=5)
    assert {row["label"] for row in launched["rows"]} >= {"runtime.launch", "torch.softmax"}
