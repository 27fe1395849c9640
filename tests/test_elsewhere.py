"""The softmax of lesson 22 in five languages: those that run or compile here are right."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from course_lib import reference
from course_lib.teach import elsewhere

ROOT = Path(__file__).resolve().parent.parent
CHIPS = [(7, 5), (9, 0)]  # the others between them were compiled by hand

#: In a process of its own, as Triton decides at its import whether it interprets.
RUN = """
import json, sys
import numpy as np
from course_lib.teach import elsewhere
x = np.load(sys.argv[1])
found = {name: elsewhere.missing(name) for name in elsewhere.LANGUAGES}
for name in [name for name in found if not found[name]]:
    found[name] = elsewhere.softmax(name, x).tolist()
print(json.dumps(found))
"""


def rows():
    """Rows with a tail, masked beginnings longer than a tile, offsets, and gaps."""
    x = np.random.default_rng(22).normal(size=(7, 1001)).astype(np.float32)
    x[1] += 1e4
    x[2, :700] = -np.inf
    x[3, 3:] = -np.inf
    x[4] *= 50
    x[5] -= 1e4
    return x


def run(tmp_path, **environment):
    np.save(tmp_path / "x.npy", rows())
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path / "x.npy")],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def assert_right(found):
    truth = reference.softmax(rows())
    assert np.abs(np.array(found) - truth).max() < 1e-6


def test_what_runs_without_a_gpu_is_right_and_what_does_not_says_why(tmp_path):
    found = run(tmp_path, COURSE_LIB_SIMULATOR="1")
    assert_right(found["numba.cuda"])
    assert_right(found["Triton"])  # its interpreter
    for name in ("numba-cuda-mlir", "CUDA C++", "cuTile"):
        assert found[name].startswith(f"{name} does not run here: "), found[name]


@pytest.mark.gpu
def test_what_runs_on_a_gpu_is_right(tmp_path):
    found = run(tmp_path)
    for name in ("numba.cuda", "CUDA C++", "Triton"):
        assert_right(found[name])


def test_three_compile_for_every_chip():
    for chip in CHIPS:
        found = elsewhere.ptx(chip)
        assert set(found) == {"numba.cuda", "CUDA C++", "Triton", "Triton, multiples of 16"}
        for text in found.values():
            assert f".target sm_{chip[0]}{chip[1]}" in text and ".f64" not in text
        assert ".v4" in found["Triton, multiples of 16"] and ".v4" not in found["Triton"]


def test_one_line_changes_for_numba_cuda_mlir():
    old, new = (
        [line for line in elsewhere.source(name).splitlines() if line]
        for name in ("numba.cuda", "numba-cuda-mlir")
    )
    changed = [pair for pair in zip(old, new, strict=True) if pair[0] != pair[1]]
    assert changed == [("from course_lib import cuda", "from numba_cuda_mlir import cuda")]


def test_a_language_that_is_missing_is_not_run():
    name = "cuTile"
    if reason := elsewhere.missing(name):
        with pytest.raises(RuntimeError, match="cuTile does not run here") as error:
            elsewhere.softmax(name, rows())
        assert str(error.value) == reason
    with pytest.raises(ValueError, match="no language 'Mojo': there are numba.cuda, numba-cuda"):
        elsewhere.source("Mojo")
