"""Steps of the learner's own U-Net on a GPU: beside NumPy's, on the host's data, taken apart.

The speed-ups that its users expect of a GPU are 5 to 10 at depth 2 in batches of 2, 20 to 40 at
depth 4 in batches of 4, 50 to 100 at depth 5 in batches of 8; here each must reach the upper end.
"""

import contextlib
import functools
import os
import time

import numpy as np
import torch

from course_lib import autograd as ag
from course_lib import bench
from course_lib.autograd import functions, layers, losses
from course_lib.backend import get_backend, set_backend
from course_lib.benchmarks import gpu, unet_kernels
from course_lib.benchmarks.softmax_table import cpu_name

TAPE, PREFETCH, SHARES = NAMES = "unet.tape", "unet.prefetch", "unet.shares"
#: (depth, images in a batch, how many times as fast as NumPy it must be)
CASES = (2, 2, 10), (4, 4, 40), (5, 8, 100)
ON_GPU, ON_CPU = "the tape, GPU", "the tape, NumPy"
HIDDEN = 0.9  # at least, of the rate with data that is there already
#: NumPy's steps: so many, but none is begun after so many seconds. Of several, the first warms up.
NUMPY_STEPS, NUMPY_SECONDS = 4, 10
BATCHES = 12  # that cross over in one turn
SAME = 1e-4  # how far losses may be apart, relative to NumPy's
SHARE_STEPS = 5
SLEEP = 400_000_000  # clock cycles for which the GPU waits, while the host enqueues a step
LIBRARY = "torch"  # of `backend`: on a GPU

#: What a lesson calls an operation -> the functions of the tape that are it.
OPERATIONS = {
    "convolution": (layers.Conv2D,),
    "transposed convolution": (layers.TransposeConv2D,),
    "batch norm": (layers.BatchNorm2D,),
    "ReLU": (layers.ReLU,),
    "max pooling": (layers.MaxPool2D,),
    "concatenation": (functions.Concat, layers.Crop),
    "loss": (losses._CrossEntropy, losses._Dice, functions.Add, functions.Multiply),
}
ADAM, REST = "Adam", "sums of gradients, and the rest"


def cases(shape, depth, channels, n_classes):
    """[(record name, function(rounds, command, kernel_hash) -> record)]."""
    options = dict(shape=shape, channels=channels, n_classes=n_classes)
    found = [
        (TAPE, functools.partial(beside_numpy, depth, batch, bar, **options))
        for depth, batch, bar in CASES
    ]
    for name, measure in ((PREFETCH, prefetched), (SHARES, shares)):
        found.append((name, functools.partial(measure, depth, **options)))
    return found


class Step:
    """The network, its optimiser and a batch, on the backend in force: a call makes a step."""

    def __init__(self, depth, shape, channels, n_classes):
        random = np.random.default_rng(0)
        self.model = ag.UNet(shape[1], n_classes, depth, channels, random=random)
        self.optimizer = ag.Adam(self.model.parameters(), lr=1e-4)
        self.batch = [get_backend().to_device(array) for array in batch_of(shape, n_classes, 1)]

    def __call__(self, x=None, target=None):
        x, target = self.batch if x is None else (x, target)
        self.optimizer.zero_grad()
        loss = ag.combined_loss(self.model(ag.tensor(x)), target)
        loss.backward()
        self.optimizer.step()
        return loss


def batch_of(shape, n_classes, seed):
    """(images, labels) in NumPy."""
    random = np.random.default_rng(seed)
    images = random.standard_normal(shape, dtype=np.float32)
    return images, random.integers(-1, n_classes, (shape[0], *shape[2:]))


def beside_numpy(depth, batch, bar, rounds, command, kernel_hash, *, shape, channels, n_classes):
    """One step on the GPU beside one on the CPU, by the same lines."""
    shape = (batch, *shape[1:])
    set_backend(library="numpy")
    cpu, expected = _timed_on_the_cpu(Step(depth, shape, channels, n_classes))
    here = set_backend(library=LIBRARY)
    step = Step(depth, shape, channels, n_classes)
    losses = [step().item() for _ in expected]  # kernels are compiled in the first
    if not np.allclose(losses, expected, rtol=SAME, atol=0):
        raise AssertionError(
            f"the losses differ, so nothing is timed: NumPy's {expected}, the GPU's {losses}"
        )
    calls = max(2, min(30, int(200_000 / _once(step, here))))
    found = bench.loop_times({ON_GPU: lambda i: step()}, calls=calls, rounds=rounds)
    found[ON_CPU] = cpu
    rows = [
        bench.plain_row(label, kind, found[label])
        | {"images_per_second": round(batch / found[label].microseconds * 1e6, 2)}
        for label, kind in ((ON_GPU, "ours"), (ON_CPU, "peer"))
    ]
    ours, numpy = (found[label].microseconds for label in (ON_GPU, ON_CPU))
    return bench.host_record(TAPE, shape, "float32", rows, kernel_hash, command) | {
        "default": ON_GPU, "depth": depth, "channels": channels, "cpu": cpu_name(),
        "cpu_threads": numpy_threads(), "cpu_steps": len(expected),
        "speedup": round(numpy / ours, 2), "bars": {"speedup": bar},
    }  # fmt: skip


def _timed_on_the_cpu(step):
    """(the Timing of a step, the losses of all that were made)."""
    samples, losses = [], []
    while len(samples) < NUMPY_STEPS and sum(samples) < NUMPY_SECONDS * 1e6:
        start = time.perf_counter()
        losses.append(step().item())
        samples.append((time.perf_counter() - start) * 1e6)
    timed = samples[1:] or samples
    timing = bench.Timing.of(timed) if len(timed) > 1 else bench.Timing(*timed, (timed[0],) * 2)
    return timing, losses


def numpy_threads():
    """How many threads NumPy's BLAS may use: what the environment says, or all that there are."""
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        if (said := os.environ.get(name, "")).isdigit():
            return int(said)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def prefetched(depth, rounds, command, kernel_hash, *, shape, channels, n_classes):
    """Steps on data from the host, which `prefetch` brings, beside data that is there already."""
    here = set_backend(library=LIBRARY)
    step = Step(depth, shape, channels, n_classes)
    host = [batch_of(shape, n_classes, seed) for seed in range(BATCHES)]
    there = [tuple(map(here.to_device, batch)) for batch in host]

    def walk(batches):
        for batch in batches():
            step(*batch)

    ways = {
        "on the GPU already": lambda: there,
        "by prefetch": lambda: here.prefetch(host),
        "copied when needed": lambda: (tuple(map(here.to_device, batch)) for batch in host),
    }
    for way in ways.values():
        walk(way)
    covered = unet_kernels.share_hidden(_device_events(lambda: walk(ways["by prefetch"])))
    if covered is None:
        raise AssertionError("the profiler saw no copy to the GPU")
    candidates = {label: lambda i, way=way: walk(way) for label, way in ways.items()}
    timings = bench.loop_times(candidates, calls=1, rounds=rounds)
    rows = []
    for label, timing in timings.items():
        low, high = timing.quartiles
        each = bench.Timing(timing.microseconds / BATCHES, (low / BATCHES, high / BATCHES))
        rate = shape[0] / each.microseconds * 1e6
        rows.append(bench.plain_row(label, "ours", each) | {"images_per_second": round(rate, 1)})
    ready, hidden, _ = (timing.microseconds for timing in timings.values())
    return bench.host_record(PREFETCH, shape, "float32", rows, kernel_hash, command) | {
        "default": "by prefetch", "depth": depth, "channels": channels, "batches": BATCHES,
        "ratio": round(ready / hidden, 4), "bars": {"ratio": HIDDEN}, "copies_hidden": covered,
    }  # fmt: skip


def shares(depth, rounds, command, kernel_hash, *, shape, channels, n_classes):
    """What a step's time on the GPU goes to, by operation and direction; the median of a few.

    The GPU is kept waiting until the host has enqueued the step, so that what lies between two
    events is the kernels' time and not the host's.
    """
    set_backend(library=LIBRARY)
    step = Step(depth, shape, channels, n_classes)
    for _ in range(3):
        step()
    samples = [_taken_apart(step) for _ in range(SHARE_STEPS)]
    whole = float(np.median([total for total, _ in samples]))
    rows = []
    for label in (*OPERATIONS, ADAM):
        forward, backward = (
            float(np.median([parts.get((label, way), 0.0) for _, parts in samples]))
            for way in ("forward", "backward")
        )
        rows.append(_share(label, forward, backward, whole))
    rest = max(0.0, whole - sum(row["microseconds"] for row in rows))
    rows.append(_share(REST, 0.0, rest, whole))
    return bench.host_record(SHARES, shape, "float32", rows, kernel_hash, command) | {
        "depth": depth, "channels": channels, "step_microseconds": round(whole, 1),
    }  # fmt: skip


def _share(label, forward, backward, whole):
    return {
        "label": label, "kind": "ours", "microseconds": round(forward + backward, 1),
        "forward_microseconds": round(forward, 1), "backward_microseconds": round(backward, 1),
        "share": round((forward + backward) / whole, 4),
    }  # fmt: skip


def _taken_apart(step):
    """(µs of a step on the GPU, {(operation, "forward" or "backward"): µs})."""
    marks = []
    with contextlib.ExitStack() as stack:
        for label, kinds in OPERATIONS.items():
            for kind in kinds:
                for way in ("forward", "backward"):
                    stack.enter_context(_marked(kind, way, (label, way), marks))
        stack.enter_context(_marked(type(step.optimizer), "step", (ADAM, "forward"), marks))
        gpu.synchronize()
        _sleep()
        start, end = _event(), _event()
        start.record()
        step()
        end.record()
        gpu.synchronize()
    parts = {}
    for key, first, last in marks:
        parts[key] = parts.get(key, 0.0) + first.elapsed_time(last) * 1e3
    return start.elapsed_time(end) * 1e3, parts


@contextlib.contextmanager
def _marked(kind, name, key, marks):
    """Within this block each call of the method `name` of the class `kind` stands among `marks`."""
    own, method = name in vars(kind), getattr(kind, name)

    @functools.wraps(method)
    def call(*args):
        first, last = _event(), _event()
        first.record()
        try:
            return method(*args)
        finally:
            last.record()
            marks.append((key, first, last))

    setattr(kind, name, call)
    try:
        yield
    finally:
        setattr(kind, name, method) if own else delattr(kind, name)


def _device_events(call):
    return unet_kernels.device_events(call)


def _event():
    return torch.cuda.Event(enable_timing=True)


def _sleep():
    torch.cuda._sleep(SLEEP)


def _once(step, here):
    """µs that a step takes, roughly."""
    here.synchronize()
    start = time.perf_counter()
    step()
    here.synchronize()
    return max(1.0, (time.perf_counter() - start) * 1e6)
