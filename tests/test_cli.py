"""The command line as a whole, and the parts of the README that it writes."""

import copy
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import course_lib
from course_lib import cli, results_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def row(label, microseconds, kind="ours", **more):
    rates = {"gbps": 268_000 / microseconds, "percent_of_copy": 6400 / microseconds}
    times = {"microseconds": microseconds, "quartiles": [microseconds - 1, microseconds + 1]}
    return {"label": label, "kind": kind} | times | rates | more


def record(name, rows, default=None, shape=(8192, 4096), dtype="float32"):
    made = {"name": name, "shape": list(shape), "dtype": dtype, "date": "2026-11-22", "rows": rows}
    return made | {"bytes": 268_435_456, "copy_gbps": 4190.0} | (
        {"default": default, "left_out": {}} if default else {}
    )


EAGER = row("PyTorch eager", 105.0, "peer")
FORWARD = record(
    "softmax.forward",
    [row("naive", 2000.0), row("online", 170.0), row("registers", 66.0), row("split", 80.0), EAGER],
    "registers",
)
BACKWARD = record(
    "softmax.backward", [row("naive", 3000.0), row("registers", 98.0), EAGER], "registers"
)
TABLE = {
    "name": "softmax.table", "shape": [128, 200], "dtype": "float32", "date": "2026-11-22",
    "cpu": "A processor, 8 cores", "cpu_threads": 8,
    "rows": [
        {"label": "PyTorch, CPU", "kind": "peer", "microseconds": 20.0, "speedup": 1.0,
         "python_microseconds": 20.04, "python_speedup": 1.0},
        {"label": "ours, optimised", "kind": "ours", "microseconds": 1.6, "speedup": 12.5,
         "python_microseconds": 14.0, "python_speedup": 1.43},
    ],
}  # fmt: skip
RECORDING = {"device": {"name": "NVIDIA H200"}, "records": [FORWARD, BACKWARD, TABLE]}


# ----------------------------------------------------------------------- the README


def test_readme_has_every_pair_of_marks_once():
    for name in ("results", "softmax", "squeeze-excite"):
        for end in ("begin", "end"):
            assert README.count(f"<!-- {name}:{end} -->") == 1


def test_the_readers_table_shows_both_clocks():
    text = results_table.softmax([RECORDING])
    assert "**NVIDIA H200**, A processor, 8 cores, 8 threads; measured 2026-11-22" in text
    assert "| PyTorch, CPU | 20.0 | 1.0 × | 20.0 | 1.0 × |" in text
    assert "| ours, optimised | 1.6 | 12.5 × | 14.0 | 1.4 × |" in text


def test_the_ladder_shows_both_directions_and_the_default():
    lines = results_table.softmax([RECORDING]).splitlines()
    assert "| naive | 134 | 3 | 89 | 2 |" in lines
    assert "| **registers**, the default | 4,061 | 97 | 2,735 | 65 |" in lines
    assert "| split | 3,350 | 80 | – | – |" in lines
    labels = [line.split("|")[1].strip(" *") for line in lines[-5:]]
    assert labels == ["naive", "online", "registers**, the default", "split", "PyTorch eager"]


def test_what_is_not_recorded_is_not_shown():
    assert results_table.softmax([{"device": {"name": "X"}, "records": [FORWARD]}]) == ""
    only = copy.deepcopy(FORWARD) | {"dtype": "bfloat16"}
    assert results_table.softmax([{"device": {"name": "X"}, "records": [only, BACKWARD]}]) == ""
    assert cli.softmax_part([]) == "Not measured yet."


def test_the_big_table_takes_the_default_and_leaves_lessons_and_readers_alone():
    own = record("lesson_04.teams", [row("a", 3.0), EAGER])
    text = results_table.render([RECORDING | {"records": [FORWARD, TABLE, own]}])
    assert "| `softmax.forward` | float32 | 8,192 × 4,096 | registers |" in text
    assert "lesson_04" not in text and "softmax.table" not in text


def test_each_part_is_written_between_its_own_marks():
    text = "a <!-- softmax:begin -->old<!-- softmax:end --> b <!-- results:begin -->\n\n"
    text += "<!-- results:end --> c"
    once = cli.with_results(text, [RECORDING])
    assert cli.with_results(once, [RECORDING]) == once
    parts = ["softmax:begin", "rung by rung", "softmax:end", "results:begin", "`softmax.backward`"]
    places = [once.index(part) for part in parts]
    assert places == sorted(places)
    assert "data/softmax.png" in once and "old" not in once


def test_pictures_are_drawn_from_the_records(monkeypatch, tmp_path):
    (tmp_path / "data").mkdir()
    monkeypatch.setattr(cli, "ROOT", tmp_path)
    swish = record("swish.forward", [row("naive", 100.0), EAGER])
    cli._draw_ladders([RECORDING | {"records": [swish, FORWARD]}])
    assert {path.name for path in (tmp_path / "data").iterdir()} == {"ladder.png", "softmax.png"}


def test_the_commands_in_the_readme_are_understood(monkeypatch, capsys):
    commands = re.findall(r"^python -m course_lib (.*)$", README, flags=re.MULTILINE)
    assert {command.split()[0] for command in commands} >= {"compare", "bench"}
    for command in commands:
        for name in ("bench", "train"):  # these would take their time
            monkeypatch.setattr(cli, name, lambda options: 0)
        assert cli.main(shlex.split(command)) == 0
    shown = re.search(r"```text\n(softmax forward .*?)```", README, flags=re.DOTALL)[1]
    printed = capsys.readouterr().out
    for line in shown.splitlines():  # numbers depend on the machine
        words = re.match(r"[^\d\[,]*", line)[0].rstrip(" -")
        assert words in printed, line


# ------------------------------------------------------------------- the command line


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for command in ("doctor", "compare", "bench", "kernels", "train", "readme"):
        assert command in said


def test_ctrl_c_ends_any_command_with_130(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "readme", interrupted)
    assert cli.main(["readme", "--check"]) == 130
    assert capsys.readouterr().err == "\nStopped.\n"


def test_every_benchmark_that_is_offered_is_there():
    for name in cli.BENCHMARKS:
        assert (ROOT / "course_lib" / "benchmarks" / f"{name}.py").is_file(), name


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "sofmax"], ["compare"]])
def test_what_is_missing_or_misspelt_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    capsys.readouterr()


def test_a_benchmark_that_is_stopped_keeps_what_it_has_measured(monkeypatch, capsys):
    from course_lib import bench, device
    from course_lib.benchmarks import host, launch, linear

    def measured():
        yield FORWARD
        os.kill(os.getpid(), signal.SIGTERM)  # as a time limit does
        time.sleep(5)
        yield BACKWARD

    kept, empty, before = [], [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(course_lib, "SIMULATED", False)
    monkeypatch.setattr(bench, "device_facts", lambda: {"name": "NVIDIA H200"})
    monkeypatch.setattr(bench, "save_records", lambda records: kept.append(records) or "a file")
    monkeypatch.setattr(host, "run", lambda *, progress=list: empty)  # the next ones go on
    monkeypatch.setattr(launch, "run", lambda *, progress=list: bench.collected(measured()))
    monkeypatch.setattr(linear, "run", lambda *, progress=list: pytest.fail("not stopped"))
    try:
        assert cli.main(["bench", "host", "launch", "linear", "--record"]) == 130
    finally:
        signal.signal(signal.SIGTERM, before)
    assert kept == [[], [FORWARD]]
    found = capsys.readouterr()
    assert "Recorded in a file" in found.out and "stopped after 1 records" in found.err


def test_benchmarks_import_without_triton():
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from course_lib.benchmarks import softmax, softmax_table\n"
        "print(softmax._triton(False, []))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"
