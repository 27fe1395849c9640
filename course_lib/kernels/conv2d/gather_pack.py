"""What `gather` reads: channels side by side in whole vectors, and weights by residue and column.

One launch packs both. Channels that fill up the last vector are zeros. Images that have whole
vectors of channels already are transposed as elsewhere, or left as they are.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.transpose import (
    BLOCK_SIZE,
    SIDE,
    SQUARE,
    load_rounded,
    transpose,
    transpose_rounded,
)
from course_lib.kernels.conv2d.gather_taps import axes_of
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

AS_IT_IS, TRANSPOSED, PADDED_PLANES, PADDED_PIXELS = 0, 1, 2, 3


def _packing(load_one, transpose):
    @cuda.jit(device=True)
    def pad_channels(i, x, packed, n_images, n_channels, plane, by_pixel):
        """The i-th vector of `packed` (images, pixels, channels); neighbours read side by side."""
        width = np.int32(vector_width(x))
        n_vectors = np.int32((n_channels + width - 1) // width)
        n_pixels = np.int32(n_images * plane)
        if i >= np.int64(n_pixels) * n_vectors:
            return
        if by_pixel:
            pixel, vector = divided(np.int32(i), n_vectors)
            at, step = np.int64(pixel) * n_channels, np.int64(1)
        else:
            vector, pixel = divided(np.int32(i), n_pixels)
            image, rest = divided(pixel, plane)
            at, step = np.int64(image) * n_channels * plane + rest, np.int64(plane)
        values = cuda.local.array(MAX_WIDTH, np.float32)
        for q in range(width):
            c = np.int32(vector * width + q)
            values[q] = load_one(x, at + c * step) if c < n_channels else ZERO
        store_vector(packed, (np.int64(pixel) * n_vectors + vector) * width, values)


    @cuda.jit(device=True)
    def pack_weights(i, weight, tiles, n_channels, steps, z):
        """The i-th vector of tiles[residue, column, tap of the residue, channel].

        A residue has room for the most terms. n_channels: of the source as it was; steps: how far
        apart weights of neighbouring columns, channels and taps lie.
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
        r, s = divided(tap, right[2])
        r, s = down[1] + r * z.apart_h, right[1] + s * z.apart_w
        at = np.int64(column) * steps[0] + (r * z.taps_w + s) * steps[2]
        values = cuda.local.array(MAX_WIDTH, np.float32)
        for q in range(width):
            channel = np.int64(c) * width + q
            values[q] = load_one(weight, at + channel * steps[1]) if channel < n_channels else ZERO
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
        x, packed, way, n_images, n_channels, plane, whole, n_first, weight, tiles, column_step,
        channel_step, tap_step, z,
    ):  # fmt: skip
        """`pack_images` by the first `n_first` blocks, and `pack_weights` by the others.

        x, packed, way, n_images, n_channels, plane, whole  see `pack_images`
        weight, tiles, column_step, channel_step, tap_step, z  see `pack_weights`
        """
        square = cuda.shared.array(SQUARE, np.float32, alignment=VECTOR_BYTES)
        allow_next_kernel()
        wait_for_previous_kernel()
        block = np.int64(cuda.blockIdx.x)
        if block < n_first:
            pack_images(square, block, x, packed, way, n_images, n_channels, plane, whole)
        else:
            i = (block - n_first) * BLOCK_SIZE + cuda.threadIdx.x
            pack_weights(i, weight, tiles, n_channels, (column_step, channel_step, tap_step), z)

    return pack_kernel, pack_two_kernel


pack_kernel, pack_two_kernel = _packing(load, transpose)
pack_rounded_kernel, _ = _packing(load_rounded, transpose_rounded)


def source_and_weights(problem, z, steps, source, weight):
    """Both as `gather_kernel` reads them; one launch packs what has to be packed."""
    numbers, n_first = _images(problem, source)
    tiles, n_more = weight, 0
    in_order = steps == (z.most_terms, 1, z.n_channels) and z.n_residues == 1
    in_order = in_order and problem.mode == "half" and arrays.begins_on(VECTOR_BYTES, weight, 0)
    if not in_order:
        tiles = arrays.empty((z.n_residues * z.n_columns * z.most_terms,), like=weight)
        n_more = _blocks(arrays.size_of(tiles) * weight.dtype.itemsize)
    kernel = pack_kernel if problem.mode == "half" else pack_rounded_kernel
    x = numbers[:2] if n_first else (weight, tiles)
    _launch(kernel, n_first, n_more, *x, *numbers[2:], n_first, weight, tiles, *steps, z)
    return numbers[1], tiles


def x_and_dy(problem, x, dy):
    """The same of what `gather_dweight_kernel` reads."""
    (numbers, n_first), (others, n_more) = _images(problem, x), _images(problem, dy)
    others = *others[:3], *others[4:]
    _launch(pack_two_kernel, n_first, n_more, *numbers, n_first, *others)
    return numbers[1], others[1]


def _images(problem, source):
    """(what `pack_images` takes, blocks): none where the source is read as it is."""
    (N, C, H, W), last = source.shape, problem.channels_last
    plane, width = H * W, VECTOR_BYTES // source.dtype.itemsize
    aligned, whole = arrays.begins_on(VECTOR_BYTES, source, 0), C % width == 0
    packed, way, n_blocks = source, AS_IT_IS, 0
    if not (whole and aligned and (last or plane == 1) and problem.mode == "half"):
        packed = arrays.empty((N * plane * math.ceil(C / width) * width,), like=source)
        way = PADDED_PIXELS if last else PADDED_PLANES
        n_blocks = _blocks(arrays.size_of(packed) * source.dtype.itemsize)
        if whole and not last:
            way, n_blocks = TRANSPOSED, N * math.ceil(C / SIDE) * math.ceil(plane / SIDE)
    numbers = source, packed, *map(np.int32, (way, N, C, plane)), aligned and plane % width == 0
    return numbers, n_blocks


def _blocks(n_bytes):
    return math.ceil(n_bytes / VECTOR_BYTES / BLOCK_SIZE)


def _launch(kernel, n_first, n_more, *arguments):
    if n_first + n_more:
        launch(kernel, n_first + n_more, BLOCK_SIZE, *arguments, flat=True, overlap=True)
