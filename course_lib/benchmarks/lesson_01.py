"""What lesson 1 measures: the order in which a copy goes through memory, and two timing traps."""

import math
import time

import numpy as np

from course_lib import bench, cuda
from course_lib.runtime.compile.fingerprint import fingerprint
from course_lib.runtime.host.launch import launch

BLOCK_SIZE = 256
COMMAND = "python -m course_lib bench lesson_01 --record"
TRAPS = ("1st: launch and wait", "2nd: launch only", "3rd: launch and wait")


@cuda.jit
def copy_by_rows(x, y):
    col, row = cuda.grid(2)
    if row < x.shape[0] and col < x.shape[1]:
        y[row, col] = x[row, col]


@cuda.jit
def copy_by_columns(x, y):
    row, col = cuda.grid(2)
    if row < x.shape[0] and col < x.shape[1]:
        y[row, col] = x[row, col]


def run(*, rounds=30, progress=lambda cases: cases):
    """Both records of the lesson."""
    return [measure() for measure in progress((lambda: copy_order(rounds=rounds), timing_traps))]


def copy_order(by_rows=copy_by_rows, by_columns=copy_by_columns, *, side=8192, rounds=30):
    """A record of two kernels `(x, y)` that copy a float32 matrix of `side` × `side`.

    They are launched with 256 threads of a block along x, and blocks along x and y.
    """
    import torch

    n_bytes = 2 * 4 * side**2
    sets = bench.buffer_sets(n_bytes)
    sources = [torch.randn(side, side, device="cuda") for _ in range(sets)]
    targets = [torch.empty_like(source) for source in sources]
    grid = (math.ceil(side / BLOCK_SIZE), side)
    candidates = {
        label: lambda i, kernel=kernel: launch(
            kernel, grid, (BLOCK_SIZE, 1), sources[i % sets], targets[i % sets]
        )
        for label, kernel in (("by rows", by_rows), ("by columns", by_columns))
    }
    for label, candidate in candidates.items():
        targets[0].fill_(math.nan)
        candidate(0)
        if not torch.equal(sources[0], targets[0]):
            raise AssertionError(f"{label} does not copy, so it is not timed")
    candidates["copy"] = lambda i: targets[i % sets].copy_(sources[i % sets])
    timings = bench.device_times(candidates, calls=max(5, sets), rounds=rounds)
    copy = timings.pop("copy")
    rows = [bench.row(label, "ours", timing, n_bytes, copy) for label, timing in timings.items()]
    return bench.make_record(
        "lesson_01.copy_order", (side, side), "float32", n_bytes, copy, rows,
        fingerprint(by_columns), COMMAND,
    )


def timing_traps(*, n=2**26, repeats=7):
    """A record of how long three launches in a row seem to take, on the host's clock.

    Each repeat makes a new kernel, so that its first launch compiles.
    """
    x = cuda.to_device(np.ones(n, dtype=np.float32))
    y = cuda.device_array_like(x)
    samples = np.array([_three_launches(_new_relu(), x, y) for _ in range(repeats)])
    rows = []
    for place, label in enumerate(TRAPS):
        timing = bench.Timing.of(samples[:, place].tolist())
        quartiles = [round(q, 3) for q in timing.quartiles]
        rows.append({"label": label, "kind": "ours", "quartiles": quartiles,
                     "microseconds": round(timing.microseconds, 3)})
    return bench.host_record(
        "lesson_01.timing_traps", (n,), "float32", rows, fingerprint(_new_relu()), COMMAND
    )


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {
        "lesson_01.copy_order": fingerprint(copy_by_columns),
        "lesson_01.timing_traps": fingerprint(_new_relu()),
    }


def _new_relu():
    @cuda.jit
    def relu(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = max(x[i], np.float32(0))

    return relu


def _three_launches(kernel, x, y):
    """Microseconds on the host's clock of a first launch, of one not waited for, of a last one."""
    times = []
    for wait in (True, False, True):
        cuda.synchronize()
        start = time.perf_counter()
        kernel[math.ceil(x.size / BLOCK_SIZE), BLOCK_SIZE](x, y)
        if wait:
            cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e6)
    return times
