"""What `gather` reads: channels side by side in whole vectors, and weights by residue and column.

One launch packs both. Channels that fill up the last vector are zeros. Images that have whole
vectors of channels already are transposed as elsewhere, or left as they are.

float32 are packed in three parts, which stand one after the other at each pixel: big, big and rest
of images, big, rest and big of weights. A number is its rounding to TF32, big, and the rest, so the
sum over all three is that of big·big + big·rest + rest·big, by products in TF32.
"""

import math
from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.transpose import (
    BLOCK_SIZE,
    PITCH,
    SIDE,
    SQUARE,
    load_rounded,
    transpose,
    transpose_rounded,
)
from course_lib.kernels.conv2d.gather_taps import PARTS, axes_of, packed_channels, window_of
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.matrix import round_tf32, subtract_words
from course_lib.runtime.intrinsics.words import as_float, load_words

AS_IT_IS, TRANSPOSED, PADDED_PLANES, PADDED_PIXELS, SQUARES = 0, 1, 2, 3, 4
AT_ONCE = 4  # vectors of a pixel that a thread packs from planes, all of them
ROWS, LOADS = BLOCK_SIZE // SIDE, 8  # of a square that are loaded at a time; loads in flight


class Steps(NamedTuple):
    """How weights lie: from a column, a channel, a tap or a group to the next.

    columns, channels  of a group
    """

    column: int
    channel: int
    tap: int
    group: int
    columns: np.int32
    channels: np.int32


@cuda.jit(device=True)
def load_rest(x, i):
    """What rounding x[i], a float32, to TF32 leaves; rounded itself."""
    word = cuda.local.array(1, np.uint32)
    load_words(word, 0, x, np.int64(i), 1)
    return as_float(x, round_tf32(subtract_words(word[0], round_tf32(word[0]))), 0)


def _packing(load_one, transpose, is_split=False):
    """The kernels for numbers as `load_one` reads them; `is_split`, in three parts."""
    N_PARTS, load_whole = (PARTS, load) if is_split else (1, load_one)

    @cuda.jit(device=True)
    def pad_vector(x, at, step, packed, pixel, vector, n_vectors, n_channels):
        """A vector of `packed` (images, pixels, channels), whose channel c is x[at + c * step]."""
        width = np.int32(vector_width(x))
        values = cuda.local.array(MAX_WIDTH, np.float32)
        for q in range(width):
            c = np.int32(vector * width + q)
            values[q] = load_one(x, at + c * step) if c < n_channels else ZERO
        place = (np.int64(pixel) * N_PARTS * n_vectors + vector) * width
        store_vector(packed, place, values)
        if is_split:
            store_vector(packed, place + n_vectors * width, values)
            for q in range(width):
                c = np.int32(vector * width + q)
                values[q] = load_rest(x, at + c * step) if c < n_channels else ZERO
            store_vector(packed, place + 2 * n_vectors * width, values)

    @cuda.jit(device=True)
    def pad_channels(i, x, packed, n_images, n_channels, plane, by_pixel):
        """The i-th vector of pixels, or all vectors of the i-th; neighbours read side by side."""
        n_vectors = np.int32((n_channels + vector_width(x) - 1) // vector_width(x))
        n_items = np.int64(n_images) * plane * (n_vectors if by_pixel else 1)
        if by_pixel and i < n_items:
            pixel, vector = divided(np.int32(i), n_vectors)
            at = np.int64(pixel) * n_channels
            pad_vector(x, at, np.int64(1), packed, pixel, vector, n_vectors, n_channels)
        elif i < n_items:
            image, rest = divided(np.int32(i), plane)
            at = np.int64(image) * n_channels * plane + rest
            for vector in range(AT_ONCE):
                if vector < n_vectors:
                    pad_vector(x, at, np.int64(plane), packed, i, vector, n_vectors, n_channels)

    @cuda.jit(device=True)
    def pad_square(square, block, x, packed, n_images, n_channels, plane):
        """SIDE channels of SIDE pixels of any images, by shared memory: all runs are long."""
        width = np.int32(vector_width(x))
        n_vectors = np.int32((n_channels + width - 1) // width)
        n_pixels = np.int32(n_images * plane)
        pixel, channel = divided(np.int32(block), np.int32((n_channels + SIDE - 1) // SIDE))
        pixel, channel = np.int32(pixel * SIDE), np.int32(channel * SIDE)
        row, col = np.int32(cuda.threadIdx.x // SIDE), np.int32(cuda.threadIdx.x % SIDE)
        image, rest = divided(np.int32(pixel + col), plane)
        at = (np.int64(image) * n_channels + channel + row) * plane + rest
        step = np.int64(plane) * ROWS
        n_left = np.int32(n_channels - channel - row) if pixel + col < n_pixels else np.int32(0)
        loaded = cuda.local.array(LOADS, np.float32)
        values = cuda.local.array(MAX_WIDTH, np.float32)
        for first in range(0, SIDE, ROWS * LOADS):
            for u in range(LOADS):  # all on their way before the first is needed
                loaded[u] = load_whole(x, at + u * step) if first + u * ROWS < n_left else ZERO
            for u in range(LOADS):
                square[(first + row + u * ROWS) * PITCH + col] = loaded[u]
            at += LOADS * step
        cuda.syncthreads()
        for i in range(cuda.threadIdx.x * width, SIDE * SIDE, BLOCK_SIZE * width):
            line, first = np.int32(i // SIDE), np.int32(i % SIDE)
            if pixel + line >= n_pixels or channel + first >= n_channels:
                continue
            place = np.int64(pixel + line) * N_PARTS * n_vectors * width + channel + first
            for q in range(width):
                from_square = (first + q) * PITCH + line
                values[q] = load_one(square, from_square) if is_split else square[from_square]
            store_vector(packed, place, values)
            if is_split:
                store_vector(packed, place + n_vectors * width, values)
                for q in range(width):
                    values[q] = load_rest(square, (first + q) * PITCH + line)
                store_vector(packed, place + 2 * n_vectors * width, values)

    @cuda.jit(device=True)
    def pack_weights(i, weight, tiles, n_channels, steps, z):
        """The i-th vector of tiles[residue, column, tap of the residue, channel].

        A residue has room for the most terms. Where column and channel are of different groups, it
        is 0. n_channels: of the source as it was; steps: the `Steps` of the weight.
        """
        width = np.int32(vector_width(weight))
        line, vector = divided(np.int32(i), np.int32(z.most_terms // width))
        residue, column = divided(line, z.n_columns)
        if residue >= z.step_h * z.step_w:
            return
        down, right = axes_of(residue, z)
        n_vectors = np.int32(z.n_channels // width)
        per_column = np.int32(down[2] * right[2] * n_vectors)
        if vector >= per_column:
            return
        tap, c = divided(vector, n_vectors)
        part, c = divided(c, np.int32(n_vectors // N_PARTS))
        c = np.int32(c + window_of(column, N_PARTS, width, z))
        r, s = divided(tap, right[2])
        r, s = down[1] + r * z.apart_h, right[1] + s * z.apart_w
        group, inside = divided(column, steps.columns)
        at = np.int64(group) * steps.group + np.int64(inside) * steps.column
        at += (r * z.taps_w + s) * steps.tap
        values = cuda.local.array(MAX_WIDTH, np.float32)
        for q in range(width):
            channel, values[q] = np.int32(c * width + q), ZERO
            of_group, inside = divided(channel, steps.channels)
            if channel < n_channels and of_group == group:
                place = at + np.int64(inside) * steps.channel
                values[q] = (
                    load_rest(weight, place) if is_split and part == 1 else load_one(weight, place)
                )
        place = np.int64(residue) * z.n_columns * z.most_terms
        store_vector(tiles, place + (np.int64(column) * per_column + vector) * width, values)

    @cuda.jit(device=True)
    def pack_images(square, block, x, packed, way, n_images, n_channels, plane, whole):
        """A block's part of x, packed as `way` says.

        x       images (n_images, n_channels, plane), or by pixel
        packed  (n_images, plane, channels)
        whole   see `transpose`
        """
        if way == TRANSPOSED:
            transpose(square, block, x, packed, np.int64(n_channels), np.int64(plane), whole)
        elif way == SQUARES:
            pad_square(square, block, x, packed, n_images, n_channels, plane)
        else:
            i = block * BLOCK_SIZE + cuda.threadIdx.x
            pad_channels(i, x, packed, n_images, n_channels, plane, way == PADDED_PIXELS)

    @cuda.jit
    def pack_two_kernel(
        x, packed, way, n_images, n_channels, plane, whole, n_first, other, other_packed, other_way,
        other_channels, other_plane, other_whole,
    ):  # fmt: skip
        """`pack_images` by the first `n_first` blocks, and of as many other images by the rest.

        x, packed, way, n_images, n_channels, plane, whole  see `pack_images`, as of
        other, other_packed, other_way, other_channels, other_plane, other_whole
        """
        square = cuda.shared.array(SQUARE, np.float32, alignment=VECTOR_BYTES)
        allow_next_kernel()
        wait_for_previous_kernel()
        block = np.int64(cuda.blockIdx.x)
        if block < n_first:
            pack_images(square, block, x, packed, way, n_images, n_channels, plane, whole)
        else:
            pack_images(
                square, block - n_first, other, other_packed, other_way, n_images, other_channels,
                other_plane, other_whole,
            )  # fmt: skip

    @cuda.jit
    def pack_kernel(
        x, packed, way, n_images, n_channels, plane, whole, n_first, weight, tiles, steps, z,
    ):  # fmt: skip
        """`pack_images` by the first `n_first` blocks, and `pack_weights` by the others.

        x, packed, way, n_images, n_channels, plane, whole  see `pack_images`
        weight, tiles, steps, z                             see `pack_weights`
        """
        square = cuda.shared.array(SQUARE, np.float32, alignment=VECTOR_BYTES)
        allow_next_kernel()
        wait_for_previous_kernel()
        block = np.int64(cuda.blockIdx.x)
        if block < n_first:
            pack_images(square, block, x, packed, way, n_images, n_channels, plane, whole)
        else:
            i = (block - n_first) * BLOCK_SIZE + cuda.threadIdx.x
            pack_weights(i, weight, tiles, n_channels, steps, z)

    return pack_kernel, pack_two_kernel


pack_kernel, pack_two_kernel = _packing(load, transpose)
pack_rounded_kernel, _ = _packing(load_rounded, transpose_rounded)
pack_split_kernel, _ = _packing(load_rounded, transpose_rounded, is_split=True)
#: By the mode of a `Problem`.
KERNELS = {"half": pack_kernel, "tf32": pack_rounded_kernel, "float32": pack_split_kernel}


def source_and_weights(problem, z, steps, source, weight):
    """Both as `gather_kernel` reads them; one launch packs what has to be packed."""
    numbers, n_first = _images(source, problem.channels_last, problem.mode)
    tiles, n_more = weight, 0
    in_order = steps[:3] == (z.most_terms, 1, z.n_channels) and z.n_residues == problem.groups == 1
    in_order = in_order and problem.mode == "half" and arrays.begins_on(VECTOR_BYTES, weight, 0)
    if not in_order:
        tiles = arrays.empty((z.n_residues * z.n_columns * z.most_terms,), like=weight)
        n_vectors = arrays.size_of(tiles) * weight.dtype.itemsize / VECTOR_BYTES
        n_more = math.ceil(n_vectors / BLOCK_SIZE)
    x = numbers[:2] if n_first else (weight, tiles)
    kernel = KERNELS[problem.mode]
    _launch(kernel, n_first, n_more, *x, *numbers[2:], n_first, weight, tiles, steps, z)
    return numbers[1], tiles


def x_and_dy(problem, x, dy):
    """The same of what `gather_dweight_kernel` and `pixel_sums` read, which rounds by itself."""
    (numbers, n_first), (others, n_more) = (_images(a, problem.channels_last) for a in (x, dy))
    others = *others[:3], *others[4:]
    _launch(pack_two_kernel, n_first, n_more, *numbers, n_first, *others)
    return numbers[1], others[1]


def _images(source, channels_last, mode=None):
    """(what `pack_images` takes, blocks): none where the source is read as it is.

    mode  of products, which float32 are rounded or split for
    """
    N, C, H, W = source.shape
    plane, width = H * W, VECTOR_BYTES // source.dtype.itemsize
    aligned, whole = arrays.begins_on(VECTOR_BYTES, source, 0), C % width == 0
    in_vectors = aligned and plane % width == 0
    packed, way, n_blocks = source, AS_IT_IS, 0
    if not (whole and aligned and (channels_last or plane == 1) and mode in (None, "half")):
        n_channels = packed_channels(C, mode) if mode else math.ceil(C / width) * width
        packed = arrays.empty((N * plane * n_channels,), like=source)
        way, n_items = PADDED_PIXELS, math.ceil(C / width)
        n_blocks = math.ceil(N * plane * n_items / BLOCK_SIZE)
        if not channels_last and whole and in_vectors and mode != "float32":
            way, n_blocks = TRANSPOSED, N * math.ceil(C / SIDE) * math.ceil(plane / SIDE)
        elif not channels_last and n_items <= AT_ONCE:
            way, n_blocks = PADDED_PLANES, math.ceil(N * plane / BLOCK_SIZE)
        elif not channels_last:
            way, n_blocks = SQUARES, math.ceil(N * plane / SIDE) * math.ceil(C / SIDE)
    numbers = source, packed, *map(np.int32, (way, N, C, plane)), in_vectors
    return numbers, n_blocks


def _launch(kernel, n_first, n_more, *arguments):
    if n_first + n_more:
        launch(kernel, n_first + n_more, BLOCK_SIZE, *arguments, flat=True, overlap=True)
