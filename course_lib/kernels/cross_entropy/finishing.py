"""What becomes of the losses of rows or blocks: their sum or mean, or each of them rounded."""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import NAN, ONE, ZERO
from course_lib.kernels.cross_entropy.forward_kernels import BLOCK_SIZE
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    block_sum,
    store,
    wait_for_previous_kernel,
)

FINISH_BLOCK_SIZE, FINISH_BATCH = 1024, 8
PARTIAL, SUM, MEAN = 0, 1, 2  # what `finish_kernel` makes of its sums


@cuda.jit
def finish_kernel(losses, weights, weight_step, loss, normaliser, length, mode):
    """Sum `length` losses a block, and every `weight_step`-th weight, in a fixed order."""
    allow_next_kernel()
    wait_for_previous_kernel()
    scratch = cuda.shared.array(32, np.float32)
    some = cuda.local.array(FINISH_BATCH, np.float32)
    some_weights = cuda.local.array(FINISH_BATCH, np.float32)
    block, n_threads = cuda.blockIdx.x, cuda.blockDim.x
    i = block * length + cuda.threadIdx.x
    stop = min((block + 1) * length, losses.shape[0])
    total, total_weight = ZERO, ZERO
    while i < stop:
        for u in range(FINISH_BATCH):  # past the end the last ones again, which are not counted
            row = min(i + u * n_threads, stop - 1)
            some[u], some_weights[u] = losses[row], weights[(row + 1) * weight_step - 1]
        for u in range(FINISH_BATCH):
            if i + u * n_threads < stop:
                total += some[u]
                total_weight += some_weights[u]
        i += FINISH_BATCH * n_threads
    total = block_sum(total, scratch)
    total_weight = block_sum(total_weight, scratch)
    if cuda.threadIdx.x == 0:
        if mode == MEAN:
            # Of nothing it is NaN, as in PyTorch: smoothing gives rows without weight a loss, too.
            total = total / total_weight if total_weight != ZERO else NAN
        if mode == SUM:
            total_weight = ONE
        store(loss, block, total)
        normaliser[block] = total_weight


@cuda.jit
def round_kernel(losses, loss, normaliser, n):
    """Without a reduction: `n` losses rounded to their dtype, and 1 to divide by."""
    allow_next_kernel()
    wait_for_previous_kernel()
    i = cuda.grid(1)
    if i < n:
        store(loss, i, losses[i])
    if i == 0:
        normaliser[0] = ONE


KERNELS = finish_kernel, round_kernel
ROWS_PER_SUM = 1 << 14  # losses that one block sums


def place_for(n, loss, reduction):
    """The array for `n` losses: `loss` itself, if they are neither summed up nor rounded."""
    if reduction == "none" and arrays.dtype_name(loss) == "float32":
        return loss
    return arrays.empty((n,), like=loss, dtype="float32")


def finish(losses, weights, step, loss, normaliser, reduction):
    """Fill `loss` and `normaliser` from losses and, `step` apart, what each weighs in the mean."""
    if reduction == "none":
        n = 0 if loss is losses else arrays.size_of(loss)
        launch(
            round_kernel, max(1, math.ceil(n / BLOCK_SIZE)), BLOCK_SIZE,
            losses, loss, normaliser, n, flat=True, overlap=True,
        )  # fmt: skip
        return
    n = arrays.size_of(losses)
    while n > ROWS_PER_SUM:
        n_blocks = math.ceil(n / ROWS_PER_SUM)
        sums = [arrays.empty((n_blocks,), like=losses) for _ in range(2)]
        launch(
            finish_kernel, n_blocks, FINISH_BLOCK_SIZE,
            losses, weights, step, *sums, ROWS_PER_SUM, PARTIAL, flat=True, overlap=True,
        )  # fmt: skip
        (losses, weights), step, n = sums, 1, n_blocks
    mode = MEAN if reduction == "mean" else SUM
    launch(
        finish_kernel, 1, FINISH_BLOCK_SIZE,
        losses, weights, step, loss, normaliser, n, mode, flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtype):
    """(label, kernel, argument types) of all that is compiled for `dtype`; arrays as (dtype, 1)."""
    row = ("float32", 1)
    array = (dtype, 1)
    types = [row, row, "int64", array, row, "int64", "int64"]
    yield f"cross_entropy sum {dtype}", finish_kernel, types
    yield f"cross_entropy round {dtype}", round_kernel, [row, array, row, "int64"]
