"""Which convolutions `pixel_sums` takes, with which tiles, and how it is launched."""

import functools
import math
from typing import NamedTuple

from course_lib.kernels.blocks.mma.shape import Shape
from course_lib.kernels.conv2d import gather_pack, pixel_sums, pixel_sums_copies
from course_lib.kernels.conv2d.implicit_dweight import TOTAL_LANES, TOTAL_THREADS, WIDTH, sum_kernel
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

#: Tiles by mode (`mma.mainloop`), with how fast they are, as a share of the fastest.
SHAPES = {
    "narrow": {Shape(192, 128, 4, 2, 3, 1): 1.0, Shape(64, 64, 2, 2, 3, 2): 0.5},
    "tf32": {Shape(192, 128, 4, 2, 3, 1): 1.0, Shape(64, 64, 2, 2, 3, 2): 0.5},
    "split": {Shape(64, 64, 2, 2, 3, 2): 1.0},
    "mixed": {Shape(192, 128, 4, 2, 4, 1): 1.0, Shape(64, 64, 2, 2, 4, 2): 0.5},
}
MULTIPROCESSORS = 132  # of the largest chip of today
MOST_WORKSPACE = 64 << 20  # bytes of sums that wait to be added up
LEAST_TILES = 4  # of pixels, that a block adds up where there are several
STATIC_BYTES = 6144  # of shared memory that are not dynamic
TILE_COST = 4096  # of a block whatever its tile, in elements of that
KERNEL_TYPES = [*["int64"] * 3, *["int32"] * 14, "boolean"]  # of the kernel's numbers
MOST = 2**31 - 1  # of what is counted in 32 bits


class Plan(NamedTuple):
    shape: Shape
    n_splits: int  # parts that the pixels are added up in
    length: int  # pixels of a part


@functools.lru_cache(maxsize=4096)
def planned(problem, itemsize, mode, chip):
    """The fastest `Plan` on a chip as `chip_of` gives it; None if there is none."""
    if problem.groups != 1:
        return None
    whole = padded(problem, itemsize)
    return fastest(lambda shape: whole, itemsize, mode, chip) if takes(problem) else None


def takes(problem):
    """Whether the kernels can count the pixels and the taps of a problem, which has some."""
    p = problem
    small = max(p.N * p.H * p.W, p.N * p.P * p.Q) <= MOST
    small = small and max(p.P, p.Q) <= pixel_sums_copies.MOST_LINES
    small = small and max(p.R, p.S) <= pixel_sums_copies.NO_TAP
    return small and p.N * p.P * p.Q * p.C > 0


def fastest(problem_for, itemsize, mode, chip):
    """The fastest `Plan`, or None; problem_for(shape): what blocks of that shape multiply."""
    found = [
        (cost(problem_for(shape), plan) / speed, plan)
        for shape, speed in SHAPES[mode].items()
        if pixel_sums.shared_bytes(shape, itemsize) + STATIC_BYTES <= chip[1]
        for plan in [plan_of(problem_for(shape), shape, itemsize)]
    ]
    return min(found, key=lambda pair: pair[0])[1] if found else None


def padded(problem, itemsize):
    """The `Problem` with whole vectors of channels of x and of y."""
    width = VECTOR_BYTES // itemsize
    C, K = (math.ceil(count / width) * width for count in (problem.C, problem.K))
    return problem._replace(C=C, K=K)


def plan_of(problem, shape, itemsize):
    """The `Plan` with this shape: parts enough for all multiprocessors, if each is worth it."""
    p, k_size = problem, pixel_sums_copies.K_BYTES // itemsize
    n_tiles = math.ceil(p.N * p.P * p.Q / k_size)
    wanted = MULTIPROCESSORS * shape.min_blocks // n_blocks(problem, shape)
    wanted = min(wanted, n_tiles // LEAST_TILES, MOST_WORKSPACE // (4 * p.K * p.C * p.R * p.S))
    tiles = math.ceil(n_tiles / max(wanted, 1))
    return Plan(shape, math.ceil(n_tiles / tiles), tiles * k_size)


def n_blocks(problem, shape):
    """Tiles of terms and channels."""
    p = problem
    return math.ceil(p.C * p.R * p.S / shape.m) * math.ceil(p.K / shape.n)


def cost(problem, plan):
    """How long it takes, in no unit in particular."""
    shape = plan.shape
    blocks = n_blocks(problem, shape) * plan.n_splits
    together = min(shape.min_blocks, math.ceil(blocks / MULTIPROCESSORS))
    n_waves = math.ceil(blocks / (MULTIPROCESSORS * together))
    return n_waves * together * plan.length * (shape.m * shape.n + TILE_COST)


def kernel_for(shape, itemsize, mode, together=False):
    """The kernel of these choices, made once."""
    return _made(shape, itemsize, mode, together)


_made = functools.cache(pixel_sums.make)


def run(plan, problem, dy, x, dweight, mode):
    """dweight, by the kernel that sums over pixels."""
    shape, itemsize = plan.shape, x.dtype.itemsize
    x, dy = gather_pack.x_and_dy(problem, x, dy)
    p = padded(problem, itemsize)
    size = p.K * p.R * p.S * p.C
    partial = arrays.empty((plan.n_splits, size), like=x, dtype="float32")
    launch(
        kernel_for(shape, itemsize, mode), n_blocks(p, shape) * plan.n_splits,
        shape.n_threads, dy, x, partial, partial, p.N * p.P * p.Q, plan.length, plan.n_splits,
        *numbers_of(p), p.channels_last,
        shared_bytes=pixel_sums.shared_bytes(shape, itemsize), flat=True, overlap=True,
    )  # fmt: skip
    add_up(partial, dweight, plan.n_splits, size, p.C, problem)


def add_up(partial, dweight, n_splits, size, n_channels, problem):
    """dweight = Σ partial[split], as `sum_kernel` takes them."""
    p = problem
    n_blocks = math.ceil(p.K * p.R * p.S * n_channels / (TOTAL_LANES * WIDTH))
    launch(
        sum_kernel, n_blocks, TOTAL_THREADS, partial, dweight, n_splits, size, n_channels, p.C,
        p.R * p.S, p.channels_last, flat=True, overlap=True,
    )  # fmt: skip


def numbers_of(problem):
    """What of the problem the kernel takes, in its order."""
    numbers = problem.numbers
    return [numbers[i] for i in (1, 4, 2, 3, 7, 8, 5, 6, *range(9, 15))]


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    sums = ("float32", 1)
    for dtype in ("float32", "float16", "bfloat16"):
        array = (dtype, 1)
        types = [sums, array, *["int64"] * 5, "boolean"]
        yield f"conv2d.sum {dtype}", sum_kernel, types
        for mode in ("tf32", "split", "mixed") if dtype == "float32" else ("narrow",):
            for shape in SHAPES[mode]:
                kernel = kernel_for(shape, 4 if dtype == "float32" else 2, mode)
                types = [array, array, sums, sums, *KERNEL_TYPES]
                yield f"conv2d.pixel_sums {mode} {shape.m}x{shape.n} {dtype}", kernel, types
