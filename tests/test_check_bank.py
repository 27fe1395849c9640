"""Every known-wrong kernel is rejected for the right reason, and every right one accepted."""

import importlib
import re
from pathlib import Path

import bank
import pytest

from course_lib.teach import CheckFailed, check
from course_lib.teach.exercise import exercises

for file in sorted(Path(bank.__file__).parent.glob("lesson_*.py")):
    importlib.import_module(f"bank.{file.stem}")


def name_of(value):
    """Name a test after its exercise and kernel."""
    function = getattr(value, "py_func", None)
    return function.__name__ if function else (value if isinstance(value, str) else None)


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    """Keep the developer's progress out of it."""
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))


@pytest.mark.parametrize(
    "exercise, kernel, says",
    [pytest.param(*entry, id=f"{entry[0]}-{name_of(entry[1])}") for entry in bank.WRONG],
)
def test_wrong_is_rejected(exercise, kernel, says, capsys):
    with pytest.raises(CheckFailed) as caught:
        check(exercise, kernel)
    assert re.search(says, str(caught.value)), caught.value
    assert "✓" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "exercise, kernel",
    [pytest.param(*entry, id=f"{entry[0]}-{name_of(entry[1])}") for entry in bank.RIGHT],
)
def test_right_is_accepted(exercise, kernel, capsys):
    check(exercise, kernel)
    assert capsys.readouterr().out.startswith(f"✓ {exercise} ")


KERNELS = [name for name, exercise in exercises().items() if exercise.kind != "answer"]


@pytest.mark.parametrize("name", KERNELS)
def test_bank_is_large_enough(name):
    assert sum(entry[0] == name for entry in bank.WRONG) >= 6
    assert sum(entry[0] == name for entry in bank.RIGHT) >= 2
