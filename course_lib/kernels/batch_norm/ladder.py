"""The rungs of batch normalisation that move one element at a time, for any memory format.

A channel's element (n, pixel) lies at n·C·P + c·channel_step + pixel·pixel_step, with P pixels an
image; `steps` of the kernels are these two. `count` is N·P.
"""

import functools
import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.statistics import (
    activated,
    keep_statistics,
    shares_of_gradient,
    through_statistics,
)
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.moments import (
    affine_of,
    block_moments,
    reciprocal_deviation,
    with_one,
)
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import block_sum, load, store

BLOCK_SIZE = 256


@cuda.jit(device=True)
def place(i, c, C, P, channel_step, pixel_step):
    """Where element i of channel c lies."""
    return i // P * (C * P) + c * channel_step + i % P * pixel_step


@cuda.jit(device=True)
def normalise(
    x, y, c, C, P, count, channel_step, pixel_step, first, step, mean, rstd, weight, bias,
    has_weight, has_bias, relu,
):  # fmt: skip
    """Every `step`-th element of a channel, from `first` on."""
    scale, shift = affine_of(c, weight, bias, has_weight, has_bias)
    scale *= rstd
    for i in range(first, count, step):
        at = place(i, c, C, P, channel_step, pixel_step)
        store(y, at, activated((load(x, at) - mean) * scale + shift, relu))


@cuda.jit
def naive_kernel(
    x, y, C, P, count, channel_step, pixel_step, weight, bias, has_weight, has_bias, relu, means,
    rstds, running_mean, running_var, tracked, momentum, eps,
):  # fmt: skip
    # A thread for each channel, which passes over it three times.
    c = cuda.grid(1)
    if c < C:
        total = squares = ZERO
        for i in range(count):
            total += load(x, place(i, c, C, P, channel_step, pixel_step))
        mean = total / np.float32(count)
        for i in range(count):
            apart = load(x, place(i, c, C, P, channel_step, pixel_step)) - mean
            squares += apart * apart
        rstd = keep_statistics(
            c, np.float32(count), mean, squares, means, rstds, running_mean, running_var, tracked,
            momentum, eps,
        )  # fmt: skip
        normalise(
            x, y, c, C, P, count, channel_step, pixel_step, 0, 1, mean, rstd, weight, bias,
            has_weight, has_bias, relu,
        )  # fmt: skip


@cuda.jit
def one_pass_kernel(
    x, y, C, P, count, channel_step, pixel_step, weight, bias, has_weight, has_bias, relu, means,
    rstds, running_mean, running_var, tracked, momentum, eps,
):  # fmt: skip
    # Sum and sum of squares at once. Wrong where the mean is large: see the package's docstring.
    scratch = cuda.shared.array(32, np.float32)
    c, tid = cuda.blockIdx.x, cuda.threadIdx.x
    total = squares = ZERO
    for i in range(tid, count, cuda.blockDim.x):
        value = load(x, place(i, c, C, P, channel_step, pixel_step))
        total += value
        squares += value * value
    total, squares = block_sum(total, scratch), block_sum(squares, scratch)
    mean = total / np.float32(count)
    m2 = max(squares - total * mean, ZERO)
    rstd = reciprocal_deviation(m2 / np.float32(count), eps)
    if tid == 0:
        keep_statistics(
            c, np.float32(count), mean, m2, means, rstds, running_mean, running_var, tracked,
            momentum, eps,
        )  # fmt: skip
    normalise(
        x, y, c, C, P, count, channel_step, pixel_step, tid, cuda.blockDim.x, mean, rstd, weight,
        bias, has_weight, has_bias, relu,
    )  # fmt: skip


@cuda.jit
def welford_kernel(
    x, y, C, P, count, channel_step, pixel_step, weight, bias, has_weight, has_bias, relu, means,
    rstds, running_mean, running_var, tracked, momentum, eps,
):  # fmt: skip
    scratch = cuda.shared.array((3, 32), np.float32)
    c, tid = cuda.blockIdx.x, cuda.threadIdx.x
    n = mean = m2 = ZERO
    for i in range(tid, count, cuda.blockDim.x):
        value = load(x, place(i, c, C, P, channel_step, pixel_step))
        n, mean, m2 = with_one(n, mean, m2, value)
    n, mean, m2 = block_moments(n, mean, m2, scratch)
    rstd = reciprocal_deviation(m2 / n, eps)
    if tid == 0:
        keep_statistics(
            c, n, mean, m2, means, rstds, running_mean, running_var, tracked, momentum, eps
        )
    normalise(
        x, y, c, C, P, count, channel_step, pixel_step, tid, cuda.blockDim.x, mean, rstd, weight,
        bias, has_weight, has_bias, relu,
    )  # fmt: skip


@cuda.jit
def inference_kernel(
    x, y, C, P, channel_step, weight, bias, has_weight, has_bias, relu, running_mean, running_var,
    eps,
):  # fmt: skip
    # A thread for each element.
    i = cuda.grid(1)
    if i < x.shape[0]:
        c = i % C if channel_step == 1 else i // P % C
        scale, shift = affine_of(c, weight, bias, has_weight, has_bias)
        scale *= reciprocal_deviation(load(running_var, c), eps)
        value = (load(x, i) - load(running_mean, c)) * scale + shift
        store(y, i, activated(value, relu))


@cuda.jit(device=True)
def masked(dy, y, at, relu):
    """dy's element, or 0 where ReLU's output y is 0."""
    value = load(dy, at)
    return ZERO if relu and load(y, at) <= ZERO else value


@cuda.jit(device=True)
def channel_gradient(
    dy, x, y, dx, c, C, P, count, channel_step, pixel_step, first, step, mean, factor, mean_dy,
    slope, relu,
):  # fmt: skip
    """dx of every `step`-th element of a channel: factor·(dy − mean_dy − (x − mean)·slope)."""
    for i in range(first, count, step):
        at = place(i, c, C, P, channel_step, pixel_step)
        value = masked(dy, y, at, relu) - mean_dy
        value -= through_statistics(load(x, at), mean, slope)
        store(dx, at, factor * value)


@cuda.jit
def naive_backward_kernel(
    dy, x, y, dx, C, P, count, channel_step, pixel_step, weight, has_weight, relu, means, rstds,
    dweight, dbias, training,
):  # fmt: skip
    c = cuda.grid(1)
    if c < C:
        mean, rstd = means[c], rstds[c]
        total = product = ZERO
        for i in range(count):
            at = place(i, c, C, P, channel_step, pixel_step)
            value = masked(dy, y, at, relu)
            total += value
            product += value * (load(x, at) - mean)
        store(dweight, c, product * rstd)
        store(dbias, c, total)
        factor = rstd * (load(weight, c) if has_weight else ONE)
        mean_dy, slope = shares_of_gradient(total, product, rstd, count, training)
        channel_gradient(
            dy, x, y, dx, c, C, P, count, channel_step, pixel_step, 0, 1, mean, factor, mean_dy,
            slope, relu,
        )  # fmt: skip


@cuda.jit
def block_backward_kernel(
    dy, x, y, dx, C, P, count, channel_step, pixel_step, weight, has_weight, relu, means, rstds,
    dweight, dbias, training,
):  # fmt: skip
    scratch = cuda.shared.array(32, np.float32)
    c, tid = cuda.blockIdx.x, cuda.threadIdx.x
    mean, rstd = means[c], rstds[c]
    total = product = ZERO
    for i in range(tid, count, cuda.blockDim.x):
        at = place(i, c, C, P, channel_step, pixel_step)
        value = masked(dy, y, at, relu)
        total += value
        product += value * (load(x, at) - mean)
    total, product = block_sum(total, scratch), block_sum(product, scratch)
    if tid == 0:
        store(dweight, c, product * rstd)
        store(dbias, c, total)
    factor = rstd * (load(weight, c) if has_weight else ONE)
    mean_dy, slope = shares_of_gradient(total, product, rstd, count, training)
    channel_gradient(
        dy, x, y, dx, c, C, P, count, channel_step, pixel_step, tid, cuda.blockDim.x, mean, factor,
        mean_dy, slope, relu,
    )  # fmt: skip


def channel_a_thread(C, count):
    """Blocks, and threads of a block, where a thread takes a channel."""
    return math.ceil(C / BLOCK_SIZE), BLOCK_SIZE


def channel_a_block(C, count):
    """The same where a block takes one."""
    return C, min(BLOCK_SIZE, 32 * math.ceil(count / 32))


def _steps(C, P, channels_last):
    """From a channel to the next in memory, and from a pixel to the next."""
    return (1, C) if channels_last else (P, 1)


def _launch_forward(kernel, blocks_of, x, y, sizes, affine, mean, rstd, running, numbers):
    C, P, count, channels_last = sizes
    launch(
        kernel, *blocks_of(C, count), x, y, C, P, count, *_steps(C, P, channels_last), *affine,
        mean, rstd, *running, *numbers, flat=True,
    )  # fmt: skip


def launch_inference(x, y, sizes, affine, eps):
    C, P, count, channels_last = sizes
    launch(
        inference_kernel, math.ceil(count * C / BLOCK_SIZE), BLOCK_SIZE,
        x, y, C, P, _steps(C, P, channels_last)[0], *affine, eps, flat=True,
    )  # fmt: skip


def _launch_backward(kernel, blocks_of, images, sizes, options, dweight, dbias, training):
    C, P, count, channels_last = sizes
    launch(
        kernel, *blocks_of(C, count), *images, C, P, count, *_steps(C, P, channels_last), *options,
        dweight, dbias, training, flat=True,
    )  # fmt: skip


launch_naive, launch_one_pass, launch_welford = (
    functools.partial(_launch_forward, kernel, blocks_of)
    for kernel, blocks_of in (
        (naive_kernel, channel_a_thread), (one_pass_kernel, channel_a_block),
        (welford_kernel, channel_a_block),
    )
)  # fmt: skip
launch_naive_backward, launch_block_backward = (
    functools.partial(_launch_backward, kernel, blocks_of)
    for kernel, blocks_of in (
        (naive_backward_kernel, channel_a_thread), (block_backward_kernel, channel_a_block),
    )
)  # fmt: skip
