"""Messages of `check` that once misled: each names the learner's own line and what to change."""

import re

import pytest
from bank.mistakes import changed

from course_lib.teach import CheckFailed, check
from course_lib.teach.exercise import exercises


@pytest.fixture(autouse=True)
def own_record(tmp_path, monkeypatch):
    """Keep the developer's progress out of it."""
    monkeypatch.setenv("COURSE_LIB_PROGRESS", str(tmp_path / "progress.json"))


def mistaken(exercise, *changes):
    """The exercise's solution with every first text replaced by the second, as a learner has it."""
    return changed(exercise, "mine", exercises()[exercise].solution, changes)


def told(exercise, *changes):
    """The message about the solution with these mistakes."""
    with pytest.raises(CheckFailed) as caught:
        check(exercise, mistaken(exercise, *changes), seed=1)
    return str(caught.value)


# ---- float64 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exercise, changes, line, words",
    [
        ("softmax_online", ("(m - value) + ONE", "(m - value) + 1"), "(m - value) + 1`",
         "float32 with the integer `1` gives float64. Write np.float32(1)"),
        ("channel_moments", ("n += ONE", "n += 1"), "n += 1`",
         "float32 with the integer `1` gives float64. Write np.float32(1)"),
        ("channel_moments", ("n += ONE", "n += 1.0"), "n += 1.0`",
         "numba makes the constant 1.0 float64. Write np.float32(1)"),
        ("softmax_naive", ("total = np.float32(0)", "total = 0"), "total = 0`",
         "`total` is float64, because it is given the integer 0 here"),
        ("softmax_online", ("MINUS_INF, ZERO", "MINUS_INF, 0"), "m, s = MINUS_INF, 0`",
         "`s` is float64, because it is given the integer 0 here"),
    ],
)  # fmt: skip
def test_float64_is_blamed_on_the_literal_in_its_line(exercise, changes, line, words):
    message = told(exercise, *changes)
    headline, cause = message.splitlines()[:2]
    assert "float64-promotion in line " in headline and headline.endswith(line)
    assert words in cause
    assert "ZERO" not in cause and "nothing asks for it" not in message


def test_a_print_that_was_left_in_is_no_finding(capsys):
    kernel = mistaken("softmax_naive", "            total += ", "            print(total)\n"
                      "            total += ")  # fmt: skip
    check("softmax_naive", kernel, seed=1)
    assert "✓ softmax_naive" in capsys.readouterr().out


def test_what_is_computed_in_float64_beside_a_print_is_still_found():
    message = told("softmax_naive", "total = np.float32(0)", "total = 0.0\n        print(total)")
    assert "float64-promotion" in message and "print" not in message.splitlines()[0]
