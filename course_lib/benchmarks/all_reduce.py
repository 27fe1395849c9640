"""All-reduce over the GPUs of one machine: our rungs beside NCCL's, and beside the link.

Time is that of one of many calls, as Python sees them, until all GPUs have finished. Bandwidths are
*bus bandwidths*, as NCCL's tests report them: what each GPU must send at least, which is
2·(world − 1)/world times the bytes of a buffer, over the time. The limit is a copy of as many bytes
from each GPU to its right neighbour, all at the same time.
"""

import time

import torch

from course_lib import bench
from course_lib.kernels.all_reduce import ALL_REDUCE, MOST_RANKS, all_reduce
from course_lib.runtime.host import device

NAME = "all_reduce"
COMMAND = "python -m course_lib bench all_reduce --record"
N_GPUS = 2  # that it needs
N_DIMS = 1
NCCL = "NCCL"
#: Elements of each buffer, float32: 1 KB to 256 MB.
SHAPES = [(256 << 2 * step,) for step in range(10)]
ROUND = 20_000  # µs of calls, about, before all GPUs are waited for
MOST_CALLS = 200


def run(*, shapes=None, rounds=20, progress=lambda cases: cases):
    """A record for each length."""
    world = min(device.count(), MOST_RANKS)
    return bench.collected(_record(world, *shape, rounds) for shape in progress(shapes or SHAPES))


def _record(world, n, rounds):
    sent = 2 * (world - 1) * n // world  # numbers
    buffers = [torch.randn(n, device=f"cuda:{rank}") for rank in range(world)]
    candidates = {rung: lambda rung=rung: all_reduce(buffers, variant=rung) for rung in ALL_REDUCE}
    candidates[NCCL] = lambda: torch.cuda.nccl.all_reduce(buffers)
    _check(candidates, buffers)
    timings = times(candidates | {"copy": _copies(world, sent)}, rounds=rounds)
    limit = timings.pop("copy")

    def bandwidth(timing):
        return sent * 4 / timing.microseconds / 1e3

    rows = [
        bench.plain_row(label, "peer" if label == NCCL else "ours", timing)
        | {"bus_gbps": round(bandwidth(timing), 2)}
        for label, timing in timings.items()
    ]
    record = bench.host_record(NAME, (world, n), "float32", rows, kernel_hashes()[NAME], COMMAND)
    return record | {"link_gbps": round(bandwidth(limit), 2)}


def _copies(world, n):
    """A call that copies `n` numbers from each GPU to its right neighbour, all at the same time."""
    sources = [torch.zeros(n, device=f"cuda:{rank}") for rank in range(world)]
    targets = [torch.zeros_like(source) for source in sources]
    # On streams of their own: PyTorch's copies wait for the current ones of both GPUs.
    streams = [[torch.cuda.Stream(rank) for rank in range(world)] for _ in range(2)]

    def copy():
        for rank, source in enumerate(sources):
            right = (rank + 1) % world
            with torch.cuda.stream(streams[0][right]), torch.cuda.stream(streams[1][rank]):
                targets[right].copy_(source, non_blocking=True)

    return copy


def _check(candidates, buffers):
    """AssertionError for a candidate whose sums are wrong, on any rank."""
    for label, call in candidates.items():
        for buffer in buffers:
            buffer.normal_()
        size = sum(buffer.double().cpu().abs() for buffer in buffers)
        true = sum(buffer.double().cpu() for buffer in buffers)
        call()
        for rank, buffer in enumerate(buffers):
            wrong = ((buffer.double().cpu() - true).abs() > 1e-6 * size).sum()
            assert not wrong, f"{label}: {wrong} sums of rank {rank} are wrong"
    for buffer in buffers:
        buffer.zero_()  # sums that are summed again would grow


def times(candidates, *, rounds):
    """{label: Timing} of one of many calls, all GPUs waited for at the end of each round."""
    calls = {label: _calls(call) for label, call in candidates.items()}
    samples = {label: [] for label in candidates}
    for _ in range(rounds):
        for label, call in candidates.items():
            samples[label].append(_time(call, calls[label]))
    return {label: bench.Timing.of(found) for label, found in samples.items()}


def _calls(call):
    _time(call, 3)  # compiles, allocates, connects
    return max(3, min(MOST_CALLS, int(ROUND / _time(call, 3))))


def _time(call, n):
    """µs of one of `n` calls."""
    _wait()
    start = time.perf_counter()
    for _ in range(n):
        call()
    _wait()
    return (time.perf_counter() - start) * 1e6 / n


def _wait():
    for index in range(device.count()):
        torch.cuda.synchronize(index)


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {NAME: bench.kernel_hash(ALL_REDUCE.kernels)}
