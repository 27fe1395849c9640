"""The gradients of both dense layers' weights: sums over the samples.

    dweight2[c, r] = Σ dlogit[n, c] · act(hidden[n, r])     dbias2[c] = Σ dlogit[n, c]
    dweight1[r, c] = Σ dhidden[n, r] · mean[n, c]           dbias1[r] = Σ dhidden[n, r]

Both have one form: rows × columns of numbers that stand in two tables, a sample to each line. A
block takes TILE × TILE of them, with SAMPLES lines of both tables in shared memory at a time. Its
order of addition is fixed. All rungs use this kernel.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.squeeze_excite.dense import quotient
from course_lib.kernels.squeeze_excite.formulas import IDENTITY, activate
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import allow_next_kernel, store, wait_for_previous_kernel

BLOCK_SIZE = 256
TILE = 32
SAMPLES = 32
ROW_STEP = BLOCK_SIZE // TILE
ROWS_PER_THREAD = TILE // ROW_STEP  # of TILE rows, or as many samples
TOGETHER = 8  # samples, read from shared memory at once; a divisor of SAMPLES


@cuda.jit(device=True)
def take(values, table, n, N, first, width):
    """values[u] = table[n + i, first + j], 0 outside; (i, j) goes through a tile with `u`."""
    col, row = first + cuda.threadIdx.x % TILE, n + cuda.threadIdx.x // TILE
    for u in range(ROWS_PER_THREAD):
        values[u] = ZERO
        if row + u * ROW_STEP < N and col < width:
            values[u] = table[(row + u * ROW_STEP) * width + col]


@cuda.jit(device=True)
def put(target, values, activation):
    """target[i, j] = activate(values[u]), for the elements that `take` took."""
    col, row = cuda.threadIdx.x % TILE, cuda.threadIdx.x // TILE
    for u in range(ROWS_PER_THREAD):
        target[row + u * ROW_STEP, col] = activate(values[u], activation)


@cuda.jit(device=True)
def tile_of_products(left, right, a, b, dweight, dbias, N, n_rows, n_cols, activation):
    """A tile of dweight[i, j] = Σ left[n, i] · activate(right[n, j]), and dbias[i] = Σ left."""
    n_tiles = (n_cols + TILE - 1) // TILE
    tile = quotient(cuda.blockIdx.x, n_tiles)
    first_row, first_col = tile * TILE, (cuda.blockIdx.x - tile * n_tiles) * TILE
    j, i = cuda.threadIdx.x % TILE, cuda.threadIdx.x // TILE
    totals = cuda.local.array(ROWS_PER_THREAD, np.float32)
    sums = cuda.local.array(ROWS_PER_THREAD, np.float32)
    of_left = cuda.local.array(ROWS_PER_THREAD, np.float32)
    of_right = cuda.local.array(ROWS_PER_THREAD, np.float32)
    for k in range(ROWS_PER_THREAD):
        totals[k] = ZERO
        sums[k] = ZERO
    for n in range(0, N, SAMPLES):
        take(of_left, left, n, N, first_row, n_rows)
        take(of_right, right, n, N, first_col, n_cols)
        put(a, of_left, IDENTITY)
        put(b, of_right, activation)
        cuda.syncthreads()
        for m in range(0, min(SAMPLES, N - n), TOGETHER):
            for s in range(TOGETHER):  # past the last sample lie zeros
                for k in range(ROWS_PER_THREAD):
                    totals[k] += a[m + s, i + k * ROW_STEP] * b[m + s, j]
                    sums[k] += a[m + s, i + k * ROW_STEP]
        cuda.syncthreads()
    for k in range(ROWS_PER_THREAD):
        row, col = first_row + i + k * ROW_STEP, first_col + j
        if row < n_rows and col < n_cols:
            store(dweight, row * n_cols + col, totals[k])
            if col == 0:
                store(dbias, row, sums[k])


@cuda.jit
def weight_gradients_kernel(
    dlogit, hidden, dhidden, mean, dweight1, dbias1, dweight2, dbias2, N, C, R, activation
):
    # blockIdx: (tile, which of the two layers).
    allow_next_kernel()
    wait_for_previous_kernel()
    a = cuda.shared.array((SAMPLES, TILE), np.float32)
    b = cuda.shared.array((SAMPLES, TILE), np.float32)
    if cuda.blockIdx.y == 0:
        tile_of_products(dlogit, hidden, a, b, dweight2, dbias2, N, C, R, activation)
    else:
        tile_of_products(dhidden, mean, a, b, dweight1, dbias1, N, R, C, IDENTITY)


def launch_weight_gradients(problem, dlogit, hidden, dhidden, mean, gradients):
    """Fill `gradients`: dweight1, dbias1, dweight2, dbias2."""
    N, C, R = problem.N, problem.C, problem.R
    launch(
        weight_gradients_kernel, (-(-C // TILE) * -(-R // TILE), 2), BLOCK_SIZE,
        dlogit, hidden, dhidden, mean, *gradients, N, C, R, problem.activation,
        flat=True, overlap=True,
    )  # fmt: skip


def specialisations(dtype):
    """(label, kernel, argument types) for weights of `dtype`."""
    sums, weight = ("float32", 1), (dtype, 1)
    types = [*[sums] * 4, *[weight] * 4, *["int64"] * 4]
    yield f"squeeze_excite.backward weights {dtype}", weight_gradients_kernel, types
