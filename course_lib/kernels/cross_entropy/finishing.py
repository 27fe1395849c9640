"""What becomes of the losses of rows or blocks: their sum or mean, or each of them rounded."""

import math

from course_lib.kernels.cross_entropy.forward_kernels import (
    BLOCK_SIZE,
    FINISH_BLOCK_SIZE,
    MEAN,
    PARTIAL,
    SUM,
    finish_kernel,
    round_kernel,
)
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch

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
