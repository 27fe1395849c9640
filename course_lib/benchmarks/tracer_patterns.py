"""Access patterns on which the tracer is compared with Nsight Compute: one small kernel each.

Every kernel is written so that the compiler keeps each access as it stands in the source: no two
of them can be merged into a wider one, hoisted out of a branch or shared between iterations.
"""

from dataclasses import dataclass

import numpy as np

from course_lib import cuda
from course_lib.runtime.intrinsics import load_vector, store_vector

BLOCK_SIZE = 256
BLOCKS = 16
N = BLOCKS * BLOCK_SIZE
TILE = 32
PADDED = TILE + 1  # numba takes names for sizes of shared arrays, not sums
TWICE = 2 * BLOCK_SIZE


@cuda.jit
def coalesced(x, y):
    i = cuda.grid(1)
    y[i] = x[i]


@cuda.jit
def stride_2(x, y):
    i = cuda.grid(1)
    y[i] = x[2 * i]


@cuda.jit
def stride_32(x, y):
    i = cuda.grid(1)
    y[i] = x[32 * i]


@cuda.jit
def offset_1(x, y):
    i = cuda.grid(1)
    y[i] = x[i + 1]


@cuda.jit
def broadcast(x, y):
    i = cuda.grid(1)
    y[i] = x[i // 32]


@cuda.jit
def by_column(x, y):
    row = cuda.threadIdx.x
    col = cuda.blockIdx.x
    y[row, col] = x[row, col]


@cuda.jit
def tile_by_column(x, y):
    tile = cuda.shared.array((TILE, TILE), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    first = cuda.blockIdx.x * TILE
    tile[ty, tx] = x[first + ty, tx]
    cuda.syncthreads()
    y[first + ty, tx] = tile[tx, ty]


@cuda.jit
def padded_tile_by_column(x, y):
    tile = cuda.shared.array((TILE, PADDED), np.float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    first = cuda.blockIdx.x * TILE
    tile[ty, tx] = x[first + ty, tx]
    cuda.syncthreads()
    y[first + ty, tx] = tile[tx, ty]


@cuda.jit
def shared_stride_2(x, y):
    numbers = cuda.shared.array(TWICE, np.float32)
    tid, i = cuda.threadIdx.x, cuda.grid(1)
    numbers[2 * tid] = x[i]
    cuda.syncthreads()
    y[i] = numbers[2 * (BLOCK_SIZE - 1 - tid)]


@cuda.jit
def shared_broadcast(x, y):
    numbers = cuda.shared.array(BLOCK_SIZE, np.float32)
    tid, i = cuda.threadIdx.x, cuda.grid(1)
    numbers[tid] = x[i]
    cuda.syncthreads()
    y[i] = numbers[tid // 32 * 32]


@cuda.jit
def shared_float64(x, y):
    numbers = cuda.shared.array(BLOCK_SIZE, np.float64)
    tid, i = cuda.threadIdx.x, cuda.grid(1)
    numbers[tid] = x[i]
    cuda.syncthreads()
    y[i] = numbers[BLOCK_SIZE - 1 - tid]


@cuda.jit
def vector_128_bit(x, y):
    i = 4 * cuda.grid(1)
    values = cuda.local.array(4, np.float32)
    load_vector(values, x, i)
    store_vector(y, i, values)


@cuda.jit
def vector_offset(x, y):
    i = 4 * cuda.grid(1)
    values = cuda.local.array(4, np.float32)
    load_vector(values, x, i + 4)
    store_vector(y, i, values)


@cuda.jit
def partial_warp(x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = x[i]


@cuda.jit
def divergent(x, y, z):
    i = cuda.grid(1)
    if i % 3 == 0:
        y[i] = x[i]
    else:
        z[2 * i] = x[i + 32]


@cuda.jit
def linked_list(links, lengths):
    i = cuda.grid(1)
    place = i
    length = 0
    while place >= 0:
        place = links[place]
        length += 1
    lengths[i] = length


@cuda.jit
def atomic_one_address(x, total):
    cuda.atomic.add(total, 0, x[cuda.grid(1)])


@cuda.jit
def atomic_two_addresses(x, y):
    i = cuda.grid(1)
    cuda.atomic.add(y, i % 2, x[i])


@cuda.jit
def atomic_in_fours(x, y):
    i = cuda.grid(1)
    cuda.atomic.add(y, i // 4, x[i])


@cuda.jit
def atomic_distinct(x, y):
    i = cuda.grid(1)
    cuda.atomic.add(y, i, x[i])


@cuda.jit
def elements_64_bit(x, y):
    i = cuda.grid(1)
    y[i] = x[i]


@cuda.jit
def offset_64_bit(x, y):
    i = cuda.grid(1)
    y[i] = x[i + 1]


@cuda.jit
def elements_16_bit(x, y):
    i = cuda.grid(1)
    y[i] = x[i]


@dataclass(frozen=True)
class Pattern:
    """A kernel, its launch, and how its arrays are made (host arrays, in argument order)."""

    kernel: object
    make: callable
    grid: int = BLOCKS
    block: tuple = BLOCK_SIZE

    @property
    def name(self):
        """The kernel's name, which Nsight Compute shows too."""
        return self.kernel.py_func.__name__


def _floats(*shapes):
    return lambda: [np.ones(shape, np.float32) for shape in shapes]


def _of(dtype, *shapes):
    return lambda: [np.ones(shape, dtype) for shape in shapes]


def _lists():
    # A list of 1 to 8 places for each thread; the lanes of a warp leave the loop one by one.
    length = np.arange(N) % 8 + 1
    links = np.full((8, N), -1)
    for step in range(7):
        links[step] = np.where(length > step + 1, (step + 1) * N + np.arange(N), -1)
    return [links.reshape(-1), np.zeros(N, np.int64)]


# More blocks where hardware counts a few turns of other traffic, so that those few weigh little.
_MANY = 64
_TILES = (_MANY * TILE, TILE)
_LINE = _MANY * BLOCK_SIZE

PATTERNS = [
    Pattern(coalesced, _floats(N, N)),
    Pattern(stride_2, _floats(2 * N, N)),
    Pattern(stride_32, _floats(32 * N, N)),
    Pattern(offset_1, _floats(N + 1, N)),
    Pattern(broadcast, _floats(N // 32, N)),
    Pattern(by_column, _floats((BLOCK_SIZE, 64), (BLOCK_SIZE, 64)), grid=64),
    Pattern(tile_by_column, _floats(_TILES, _TILES), grid=_MANY, block=(TILE, TILE)),
    Pattern(padded_tile_by_column, _floats(_TILES, _TILES), grid=_MANY, block=(TILE, TILE)),
    Pattern(shared_stride_2, _floats(_LINE, _LINE), grid=_MANY),
    Pattern(shared_broadcast, _floats(_LINE, _LINE), grid=_MANY),
    Pattern(shared_float64, _of(np.float64, _LINE, _LINE), grid=_MANY),
    Pattern(vector_128_bit, _floats(4 * N, 4 * N)),
    Pattern(vector_offset, _floats(4 * N + 4, 4 * N)),
    Pattern(partial_warp, _floats(N, N - 44), grid=86, block=48),
    Pattern(divergent, _floats(N + 32, N, 2 * N)),
    Pattern(linked_list, _lists),
    Pattern(atomic_one_address, _floats(N, 1)),
    Pattern(atomic_two_addresses, _floats(N, 2)),
    Pattern(atomic_in_fours, _floats(N, N // 4)),
    Pattern(atomic_distinct, _floats(N, N)),
    Pattern(elements_64_bit, _of(np.float64, N, N)),
    Pattern(offset_64_bit, _of(np.float64, N + 1, N)),
    Pattern(elements_16_bit, _of(np.int16, N, N)),
]
