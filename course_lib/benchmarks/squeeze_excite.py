"""Squeeze and excitation on a GPU: our rungs beside torchvision's module, at real sizes.

Forward, and forward with backward, at the twelve sizes that EfficientNet-B4 has for images of
380 × 380, in batches of 1, 8 and 32. Two times that are never mixed: the device's own, from replays
of a graph, and what Python sees of a loop of calls, until the last result is there. Every rung, the
module and the peers are checked against float64 before anything is timed. The peer is torchvision's
module in both memory formats, of which the faster counts, and by torch.compile where `COMPILED`
names it: compiling takes longer than measuring.
"""

import math
import time

import torch
import torchvision

from course_lib import bench, nn
from course_lib.benchmarks import squeeze_excite_checks as checks
from course_lib.benchmarks.limits import copies, fastest_copy
from course_lib.kernels import squeeze_excite as kernels

#: (C, H = W, R) of the blocks of EfficientNet-B4 (Tan and Le, 2019), from its input to its output.
SIZES = [
    (48, 190, 12), (24, 190, 6), (144, 95, 6), (192, 95, 8), (192, 48, 8), (336, 48, 14),
    (336, 24, 14), (672, 24, 28), (960, 24, 40), (960, 12, 40), (1632, 12, 68), (2688, 12, 112),
]  # fmt: skip
BATCHES = (1, 8, 32)
DTYPES = ("float32", "bfloat16")
DIRECTIONS = ("forward", "both")
#: Measured with channels-last images too.
CHANNELS_LAST = [(32, 48, 190, 190), (32, 336, 48, 48), (32, 2688, 12, 12)]
#: Measured with every rung; the others with the default alone.
LADDER = [(1, 960, 24, 24), (32, 48, 190, 190), (32, 960, 24, 24), (32, 2688, 12, 12)]
#: (batch, dtype) of which torch.compile is a peer.
COMPILED = {(1, "float32"), (32, "float32"), (32, "bfloat16")}
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
OTHER = {"contiguous": "channels-last", "channels-last": "contiguous"}
N_ARRAYS = {"forward": 2, "both": 5}  # of x's size that must be moved
N_DIMS = 4
DEVICE = "cuda"
COMMAND = "python -m course_lib bench squeeze_excite --record"
PROFILE = "squeeze_excite.profile"  # what `profile_squeeze_excite` records
OURS, EAGER, COMPILE = "ours", "PyTorch eager", "torch.compile"
REPLAY, LOOP = 2_000, 4_000  # µs that a replay of a graph, and a loop of calls, may take
MOST_SETS = 128  # the smallest of these sizes outgrows the L2 cache even so


def run(*, shapes=None, dtypes=DTYPES, directions=DIRECTIONS, layouts=tuple(FORMATS), rounds=6,
        progress=lambda cases: cases):  # fmt: skip
    """Check, then time, each case: of `shapes`, N·C·H·W, alone if given. Returns records."""
    if shapes is None:
        shapes = [(N, C, side, side) for N in BATCHES for C, side, _ in SIZES]
        last = CHANNELS_LAST
    else:
        last = shapes
    cases = [
        (tuple(shape), dtype, layout)
        for shape in shapes
        for dtype in dtypes
        for layout in layouts
        if layout == "contiguous" or shape in last
    ]
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        return bench.collected(
            record
            for case in progress(cases)
            for record in _measure(*case, directions, rounds)
        )  # fmt: skip
    finally:
        torch.backends.cudnn.benchmark = before


def squeeze_channels(C, side):
    """R of a block: EfficientNet-B4's where it has such a one, else a 24th of the channels."""
    known = {(channels, size): R for channels, size, R in SIZES}
    return known.get((C, side), max(1, C // 24))


class Block:
    """One size in one dtype and layout: the modules of both sides, and sets of buffers.

    Candidates take the number of a buffer set, and give [y] or [y, dx, dweight1, …].
    """

    def __init__(self, shape, dtype, layout, sets):
        C, R = shape[1], squeeze_channels(shape[1], shape[2])
        kind = getattr(torch, dtype)
        self.theirs = torchvision.ops.SqueezeExcitation(C, R, torch.nn.SiLU).to(DEVICE, kind)
        self.ours = nn.SqueezeExcitation(C, R, torch.nn.SiLU).to(DEVICE, kind)
        self.ours.load_state_dict(self.theirs.state_dict())
        self.weights = [p.detach() for p in _parameters(self.theirs)]
        self.shape, self.dtype, self.layout, self.sets = shape, dtype, layout, sets
        images = [torch.randn(shape, device=DEVICE).add_(0.2).to(kind) for _ in range(sets)]
        gradients = [torch.randn(shape, device=DEVICE).to(kind) for _ in range(sets)]
        self.x, self.dy = (
            {name: [t.contiguous(memory_format=FORMATS[name]) for t in tensors] for name in FORMATS}
            for tensors in (images, gradients)
        )
        self.y, self.dx = ([torch.empty_like(x) for x in self.x[layout]] for _ in range(2))

    def poison(self):
        """Fill with NaN what candidates write, and the memory that they are given next."""
        for tensor in (self.y[0], self.dx[0], *(torch.empty_like(self.y[0]) for _ in range(2))):
            tensor.fill_(math.nan)

    def rung(self, variant, direction):
        """A rung's launchers, without autograd."""
        x, dy = self.x[self.layout], self.dy[self.layout]
        dense = self.weights[0], self.weights[2]

        def candidate(i):
            i %= self.sets
            options = {"variant": variant, "activation": "silu", "gate": "sigmoid"}
            y, *saved = kernels.forward(x[i], *self.weights, **options, out=self.y[i])
            if direction == "forward":
                return [y]
            return [y, *kernels.backward(dy[i], x[i], *dense, *saved, **options, out=self.dx[i])]

        return candidate

    def module(self, module, direction, layout):
        """A module, with autograd for the gradients.

        It keeps its results as long as there are sets: memory that is written again at once would
        still be in the cache.
        """
        x, dy, parameters = self.x[layout], self.dy[layout], _parameters(module)
        kept = [None] * self.sets

        def candidate(i):
            i %= self.sets
            if direction == "forward":
                with torch.no_grad():
                    kept[i] = [module(x[i])]
                return kept[i]
            leaf = x[i].detach().requires_grad_()
            y = module(leaf)
            kept[i] = [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], dy[i])]
            return kept[i]

        return candidate


def _parameters(module):
    return module.fc1.weight, module.fc1.bias, module.fc2.weight, module.fc2.bias


def kernel_hash(direction):
    """Of all that the default rung may launch: it is one of these, by size."""
    found = [kernel for rung in ("two_pass", "fused") for kernel in kernels.VARIANTS[rung]]
    found += kernels.resident.FORWARD + kernels.batched.FORWARD
    if direction == "both":
        found += kernels.BACKWARD_VARIANTS["two_pass"] + kernels.BACKWARD_VARIANTS["fused"]
        found += kernels.resident.BACKWARD
    return bench.kernel_hash(dict.fromkeys(found))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    today = {
        _name(direction, layout): kernel_hash(direction)
        for direction in DIRECTIONS
        for layout in FORMATS
    }
    every = [kernel for rung in kernels.VARIANTS.values() for kernel in rung]
    every += kernels.resident.FORWARD + kernels.batched.FORWARD
    return today | {PROFILE: bench.kernel_hash(every)}


def _name(direction, layout):
    return f"squeeze_excite.{direction}" + ("" if layout == "contiguous" else f".{layout}")


def _measure(shape, dtype, layout, directions, rounds):
    n_bytes = math.prod(shape) * getattr(torch, dtype).itemsize
    sets = bench.buffer_sets(2 * n_bytes, most=MOST_SETS)
    block = Block(shape, dtype, layout, sets)
    compiled = None
    if (shape[0], dtype) in COMPILED and layout == "contiguous":
        torch.compiler.reset()  # or it gives up after a few sizes, and runs them eagerly
        compiled = torch.compile(block.theirs, dynamic=False, fullgraph=True)
    for direction in directions:
        yield _direction(block, compiled, direction, N_ARRAYS[direction] * n_bytes, rounds)


def _direction(block, compiled, direction, n_bytes, rounds):
    """The record of one direction."""
    variants = [*kernels.VARIANTS] if block.shape in LADDER else []
    variants.append(kernels.DEFAULT)
    rungs = {variant: block.rung(variant, direction) for variant in variants}
    peers = {
        EAGER: block.module(block.theirs, direction, block.layout),
        f"{EAGER}, {OTHER[block.layout]}": block.module(
            block.theirs, direction, OTHER[block.layout]
        ),
    }
    if compiled is not None:
        peers[COMPILE] = block.module(compiled, direction, block.layout)
    module = {OURS: block.module(block.ours, direction, block.layout)}
    expected, seconds = checks.Expected(block, direction), None
    for label, candidate in (rungs | module | peers).items():
        block.poison()
        start = time.perf_counter()
        found = candidate(0)
        if label == COMPILE:
            seconds = round(time.perf_counter() - start, 1)
        expected.check(label, found, ours=label not in peers)
    device, copy = _device_times(rungs | peers, n_bytes, block.sets, rounds)
    python = _python_times(module | peers, rounds)
    rows = []
    for label, timing in device.items():
        seen = python.get(OURS if label == kernels.DEFAULT else label)
        row = bench.row(label, "ours" if label in rungs else "peer", timing, n_bytes, copy)
        rows.append(row | _seen(seen))
    record = bench.make_record(
        _name(direction, block.layout), block.shape, block.dtype, n_bytes, copy, rows,
        kernel_hash(direction), COMMAND,
    )  # fmt: skip
    record |= {"default": kernels.DEFAULT, "squeeze_channels": block.weights[0].shape[0]}
    record |= {"compile_seconds": seconds, "tf32": torch.backends.cudnn.allow_tf32}
    if direction == "both":
        record["saved_bytes"] = {
            OURS: saved_bytes(block.ours, block), EAGER: saved_bytes(block.theirs, block)
        }  # fmt: skip
    return record


def _device_times(candidates, n_bytes, sets, rounds):
    """({label: Timing}, that of the copy)."""
    candidates = candidates | copies(n_bytes, sets)
    calls = {
        label: max(sets, min(60, int(REPLAY / _once(candidate))))
        for label, candidate in candidates.items()
    }
    timings = bench.device_times(candidates, calls=calls, rounds=rounds)
    return timings, fastest_copy(timings)


def _python_times(candidates, rounds):
    calls = {
        label: max(3, min(100, int(LOOP / _once(candidate))))
        for label, candidate in candidates.items()
    }
    return bench.loop_times(candidates, calls=calls, rounds=rounds)


def _seen(timing):
    """The fields of a row that say what Python sees; none where that is not timed."""
    if timing is None:
        return {}
    return {
        "python_microseconds": round(timing.microseconds, 3),
        "python_quartiles": [round(quartile, 3) for quartile in timing.quartiles],
    }


def _once(candidate):
    """µs that one call takes, roughly: the host's work counts too."""
    _synchronize()
    start = time.perf_counter()
    candidate(0)
    _synchronize()
    return max(1.0, (time.perf_counter() - start) * 1e6)


def saved_bytes(module, block):
    """Bytes that a call with autograd leaves allocated beside its result, until backward."""
    leaf = block.x[block.layout][0].detach().requires_grad_()
    before = _allocated()
    y = module(leaf)
    return _allocated() - before - y.nbytes


def _synchronize():
    torch.cuda.synchronize()


def _allocated():
    return torch.cuda.memory_allocated()
