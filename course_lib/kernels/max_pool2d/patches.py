"""Kernels of the rung `vectorised` for contiguous images and the windows of most networks.

A thread makes a *patch*, in registers, without shared memory and barriers. Forward, a patch is
`across` neighbouring outputs of `rows` rows; backward, the dx that lie under as many windows:
rows·stride rows of across·stride columns. Patches are counted through, column by column, row by
row, plane by plane, a thread for each.

Up to 16 bytes are moved at a time. The columns of x (of dx) that belong to a patch begin on a
multiple of that, and the image is as wide as its windows' strides; some columns of the neighbours
are needed too. For other images there are `columns` and, backward, kernels that are not `aligned`:
every element goes by itself, and `across` is 1.

Offsets within a plane are int32, which numba would widen with every operation: hence the casts.
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
    lanes,
    load_words,
    lowest_word,
    ordinary,
    select_bytes,
    store_floats,
    store_words,
)


@cuda.jit(device=True)
def place_of_patch(i, columns, column_divider, column_shift, groups, group_divider, group_shift):
    """(plane, group of rows, column) of patch i."""
    line = divided_by(i, column_divider, column_shift)
    plane = divided_by(line, group_divider, group_shift)
    return plane, np.int32(line - plane * groups), np.int32(i - line * columns)


@functools.cache
def forward_kernel(window, across, rows):
    """The kernel for a `Fixed` window: patches of rows×across outputs, in vectors."""
    kernel, stride, padding = window
    n_places, n_rows = kernel * kernel, stride * (rows - 1) + kernel
    core, after = stride * across, max(kernel - stride - padding, 0)
    n_words = core + 2  # a row of x, between two words for the neighbours' columns

    @cuda.jit(device=True)
    def load_row(words, x, at, w, W):
        """The columns of one row of x that the patch needs; w, at x[at], is its core's first."""
        load_words(words, 1, x, at, core)
        if padding and w > 0:
            load_words(words, 0, x, at - 1, 1)
        if after and np.int32(w + core) < W:
            load_words(words, 1 + core // lanes(x), x, at + core, 1)

    @cuda.jit(device=True)
    def tap(words, x, out, kw):
        """Column kw of the windows of outputs `out` and, in a second lane, `out` + 1."""
        first = stride * out + kw - padding
        if lanes(x) == 1:
            return words[1 + first]
        second = first + stride if across > 1 else first
        if second == first + 1 and first & 1 == 0:
            return words[1 + (first >> 1)]
        low = 0x32 if first & 1 else 0x10
        high = 0x7600 if second & 1 else 0x5400
        return select_bytes(words[1 + (first >> 1)], words[1 + (second >> 1)], high | low)

    @cuda.jit(device=True)
    def pack_places(x, packed, ats):
        """The places of a row of outputs, a byte each."""
        if across == 1:
            packed[0] = ats[0]
        elif across == 2:
            second = 0 if lanes(x) == 2 else 1
            packed[0] = select_bytes(ats[0], ats[second], 0x60 if lanes(x) == 2 else 0x40)
        else:
            for k in range(across // 4):
                packed[k] = packed_places(x, ats, k * (4 // lanes(x)))

    @cuda.jit(device=True)
    def write_row(y, indices, at, words, x, base, h, w, H, W, OW, relu):
        """A row of outputs; the first window begins at (h, w) and in words[0]."""
        values = cuda.local.array(n_places, np.uint32)
        best, ats = cuda.local.array(across, np.uint32), cuda.local.array(across, np.uint32)
        packed, fine = cuda.local.array(2, np.uint32), True
        n = max(across // lanes(x), 1)
        for word in range(n):
            for kh in range(kernel):
                for kw in range(kernel):
                    values[kh * kernel + kw] = tap(words[kh], x, word * lanes(x), kw)
            best[word], ats[word] = largest_and_place(x, values, n_places)
            fine = fine & ordinary(x, best[word])
        if relu:
            apply_relu(x, best, ats, n)
        store_words(y, at, best, across)
        if fine:
            pack_places(x, packed, ats)
            store_words(indices, at, packed, across)
        else:
            out, n = 0, min(across, OW)  # all; a constant would be unrolled, but this is rare
            while out < n:
                indices[at + out] = place_in_window(x, base, 1, h, w, H, W, kernel, relu)
                out, w = out + 1, np.int32(w + stride)

    @cuda.jit
    def patch_kernel(
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
            top, w = np.int32(group * (rows * stride) - padding), np.int32(column * core)
            base = np.int64(plane) * (H * W)
            words = cuda.local.array((n_rows, n_words), np.uint32)
            wait_for_previous_kernel()
            for r in range(n_rows):
                for k in range(n_words):
                    words[r, k] = lowest_word(x)
                h = np.int32(top + r)
                if (padding == 0 or h >= 0) and h < H:
                    load_row(words[r], x, base + np.int32(h * W + w), w, W)
            w = np.int32(w - padding)
            for r in range(rows):
                row = np.int32(group * rows + r)
                if row < OH:
                    at = np.int64(plane) * (OH * OW) + np.int32(row * OW + column * across)
                    h = np.int32(top + r * stride)
                    write_row(y, indices, at, words[r * stride :], x, base, h, w, H, W, OW, relu)

    return patch_kernel


@functools.cache
def backward_kernel(window, across, rows, aligned):
    """The kernel for a `Fixed` window: patches of dx under rows×across windows."""
    kernel, stride, padding = window
    first, last = window.first, window.last
    reach, core = last - first + 1, stride * across
    n_rows, width, n_bytes = rows + reach - 1, across + reach - 1, max(across, 4) // 4
    n_words, n_packed = across + 2, n_bytes + 2  # the last two for a neighbour on either side

    @cuda.jit(device=True)
    def load_windows(words, packed, dy, indices, at, column, OW):
        """dy and the indices of a row of windows, of which the patch's own begin at `at`."""
        if aligned or column < OW:  # no window may begin as far to the right as dx reaches
            load_words(words, 0, dy, at, across)
            load_words(packed, 0, indices, at, across)
        if first and column > 0:
            load_words(words, across, dy, at - 1, 1)
            load_words(packed, n_bytes, indices, at - 1, 1)
        if last and np.int32((column + 1) * across) < OW:
            load_words(words, across + 1, dy, at + across, 1)
            load_words(packed, n_bytes + 1, indices, at + across, 1)

    @cuda.jit(device=True)
    def unpack(values, places, dy, words, packed):
        """dy as float32 and the index of every window of a row, the neighbours' included."""
        n = lanes(dy)
        for k in range(across):
            values[k - first] = as_float(dy, words[k // n], k % n)
            places[k - first] = byte_of(packed, k)
        if first:
            values[0], places[0] = as_float(dy, words[across], 0), packed[n_bytes]
        if last:
            values[width - 1] = as_float(dy, words[across + 1], 0)
            places[width - 1] = packed[n_bytes + 1]

    @cuda.jit(device=True)
    def sum_of(values, places, row, col):
        """dx at (row, col) of the patch: dy of the windows whose index it is, in their order."""
        total, found = ZERO, False
        for down in range(reach):
            kh = row % stride - stride * (down + first) + padding
            for over in range(reach):
                kw = col % stride - stride * (over + first) + padding
                if kh >= 0 and kh < kernel and kw >= 0 and kw < kernel:
                    r, j = row // stride + down, col // stride + over
                    hit = places[r, j] == np.uint32(kh * kernel + kw)
                    if found:
                        total = total + values[r, j] if hit else total
                    else:
                        total, found = values[r, j] if hit else ZERO, True
        return total

    @cuda.jit(device=True)
    def write_row(dx, base, values, places, row, h, w, H, W):
        sums = cuda.local.array(core, np.float32)
        if h < H:
            for col in range(core):
                sums[col] = sum_of(values, places, row, col)
            at = base + np.int32(h * W + w)
            if aligned:
                store_floats(dx, at, sums, 0, core)
            else:
                for col in range(core):
                    if np.int32(w + col) < W:
                        store_floats(dx, at + col, sums, col, 1)

    @cuda.jit
    def patch_backward_kernel(
        dy, indices, dx, n_patches, columns, column_divider, column_shift, groups, group_divider,
        group_shift, H, W, OH, OW,
    ):  # fmt: skip
        allow_next_kernel()
        H, W, OH, OW = np.int32(H), np.int32(W), np.int32(OH), np.int32(OW)
        i = np.int32(cuda.blockIdx.x * cuda.blockDim.x + cuda.threadIdx.x)
        if i < n_patches:
            plane, group, column = place_of_patch(
                i, columns, column_divider, column_shift, groups, group_divider, group_shift
            )
            words = cuda.local.array((n_rows, n_words), np.uint32)
            packed = cuda.local.array((n_rows, n_packed), np.uint32)
            values = cuda.local.array((n_rows, width), np.float32)
            places = cuda.local.array((n_rows, width), np.uint32)
            wait_for_previous_kernel()
            base = np.int64(plane) * (OH * OW)
            for r in range(n_rows):
                for k in range(n_words):
                    words[r, k] = np.uint32(0)
                for k in range(n_packed):
                    packed[r, k] = np.uint32(0xFFFFFFFF)  # no window has such an index
                row = np.int32(group * rows + first + r)
                if row >= 0 and row < OH:
                    at = base + np.int32(row * OW + column * across)
                    load_windows(words[r], packed[r], dy, indices, at, column, OW)
            for r in range(n_rows):
                unpack(values[r], places[r], dy, words[r], packed[r])
            base, w = np.int64(plane) * (H * W), np.int32(column * core)
            h = np.int32(group * (rows * stride))
            # Written out, because a compiler leaves so large a loop a loop.
            write_row(dx, base, values, places, 0, h, w, H, W)
            if rows * stride > 1:
                write_row(dx, base, values, places, 1, np.int32(h + 1), w, H, W)
            if rows * stride > 2:
                write_row(dx, base, values, places, 2, np.int32(h + 2), w, H, W)
                write_row(dx, base, values, places, 3, np.int32(h + 3), w, H, W)

    return patch_backward_kernel
