"""The command line as a whole."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import course_lib
from course_lib import cli
from course_lib.runtime.host import folders

ROOT = Path(__file__).resolve().parent.parent


def test_help_names_every_command(capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--help"])
    assert stopped.value.code == 0
    said = capsys.readouterr().out
    for command in ("doctor", "lab", "compare", "sanitize", "trace", "lint", "bench", "kernels",
                    "train", "readme"):  # fmt: skip
        assert command in said


def test_ctrl_c_ends_any_command_with_130(monkeypatch, capsys):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "readme", interrupted)
    assert cli.main(["readme", "--check"]) == 130
    assert capsys.readouterr().err == "\nStopped.\n"


def test_readme_says_that_it_is_for_a_clone(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(folders, "RESOURCES", tmp_path)
    assert cli.main(["readme", "--check"]) == 1
    assert "for a clone of the course" in capsys.readouterr().out


def test_a_stream_that_cannot_spell_a_check_mark_gets_a_question_mark():
    done = subprocess.run(
        [sys.executable, "-m", "course_lib", "compare", "relu", "--shape", "8", "--device",
         "simulator"],
        cwd=ROOT, env=os.environ | {"PYTHONIOENCODING": "cp1252"}, capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert b"? All 8 elements" in done.stdout


def test_every_benchmark_that_is_offered_is_there():
    for name in cli.BENCHMARKS:
        assert (ROOT / "course_lib" / "benchmarks" / f"{name}.py").is_file(), name


@pytest.mark.parametrize("arguments", [["bench"], ["bench", "sofmax"], ["compare"]])
def test_what_is_missing_or_misspelt_ends_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as stopped:
        cli.main(arguments)
    assert stopped.value.code == 2
    capsys.readouterr()


#: Two records that a benchmark may leave behind.
FORWARD, BACKWARD = (
    {"name": f"softmax.{way}", "shape": [8192, 4096], "dtype": "float32", "copy_gbps": 4190.0,
     "rows": [{"label": "naive", "kind": "ours", "microseconds": 2000.0, "percent_of_copy": 3.0}]}
    for way in ("forward", "backward")
)  # fmt: skip


def test_a_benchmark_that_is_stopped_keeps_what_it_has_measured(monkeypatch, capsys):
    from course_lib import bench, device
    from course_lib.benchmarks import host, launch, launches, linear

    def measured():
        yield FORWARD
        os.kill(os.getpid(), signal.SIGTERM)  # as a time limit does
        time.sleep(5)
        yield BACKWARD

    kept, empty, before = [], [], signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(device, "count", lambda: 1)
    monkeypatch.setattr(course_lib, "SIMULATED", False)
    monkeypatch.setattr(launches, "save", lambda records: kept.append(records) or "a file")
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
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "{}"
