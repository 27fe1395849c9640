"""What it gains to copy the next batch to the GPU during a step, where copies take time.

A step trains four linear layers, captured in a CUDA graph, so that the GPU and not the host is what
it waits for. With fewer features, the copy of a batch is a larger share of the step. The batches
lie on the GPU already; are copied when they are needed (from pageable memory, as a plain program
does); or come by `train.feeding.crossing`, from pageable memory or pinned, or `backend.prefetch`.
"""

import torch
import torch.nn.functional as F

from course_lib import backend, bench
from course_lib.benchmarks import gpu, unet_kernels
from course_lib.runtime.host.crossing import crossing
from course_lib.train import GraphTrainer, feeding

NAME = "prefetch.training"
SHAPES = ((8192, 512), (8192, 1024), (8192, 2048))  # (samples of a batch, features)
N_DIMS = 2
LAYERS, BATCHES = 4, 12
LEAST = 0.1  # of a step, that copying when needed must take for the rest to be judged
HIDDEN = 0.9  # at least, of the rate with data that is there already
READY, SERIAL = "on the GPU already", "copied when needed"
CROSSING, PINNED, PREFETCH = "by crossing", "by crossing, pinned before", "by backend.prefetch"
DEVICE, LIBRARY = "cuda", "torch"
COMMAND = "python -m course_lib bench prefetch --record"


def run(*, shapes=SHAPES, rounds=10, progress=lambda cases: cases):
    """Check that every way brings the same batches, then time steps; a record for each shape."""
    return bench.collected(measure(tuple(shape), rounds) for shape in progress(shapes))


def measure(shape, rounds):
    """The record of steps on batches of one shape."""
    trainer, target = _trainer(shape)
    ways = _ways(shape)
    expected = list(ways[READY]())
    for label, way in ways.items():
        if not all(map(torch.equal, way(), expected)):
            raise AssertionError(f"{label} brings other batches, so nothing is timed")

    def walk(way):
        for x in way():
            trainer(x, target)

    walk(ways[READY])  # the second step is captured
    candidates = {label: lambda i, way=way: walk(way) for label, way in ways.items()}
    hidden = {label: _hidden(candidates[label]) for label in ways if label != READY}
    timings = bench.loop_times(candidates, calls=1, rounds=rounds)
    rows = []
    for label, timing in timings.items():
        low, high = timing.quartiles
        each = bench.Timing(timing.microseconds / BATCHES, (low / BATCHES, high / BATCHES))
        rows.append(bench.plain_row(label, "ours", each) | {"copies_hidden": hidden.get(label)})
    ready, serial, crossing = (timings[k].microseconds for k in (READY, SERIAL, CROSSING))
    share = round(serial / ready - 1, 4)
    record = bench.host_record(NAME, shape, "float32", rows, kernel_hashes()[NAME], COMMAND)
    return record | {
        "default": CROSSING,
        "batches": BATCHES,
        "copy_share": share,
        "ratio": round(ready / crossing, 4),
        "gain": round(serial / crossing, 4),
        "bars": {"ratio": HIDDEN} if share >= LEAST else {},
    }


def _trainer(shape):
    """(a `GraphTrainer`, what it learns to answer)."""
    n, features = shape
    torch.manual_seed(0)
    layers = [torch.nn.Linear(features, features) for _ in range(LAYERS)]
    model = torch.nn.Sequential(*(part for layer in layers for part in (layer, torch.nn.ReLU())))
    model.to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return GraphTrainer(model, optimizer, F.mse_loss), torch.ones(n, features, device=DEVICE)


def _ways(shape):
    """{label: a function that yields the batches on the GPU}."""
    here, place = backend.set_backend(library=LIBRARY), torch.device(DEVICE)
    host = [
        torch.randn(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(BATCHES)
    ]
    pinned = [_pin(batch) for batch in host]
    there = [batch.to(place) for batch in host]
    arrays = [(batch.numpy(),) for batch in host]
    return {
        READY: lambda: iter(there),
        SERIAL: lambda: (batch.to(place) for batch in host),
        CROSSING: lambda: feeding.crossing(host, place),
        PINNED: lambda: feeding.crossing(pinned, place),
        PREFETCH: lambda: (torch.as_tensor(x) for (x,) in here.prefetch(arrays)),
    }


def _pin(batch):
    return batch.pin_memory()


def _hidden(candidate):
    """The share of the copies' time during which kernels ran."""
    candidate(0)
    gpu.synchronize()
    found = unet_kernels.share_hidden(unet_kernels.device_events(lambda: candidate(0)))
    if found is None:
        raise AssertionError("the profiler saw no copy to the GPU")
    return round(found, 4)


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {NAME: bench.text_hash([crossing, feeding.crossing, backend._Torch.prefetch])}
