"""Every known-wrong kernel is rejected, every right one accepted, and so are mutants: rejected.

Of each exercise's mutants SAMPLE are judged, always the same ones; a sixteenth of the wrong kernels
are told their cause where the verdict would do, and as many right ones are compiled and run in each
order of threads; with ``COURSE_LIB_BANK=all``, all. The same as a table, of all mutants, with
what each check said: ``python tests/bank -v``.
"""

import functools
import hashlib
import os
import runpy
import sys
from pathlib import Path

import bank
import pytest
from bank.equivalent import EQUIVALENT
from bank.judge import judge_mutant, judge_right, judge_wrong

from course_lib.teach.exercise import exercises
from course_lib.teach.explaining import causes
from course_lib.teach.explaining.mutation.mutants import mutants

KERNELS = [name for name, exercise in exercises().items() if exercise.kind != "answer"]
ALL = os.environ.get("COURSE_LIB_BANK") == "all"
SAMPLE = None if ALL else 4


@functools.cache
def mutants_of(name):
    """The mutants of an exercise's solution, which takes a while to make."""
    return mutants(exercises()[name].solution)


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    """Keep the developer's progress out of it, and let a slow machine see what others see."""
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))
    monkeypatch.setattr(causes, "LOOKING", 10 * causes.LOOKING)


def named(entries):
    """The entries of the bank as parameters, each named after its exercise and kernel."""
    return [pytest.param(*entry, id=f"{entry[0]}-{entry[1].__name__}") for entry in entries]


def hashed(*names):
    return hashlib.sha256(" ".join(names).encode()).digest()


def in_full(exercise, kernel):
    """Whether more than the verdict is asked for: of the same sixteenth in every run, or of all."""
    return ALL or hashed(exercise, kernel.__name__)[0] % 16 == 0


@pytest.mark.parametrize("exercise, kernel, says", named(bank.WRONG))
def test_wrong_is_rejected(exercise, kernel, says):
    row = judge_wrong(exercise, kernel, says, in_full(exercise, kernel))
    assert row.outcome == "rejected", row.message


@pytest.mark.parametrize("exercise, kernel", named(bank.RIGHT))
def test_right_is_accepted(exercise, kernel):
    row = judge_right(exercise, kernel, in_full(exercise, kernel))
    assert row.outcome == "accepted", row.message


def test_every_exercise_has_two_right_answers_of_another_make():
    makes = [exercise for exercise, _ in bank.RIGHT]
    assert [name for name in KERNELS if makes.count(name) < 2] == []


@pytest.mark.parametrize("name", KERNELS)
def test_mutants_are_rejected(name):
    by_chance = sorted(mutants_of(name), key=lambda mutant: hashed(name, mutant.name))
    rows = [judge_mutant(name, mutant) for mutant in by_chance[:SAMPLE]]
    assert [(row.name, row.outcome) for row in rows if not row.good] == []


@pytest.mark.parametrize("name", KERNELS)
def test_bank_is_large_enough(name):
    assert sum(entry[0] == name for entry in bank.WRONG) >= 6
    assert sum(entry[0] == name for entry in bank.RIGHT) >= 2


def test_equivalent_mutants_exist():
    known = {(name, mutant.name) for name in KERNELS for mutant in mutants_of(name)}
    assert set(EQUIVALENT) <= known and all(EQUIVALENT.values())


def test_mutants_are_what_they_say():
    names = [mutant.name for mutant in mutants_of("block_sum")]
    assert sum(name.startswith("drop barrier") for name in names) == 2
    assert sum(name.startswith("drop guard") for name in names) == 2
    assert len(names) == len(set(names)) > 50
    kinds = {m.name.partition(":")[0] for name in KERNELS for m in mutants_of(name)}
    assert len(kinds) >= 15  # every operator has found something to change
    one = next(m for m in mutants_of("relu") if m.name.startswith("drop guard"))
    assert "if" not in one.text and one.build() is not exercises()["relu"].solution


def test_table_is_one_command(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["bank", "relu", "-v"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(Path(bank.__file__).parent), run_name="__main__")
    said = capsys.readouterr().out
    assert not ended.value.code, said
    assert "all as it should be" in said and "relu_no_guard" in said
