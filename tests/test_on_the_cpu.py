"""Where nobody asks for the simulator, operators on CPU tensors are PyTorch's own.

The files in `on_the_cpu` compare them, after making sure that no kernel of ours can be launched.
All run in one process, one after the other: most of the time goes into starting PyTorch.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SCRIPTS = sorted((HERE / "on_the_cpu").glob("*.py"))
RUN_ALL = """
import json, runpy, sys, traceback
found = {}
for path in sys.argv[1:]:
    try:
        runpy.run_path(path)
        found[path] = ""
    except BaseException:
        found[path] = traceback.format_exc()
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def faults():
    """{script: what went wrong in it, or nothing}."""
    environment = {k: v for k, v in os.environ.items() if k != "COURSE_LIB_SIMULATOR"}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # threads would wait busily
    environment["PYTHONPATH"] += os.pathsep + str(HERE)
    done = subprocess.run(
        [sys.executable, "-c", RUN_ALL, *map(str, SCRIPTS)],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_cpu_takes_pytorch_unless_told_to_simulate(script, faults):
    assert faults[str(script)] == ""


def test_every_operator_is_among_them():
    assert len(SCRIPTS) >= 9
