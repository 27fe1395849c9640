"""Kernels of the rung `vectorised` for channels-last images and the windows of most networks.

A thread takes 16 bytes of the channels of a *patch*, in registers: forward, of `tall` outputs, one
below the other; backward, of the pixels of dx under `tall` windows, one below the other, that is
tall·stride rows of stride columns. Neighbouring threads take neighbouring channels, then the next
columns, rows and images. Every pixel must begin on a 16-byte boundary. Neighbouring patches share
elements; those come from the caches.

A kernel is for dtypes of which 16 bytes are `width` elements.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.max_pool2d.fixed import (
    apply_relu,
    byte_of,
    divided_by,
    largest_and_place,
    packed_places,
    place_in_window,
)
from course_lib.runtime.intrinsics import allow_next_kernel, wait_for_previous_kernel
from course_lib.runtime.intrinsics.words import (
    as_float,
    load_words,
    lowest_word,
    ordinary,
    store_floats,
    store_words,
)

WORDS = 4  # in 16 bytes


@cuda.jit(device=True)
def place_of_patch(i, dividers, n_columns, columns, groups):
    """(image, group of rows, column, 16-byte column of channels) of thread i."""
    pixel = divided_by(i, dividers[0], dividers[1])
    line = divided_by(pixel, dividers[2], dividers[3])
    image = divided_by(line, dividers[4], dividers[5])
    group, col = np.int32(line - image * groups), np.int32(pixel - line * columns)
    return image, group, col, np.int32(i - pixel * n_columns)


@functools.cache
def forward_kernel(window, width, tall):
    """The kernel for a `Fixed` window."""
    kernel, stride, padding = window
    n_places, n_rows = kernel * kernel, stride * (tall - 1) + kernel
    n_loaded, step = n_rows * kernel, stride * kernel

    @cuda.jit(device=True)
    def load_rows(words, x, at, h, w, C, H, W):
        """words[word, place]: 16 bytes of channels of each place; at x[at] is pixel (h, w)."""
        loaded = cuda.local.array(WORDS, np.uint32)
        for r in range(n_rows):
            for kw in range(kernel):
                row, col = np.int32(h + r), np.int32(w + kw)
                for k in range(WORDS):
                    loaded[k] = lowest_word(x)
                if row >= 0 and row < H and col >= 0 and col < W:
                    load_words(loaded, 0, x, at + np.int64(np.int32(r * W + kw)) * C, width)
                for k in range(WORDS):
                    words[k, r * kernel + kw] = loaded[k]

    @cuda.jit(device=True)
    def write_output(y, indices, at, words, start, x, base, h, w, C, H, W, relu):
        """The output whose window begins with words[:, start], at y[at]; and its index."""
        best, ats = cuda.local.array(WORDS, np.uint32), cuda.local.array(WORDS, np.uint32)
        packed, fine = cuda.local.array(2, np.uint32), True
        for k in range(WORDS):
            best[k], ats[k] = largest_and_place(x, words[k, start:], n_places)
            fine = fine & ordinary(x, best[k])
        if relu:
            apply_relu(x, best, ats, WORDS)
        store_words(y, at, best, width)
        if fine:
            for k in range(width // 4):
                packed[k] = packed_places(x, ats, k * 2)
            store_words(indices, at, packed, width)
        else:
            k, n = 0, min(width, C)  # all of them; a constant would be unrolled, but this is rare
            while k < n:
                indices[at + k] = place_in_window(x, base + k, C, h, w, H, W, kernel, relu)
                k += 1

    @cuda.jit
    def pixel_patch_kernel(
        x, y, indices, n_patches, n_columns, d0, s0, d1, s1, d2, s2, columns, groups, C, H, W, OH,
        OW, relu,
    ):  # fmt: skip
        allow_next_kernel()
        H, W, OH, OW, C = np.int32(H), np.int32(W), np.int32(OH), np.int32(OW), np.int32(C)
        i = np.int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if i < n_patches:
            image, group, col, column = place_of_patch(
                i, (d0, s0, d1, s1, d2, s2), n_columns, columns, groups
            )
            row = np.int32(group * tall)
            h, w = np.int32(row * stride - padding), np.int32(col * stride - padding)
            words = cuda.local.array((WORDS, n_loaded), np.uint32)
            base = np.int64(image) * (H * W) * C + column * width
            wait_for_previous_kernel()
            load_rows(words, x, base + np.int64(np.int32(h * W + w)) * C, h, w, C, H, W)
            at = (np.int64(image) * (OH * OW) + np.int32(row * OW + col)) * C + column * width
            write_output(y, indices, at, words, 0, x, base, h, w, C, H, W, relu)
            if tall == 2 and np.int32(row + 1) < OH:
                h, at = np.int32(h + stride), at + np.int64(OW) * C
                write_output(y, indices, at, words, step, x, base, h, w, C, H, W, relu)

    return pixel_patch_kernel


@functools.cache
def backward_kernel(window, width, tall):
    """The kernel for a `Fixed` window."""
    kernel, stride, padding = window
    first = window.first
    reach = window.last - first + 1
    n_down, n_packed, n_lanes = tall + reach - 1, width // 4, width // 4
    n_windows = n_down * reach

    @cuda.jit(device=True)
    def load_windows(words, packed, dy, indices, image, row, col, column, C, OH, OW):
        """dy and the indices of the windows that reach a patch, `width` channels of each."""
        for down in range(n_down):
            for over in range(reach):
                number = down * reach + over
                for k in range(WORDS):
                    words[number, k] = np.uint32(0)
                for k in range(n_packed):
                    packed[number, k] = np.uint32(0xFFFFFFFF)  # no window has such an index
                r, c = np.int32(row + first + down), np.int32(col + first + over)
                if r >= 0 and r < OH and c >= 0 and c < OW:
                    at = (np.int64(image) * (OH * OW) + np.int32(r * OW + c)) * C + column * width
                    load_words(words[number], 0, dy, at, width)
                    load_words(packed[number], 0, indices, at, width)

    @cuda.jit(device=True)
    def sum_windows(sums, values, places, r, c):
        """dx of pixel (r, c) of the patch: dy of the windows whose index it is, in their order."""
        found = False
        for down in range(n_down):
            kh = r - stride * (down + first) + padding
            for over in range(reach):
                kw = c - stride * (over + first) + padding
                if kh >= 0 and kh < kernel and kw >= 0 and kw < kernel:
                    i = down * reach + over
                    for k in range(width):
                        hit = places[i, k] == np.uint32(kh * kernel + kw)
                        if found:
                            sums[k] = sums[k] + values[i, k] if hit else sums[k]
                        else:
                            sums[k] = values[i, k] if hit else ZERO
                    found = True

    @cuda.jit(device=True)
    def write_pixel(dx, base, values, places, h, w, r, c, C, H, W):
        sums = cuda.local.array(width, np.float32)
        h, w = np.int32(h + r), np.int32(w + c)
        if h < H and w < W:
            sum_windows(sums, values, places, r, c)
            store_floats(dx, base + np.int64(np.int32(h * W + w)) * C, sums, 0, width)

    @cuda.jit
    def pixel_patch_backward_kernel(
        dy, indices, dx, n_patches, n_columns, d0, s0, d1, s1, d2, s2, columns, groups, C, H, W,
        OH, OW,
    ):  # fmt: skip
        allow_next_kernel()
        H, W, OH, OW, C = np.int32(H), np.int32(W), np.int32(OH), np.int32(OW), np.int32(C)
        i = np.int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if i < n_patches:
            image, group, col, column = place_of_patch(
                i, (d0, s0, d1, s1, d2, s2), n_columns, columns, groups
            )
            words = cuda.local.array((n_windows, WORDS), np.uint32)
            packed = cuda.local.array((n_windows, n_packed), np.uint32)
            values = cuda.local.array((n_windows, width), np.float32)
            places = cuda.local.array((n_windows, width), np.uint32)
            row = np.int32(group * tall)
            wait_for_previous_kernel()
            load_windows(words, packed, dy, indices, image, row, col, column, C, OH, OW)
            for number in range(n_windows):
                for k in range(width):
                    values[number, k] = as_float(dy, words[number, k // n_lanes], k % n_lanes)
                    places[number, k] = byte_of(packed[number], k)
            h, w = np.int32(row * stride), np.int32(col * stride)
            base = np.int64(image) * (H * W) * C + column * width
            # Written out, because a compiler leaves so large a loop a loop.
            write_pixel(dx, base, values, places, h, w, 0, 0, C, H, W)
            if stride == 2:
                write_pixel(dx, base, values, places, h, w, 0, 1, C, H, W)
            if tall * stride > 1:
                write_pixel(dx, base, values, places, h, w, 1, 0, C, H, W)
            if stride == 2:
                write_pixel(dx, base, values, places, h, w, 1, 1, C, H, W)
            if tall * stride > 2:
                write_pixel(dx, base, values, places, h, w, 2, 0, C, H, W)
                write_pixel(dx, base, values, places, h, w, 2, 1, C, H, W)
                write_pixel(dx, base, values, places, h, w, 3, 0, C, H, W)
                write_pixel(dx, base, values, places, h, w, 3, 1, C, H, W)

    return pixel_patch_backward_kernel
