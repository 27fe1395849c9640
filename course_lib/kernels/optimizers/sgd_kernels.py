"""Stochastic gradient descent with momentum, for one tensor and for all of a table's."""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.optimizers.rules import sgd_rule
from course_lib.kernels.optimizers.table import GRADIENT, PARAMETER, ROW, SIZE, STATES, UNROLL
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.pointers import array_at


@cuda.jit(device=True)
def sgd_element(
    parameter, gradient, buffer, i, lr, momentum, keep, weight_decay, nesterov, maximize, first_step
):
    before = ZERO
    if momentum != ZERO and not first_step:
        before = load(buffer, i)
    p, after = sgd_rule(
        load(parameter, i), load(gradient, i), before, lr, momentum, keep, weight_decay, nesterov,
        maximize, first_step,
    )  # fmt: skip
    store(parameter, i, p)
    if momentum != ZERO:
        store(buffer, i, after)


@cuda.jit
def sgd_naive_kernel(
    parameter, gradient, buffer, rate, given, lr, momentum, keep, weight_decay, nesterov, maximize,
    first_step,
):  # fmt: skip
    i = cuda.grid(1)
    if i < parameter.shape[0]:
        sgd_element(
            parameter, gradient, buffer, i, rate[0] if given else lr, momentum, keep, weight_decay,
            nesterov, maximize, first_step,
        )  # fmt: skip


@cuda.jit(device=True)
def sgd_vectors(
    parameter, gradient, buffer, start, n_vectors, lr, momentum, keep, weight_decay, nesterov,
    maximize, first_step,
):  # fmt: skip
    """Update the `n_vectors` vectors from `start` on, UNROLL of each array in flight a thread."""
    p = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    g = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    b = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    width, step = vector_width(parameter), cuda.blockDim.x
    keeps, reads = momentum != ZERO, momentum != ZERO and not first_step
    first = cuda.threadIdx.x
    while first < n_vectors:
        for u in range(UNROLL):
            if first + u * step < n_vectors:
                i = start + (first + u * step) * width
                load_vector(p[u], parameter, i)
                load_vector(g[u], gradient, i)
                if reads:
                    load_vector(b[u], buffer, i)
        for u in range(UNROLL):
            if first + u * step < n_vectors:
                i = start + (first + u * step) * width
                for k in range(width):
                    p[u, k], b[u, k] = sgd_rule(
                        p[u, k], g[u, k], b[u, k] if reads else ZERO, lr, momentum, keep,
                        weight_decay, nesterov, maximize, first_step,
                    )  # fmt: skip
                store_vector(parameter, i, p[u])
                if keeps:
                    store_vector(buffer, i, b[u])
        first += step * UNROLL


@cuda.jit
def sgd_fused_kernel(
    like, table, chunks, length, rate, given, lr, momentum, keep, weight_decay, nesterov, maximize,
    first_step,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    row, start = chunks[2 * cuda.blockIdx.x] * ROW, chunks[2 * cuda.blockIdx.x + 1]
    size = table[row + SIZE]
    parameter = array_at(table[row + PARAMETER], size, like)
    gradient = array_at(table[row + GRADIENT], size, like)
    buffer = array_at(table[row + STATES], size, like)
    together = table[row + PARAMETER] | table[row + GRADIENT] | table[row + STATES]
    stop = min(start + length, size)
    n_vectors = (stop - start) // vector_width(like) if together % VECTOR_BYTES == 0 else 0
    lr = rate[0] if given else lr
    sgd_vectors(
        parameter, gradient, buffer, start, n_vectors, lr, momentum, keep, weight_decay, nesterov,
        maximize, first_step,
    )  # fmt: skip
    left = start + n_vectors * vector_width(like)
    i = left + cuda.threadIdx.x
    while i < stop:
        sgd_element(
            parameter, gradient, buffer, i, lr, momentum, keep, weight_decay, nesterov, maximize,
            first_step,
        )  # fmt: skip
        i += cuda.blockDim.x
