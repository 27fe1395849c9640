"""`use`, `hint`, `solution` and `progress`, and the file in which progress is kept."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch  # noqa: F401 - lesson 04 needs it, and importing it is no check's time
from relus import bad_relu, good_relu

from course_lib.teach import (
    TODO,
    CheckFailed,
    UnknownExercise,
    check,
    hint,
    progress,
    solution,
    use,
)
from course_lib.teach.exercise import exercises
from course_lib.teach.keeping import record

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def file(progress_file):
    return progress_file


# ---- use, hint, solution, progress ---------------------------------------------------------


def test_use_returns_what_passed_last(capsys):
    course = exercises()["relu"].solution
    assert use("relu", good_relu) is course
    check("relu", good_relu)
    assert use("relu", good_relu) is good_relu
    with pytest.raises(CheckFailed):
        check("relu", bad_relu)
    assert use("relu", good_relu) is course
    check("relu", good_relu)
    check("relu", TODO)
    assert use("relu", TODO) is course
    assert "Using your relu." in capsys.readouterr().out


def test_hints_go_on_and_end(capsys):
    hints = exercises()["relu"].hints
    for number, left in ((1, "2 left"), (2, "1 left"), (3, "the last")):
        hint("relu")
        out = capsys.readouterr().out
        assert f"Hint {number} of 3." in out and left in out
        assert record.load()["relu"]["hints"] == number
    hint("relu")
    out = capsys.readouterr().out
    assert "These were all 3" in out and hints[0] in out
    assert record.load()["relu"]["hints"] == 3


@pytest.mark.parametrize("name", exercises())
def test_a_hint_as_text_keeps_powers_and_loses_bold(name, capsys):
    for text in exercises()[name].hints:
        hint(name)
        code = re.findall(r"```.*?```|`[^`]*`", text, re.DOTALL)
        assert capsys.readouterr().out.count("**") == sum(each.count("**") for each in code)


def test_solution_shows_its_source_and_is_recorded(capsys):
    solution("relu")
    assert capsys.readouterr().out.startswith("@cuda.jit\ndef relu(x, y):\n")
    assert record.load()["relu"]["solution_seen"] is True


def rows(text):
    return {line.split()[1]: line for line in text.splitlines()[2:-1]}


def test_progress_table(capsys, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    check("relu", good_relu)
    hint("relu")
    with pytest.raises(CheckFailed):
        check("sigmoid", good_relu)
    capsys.readouterr()
    progress()
    out = capsys.readouterr().out
    assert f"1 of {len(exercises())} exercises solved" in out
    table = rows(out)
    assert "✓ solved" in table["relu"] and "1970-01-01" in table["relu"]
    assert "1 of 3" in table["relu"]
    assert "tried" in table["sigmoid"] and "not started" in table["column_sum"]


def test_solved_stays_solved(monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "0")
    check("relu", good_relu)
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    with pytest.raises(CheckFailed):
        check("relu", bad_relu)
    check("relu", good_relu)
    entry = record.load()["relu"]
    assert entry.pop("kept")["name"] == "good_relu"
    assert entry == {"attempts": 3, "tried": "1970-01-02", "solved": "1970-01-01"}


def test_reset(capsys):
    check("relu", good_relu)
    hint("sigmoid")
    progress(reset="relu")
    assert set(record.load()) == {"sigmoid"}
    progress(reset="all")
    assert "sure=True" in capsys.readouterr().out and record.load()
    progress(reset="all", sure=True)
    assert record.load() == {}
    with pytest.raises(UnknownExercise):
        progress(reset="relo")
    for lesson in (99, -1, "relu"):
        with pytest.raises(ValueError, match="lesson must be 'all' or from 0 to"):
            progress(lesson)


# ---- the progress file ---------------------------------------------------------------------


def mark(name):
    record.update(name, lambda entry: entry.update(solved="2026-01-01"))


BROKEN = {
    "empty": b"",
    "cut short": b'{"course": "course_lib", "format": 1, "exerc',
    "binary": bytes(range(256)),
    "another's": b'{"my": "thesis"}',
    "a list": b"[1, 2]",
    "deep": b"[" * 100_000,
    "no entries": b'{"course": "course_lib", "format": 1, "exercises": 3}',
    "bad entry": b'{"course": "course_lib", "format": 1, "exercises": {"relu": 1}}',
    "odd version": b'{"course": "course_lib", "format": "x", "exercises": {}}',
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("first", [record.load, lambda: mark("new")], ids=["read", "write"])
def test_broken_file_is_moved_aside_and_its_backup_used(file, content, first, capsys):
    mark("relu")
    mark("sigmoid")
    file.write_bytes(content)
    first()
    assert "can't be read" in capsys.readouterr().out
    (aside,) = file.parent.glob("progress.broken-*.json")
    assert aside.read_bytes() == content
    # The backup is the version before the last; at most the last change is lost.
    assert "relu" in record.load()
    mark("double")
    assert {"relu", "double"} <= set(json.loads(file.read_text())["exercises"])


def test_broken_files_are_all_kept(file):
    for content in (b"one", b"two"):
        file.write_bytes(content)
        record.load()
    assert {p.read_bytes() for p in file.parent.glob("progress.broken-*")} == {b"one", b"two"}


def test_newer_file_is_left_alone(file, capsys):
    content = b'{"course": "course_lib", "format": 2, "exercises": {}, "more": 1}'
    file.write_bytes(content)
    check("relu", good_relu)
    hint("relu")
    out = capsys.readouterr().out
    assert out.count("newer version") == 1
    assert file.read_bytes() == content and not list(file.parent.glob("*broken*"))
    assert record.load()["relu"]["hints"] == 1


def test_unwritable_place_keeps_progress_in_memory(tmp_path, monkeypatch, capsys):
    blocker = tmp_path / "a_file"
    blocker.write_text("")
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(blocker / "progress.json"))
    check("relu", good_relu)
    hint("relu")
    out = capsys.readouterr().out
    assert out.count("only until the kernel stops") == 1
    assert record.load()["relu"]["hints"] == 1 and "solved" in record.load()["relu"]


def test_read_only_file_keeps_what_it_has(file, monkeypatch, capsys):
    mark("relu")
    before = file.read_bytes()

    def refuse(*_args, **_options):
        raise PermissionError(13, "Permission denied")

    # Not by chmod: the tests may run as root, whom it doesn't stop.
    with monkeypatch.context() as patch:
        patch.setattr(record.os, "replace", refuse)
        mark("sigmoid")
        assert set(record.load()) == {"relu", "sigmoid"}
        assert "Permission denied" in capsys.readouterr().out
    assert file.read_bytes() == before
    assert sorted(p.name for p in file.parent.iterdir() if p.name.startswith(".")) == []
    mark("column_sum")
    assert set(json.loads(file.read_text())["exercises"]) == {"relu", "sigmoid", "column_sum"}


def test_ctrl_c_while_saving_leaves_the_old_file(file, monkeypatch):
    mark("relu")
    before = file.read_bytes()

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(record.os, "fsync", interrupt)
        with pytest.raises(KeyboardInterrupt):
            mark("sigmoid")
    assert file.read_bytes() == before
    mark("sigmoid")
    assert set(record.load()) == {"relu", "sigmoid"}


WRITER = """
import os, sys, time
sys.path.insert(0, {root!r})
from course_lib.teach.keeping import record
fsync = os.fsync
os.fsync = lambda handle: fsync(handle) or time.sleep({seconds})
for number in range({count}):
    record.update(f"{{sys.argv[1]}}{{number}}", lambda entry: entry.update(hints=1))
    if number == 0:
        print("writing", flush=True)
"""


def writer(name, count, seconds=0):
    code = WRITER.format(root=str(ROOT), count=count, seconds=seconds)
    return subprocess.Popen(
        [sys.executable, "-c", code, name], env=os.environ, stdout=subprocess.PIPE, text=True
    )


def test_two_processes_lose_nothing(file):
    """However long one keeps the other waiting, as on a slow disk."""
    processes = [writer(name, 25, seconds=0.1) for name in "ab"]
    for process in processes:
        out, _ = process.communicate(timeout=250)
        assert process.returncode == 0 and "can't be used" not in out
    assert set(record.load()) == {f"{name}{number}" for name in "ab" for number in range(25)}


def test_killed_while_writing(file):
    mark("relu")
    for attempt in range(3):
        process = writer(f"k{attempt}_", 100_000)
        assert process.stdout.readline() == "writing\n"
        time.sleep(0.03 * attempt)
        process.kill()
        process.wait()
        process.stdout.close()
        entries = json.loads(file.read_text())["exercises"]
        assert "relu" in entries and f"k{attempt}_0" in entries
    mark("sigmoid")  # the lock died with its owner
    assert "sigmoid" in json.loads(file.read_text())["exercises"]


def test_default_place_is_the_project(monkeypatch):
    monkeypatch.delenv("COURSE_LIB_PROGRESS")
    assert record.path() == ROOT / "progress.json"
    monkeypatch.setattr(record.os, "access", lambda *_: False)
    assert record.path().parent.name == "course_lib" and ROOT not in record.path().parents
