"""The readers' table: softmax of 128 rows of 200 classes, on the CPU, in PyTorch, and ours.

Two times that are never mixed: what the GPU spends on a call (the CPU: its own wall time), and what
Python waits for one, from the call until the result is there.
"""

import math
import os
import time

import torch

from course_lib import bench
from course_lib.kernels import softmax
from course_lib.kernels.softmax import plan

SHAPE = (128, 200)
COMMAND = "python -m course_lib bench softmax --record"
CPU, GPU, OPTIMISED = "PyTorch, CPU", "PyTorch, GPU", "ours, optimised"
NAIVE = "ours, naive"


def run(*, rounds=20):
    """Check, then time; one record, `softmax.table`."""
    x = torch.randn(SHAPE).mul_(3)
    n_bytes = 2 * x.nbytes
    sets = bench.buffer_sets(n_bytes)
    inputs = [x.cuda() for _ in range(sets)]
    outputs = [torch.empty_like(inputs[0]) for _ in range(sets)]
    forward = softmax.softmax.forward
    on_device = {
        GPU: lambda i: torch.softmax(inputs[i % sets], -1, out=outputs[i % sets]),
        NAIVE: lambda i: forward(inputs[i % sets], variant="naive", out=outputs[i % sets]),
        OPTIMISED: lambda i: forward(inputs[i % sets], out=outputs[i % sets]),
    }
    from_python = {
        CPU: lambda: torch.softmax(x, -1),
        GPU: lambda: torch.softmax(inputs[0], -1),
        NAIVE: lambda: forward(inputs[0], variant="naive"),
        OPTIMISED: lambda: forward(inputs[0]),
    }
    expected = torch.softmax(x.double(), -1)
    for label, candidate in on_device.items():
        outputs[0].fill_(math.nan)
        candidate(0)
        _check(label, outputs[0], expected)
    for label, candidate in from_python.items():
        _check(label, candidate(), expected)
    device = bench.device_times(on_device, calls=max(60, sets), rounds=rounds)
    device[CPU] = _cpu_time(from_python[CPU])
    python = bench.call_times(from_python)
    rows = [_row(label, device, python) for label in from_python]
    record = bench.host_record("softmax.table", SHAPE, "float32", rows, kernel_hash(), COMMAND)
    return [record | {"cpu": cpu_name(), "cpu_threads": torch.get_num_threads()}]


def kernel_hash():
    """Of both rungs of ours, and of what decides how the optimised one is launched."""
    rungs = softmax.FORWARD["naive"], softmax.FORWARD["registers"]
    kernels = [kernel for rung in rungs for kernel in rung.kernels]
    return bench.kernel_hash([*kernels, plan.preferred, plan.team, plan.block])


def _row(label, device, python):
    def times(prefix, timings):
        found = timings[label]
        return {
            f"{prefix}microseconds": round(found.microseconds, 3),
            f"{prefix}quartiles": [round(quartile, 3) for quartile in found.quartiles],
            f"{prefix}speedup": round(timings[CPU].microseconds / found.microseconds, 2),
        }

    kind = "peer" if label in (CPU, GPU) else "ours"
    return {"label": label, "kind": kind} | times("", device) | times("python_", python)


def _cpu_time(function, rounds=300):
    samples = []
    for turn in range(rounds + 20):
        start = time.perf_counter()
        function()
        elapsed = time.perf_counter() - start
        if turn >= 20:
            samples.append(elapsed * 1e6)
    return bench.Timing.of(samples)


def cpu_name():
    try:
        with open("/proc/cpuinfo") as lines:
            names = [line.partition(":")[2].strip() for line in lines if "model name" in line]
    except OSError:
        names = []
    return f"{names[0] if names else 'unknown'}, {os.cpu_count()} cores"


def _check(label, result, expected):
    error = (result.double().cpu() - expected).abs().max() / expected.max()
    if not error <= 1e-6:
        raise AssertionError(f"{label} is wrong, so it is not timed: error {error:.2e}")
