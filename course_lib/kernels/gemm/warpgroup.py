"""Products by Hopper's tensor cores, which read tiles from shared memory by themselves.

As in `tensor_core`, tiles of `a` and `b` pass through a ring of buffers; `mma.warpgroup` tells how
they are multiplied. float32 is rounded to TF32 (`mma.mainloop`). Compute capability 9.0 alone: 10.0
and 12.0 have no `wgmma`, and there as on 8.0 `tensor_core` takes these products. `warpgroup_plan`
tells which products, and which tiles.
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
    place_of_block,
    product_of,
)
from course_lib.kernels.blocks.mma.warpgroup_sums import sums_of
from course_lib.kernels.gemm.warpgroup_plan import SHAPES, choose, n_blocks, shared_bytes
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES, allow_next_kernel, wait_for_previous_kernel
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
    TILE_M, TILE_N, N_THREADS = shape.m, shape.n, shape.n_threads
    N_SUMS, GROUP, BAND = TILE_N // 2, ROWS * (ROW_BYTES // itemsize), BAND_ROWS // TILE_M
    tiles = [
        tile(rows, itemsize, N_THREADS, source)
        for rows, source in zip((TILE_M, TILE_N), sources, strict=True)
    ]
    first_a, first_b = (each.first for each in tiles)
    multiply = product_of(shape, tiles, by_row_flags(sources, itemsize), itemsize)
    collect, write = sums_of(TILE_M, TILE_N, N_THREADS, IN_PLANES)

    @cuda.jit(launch_bounds=(N_THREADS, 1))
    def warpgroup_kernel(a, b, bias, c, M, N, K, options):
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = tiles_in_shared(a)
        if IN_PLANES:
            image = np.int64(cuda.blockIdx.y)
            b, c = b[image * K * N :], c[image * M * N :]
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        m, n = place_of_block(M, N, TILE_M, TILE_N, BAND)
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
    kernel, shape, shared_bytes = plan
    a, b, bias, c, M, N, K, *_, options = operands
    if arrays.begins_on(VECTOR_BYTES, c, N):
        options += VECTORS
    launch(
        kernel, n_blocks(shape, M, N), shape.n_threads, a, b, bias, c, M, N, K, options,
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
                yield name, kernel, [(dtype, 1)] * 4 + ["int64"] * 4
