"""The rung `separate`: each step of the formula is a kernel of its own.

Forward pooling (that of `global_avg_pool`), two dense layers, scaling; backward the same steps in
reverse. Element (n, c, pixel) of an image lies at n·C·P + c·channel_step + pixel·pixel_step, with P
pixels: the steps are P and 1, or 1 and C where the image is channels-last.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels import global_avg_pool as pool
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.squeeze_excite.formulas import (
    IDENTITY,
    activate,
    activation_gradient,
    gate_gradient,
    gate_of,
)
from course_lib.kernels.squeeze_excite.weights import launch_weight_gradients
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import load, store, warp_sum

BLOCK_SIZE = 256
WARPS = BLOCK_SIZE // 32
COLUMNS = 32  # of a block of `dense_backward_kernel`


@cuda.jit
def dense_kernel(x, weight, bias, y, n_cols, n_rows, activation):
    # y[n, row] = bias[row] + Σ weight[row, col] · activate(x[n, col]): a warp for each.
    i = cuda.grid(1) // 32
    if i < y.shape[0]:
        n, row = i // n_rows, i % n_rows
        total = ZERO
        for col in range(cuda.threadIdx.x % 32, n_cols, 32):
            total += load(weight, row * n_cols + col) * activate(x[n * n_cols + col], activation)
        total = warp_sum(total)
        if cuda.threadIdx.x % 32 == 0:
            y[i] = total + load(bias, row)


@cuda.jit
def scale_kernel(x, logit, y, n_pixels, C, channel_step, gate):
    i = cuda.grid(1)
    if i < x.shape[0]:
        n, c = i // (n_pixels * C), i // channel_step % C
        store(y, i, load(x, i) * gate_of(logit[n * C + c], gate))


@cuda.jit
def dlogit_kernel(dy, x, logit, dlogit, n_pixels, C, channel_step, pixel_step, n_lanes, gate):
    # A block sums dy·x over the pixels of `n_lanes` neighbouring channels of an image.
    partial = cuda.shared.array(BLOCK_SIZE, np.float32)
    n_groups, tid = (C + n_lanes - 1) // n_lanes, cuda.threadIdx.x
    n = cuda.blockIdx.x // n_groups
    c = cuda.blockIdx.x % n_groups * n_lanes + tid % n_lanes
    total = ZERO
    if c < C:
        start = n * n_pixels * C + c * channel_step
        for pixel in range(tid // n_lanes, n_pixels, BLOCK_SIZE // n_lanes):
            i = start + pixel * pixel_step
            total += load(dy, i) * load(x, i)
    partial[tid] = total
    cuda.syncthreads()
    step = BLOCK_SIZE // 2
    while step >= n_lanes:
        if tid < step:
            partial[tid] += partial[tid + step]
        cuda.syncthreads()
        step //= 2
    if tid < n_lanes and c < C:
        dlogit[n * C + c] = gate_gradient(partial[tid], logit[n * C + c], gate)


@cuda.jit
def dense_backward_kernel(dy, weight, x, dx, n_rows, n_cols, activation):
    # dx[n, col] = act'(Σ dy[n, row] · weight[row, col]): 32 columns of a sample per block.
    partial = cuda.shared.array(BLOCK_SIZE, np.float32)
    n_tiles, tid = (n_cols + COLUMNS - 1) // COLUMNS, cuda.threadIdx.x
    n = cuda.blockIdx.x // n_tiles
    col = cuda.blockIdx.x % n_tiles * COLUMNS + tid % COLUMNS
    total = ZERO
    if col < n_cols:
        for row in range(tid // COLUMNS, n_rows, BLOCK_SIZE // COLUMNS):
            total += dy[n * n_rows + row] * load(weight, row * n_cols + col)
    partial[tid] = total
    cuda.syncthreads()
    if tid < COLUMNS and col < n_cols:
        for other in range(tid + COLUMNS, BLOCK_SIZE, COLUMNS):
            total += partial[other]
        dx[n * n_cols + col] = activation_gradient(total, x[n * n_cols + col], activation)


@cuda.jit
def dx_kernel(dy, logit, dmean, dx, n_pixels, C, channel_step, scale, gate):
    i = cuda.grid(1)
    if i < dx.shape[0]:
        j = i // (n_pixels * C) * C + i // channel_step % C
        store(dx, i, load(dy, i) * gate_of(logit[j], gate) + dmean[j] * scale)


FORWARD_KERNELS = (*pool.FORWARD["vectorised"].kernels, dense_kernel, scale_kernel)
BACKWARD_KERNELS = (dlogit_kernel, dense_backward_kernel, dx_kernel)


def forward(problem, x, weight1, bias1, weight2, bias2, y, mean, hidden, logit):
    """Fill y, mean, hidden and logit."""
    pool.forward(x, out=mean)
    excite(problem, mean, weight1, bias1, weight2, bias2, hidden, logit)
    if arrays.size_of(x):
        launch(
            scale_kernel, -(-arrays.size_of(x) // BLOCK_SIZE), BLOCK_SIZE,
            x, logit, y, problem.n_pixels, problem.C, problem.channel_step, problem.gate, flat=True,
        )  # fmt: skip


def excite(problem, mean, weight1, bias1, weight2, bias2, hidden, logit):
    """Fill hidden and logit from the channels' means."""
    N, C, R = problem.N, problem.C, problem.R
    launch(
        dense_kernel, -(-N * R // WARPS), BLOCK_SIZE,
        mean, weight1, bias1, hidden, C, R, IDENTITY, flat=True,
    )  # fmt: skip
    launch(
        dense_kernel, -(-N * C // WARPS), BLOCK_SIZE,
        hidden, weight2, bias2, logit, R, C, problem.activation, flat=True,
    )  # fmt: skip


def backward(problem, dy, x, weight1, weight2, mean, hidden, logit, dx, gradients):
    """Fill dx and `gradients`: dweight1, dbias1, dweight2, dbias2."""
    N, C, R, n_pixels = problem.N, problem.C, problem.R, problem.n_pixels
    dlogit, dmean = (arrays.empty((N, C), like=mean) for _ in range(2))
    dhidden = arrays.empty((N, R), like=mean)
    n_lanes = 32 if problem.channels_last else 1
    launch(
        dlogit_kernel, N * -(-C // n_lanes), BLOCK_SIZE, dy, x, logit, dlogit,
        n_pixels, C, problem.channel_step, problem.pixel_step, n_lanes, problem.gate, flat=True,
    )  # fmt: skip
    launch(
        dense_backward_kernel, N * -(-R // COLUMNS), BLOCK_SIZE,
        dlogit, weight2, hidden, dhidden, C, R, problem.activation, flat=True,
    )  # fmt: skip
    launch(
        dense_backward_kernel, N * -(-C // COLUMNS), BLOCK_SIZE,
        dhidden, weight1, mean, dmean, R, C, IDENTITY, flat=True,
    )  # fmt: skip
    launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients)
    if arrays.size_of(dx):
        launch(
            dx_kernel, -(-arrays.size_of(dx) // BLOCK_SIZE), BLOCK_SIZE, dy, logit, dmean, dx,
            n_pixels, C, problem.channel_step, np.float32(1 / n_pixels), problem.gate, flat=True,
        )  # fmt: skip


def specialisations(dtype, weight_dtype):
    """(label, kernel, argument types) for images of `dtype` and weights of `weight_dtype`."""
    image, weight, sums = (dtype, 1), (weight_dtype, 1), ("float32", 1)
    if dtype != weight_dtype:  # half-width planes with float32 means, as only this rung wants them
        pooling = [
            (pool.vectorised_team_kernel, ["int64", "float32", "int64", "int64"]),
            (pool.vectorised_nhwc_kernel, [*["int64"] * 3, "float32", *["int64"] * 4]),
        ]
        for kernel, numbers in pooling:
            label = f"squeeze_excite.forward separate, {kernel.py_func.__name__}, {dtype}"
            yield label, kernel, [image, sums, *numbers]
    else:  # what depends on one of them alone
        types = [image, sums, image, *["int64"] * 4]
        yield f"squeeze_excite.forward separate, scale, {dtype}", scale_kernel, types
        types = [image, image, sums, sums, *["int64"] * 6]
        yield f"squeeze_excite.backward separate, dlogit, {dtype}", dlogit_kernel, types
        types = [image, sums, sums, image, *["int64"] * 3, "float32", "int64"]
        yield f"squeeze_excite.backward separate, dx, {dtype}", dx_kernel, types
        types = [sums, weight, weight, sums, *["int64"] * 3]
        yield f"squeeze_excite.forward separate, dense, {dtype}", dense_kernel, types
        types = [sums, weight, sums, sums, *["int64"] * 3]
        yield f"squeeze_excite.backward separate, dense, {dtype}", dense_backward_kernel, types
