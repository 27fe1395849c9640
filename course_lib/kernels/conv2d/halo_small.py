"""How `halo` takes a small convolution: few pixels, for which launches and waiting cost the most.

Its weights are read as they lie, so that no launch has to arrange them; in the forward pass also
contiguous ones, where that costs less than to lay them out. Its tiles are smaller, and the chunks
and taps of each are dealt out to a cluster of blocks. Chips before 9.0 have none: there `halo`
takes small convolutions as it takes others.
"""

import functools
import itertools
import math

from course_lib.kernels.blocks.mma.shape import Shape
from course_lib.kernels.conv2d import halo_plan
from course_lib.kernels.conv2d.halo_plan import MULTIPROCESSORS
from course_lib.runtime.host import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES

_PLAIN = Shape(128, 64, 4, 2, 4, 1), Shape(96, 64, 2, 2, 4, 2), Shape(64, 64, 2, 2, 4, 3)
_EXACT = Shape(128, 64, 4, 2, 4, 1), Shape(96, 64, 2, 2, 4, 2), Shape(64, 64, 2, 2, 4, 2)
_LEAST = Shape(32, 32, 2, 2, 4, 3)
#: Tiles by mode (`mma.mainloop`).
SHAPES = {
    "narrow": (*_PLAIN, _LEAST),
    "tf32": (*_PLAIN, _LEAST),
    "split": (*_EXACT, _LEAST),
    "mixed": (*_EXACT, _LEAST),
}
ELEMENT_BYTES = 4  # of elements that can be copied one by one, while others are multiplied
K_SIZE = halo_plan.halo.CHUNK_BYTES // ELEMENT_BYTES
LARGE = 256 * 128  # elements of the result for each multiprocessor, of which half is small
CLUSTERS_SINCE, MOST_IN_CLUSTER = (9, 0), 8  # as many blocks as every chip with clusters can do
#: What things take on an H200, in ns: a block whatever it does, and for each 8 elements of its tile
#: that a thread has; a launch that fills the chip; each block, for what all of them share.
START, ELEMENTS, FILLED, BLOCK = 2360, 440, 1730, 8
#: By mode, for each tile of weights: at least, for each 1024 elements if a block is alone on its
#: multiprocessor, and if there are many.
TILES = {"narrow": (334, 40, 73), "tf32": (334, 40, 73)}
TILES |= dict.fromkeys(("split", "mixed"), (342, 81, 103))
#: Weights that lie "by_element": a block; for each of its tiles, each element that a thread copies.
SCATTERED, ELEMENT = 700, 12
COPIES = 0, 4500, 6000  # a launch before, that lays out neither images nor weights, one, both


@functools.lru_cache(maxsize=4096)
def planned(gather, itemsize, mode, chip, last=True, weights_last=True):
    """The fastest `Plan` on a chip as `chip_of` gives it; None if there is none.

    last, weights_last  whether images, and weights, are channels-last, or else contiguous. Such
                        images are laid out before, and weights are unless the plan is "by_element"
    """
    if gather is None or chip[0] < CLUSTERS_SINCE or not is_small(gather):
        return None
    if any(n * itemsize % VECTOR_BYTES for n in (gather.n_channels, gather.n_columns)):
        return None
    if not gather.n_channels:
        return None
    return fastest(gather, mode, candidates(gather, itemsize, mode, chip, last, weights_last))


def fastest(gather, mode, plans):
    """The one of them that costs least; None of none."""
    return min(plans, key=lambda plan: cost(gather, mode, plan), default=None)


def is_small(gather):
    """Whether the largest tiles would leave many multiprocessors idle."""
    return gather.N * gather.P * gather.Q * gather.n_columns < LARGE * MULTIPROCESSORS // 2


def candidates(gather, itemsize, mode, chip, last=True, weights_last=True):
    """All `Plan`s that there are."""
    n_copies = 2 - last - weights_last
    sources = {"by_row" if gather.flipped else "by_k": n_copies}
    if not weights_last and itemsize == ELEMENT_BYTES and not gather.flipped:
        sources["by_element"] = n_copies - 1
    n_taps, n_chunks = (
        gather.R * gather.S,
        math.ceil(gather.n_channels * itemsize / halo_plan.halo.CHUNK_BYTES),
    )
    parts = [(math.ceil(n_chunks / n), n_taps) for n in range(1, n_chunks + 1)]
    parts += [(1, math.ceil(n_taps / n)) for n in range(2, n_taps + 1)]
    for source, shape, each in itertools.product(sources, SHAPES[mode], dict.fromkeys(parts)):
        plan = halo_plan.plan_of(gather, shape, itemsize, mode, chip, source, each)
        if plan is not None and plan.n_blocks(n_taps) <= MOST_IN_CLUSTER:
            yield plan._replace(n_copies=sources[source])


def cost(gather, mode, plan):
    """How long it takes, in ns or so."""
    shape, cluster = plan.shape, plan.n_blocks(gather.R * gather.S)
    n_blocks = math.ceil(gather.N * gather.P * gather.Q / shape.m) * cluster
    n_blocks *= math.ceil(gather.n_columns / shape.n)
    elements, (least, alone, shared) = shape.m * shape.n / 1024, TILES[mode]
    n_waves = math.ceil(n_blocks / (places_for(cluster) * shape.min_blocks))
    together = min(math.ceil(n_blocks / MULTIPROCESSORS), shape.min_blocks)
    tile = max(least + alone * elements, together * shared * elements)
    block = START + ELEMENTS * elements * 128 / shape.n_threads
    if plan.source == "by_element":
        block += SCATTERED
        tile += ELEMENT * together * shape.n * K_SIZE / shape.n_threads
    block += plan.chunks_each * plan.taps_each * tile
    filled = FILLED * min(1, n_blocks / MULTIPROCESSORS) ** 2
    return COPIES[plan.n_copies] + n_waves * block + filled + BLOCK * n_blocks


def places_for(cluster):
    """Multiprocessors that clusters of so many blocks find: each needs some of the same part of the
    chip, of which there are eight with 16 or 18 that work.
    """
    return MULTIPROCESSORS if cluster <= 2 else 120 * (16 // cluster * cluster) // 16


def takes(problem, source, weight):
    """Whether the arrays lie on 16-byte boundaries, or are copied before.

    weight  None where its place does not matter: it is copied, or read by elements
    """
    if not problem.channels_last:
        return True
    both = (source,) if weight is None else (source, weight)
    return not any(arrays.address_of(array) % VECTOR_BYTES for array in both)


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for mode, shapes in SHAPES.items():
        for dtype in ("float16", "bfloat16") if mode == "narrow" else ("float32",):
            itemsize = 2 if mode == "narrow" else 4
            sources = ("by_k", "by_row", "by_element")[: 3 if itemsize == ELEMENT_BYTES else 2]
            for shape, source in itertools.product(shapes, sources):
                kernel = halo_plan.kernel_for(shape, itemsize, mode, source)
                types = [(dtype, 1)] * 4 + halo_plan.KERNEL_TYPES
                yield f"conv2d.halo {mode} {shape.m}x{shape.n} {source} {dtype}", kernel, types
