"""Launching the rung `vectorised` of batch normalisation: which kernels, and how many blocks.

`affine` and `options` are what the kernels take of weight and bias, in their order.
"""

import math

from course_lib.kernels.batch_norm import merging, pixels, planes_kernels
from course_lib.kernels.batch_norm.plan import plan_pixels, plan_planes
from course_lib.runtime import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.launch import launch


def planes_forward(x, y, C, P, affine, relu, mean, rstd, running, numbers):
    total = arrays.size_of(x) // C
    plan = plan_planes(total // P, C, P, x.dtype.itemsize)
    start = offset(x, y)
    if plan.alone:
        launch(
            planes_kernels.channel_kernel, C, plan.block,
            x, y, C, P, total, plan.team, start, *affine, bool(relu), mean, rstd, *running,
            *numbers, flat=True, overlap=True,
        )  # fmt: skip
        return
    partial = arrays.empty((3, plan.n_parts, C), like=x, dtype="float32")
    share = plan.length, plan.n_parts, plan.team
    launch(
        planes_kernels.statistics_kernel, C * plan.n_parts, plan.block,
        x, partial, C, P, total, *share, offset(x), flat=True, overlap=True,
    )  # fmt: skip
    _merge_statistics(partial, C, plan.n_parts, mean, rstd, running, numbers)
    launch(
        planes_kernels.normalise_kernel, C * plan.n_parts, plan.block,
        x, y, C, P, total, *share, start, *affine, bool(relu), mean, rstd, False, 0.0,
        flat=True, overlap=True,
    )  # fmt: skip


def pixels_forward(x, y, C, affine, relu, mean, rstd, running, numbers):
    n_rows = arrays.size_of(x) // C
    plan = plan_pixels(n_rows, C, x.dtype.itemsize)
    grid, share = (plan.n_parts, plan.n_tiles), (C, n_rows, plan.length, plan.n_columns)
    partial = arrays.empty((3, plan.n_parts, C), like=x, dtype="float32")
    launch(
        pixels.pixel_statistics_kernel, grid, pixels.BLOCK_SIZE, x, partial, *share,
        flat=True, overlap=True,
    )  # fmt: skip
    _merge_statistics(partial, C, plan.n_parts, mean, rstd, running, numbers)
    launch(
        pixels.pixel_normalise_kernel, grid, pixels.BLOCK_SIZE,
        x, y, *share, *affine, bool(relu), mean, rstd, False, 0.0, flat=True, overlap=True,
    )  # fmt: skip


def _merge_statistics(partial, C, n_parts, mean, rstd, running, numbers):
    launch(
        merging.statistics_merge_kernel, math.ceil(C / merging.CHANNELS), merging.BLOCK_SIZE,
        partial, C, n_parts, mean, rstd, *running, *numbers, flat=True, overlap=True,
    )  # fmt: skip


def planes_backward(images, C, P, count, options, dweight, dbias, training):
    dy, x, y, _ = images
    plan = plan_planes(count // P, C, P, x.dtype.itemsize)
    start = offset(*images)
    if plan.alone:
        launch(
            planes_kernels.channel_backward_kernel, C, plan.block,
            *images, C, P, count, plan.team, start, *options, dweight, dbias, training,
            flat=True, overlap=True,
        )  # fmt: skip
        return
    partial = arrays.empty((2, plan.n_parts, C), like=x, dtype="float32")
    share = plan.length, plan.n_parts, plan.team
    _, _, relu, mean, _ = options
    launch(
        planes_kernels.sums_kernel, C * plan.n_parts, plan.block,
        dy, x, y, partial, C, P, count, *share, offset(dy, x, y), relu, mean,
        flat=True, overlap=True,
    )  # fmt: skip
    terms = _merge_sums(partial, C, plan.n_parts, count, options, dweight, dbias, training)
    launch(
        planes_kernels.gradient_kernel, C * plan.n_parts, plan.block,
        *images, C, P, count, *share, start, *options, terms, flat=True, overlap=True,
    )  # fmt: skip


def pixels_backward(images, C, n_rows, options, dweight, dbias, training):
    dy, x, y, _ = images
    plan = plan_pixels(n_rows, C, x.dtype.itemsize)
    grid, share = (plan.n_parts, plan.n_tiles), (C, n_rows, plan.length, plan.n_columns)
    partial = arrays.empty((2, plan.n_parts, C), like=x, dtype="float32")
    _, _, relu, mean, _ = options
    launch(
        pixels.pixel_sums_kernel, grid, pixels.BLOCK_SIZE, dy, x, y, partial, *share, relu, mean,
        flat=True, overlap=True,
    )  # fmt: skip
    terms = _merge_sums(partial, C, plan.n_parts, n_rows, options, dweight, dbias, training)
    launch(
        pixels.pixel_gradient_kernel, grid, pixels.BLOCK_SIZE, *images, *share, *options, terms,
        flat=True, overlap=True,
    )  # fmt: skip


def _merge_sums(partial, C, n_parts, count, options, dweight, dbias, training):
    terms = arrays.empty((2, C), like=partial)
    launch(
        merging.sums_merge_kernel, math.ceil(C / merging.CHANNELS), merging.BLOCK_SIZE,
        partial, C, n_parts, count, options[-1], dweight, dbias, terms, training,
        flat=True, overlap=True,
    )  # fmt: skip
    return terms


def offset(*images):
    """Elements from the last 16-byte boundary to each image; -1 where they disagree."""
    offsets = {arrays.address_of(image) % VECTOR_BYTES for image in images}
    return offsets.pop() // images[0].dtype.itemsize if len(offsets) == 1 else -1


def whole_vectors(C, *images):
    """Whether every row of C channels begins on a 16-byte boundary."""
    return C * images[0].dtype.itemsize % VECTOR_BYTES == 0 and offset(*images) == 0


def planes_inference(x, y, C, P, affine, eps):
    count = arrays.size_of(x) // C
    plan = plan_planes(count // P, C, P, x.dtype.itemsize, together=False)
    launch(
        planes_kernels.normalise_kernel, C * plan.n_parts, plan.block,
        x, y, C, P, count, plan.length, plan.n_parts, plan.team, offset(x, y), *affine, True, eps,
        flat=True, overlap=True,
    )  # fmt: skip


def pixels_inference(x, y, C, affine, eps):
    n_rows = arrays.size_of(x) // C
    plan = plan_pixels(n_rows, C, x.dtype.itemsize)
    launch(
        pixels.pixel_normalise_kernel, (plan.n_parts, plan.n_tiles), pixels.BLOCK_SIZE,
        x, y, C, n_rows, plan.length, plan.n_columns, *affine, True, eps, flat=True, overlap=True,
    )  # fmt: skip
