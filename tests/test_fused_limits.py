"""The threads that the fused kernels ask for have registers enough on every chip."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.kernels import bn_relu_softmax, softmax_dropout
from course_lib.kernels.softmax.plan import row_plan

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
ROOT = Path(__file__).resolve().parent.parent
CHIPS = [(7, 5), (8, 0), (9, 0)]
REGISTERS = 1 << 16  # of a multiprocessor
DTYPES = ("float32", "bfloat16")

COMPILE = """
import json, sys
from course_lib.kernels import bn_relu_softmax, softmax_dropout
from course_lib.runtime import compiler
from course_lib.runtime.launch import array_type, numba_type
chips, wanted = json.loads(sys.argv[1])
for module in (bn_relu_softmax, softmax_dropout):
    for label, kernel, parts in module.specialisations():
        if label in wanted:
            types = [array_type(*p) if isinstance(p, tuple) else numba_type(p) for p in parts]
            for chip, found, _ in compiler.survey(kernel, types, [tuple(c) for c in chips]):
                print(json.dumps([label, chip, found["registers"]]))
"""


def asked_for():
    """{label of a kernel: {chip: most threads per block it is launched with}}."""
    found = {}
    for dtype in DTYPES:
        itemsize = 4 if dtype == "float32" else 2
        for (direction, vectors), _ in bn_relu_softmax.MOST_THREADS.items():
            n_slots = bn_relu_softmax.MOST_VALUES * itemsize // 16
            kind = "vectors" if vectors else "elements"
            label = f"bn_relu_softmax.{direction} registers, {n_slots} slots, {kind}, {dtype}"
            limits = {c: bn_relu_softmax.row_limit(direction, vectors, c) for c in CHIPS}
            found[label] = {c: limit // bn_relu_softmax.MOST_VALUES for c, limit in limits.items()}
        for n_held, direction in ((1, "forward"), (2, "backward")):
            plan = row_plan(softmax_dropout.ROW_LIMIT[n_held], itemsize, n_held)
            label = f"softmax_dropout.{direction} registers, {plan.n_slots} slots, {dtype}"
            found[label] = dict.fromkeys(CHIPS, plan.n_threads)
            label = f"softmax_dropout.{direction} registers, long rows, {dtype}"
            found[label] = dict.fromkeys(CHIPS, softmax_dropout.LONG_BLOCK_SIZE)
    return found


def test_the_largest_blocks_can_be_launched(tmp_path):
    wanted = asked_for()
    environment = os.environ | {
        "COURSE_LIB_SIMULATOR": "0",
        "COURSE_LIB_CACHE": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps([CHIPS, list(wanted)])],
        env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert {label for label, _, _ in lines} == set(wanted)
    for label, chip, registers in lines:
        n_threads = wanted[label][tuple(chip)]
        allotted = -(-registers // 8) * 8  # a warp is given registers in eights per thread
        assert allotted * n_threads <= REGISTERS, (label, chip, registers, n_threads)
