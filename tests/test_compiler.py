"""Compilation without a GPU: every kernel for every chip, and the cache on disk."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from course_lib.kernels import (
    activation,
    batch_norm,
    batches,
    bn_relu_softmax,
    conv2d,
    cross_entropy,
    dropout,
    global_avg_pool,
    linear,
    max_pool2d,
    optimizers,
    softmax,
    softmax_dropout,
    squeeze_excite,
)
from course_lib.kernels.softmax import plan

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
        env=environment, cwd=cwd, capture_output=True, text=True,
        timeout=3600 if EVERYTHING else 280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


GATE = """
import importlib, json, re, sys
from course_lib.runtime import compiler
from course_lib.runtime.launch import array_type, numba_type
modules, chips, left_out, last_alone, n_parts, part, everything = json.loads(sys.argv[1])
of_kernel = {}
for name in modules:
    module = importlib.import_module(f"course_lib.kernels.{name}")
    for label, kernel, parts in module.specialisations():
        if not re.search(left_out, label):
            of_kernel.setdefault(id(kernel), (kernel, []))[1].append((label, parts))
for number, (kernel, found) in enumerate(of_kernel.values()):
    if number % n_parts == part:
        for i, (label, parts) in enumerate(found):
            types = [array_type(*p) if isinstance(p, tuple) else numba_type(p) for p in parts]
            # Everything for every chip takes a quarter of an hour. So of each kernel one
            # specialisation, for the last chip and in turns for an older one.
            targets = [chips[number % 2], chips[-1]] if i == number // n_parts % len(found) else []
            targets = chips[-1:] if targets and re.search(last_alone, label) else targets
            targets = chips if everything else targets
            if not targets:
                continue
            for chip, facts, text in compiler.survey(kernel, types, [tuple(c) for c in targets]):
                print(json.dumps([number, label, chip, facts["registers"], facts["stack_bytes"],
                                  re.findall(r"\\S+\\.f64\\S*", text)]))
"""
MODULES = (
    activation, global_avg_pool, softmax, cross_entropy, softmax_dropout, bn_relu_softmax,
    squeeze_excite, conv2d, max_pool2d,
    batch_norm, optimizers, linear, batches, dropout,
)  # fmt: skip
#: Left out to save a minute, and run on a GPU: they are made of what those of other dtypes are.
LEFT_OUT = "float16 with float32 weights|squeeze_excite.* float16"
# float16 is read and written like bfloat16; of what is alike in all else, one is compiled.
LEFT_OUT += r"|softmax.* float16|^(activation|relu|swish|sigmoid|global|cross|dropout).* float16"
# Of these, what takes an element at a time in float32, what takes vectors in bfloat16, which needs
# the most registers; of windows with unrolled loops, the smallest.
_LAYERS, _BY_ELEMENT = "^(max_pool2d|batch_norm|optimizers)", "(naive|rows|one_pass|welford|block)"
LEFT_OUT += f"|{_LAYERS}.* float16|{_LAYERS}.* {_BY_ELEMENT} bfloat16"
LEFT_OUT += f"|, 3×3 |{_LAYERS}(?!.* {_BY_ELEMENT} ).* float32"
# Of the tiles of matrix products, each way of multiplying and each layout once.
_TILES = "split 128x128 by_k-by_row|tf32 128x128 by_row|narrow 64x64 by_k-by_k bfloat16$"
LEFT_OUT += f"|linear tensor_core (?!{_TILES})|linear vectorised (?!by_k-by_row float32)"
LEFT_OUT += "|linear .* float16|linear (tiled|register_tiled|finish) bfloat16"
# Of convolutions, the larger tiles; in 16 bits what is made for them.
LEFT_OUT += "|conv2d.* float16|conv2d(?!.*channels-last).* bfloat16"
LEFT_OUT += "|conv2d.*(tensor|channels-last) 64"
#: Made for the last of the chips alone: the launcher refuses the others, or the first of them.
LAST_ALONE = "squeeze_excite.* fused|linear tensor_core|conv2d.* (tensor|channels-last)"
#: Whether to compile all specialisations for all chips (COURSE_LIB_GATE=all), as before a release.
EVERYTHING = os.environ.get("COURSE_LIB_GATE") == "all"
LEFT_OUT = "$^" if EVERYTHING else LEFT_OUT
PARTS = 6  # tests that share the kernels
# A multiprocessor's registers lie in four partitions, among which a block's warps are dealt out.
PARTITIONS, PARTITION_REGISTERS = 4, 1 << 14
#: Bytes that may be spilled per thread. `split` is compiled for 48 registers, which keeps two
#: blocks on a multiprocessor; where sm_75 converts 16-bit numbers it needs a few more.
SPILLS = {
    (f"{name}.forward split {dtype}", (7, 5)): 48
    for name in softmax.OPERATIONS for dtype in ("float16", "bfloat16")
}  # fmt: skip
# Channels-last, `fused` is compiled for 80 registers, and 16-bit numbers need a few more: bounds
# and places that are read once for a whole part of an image.
SPILLS |= {
    (label, CHIPS[-1]): 8 if label.endswith(" float32") else 128
    for label, *_ in squeeze_excite.specialisations() if " fused, pixels" in label
}  # fmt: skip


def most_threads(label, chip):
    """Threads of the largest block that the kernel of this label is launched with."""
    direction = "backward" if ".backward" in label else "forward"
    n_arrays = 1 + (direction == "backward")
    if label.startswith("softmax_dropout.") and "registers" in label:
        long = "long rows" in label
        return softmax_dropout.LONG_BLOCK_SIZE if long else softmax_dropout.MOST_THREADS[n_arrays]
    if label.startswith("bn_relu_softmax.") and "registers" in label:
        limit = bn_relu_softmax.row_limit(direction, "vectors" in label, chip)
        return limit // bn_relu_softmax.MOST_VALUES
    if label.startswith("squeeze_excite.") and "fused" not in label:
        return squeeze_excite.two_pass.BLOCK_SIZE
    if label.startswith("squeeze_excite."):
        return squeeze_excite.fused_plan.LARGE_BLOCK
    if label.startswith("conv2d."):
        return conv2d.MOST_THREADS
    for module in (max_pool2d, batch_norm, optimizers, linear):
        if label.startswith(f"{module.__name__.rpartition('.')[2]} "):
            return module.MOST_THREADS
    if label.endswith(", team"):
        return plan.TEAM_BLOCK
    if label.endswith(", block"):
        return plan.MOST_THREADS[n_arrays]
    if "split, " in label:
        return plan.STREAM_THREADS
    return 1024


def allotted_registers(registers, n_threads):
    """Registers that a block takes of the partition where most of its warps are."""
    n_warps = -(-n_threads // (32 * PARTITIONS))
    return n_warps * 32 * (-(-registers // 8) * 8)  # handed out in eights per thread


@pytest.mark.parametrize("part", range(PARTS))
def test_every_kernel_compiles_for_every_chip(part, tmp_path):
    names = [module.__name__.rpartition(".")[2] for module in MODULES]
    options = json.dumps([names, CHIPS, LEFT_OUT, LAST_ALONE, PARTS, part, EVERYTHING])
    lines = [json.loads(line) for line in run(GATE, tmp_path, options).splitlines()]
    labels = {}
    for module in MODULES:
        for label, kernel, _ in module.specialisations():
            if not re.search(LEFT_OUT, label):
                labels.setdefault(id(kernel), set()).add(label)
    expected = list(labels.values())[part::PARTS]
    found = {label for _, label, chip, *_ in lines if tuple(chip) == CHIPS[-1]}
    assert len(expected) > 20 and all(of_kernel & found for of_kernel in expected)
    assert not EVERYTHING or found == set().union(*expected)
    every = {number for number, label, *_ in lines if not re.search(LAST_ALONE, label)}
    for k, wanted in enumerate(CHIPS[:2]):
        found = {number for number, _, chip, *_ in lines if tuple(chip) == wanted}
        assert found >= {number for number in every if number % 2 == k}
    for _, label, chip, registers, stack_bytes, doubles in lines:
        case = label, tuple(chip)
        n_threads = most_threads(*case)
        assert registers > 0
        assert allotted_registers(registers, n_threads) <= PARTITION_REGISTERS, (
            f"{label} for {chip}: {registers} registers for each of {n_threads} threads"
        )
        assert stack_bytes <= SPILLS.get(case, 0), (
            f"{label} for {chip}: {stack_bytes} bytes spilled per thread"
        )
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
