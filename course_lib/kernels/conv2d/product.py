"""Inner loops: a block multiplies a tile of rows by a tile of columns, both in shared memory.

What is multiplied comes in steps of TERMS numbers of each row and column, `t` by `t`: number t of
line m lies at t·(lines + pad) + m. STAGES pairs of tiles are in shared memory: one is worked on
while the other is on its way. The sums stay in registers, of each thread `per_thread` rows and
columns.
"""

from collections import namedtuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.intrinsics import load_vector
from course_lib.runtime.intrinsics.matrix import load_word, multiply_add, round_tf32, subtract_words

TERMS, STAGES = 16, 2
BATCH = 4  # numbers that a thread fetches before it thinks of the next ones
SLOTS = 2 * TERMS  # terms of which it is known in advance where they lie: two tiles

#: A kind of inner loop, and what it needs.
#:
#: rows, columns            of the block's tile
#: n_threads                of a block
#: pad                      numbers of a tile that lie unused between one t and the next
#: rows_together            rows of the tile that lie together and are worked on by the same warps
#: n_parts                  of the sums, each small enough for the shared memory of a pair of tiles
#: per_thread               (rows, columns) of sums that each thread makes
#: row_of(i), column_of(j)  which of the tile's they are
#: sum_of(i, j)             where in `sums`, float32, the thread keeps that one
#: multiply(sums, tiles, row_tile, column_tile, exact)  adds the products of a pair of tiles
Engine = namedtuple(
    "Engine",
    "name rows columns n_threads pad rows_together n_parts per_thread row_of column_of sum_of "
    "multiply",
)


@cuda.jit(device=True)
def batches(n_lines):
    """How many batches of numbers each thread fetches for a tile of so many lines.

    From the block's size as the chip tells it, which a compiler doesn't know: it would write out
    all the fetches one after another, and keep what each of them needs in registers.
    """
    return n_lines * TERMS // (BATCH * cuda.blockDim.x)


# --- multiplications by element: 8 × 8 sums a thread ---------------------------------------------

TILE, HALF, LANES = 64, 32, 8  # lanes: threads of the block in each direction
SCALAR_PITCH = TILE + 4  # so that neighbouring t begin in different banks, on 16-byte boundaries


@cuda.jit(device=True)
def _scalar_row(i):
    """Four in either half of the tile, so that a warp reads shared memory without conflicts."""
    return (i >> 2) * HALF + cuda.threadIdx.x // LANES * 4 + (i & 3)


@cuda.jit(device=True)
def _scalar_column(j):
    return (j >> 2) * HALF + cuda.threadIdx.x % LANES * 4 + (j & 3)


@cuda.jit(device=True)
def _scalar_sum(i, j):
    return i * 8 + j


@cuda.jit(device=True)
def _scalar_multiply(sums, tiles, row_tile, column_tile, exact):
    a, b = cuda.local.array((2, 4), np.float32), cuda.local.array((2, 4), np.float32)
    row = row_tile + cuda.threadIdx.x // LANES * 4
    column = column_tile + cuda.threadIdx.x % LANES * 4
    for t in range(TERMS):
        for half in range(2):
            load_vector(a[half], tiles, row + t * SCALAR_PITCH + half * HALF)
            load_vector(b[half], tiles, column + t * SCALAR_PITCH + half * HALF)
        for i in range(8):
            for j in range(8):
                sums[i * 8 + j] += a[i >> 2, i & 3] * b[j >> 2, j & 3]


SCALAR = Engine(
    "scalar", TILE, TILE, LANES * LANES, 4, TILE, 1, (8, 8), _scalar_row, _scalar_column,
    _scalar_sum, _scalar_multiply,
)  # fmt: skip


# --- tensor cores: 64 × 32 sums a warp -----------------------------------------------------------

WARP_ROWS, WARP_COLUMNS = 64, 32
N_ROWS, N_COLUMNS = WARP_ROWS // 16, WARP_COLUMNS // 8  # products of one warp, 16 × 8 each
N_WORDS = 2 * N_COLUMNS


def tensor_engine(rows, columns):
    """The engine whose warps multiply on tensor cores: in TF32, or `exact`, by three products.

    A float32 is the sum of two TF32 numbers to within 2⁻²² of it: big + small. Of the four products
    of two such sums the smallest is left out, and the others are added up from the small ones on.
    A tensor core cuts off what it adds up, always towards 0, so that a long sum drifts; these few
    products are therefore summed by themselves, and added with rounding (Ootomo and Yokota, 2022).
    """
    n_warps_across = columns // WARP_COLUMNS
    row_pitch, column_pitch = rows + 8, columns + 8  # four t's and eight lines: all 32 banks

    @cuda.jit(device=True)
    def row_of(i):
        warp_id, lane_id = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        return warp_id // n_warps_across * WARP_ROWS + i * 8 + lane_id // 4

    @cuda.jit(device=True)
    def column_of(j):
        warp_id, lane_id = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        return warp_id % n_warps_across * WARP_COLUMNS + (j >> 1) * 8 + lane_id % 4 * 2 + (j & 1)

    @cuda.jit(device=True)
    def sum_of(i, j):
        return ((i >> 1) * N_COLUMNS + (j >> 1)) * 4 + (i & 1) * 2 + (j & 1)

    @cuda.jit(device=True)
    def split(big, small, n, exact):
        """big and small parts of the first `n` numbers of `big`."""
        for i in range(n):
            number = big[i]
            big[i] = round_tf32(number)
            if exact:
                small[i] = subtract_words(number, big[i])

    @cuda.jit(device=True)
    def multiply(sums, tiles, row_tile, column_tile, exact):
        a, a_rest = cuda.local.array(4, np.uint32), cuda.local.array(4, np.uint32)
        b = cuda.local.array(N_WORDS, np.uint32)
        b_rest = cuda.local.array(N_WORDS, np.uint32)
        few = cuda.local.array(4, np.float32)
        warp_id, lane_id = cuda.threadIdx.x // 32, cuda.threadIdx.x % 32
        group, member = lane_id // 4, lane_id % 4
        row = row_tile + warp_id // n_warps_across * WARP_ROWS + group + member * row_pitch
        column = column_tile + warp_id % n_warps_across * WARP_COLUMNS + group
        column += member * column_pitch
        for step in range(TERMS // 8):
            for j in range(N_WORDS):
                at = column + (8 * step + 4 * (j & 1)) * column_pitch
                b[j] = load_word(tiles, at + (j >> 1) * 8)
            split(b, b_rest, N_WORDS, exact)
            for i in range(N_ROWS):
                for r in range(4):
                    at = row + (8 * step + 4 * (r >> 1)) * row_pitch
                    a[r] = load_word(tiles, at + i * 16 + (r & 1) * 8)
                split(a, a_rest, 4, exact)
                for j in range(N_COLUMNS):
                    place = (i * N_COLUMNS + j) * 4
                    if exact:
                        for r in range(4):
                            few[r] = ZERO
                        multiply_add(few, 0, a_rest, 0, b, 2 * j, tiles)
                        multiply_add(few, 0, a, 0, b_rest, 2 * j, tiles)
                        multiply_add(few, 0, a, 0, b, 2 * j, tiles)
                        for r in range(4):
                            sums[place + r] += few[r]
                    else:
                        multiply_add(sums, place, a, 0, b, 2 * j, tiles)

    n_threads = rows // WARP_ROWS * n_warps_across * 32
    return Engine(
        f"tensor {rows}", rows, columns, n_threads, 8, WARP_ROWS, rows // 64,
        (2 * N_ROWS, 2 * N_COLUMNS), row_of, column_of, sum_of, multiply,
    )  # fmt: skip
