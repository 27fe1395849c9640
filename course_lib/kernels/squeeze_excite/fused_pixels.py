"""The rung `fused` for channels-last images: a block's part of a sample is a run of its pixels.

A part is one stretch of memory again. But each block has some pixels of every channel, so that the
cluster exchanges twice more than for contiguous images: the sums of the channels before the small
layers, whose slices are as there, and the results behind them.

A thread works on a *column*: 16 bytes of every n-th pixel. What lies before pixel `held` of the
part is copied to shared memory, what lies behind is read again when it is scaled.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.squeeze_excite.formulas import ZERO, gate_gradient, gate_of
from course_lib.kernels.squeeze_excite.fused_dense import (
    UNROLL,
    copy_matrix,
    copy_vector,
    excite,
    excite_backward,
    places,
    quotient,
    save,
    sum_over_cluster,
)
from course_lib.kernels.squeeze_excite.fused_planes import MAX_WIDTH, MOST_REGISTERS, fetch
from course_lib.runtime.cluster import (
    cluster_rank,
    cluster_size,
    cluster_sync,
    load_from_cluster,
)
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.shared import dynamic_shared, wait_for_copies
from course_lib.runtime.shared_views import dynamic_shared_view

AT_ONCE = 4  # vectors that a thread has on their way
DOT_AT_ONCE = 2  # of each of two arrays


@cuda.jit(device=True)
def part_of(C, n_pixels, n_most):
    """(sample, first channel of the slice, channels, first element of the part, pixels)."""
    n, rank, size = quotient(cuda.blockIdx.x, cluster_size()), cluster_rank(), cluster_size()
    first = rank * n_pixels // size
    n_rows = (rank + 1) * n_pixels // size - first
    c = rank * n_most
    return n, c, max(0, min(n_most, C - c)), (n * n_pixels + first) * C, n_rows


@cuda.jit(device=True)
def share_out(C, width):
    """(column, step to the next, row, rows at once) of this thread; a row too many: no place."""
    n_columns, n_threads = quotient(C + width - 1, width), cuda.blockDim.x
    if n_columns >= n_threads:
        return np.int64(cuda.threadIdx.x) * width, n_threads * width, np.int64(0), np.int64(1)
    row = quotient(cuda.threadIdx.x, n_columns)
    column = (cuda.threadIdx.x - row * n_columns) * width
    return column, n_columns * width, row, quotient(n_threads, n_columns)


@cuda.jit(device=True)
def load_some(values, a, i, n, vectors):
    """values[k] = a[i + k] for k < n: 16 bytes at once, if there are so many on a boundary."""
    if vectors:
        load_vector(values, a, i)
    else:
        for k in range(vector_width(a)):
            values[k] = load(a, i + k) if k < n else ZERO


@cuda.jit(device=True)
def sum_column(totals, a, at, column, row, stop, n_at_once, C, vectors):
    """Add to `totals` every n_at_once-th pixel's 16 bytes of a column, from `row` to `stop`."""
    values = cuda.local.array((AT_ONCE, MAX_WIDTH), np.float32)
    width, step, i = vector_width(a), n_at_once * C, at + row * C + column
    while row + (AT_ONCE - 1) * n_at_once < stop:  # all loads of a batch before their sums
        for u in range(AT_ONCE):
            load_some(values[u], a, i + u * step, C - column, vectors)
        for u in range(AT_ONCE):
            for k in range(width):
                totals[k] += values[u, k]
        row += AT_ONCE * n_at_once
        i += AT_ONCE * step
    while row < stop:
        load_some(values[0], a, i, C - column, vectors)
        for k in range(width):
            totals[k] += values[0, k]
        row += n_at_once
        i += step


@cuda.jit(device=True)
def dot_column(totals, a, at, b, there, column, row, stop, n_at_once, C, vectors):
    """As `sum_column`, of products."""
    left = cuda.local.array((DOT_AT_ONCE, MAX_WIDTH), np.float32)
    right = cuda.local.array((DOT_AT_ONCE, MAX_WIDTH), np.float32)
    width, step, i = vector_width(a), n_at_once * C, row * C + column
    while row + (DOT_AT_ONCE - 1) * n_at_once < stop:
        for u in range(DOT_AT_ONCE):
            load_some(left[u], a, at + i + u * step, C - column, vectors)
            load_some(right[u], b, there + i + u * step, C - column, vectors)
        for u in range(DOT_AT_ONCE):
            for k in range(width):
                totals[k] += left[u, k] * right[u, k]
        row += DOT_AT_ONCE * n_at_once
        i += DOT_AT_ONCE * step
    while row < stop:
        load_some(left[0], a, at + i, C - column, vectors)
        load_some(right[0], b, there + i, C - column, vectors)
        for k in range(width):
            totals[k] += left[0, k] * right[0, k]
        row += n_at_once
        i += step


@cuda.jit(device=True)
def first_from(row, n_at_once, start):
    """The first of the pixels row, row + n_at_once, … that is not before `start`."""
    return (
        row if row >= start else row + quotient(start - row + n_at_once - 1, n_at_once) * n_at_once
    )


@cuda.jit(device=True)
def put_totals(tables, at, totals, width, n, added):
    for k in range(width):
        if k < n:
            store(tables, at + k, totals[k] + load(tables, at + k) if added else totals[k])


@cuda.jit(device=True)
def pool(tables, scratch, a, at, start, stop, added, C, vectors):
    """tables[scratch + row·C + c] = each row of threads' sums of the pixels `start` to `stop`."""
    totals = cuda.local.array(MAX_WIDTH, np.float32)
    width = vector_width(a)
    column, step, row, n_at_once = share_out(C, width)
    while column < C and row < n_at_once:
        for k in range(width):
            totals[k] = ZERO
        first = first_from(row, n_at_once, start)
        sum_column(totals, a, at, column, first, stop, n_at_once, C, vectors)
        put_totals(tables, scratch + row * C + column, totals, width, C - column, added)
        column += step if n_at_once == 1 else C


@cuda.jit(device=True)
def pool_products(tables, scratch, a, at, b, there, start, stop, added, C, vectors):
    """As `pool`, of the products a · b."""
    totals = cuda.local.array(MAX_WIDTH, np.float32)
    width = vector_width(a)
    column, step, row, n_at_once = share_out(C, width)
    while column < C and row < n_at_once:
        for k in range(width):
            totals[k] = ZERO
        first = first_from(row, n_at_once, start)
        dot_column(totals, a, at, b, there, column, first, stop, n_at_once, C, vectors)
        put_totals(tables, scratch + row * C + column, totals, width, C - column, added)
        column += step if n_at_once == 1 else C


@cuda.jit(device=True)
def pool_parts(tables, scratch, cache, place, other, dy, x, start, held, n_rows, C, vectors):
    """As `pool_products`, of dy and x wherever they are, once the copies have come."""
    if held < n_rows:
        pool_products(tables, scratch, dy, start, x, start, held, n_rows, False, C, vectors)
    wait_for_copies()
    cuda.syncthreads()
    stop, added = min(held, n_rows), held < n_rows
    if other > 0:
        pool_products(tables, scratch, cache, place, cache, other, 0, stop, added, C, vectors)
    else:
        pool_products(tables, scratch, cache, place, x, start, 0, stop, added, C, vectors)


@cuda.jit(device=True)
def sum_slice(tables, scratch, wide, c, n_mine, C, width):
    """tables[0:] = the sums of the slice's channels over all pixels of the sample."""
    _, _, _, n_at_once = share_out(C, width)
    cuda.syncthreads()
    j = np.int64(cuda.threadIdx.x)
    while j < C:
        total, k = load(tables, scratch + j), scratch + j + C
        while k < scratch + n_at_once * C:
            total += load(tables, k)
            k += C
        store(tables, wide + j, total)
        j += cuda.blockDim.x
    cluster_sync()
    sum_over_cluster(tables, 0, wide + c, n_mine)


@cuda.jit(device=True)
def collect(tables, wide, outputs, n_most, C):
    """tables[wide:] = the outputs of all slices; begins with a barrier of the cluster."""
    values = cuda.local.array(UNROLL, np.float32)
    cluster_sync()
    j, step = np.int64(cuda.threadIdx.x), cuda.blockDim.x
    while j < C:
        for u in range(UNROLL):
            if j + u * step < C:
                rank = quotient(j + u * step, n_most)
                place = outputs + j + u * step - rank * n_most
                values[u] = load_from_cluster(tables, place, rank)
        for u in range(UNROLL):
            if j + u * step < C:
                store(tables, wide + j + u * step, values[u])
        j += UNROLL * step
    cuda.syncthreads()


@cuda.jit(device=True)
def store_some(a, i, values, n, vectors):
    """The reverse of `load_some`."""
    if vectors:
        store_vector(a, i, values)
    else:
        for k in range(vector_width(a)):
            if k < n:
                store(a, i + k, values[k])


@cuda.jit(device=True)
def scale_column(a, at, y, there, column, row, stop, n_at_once, C, factors, shifts, vectors):
    """y = a · factors + shifts for every n_at_once-th pixel's 16 bytes of a column."""
    values = cuda.local.array((AT_ONCE, MAX_WIDTH), np.float32)
    width, step, i = vector_width(a), n_at_once * C, row * C + column
    while row + (AT_ONCE - 1) * n_at_once < stop:
        for u in range(AT_ONCE):
            load_some(values[u], a, at + i + u * step, C - column, vectors)
        for u in range(AT_ONCE):
            for k in range(width):
                values[u, k] = values[u, k] * factors[k] + shifts[k]
            store_some(y, there + i + u * step, values[u], C - column, vectors)
        row += AT_ONCE * n_at_once
        i += AT_ONCE * step
    while row < stop:
        load_some(values[0], a, at + i, C - column, vectors)
        for k in range(width):
            values[0, k] = values[0, k] * factors[k] + shifts[k]
        store_some(y, there + i, values[0], C - column, vectors)
        row += n_at_once
        i += step


@cuda.jit(device=True)
def scale(
    tables, factors_at, shifts_at, gate, share, cache, place, x, y, start, held, n_rows, C, vectors
):
    """y = x · factor + shift · share. With shifts, not at 0, the factors are gates of logits."""
    factors = cuda.local.array(MAX_WIDTH, np.float32)
    shifts = cuda.local.array(MAX_WIDTH, np.float32)
    width = vector_width(x)
    column, step, row, n_at_once = share_out(C, width)
    while column < C and row < n_at_once:
        for k in range(width):
            j = min(column + k, C - 1)  # past the row's end nobody looks
            factors[k], shifts[k] = load(tables, factors_at + j), ZERO
            if shifts_at > 0:
                factors[k] = gate_of(factors[k], gate)
                shifts[k] = load(tables, shifts_at + j) * share
        stop, behind = min(held, n_rows), first_from(row, n_at_once, held)
        scale_column(
            cache, place, y, start, column, row, stop, n_at_once, C, factors, shifts, vectors
        )
        scale_column(
            x, start, y, start, column, behind, n_rows, n_at_once, C, factors, shifts, vectors
        )
        column += step if n_at_once == 1 else C


@cuda.jit(device=True)
def finish_means(tables, n_mine, factor):
    """The means of the slice's channels, from their sums."""
    j = np.int64(cuda.threadIdx.x)
    while j < n_mine:
        store(tables, j, load(tables, j) * factor)
        j += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def finish_dlogits(tables, n_mine, given, gate):
    """The gradients of the slice's logits, from the sums of dy·x."""
    j = np.int64(cuda.threadIdx.x)
    while j < n_mine:
        store(tables, j, gate_gradient(load(tables, j), load(tables, given + j), gate))
        j += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def finish_gates(tables, outputs, given, n_mine, gate):
    """The gates of the slice's channels at tables[outputs:], and their logits at tables[given:]."""
    j = np.int64(cuda.threadIdx.x)
    while j < n_mine:
        value = load(tables, outputs + j) + load(tables, given + j)
        store(tables, given + j, value)
        store(tables, outputs + j, gate_of(value, gate))
        j += cuda.blockDim.x


@cuda.jit(max_registers=MOST_REGISTERS)
def fused_pixels_kernel(
    x, weight1, bias1, weight2, bias2, y, mean, hidden, logit,
    C, n_pixels, R, n_most, held, first, second, fit, place, vectors, factor, activation, gate,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    tables, cache = cuda.shared.array(0, np.float32), dynamic_shared(x)  # one memory
    weights = dynamic_shared_view(weight1)
    n, c, n_mine, start, n_rows = part_of(C, n_pixels, n_most)
    fetch(cache, place, x, start, min(held, n_rows) * C, vectors)
    given, outputs, _, _, given_hidden, wide = places(n_most, R)
    scratch = wide + C
    copy_matrix(weights, first, weight1, c, C, R, n_mine, fit)
    if first != second:
        copy_matrix(weights, second, weight2, c * R, R, 1, n_mine * R, fit)
    copy_vector(tables, given, bias2, c, n_mine)
    copy_vector(tables, given_hidden, bias1, 0, R)
    if held < n_rows:  # the rest is read while what is held is on its way
        pool(tables, scratch, x, start, held, n_rows, False, C, vectors)
    wait_for_copies()
    cuda.syncthreads()
    pool(tables, scratch, cache, place, 0, min(held, n_rows), held < n_rows, C, vectors)
    sum_slice(tables, scratch, wide, c, n_mine, C, vector_width(x))
    finish_means(tables, n_mine, factor)
    excite(tables, weights, (first, second, fit), weight2, c, n_mine, n_most, R, activation)
    finish_gates(tables, outputs, given, n_mine, gate)
    collect(tables, wide, outputs, n_most, C)
    scale(tables, wide, 0, gate, factor, cache, place, x, y, start, held, n_rows, C, vectors)
    save(tables, 0, n_mine, mean, n * C + c)
    save(tables, given, n_mine, logit, n * C + c)
    save(tables, given_hidden, R if c == 0 else 0, hidden, n * R)
    cluster_sync()  # others may read this block's outputs up to here


@cuda.jit(max_registers=MOST_REGISTERS)
def fused_pixels_backward_kernel(
    dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden,
    C, n_pixels, R, n_most, held, other, first, second, fit, place, vectors, factor, activation,
    gate,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    tables, cache = cuda.shared.array(0, np.float32), dynamic_shared(x)  # one memory
    weights = dynamic_shared_view(weight1)
    n, c, n_mine, start, n_rows = part_of(C, n_pixels, n_most)
    fetch(cache, place, dy, start, min(held, n_rows) * C, vectors)
    if other > 0:
        fetch(cache, other, x, start, n_rows * C, vectors)
    _, outputs, _, _, given_hidden, wide = places(n_most, R)
    logits, scratch = wide + C, wide + 2 * C
    copy_matrix(weights, second, weight2, c * R, R, 1, n_mine * R, fit)
    if first != second:
        copy_matrix(weights, first, weight1, c, C, R, n_mine, fit)
    copy_vector(tables, logits, logit, n * C, C)
    copy_vector(tables, given_hidden, hidden, n * R, R)
    pool_parts(tables, scratch, cache, place, other, dy, x, start, held, n_rows, C, vectors)
    sum_slice(tables, scratch, wide, c, n_mine, C, vector_width(x))
    finish_dlogits(tables, n_mine, logits + c, gate)
    excite_backward(
        tables, weights, (first, second, fit), weight1, c, n_mine, n_most, C, R, activation, scratch
    )
    collect(tables, wide, outputs, n_most, C)
    scale(tables, logits, wide, gate, factor, cache, place, dy, dx, start, held, n_rows, C, vectors)
    save(tables, 0, n_mine, dlogit, n * C + c)
    save(tables, given_hidden, R if c == 0 else 0, dhidden, n * R)
    cluster_sync()  # others may read this block's outputs up to here
