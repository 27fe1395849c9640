"""Products by Hopper's tensor cores, which read tiles from shared memory by themselves.

As in `tensor_core`, tiles of `a` and `b` pass through a ring of buffers; `mma.warpgroup` tells how
they are multiplied. Of 16-bit numbers, a block takes one tile of c after another
(`mma.warpgroup_stream`); of float32, rounded to TF32 (`mma.mainloop`), one. Compute capability 9.0
alone: 10.0 and 12.0 have no `wgmma`, and there as on 8.0 `tensor_core` takes these products.
`warpgroup_plan` tells which products, and which tiles.
"""

import functools
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.mma.epilogue import VECTORS
from course_lib.kernels.blocks.mma.swizzled import tile
from course_lib.kernels.blocks.mma.warpgroup import (
    BAND_ROWS,
    GROUP_THREADS,
    ONLY,
    by_row_flags,
    product_of,
    tile_at,
)
from course_lib.kernels.blocks.mma.warpgroup_stream import stream_of, write_of
from course_lib.kernels.blocks.mma.warpgroup_sums import sums_of
from course_lib.kernels.gemm.warpgroup_plan import SHAPES, choose, n_blocks, shared_bytes
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES, allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.pipeline import wait_for_groups_but
from course_lib.runtime.intrinsics.warpgroup import (
    ROW_BYTES,
    ROWS,
    tiles_in_shared,
    wait_for_products,
)

#: How the inputs of the three products of a linear layer come.
SOURCES = (("by_k", "by_k"), ("by_k", "by_row"), ("by_row", "by_row"))


class Kernel(NamedTuple):
    kernel: object
    shape: object  # a `warpgroup_plan.Shape`
    shared_bytes: int


def make(shape, sources, itemsize, in_planes=False):
    """The `Kernel` for matrices that come as `sources` say (see `mma.swizzled`).

    Of float32 (itemsize 4), rounded to TF32, or of 16-bit numbers; `in_planes`: see `planes`.
    """
    return Kernel(_kernel(shape, sources, itemsize, in_planes), shape, shared_bytes(shape))


def _kernel(shape, sources, itemsize, IN_PLANES):
    make_kernel = _streaming if itemsize == 2 else _rounding
    tiles = [
        tile(rows, itemsize, shape.n_threads, source)
        for rows, source in zip((shape.m, shape.n), sources, strict=True)
    ]
    return make_kernel(shape, tiles, by_row_flags(sources, itemsize), IN_PLANES)


def _streaming(shape, tiles, by_row, IN_PLANES):
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    N_SUMS, BAND = TILE_N // 2, BAND_ROWS // TILE_M
    first_a, first_b = (each.first for each in tiles)
    begin, multiply = stream_of(shape, tiles, by_row)
    write = write_of(TILE_N, IN_PLANES)

    @cuda.jit(device=True)
    def find(index, M, N, K, tiles_of_image):
        # A tile of c, its matrix, and what is known of the tiles of a and b.
        image = np.uint32(index // tiles_of_image) if IN_PLANES else np.uint32(0)
        m, n = tile_at(np.uint32(index - image * tiles_of_image), M, N, TILE_M, TILE_N, BAND)
        source, step, last, k_left = first_b(n, N, K)
        of_b = source + np.int64(image) * K * N, step, last, k_left
        return m, n, np.int64(image) * M * N, (first_a(m, M, K), of_b)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def streaming_kernel(a, b, bias, c, M, N, K, options, tiles_of_image, n_tiles):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = tiles_in_shared(a)
        acc = cuda.local.array(N_SUMS, np.float32)
        index, in_image = np.uint32(cuda.blockIdx.x), np.uint32(tiles_of_image)
        last, n_blocks = np.uint32(n_tiles - 1), np.uint32(cuda.gridDim.x)
        m, n, place, this = find(index, M, N, K, in_image)
        begin(cache, a, b, this[0], this[1])
        at = 0
        while index <= last:
            index = np.uint32(index + n_blocks)
            following = find(np.uint32(min(index, last)), M, N, K, in_image)
            at = multiply(acc, cache, a, b, this, following[3], K, index > last, at)
            write(acc, bias, c, place, m, n, M, N, options)
            m, n, place, this = following
        wait_for_groups_but(0)

    return streaming_kernel


def _rounding(shape, tiles, by_row, IN_PLANES):
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    N_SUMS, GROUP, BAND = TILE_N // 2, ROWS * (ROW_BYTES // 4), BAND_ROWS // TILE_M
    first_a, first_b = (each.first for each in tiles)
    multiply = product_of(shape, tiles, by_row, 4)
    collect, write = sums_of(TILE_M, TILE_N, N_THREADS, IN_PLANES)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def warpgroup_kernel(a, b, bias, c, M, N, K, options, tiles_of_image, n_tiles):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = tiles_in_shared(a)
        index, in_image = np.uint32(cuda.blockIdx.x), np.uint32(tiles_of_image)
        if IN_PLANES:
            image = np.uint32(index // in_image)
            index = np.uint32(index - image * in_image)
            b, c = b[np.int64(image) * K * N :], c[np.int64(image) * M * N :]
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        m, n = tile_at(index, M, N, TILE_M, TILE_N, BAND)
        group = cuda.threadIdx.x // GROUP_THREADS
        multiply(acc, cache, a, b, first_a(m, M, K), first_b(n, N, K), K, group * GROUP)
        wait_for_products(acc, TILE_N)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc)
        cuda.syncthreads()
        write(sums, bias, c, m, n, M, N, options)

    return warpgroup_kernel


@functools.cache
def kernel_for(shape, sources, itemsize):
    """The `Kernel` of these choices, made once."""
    return make(shape, sources, itemsize)


def plan(problem, chip):
    """The `Kernel` for a `plan.Problem`."""
    if chip.capability > ONLY:
        return Refusal("needs wgmma, an instruction of compute capability 9.0 alone")
    if problem.mode == "split":
        return Refusal("rounds float32 to TF32, which precision='tf32' allows")
    if "any" in problem.sources:
        return Refusal("takes matrices whose rows, or ks, begin on 16-byte boundaries")
    if (shape := choose(problem, chip)) is None:
        return Refusal(f"has no tiles that fit {chip.shared_bytes:,} bytes of shared memory")
    return kernel_for(shape, problem.sources, problem.itemsize)


def multiply(plan, operands):
    """c[m, n] = Σ a[m, k]·b[n, k] over k, and what the last operand says (see `epilogue`)."""
    a, b, bias, c, M, N, K, *_, options = operands
    multiply_planes(plan, (a, b, bias, c, M, N, K), options, 1)


def multiply_planes(plan, operands, options, n_images):
    """The same for each image's b and c, of kernels `in_planes`, or for one."""
    kernel, shape, shared_bytes = plan
    *_, c, M, N, _ = operands
    if arrays.begins_on(VECTOR_BYTES, c, N):
        options += VECTORS
    in_image = n_blocks(shape, M, N)
    n_tiles = in_image * n_images
    streams = c.dtype.itemsize == 2
    grid = min(n_tiles, chip_of(c).multiprocessors) if streams else n_tiles
    launch(
        kernel, grid, shape.n_threads, *operands, options, in_image, n_tiles,
        shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def kernels():
    """(mode, sources, `Kernel`) of all that there are, by how linear layers' inputs come."""
    for mode, itemsize in (("narrow", 2), ("tf32", 4)):
        for shape in SHAPES[itemsize]:
            for sources in SOURCES:
                yield mode, sources, kernel_for(shape, sources, itemsize)


def specialisations(dtypes):
    """(label, kernel, argument types) of all that `multiply` compiles; arrays as (dtype, 1)."""
    for mode, sources, (kernel, shape, _) in kernels():
        for dtype in dtypes:
            if (dtype == "float32") == (mode == "tf32"):
                name = f"tensor_core warpgroup {shape.m}x{shape.n} {'-'.join(sources)} {dtype}"
                yield name, kernel, [(dtype, 1)] * 4 + ["int64"] * 6
