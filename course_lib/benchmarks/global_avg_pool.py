"""Global average pooling on a GPU: our rungs beside PyTorch, at the shapes of EfficientNet-B4.

The limit of the forward pass is a kernel that reads as many bytes and writes none, that of the
backward pass one that fills as many bytes.
"""

import functools
import math

import numpy as np
import torch

from course_lib import cuda, reference
from course_lib.benchmarks.case import (
    COMPILED,
    EAGER,
    FORMATS,
    Case,
    Work,
    compiled,
    judge,
    rotating,
    runner,
    size,
)
from course_lib.kernels import global_avg_pool as pool
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import store

# (channels, side) where EfficientNet-B4 (Tan and Le, 2019) squeezes, for images of 380 × 380, and
# its last pooling.
PLANES = [
    (48, 190), (24, 190), (144, 95), (192, 95), (192, 48), (336, 48), (336, 24), (672, 24),
    (960, 24), (960, 12), (1632, 12), (2688, 12), (1792, 12),
]  # fmt: skip
BATCHES = (1, 8, 32)
LARGE = [(64, 192, 95, 95), (32, 48, 190, 190)]
DTYPES = ("float32", "bfloat16")
CONTIGUOUS = "naive", "shared"  # rungs that are measured on contiguous images alone
N_DIMS = 4
COMMAND = "python -m course_lib bench global_avg_pool --record"
SAMPLE = 1 << 21  # elements checked: float64 on the CPU takes its time
_TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


@cuda.jit
def read_kernel(x, y, length):
    """Read all of x; what is written depends on the sum, so that no read can be left out."""
    start = cuda.blockIdx.x * length
    stop = min(start + length, x.shape[0])
    total = pool.vector_sum(x, min(start, stop), stop, 0, cuda.threadIdx.x, pool.BLOCK_SIZE)
    if total == np.float32(-1e30):
        store(y, 0, total)


def cases(*, shapes=None, dtypes=None):
    """Both layouts and directions at each shape; of `shapes`, N·C·H·W, alone if given."""
    if shapes is None:
        shapes = [(N, C, side, side) for N in BATCHES for C, side in PLANES] + LARGE
    for shape in map(tuple, shapes):
        for dtype in dtypes or DTYPES:
            for layout in FORMATS:
                for direction in ("forward", "backward"):
                    yield _case(shape, dtype, layout, direction)


def draw(generator):
    """A shape that nobody chose."""
    H, W = (size(generator, 4, 128) for _ in range(2))
    return size(generator, 1, 64), size(generator, 8, 2048), H, W


def _case(shape, dtype, layout, direction):
    N, C, H, W = shape
    end = "" if layout == "contiguous" else f".{layout}"
    return Case(
        f"global_avg_pool.{direction}{end}", shape, dtype, COMMAND,
        N * C * (H * W + 1) * getattr(torch, dtype).itemsize,
        functools.partial(_build, shape, dtype, layout, direction),
        facts={"limit": "read" if direction == "forward" else "fill"},
    )  # fmt: skip


class Buffers:
    """One set of images and of what is made of their planes."""

    def __init__(self, make, shape, dtype, layout):
        self.images = make.normal(*shape, dtype=dtype, layout=layout)
        self.planes = make.normal(*shape[:2], dtype=dtype)


def _build(shape, dtype, layout, direction, make, n_sets):
    sets = [Buffers(make, shape, dtype, layout) for _ in range(n_sets)]
    forward, last = direction == "forward", layout != "contiguous"
    ours, eager, limit = (_forward, _mean, _read) if forward else (_backward, _spread, _fill)
    written = sets[0].planes if forward else sets[0].images

    def peers():
        fused = compiled(functools.partial(_out_of_place, forward=forward))
        return {
            EAGER: rotating(eager, sets),
            COMPILED: rotating(lambda one: fused(one.images, one.planes), sets),
        }

    return Work(
        {
            rung: rotating(lambda one, rung=rung: ours(one, last, rung), sets)
            for rung in (pool.FORWARD if forward else pool.BACKWARD)
            if not (last and rung in CONTIGUOUS)
        },
        peers,
        lambda: functools.partial(_judge, _truth(sets[0], forward), dtype),
        [written],
        lambda: {"limit": rotating(limit, sets)},
    )


def _forward(one, last, rung):
    return pool.forward(one.images, variant=rung, out=one.planes)


def _backward(one, last, rung):
    sides = one.images.shape[2:]
    return pool.backward(one.planes, sides, channels_last=last, variant=rung, out=one.images)


def _mean(one):
    return torch.mean(one.images, (2, 3), out=one.planes)


def _spread(one):
    """What autograd runs for mean((2, 3))."""
    H, W = one.images.shape[2:]
    return torch.div(one.planes[:, :, None, None].expand_as(one.images), H * W, out=one.images)


def _out_of_place(images, planes, forward):
    if forward:
        return images.mean((2, 3))
    return planes[:, :, None, None].expand_as(images) / (images.shape[2] * images.shape[3])


def _read(one):
    n = one.images.numel()
    n_blocks = min(132 * 8, math.ceil(n / 4096))
    length = math.ceil(n / n_blocks / 1024) * 1024
    launch(read_kernel, n_blocks, pool.BLOCK_SIZE, one.images, one.planes, length, flat=True)


def _fill(one):
    one.images.fill_(1)


def _truth(one, forward):
    """(what is right of some planes, the scale of the errors)."""
    some = max(1, SAMPLE // math.prod(one.images.shape[2:]))
    if forward:
        x = one.images.flatten(0, 1)[:some].double().cpu().numpy()[None]
        return reference.global_avg_pool(x)[0], np.abs(x).mean()
    dy = one.planes.flatten()[:some].double().cpu().numpy()
    expected = reference.global_avg_pool_backward(dy[None], tuple(one.images.shape[2:]))[0]
    return expected, np.abs(expected).max()


def _judge(truth, dtype, label, found, is_ours):
    if found.isnan().any():
        judge(label, math.nan, 0)
    expected, scale = truth
    actual = found.flatten(0, 1)[: len(expected)].double().cpu().numpy()
    error = np.abs(actual - expected).max() / scale
    judge(label, error, _TOLERANCE[dtype] * (1 if is_ours else 4))


run = runner(cases, rounds=15)
