"""What is installed, and how quickly the course is ready."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

#: How long the course's own import takes in units of NumPy's, and what came with it.
IMPORT = """
import contextlib, os, sys, time
before = time.process_time()
import numpy
unit = time.process_time() - before
if os.environ["COURSE_LIB_SIMULATOR"] == "0":
    with contextlib.suppress(ImportError):
        import numba.cuda
before = time.process_time()
import course_lib
late = "torch", "numba", "numba_cuda", "greenlet", "subprocess", "fcntl", "matplotlib"
print((time.process_time() - before) / unit, sorted(set(late) & set(sys.modules)) if
      course_lib.SIMULATED else "torch" in sys.modules, course_lib.SIMULATED, sep=";")
"""


def python(code, **environment):
    command = [sys.executable, "-c", code]
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, check=True, timeout=250
    ).stdout


@pytest.mark.parametrize("simulator", ["0", "1"])
def test_import_is_quick_and_brings_no_torch(simulator):
    wanted = dict(COURSE_LIB_SIMULATOR=simulator, PYTHONDONTWRITEBYTECODE="")
    runs = [python(IMPORT, **wanted).strip().split(";") for _ in range(3)]
    assert min(float(ratio) for ratio, _, _ in runs) < 3
    assert {(late, simulated) for _, late, simulated in runs} == {
        ("[]", "True") if simulator == "1" else ("False", "False")
    }


def test_conda_installs_what_the_project_asks_for():
    yaml = pytest.importorskip("yaml")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    assert environment["channels"] == ["conda-forge"]
    python, pip, through_pip = environment["dependencies"]
    assert python == f"python{PROJECT['requires-python']}"
    assert pip == "pip"
    assert through_pip == {"pip": ["--editable .[test]"]}


def test_the_bounds_that_keep_numba_working():
    assert {"numba>=0.68,<0.69", "numpy>=2,<2.5"} <= set(PROJECT["dependencies"])
    extras = PROJECT["optional-dependencies"]
    assert extras["gpu"] == ["numba-cuda[cu13]>=0.30,<0.31; sys_platform != 'darwin'"]
    assert {"torch>=2.11", "torchvision>=0.26"} <= set(extras["torch"])
    assert extras["test"][0] == "course_lib[gpu,torch,lessons,sar,onnx]"


def make(folder, *arguments):
    return subprocess.run(
        ["make", *arguments], cwd=folder, capture_output=True, text=True, timeout=250
    )


@pytest.fixture
def bare_copy(tmp_path):
    if shutil.which("make") is None:
        pytest.skip("no make here")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(ROOT / name, tmp_path / name)
    return tmp_path


def fake_python(folder, script):
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("script", ["exit 1", None])
def test_setup_says_that_python_is_too_old_or_missing(bare_copy, script):
    path = fake_python(bare_copy, script) if script else bare_copy / "nowhere"
    done = make(bare_copy, "setup", f"PYTHON={path}")
    assert done.returncode != 0
    assert f"{path} is missing or older than Python 3.11" in done.stderr
    assert "make setup PYTHON=python3.12" in done.stderr
    assert not (bare_copy / ".venv").exists()


def test_setup_says_that_venv_is_missing(bare_copy):
    # As Debian's Python without the package python3-venv: it starts, and then fails.
    path = fake_python(bare_copy, 'test "$1" = -c || { mkdir -p "$3"; exit 1; }')
    done = make(bare_copy, "setup", f"PYTHON={path}")
    assert done.returncode != 0
    assert "sudo apt install python3-venv" in done.stderr
    assert not (bare_copy / ".venv").exists()


def test_setup_installs_again_only_when_the_project_changes(bare_copy):
    # A python that writes down what it is told, in the place of the installation.
    told = bare_copy / "told"
    path = fake_python(bare_copy, f"""
case "$*" in
    "-m venv .venv") mkdir -p .venv/bin; cp "$0" .venv/bin/python; cp "$0" .venv/bin/uv;;
esac
echo "$@" >> {told}""")
    assert make(bare_copy, "setup", f"PYTHON={path}").returncode == 0
    first = told.read_text()
    assert "-m pip install --quiet uv" in first
    assert re.search(r"pip install .*--editable \.\[test\]", first)

    assert make(bare_copy, "setup", f"PYTHON={path}").returncode == 0
    assert told.read_text() == first
    later = (bare_copy / ".venv" / ".installed").stat().st_mtime + 2
    os.utime(bare_copy / "pyproject.toml", (later, later))
    assert make(bare_copy, "setup", f"PYTHON={path}").returncode == 0
    assert told.read_text() != first
