"""What runs where something is missing: in a browser, on macOS, with the base packages alone."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.simulator.rewrite import number_rules, number_types

ROOT = Path(__file__).resolve().parent.parent
SOLUTIONS = ROOT / "notebooks" / "solutions"


@pytest.mark.parametrize("machine, numbers", [("browser", "0123"), ("macos", "0")])
def test_the_first_lessons_run_without_what_is_missing(machine, numbers, tmp_path):
    lessons = [str(path) for n in numbers for path in SOLUTIONS.glob(f"0{n}_*.ipynb")]
    environment = {**os.environ, "COURSE_LIB_PROGRESS": str(tmp_path / "progress.json")}
    environment |= {"COURSE_LIB_SIMULATOR": "1", "COURSE_LIB_STRICT": "1"}
    command = [sys.executable, ROOT / "tests" / "bare_python.py", machine, *lessons]
    told = dict(capture_output=True, text=True, timeout=280)
    done = subprocess.run(command, env=environment, cwd=tmp_path, **told)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr
    assert done.stdout.count("✓ ") >= {"browser": 20, "macos": 1}[machine]
    assert "compiled for a GPU" not in done.stdout.replace("not compiled for a GPU", "")


UNARY = ("neg", "pos", "invert", "abs", "int", "float", "round")


@pytest.mark.parametrize("symbol", number_types.OPERATORS)
def test_the_rules_give_the_types_that_numba_gives(symbol):
    names = [name for name in number_types.CLASSES if name != "float16"]
    for operands in itertools.product(names, repeat=1 if symbol in UNARY else 2):
        expected = number_types.signature(symbol, *operands)
        assert number_rules.signature(symbol, *operands) == expected, operands


def test_the_rules_unify_as_numba_does():
    for pair in itertools.product(number_types.CLASSES, repeat=2):
        assert number_rules.unified(*pair) == number_types.unified(*pair), pair
