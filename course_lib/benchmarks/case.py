"""One loop for all benchmarks of operations: a `Case` is checked, then timed, and gives a record.

Each benchmark module says what its cases are (`cases`); `measure` does the rest, for all alike:

- every candidate is called on memory full of NaN and held to float64 before anything is timed;
- device times of ours and of the peers, interleaved, beside the limit (a copy of as many bytes);
- the latency of one call alone, until its result is there, never mixed with the former;
- rungs that refuse a size or take too long are left out, and the record says why.
"""

import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from course_lib import bench

FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
OTHER = {"contiguous": "channels-last", "channels-last": "contiguous"}
EAGER, COMPILED = "PyTorch eager", "torch.compile"
REPLAY = 5_000  # µs that one replay of a captured graph may take
ROTATED = 50_000  # µs that a replay may take for the sake of walking through all sets of buffers
LOOP = 4_000  # µs of a loop of calls, as Python sees them
MOST_CALLS = 60
LATE = 2_000  # µs of a call from which on its latency is its time
LATENCIES = 100  # calls that are waited for, one by one
DRAWN, SEED = 8, 2026  # shapes drawn for each operation, and with which seed


@dataclass(frozen=True)
class Case:
    """What is measured at one size; nothing is made for it until `build` is called.

    build     function(make, n_sets) -> `Work`; `make` makes its tensors (`Make`)
    n_bytes   that the operation must move; of these, sets of buffers outgrow the cache
    default   the label of ours that the course chooses
    flops     where arithmetic counts; rows say TFLOP/s, and their error
    longest   µs; a rung of ours that takes longer is left out
    settings  a context manager that holds while the case is built and measured
    facts     further fields of the record
    """

    name: str
    shape: tuple
    dtype: str
    command: str
    n_bytes: int
    build: Callable
    default: str = None
    flops: int = None
    longest: int = 50_000
    most_sets: int = 24
    settings: Callable = contextlib.nullcontext
    facts: dict = field(default_factory=dict)


@dataclass
class Work:
    """The candidates of a case, on its sets of buffers. Each is a function of the call's number.

    ours      {label: call(i)}, which needs no tensor's content; calls return what they compute
    peers     function() -> {label: call(i)}
    check     function() -> judge(label, found, is_ours), which raises AssertionError for what is
              wrong, and returns the error or None
    outputs   tensors of set 0 that calls write
    limit     function() -> {label: call(i)}: what cannot be beaten; the fastest of them counts
    python    {label of a row: call(i)} -> also timed in a loop, as Python sees it
    facts     function(errors) -> further fields of the record, once the times are there
    """

    ours: dict
    peers: Callable
    check: Callable
    outputs: list = field(default_factory=list)
    limit: Callable = None
    python: Callable = dict
    facts: Callable = dict


class Make:
    """Makes the tensors of a case on a device; with `empty`, without touching their memory."""

    def __init__(self, device, empty=False):
        self.device, self.is_empty = torch.device(device), empty

    def empty(self, *shape, dtype="float32", layout="contiguous"):
        kind = FORMATS[layout] if len(shape) == 4 else torch.contiguous_format
        dtype = getattr(torch, dtype)
        return torch.empty(shape, dtype=dtype, device=self.device, memory_format=kind)

    def normal(self, *shape, dtype="float32", layout="contiguous", scale=1, shift=0):
        found = self.empty(*shape, dtype=dtype, layout=layout)
        if self.is_empty:
            return found
        return found.copy_(torch.randn(shape, device=self.device).mul_(scale).add_(shift))

    def uniform(self, *shape, low=0):
        found = self.empty(*shape)
        return found if self.is_empty else found.uniform_().add_(low)

    def integers(self, most, *shape):
        found = self.empty(*shape, dtype="int64")
        return found if self.is_empty else found.random_(most)

    def ones(self, *shape, dtype="float32"):
        found = self.empty(*shape, dtype=dtype)
        return found if self.is_empty else found.fill_(1)


def rotating(function, sets):
    """call(i) of `function` on one set of buffers after the other.

    Results are kept until their set's turn comes again: memory that is written again at once would
    still be in the cache.
    """
    kept = [None] * len(sets)

    def call(i):
        i %= len(sets)
        kept[i] = function(sets[i])
        return kept[i]

    return call


def compiled(function, **options):
    """`function` by torch.compile, at its best."""
    torch.compiler.reset()  # or it gives up after a few functions, and runs them eagerly
    options = {"fullgraph": True, "mode": "max-autotune-no-cudagraphs"} | options
    return torch.compile(function, dynamic=False, **options)


def copies(make, n_bytes, n_sets):
    """A copy of as many bytes, and a kernel that negates: which is faster depends on the size."""
    n = max(1, n_bytes // 8)
    source = [make.normal(n) for _ in range(n_sets)]
    target = [torch.empty_like(source[0]) for _ in range(n_sets)]
    return {
        "copy": lambda i: target[i % n_sets].copy_(source[i % n_sets]),
        "negate": lambda i: torch.neg(source[i % n_sets], out=target[i % n_sets]),
    }


def judge(label, error, allowed, what=""):
    """The error; AssertionError if it is larger than allowed. A NaN is memory left unwritten."""
    if error != error:
        raise AssertionError(f"{label} left elements{what} unwritten, so it is not timed")
    if not error <= allowed:
        raise AssertionError(f"{label} is wrong, so it is not timed:{what} error {error:.2e}")
    return error


def distance(found, expected):
    """‖found − expected‖ ÷ ‖expected‖; NaN where an element is."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def measure(case, *, rounds=20, device="cuda"):
    """Check, then time, a case. Returns its record."""
    if torch.device(device).type == "cuda":
        torch.cuda.empty_cache()  # of the case before
    with case.settings(), torch.no_grad():
        n_sets = bench.buffer_sets(case.n_bytes, most=case.most_sets)
        make = Make(device)
        work = case.build(make, n_sets)
        candidates, errors, once, left_out = _checked(case, work, device)
        limits = work.limit() if work.limit else {}
        calls = {label: _calls(microseconds, n_sets) for label, microseconds in once.items()}
        calls |= dict.fromkeys(limits, max(calls.values(), default=MOST_CALLS))
        timings = bench.device_times(candidates | limits, calls=calls, rounds=rounds)
        least = [timings.pop(label) for label in limits]
        limit = min(least, key=lambda timing: timing.microseconds) if least else None
        rows = [
            _row(case, label, label in work.ours, timing, limit, errors.get(label))
            for label, timing in timings.items()
        ]
        _add_latencies(rows, candidates, once)
        _add_python_times(rows, work.python(), rounds, device)
        record = bench.case_record(case, rows, limit)
        record |= case.facts | {"left_out": left_out} | work.facts()
    if case.default:
        record["default"] = case.default
    return record


def _checked(case, work, device):
    """({label: call}, {label: error}, {label: µs of a call}, {label: why it is left out})."""
    right = work.check()
    found, errors, once, left_out = {}, {}, {}, {}
    for label, call in (work.ours | work.peers()).items():
        is_ours = label in work.ours
        try:
            result = on_nan(call, work.outputs)
        except ValueError as refusal:  # a rung says what it does not take
            if not is_ours:
                raise
            left_out[label] = str(refusal)
            continue
        errors[label] = right(label, result, is_ours)
        microseconds = _once(call, device)
        if is_ours and label != case.default and microseconds > case.longest:
            left_out[label] = f"a call takes {microseconds / 1e3:,.0f} ms"
            continue
        found[label], once[label] = call, microseconds
    return found, errors, once, left_out


def on_nan(call, outputs):
    """The result of a call that finds NaN wherever it may leave something unwritten."""
    _spoil(outputs)
    result = call(0)
    own = {tensor.data_ptr() for tensor in outputs}
    parts = result if isinstance(result, (tuple, list)) else [result]
    made = [p for p in parts if isinstance(p, torch.Tensor) and p.data_ptr() not in own]
    if not made:
        return result
    # The next call is likely to be given memory of the same sizes that was freed just now.
    _spoil([*outputs, *map(torch.empty_like, made)])
    return call(0)


def _spoil(tensors):
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.fill_(float("nan"))


def _once(call, device):
    """µs that one call takes, roughly: the host's work counts too."""
    _synchronize(device)
    start = time.perf_counter()
    call(0)
    _synchronize(device)
    return max(1.0, (time.perf_counter() - start) * 1e6)


def _synchronize(device):
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def _calls(microseconds, n_sets):
    """Calls in one replay: enough to drown its start, and to walk through the sets of buffers."""
    calls = max(1, min(max(MOST_CALLS, n_sets), int(REPLAY / microseconds)))
    return max(calls, n_sets) if n_sets * microseconds <= ROTATED else calls


def _row(case, label, is_ours, timing, limit, error):
    kind = "ours" if is_ours else "peer"
    if limit is None:
        row = bench.plain_row(label, kind, timing)
    else:
        row = bench.row(label, kind, timing, case.n_bytes, limit)
    if case.flops:
        row["tflops"] = round(case.flops / timing.microseconds / 1e6, 2)
        if error is not None:
            row["error"] = float(f"{error:.3e}")
    return row


def _add_latencies(rows, candidates, once):
    short = {
        label: lambda call=call: call(0) for label, call in candidates.items() if once[label] < LATE
    }
    found = bench.call_times(short, rounds=LATENCIES)
    for row in rows:
        if row["label"] in found:
            row["latency_microseconds"] = round(found[row["label"]].microseconds, 3)


def _add_python_times(rows, calls, rounds, device):
    if not calls:
        return
    counts = {
        label: max(3, min(100, int(LOOP / _once(call, device)))) for label, call in calls.items()
    }
    found = bench.loop_times(calls, calls=counts, rounds=rounds)
    for row in rows:
        if (timing := found.get(row["label"])) is not None:
            row["python_microseconds"] = round(timing.microseconds, 3)
            row["python_quartiles"] = [round(quartile, 3) for quartile in timing.quartiles]


# ---- which cases ------------------------------------------------------------------------------


def chosen(cases, names=None, directions=None, layouts=None):
    """Of `cases` those that are wanted; a name may be an operation's alone."""
    for case in cases:
        operation, *parts = case.name.split(".")
        layout = "channels-last" if "channels-last" in parts else "contiguous"
        if names is not None and not {case.name, operation} & set(names):
            continue
        if directions is not None and not {*parts} & set(directions):
            continue
        if layouts is None or layout in layouts:
            yield case


def drawn(module):
    """Cases of shapes that nobody chose, so that plans are not tuned to the list of `module`."""
    generator = random.Random(SEED)
    shapes = [module.draw(generator) for _ in range(DRAWN)]
    for case in module.cases(shapes=shapes):
        yield replace(case, name=f"{case.name}.drawn", facts=case.facts | {"drawn": SEED})


def size(generator, least, most, multiple=1):
    """A size from `least` to `most`, small ones as often as large ones."""
    found = least * (most / least) ** generator.random()
    return max(least, round(found / multiple) * multiple)


def runner(cases, rounds):
    """The `run` of a benchmark whose `cases(shapes=, dtypes=)` these are."""

    def run(*, names=None, shapes=None, dtypes=None, directions=None, layouts=None, rounds=rounds,
            progress=lambda cases: cases, device="cuda"):  # fmt: skip
        """Check, then time, each case, of those that are named alone. Returns records.

        Stopped by Ctrl-C, it raises `bench.Stopped` with the records so far.
        """
        found = [*chosen(cases(shapes=shapes, dtypes=dtypes), names, directions, layouts)]
        return bench.collected(
            measure(case, rounds=rounds, device=device) for case in progress(found)
        )

    return run


def peak_memory(functions, logits, target):
    """Bytes at the peak of a loss and its gradient, beside logits and target, by label."""
    found = {}
    if logits.device.type != "cuda":
        return found
    logits.requires_grad_()
    for label, function in functions.items():
        for _ in range(2):  # the first run may load libraries
            logits.grad = None
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            with torch.enable_grad():
                function(logits, target).backward()
            torch.cuda.synchronize()
            found[label] = torch.cuda.max_memory_allocated() - before
    return found
