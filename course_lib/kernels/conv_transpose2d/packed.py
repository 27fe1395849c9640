"""dx of `upsample2x` for contiguous images: dy packed into matrices, and a product for each image.

With filters of 2 × 2 and stride 2, each pixel of x has four pixels of a channel of y to itself.
Let row 4·k + 2·r + s of the matrix taps (4·K, H·W) have the pixels (2·h + r, 2·w + s) of channel k
of dy: an image's dx is weight (C, 4·K) times taps, a product of `gemm` by tensor cores. One launch
finds those of all images. To pack dy moves it twice, which takes less time than a convolution with
stride 2 does.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels import gemm
from course_lib.kernels.blocks.constants import MAX_WIDTH
from course_lib.kernels.blocks.indexing import divided
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load_vector,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 256
MAX_READ = 2 * MAX_WIDTH


@cuda.jit
def pack_kernel(dy, taps, n_threads, H, W):
    """taps (N·K, 2, 2, H·W) of dy (N·K, 2·H, 2·W): a thread has 32 bytes of a line of dy."""
    allow_next_kernel()
    wait_for_previous_kernel()
    i = np.int64(cuda.blockIdx.x) * BLOCK_SIZE + cuda.threadIdx.x
    if i < n_threads:
        width = vector_width(dy)
        read = cuda.local.array(MAX_READ, np.float32)
        one = cuda.local.array(MAX_WIDTH, np.float32)
        other = cuda.local.array(MAX_WIDTH, np.float32)
        load_vector(read, dy, i * 2 * width)
        load_vector(read[width:], dy, i * 2 * width + width)
        for e in range(width):
            one[e], other[e] = read[2 * e], read[2 * e + 1]
        # Lines of dy come in the order of planes, rows of x, and r.
        line, part = divided(i, np.int32(W // width))
        plane, inside = divided(line, np.int32(2 * H))
        size = np.int64(H) * W
        at = (4 * np.int64(plane) + inside % 2 * 2) * size + np.int64(inside // 2) * W
        at += part * width
        store_vector(taps, at, one)
        store_vector(taps, at + size, other)


def fault(problem, operands):
    """Why this way can't take a `problem` that `upsample2x` takes; or None.

    operands  dy, the weights and dx
    """
    width = VECTOR_BYTES // operands[0].dtype.itemsize
    if problem.channels_last:
        return "contiguous images"
    if problem.W % width or problem.N * problem.H == 0:
        return f"images whose width is a multiple of {width}"
    if _n_threads(operands[0]) >= 1 << 31:
        return f"dy of fewer than 2³¹ times {2 * VECTOR_BYTES} bytes"
    if any(arrays.address_of(array) % VECTOR_BYTES for array in operands):
        return f"arrays that begin on boundaries of {VECTOR_BYTES} bytes"
    return None


def _n_threads(dy):
    return arrays.size_of(dy) * dy.dtype.itemsize // (2 * VECTOR_BYTES)


def backward(problem, dy, weight, dx, precision):
    """dx of dy and weight, all contiguous."""
    p = problem
    taps = arrays.empty((p.N, 4 * p.K, p.H * p.W), like=dy)
    n_threads = _n_threads(dy)
    launch(
        pack_kernel, math.ceil(n_threads / BLOCK_SIZE), BLOCK_SIZE,
        dy, taps, n_threads, np.int32(p.H), np.int32(p.W), flat=True, overlap=True,
    )  # fmt: skip
    sizes = p.C, p.H * p.W, 4 * p.K
    # A lone image is one product, whose ways may share out k. More images than a grid counts go one
    # by one.
    if p.N > 1 and gemm.multiply_planes(weight, taps, dx, sizes, p.N, precision=precision) is dx:
        return
    for n in range(p.N):
        gemm.multiply(weight, taps[n], dx[n], *sizes, b_by_k=False, precision=precision)


def specialisations(dtypes):
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in dtypes:
        types = [(dtype, 1)] * 2 + ["int64", "int32", "int32"]
        yield f"upsample2x pack {dtype}", pack_kernel, types
