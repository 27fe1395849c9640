"""Training on several GPUs of one machine: a rank on each, beside one GPU with the same batch.

A process a GPU, joined by NCCL, each with a batch of the same size. A step is what
`train.GraphTrainer` makes of a network by our layers, or by PyTorch's: forward, loss, backward,
gradients averaged over the ranks, SGD. Gradients are exchanged in buckets during the backward pass:
by DistributedDataParallel, or in a captured step by `train.ranks.Overlapped`. A record is of one
network in one precision on so many GPUs. Beside the steps stand

- NCCL's all-reduce of as many bytes as the network has gradients, by itself
- by PyTorch's profiler, how long NCCL's kernels take in a step by DistributedDataParallel, waiting
  for other ranks included, and in which share of that time other kernels ran

Before anything is timed, averaged gradients are held to the mean of those of all ranks.
"""

import contextlib
import json
import re
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import distributed, multiprocessing

from course_lib import bench, models, nn, ops, optim
from course_lib.benchmarks import gpu, tiny_imagenet, unet, unet_kernels
from course_lib.runtime.host import device
from course_lib.train import GraphTrainer, ranks
from course_lib.train.step import arithmetic, autocast

NAME = "data_parallel"
COMMAND = "python -m course_lib bench data_parallel --record"
N_GPUS = 2  # that it needs
NETWORKS = "resnet18_small", "unet"
SHAPES = {"resnet18_small": (128, 3, 64, 64), "unet": (16, 2, 128, 128)}  # of a GPU's batch
PRECISIONS = "float32", "bfloat16"
#: label -> (layers, whether a step is captured, what two GPUs must be times one at least)
WAYS = {
    "ours": (nn, False, 1.85),
    "ours, captured": (nn, True, 1.8),
    "PyTorch": (torch.nn, False, None),
    "PyTorch, captured": (torch.nn, True, None),
}
WARM_UP = 5  # steps, of which the second is captured
ROUND = 200_000  # µs of steps that are timed together, about
TRACED = 3  # steps
NCCL = "ncclDevKernel"  # in the names of its kernels
FAR = 1e-5  # what averaged gradients may differ by from gathered ones, relative
DEVICE, BACKEND = "cuda", "nccl"
FOUND = "found.json"


class Case(NamedTuple):
    """What one record is of."""

    network: str
    precision: str

    @property
    def name(self):
        return f"{NAME}.{self.network}"


def run(*, names=None, dtypes=None, rounds=10, progress=lambda cases: cases):
    """A record for each network, precision and number of GPUs."""
    cases = [
        Case(network, precision)
        for network in NETWORKS
        for precision in PRECISIONS
        if (names is None or f"{NAME}.{network}" in names) and precision in (dtypes or PRECISIONS)
    ]
    worlds = [2**power for power in range(device.count().bit_length())]
    alone, *several = [ranked(world, cases, rounds) for world in progress(worlds)]
    return [
        _record(case, world, one, more)
        for world, found in zip(worlds[1:], several, strict=True)
        for case, one, more in zip(cases, alone, found, strict=True)
    ]


def _record(case, world, one, more):
    shape, rows, scaling, bars = SHAPES[case.network], [], {}, {}
    for label, (layers, _, bar) in WAYS.items():
        field = "scaling_" + re.sub(r"\W+", "_", label).lower()
        timings = {n: bench.Timing.of(found[label]) for n, found in ((1, one), (world, more))}
        for n, timing in timings.items():
            kind, gpus = "ours" if layers is nn else "peer", "GPU" if n == 1 else "GPUs"
            rows.append(
                bench.plain_row(f"{label}, {n} {gpus}", kind, timing)
                | {"images_per_second": round(n * shape[0] / timing.microseconds * 1e6, 1)}
            )
        scaling[field] = round(world * timings[1].microseconds / timings[world].microseconds, 4)
        if bar is not None:
            bars[field] = bar if world == 2 else round(bar / 2 * world, 3)
    exchange = bench.plain_row("NCCL's all-reduce alone", "part", bench.Timing.of(more["exchange"]))
    record = bench.host_record(
        case.name, (world, *shape), case.precision, [*rows, exchange], kernel_hash(case), COMMAND
    )
    return record | {
        "default": f"ours, {world} GPUs",
        "gradient_bytes": more["bytes"],
        **scaling,
        "bars": bars,
        "exchange_hidden": more["hidden"],
        "exchange_traced": more["traced"],
    }


# -------------------------------------------------------------------------------------- ranks


def ranked(world, cases, rounds):
    """What rank 0 of `world` processes finds, for each case."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_rank, (world, folder, cases, rounds), nprocs=world)
        return json.loads(Path(folder, FOUND).read_text())


def _rank(rank, world, folder, cases, rounds):
    """A process: what each case takes, by rank 0 in a file of `folder`, where the ranks meet."""
    place = None
    if DEVICE == "cuda":
        place = torch.device(DEVICE, rank)
        torch.cuda.set_device(place)
    if world > 1:
        distributed.init_process_group(
            BACKEND,
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world,
            device_id=place,
        )
    torch.backends.cudnn.benchmark = True
    found = [_of_case(case, rank, world, rounds) for case in cases]
    if world > 1:  # at last: launches are slower once a profiler has been there
        found = [each | _traced(case, rank) for each, case in zip(found, cases, strict=True)]
    if rank == 0:
        Path(folder, FOUND).write_text(json.dumps(found))
    if world > 1:
        gpu.collect()  # NCCL waits for the graphs that hold its kernels
        distributed.destroy_process_group()


def _of_case(case, rank, world, rounds):
    if world > 1:
        _check(case, rank, world)
    found = {}
    for label, (layers, captured, _) in WAYS.items():
        step, model = _step(case, rank, layers, captured)
        found[label] = _samples(step, world, rounds)
        found["bytes"] = sum(p.numel() * p.element_size() for p in model.parameters())
        del step, model
        gpu.collect()
    if world > 1:
        flat = torch.zeros(found["bytes"] // 4, device=DEVICE)
        found["exchange"] = _samples(lambda: distributed.all_reduce(flat), world, rounds)
    return found


def _step(case, rank, layers, captured):
    """(a function that makes a step of training, the network)."""
    model, x, target = _made(case, rank, layers)
    library, options = (optim, {}) if layers is nn else (torch.optim, {"fused": True})
    optimizer = library.SGD(model.parameters(), lr=1e-4, momentum=0.9, **options)
    loss = ops.cross_entropy if layers is nn else F.cross_entropy
    trainer = GraphTrainer(model, optimizer, loss, precision=case.precision, capture=captured)
    for _ in range(WARM_UP):
        trainer(x, target)
    return lambda: trainer(x, target), model


def _made(case, rank, layers):
    """(the network with its first weights, this rank's batch, its labels)."""
    torch.manual_seed(0)
    shape, form = SHAPES[case.network], torch.channels_last
    if case.network == "unet":
        model = models.UNet(shape[1], unet.N_CLASSES, unet.DEPTH, unet.CHANNELS, layers=layers)
        n_classes, size = unet.N_CLASSES, (shape[0], *shape[2:])
    else:
        model = models.resnet18_small(tiny_imagenet.N_CLASSES, layers=layers)
        n_classes, size = tiny_imagenet.N_CLASSES, shape[:1]
    torch.manual_seed(1 + rank)
    x, target = torch.randn(shape), torch.randint(n_classes, size)
    return model.to(DEVICE, memory_format=form), x.to(DEVICE, memory_format=form), target.to(DEVICE)


def _samples(step, world, rounds):
    """µs of a step, in each round: of the slowest rank."""
    steps = max(3, min(200, int(ROUND / max(_time(step, 3, world), 1))))
    _time(step, steps, world)
    return [_time(step, steps, world) for _ in range(rounds)]


def _time(step, n, world):
    gpu.synchronize()
    if world > 1:
        distributed.barrier()
    start = time.perf_counter()
    for _ in range(n):
        step()
    gpu.synchronize()
    spent = torch.tensor((time.perf_counter() - start) * 1e6 / n, device=DEVICE)
    if world > 1:
        distributed.all_reduce(spent, distributed.ReduceOp.MAX)
    return spent.item()


def _traced(case, rank):
    """µs of NCCL's kernels in a step, and the share of them in which other kernels ran."""
    step, _ = _step(case, rank, nn, captured=False)
    events = unet_kernels.device_events(step, TRACED)
    spent = sum(end - start for name, start, end in events if NCCL in name)
    if not spent:
        raise AssertionError("the profiler saw no kernel of NCCL's")
    return {
        "traced": round(spent / TRACED, 1),
        "hidden": round(unet_kernels.share_hidden(events, NCCL), 4),
    }


def _check(case, rank, world):
    """AssertionError where gradients, averaged either way, are not the mean of all ranks'."""
    alone = _gradients(case, rank)
    parts = [torch.empty_like(alone) for _ in range(world)]
    distributed.all_gather(parts, alone)
    true = torch.stack(parts).mean(0)
    for label, options in {
        "DistributedDataParallel": {"wrap": torch.nn.parallel.DistributedDataParallel},
        "Overlapped": {"overlap": ranks.Overlapped},
    }.items():
        off = ((_gradients(case, rank, **options) - true).norm() / true.norm()).item()
        assert off < FAR, f"{case.name}: averaged by {label}, rank {rank} is off by {off:.1e}"


def _gradients(case, rank, wrap=lambda model: model, overlap=lambda p: contextlib.nullcontext()):
    """Of all parameters, one after another, in float64."""
    model, x, target = _made(case, rank, nn)
    network = wrap(model)
    with arithmetic(case.precision), autocast(x.device, case.precision):
        logits = network(x)
    loss = ops.cross_entropy(logits.float(), target)
    with overlap(model.parameters()):
        loss.backward()
    return torch.cat([p.grad.reshape(-1).double() for p in model.parameters()])


def kernel_hash(case):
    """Of every kernel that a network may launch, and of how gradients are exchanged."""
    network = unet if case.network == "unet" else tiny_imagenet
    overlapped, exchange = ranks.Overlapped, (ranks.summed, ranks.wrapped)
    exchange += overlapped.__init__, overlapped._has_come, overlapped._send, overlapped.__exit__
    return bench.hash_of([network.network_hash(), bench.text_hash(exchange)])


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    cases = [Case(network, PRECISIONS[0]) for network in NETWORKS]
    return {case.name: kernel_hash(case) for case in cases}
