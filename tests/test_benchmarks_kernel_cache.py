"""The benchmark of the cache: two processes, one that compiles and one that finds it done."""

from pathlib import Path

import pytest

from course_lib import benchmarks
from course_lib.benchmarks import kernel_cache as benchmark


def test_the_second_process_compiles_nothing(monkeypatch):
    pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
    written, child = [], benchmark._child

    def spy(what, folder, compile_only):
        found = child(what, folder, compile_only)
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        written.append({(path, path.stat().st_ino, path.stat().st_mtime_ns) for path in files})
        return found

    monkeypatch.setattr(benchmark, "_child", spy)
    found = benchmark.first_calls("softmax.forward", compile_only=True)
    cold, warm = found["cold"], found["warm"]
    assert cold["files"] == warm["files"] >= 1 and written[0] == written[1]
    assert cold["microseconds"] > warm["microseconds"] > 0


def test_a_process_that_fails_is_heard():
    with pytest.raises(RuntimeError, match="first call of nonsense failed"):
        benchmark.first_calls("nonsense", compile_only=True)


def test_the_record(monkeypatch):
    times = iter([(9e6, 1e4), (8e6, 2e4), (4e6, 2e6)] * 3)

    def first_calls(what):
        cold, warm = next(times)
        return {"cold": {"microseconds": cold}, "warm": {"microseconds": warm}}

    monkeypatch.setattr(benchmark, "first_calls", first_calls)
    (record,) = benchmark.run(rounds=3)
    assert record["name"] == "kernel_cache.first_call"
    assert record["kernel_hash"] == benchmark.kernel_hashes()[record["name"]]
    rows = {row["label"]: row for row in record["rows"]}
    assert len(rows) == 6
    assert rows["squeeze_excite.forward, warm"]["speedup"] == 900
    assert rows["squeeze_excite.forward, cold"]["speedup"] == 1
    assert rows["torch.compile of SqueezeExcitation, warm"] == {
        "label": "torch.compile of SqueezeExcitation, warm", "kind": "peer",
        "microseconds": 2e6, "quartiles": [2e6, 2e6], "speedup": 2.0,
    }  # fmt: skip
    assert "kernel_cache.first_call 8x144x95x95 float32: squeeze_" in benchmarks.table([record])


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_bench_kernel_cache_on_a_gpu():
    for what in benchmark.OPERATIONS:
        found = benchmark.first_calls(what)
        assert found["cold"]["files"] == found["warm"]["files"] >= 1
        assert found["cold"]["microseconds"] >= 5 * found["warm"]["microseconds"]
