"""Compilation without a GPU: every kernel for every chip, and the cache on disk."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
ROOT = Path(__file__).resolve().parent.parent
CHIPS = [(7, 5), (8, 0), (9, 0)]


def run(code, tmp_path, *arguments, cwd=ROOT):
    """Run `code` with the real numba.cuda, which compiles without a GPU, and a cache of its own."""
    environment = os.environ | {
        "COURSE_LIB_SIMULATOR": "0",
        "COURSE_LIB_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, cwd=cwd, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


GATE = """
import json, re, sys
from course_lib.kernels import activation, global_avg_pool
from course_lib.runtime import compiler
from course_lib.runtime.launch import array_type, numba_type
chips = [tuple(chip) for chip in json.loads(sys.argv[1])]
for label, kernel, parts in [*activation.specialisations(), *global_avg_pool.specialisations()]:
    types = [array_type(*p) if isinstance(p, tuple) else numba_type(p) for p in parts]
    for chip, found, text in compiler.survey(kernel, types, chips):
        print(json.dumps([label, chip, found["registers"], found["stack_bytes"],
                          re.findall(r"\\S+\\.f64\\S*", text)]))
"""


def test_every_kernel_compiles_for_every_chip(tmp_path):
    lines = [json.loads(line) for line in run(GATE, tmp_path, json.dumps(CHIPS)).splitlines()]
    assert len(lines) == (3 * 2 * 3 * 3 + 18 * 3) * len(CHIPS)
    for label, chip, registers, stack_bytes, doubles in lines:
        assert 0 < registers <= 64, (label, chip, registers)
        assert stack_bytes == 0, f"{label} for {chip}: {stack_bytes} bytes spilled per thread"
        assert not doubles, f"{label} for {chip} computes in float64: {doubles[:3]}"


def test_the_gate_sees_float64_and_spills(tmp_path):
    out = run(
        """
import numpy as np
from course_lib import cuda
from course_lib.runtime import compiler
from course_lib.runtime.launch import array_type
@cuda.jit
def promoted(x):
    i = cuda.grid(1)
    x[i] = x[i] * 0.1
@cuda.jit
def spilled(x):
    local = cuda.local.array(100, np.float32)
    for k in range(100):
        local[int(x[k]) % 100] = x[k]
    x[0] = local[int(x[1]) % 100]
types = [array_type("float32")]
((_, _, text),) = compiler.survey(promoted, types, [(9, 0)])
print(".f64" in text)
((_, found, _),) = compiler.survey(spilled, types, [(9, 0)])
print(found["stack_bytes"] >= 400)
""",
        tmp_path,
    )
    assert out.split() == ["True", "True"]


CHANGING = """
import sys, types
sys.path.insert(0, sys.argv[1])
from course_lib.runtime import compiler
from course_lib.runtime.launch import array_type
import user_kernel
key = compiler.cache_key(user_kernel.kernel, [array_type("float32")], (9, 0))
found = compiler.compile_kernel(user_kernel.kernel, [array_type("float32")], (9, 0))
again = compiler.compile_kernel(user_kernel.kernel, [array_type("float32")], (9, 0))
print(key, len(list(compiler.cache_folder().glob("*.kernel"))), found.cubin == again.cubin)
"""
KERNEL = """
from course_lib import cuda
import user_device
@cuda.jit
def kernel(x):
    i = cuda.grid(1)
    if i < x.shape[0]:
        x[i] = user_device.change(x[i])
"""
DEVICE = """
import numpy as np
from course_lib import cuda
FACTOR = np.float32({factor})
@cuda.jit(device=True)
def change(v):
    return v * FACTOR
"""


def test_the_cache_notices_a_change_in_another_file(tmp_path):
    (tmp_path / "user_kernel.py").write_text(KERNEL)
    found = []
    for factor in (2, 2, 3):
        (tmp_path / "user_device.py").write_text(DEVICE.format(factor=factor))
        found.append(run(CHANGING, tmp_path, tmp_path).split())
    assert found[0][0] == found[1][0] != found[2][0]
    assert [row[1] for row in found] == ["1", "1", "2"]
    assert all(row[2] == "True" for row in found)


DAMAGED = """
path, = compiler.cache_folder().glob("*.kernel")
whole = path.read_bytes()
for damaged in (whole[: len(whole) // 2], b"", b"nonsense", whole[:-1] + b"?"):
    path.write_bytes(damaged)
    fresh = compiler.compile_kernel(user_kernel.kernel, [array_type("float32")], (9, 0))
    again = compiler.compile_kernel(user_kernel.kernel, [array_type("float32")], (9, 0))
    print(fresh.key == found.key, fresh.cubin == again.cubin, path.read_bytes() != damaged)
"""


def test_a_damaged_cache_file_is_compiled_again(tmp_path):
    (tmp_path / "user_kernel.py").write_text(KERNEL)
    (tmp_path / "user_device.py").write_text(DEVICE.format(factor=5))
    lines = run(CHANGING + DAMAGED, tmp_path, tmp_path).splitlines()[1:]
    assert lines == ["True True True"] * 4


def test_a_cache_that_cannot_be_written_costs_only_time(tmp_path):
    (tmp_path / "user_kernel.py").write_text(KERNEL)
    (tmp_path / "user_device.py").write_text(DEVICE.format(factor=5))
    (tmp_path / "cache").write_text("a file where the folder should be")
    # Compiled twice, kept nowhere: two compilations name their symbols differently.
    assert run(CHANGING, tmp_path, tmp_path).split()[1:] == ["0", "False"]


def test_fingerprints_agree_between_gpu_and_simulator(tmp_path):
    code = """
import os, sys
if len(sys.argv) > 1: os.environ["COURSE_LIB_SIMULATOR"] = sys.argv[1]
from course_lib.kernels import activation
from course_lib.runtime.fingerprint import fingerprint
for label, kernel, _ in activation.specialisations():
    print(label, fingerprint(kernel))
"""
    real, simulated = (run(code, tmp_path, mode) for mode in ("0", "1"))
    assert real == simulated
    digests = {line.split()[-1] for line in real.splitlines()}
    assert len(digests) == 3 * 2 * 3  # a kernel's own, whatever the dtype
