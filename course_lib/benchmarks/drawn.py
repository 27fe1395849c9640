"""Drawn problems on a GPU: ours beside PyTorch eager, every operation and pass.

`python -m course_lib bench --drawn 64` times problems that nobody chose (`drawn_problems`), one of
each operation in turn, so that a run that stops early has some of all. What is called is
`course_lib.ops` and PyTorch's function of the same name, on the same tensors in the same layout;
a gradient by autograd, its backward pass alone. cuDNN searches for its fastest algorithm, and
deterministic algorithms are not asked for. Each result, on memory full of NaN, is held to float64
before it is timed: its error may be twice PyTorch's, and a rounding beyond. torch.compile is timed
on the first problems.
"""

import contextlib
import copy
import functools
import math
import time

import torch
from torch._functorch import config as functorch

from course_lib import bench
from course_lib.benchmarks import case as one
from course_lib.benchmarks import gpu, launches
from course_lib.benchmarks.drawn_problems import OPERATIONS, SLICED, kind_of, problem
from course_lib.nn import choosing

SEED = 2026
OURS, EAGER, COMPILED = "ours", "eager", "compiled"
WITH_COMPILER = 8  # problems of each operation that torch.compile is timed on
COMPILE_SECONDS = 20  # after which it starts no further one of the operation
REPLAY, MOST_CALLS, ROUNDS = 1_500, 40, 7  # µs of a replay of a captured graph; calls in one
MOST_SETS = 12  # of buffers, so that a tensor isn't found in the L2 cache
#: What the error may be beyond twice PyTorch's: ‖found − true‖ ÷ ‖true‖.
ROUNDING = {"float32": 4e-6, "tf32": 1e-3, "bfloat16": 4e-3}


@functools.cache
def names_of(operation):
    """The names of the records of an operation, by pass and kind: {(pass, kind): (name, dtype)}."""
    kinds, draw_one, _ = OPERATIONS[operation]
    first = problem(operation, 0, SEED, most=4)
    return {
        (direction, kind): (f"drawn.{operation}.{direction}" + ".tf32" * kind.tf32, kind.dtype)
        for direction in first.passes
        for kind in kinds
    }


def n_passes(names=None):
    """How many passes one problem of each operation has."""
    return sum(len({pass_ for pass_, _ in names_of(name)}) for name in names or OPERATIONS)


def n_cases(records, count):
    """How many passes of the first `count` problems were timed, or failed."""
    return sum(case["number"] < count for record in records for case in record["cases"])


def kernel_hashes():
    """{record name: hash of what all kernels of its operation become}."""
    return {
        name: _kernel_hash(operation)
        for operation in OPERATIONS
        for name, _ in names_of(operation).values()
    }


def _kernel_hash(operation):
    return _hash_of(OPERATIONS[operation][-1], operation == "grouped_conv2d")


@functools.cache
def _hash_of(module, groups):
    keep = None if groups else lambda label: launches.GROUPS not in label
    return launches.specialisations_hash(module.specialisations(), keep)


# ---- one problem --------------------------------------------------------------------------------


class Buffers:
    """One set of a problem's tensors, and the graphs of backward passes over them."""

    def __init__(self, found, kind, make):
        self.tensors = {
            name: _made(given, kind, make, name == "x") for name, given in found.inputs.items()
        }
        self._kind, self._is_empty, self._graphs = kind, make.is_empty, {}

    def call(self, function, wanted):
        """[y], or the gradients of `wanted`, names of inputs; their graph is kept."""
        if not wanted:
            return [function(*self.tensors.values())]
        if (function, wanted) not in self._graphs:
            with torch.enable_grad(), gpu.on_stream_of_captures():
                inputs = {  # batch norm writes statistics: each graph has its own
                    name: tensor.detach().requires_grad_() if name in wanted else tensor.clone()
                    for name, tensor in self.tensors.items()
                }
                y = function(*inputs.values())
                dy = torch.empty_like(y)
                if not self._is_empty:
                    dy.copy_(_random(y.shape, y.device, self._kind))
                leaves = [tensor for name, tensor in inputs.items() if name in wanted]
                self._graphs[function, wanted] = y, leaves, dy
        y, leaves, dy = self._graphs[function, wanted]
        return [*torch.autograd.grad(y, leaves, dy, retain_graph=True)]

    def truth(self, function, wanted):
        """The same in float64."""
        exact = copy.copy(self)
        exact.tensors = {
            name: tensor.double() if tensor.is_floating_point() else tensor
            for name, tensor in self.tensors.items()
        }
        exact._graphs = {}
        return exact.call(function, wanted)


def _random(shape, device, kind):
    """The same numbers for the same shape: ours, PyTorch's and float64 get the same dy."""
    generator = torch.Generator(device).manual_seed(math.prod(shape))
    found = torch.randn(shape, generator=generator, device=device)
    return found.to(getattr(torch, kind.dtype))


def _made(given, kind, make, is_x):
    if given.below is not None:
        return make.integers(given.below, *given.shape)
    dtype, numbers = given.dtype or kind.dtype, dict(scale=given.scale, shift=given.shift)
    if kind.layout == SLICED:
        *outer, n = given.shape
        if is_x:
            return make.normal(*outer, n + 2, dtype=dtype, **numbers)[..., 1:-1]
        return make.normal(*given.shape, dtype=dtype, **numbers)
    return make.normal(*given.shape, dtype=dtype, layout=kind.layout, **numbers)


@contextlib.contextmanager
def settings(tf32):
    """TF32 or not, and cuDNN in benchmark mode."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark
    cudnn.allow_tf32 = matmul.allow_tf32 = tf32
    cudnn.benchmark = True
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32, cudnn.benchmark = before


def measure(kind, found, *, compiling=False, device="cuda"):
    """{pass: {"ours": µs, "eager": µs, "error": …}} of a problem, or {pass: {"failed": why}}."""
    # What torch.compile reuses as memory of its own would spoil a backward pass that runs again.
    kept = functorch.patch(donated_buffer=False)
    with settings(kind.tf32), torch.no_grad(), kept:
        n_bytes = 2 * found.n_elements * getattr(torch, kind.dtype).itemsize
        n_sets = bench.buffer_sets(n_bytes, most=MOST_SETS)
        make = one.Make(device)
        sets = [Buffers(found, kind, make) for _ in range(n_sets)]
        entries, calls, functions = {}, {}, {OURS: found.ours, EAGER: found.theirs}
        if compiling:
            functions[COMPILED] = one.compiled(found.theirs, mode=None)
        for direction, names in found.passes.items():
            wanted = tuple(name for name in names if name in found.inputs)
            try:
                entries[direction], checked = _checked(functions, wanted, sets, found, kind)
            except Exception as error:
                _require_gpu(device)
                entries[direction] = {"failed": _said(error)}
                continue
            calls |= {(direction, label): call for label, call in checked.items()}
        counts = {key: _count(call, n_sets, device) for key, call in calls.items()}
        times = bench.device_times(calls, calls=counts, rounds=ROUNDS) if calls else {}
    for (direction, label), timing in times.items():
        entries[direction][label] = round(timing.microseconds, 3)
    return entries


def _checked(functions, wanted, sets, found, kind):
    """({"error": …, "eager_error": …}, {label: call(i)}) of one pass; AssertionError if wrong."""
    with settings(tf32=False):
        torch.backends.cudnn.benchmark = False  # the truth is computed once
        true = sets[0].truth(found.theirs, wanted)
    calls = {
        label: one.rotating(lambda buffers, f=function: buffers.call(f, wanted), sets)
        for label, function in functions.items()
    }
    errors = {label: _error(calls[label], true) for label in (EAGER, OURS)}
    allowed = 2 * errors[EAGER] + ROUNDING["tf32" if kind.tf32 else kind.dtype]
    one.judge(OURS, errors[OURS], allowed)
    shown = {"error": errors[OURS], "eager_error": errors[EAGER]}
    entry = {name: float(f"{error:.3e}") for name, error in shown.items()}
    if COMPILED in calls:
        try:
            calls[COMPILED](0)
        except Exception:  # what it can't compile is not timed
            del calls[COMPILED]
            entry[COMPILED] = None
    return entry, calls


def _error(call, true):
    """The largest error of what a call leaves on memory full of NaN."""
    return max(map(_distance, one.on_nan(call, []), true))


def _distance(found, true):
    """‖found − true‖ ÷ ‖true‖, or the former where all is 0."""
    assert found.shape == true.shape, f"shape {tuple(found.shape)}, not {tuple(true.shape)}"
    size = true.norm().item() or 1.0
    return (found.double() - true).norm().item() / size


def _count(call, n_sets, device):
    """Calls in one replay."""
    return max(n_sets, min(MOST_CALLS, int(REPLAY / one._once(call, device))))


def _require_gpu(device):
    """Raise if the GPU is lost, or its generator, as by a spoilt capture: the run ends."""
    torch.randn(1, device=device)
    gpu.synchronize()


def _said(error):
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


# ---- all of them --------------------------------------------------------------------------------


def run(
    count, *, names=None, seed=SEED, seconds=float("inf"), compile_seconds=COMPILE_SECONDS,
    held=(), most=float("inf"), progress=lambda problems: problems, device="cuda",
):  # fmt: skip
    """Measure `count` problems of each operation. Yields all records so far, after each problem.

    names            operations, instead of all
    seconds          it starts no problem later than this
    compile_seconds  torch.compile is timed on no further problem of an operation later than this
    held             records: what they have is not measured again, where nothing has changed
    most             no extent is above it
    """
    end, spent = time.monotonic() + seconds, dict.fromkeys(names or OPERATIONS, 0.0)
    like = _record(count, seed)
    records = {
        (name, dtype): like | {
            "name": name, "dtype": dtype, "kernel_hash": _kernel_hash(operation), "cases": [],
            "tf32": name.endswith(".tf32"),
        }
        for operation in spent for name, dtype in names_of(operation).values()
    }  # fmt: skip
    for record in held:
        here = records.get((record["name"], record["dtype"]))
        if here and all(record.get(k) == here[k] for k in ("seed", "sources", "versions")):
            here["cases"] = record["cases"]
    yield _begun(records)
    rounds = [(number, operation) for number in range(count) for operation in spent]
    for number, operation in progress(rounds):
        if time.monotonic() > end:
            break
        kind = kind_of(operation, number)
        cases = {
            direction: records[key]["cases"]
            for (direction, of), key in names_of(operation).items() if of == kind
        }  # fmt: skip
        compiling = number < WITH_COMPILER and spent[operation] < compile_seconds
        if not _is_missing(number, cases.values(), compiling):
            continue
        start, found = time.monotonic(), problem(operation, number, seed, most)
        try:
            entries = measure(kind, found, compiling=compiling, device=device)
        except Exception as error:
            _require_gpu(device)
            entries = dict.fromkeys(found.passes, {"failed": _said(error)})
        for direction, entry in entries.items():
            cases[direction][:] = sorted(
                [c for c in cases[direction] if c["number"] != number]
                + [{"label": found.label, "number": number, "layout": kind.layout} | entry],
                key=lambda c: c["number"],
            )
        if compiling:
            spent[operation] += time.monotonic() - start
        yield _begun(records)


def _begun(records):
    return [record for record in records.values() if record["cases"]]


def _is_missing(number, groups, compiling):
    """Whether a pass has no time of this problem; or torch.compile none, where that is wanted."""
    for cases in groups:
        (entry,) = [case for case in cases if case["number"] == number] or [None]
        if entry is None or (compiling and "failed" not in entry and COMPILED not in entry):
            return True
    return False


def _record(count, seed):
    """What all records have in common."""
    command = f"python -m course_lib bench --drawn {count}"
    command += f" --seed {seed} --record" if seed != SEED else " --record"
    return bench.host_record(None, (), None, [], None, command) | {
        "seed": seed, "sources": choosing.sources(), "cudnn_benchmark": True,
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }  # fmt: skip
