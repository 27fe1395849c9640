"""Launches that lay out images and weights as `halo` and `warpgroup` read them (`arranging`)."""

import math

import numpy as np

from course_lib.kernels.blocks import transpose
from course_lib.kernels.conv2d import arranging
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import VECTOR_BYTES


def laid_out(gather, problem, source, weight, kernel, first, n_lines, size, n_threads):
    """(source with channels side by side, weights tile by tile), in one launch if both are copied.

    kernel     that arranges the weights, the one of float32 for TF32: then images are rounded, too
    first      its first number, before the other sizes
    n_lines    of filters, those included that fill the last tile
    size       elements that the arranged weights have
    n_threads  that it takes
    """
    sizes = first, n_lines, gather.n_columns, gather.n_channels, gather.R * gather.S
    tiles = arrays.empty((size,), like=weight)
    numbers = (
        weight, tiles, *map(np.int32, (*sizes, *steps_of(gather, problem))), gather.flipped,
    )  # fmt: skip
    kernels = kernel, arranging.WITH_IMAGES[kernel]
    rounded = kernel is arranging.arrange_rounded_kernel
    source = launch_both(kernels, problem, source, gather.n_channels, n_threads, numbers, rounded)
    return source, tiles


def launch_both(kernels, problem, source, n_channels, n_threads, numbers, rounded):
    """The source with channels side by side; and the weights are laid out.

    kernels  that which arranges the weights, and that which transposes images, too
    numbers  what the first one takes
    rounded  whether the source is to be rounded to TF32, which the second kernel does
    """
    n_blocks = math.ceil(n_threads / transpose.BLOCK_SIZE)
    if problem.channels_last:
        _launch(kernels[0], n_blocks, *numbers)
        return _rounded(source) if rounded else source
    images, n_squares = transposition(source, n_channels)
    _launch(kernels[1], n_squares + n_blocks, *images, n_squares, *numbers)
    return images[1]


def steps_of(gather, problem):
    """How far apart weights of neighbouring columns, channels and taps of a pass lie."""
    p, n_taps = problem, gather.R * gather.S
    filter_step, channel_step, tap_step = p.C * n_taps, n_taps, 1
    if p.channels_last:
        channel_step, tap_step = 1, p.C
    if gather.flipped:
        return channel_step, filter_step, tap_step
    return filter_step, channel_step, tap_step


def transposition(array, n_channels):
    """((array, its copy to be, and sizes) as the kernels of `arranging` want them, blocks)."""
    plane = math.prod(array.shape[2:])
    n_images = arrays.size_of(array) // max(1, n_channels * plane)
    n_squares = math.ceil(n_channels / transpose.SIDE) * math.ceil(plane / transpose.SIDE)
    whole = not (plane * array.dtype.itemsize | arrays.address_of(array)) % VECTOR_BYTES
    copy = arrays.empty((arrays.size_of(array),), like=array)
    return (array, copy, n_channels, plane, whole), n_images * n_squares


def _rounded(array):
    copy = arrays.empty((arrays.size_of(array),), like=array)
    _launch(
        arranging.round_kernel, math.ceil(arrays.size_of(array) / (4 * transpose.BLOCK_SIZE)),
        array, copy,
    )  # fmt: skip
    return copy


def _launch(kernel, n_blocks, *arguments):
    launch(kernel, n_blocks, transpose.BLOCK_SIZE, *arguments, flat=True, overlap=True)


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in ("float32", "float16", "bfloat16"):
        array = (dtype, 1)
        types = [array, array, *["int32"] * 8, "boolean"]
        kernels = {"ordered": arranging.arrange_ordered_kernel}
        if dtype == "float32":
            yield "conv2d.round", arranging.round_kernel, [array, array]
            kernels = {
                "rounded": arranging.arrange_rounded_kernel,
                "split": arranging.arrange_split_kernel,
            }
        for name, kernel in kernels.items():
            yield f"conv2d.arrange {name} {dtype}", kernel, types
            images = [array, array, "int64", "int64", "boolean", "int64"]
            with_images = arranging.WITH_IMAGES[kernel]
            yield f"conv2d.arrange {name} and transpose {dtype}", with_images, images + types
