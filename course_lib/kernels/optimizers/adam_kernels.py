"""Adam and AdamW, for one tensor and for all of a table's."""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ONE
from course_lib.kernels.optimizers.rules import adam_corrections, adam_gradient, larger
from course_lib.kernels.optimizers.table import (
    GRADIENT,
    PARAMETER,
    ROW,
    SIZE,
    STATES,
    STEP,
    UNROLL,
)
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
def adam_averages(g, m, v, weight1, beta2, weight2):
    """The running averages of the gradient and of its square."""
    return m + weight1 * (g - m), beta2 * v + weight2 * g * g


@cuda.jit(device=True)
def adam_move(p, m, v, size, inverse, eps):
    """The parameter after its step; `v` is the average of squares that counts."""
    return p - size * (m / (math.sqrt(v) * inverse + eps))


@cuda.jit(device=True)
def adam_element(
    parameter, gradient, m, v, peak, i, size, inverse, lr, weight1, beta2, weight2, eps,
    weight_decay, decoupled, amsgrad, maximize,
):  # fmt: skip
    p, g = load(parameter, i), load(gradient, i)
    p, g = adam_gradient(p, g, lr, weight_decay, decoupled, maximize)
    first, second = adam_averages(g, load(m, i), load(v, i), weight1, beta2, weight2)
    store(m, i, first)
    store(v, i, second)
    if amsgrad:
        second = larger(load(peak, i), second)
        store(peak, i, second)
    store(parameter, i, adam_move(p, first, second, size, inverse, eps))


@cuda.jit
def adam_naive_kernel(
    parameter, gradient, m, v, peak, step, rate, given, lr, log_beta1, log_beta2, weight1, beta2,
    weight2, eps, weight_decay, decoupled, amsgrad, maximize,
):  # fmt: skip
    i = cuda.grid(1)
    if i < parameter.shape[0]:
        lr = rate[0] if given else lr
        correction, inverse = adam_corrections(step[0] + ONE, log_beta1, log_beta2)
        adam_element(
            parameter, gradient, m, v, peak, i, lr / correction, inverse, lr, weight1, beta2,
            weight2, eps, weight_decay, decoupled, amsgrad, maximize,
        )  # fmt: skip


@cuda.jit
def count_kernel(step):
    step[0] += ONE


@cuda.jit(device=True)
def adam_vectors(
    parameter, gradient, m, v, peak, start, n_vectors, size, inverse, lr, weight1, beta2, weight2,
    eps, weight_decay, decoupled, amsgrad, maximize,
):  # fmt: skip
    """Update the `n_vectors` vectors from `start` on, UNROLL of each array in flight a thread."""
    ps = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    gs = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    ms = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    vs = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    width, step = vector_width(parameter), cuda.blockDim.x
    first = cuda.threadIdx.x
    while first < n_vectors:
        for u in range(UNROLL):
            if first + u * step < n_vectors:
                i = start + (first + u * step) * width
                load_vector(ps[u], parameter, i)
                load_vector(gs[u], gradient, i)
                load_vector(ms[u], m, i)
                load_vector(vs[u], v, i)
        for u in range(UNROLL):
            if first + u * step < n_vectors:
                i = start + (first + u * step) * width
                for k in range(width):
                    ps[u, k], g = adam_gradient(
                        ps[u, k], gs[u, k], lr, weight_decay, decoupled, maximize
                    )
                    ms[u, k], vs[u, k] = adam_averages(
                        g, ms[u, k], vs[u, k], weight1, beta2, weight2
                    )
                store_vector(m, i, ms[u])
                store_vector(v, i, vs[u])
                if amsgrad:
                    load_vector(gs[u], peak, i)
                    for k in range(width):
                        vs[u, k] = larger(gs[u, k], vs[u, k])
                    store_vector(peak, i, vs[u])
                for k in range(width):
                    ps[u, k] = adam_move(ps[u, k], ms[u, k], vs[u, k], size, inverse, eps)
                store_vector(parameter, i, ps[u])
        first += step * UNROLL


@cuda.jit(device=True)
def count_steps(table, n_rows, n_steps, ticket, like):
    """Add 1 to each count of steps, once all blocks have read it: the last block does."""
    last = cuda.shared.array(1, np.uint32)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        cuda.threadfence()
        # Counts from 0 to the last block's number, and begins again.
        last[0] = cuda.atomic.inc(ticket, 0, cuda.gridDim.x - 1)
    cuda.syncthreads()
    if last[0] == cuda.gridDim.x - 1:
        cuda.threadfence()
        i = cuda.threadIdx.x
        while i < n_steps:
            step = array_at(table[n_rows * ROW + i], 1, like)
            step[0] += ONE
            i += cuda.blockDim.x


@cuda.jit
def adam_fused_kernel(
    like, table, chunks, ticket, length, n_rows, n_steps, rate, given, lr, log_beta1, log_beta2,
    weight1, beta2, weight2, eps, weight_decay, decoupled, amsgrad, maximize,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    row, start = chunks[2 * cuda.blockIdx.x] * ROW, chunks[2 * cuda.blockIdx.x + 1]
    n = table[row + SIZE]
    parameter = array_at(table[row + PARAMETER], n, like)
    gradient = array_at(table[row + GRADIENT], n, like)
    m, v = array_at(table[row + STATES], n, like), array_at(table[row + STATES + 1], n, like)
    peak = array_at(table[row + STATES + 2], n, like)
    together = table[row + PARAMETER] | table[row + GRADIENT]
    together |= table[row + STATES] | table[row + STATES + 1] | table[row + STATES + 2]
    stop = min(start + length, n)
    n_vectors = (stop - start) // vector_width(like) if together % VECTOR_BYTES == 0 else 0
    lr = rate[0] if given else lr
    step = array_at(table[row + STEP], 1, rate)
    correction, inverse = adam_corrections(step[0] + ONE, log_beta1, log_beta2)
    size = lr / correction
    adam_vectors(
        parameter, gradient, m, v, peak, start, n_vectors, size, inverse, lr, weight1, beta2,
        weight2, eps, weight_decay, decoupled, amsgrad, maximize,
    )  # fmt: skip
    left = start + n_vectors * vector_width(like)
    i = left + cuda.threadIdx.x
    while i < stop:
        adam_element(
            parameter, gradient, m, v, peak, i, size, inverse, lr, weight1, beta2, weight2, eps,
            weight_decay, decoupled, amsgrad, maximize,
        )  # fmt: skip
        i += cuda.blockDim.x
    count_steps(table, n_rows, n_steps, ticket, rate)
