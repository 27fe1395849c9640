"""The small layers inside the rung `fused`: each block of a cluster does its channels' share.

The blocks of a cluster work on one sample, and each has a *slice* of its channels. The hidden layer
is linear in the means, so each block can do a share of it alone: the columns of the first matrix
that belong to its channels, times their means. The blocks add up each other's R shares, always in
the same order, and so know the hidden layer after one barrier of the cluster. Of the second matrix
a block needs the rows of its own channels alone. Backward the same happens with the matrices'
roles swapped.

`tables` is the block's shared memory as float32; `places` tells what lies where. `weights` is the
same memory in the dtype of the matrices.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import team_sum
from course_lib.kernels.squeeze_excite.formulas import ZERO, activate, activation_gradient
from course_lib.runtime.cluster import (
    cluster_size,
    cluster_sync,
    load_from_cluster,
)
from course_lib.runtime.intrinsics import load, store, vector_width
from course_lib.runtime.shared import copy_async, wait_for_copies

UNROLL = 4  # numbers that a thread has on their way


@cuda.jit(device=True)
def quotient(a, b):
    """a // b of numbers from 0 to 2³² − 1, for which the chip needs a quarter of the time."""
    return np.int64(np.uint32(a) // np.uint32(b))


@cuda.jit(device=True)
def places(n_most, R):
    """Where in `tables` lie (given, outputs, shares, hidden, given_hidden, rest).

    At 0 lie the inputs of the small layers, one for each channel of a slice of `n_most`.

    given         what was there before for each channel: bias2, or backward the logit
    outputs       of the second layer, for each channel
    shares        what this block adds to each hidden number
    hidden        the hidden numbers
    given_hidden  as `given`: bias1, or backward the hidden number before its activation
    """
    shares = 3 * n_most
    return n_most, 2 * n_most, shares, shares + R, shares + 2 * R, shares + 3 * R


@cuda.jit(device=True)
def copy_vector(tables, at, vector, first, n):
    """tables[at + i] = vector[first + i]."""
    i = np.int64(cuda.threadIdx.x)
    while i < n:
        store(tables, at + i, load(vector, first + i))
        i += cuda.blockDim.x


@cuda.jit(device=True)
def copy_matrix(weights, at, matrix, start, step, n_rows, n_cols, vectors):
    """Begin to copy weights[at + row·n_cols + col] = matrix[start + row·step + col].

    With `vectors` both arrays begin on 16-byte boundaries.
    """
    i, n_threads, width = np.int64(cuda.threadIdx.x), cuda.blockDim.x, vector_width(matrix)
    if vectors and (start | step | n_cols) & (width - 1) == 0:
        per_row = quotient(n_cols, width)
        while i < n_rows * per_row:
            row = quotient(i, per_row)
            col = (i - row * per_row) * width
            copy_async(weights, at + row * n_cols + col, matrix, start + row * step + col)
            i += n_threads
        return
    values, n = cuda.local.array(UNROLL, np.float32), n_rows * n_cols
    while i < n:
        for u in range(UNROLL):
            k = min(i + u * n_threads, n - 1)
            row = quotient(k, n_cols)
            values[u] = load(matrix, start + row * step + k - row * n_cols)
        for u in range(UNROLL):
            if i < n:
                store(weights, at + i, values[u])
            i += n_threads


@cuda.jit(device=True)
def lanes_for(n_cols):
    """log2 of the lanes that work on a row of `n_cols` numbers: 4 to 32 of them."""
    bits = 2
    while bits < 5 and n_cols > 4 << bits:
        bits += 1
    return bits


@cuda.jit(device=True)
def by_rows(tables, out, weights, at, n_rows, n_cols, vector):
    """tables[out + row] = Σ weights[at + row·n_cols + col] · tables[vector + col].

    Ends with a barrier.
    """
    tid, bits = cuda.threadIdx.x, lanes_for(n_cols)
    lanes, n_teams, base = 1 << bits, cuda.blockDim.x >> bits, 0
    rank = np.int64(tid & (lanes - 1))
    while base < n_rows:  # alike for all lanes, which must all take part in the sum
        row, col, total = base + (tid >> bits), rank, ZERO
        if row < n_rows:
            while col < n_cols:
                total += load(weights, at + row * n_cols + col) * load(tables, vector + col)
                col += lanes
        total = team_sum(total, lanes)
        if rank == 0 and row < n_rows:
            store(tables, out + row, total)
        base += n_teams
    cuda.syncthreads()


@cuda.jit(device=True)
def by_columns(tables, out, weights, at, n_rows, n_cols, vector, scratch):
    """tables[out + col] = Σ weights[at + row·n_cols + col] · tables[vector + row].

    `scratch` is the place of a number for each thread. Ends with a barrier.
    """
    tid, n_threads = cuda.threadIdx.x, cuda.blockDim.x
    width = min(n_threads, (n_cols + 31) & -32)
    n_splits, split = quotient(n_threads, width), quotient(tid, width)
    base, rank = 0, tid - split * width
    while base < n_cols:
        col, row, total = base + rank, split, ZERO
        if col < n_cols and split < n_splits:
            while row < n_rows:
                total += load(weights, at + row * n_cols + col) * load(tables, vector + row)
                row += n_splits
        store(tables, scratch + tid, total)
        cuda.syncthreads()
        if split == 0 and col < n_cols:
            k = scratch + tid + width
            while k < scratch + n_splits * width:
                total += load(tables, k)
                k += width
            store(tables, out + col, total)
        cuda.syncthreads()
        base += width


@cuda.jit(device=True)
def sum_over_cluster(tables, out, source, n):
    """tables[out + i] = the sum over the cluster's blocks of their tables[source + i], i < n.

    What they wrote there must lie before a `cluster_sync`. Ends with a barrier.
    """
    values = cuda.local.array(UNROLL, np.float32)
    tid, n_blocks = cuda.threadIdx.x, cluster_size()
    team, n_teams = quotient(tid, n_blocks), quotient(cuda.blockDim.x, n_blocks)
    rank, base = tid - team * n_blocks, 0
    while base < n:
        i = base + team
        for u in range(UNROLL):
            values[u] = ZERO
            if i + u * n_teams < n:
                values[u] = load_from_cluster(tables, source + i + u * n_teams, rank)
        for u in range(UNROLL):
            if base + u * n_teams < n:  # alike for all lanes, which must all take part
                total = team_sum(values[u], n_blocks)
                if rank == 0 and i + u * n_teams < n:
                    store(tables, out + i + u * n_teams, total)
        base += UNROLL * n_teams
    cuda.syncthreads()


@cuda.jit(device=True)
def finish_hidden(tables, hidden, given, R, activation):
    """From the sums of the shares, the hidden numbers; what they were before goes to `given`."""
    i = np.int64(cuda.threadIdx.x)
    while i < R:
        value = load(tables, hidden + i) + load(tables, given + i)
        store(tables, given + i, value)
        store(tables, hidden + i, activate(value, activation))
        i += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def finish_dhidden(tables, hidden, given, R, activation):
    """Backward: the gradients of the hidden numbers before activation, there and at `given`."""
    i = np.int64(cuda.threadIdx.x)
    while i < R:
        d = load(tables, hidden + i)
        d = activation_gradient(d, load(tables, given + i), activation)
        store(tables, hidden + i, d)
        store(tables, given + i, d)
        i += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def excite(tables, weights, held, matrix, c, n_mine, n_most, R, activation):
    """The outputs of the slice's channels, c to c + n_mine, without bias2, from their inputs.

    `weights` holds the slice's columns of the first matrix, and `matrix` is the second.
    """
    first, second, vectors = held
    _, outputs, shares, hidden, given, _ = places(n_most, R)
    by_rows(tables, shares, weights, first, R, n_mine, 0)
    if first == second:  # there was no room for both
        copy_matrix(weights, second, matrix, c * R, R, 1, n_mine * R, vectors)
        wait_for_copies()
    cluster_sync()
    sum_over_cluster(tables, hidden, shares, R)
    finish_hidden(tables, hidden, given, R, activation)
    by_rows(tables, outputs, weights, second, n_mine, R, hidden)


@cuda.jit(device=True)
def excite_backward(tables, weights, held, matrix, c, n_mine, n_most, C, R, activation, scratch):
    """As `excite`: from the gradients of the slice's logits, those of its means.

    `weights` holds the slice's rows of the second matrix, and `matrix` is the first.
    """
    first, second, vectors = held
    _, outputs, shares, hidden, given, _ = places(n_most, R)
    by_columns(tables, shares, weights, second, n_mine, R, 0, scratch)
    if first == second:
        copy_matrix(weights, first, matrix, c, C, R, n_mine, vectors)
        wait_for_copies()
    cluster_sync()
    sum_over_cluster(tables, hidden, shares, R)
    finish_dhidden(tables, hidden, given, R, activation)
    by_columns(tables, outputs, weights, first, R, n_mine, hidden, scratch)


@cuda.jit(device=True)
def save(tables, at, n, array, first):
    """array[first + i] = tables[at + i]."""
    i = np.int64(cuda.threadIdx.x)
    while i < n:
        store(array, first + i, load(tables, at + i))
        i += cuda.blockDim.x
