"""Drawn problems: what they are, how they are checked, timed, kept and told of, without a GPU."""

import json
import math
import signal

import pytest
import torch
from benched import set_all, without_a_gpu

import course_lib
from course_lib import bench, cli, device, ops, results_table
from course_lib.benchmarks import drawn, drawn_compiling, drawn_problems, gpu, launches
from course_lib.benchmarks.drawn_problems import OPERATIONS, problem
from course_lib.kernels import conv2d, global_avg_pool

H200 = bench.load_records("NVIDIA H200")["device"]


@pytest.fixture
def times(monkeypatch):
    """Made-up times: {label: µs}; what is timed is called as often as a GPU would be given it."""
    without_a_gpu(monkeypatch)
    found = {"ours": 20.0, "eager": 10.0, "compiled": 5.0}

    def device_times(candidates, *, calls, rounds):
        for key, call in candidates.items():
            for i in range(2):
                call(i)
            assert calls[key] >= 2
        return {key: bench.Timing(found[key[1]], (9.0, 11.0)) for key in candidates}

    set_all(monkeypatch, bench, device_times=device_times, buffer_sets=lambda n_bytes, most: 2)
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(torch.compiler, "reset", lambda: None)
    return found


def measured(count=1, names=("relu",), **options):
    """The records of a run on small problems."""
    return [*drawn.run(count, names=names, most=5, device="cpu", **options)][-1]


def test_a_problem_is_the_same_each_time_and_none_like_another():
    for name, (kinds, *_) in OPERATIONS.items():
        first, again = ([problem(name, i, 7) for i in range(12)] for _ in range(2))
        labels = [found.label for found in first]
        assert labels == [found.label for found in again] and len({*labels}) >= 10
        assert {drawn_problems.kind_of(name, i) for i in range(12)} == {*kinds}
        assert labels != [problem(name, i, 8).label for i in range(12)]
        for found in first:
            assert 0 < found.n_elements <= drawn_problems.MOST_ELEMENTS
            assert found.flops <= drawn_problems.MOST_FLOPS
    draw = drawn_problems.Draw("any")
    found = [draw.size(3, 3000) for _ in range(400)]
    assert 3 <= min(found) < 10 and 2000 < max(found) <= 3000
    for share in (lambda n: n % 8 == 0, lambda n: n % 2):
        assert 40 < sum(map(bool, map(share, found))) < 360


def test_no_problem_is_refused_and_its_kernels_are_compiled_ahead(monkeypatch, capsys):
    asked = []
    monkeypatch.setattr(drawn_compiling, "_in_process", lambda *given: asked.append(given) or "7")
    assert cli.main(["bench", "--drawn", "2", "relu", "--compile-only"]) == 0
    assert asked[0][0] == "0" and "7 kernels" in capsys.readouterr().out
    drawn_compiling.main(json.dumps([H200, 2, list(OPERATIONS), drawn.SEED, 1]))
    assert len({*json.loads(capsys.readouterr().out)}) > 100


def test_passes_are_checked_and_timed(times):
    found = measured(1, ("relu", "batch_norm"), compile_seconds=1e9)
    assert [record["name"] for record in found] == [
        f"drawn.{name}.{way}" for name in ("relu", "batch_norm") for way in ("forward", "backward")
    ]
    for record in found:
        assert record["seed"] == drawn.SEED and record["cudnn_benchmark"]
        assert record["rows"] == [] and not record["deterministic"]
        for case in record["cases"]:
            assert (case["ours"], case["eager"], case["compiled"]) == (20, 10, 5)
            assert 0 <= case["error"] <= 2 * case["eager_error"] + 1e-2
    assert {r["name"]: r["kernel_hash"] for r in found}.items() <= drawn.kernel_hashes().items()


def test_kernels_of_groups_take_part_in_grouped_convolutions_alone():
    names, listed = ("conv2d", "depthwise_conv2d", "grouped_conv2d"), [*conv2d.specialisations()]
    plain, depthwise, of_groups = map(drawn._kernel_hash, names)
    others = [each for each in listed if " of groups" not in each[0]]
    assert plain == depthwise == launches.specialisations_hash(others) != of_groups
    assert of_groups == launches.specialisations_hash(listed)


@pytest.mark.parametrize("change, words", [(1.5, "is wrong"), (math.nan, "left elements")])
def test_what_is_wrong_is_told_of_and_not_timed(times, monkeypatch, change, words):
    right = global_avg_pool.backward
    wrong = lambda *given, **options: right(*given, **options).mul_(change)  # noqa: E731
    monkeypatch.setattr(global_avg_pool, "backward", wrong)
    forward, backward = measured(names=("global_avg_pool",))
    assert "ours" in forward["cases"][0] and "ours" not in backward["cases"][0]
    assert f"ours {words}" in backward["cases"][0]["failed"]
    said = results_table.drawn_report([forward, backward])
    assert "(1 passes of drawn" in said and f"Not timed:\n\n- `{backward['name']}`" in said


def test_what_is_refused_and_what_compile_does_not_take(times, monkeypatch):
    def refused(*_, **__):
        raise NotImplementedError("no such shape")

    monkeypatch.setattr(torch, "compile", lambda function, **options: refused)
    assert measured()[0]["cases"][0]["compiled"] is None
    monkeypatch.setattr(ops, "sigmoid", refused)
    assert measured(names=("sigmoid",))[0]["cases"][0]["failed"].endswith("no such shape")
    monkeypatch.setattr(bench, "device_times", lambda *_, **__: [][0])
    assert measured()[0]["cases"][0]["failed"].startswith("IndexError")
    monkeypatch.setattr(gpu, "synchronize", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):  # a GPU that is lost ends the run
        measured(names=("sigmoid",))


def test_a_second_run_goes_on_where_the_first_one_stopped(times):
    first = measured(1, compile_seconds=0)
    assert "compiled" not in first[0]["cases"][0]
    times["ours"] = 40.0
    second = measured(2, held=first, compile_seconds=0)
    of = {c["number"]: c["ours"] for record in second for c in record["cases"]}
    assert of == {0: 20, 1: 40}
    again = measured(2, held=second)  # torch.compile is wanted now
    assert {c["ours"] for record in again for c in record["cases"]} == {40}
    for changed in ({"seed": 1}, {"sources": "others"}, {"versions": {}}):
        fresh = measured(2, held=[record | changed for record in again], compile_seconds=0)
        assert not any("compiled" in c for record in fresh for c in record["cases"])
    assert measured(2, held=again, seconds=-1) == again and measured(seconds=-1) == []


def record(name="relu.forward", dtype="float32", **times):
    cases = [
        {"label": f"{i}×3", "number": i, "layout": "contiguous", "eager": eager, "ours": ours}
        for i, (eager, ours) in enumerate(times.values())
    ]
    return {"name": f"drawn.{name}", "dtype": dtype, "tf32": "tf32" in name, "seed": 2026,
            "date": "2026-01-02", "rows": [], "cases": cases}  # fmt: skip


def test_the_table_groups_by_pytorchs_time():
    rows = results_table.drawn_report([record(a=(4, 7), b=(8, 2), c=(100, 400), d=(40, 10))])
    brief, long = [line for line in rows.split("\n") if line.startswith("| `relu")]
    assert "| < 10 µs | 2 | 1.51 | 50" in brief and "| 0.57 | 0×3 |" in brief
    assert "| ≥ 10 µs | 2 | 1.00 | 50" in long and "| 0.25 | 2×3 |" in long
    assert "takes over twice as long in 25.0" in rows and "slower in 50" in rows
    assert "The worst: `relu.forward` of 2×3 at 0.25 times" in rows
    # 3 µs are not held against ours where PyTorch takes less than 5.
    assert "long in 0.0" in results_table.drawn_report([record(a=(1, 4))])
    assert "long in 100.0" in results_table.drawn_report([record(a=(1, 4.5))])
    assert results_table.drawn_report([]) == results_table.drawn_sentence([]) == ""
    page = results_table.page([{"device": {"name": "a chip"}, "records": [record(a=(4, 7))]}])
    assert "## Drawn shapes" in page and results_table.cases([record()]) == []


def test_the_command_records_as_it_goes_and_can_be_stopped(times, monkeypatch, tmp_path, capsys):
    measure, taken = drawn.measure, []

    def stopping(*arguments, **options):
        taken.append(arguments)
        if len(taken) == 3:
            raise KeyboardInterrupt
        return measure(*arguments, **options | {"device": "cpu"})

    set_all(monkeypatch, bench, device_facts=lambda: H200, RESULTS_FOLDER=tmp_path)
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(course_lib, "SIMULATED", False)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(drawn, "problem", lambda *key, most=5: problem(*key[:3], 5))
    monkeypatch.setattr(drawn, "measure", stopping)
    wanted = ["bench", "--drawn", "2", "relu", "sigmoid", "--record", "--compile-seconds", "0"]
    assert cli.main(wanted) == 130
    assert "4 of 8 passes are measured" in capsys.readouterr().out
    (file,) = tmp_path.glob("*/drawn.json")
    assert file.read_text().count('"label"') == file.read_text().count('"error": ') == 4
    assert cli.main(wanted) == 0 and len(taken) == 5
    assert "8 of 8 passes are measured" in capsys.readouterr().out
    for kept in bench.load_records("NVIDIA H200")["records"]:
        assert not launches.stale(kept, H200)[0]


@pytest.mark.parametrize("wanted, says", [
    (["--drawn", "0"], "from 1 on"), (["--drawn", "2", "--all"], "goes without --all"),
    (["--drawn", "2", "relu7"], "there is no 'relu7'"), (["linear", "--seed", "3"], "with --drawn"),
    (["--drawn", "2", "--names", "x"], "goes without --drawn"),
])  # fmt: skip
def test_the_command_says_what_it_does_not_take(wanted, says, capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", *wanted])
    assert says in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_a_gpu():
    *_, found = drawn.run(1, names=["relu", "linear", "conv2d"], compile_seconds=0)
    for each in found:
        assert all(0 < case["ours"] < 1e5 and 0 < case["eager"] < 1e5 for case in each["cases"])
