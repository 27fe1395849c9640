"""How `pixel_sums` copies tiles of x and dy: terms and pixels of threads, and which taps meet x."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.mma.tiles import PARTS
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.matrix import copy_part_async

K_BYTES = 128  # of pixels in a tile, were they as wide as an element
BAND = 64  # terms, or channels of dy, of a pixel that threads side by side copy
NO_TAP = 31  # a row or a column of a filter that meets no image
TAP_BITS = 5  # of a row, in front of which a tap's column stands
MOST_LINES, BOTH_LINES = 512, 1024  # of y; of lines and columns together


def rounds(shape, itemsize):
    """Pixels of a tile of which a thread copies something."""
    return K_BYTES // itemsize * (BAND * itemsize // VECTOR_BYTES) // shape.n_threads


def copies(shape, itemsize):
    """(find_terms, find_pixels, go_on, fetch_x, fetch_dy) for blocks of this shape."""
    WIDE, K_SIZE, N_THREADS = VECTOR_BYTES // itemsize, K_BYTES // itemsize, shape.n_threads
    SIDE = BAND // WIDE  # threads side by side
    LINES, A_PITCH, B_PITCH = N_THREADS // SIDE, shape.m + 8, shape.n + 8
    A_BANDS, B_BANDS, ROUNDS = shape.m // BAND, shape.n // BAND, rounds(shape, itemsize)
    assert ROUNDS * LINES == K_SIZE

    @cuda.jit(device=True)
    def find_terms(bases, taps, row, n_terms, C, S, W, dilation_h, dilation_w):
        """The thread's term of each band: its tap, and its place in x as seen from the pixel."""
        for j in range(A_BANDS):
            term = np.int32(row + j * BAND + cuda.threadIdx.x % SIDE * WIDE)
            tap, channel = divided(term, C)
            r, s = divided(tap, S)
            taps[j] = np.int32(s << TAP_BITS | r) if term < n_terms else np.int32(NO_TAP)
            bases[j] = np.int64(r * dilation_h * W + s * dilation_w) * C + channel

    @cuda.jit(device=True)
    def find_pixels(pixels, start, P, Q):
        """The thread's pixels of the first tile: images, lines and columns of y."""
        for u in range(ROUNDS):
            image, rest = divided(np.int32(start + cuda.threadIdx.x // SIDE + u * LINES), P * Q)
            p, q = divided(rest, Q)
            pixels[0, u], pixels[1, u], pixels[2, u] = image, p, q

    @cuda.jit(device=True)
    def go_on(pixels, step, sizes):
        """From a tile to the next one, without a division: `step` is what lies between them."""
        P, Q = sizes[:2]
        for u in range(ROUNDS):
            image, p = np.int32(pixels[0, u] + step[0]), np.int32(pixels[1, u] + step[1])
            q = np.int32(pixels[2, u] + step[2])
            if q >= Q:
                p, q = np.int32(p + 1), np.int32(q - Q)
            if p >= P:
                image, p = np.int32(image + 1), np.int32(p - P)
            pixels[0, u], pixels[1, u], pixels[2, u] = image, p, q

    @cuda.jit(device=True)
    def fetch_x(part, cache, at, first, n_pixels, of_x):
        x, base, bases, taps, pixels, lines, sizes, C = of_x
        _, _, H, W, stride_h, stride_w, pad_h, pad_w = sizes
        tid = np.int32(cuda.threadIdx.x)
        for u in range(part, ROUNDS, PARTS - 1):
            k, p, q = np.int32(tid // SIDE + u * LINES), pixels[1, u], pixels[2, u]
            rows, columns = lines[np.uint32(p)], lines[np.uint32(MOST_LINES + q)]
            if np.int32(first + k) >= n_pixels:
                rows = np.int32(0)
            h = np.int32(pixels[0, u] * H + p * stride_h - pad_h)
            there = base + np.int64(np.int32(h * W + q * stride_w - pad_w)) * C
            place = np.int64(at + np.int32(k * A_PITCH + tid % SIDE * WIDE))
            for j in range(A_BANDS):
                inside = rows >> (taps[j] & NO_TAP) & columns >> (taps[j] >> TAP_BITS) & 1
                n = WIDE if inside != 0 else 0
                copy_part_async(cache, place + j * BAND, x, there + bases[j], n)

    @cuda.jit(device=True)
    def fetch_dy(cache, at, first, n_pixels, of_dy):
        dy, base, K, n_left = of_dy
        tid = np.int32(cuda.threadIdx.x)
        col = np.int32(tid % SIDE * WIDE)
        for u in range(ROUNDS):
            k = np.int32(tid // SIDE + u * LINES)
            pixel = np.int32(first + k)
            place = np.int64(at + np.int32(k * B_PITCH + col))
            where = base + np.int64(pixel) * K + col
            for j in range(B_BANDS):
                n = WIDE if pixel < n_pixels and np.int32(col + j * BAND) < n_left else 0
                copy_part_async(cache, place + j * BAND, dy, where + j * BAND, n)

    return find_terms, find_pixels, go_on, fetch_x, fetch_dy


@cuda.jit(device=True)
def find_lines(lines, P, Q, H, W, R, S, stride, pad, dilation):
    """Which taps meet the image: a bit for each row of the filter, by line of y; and a bit for each
    column of it by column of y, from lines[MOST_LINES] on.
    """
    for p in range(cuda.threadIdx.x, P, cuda.blockDim.x):
        bits, h = np.int32(0), p * stride[0] - pad[0]
        for r in range(R):
            if h + r * dilation[0] >= 0 and h + r * dilation[0] < H:
                bits |= np.int32(1 << r)
        lines[p] = bits
    for q in range(cuda.threadIdx.x, Q, cuda.blockDim.x):
        bits, w = np.int32(0), q * stride[1] - pad[1]
        for s in range(S):
            if w + s * dilation[1] >= 0 and w + s * dilation[1] < W:
                bits |= np.int32(1 << s)
        lines[MOST_LINES + q] = bits
