"""Kernels of the rung `vectorised` for contiguous images of any width, and fixed windows.

What `patches` reads as vectors has no boundary to begin on here. A thread takes one column of the
output, `rows` rows of it, and every element goes by itself: neighbouring threads read and write
neighbouring columns. Rows that two windows share are read once, and half-width outputs are compared
two rows at a time. The backward kernel, of a column of dx, is for windows of stride 1.
"""

import functools

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.max_pool2d.fixed import (
    NOWHERE,
    apply_relu,
    largest_and_place,
    place_in_window,
)
from course_lib.kernels.max_pool2d.patches import place_of_patch
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    store,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.words import (
    lanes,
    load_words,
    lowest_word,
    ordinary,
    select_bytes,
    store_words,
)


@functools.cache
def forward_kernel(window, rows):
    """The kernel for a `Fixed` window, and 1, 2 or 4 rows a thread."""
    kernel, stride, padding = window
    n_places, n_rows = kernel * kernel, stride * (rows - 1) + kernel

    @cuda.jit(device=True)
    def load_column(words, x, base, top, w, H, W):
        """words[r, k]: row top + r of x, column w + k; -inf outside of the image."""
        for r in range(n_rows):
            h = np.int32(top + r)
            for k in range(kernel):
                col = np.int32(w + k)
                words[r, k] = lowest_word(x)
                if h >= 0 and h < H and col >= 0 and col < W:
                    load_words(words[r], k, x, base + np.int32(h * W + col), 1)

    @cuda.jit(device=True)
    def gather(values, x, words, r):
        """The elements of the windows of row r and, in a second lane, of the row after."""
        for kh in range(kernel):
            for kw in range(kernel):
                word = words[r * stride + kh, kw]
                if lanes(x) == 2 and rows > 1:
                    word = select_bytes(word, words[(r + 1) * stride + kh, kw], 0x5410)
                values[kh * kernel + kw] = word

    @cuda.jit(device=True)
    def write(y, indices, at, best, ats, fine, x, base, h, w, H, W, relu):
        """The output in the first lane of best[0], at y[at]; and its index."""
        if relu:
            apply_relu(x, best, ats, 1)
        store_words(y, at, best, 1)
        if fine:
            store_words(indices, at, ats, 1)
        else:
            indices[at] = place_in_window(x, base, 1, h, w, H, W, kernel, relu)

    @cuda.jit
    def column_kernel(
        x, y, indices, n_patches, columns, column_divider, column_shift, groups, group_divider,
        group_shift, H, W, OH, OW, relu,
    ):  # fmt: skip
        allow_next_kernel()
        H, W, OH, OW = np.int32(H), np.int32(W), np.int32(OH), np.int32(OW)
        i = np.int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if i < n_patches:
            plane, group, column = place_of_patch(
                i, columns, column_divider, column_shift, groups, group_divider, group_shift
            )
            top, w = np.int32(group * (rows * stride) - padding), np.int32(column * stride)
            w = np.int32(w - padding)
            base, start = np.int64(plane) * (H * W), np.int64(plane) * (OH * OW)
            words = cuda.local.array((n_rows, kernel), np.uint32)
            values = cuda.local.array(n_places, np.uint32)
            best, ats = cuda.local.array(1, np.uint32), cuda.local.array(1, np.uint32)
            fine = True
            wait_for_previous_kernel()
            load_column(words, x, base, top, w, H, W)
            for r in range(rows):
                row, h = np.int32(group * rows + r), np.int32(top + r * stride)
                lane = r & 1 if lanes(x) == 2 else 0
                if lane == 0:
                    gather(values, x, words, r)
                    best[0], ats[0] = largest_and_place(x, values, n_places)
                    if lanes(x) == 2 and np.int32(row + 1) >= OH:  # nothing is in the other lane
                        best[0] = select_bytes(best[0], best[0], 0x1010)
                    fine = ordinary(x, best[0])
                else:
                    best[0] = select_bytes(best[0], best[0], 0x3232)
                    ats[0] = select_bytes(ats[0], ats[0], 0x3232)
                if row < OH:
                    place = start + np.int32(row * OW + column)
                    write(y, indices, place, best, ats, fine, x, base, h, w, H, W, relu)

    return column_kernel


@functools.cache
def backward_kernel(window, rows):
    """The kernel for a `Fixed` window of stride 1, and `rows` rows of dx a thread."""
    kernel, _, padding = window
    before = kernel - 1 - padding  # rows, and columns, of windows above an element, and left of it

    @cuda.jit
    def column_backward_kernel(
        dy, indices, dx, n_patches, columns, column_divider, column_shift, groups, group_divider,
        group_shift, H, W, OH, OW,
    ):  # fmt: skip
        """dx from the windows that reach it, in their order.

        dy, indices  N·C·OH·OW, contiguous; indices in the window, uint8
        dx           N·C·H·W, contiguous; others as of `patches`
        """
        allow_next_kernel()
        H, W, OH, OW = np.int32(H), np.int32(W), np.int32(OH), np.int32(OW)
        i = np.int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if i < n_patches:
            plane, group, column = place_of_patch(
                i, columns, column_divider, column_shift, groups, group_divider, group_shift
            )
            base, top = np.int64(plane) * (OH * OW), np.int32(group * rows)
            sums = cuda.local.array(rows, np.float32)
            for k in range(rows):
                sums[k] = ZERO
            wait_for_previous_kernel()
            for r in range(rows + kernel - 1):
                h = np.int32(top - before + r)
                for c in range(kernel):
                    w = np.int32(column - before + c)
                    inside = h >= 0 and h < OH and w >= 0 and w < OW
                    at = base + np.int32(h * OW + w) if inside else base
                    gradient, place = load(dy, at), indices[at] if inside else NOWHERE
                    for k in range(rows):
                        kh = kernel - 1 - r + k  # which of the window's rows this is
                        if kh >= 0 and kh < kernel and place == kh * kernel + kernel - 1 - c:
                            sums[k] += gradient
            for k in range(rows):
                if np.int32(top + k) < H:
                    at = np.int64(plane) * (H * W) + np.int32((top + k) * W + column)
                    store(dx, at, sums[k])

    return column_backward_kernel
