"""Compilation without a GPU: every kernel for every chip, and the cache on disk."""

import functools
import importlib
import inspect
import json
import os
import pkgutil
import re
import subprocess
import sys
import warnings
from pathlib import Path

import compile_gate
import pytest

from course_lib import kernels
from course_lib.benchmarks.launches import fingerprint_of
from course_lib.kernels import (
    activation,
    all_reduce,
    attention,
    batch_norm,
    bn_relu_softmax,
    conv2d,
    dice,
    global_avg_pool,
    linear,
    max_pool2d,
    optimizers,
    softmax,
    softmax_dropout,
    squeeze_excite,
    upsample,
)
from course_lib.kernels.blocks import columns, row_plan
from course_lib.kernels.softmax import plan
from course_lib.kernels.squeeze_excite import batched, resident_plan
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import part_name

pytest.importorskip("numba_cuda", reason="numba-cuda is not installed here (macOS)")
ROOT = Path(__file__).resolve().parent.parent
CHIPS, HOPPER = compile_gate.CHIPS, compile_gate.HOPPER
ALL_CHIPS = CHIPS + compile_gate.SAMPLED_CHIPS


def run(code, tmp_path, *arguments, cwd=ROOT):
    """Run `code` with the real numba.cuda, which compiles without a GPU, and a cache of its own."""
    environment = os.environ | {
        "COURSE_LIB_SIMULATOR": "0",
        "COURSE_LIB_CACHE": str(tmp_path / "cache"),
        # A file may be written again sooner than bytecode notices, by the second.
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment, cwd=cwd, capture_output=True, text=True,
        timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


#: Compilations for chips that were added to the list later, still to be made by `make compiled`.
LACKING = 0
#: Whether to compile all specialisations for all chips (COURSE_LIB_GATE=all), as before a release.
EVERYTHING = os.environ.get("COURSE_LIB_GATE") == "all"
# A multiprocessor's registers lie in four partitions, among which a block's warps are dealt out.
PARTITIONS, PARTITION_REGISTERS = 4, 1 << 14
#: Bytes that may be spilled per thread. `split` is compiled for 48 registers, which keeps two
#: blocks on a multiprocessor; where sm_75 converts 16-bit numbers it needs a few more.
SPILLS = {
    (f"{name}.forward split {dtype}", (7, 5)): 48
    for name in softmax.OPERATIONS for dtype in ("float16", "bfloat16")
}  # fmt: skip
# For planes, `fused` is compiled for 64 registers, so that four blocks fit on a multiprocessor, and
# a few bounds and places that are read once for a whole part of an image stay in memory.
SPILLS |= {
    (label, chip): 64
    for label, *_ in squeeze_excite.specialisations() if " fused, planes" in label
    for chip in ALL_CHIPS
}  # fmt: skip
# What sums planes of `two_pass` is compiled for three blocks on a multiprocessor: 80 registers. On
# older chips they leave none for some bounds that are read once for a plane.
SPILLS |= {
    (label, chip): 64
    for label, *_ in squeeze_excite.specialisations()
    if any(f", {name}, " in label for name in ("pool_planes", "dlogit_planes"))
    for chip in ALL_CHIPS if chip < HOPPER
}  # fmt: skip
# `resident` backward is compiled for 128 registers, so that two blocks fit on a multiprocessor. Two
# of its many bounds stay in memory there.
SPILLS |= {
    (label, chip): 16
    for label, *_ in squeeze_excite.specialisations() if "backward resident" in label
    for chip in ALL_CHIPS
}  # fmt: skip
# sm_75 has no bfloat16: with its conversions loops are too long to be unrolled, and the 64 sums of
# a thread stay in memory.
SPILLS |= {
    (label, (7, 5)): 256 for label, *_ in linear.specialisations()
    if label.startswith("linear vectorised ") and label.endswith(" bfloat16")
}  # fmt: skip

# Tensor cores: warps hold as much of a product as there are registers. What they need once a tile,
# such as where the next one lies, waits in local memory: some words for hundreds of instructions.
SPILLS |= {
    (label, chip): 128
    for module in (linear, conv2d) for label, *_ in module.specialisations()
    if label.startswith(("linear tensor_core ", "conv2d.halo ", "conv2d.pixel_sums "))
    for chip in ALL_CHIPS
}  # fmt: skip
# On 8.x the largest tile of `split` takes all 255 registers, and keeps 136 bytes elsewhere.
SPILLS |= {
    (label, chip): 144
    for label, *_ in conv2d.specialisations() if label.startswith("conv2d.halo split 256x64 ")
    for chip in ALL_CHIPS if chip[0] == 8
}  # fmt: skip

# What sums dweight by vectors has 128 registers, and is told its strides when it is launched: of
# filters of 7 columns two to four numbers that a line begins with have no room.
SPILLS |= {
    (label, chip): 16
    for label, *_ in conv2d.specialisations()
    if label.startswith("conv2d.depthwise dweight 7 columns by vectors, stride 1, ")
    for chip in ALL_CHIPS
}  # fmt: skip

# Attention: the same. With options that need a look at each score by itself the scores of a tile
# stay there too, 64 or 128 bytes, because such loops are too long to be unrolled.
SPILLS |= {
    (label, chip): 216 if " tensor_core " in label else 128
    for label, *_ in attention.specialisations()
    if label.startswith(("attention tensor_core ", "attention tiled ", "attention d"))
    for chip in ALL_CHIPS
}

# For heads of 256 a lane holds 128 sums; on 8.x not all of them find a register.
SPILLS |= {
    (label, chip): 512
    for label, *_ in attention.specialisations()
    if re.match(r"attention tensor_core (mma 32|split 16), 1, 256", label)
    for chip in ALL_CHIPS if chip[0] == 8
}  # fmt: skip
# Float32 in parts needs twice the registers of what is multiplied.
SPILLS |= {
    (label, (9, 0)): 224
    for label, *_ in attention.specialisations()
    if re.match(r"attention tensor_core dk, dv split 16, 1, (128|256), any, by element", label)
}

#: Kernels whose blocks wait for one another.
WAITING = re.compile(r"^squeeze_excite\.\w+ (resident|batched), ")


@functools.cache
def modules_own_limits():
    """{module: its `most_threads(label, chip)`} of the modules that have one."""
    found = {name: importlib.import_module(f"course_lib.kernels.{name}")
             for name in compile_gate.modules()}  # fmt: skip
    return {
        name: module.most_threads for name, module in found.items()
        if hasattr(module, "most_threads")
    }  # fmt: skip


def most_threads(label, chip):
    """Threads of the largest block that the kernel of this label is launched with."""
    if (its_own := modules_own_limits().get(re.match(r"\w+", label)[0])) is not None:
        return its_own(label, chip)
    direction = "backward" if ".backward" in label else "forward"
    n_arrays = 1 + (direction == "backward")
    if label.startswith("softmax_dropout.") and "registers" in label:
        long = "long rows" in label
        return softmax_dropout.LONG_BLOCK_SIZE if long else softmax_dropout.MOST_THREADS[n_arrays]
    if label.startswith("bn_relu_softmax.") and "registers" in label:
        limit = bn_relu_softmax.row_limit(direction, "vectors" in label, chip)
        return limit // bn_relu_softmax.MOST_VALUES
    if " strided," in label:
        return columns.BLOCK_SIZE
    if label.startswith("dice "):
        return dice.sums.BLOCK_SIZE
    if label.startswith("upsample "):
        return upsample.kernels.BLOCK_SIZE
    if label.startswith("all_reduce "):
        return all_reduce.BLOCK_SIZE
    if label.startswith("global_avg_pool ") and "channels-last" in label:
        return global_avg_pool.nhwc.BLOCK_SIZE
    if label.startswith("squeeze_excite."):
        return squeeze_excite.two_pass.BLOCK_SIZE
    if label.startswith(("conv2d.", "conv_transpose2d.")):
        return conv2d.MOST_THREADS
    for module in (max_pool2d, batch_norm, optimizers, linear):
        if label.startswith(f"{module.__name__.rpartition('.')[2]} "):
            return module.MOST_THREADS
    if label.endswith(", team"):
        return row_plan.TEAM_BLOCK
    if label.endswith(", block"):
        return plan.MOST_THREADS[n_arrays]
    if "split, " in label:
        return row_plan.STREAM_THREADS
    return 1024


def allotted_registers(registers, n_threads):
    """Registers that a block takes of the partition where most of its warps are."""
    n_warps = -(-n_threads // (32 * PARTITIONS))
    return n_warps * 32 * (-(-registers // 8) * 8)  # handed out in eights per thread


@pytest.fixture(scope="module")
def gate():
    """(every case, what is written down, what was compiled now) of all kernels."""
    command = [sys.executable, str(ROOT / "tests" / "compile_gate.py"), "--for-tests"]
    done = subprocess.run(
        command + ["--all"] * EVERYTHING, capture_output=True, text=True, timeout=3600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    printed = json.loads(done.stdout.splitlines()[-1])
    compiled = {
        label: {tuple(chip): compile_gate.Found(*found) for chip, found in rows}
        for label, rows in printed["found"]
    }
    cases = [compile_gate.Case(*case) for case in printed["cases"]]
    cases = [case._replace(chips=[tuple(chip) for chip in case.chips]) for case in cases]
    return cases, compile_gate.load(), compiled


def assert_within_limits(label, found):
    """`found` is {chip: Found}."""
    for chip, (registers, stack_bytes, shared_bytes, doubles, _) in found.items():
        n_threads = most_threads(label, chip)
        assert registers > 0
        assert allotted_registers(registers, n_threads) <= PARTITION_REGISTERS, (
            f"{label} for {chip}: {registers} registers for each of {n_threads} threads"
        )
        assert stack_bytes <= SPILLS.get((label, chip), 0), (
            f"{label} for {chip}: {stack_bytes} bytes spilled per thread"
        )
        doubles = doubles and not label.endswith("float64")  # but where numbers are
        assert not doubles, f"{label} for {chip} computes in float64"
        if rung := WAITING.search(label):
            # These wait for one another, and the driver refuses more than run at once.
            assert registers * n_threads * resident_plan.BLOCKS <= PARTITIONS * PARTITION_REGISTERS
            if rung[1] == "batched":
                most = batched.STATIC_BYTES + resident_plan.RESERVED_BYTES
                assert shared_bytes is None or shared_bytes <= most, (label, chip)


@pytest.mark.timeout(3600 if EVERYTHING else 900)
def test_every_kernel_compiles_for_every_chip_within_its_limits(gate):
    cases, known, compiled = gate
    for case in cases:
        if compile_gate.is_known(case, known):
            found = known[case.label][1]
            assert found and found.keys() <= set(case.chips)
            assert_within_limits(case.label, found)
        if case.label in compiled:
            assert_within_limits(case.label, compiled[case.label])


def test_no_more_is_lacking_than_is_said(gate):
    """Chips that were added to the list, and that `make compiled` has not come to yet."""
    cases, known, _ = gate
    left = [len(compile_gate.lacking(c, known)) for c in cases if compile_gate.is_known(c, known)]
    assert sum(left) <= LACKING


def test_what_is_not_known_is_compiled(gate):
    """All that is new or changed where it is little, else one specialisation of each kernel."""
    cases, known, compiled = gate
    new = [case for case in cases if not compile_gate.is_known(case, known)]
    kernels = {case.kernel for case in cases if case.label in compiled}
    assert {case.kernel for case in new} <= kernels
    if len(new) <= compile_gate.FEW:
        assert {case.label for case in new} <= compiled.keys()
    else:
        warnings.warn(
            f"{len(new)} specialisations are new, changed, or made by another version of numba; "
            "one of each kernel was compiled. `make compiled` compiles and writes down the others.",
            stacklevel=1,
        )


def test_what_is_known_is_true(gate):
    """What was written down is what comes out today."""
    cases, known, compiled = gate
    same = [case for case in cases if compile_gate.is_known(case, known)]
    again = [case.label for case in same if case.label in compiled]
    assert len(again) >= len(same) // (4 * compile_gate.SPOT)
    for label in again:
        for chip, found in compiled[label].items():
            before = known[label][1].get(chip, found)
            if before.shared_bytes is None:
                before = before._replace(shared_bytes=found.shared_bytes)
            if before.ptx is None:
                before = before._replace(ptx=found.ptx)
            assert found == before, (label, chip)


def test_no_kernel_is_left_out(gate):
    """Every module with specialisations is among those that are compiled, or what they list is."""
    of_gate = [row for name in compile_gate.modules() for row in specialisations(name)]
    listed = {id(kernel) for _, kernel, _ in of_gate}
    for module in pkgutil.iter_modules(kernels.__path__):
        found = specialisations(module.name)
        assert {id(kernel) for _, kernel, _ in found} <= listed, module.name


def specialisations(name):
    module = importlib.import_module(f"course_lib.kernels.{name}")
    listing = getattr(module, "specialisations", None)
    if listing is None or inspect.signature(listing).parameters:
        return []  # what is part of another module is asked by it, for each dtype
    return list(listing())


def case(number, kernel="a", key=None, chips=CHIPS):
    return compile_gate.Case("softmax", f"case {number}", kernel, chips, key or f"{number:016x}")


def test_what_is_compiled_is_what_is_not_known():
    cases = [case(n + 1) for n in range(60)]  # none is drawn as a sample
    found = {chip: compile_gate.Found(8, 0, 0, []) for chip in CHIPS}
    known = {c.label: (c.key, found) for c in cases}
    assert compile_gate.choose(cases, known) == []
    # A kernel that was changed, one that is new.
    changed = [cases[0]._replace(key="f" * 15 + "1"), *cases[1:], case(61)]
    chosen = compile_gate.choose(changed, known)
    assert chosen == [(changed[0], CHIPS), (changed[-1], CHIPS)]
    # One for each kernel where there are many.
    kernels_ = [c._replace(kernel=str(n // 6)) for n, c in enumerate(cases)]
    chosen = compile_gate.choose(kernels_, {})
    assert [c.kernel for c, _ in chosen] == [str(n) for n in range(10)]
    assert {tuple(chips) for _, chips in chosen} == {(chip, HOPPER) for chip in CHIPS[:-1]}
    assert len({kernels_.index(c) % 6 for c, _ in chosen}) > 1  # not always the first
    assert len(compile_gate.choose(cases, known, everything=True)) == 60
    alone = [c._replace(chips=[HOPPER]) for c in cases]
    assert {tuple(chips) for _, chips in compile_gate.choose(alone, {})} == {(HOPPER,)}
    # A chip that is lacking waits for `make compiled`, unless the sample draws it.
    few = {c.label: (c.key, {HOPPER: found[HOPPER]}) for c in cases}
    assert compile_gate.choose(cases, few) == []
    assert compile_gate.lacking(cases[0], few) == CHIPS[:-1]
    assert compile_gate.lacking(cases[0], {}) == CHIPS
    # The sample: known cases alone, whose keys nobody chooses, and neither which chip it is.
    drawn = [case(62 + n, key=f"{n * compile_gate.SPOT:016x}") for n in range(len(CHIPS))]
    known = {c.label: (c.key, found) for c in drawn}
    assert compile_gate.choose(drawn, known) == [
        (c, [chip]) for c, chip in zip(drawn, CHIPS, strict=True)
    ]


def test_what_is_written_down_is_read_again(tmp_path):
    cases = [case(1, chips=ALL_CHIPS), case(2, chips=[HOPPER]), case(3)]
    doubles = ["add.f64"]
    found = {c: compile_gate.Found(8, n, 64, doubles * n) for n, c in enumerate(ALL_CHIPS)}
    known = {cases[0].label: (cases[0].key, found), "old": ("0" * 16, found)}
    known[cases[1].label] = cases[1].key, {HOPPER: found[HOPPER]}
    compile_gate.save(cases, known, tmp_path)
    del known["old"]
    assert compile_gate.load(tmp_path) == known
    assert json.loads((tmp_path / "compiled_by.txt").read_text()) == compiler.compiled_by()


def test_kernels_are_compiled_for_the_chips_that_may_run_them():
    assert compile_gate.chips_for("linear tensor_core warpgroup 128x256 by_k", True) == [HOPPER]
    assert compile_gate.chips_for("conv2d.warpgroup mixed 232x128", True) == [HOPPER]
    assert compile_gate.chips_for("conv2d.halo narrow 128x64 float16", False) == CHIPS[1:]
    assert compile_gate.chips_for("linear tensor_core tf32 128x64", True) == ALL_CHIPS[1:]
    assert compile_gate.chips_for("conv2d.halo tf32 128x64 by_k float32", True) == ALL_CHIPS[4:]
    assert compile_gate.chips_for("conv2d.forward few 3x3x1 channels-last float32", False) == CHIPS
    assert compile_gate.chips_for("softmax.forward naive float32", True) == ALL_CHIPS


KEYS = """
import sys
sys.path.insert(0, "tests")
import compile_gate
from course_lib.runtime.compile import compiler
from course_lib.kernels import activation
compile_gate.modules = lambda: ("activation",)
def keys():
    compile_gate._compilable.clear()
    compiler.compiled_by.cache_clear()
    return [case.key for case in compile_gate.list_cases()]
before = keys()
assert before == keys() and len(set(before)) == len(before)
kernel = next(iter(activation.specialisations()))[1]
kernel.targetoptions["fastmath"] = True
print(sum(a != b for a, b in zip(before, keys())))
kernel.targetoptions["fastmath"] = False
assert before == keys()
versions = compiler._versions()
for i, (name, *_) in list(enumerate(versions))[1:]:
    other = [*versions[:i], [name, "0.0"], *versions[i + 1:]]
    compiler._versions = lambda: other
    assert not set(before) & set(keys()), name
compiler._versions = lambda: [[*versions[0][:2], 99], *versions[1:]]
assert before == keys()
"""


def test_the_simulator_finds_the_same_keys(gate):
    keys = {case.label: case.key for case in gate[0]}
    for name in compile_gate.modules():
        module = importlib.import_module(f"course_lib.kernels.{name}")
        for label, kernel, parts in module.specialisations():
            types = [part_name(part) for part in parts]
            source = compiler.source_key(fingerprint_of(kernel), types, kernel.targetoptions)
            assert keys.pop(label) == compiler.case_key(source), label
    assert not keys


def test_options_and_versions_make_a_case_a_new_one(tmp_path):
    assert run(KEYS, tmp_path).split() == ["3"]  # the kernel's three dtypes


def test_later_chips_refuse_what_hopper_alone_has(tmp_path):
    out = run(
        """
from cuda.core import Program, ProgramOptions
for chip in ("sm_90a", "sm_90", "sm_100a", "sm_120a"):
    text = f".version 8.7\\n.target {chip}\\n.address_size 64\\n.visible .entry kernel() {{ %s }}"
    for instruction in ("wgmma.fence.sync.aligned;", "griddepcontrol.wait;"):
        try:
            program = Program(text % instruction, "ptx", ProgramOptions(arch=chip))
            program.compile("cubin")
            print(chip, instruction.split(".")[0])
        except Exception as error:
            assert "wgmma" in str(error), error
""",
        tmp_path,
    )
    assert out.splitlines() == ["sm_90a wgmma", *(
        f"{chip} griddepcontrol" for chip in ("sm_90a", "sm_90", "sm_100a", "sm_120a")
    )]  # fmt: skip


def test_the_gate_sees_float64_and_spills(tmp_path):
    out = run(
        """
import numpy as np
from course_lib import cuda
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import array_type
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


def test_compiling_keeps_no_array_of_the_launcher(tmp_path):
    out = run(
        """
import gc, itertools, weakref
import numpy as np
from course_lib.kernels import max_pool2d
from course_lib.runtime.compile.compiler import compile_kernel
from course_lib.runtime.host.launch import argument_type
def launcher(kernel, types):
    workspace = np.zeros(8)
    compile_kernel(kernel, types, (9, 0))
    return weakref.ref(workspace)
gc.disable()
for _, kernel, parts in itertools.islice(max_pool2d.specialisations(), 3):
    types = [argument_type(p) for p in parts]
    print(launcher(kernel, types)() is None)
""",
        tmp_path,
    )
    assert out.split() == ["True"] * 3


CHANGING = """
import sys, types
sys.path.insert(0, sys.argv[1])
from course_lib.runtime.compile import compiler
from course_lib.runtime.host.launch import array_type
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


TUPLES = """
import sys
from collections import namedtuple
sys.path.insert(0, sys.argv[1])
from course_lib import cuda
from course_lib.runtime.compile.fingerprint import fingerprint
import user_device
Parts = namedtuple("Parts", "name change others")
def made(parts):
    @cuda.jit
    def kernel(x):
        x[0] = parts.change(x[0])
    return fingerprint(kernel)
print(made(Parts("a", user_device.change, ())), made(Parts("b", user_device.change, ())),
      made(Parts("a", None, (1, (user_device.change,)))))
"""


def test_fingerprints_reach_functions_in_tuples(tmp_path):
    found = []
    for factor in (2, 2, 3):
        (tmp_path / "user_device.py").write_text(DEVICE.format(factor=factor))
        found.append(run(TUPLES, tmp_path, tmp_path).split())
    assert found[0] == found[1] and len(set(found[0])) == 3
    assert not set(found[0]) & set(found[2])


def test_fingerprints_agree_between_gpu_and_simulator(tmp_path):
    code = """
import os, sys
if len(sys.argv) > 1: os.environ["COURSE_LIB_SIMULATOR"] = sys.argv[1]
from course_lib.kernels import activation
from course_lib.runtime.compile.fingerprint import fingerprint
for label, kernel, _ in activation.specialisations():
    print(label, fingerprint(kernel))
"""
    real, simulated = (run(code, tmp_path, mode) for mode in ("0", "1"))
    assert real == simulated
    digests = {line.split()[-1] for line in real.splitlines()}
    # A kernel's own, whatever the dtype.
    assert len(digests) == len(activation.OPERATIONS) * 2 * 4
