"""Products by Hopper's tensor cores, which read tiles from shared memory by themselves.

As in `tensor_core`, tiles of `a` and `b` pass through a ring of buffers; `mma.warpgroup` tells how
they are multiplied. Of 16-bit numbers, a block takes one tile of c after another
(`mma.warpgroup_stream`), and k may be dealt out to parts, whose sums are added up. Of float32,
rounded to TF32 (`mma.mainloop`), a block takes one tile. Compute capability 9.0 alone: 10.0 and
12.0 have no `wgmma`, and there as on 8.0 `tensor_core` takes these products. `warpgroup_plan` tells
which products, and which tiles.
"""

import functools
import math
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
from course_lib.kernels.blocks.mma.warpgroup_stream import Sizes, ahead_of, stream_of, write_of
from course_lib.kernels.blocks.mma.warpgroup_sums import sums_of
from course_lib.kernels.gemm.split import BLOCK_SIZE, finish_kernel
from course_lib.kernels.gemm.warpgroup_plan import (
    IN_PARTS,
    SHAPES,
    choose,
    choose_parts,
    n_blocks,
    shared_bytes,
    steps_of,
)
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


def make(shape, sources, itemsize, in_planes=False, in_parts=False):
    """The `Kernel` for matrices that come as `sources` say (see `mma.swizzled`).

    Of float32 (itemsize 4), rounded to TF32, or of 16-bit numbers; `in_planes`: see `planes`. With
    16-bit numbers and `in_parts`, c is float32: the sums of each part of k.
    """
    tiles = [
        tile(rows, itemsize, shape.n_threads, source)
        for rows, source in zip((shape.m, shape.n), sources, strict=True)
    ]
    if itemsize == 2:
        kernel = _streaming(shape, tiles, sources, in_planes, in_parts)
    else:
        kernel = _rounding(shape, tiles, by_row_flags(sources, 4), in_planes)
    return Kernel(kernel, shape, shared_bytes(shape))


def _first_of(tile, source):
    # `tile.first` of a matrix whose rows, or ks, lie `pitch` elements apart.
    first = tile.first

    @cuda.jit(device=True)
    def of_rows(row, n_rows, K, pitch):
        return first(row, n_rows, pitch)

    @cuda.jit(device=True)
    def of_ks(row, n_rows, K, pitch):
        return first(row, pitch, K)

    return of_rows if source == "by_k" else of_ks


def _streaming(shape, tiles, sources, IN_PLANES, IN_PARTS):
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    N_SUMS, BAND = TILE_N // 2, BAND_ROWS // TILE_M
    first_a, first_b = map(_first_of, tiles, sources)

    @cuda.jit(device=True)
    def find(index, sizes, pitches):
        # (first row, first column, number of the c) of a tile, and what is summed for it.
        image = np.uint32(index // sizes.in_image)
        inside = np.uint32(index - image * sizes.in_image)
        m, n = tile_at(inside, sizes.M, sizes.N, TILE_M, TILE_N, BAND)
        source, step, last, k_left = first_b(n, sizes.N, sizes.K, pitches[1])
        image = np.int64(image)
        plane, part = (image, 0) if IN_PLANES else (0, image)
        of_a = first_a(m, sizes.M, sizes.K, pitches[0])
        of_b = source + plane * sizes.K * sizes.N, step, last, k_left
        return (m, n, image), (of_a, of_b, part * sizes.length)

    begin, multiply = stream_of(shape, tiles, by_row_flags(sources, 2))
    write = write_of(TILE_N, IN_PLANES, IN_PARTS)

    @cuda.jit(launch_bounds=(N_THREADS, shape.n_blocks))
    def streaming_kernel(
        a, b, bias, c, M, N, K, options, in_image, n_tiles, length, a_pitch, b_pitch
    ):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = tiles_in_shared(a)
        acc = cuda.local.array(N_SUMS, np.float32)
        sizes = Sizes(M, N, K, length, np.uint32(in_image), np.uint32(n_tiles - 1))
        pitches, index, at = (a_pitch, b_pitch), np.uint32(cuda.blockIdx.x), np.int64(0)
        place, this = find(index, sizes, pitches)
        begin(cache, a, b, this)
        while index <= sizes.last:
            index = np.uint32(index + np.uint32(cuda.gridDim.x))
            place_of_next, following = find(np.uint32(min(index, sizes.last)), sizes, pitches)
            at = multiply(acc, cache, a, b, sizes, this, following, index > sizes.last, at)
            m, n, image = place
            write(acc, bias, c, image * M * N, m, n, M, N, options)
            place, this = place_of_next, following
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
def kernel_for(shape, sources, itemsize, in_parts=False):
    """The `Kernel` of these choices, made once."""
    return make(shape, sources, itemsize, in_parts=in_parts)


def _refusal(problem, chip):
    """Why a product can't go by `wgmma`, or None."""
    if chip.capability > ONLY:
        return Refusal("needs wgmma, an instruction of compute capability 9.0 alone")
    if problem.mode == "split":
        return Refusal("rounds float32 to TF32, which precision='tf32' allows")
    if "any" in problem.sources:
        return Refusal("takes matrices whose rows, or ks, begin on 16-byte boundaries")
    if choose(problem, chip) is None:
        return Refusal(f"has no tiles that fit {chip.shared_bytes:,} bytes of shared memory")
    return None


def plan(problem, chip):
    """The `Kernel` for a `plan.Problem`."""
    if refusal := _refusal(problem, chip):
        return refusal
    return kernel_for(choose(problem, chip), problem.sources, problem.itemsize)


def plan_in_parts(problem, chip):
    """(`Kernel`, parts of k) for a `plan.Problem`."""
    if refusal := _refusal(problem, chip):
        return refusal
    if problem.itemsize != 2:
        return Refusal("takes 16-bit numbers")
    parts = choose_parts(problem, chip)
    return kernel_for(parts.shape, problem.sources, problem.itemsize, True), parts


def multiply(plan, operands):
    """c[m, n] = Σ a[m, k]·b[n, k] over k, and what the last operand says (see `epilogue`)."""
    *operands, a_m, a_k, b_n, b_k, options = operands
    multiply_planes(plan, operands, (a_m, a_k, b_n, b_k), options, 1)


def multiply_in_parts(plan, operands):
    """The same, by a sum for each part of k, which a second launch adds up."""
    a, b, bias, c, M, N, K, *strides, options = operands
    kernel, (_, n_parts, length) = plan
    sums = arrays.empty((n_parts, M, N), like=c, dtype="float32")
    multiply_planes(kernel, (a, b, bias, sums, M, N, K), strides, 0, n_parts, length)
    launch(
        finish_kernel, math.ceil(M * N / BLOCK_SIZE), BLOCK_SIZE,
        sums, bias, c, N, n_parts, options, flat=True, overlap=True,
    )  # fmt: skip


def multiply_planes(plan, operands, strides, options, n_images, length=None):
    """The same for each image's b and c, of kernels `in_planes`; or for parts of k of such length.
    """
    kernel, shape, shared_bytes = plan
    a, *_, c, M, N, K = operands
    if arrays.begins_on(VECTOR_BYTES, c, N):
        options += VECTORS
    in_image = n_blocks(shape, M, N)
    n_tiles = grid = in_image * n_images
    numbers = options, in_image, n_tiles
    if a.dtype.itemsize == 2:
        grid = min(n_tiles, chip_of(c).multiprocessors * shape.n_blocks)
        length = length or max(steps_of(K, 2), ahead_of(shape)) * (ROW_BYTES // 2)
        numbers += length, max(strides[:2]), max(strides[2:])
    launch(
        kernel, grid, shape.n_threads, *operands, *numbers,
        shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def kernels():
    """(mode, sources, `Kernel`, in parts) of all that there are, by how linear layers' inputs come.
    """
    for mode, itemsize in (("narrow", 2), ("tf32", 4)):
        for shape in SHAPES[itemsize]:
            for sources in SOURCES:
                yield mode, sources, kernel_for(shape, sources, itemsize), False
    for shape in IN_PARTS:
        for sources in SOURCES:
            yield "narrow", sources, kernel_for(shape, sources, 2, True), True


def all_of(in_parts):
    """The kernels of one of the two ways."""
    return [found[0] for *_, found, is_in_parts in kernels() if is_in_parts == in_parts]


def specialisations(dtypes):
    """(label, kernel, argument types) of all that `multiply` compiles; arrays as (dtype, 1)."""
    for mode, sources, (kernel, shape, _), in_parts in kernels():
        for dtype in dtypes:
            if (dtype == "float32") == (mode == "tf32"):
                name = f"tensor_core warpgroup {shape.label} {'-'.join(sources)} {dtype}"
                c, numbers = ("float32" if in_parts else dtype, 1), 6 if mode == "tf32" else 9
                label = f"{name} in parts" if in_parts else name
                yield label, kernel, [(dtype, 1)] * 3 + [c] + ["int64"] * numbers
