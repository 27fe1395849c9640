"""Where `COURSE_LIB_SIMULATOR=0` forbids the simulator and there is no GPU, all say the same.

And where something else took the real numba.cuda first, whose turn it was.
"""

import os
import subprocess
import sys

STORY = "there is no NVIDIA GPU here, and COURSE_LIB_SIMULATOR=0 keeps kernels from the simulator"
ASK = """
import numpy as np, torch
from course_lib import bench, compare, device
from course_lib.kernels import softmax
for call in (
    lambda: softmax.softmax.forward(np.ones((2, 3), np.float32)),
    lambda: softmax.softmax.forward(torch.ones(2, 3)),
    lambda: bench.device_times({}),
    lambda: device.properties(),
    lambda: compare.compare("softmax", (2, 3)),
):
    try:
        print("nothing was raised by", call())
    except Exception as error:
        print(type(error).__name__, error)
"""


def run(code, tmp_path, **environment):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""} | environment
    environment["PYTHONPATH"] += os.pathsep + str(tmp_path)
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=200
    )


def test_one_story_without_a_gpu(tmp_path):
    told = run(ASK, tmp_path, COURSE_LIB_SIMULATOR="0").stdout.splitlines()
    assert [line.split()[0] for line in told] == [
        "ArrayError", "ArrayError", "DeviceError", "DeviceError", "UsageError"
    ]  # fmt: skip
    assert all(STORY in line for line in told)


def test_who_imported_numba_cuda_is_named(tmp_path):
    (tmp_path / "their_kernels.py").write_text("from numba.cuda import jit\n")
    done = run("import their_kernels, course_lib", tmp_path, COURSE_LIB_SIMULATOR="1")
    assert done.returncode
    assert "already imported, by their_kernels, so the simulator" in done.stderr
    assert "Restart Python and import course_lib before that" in done.stderr
