"""Arrays in the memory format of a problem, contiguous or channels-last: new ones, and copies.

A problem is any object with a flag `channels_last`. Copies are made by a kernel (`transpose`):
nothing of PyTorch's computes.
"""

import math

from course_lib.kernels.blocks.transpose import BLOCK_SIZE, SIDE, transpose_kernel
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

#: What `formatted` may launch.
KERNELS = (transpose_kernel,)


def formatted(array, problem):
    """`array` in the problem's memory format: itself, or a copy."""
    if not problem.channels_last:
        return arrays.contiguous(array)
    if arrays.is_channels_last(array):
        return array
    if arrays.is_contiguous_array(array):
        return channels_last(array)
    return arrays.laid_out_like(array, empty(array.shape, array, problem))


def empty(shape, like, problem, dtype=None):
    """A new array of the problem's memory format, of the dtype of `like` unless one is named."""
    last = problem.channels_last
    return arrays.empty(tuple(shape), like=like, dtype=dtype, channels_last=last)


def channels_last(image):
    """`image`, contiguous (N, C, H, W), laid out channels-last: a copy, or itself if it is that."""
    if arrays.is_channels_last(image):
        return image
    N, C, H, W = image.shape
    result = arrays.empty((N, C, H, W), like=image, channels_last=True)
    return transpose(image, result, N, C, H * W)


def contiguous(image):
    """`image`, channels-last (N, C, H, W), made contiguous: a copy, or itself if it is that."""
    if arrays.is_contiguous_array(image):
        return image
    N, C, H, W = image.shape
    return transpose(image, arrays.empty((N, C, H, W), like=image), N, H * W, C)


def transpose(source, result, N, n_rows, n_cols):
    """`result`, each of whose N matrices of n_cols rows is one of the source's, transposed."""
    squares = math.ceil(n_rows / SIDE) * math.ceil(n_cols / SIDE)
    whole = not ((n_rows | n_cols) * source.dtype.itemsize) % VECTOR_BYTES
    whole = whole and not arrays.address_of(source) % VECTOR_BYTES
    if N * squares:
        launch(
            transpose_kernel, N * squares, BLOCK_SIZE,
            source, result, n_rows, n_cols, whole, flat=True, overlap=True,
        )  # fmt: skip
    return result
