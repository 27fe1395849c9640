"""Imports run one way; see "Where things live" in CONTRIBUTING.md."""

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parent.parent / "course_lib"

#: What each part of the package may import of the others, beside itself. `course_lib` stands for
#: what the package itself exports: `cuda`, `device`, `SIMULATED`. An arrow that nobody uses goes.
FLOORS = {
    "simulator": set(),
    "reference": set(),
    "plot": set(),
    "data": set(),
    "results_table": set(),
    "runtime": {"simulator"},
    "course_lib": {"simulator", "runtime"},
    "kernels": {"course_lib", "runtime"},
    "backend": {"course_lib", "runtime"},
    "autograd": {"backend", "kernels"},
    "ops": {"runtime", "kernels"},
    "nn": {"course_lib", "runtime", "ops", "bench"},
    "optim": {"runtime", "kernels", "ops"},
    "models": {"course_lib", "runtime", "kernels", "ops", "nn"},
    "train": {
        "course_lib", "runtime", "kernels", "ops", "nn", "optim", "models", "data", "plot",
        "backend", "autograd",
    },
    "bench": {"runtime"},
    "benchmarks": {
        "course_lib", "simulator", "runtime", "kernels", "reference", "bench", "plot", "ops", "nn",
        "optim", "models", "train", "data", "backend", "autograd",
    },
    "teach": {"course_lib", "simulator", "runtime", "reference", "backend", "autograd"},
    "operations": {"runtime", "kernels", "reference"},
    "compare": {"course_lib", "simulator", "runtime", "kernels", "operations"},
    "readme": {
        "course_lib", "simulator", "plot", "results_table", "bench", "benchmarks", "compare",
    },
    "kernels_command": {"kernels", "runtime"},
    "bench_command": {"course_lib", "runtime", "bench", "benchmarks", "data", "results_table"},
    "scripts": {"course_lib", "simulator"},
    "doctor": {"runtime"},
    "lab": {"runtime"},
    "cli": {
        "course_lib", "runtime", "bench_command", "benchmarks", "compare", "doctor",
        "kernels_command", "lab", "readme", "scripts", "train",
    },
    "__main__": {"cli"},
}
#: What each part is: CONTRIBUTING.md shows it beside the arrows.
ABOUT = {
    "simulator": "runs kernels on the CPU, finds races, traces accesses; draws nothing",
    "reference": "NumPy float64 truth for every operation",
    "plot": "pictures from plain data",
    "data": "data sets as tensors: read, split, drawn",
    "results_table": "records as text: `RESULTS.md`, and what other pages quote",
    "runtime": "the device, launches, the compiler, intrinsics",
    "course_lib": "the package itself: chooses GPU or simulator, exports `cuda`, `device`",
    "kernels": "one file or folder for each operation: its ladders of rungs",
    "backend": "one program over NumPy's or a GPU's arrays",
    "autograd": "the learner's own tape, with layers and optimisers on it",
    "ops": "PyTorch operators on the kernels: schema, fake, gradient, autocast",
    "nn": "PyTorch's layers on `ops`",
    "optim": "PyTorch's optimisers on `ops`",
    "models": "whole networks, and their training steps",
    "train": "the training loop, checkpoints, what trains on what",
    "bench": "measuring and records; takes callables",
    "benchmarks": "what is measured: one file for each operation",
    "teach": "exercises, checks, hints, progress; imported by notebooks and tests alone",
    "operations": "each operation's ladders, inputs, PyTorch's own and the truth",
    "compare": "any rung beside PyTorch and float64, by element",
    "readme": "what is generated in README, RESULTS and docs, and their pictures",
    "kernels_command": "the command `kernels`: registers, spills and PTX of each kernel",
    "bench_command": "the command `bench`: what is measured, listed, recorded",
    "scripts": "the commands `sanitize`, `trace` and `lint`: others' scripts, unchanged",
    "doctor": "the command `doctor`: what is installed, and what is wrong with it",
    "lab": "the command `lab`: the lessons in a user's folder, in JupyterLab",
    "cli": "the commands, on top of everything that they run",
    "__main__": "`python -m course_lib`",
}

#: What these may import from outside, beside Python's own library.
OUTSIDE = {
    "reference": {"numpy"},
    # IPython shows a picture in a notebook; PIL, which Matplotlib brings along, stores it.
    "plot": {"matplotlib", "numpy", "IPython", "PIL"},
    # cuda, which numba-cuda brings along, in the process of `lint` alone.
    "simulator": {"numpy", "greenlet", "ml_dtypes", "numba", "cuda"},
    "course_lib": {"numba"},
    "doctor": {"cuda"},  # which finds the toolkit's libraries
    "cli": {"tqdm"},
    "results_table": set(),
}
#: What these must not import, wherever in the file.
FORBIDDEN = {
    "kernels": {"torch", "torchvision"}, "autograd": {"torch", "torchvision"},
    "runtime": {"torchvision"},
}  # fmt: skip


def part_of(path):
    """The part of the package that the file at `path` belongs to."""
    first = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    return "course_lib" if first == "__init__" else first


def imported(tree, module):
    """Every dotted name that is imported anywhere in `tree`, the syntax tree of `module`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                above = module.split(".")[: -node.level]
                source = ".".join([*above, source] if source else above)
            yield from (f"{source}.{alias.name}" for alias in node.names)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute | ast.Name)
            and "import_module" in ast.unparse(node.func)
            and node.args
        ):
            name = node.args[0]
            if isinstance(name, ast.JoinedStr):  # its beginning tells the part
                name = name.values[0]
            if isinstance(name, ast.Constant):
                yield name.value.rstrip(".")


def module_of(path):
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def is_part(name):
    """Whether it is a part; any other name is one that the package itself exports."""
    return name in FLOORS and name != "course_lib"


def faults(path, text):
    """What is wrong with the imports of the file at `path` that holds `text`, as sentences."""
    part = part_of(path)
    for name in imported(ast.parse(text), module_of(path)):
        top, *rest = name.split(".")
        if top == "course_lib":
            target = rest[0] if rest and is_part(rest[0]) else top
            if target != part and target not in FLOORS[part]:
                yield f"{part} must not import {target} ({name})"
        elif top in FORBIDDEN.get(part, ()):
            yield f"{part} must not import {top}"
        elif part in OUTSIDE and top not in sys.stdlib_module_names | OUTSIDE[part]:
            yield f"{part} must not need {top}"


FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_part_has_its_floor():
    assert {part_of(path) for path in FILES} == FLOORS.keys() == ABOUT.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_run_one_way(path):
    assert list(faults(path, path.read_text(encoding="utf-8"))) == []


def test_no_part_stands_above_itself():
    def above(part, seen=()):
        assert part not in seen, f"a circle: {' -> '.join([*seen, part])}"
        for other in FLOORS[part] - {"course_lib"}:
            above(other, (*seen, part))

    for part in FLOORS:
        above(part)


@pytest.mark.parametrize("file, line", [
    ("kernels/softmax.py", "import torch"),
    ("kernels/softmax.py", "def f():\n    from torch import nn"),
    ("kernels/softmax.py", "from course_lib import ops"),
    ("kernels/softmax.py", "from .. import nn"),
    ("simulator/engine.py", "from course_lib.runtime.host import device"),
    ("simulator/engine.py", "from course_lib import cuda"),
    ("simulator/engine.py", "import matplotlib"),
    ("runtime/launch.py", "import course_lib.kernels.softmax"),
    ("runtime/launch.py", "import importlib; importlib.import_module('course_lib.teach')"),
    ("runtime/launch.py", "from importlib import *; import_module(f'course_lib.nn.{x}')"),
    ("reference.py", "from course_lib import kernels"),
    ("reference.py", "import scipy.special"),
    ("plot/basic.py", "from ..bench import find"),
    ("cli.py", "from course_lib import teach"),
    ("train.py", "from course_lib.cli import main"),
    ("__init__.py", "import torch"),
])
def test_a_wrong_import_is_seen(file, line):
    assert len(list(faults(PACKAGE / file, line))) == 1


@pytest.mark.parametrize("file, line", [
    ("kernels/softmax.py", "from course_lib import cuda, device"),
    ("kernels/softmax.py", "from course_lib.runtime.host import launch"),
    ("simulator/engine.py", "from . import errors"),
    ("simulator/engine.py", "from course_lib.simulator.errors import Deadlock"),
    ("plot/basic.py", "import numpy as np\nfrom .picture import Picture\nimport math"),
    ("bench.py", "import torch"),
])
def test_a_right_import_is_left_alone(file, line):
    assert list(faults(PACKAGE / file, line)) == []


KERNELS = PACKAGE / "kernels"
#: What the kernels of every operation are made of; these import no operation.
COMMON = {"blocks", "operation"}


def taken_from_inside(path, text):
    """What the kernels at `path` import from inside another operation: its files, private names.

    Everything else that a module or a package of `kernels` gives out is for all of them.
    """
    own, tree = path.relative_to(KERNELS).parts[0].removesuffix(".py"), ast.parse(text)
    above = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    names = [name.split(".")[2:] for name in imported(tree, above)
             if name.startswith("course_lib.kernels.")]  # fmt: skip
    packages = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "course_lib.kernels"
        for alias in node.names
    }
    names += [
        [packages[node.value.id], node.attr]
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and getattr(node.value, "id", None) in packages
    ]
    for operation, *inside in names:
        if operation == own or operation in COMMON:
            continue
        files = {file.stem for file in (KERNELS / operation).glob("*")}
        if own in COMMON or any(n in files or n.startswith("_") for n in inside):
            yield ".".join([operation, *inside])


def test_operations_take_nothing_from_inside_each_other():
    found = {
        str(path.relative_to(KERNELS)): list(taken_from_inside(path, path.read_text("utf-8")))
        for path in KERNELS.rglob("*.py")
    }
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize("file, line, n_faults", [
    ("dice/sums.py", "from course_lib.kernels.softmax.plan import split_plan", 1),
    ("dice/sums.py", "def f():\n    import course_lib.kernels.softmax.plan", 1),
    ("dice/sums.py", "from course_lib.kernels.softmax import plan", 1),
    ("dice/sums.py", "from course_lib.kernels import softmax as s\ns.plan.split_plan(1)", 1),
    ("dropout.py", "from course_lib.kernels.softmax_dropout import _launch", 1),
    ("blocks/rows.py", "from course_lib.kernels import softmax", 1),
    ("dice/sums.py", "from course_lib.kernels.softmax import forward", 0),
    ("dice/sums.py", "from course_lib.kernels import softmax as s\ns.forward(1)", 0),
    ("dice/sums.py", "from course_lib.kernels.blocks.rows import load_row", 0),
    ("dice/sums.py", "from course_lib.kernels.dice import gradients", 0),
])  # fmt: skip
def test_what_is_taken_from_inside_is_seen(file, line, n_faults):
    assert len(list(taken_from_inside(KERNELS / file, line))) == n_faults
