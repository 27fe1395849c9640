"""The rung `upsample2x`: filters of 2 × 2 with stride 2, where nothing overlaps.

Each pixel of x makes a block of 2 × 2 pixels of y, and no other does: y is one product of matrices,
all pixels × C times C × 4·K, whose result is stored interleaved. Tensor cores multiply a tile of it
in each block, as those of `gemm` do; the sums go through shared memory, from where each thread
stores 16 bytes that lie together in y. So x and weight are read by 16 bytes, y is written by 16,
and nothing is multiplied by the zeros that a convolution's gradient sees between the strides.

A row of the product is a pixel. Its columns come in the order in which weights lie in memory:

============== =============================== ====================================================
layout         column                          16 bytes of y
============== =============================== ====================================================
contiguous     4·k + 2·r + s                   both s of neighbouring pixels, for one k and r
channels-last  (2·r + s)·K + k                 neighbouring k of one pixel, for one r and s
============== =============================== ====================================================
"""

import functools
import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels import gemm
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma import fragments, mainloop
from course_lib.kernels.blocks.mma.results import SUMS_PADDING, results
from course_lib.kernels.blocks.mma.shape import K_BYTES, Shape
from course_lib.kernels.blocks.mma.tiles import PARTS, tile
from course_lib.kernels.conv_transpose2d import packed, warpgroups
from course_lib.kernels.conv_transpose2d.strided import whole_memory
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.intrinsics.shared import dynamic_shared

TENSOR_CORES_SINCE = (8, 0)
ADD_BIAS, VECTORS = 1, 2  # options of the kernels are the sum of these
LARGE_FROM = 264  # blocks with the larger tile: two for each multiprocessor of a large chip
PADDING = 12  # float32 from one row of sums to the next, so that few lanes meet in a bank
#: How numbers are multiplied (`mma.mainloop`) -> tiles of pixels × columns, large and small.
SHAPES = {
    "narrow": (Shape(128, 64, 2, 2, 3, 2), Shape(64, 64, 2, 2, 4, 2)),
    "tf32": (Shape(128, 64, 2, 2, 3, 2), Shape(64, 64, 2, 2, 4, 2)),
    "split": (Shape(128, 64, 4, 2, 3, 1), Shape(64, 64, 2, 2, 4, 2)),
}


class Kernel(NamedTuple):
    kernel: object
    shape: Shape
    shared_bytes: int


def fault(problem, operands, capability):
    """Why this rung can't take the problem, with `operands` x and weight; or None."""
    p, width = problem, VECTOR_BYTES // operands[0].dtype.itemsize
    filters = (p.R, p.S, p.stride_h, p.stride_w, p.pad_h, p.pad_w, p.P, p.Q)
    if filters != (2, 2, 2, 2, 0, 0, 2 * p.H, 2 * p.W) or p.groups != 1:
        return "filters of 2 × 2 with stride 2, without padding, dilation and groups"
    if capability < TENSOR_CORES_SINCE:
        return "GPUs of compute capability 8.0 on"
    if p.channels_last and (p.C % width or p.K % width):
        return f"channels-last images whose channels are multiples of {width}"
    if not p.channels_last and (p.H * p.W % width or 4 * p.K % width):
        return f"images whose pixels, and 4·K, are multiples of {width}"
    if p.N * p.H * p.W >= 1 << 30 or 4 * p.K >= 1 << 30:
        return "fewer than 2³⁰ pixels of x, and columns"
    if any(arrays.address_of(array) % VECTOR_BYTES for array in operands):
        return f"arrays that begin on boundaries of {VECTOR_BYTES} bytes"
    return None


def _planar(shape):
    """(collect, write) of contiguous images: sums of one k and r lie pixel by pixel."""
    N_A = shape.m // shape.warps_m // fragments.FRAGMENT_M
    N_B = shape.n // shape.warps_n // fragments.FRAGMENT_N
    PITCH, ROWS, TILE_M, N_THREADS = 2 * shape.m + PADDING, shape.n // 2, shape.m, shape.n_threads

    @cuda.jit(device=True)
    def collect(sums, acc, row, col, lane):
        # A lane's columns 2t and 2t + 1 are both s of one k and r.
        place = (col // 2 + lane % 4) * PITCH + 2 * (row + lane // 4)
        for i in range(N_A):
            for j in range(N_B):
                for r in range(4):
                    at = 4 * j * PITCH + 2 * (16 * i + r // 2 * 8) + r % 2
                    sums[place + at] = acc[4 * (i * N_B + j) + r]

    @cuda.jit(device=True)
    def write(sums, bias, y, m, n, image, n_rows, H, W, K, y_n, y_k, y_p, y_q, options):
        values = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(y)
        PER_ROW = 2 * TILE_M // width
        base = np.int64(image) * y_n
        for i in range(cuda.threadIdx.x, ROWS * PER_ROW, N_THREADS):
            line, first = i // PER_ROW, i % PER_ROW * width
            k, r, pixel = (n // 2 + line) // 2, (n // 2 + line) % 2, m + first // 2
            if k < K and pixel < n_rows:
                add = load(bias, k) if options & ADD_BIAS else ZERO
                for part in range(0, width, 4):
                    load_vector(values[part : part + 4], sums, line * PITCH + first + part)
                for e in range(width):
                    values[e] += add
                h, w = divided(pixel, W)
                at = base + k * y_k + (2 * h + r) * y_p
                if options & VECTORS:
                    store_vector(y, at + 2 * w, values)
                else:
                    for e in range(width):
                        h, w = divided(pixel + e // 2, W)
                        if pixel + e // 2 < n_rows:
                            at = base + k * y_k + (2 * h + r) * y_p
                            store(y, at + (2 * w + e % 2) * y_q, values[e])

    return collect, write, shape.n // 2 * PITCH


def _channels_last(shape):
    """(collect, write) of channels-last images: sums of a pixel lie column by column."""
    warp = shape.m // shape.warps_m, shape.n // shape.warps_n
    collect, _ = results(shape.m, shape.n, *warp, shape.n_threads, False)
    PITCH, TILE_M, TILE_N, N_THREADS = shape.n + SUMS_PADDING, shape.m, shape.n, shape.n_threads

    @cuda.jit(device=True)
    def write(sums, bias, y, m, n, image, n_rows, H, W, K, y_n, y_k, y_p, y_q, options):
        values = cuda.local.array(MAX_WIDTH, np.float32)
        width = vector_width(y)
        PER_ROW = TILE_N // width
        for i in range(cuda.threadIdx.x, TILE_M * PER_ROW, N_THREADS):
            pixel, first = m + i // PER_ROW, i % PER_ROW * width
            tap, k = divided(n + first, K)
            if tap < 4 and pixel < n_rows:
                for part in range(0, width, 4):
                    at = i // PER_ROW * PITCH + first + part
                    load_vector(values[part : part + 4], sums, at)
                if options & ADD_BIAS:
                    for e in range(width):
                        values[e] += load(bias, k + e)
                row, w = divided(pixel, W)
                number, h = divided(row, H)
                at = np.int64(number) * y_n + (2 * h + tap // 2) * y_p + (2 * w + tap % 2) * y_q
                if options & VECTORS:
                    store_vector(y, at + k, values)
                else:
                    for e in range(width):
                        store(y, at + (k + e) * y_k, values[e])

    return collect, write, shape.m * PITCH


@functools.cache
def kernel_for(shape, itemsize, mode, channels_last):
    """The `Kernel` of these choices, made once."""
    TILE_M, TILE_N, N_STAGES = shape.m, shape.n, shape.n_stages
    source = "by_k" if channels_last else "by_row"
    a_tile, b_tile = (
        tile(side, K_BYTES, itemsize, shape.n_threads, how)
        for side, how in ((TILE_M, source), (TILE_N, "by_row"))
    )
    WARP_M, WARP_N, WARPS_N = TILE_M // shape.warps_m, TILE_N // shape.warps_n, shape.warps_n
    A_SIZE, STAGE, TILE_K = a_tile.size, a_tile.size + b_tile.size, a_tile.k_size
    A_ROW = a_tile.pitch if channels_last else 1
    N_SUMS = WARP_M * WARP_N // 32
    part_of_a, part_of_b = a_tile.fetch_part, b_tile.fetch_part
    first_a, first_b, next_a, next_b = (
        a_tile.first, b_tile.first, a_tile.following, b_tile.following,
    )  # fmt: skip
    AHEAD, _ = mainloop.timing(mode, N_STAGES)

    @cuda.jit(device=True)
    def fetch(part, cache, work):
        a, b, of_a, of_b, to = work
        part_of_a(part, cache, to, a, of_a)
        part_of_b(part, cache, to + A_SIZE, b, of_b)

    loads = (
        fragments.load_a(a_tile, source, itemsize), fragments.load_b(b_tile, "by_row", itemsize)
    )  # fmt: skip
    pipeline = mainloop.multiply(WARP_M, WARP_N, loads, mode, N_STAGES, fetch)
    begin, advance = pipeline.begin, pipeline.advance
    WORDS_A, WORDS_B, WORDS_C, WORDS_D = pipeline.n_words
    collect, write, n_results = (_channels_last if channels_last else _planar)(shape)

    @cuda.jit(launch_bounds=(shape.n_threads, shape.min_blocks))
    def upsample2x_kernel(
        x, weight, bias, y, n_rows, C, H, W, K, x_row, x_k, y_n, y_k, y_p, y_q, options
    ):
        # Blocks of the same pixels run at the same time: their columns come first. `n_rows`, of
        # pixels, are those of an image; channels-last, those of all images.
        allow_next_kernel()
        wait_for_previous_kernel()
        cache = dynamic_shared(x)
        acc = cuda.local.array(N_SUMS, np.float32)
        for r in range(N_SUMS):
            acc[r] = ZERO
        words = (
            cuda.local.array(WORDS_A, np.uint32), cuda.local.array(WORDS_B, np.uint32),
            cuda.local.array(WORDS_C, np.uint32), cuda.local.array(WORDS_D, np.uint32),
        )  # fmt: skip
        tiles_n = (4 * K + TILE_N - 1) // TILE_N
        tiles_m = (n_rows + TILE_M - 1) // TILE_M
        block = np.int64(cuda.blockIdx.x)
        n, block = block % tiles_n * TILE_N, block // tiles_n
        m, image = block % tiles_m * TILE_M, block // tiles_m
        k = image * C  # as if all images had their channels one after another; else it is 0
        of_a = first_a(m, n_rows, x_row, k, k + C, x_k)
        of_b = first_b(n, 4 * K, 1, 0, C, 4 * K)
        for ahead in range(AHEAD):
            for part in range(PARTS):
                fetch(part, cache, (x, weight, of_a, of_b, ahead * STAGE))
            of_a, of_b = next_a(of_a), next_b(of_b)
            end_group()
        warp, lane = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        row, col = warp // WARPS_N * WARP_M, warp % WARPS_N * WARP_N
        a_base, b_base, at, to = row * A_ROW, A_SIZE + col, 0, AHEAD % N_STAGES * STAGE
        wait_for_groups_but(AHEAD - 1)
        cuda.syncthreads()
        begin(words, cache, a_base, b_base, lane)
        for _ in range((C + TILE_K - 1) // TILE_K):
            following = at + STAGE if at < (N_STAGES - 1) * STAGE else 0
            advance(
                acc, words, cache, at + a_base, at + b_base, following + a_base,
                following + b_base, lane, (x, weight, of_a, of_b, to),
            )  # fmt: skip
            of_a, of_b = next_a(of_a), next_b(of_b)
            at, to = following, to + STAGE if to < (N_STAGES - 1) * STAGE else 0
        wait_for_groups_but(0)
        cuda.syncthreads()  # nobody reads the buffers any more
        sums = cuda.shared.array(0, np.float32)  # the same memory
        collect(sums, acc, row, col, lane)
        cuda.syncthreads()
        write(sums, bias, y, m, n, image, n_rows, H, W, K, y_n, y_k, y_p, y_q, options)

    shared_bytes = max(STAGE * itemsize * N_STAGES, n_results * 4)
    return Kernel(upsample2x_kernel, shape, shared_bytes)


def run(problem, x, weight, bias, y, precision):
    """y of x and weight, both in the problem's format; y may have any strides."""
    p, itemsize = problem, x.dtype.itemsize
    mode = "narrow" if itemsize == 2 else "tf32" if precision == "tf32" else "split"
    n_images, n_rows = (1, p.N * p.H * p.W) if p.channels_last else (p.N, p.H * p.W)
    found = chosen(p, n_images, n_rows, itemsize, mode, chip_of(x))
    memory, strides = whole_memory(y)
    fits = _fits(p, y, strides)
    if fits and warpgroups.fault(p, (x, weight, y), chip_of(x)[0]) is None:
        warpgroups.forward(p, x, weight, bias, memory, strides)
        return
    options = (ADD_BIAS if bias is not None else 0) + (VECTORS if fits else 0)
    x_steps = (p.C, 1) if p.channels_last else (1, n_rows)
    launch(
        found.kernel, _n_blocks(found.shape, n_images, n_rows, p.K), found.shape.n_threads,
        x, weight, weight if bias is None else bias, memory, n_rows, p.C, np.int32(p.H),
        np.int32(p.W), np.int32(p.K), *x_steps, *strides, options,
        shared_bytes=found.shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def finds_dx(problem, dy, weight, dx):
    """find(problem, dy, weight, dx, precision) of what takes the problem; None where nothing does.
    """
    capability = chip_of(dy)[0]
    if fault(problem, (dx, weight), capability) is not None:
        return None
    if warpgroups.fault(problem, (dy, weight, dx), capability) is None:
        return warpgroups.backward
    return packed.backward if packed.fault(problem, (dy, weight, dx)) is None else None


def dx_kernels():
    """All that these launch."""
    return *warpgroups.dx_kernels(), packed.pack_kernel, *gemm.FORWARD[gemm.FORWARD.auto[0]].kernels


def chosen(problem, n_images, n_rows, itemsize, mode, chip):
    """The `Kernel` of the larger tile, where that makes enough blocks and fits; else the other."""
    large, small = SHAPES[mode]
    found = kernel_for(large, itemsize, mode, problem.channels_last)
    if _n_blocks(large, n_images, n_rows, problem.K) >= LARGE_FROM:
        if found.shared_bytes <= chip[1]:
            return found
    return kernel_for(small, itemsize, mode, problem.channels_last)


#: What chooses a kernel for y, and for dx.
DECIDE_Y = fault, chosen, warpgroups.fault
DECIDE_DX = fault, finds_dx, warpgroups.fault, packed.fault


def _n_blocks(shape, n_images, n_rows, K):
    return n_images * math.ceil(n_rows / shape.m) * math.ceil(4 * K / shape.n)


def _fits(problem, y, strides):
    """Whether 16 bytes of y lie together, on a boundary, wherever a thread stores them."""
    width = VECTOR_BYTES // y.dtype.itemsize
    y_n, y_k, y_p, y_q = strides
    together, others = (y_k, (y_n, y_p, y_q)) if problem.channels_last else (y_q, (y_n, y_k, y_p))
    if not problem.channels_last and 2 * problem.W % width:
        return False  # a thread's pixels may be of two rows
    aligned = not arrays.address_of(y) % VECTOR_BYTES
    return together == 1 and aligned and not any(step % width for step in others)


def kernels():
    """All that there are."""
    for mode, shapes in SHAPES.items():
        for shape in shapes:
            for last in (False, True):
                yield kernel_for(shape, 2 if mode == "narrow" else 4, mode, last).kernel
    yield from warpgroups.forward_kernels()


def specialisations(dtypes):
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for mode, shapes in SHAPES.items():
        for dtype in dtypes[1:] if mode == "narrow" else dtypes[:1]:
            for shape in shapes:
                for last, layout in ((False, "contiguous"), (True, "channels-last")):
                    kernel = kernel_for(shape, 2 if mode == "narrow" else 4, mode, last).kernel
                    name = f"upsample2x {mode} {shape.m}x{shape.n} {layout} {dtype}"
                    numbers = ["int64"] * 2 + ["int32"] * 3 + ["int64"] * 7
                    yield name, kernel, [(dtype, 1)] * 4 + numbers
    yield from warpgroups.specialisations(dtypes)
    yield from packed.specialisations(dtypes)
