"""Launching the rung `vectorised` of batch normalisation: which kernels, and how many blocks.

`sizes` are C, P, count and whether images are channels-last, as in `ladder`; `affine` and `options`
are what the kernels take of weight, bias, ReLU and statistics, in their order.
"""

import math

from course_lib.kernels.batch_norm import ladder, merging, pixels, planes_kernels, walk
from course_lib.kernels.batch_norm.plan import (
    CLUSTER,
    plan_pass,
    plan_pixels,
    plan_planes,
    plan_walk,
)
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

CLUSTERS_SINCE = (9, 0)  # compute capability; and an L2 cache that is worth a walk


def forward(x, y, sizes, affine, mean, rstd, running, numbers):
    """Of contiguous images; `_pixels_forward` takes channels-last ones."""
    C, P, count, channels_last = sizes
    if channels_last:
        return _pixels_forward(x, y, sizes, affine, mean, rstd, running, numbers)
    plan, then = _plans(x, count // P, C, P)
    start = offset(x, y)
    if plan.cluster:
        launch(
            planes_kernels.channel_kernel, C * plan.cluster, plan.block,
            x, y, C, P, count, plan.length, plan.team, start, *affine, mean, rstd, *running,
            *numbers, flat=True, overlap=True, cluster=plan.cluster,
        )  # fmt: skip
        return
    if walked := _walk(x, C, P):
        walk.forward(x, y, C, P, walked, start, affine, mean, rstd, running, numbers)
        return
    partial = arrays.empty((3, plan.n_parts, C), like=x, dtype="float32")
    share = plan.length, plan.n_parts, plan.team
    launch(
        planes_kernels.statistics_kernel, C * plan.n_parts, plan.block,
        x, partial, C, P, count, *share, offset(x), flat=True, overlap=True,
    )  # fmt: skip
    _merge_statistics(partial, C, plan.n_parts, mean, rstd, running, numbers)
    launch(
        planes_kernels.normalise_kernel, C * then.n_parts, then.block,
        x, y, C, P, count, then.length, then.n_parts, then.team, start, *affine, mean, rstd,
        False, 0.0, flat=True, overlap=True,
    )  # fmt: skip


def _pixels_forward(x, y, sizes, affine, mean, rstd, running, numbers):
    C, _, n_pixels, _ = sizes
    if offset(y) != 0:
        return ladder.launch_welford(x, y, sizes, affine, mean, rstd, running, numbers)
    x = _on_boundary(x)
    grid, share, n_parts = _tiles(x, C, n_pixels, True)
    partial = arrays.empty((3, n_parts, C), like=x, dtype="float32")
    launch(
        pixels.pixel_statistics_kernel, grid, pixels.BLOCK_SIZE, x, partial, share,
        flat=True, overlap=True,
    )  # fmt: skip
    _merge_statistics(partial, C, n_parts, mean, rstd, running, numbers)
    grid, share, _ = _tiles(x, C, n_pixels, False)
    launch(
        pixels.pixel_normalise_kernel, grid, pixels.BLOCK_SIZE,
        x, y, share, *affine, mean, rstd, False, 0.0, flat=True, overlap=True,
    )  # fmt: skip


def _merge_statistics(partial, C, n_parts, mean, rstd, running, numbers):
    launch(
        merging.statistics_merge_kernel, math.ceil(C / merging.CHANNELS), merging.BLOCK_SIZE,
        partial, C, n_parts, mean, rstd, *running, *numbers, flat=True, overlap=True,
    )  # fmt: skip


def backward(images, sizes, options, dweight, dbias, training):
    """As `forward`; `images` are dy, x, y and dx."""
    C, P, count, channels_last = sizes
    if channels_last:
        return _pixels_backward(images, sizes, options, dweight, dbias, training)
    dy, x, y, _ = images
    plan, then = _plans(x, count // P, C, P)
    start = offset(*images)
    if plan.cluster:
        launch(
            planes_kernels.channel_backward_kernel, C * plan.cluster, plan.block,
            *images, C, P, count, plan.length, plan.team, start, *options, dweight, dbias, training,
            flat=True, overlap=True, cluster=plan.cluster,
        )  # fmt: skip
        return
    _, _, relu, mean, _ = options
    partial = arrays.empty((2, plan.n_parts, C), like=x, dtype="float32")
    share = plan.length, plan.n_parts, plan.team
    launch(
        planes_kernels.sums_kernel, C * plan.n_parts, plan.block,
        dy, x, y, partial, C, P, count, *share, offset(dy, x, y), relu, mean,
        flat=True, overlap=True,
    )  # fmt: skip
    terms = _merge_sums(partial, C, plan.n_parts, count, options, dweight, dbias, training)
    launch(
        planes_kernels.gradient_kernel, C * then.n_parts, then.block,
        *images, C, P, count, then.length, then.n_parts, then.team, start, *options, terms,
        flat=True, overlap=True,
    )  # fmt: skip


def _pixels_backward(images, sizes, options, dweight, dbias, training):
    C, _, n_pixels, _ = sizes
    *inputs, dx = images
    if offset(dx) != 0:
        return ladder.launch_block_backward(images, sizes, options, dweight, dbias, training)
    dy, x, y = map(_on_boundary, inputs)
    grid, share, n_parts = _tiles(x, C, n_pixels, True)
    partial = arrays.empty((2, n_parts, C), like=x, dtype="float32")
    _, _, relu, mean, _ = options
    launch(
        pixels.pixel_sums_kernel, grid, pixels.BLOCK_SIZE, dy, x, y, partial, share, relu, mean,
        flat=True, overlap=True,
    )  # fmt: skip
    terms = _merge_sums(partial, C, n_parts, n_pixels, options, dweight, dbias, training)
    grid, share, _ = _tiles(x, C, n_pixels, False)
    launch(
        pixels.pixel_gradient_kernel, grid, pixels.BLOCK_SIZE,
        dy, x, y, dx, share, *options, terms, flat=True, overlap=True,
    )  # fmt: skip


def _merge_sums(partial, C, n_parts, count, options, dweight, dbias, training):
    terms = arrays.empty((2, C), like=partial)
    launch(
        merging.sums_merge_kernel, math.ceil(C / merging.CHANNELS), merging.BLOCK_SIZE,
        partial, C, n_parts, count, options[-1], dweight, dbias, terms, training,
        flat=True, overlap=True,
    )  # fmt: skip
    return terms


def _plans(x, N, C, P):
    """Of the statistics, and of the pass that follows; without clusters where there are none."""
    itemsize = x.dtype.itemsize
    most = CLUSTER if chip_of(x)[0] >= CLUSTERS_SINCE else 1
    return plan_planes(N, C, P, itemsize, most), plan_pass(N, C, P, itemsize)


def _walk(x, C, P):
    """The plan of a walk over the channels, where it is worth it; else None."""
    if chip_of(x)[0] < CLUSTERS_SINCE:
        return None
    n = arrays.size_of(x) // C
    plan = plan_walk(n // P, C, P, x.dtype.itemsize)
    return plan if walk.is_worth_it(plan, C, n * x.dtype.itemsize) else None


def _tiles(x, C, n_pixels, merged):
    """(grid, `pixels.Share`, parts of a channel that are merged)."""
    plan, size = plan_pixels(n_pixels, C, x.dtype.itemsize, merged), n_pixels * C
    share = pixels.Share(C, size, plan.wide, plan.n_rows, plan.length, plan.n_columns)
    rest = size * x.dtype.itemsize % VECTOR_BYTES != 0
    return (plan.n_tiles, plan.n_parts), share, plan.n_parts * plan.wide // C + rest


def _on_boundary(x):
    """`x`, or a copy that begins on a 16-byte boundary: else it would go an element at a time."""
    return x if offset(x) == 0 else arrays.fill(arrays.empty_like(x), x)


def offset(*images):
    """Elements from the last 16-byte boundary to each image; -1 where they disagree."""
    offsets = {arrays.address_of(image) % VECTOR_BYTES for image in images}
    return offsets.pop() // images[0].dtype.itemsize if len(offsets) == 1 else -1


def inference(x, y, sizes, affine, eps):
    """As `forward`."""
    C, P, count, channels_last = sizes
    if channels_last:
        return _pixels_inference(x, y, sizes, affine, eps)
    plan = plan_pass(count // P, C, P, x.dtype.itemsize)
    launch(
        planes_kernels.normalise_kernel, C * plan.n_parts, plan.block,
        x, y, C, P, count, plan.length, plan.n_parts, plan.team, offset(x, y), *affine, True, eps,
        flat=True, overlap=True,
    )  # fmt: skip


def _pixels_inference(x, y, sizes, affine, eps):
    C, _, n_pixels, _ = sizes
    if offset(y) != 0:
        return ladder.launch_inference(x, y, sizes, affine, eps)
    x = _on_boundary(x)
    grid, share, _ = _tiles(x, C, n_pixels, False)
    launch(
        pixels.pixel_normalise_kernel, grid, pixels.BLOCK_SIZE,
        x, y, share, *affine, True, eps, flat=True, overlap=True,
    )  # fmt: skip
