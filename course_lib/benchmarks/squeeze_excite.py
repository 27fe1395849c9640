"""Squeeze and excitation on a GPU: our rungs beside torchvision's module, at real sizes.

Forward, and forward with backward, at the twelve sizes that EfficientNet-B4 has for images of
380 × 380, in batches of 1, 8 and 32. Two times that are never mixed: the device's own, from replays
of a graph, and what Python sees of a loop of calls, until the last result is there. Every rung, the
module and the peers are checked against float64 before anything is timed. The peer is torchvision's
module in both memory formats, of which the faster counts, and by torch.compile where
`WITH_COMPILER` names it: compiling takes longer than measuring.
"""

import contextlib
import functools
import math
import time

import torch
import torchvision

from course_lib import bench, nn
from course_lib.benchmarks import launches
from course_lib.benchmarks import squeeze_excite_checks as checks
from course_lib.benchmarks.case import (
    COMPILED,
    EAGER,
    FORMATS,
    OTHER,
    Case,
    Work,
    compiled,
    copies,
    rotating,
    runner,
    size,
)
from course_lib.kernels import squeeze_excite as kernels
from course_lib.kernels.operation import AUTO

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
#: The rungs that take images of any size, in each layout.
EVERY_SIZE = {
    "contiguous": ("separate", "two_pass", "fused"), "channels-last": ("separate", "two_pass"),
}  # fmt: skip
#: Measured with these rungs too; the others with what AUTO takes alone.
LADDER = [(1, 960, 24, 24), (32, 48, 190, 190), (32, 960, 24, 24), (32, 2688, 12, 12)]
#: (batch, dtype) of which torch.compile is a peer.
WITH_COMPILER = {(1, "float32"), (32, "float32"), (32, "bfloat16")}
N_ARRAYS = {"forward": 2, "both": 5}  # of x's size that must be moved
N_DIMS = 4
COMMAND = "python -m course_lib bench squeeze_excite --record"
PROFILE = "squeeze_excite.profile"  # what `profile_squeeze_excite` records
OURS = "ours"
MOST_SETS = 128  # the smallest of these sizes outgrows the L2 cache even so


def cases(*, shapes=None, dtypes=None):
    """Both directions and layouts at each size: of `shapes`, N·C·H·W, alone if given."""
    last = CHANNELS_LAST if shapes is None else shapes
    if shapes is None:
        shapes = [(N, C, side, side) for N in BATCHES for C, side, _ in SIZES]
    for shape in map(tuple, shapes):
        for dtype in dtypes or DTYPES:
            for layout in FORMATS:
                if layout == "contiguous" or shape in map(tuple, last):
                    for direction in DIRECTIONS:
                        yield _case(shape, dtype, layout, direction)


def draw(generator):
    """A shape that nobody chose."""
    side = size(generator, 7, 112)
    return size(generator, 1, 32), size(generator, 16, 1024, 8), side, side


@contextlib.contextmanager
def settings():
    """cuDNN searches for its fastest algorithm."""
    before, torch.backends.cudnn.benchmark = torch.backends.cudnn.benchmark, True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _case(shape, dtype, layout, direction):
    n_bytes = N_ARRAYS[direction] * math.prod(shape) * getattr(torch, dtype).itemsize
    return Case(
        _name(direction, layout), shape, dtype, COMMAND, n_bytes,
        functools.partial(_build, shape, dtype, layout, direction, n_bytes),
        default=AUTO, most_sets=MOST_SETS, settings=settings,
        facts={"squeeze_channels": squeeze_channels(shape[1], shape[2])},
    )  # fmt: skip


def squeeze_channels(C, side):
    """R of a block: EfficientNet-B4's where it has such a one, else a 24th of the channels."""
    known = {(channels, size): R for channels, size, R in SIZES}
    return known.get((C, side), max(1, C // 24))


class Block:
    """One size in one dtype and layout: weights, sets of buffers, and the modules of both sides.

    Candidates take the number of a buffer set, and give [y] or [y, dx, dweight1, …].
    """

    def __init__(self, shape, dtype, layout, n_sets, make):
        self.make = make
        self.shape, self.dtype, self.layout = shape, dtype, layout
        self.sets = [Buffers(make, shape, dtype, layout) for _ in range(n_sets)]
        C, R = shape[1], squeeze_channels(shape[1], shape[2])
        if make.is_empty:
            parts = (R, C, 1, 1), (R,), (C, R, 1, 1), (C,)
            self.weights = [torch.empty(part, dtype=getattr(torch, dtype)) for part in parts]
        else:
            self.weights = [p.detach() for p in _parameters(self.theirs)]

    @functools.cached_property
    def theirs(self):
        C, R = self.shape[1], squeeze_channels(self.shape[1], self.shape[2])
        made = torchvision.ops.SqueezeExcitation(C, R, torch.nn.SiLU)
        return made.to(self.make.device, getattr(torch, self.dtype))

    @functools.cached_property
    def ours(self):
        C, R = self.shape[1], squeeze_channels(self.shape[1], self.shape[2])
        made = nn.SqueezeExcitation(C, R, torch.nn.SiLU)
        made = made.to(self.make.device, getattr(torch, self.dtype))
        made.load_state_dict(self.theirs.state_dict())
        return made

    def rung(self, variant, direction):
        """A rung's launchers, without autograd."""
        dense = self.weights[0], self.weights[2]
        options = {"variant": variant, "activation": "silu", "gate": "sigmoid"}

        def call(one):
            x, dy = one.x[self.layout], one.dy[self.layout]
            y, *saved = kernels.forward(x, *self.weights, **options, out=one.y)
            if direction == "forward":
                return [y]
            return [y, *kernels.backward(dy, x, *dense, *saved, **options, out=one.dx)]

        return rotating(call, self.sets)

    def module(self, module, direction, layout):
        """A module, with autograd for the gradients."""
        parameters = _parameters(module)

        def call(one):
            x, dy = one.x[layout], one.dy[layout]
            if direction == "forward":
                with torch.no_grad():
                    return [module(x)]
            leaf = x.detach().requires_grad_()
            with torch.enable_grad():
                y = module(leaf)
            return [y.detach(), *torch.autograd.grad(y, [leaf, *parameters], dy)]

        return rotating(call, self.sets)


class Buffers:
    """One set of images and gradients, in both formats, and of what the kernels write."""

    def __init__(self, make, shape, dtype, layout):
        for name, shift in (("x", 0.2), ("dy", 0)):
            tensor = make.normal(*shape, dtype=dtype, layout=layout, shift=shift)
            formats = {layout: tensor}
            if not make.is_empty:
                other = OTHER[layout]
                formats[other] = tensor.contiguous(memory_format=FORMATS[other])
            setattr(self, name, formats)
        self.y, self.dx = (torch.empty_like(self.x[layout]) for _ in range(2))


def _parameters(module):
    return module.fc1.weight, module.fc1.bias, module.fc2.weight, module.fc2.bias


def kernel_hash(direction):
    """Of all that the default rung may launch: it is one of these, by size."""
    ladders = [kernels.FORWARD, kernels.BACKWARD][: 1 + (direction == "both")]
    rungs = [ladder[name] for ladder in ladders for name in ladder if name != "separate"]
    used = {kernel for rung in rungs for kernel in rung.kernels}
    return launches.specialisations_hash(launches.of_kernels(used, kernels))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}, of the profiler's record."""
    return {PROFILE: bench.kernel_hash(kernels.FORWARD.kernels)}


def _name(direction, layout):
    return f"squeeze_excite.{direction}" + ("" if layout == "contiguous" else f".{layout}")


def _build(shape, dtype, layout, direction, n_bytes, make, n_sets):
    block = Block(shape, dtype, layout, n_sets, make)
    variants = EVERY_SIZE[layout] if shape in LADDER else ()
    facts, theirs = {"compile_seconds": None, "tf32": torch.backends.cudnn.allow_tf32}, {}

    def peers():
        other = OTHER[layout]
        theirs[EAGER] = block.module(block.theirs, direction, layout)
        theirs[f"{EAGER}, {other}"] = block.module(block.theirs, direction, other)
        if (shape[0], dtype) in WITH_COMPILER and layout == "contiguous":
            fused = compiled(block.theirs, mode=None)
            theirs[COMPILED] = block.module(fused, direction, layout)
            start = time.perf_counter()
            theirs[COMPILED](0)
            facts["compile_seconds"] = round(time.perf_counter() - start, 1)
        return theirs

    def right():
        expected = checks.Expected(block, direction)
        module = block.module(block.ours, direction, layout)
        expected.check(OURS, module(0), ours=True)
        return lambda label, found, is_ours: expected.check(label, found, ours=is_ours)

    def more():
        if direction == "forward":
            return facts
        saved = {OURS: saved_bytes(block.ours, block), EAGER: saved_bytes(block.theirs, block)}
        return facts | {"saved_bytes": saved}

    return Work(
        {rung: block.rung(rung, direction) for rung in (*variants, AUTO)},
        peers,
        right,
        [block.sets[0].y, block.sets[0].dx],
        lambda: copies(make, n_bytes, n_sets),
        # The module that chooses the default rung is what Python sees of it.
        lambda: {AUTO: block.module(block.ours, direction, layout)} | theirs,
        more,
    )


def saved_bytes(module, block):
    """Bytes that a call with autograd leaves allocated beside its result, until backward."""
    leaf = block.sets[0].x[block.layout].detach().requires_grad_()
    before = _allocated()
    with torch.enable_grad():
        y = module(leaf)
    return _allocated() - before - y.nbytes


def _allocated():
    return torch.cuda.memory_allocated()


run = runner(cases, rounds=6)
