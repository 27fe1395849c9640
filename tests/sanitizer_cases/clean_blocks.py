"""Correct: one block's barriers, tiles, atomics and bounds, close to the planted bugs."""

from numba import cuda, float32, int32

from sanitizer_cases.case import correct, floats, ints

N = 64


@correct(1, 32, floats((4, 32), (4, 32)))
@cuda.jit
def double_buffered_rows(x, y):
    """Two buffers in turn need one barrier a round: nobody is two rounds ahead."""
    rows = cuda.shared.array((2, 32), float32)
    tid = cuda.threadIdx.x
    for k in range(x.shape[0]):
        rows[k % 2, tid] = x[k, tid]
        cuda.syncthreads()
        y[k, tid] = rows[k % 2, 31 - tid]


@correct((2, 2), (16, 16), floats((32, 32), (32, 32), (32, 32)))
@cuda.jit
def double_buffered_tile(a, b, c):
    """A tiled product that loads the next tiles while it uses these."""
    tiles_a = cuda.shared.array((2, 16, 16), float32)
    tiles_b = cuda.shared.array((2, 16, 16), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    col, row = cuda.grid(2)
    tiles_a[0, ty, tx] = a[row, tx]
    tiles_b[0, ty, tx] = b[ty, col]
    total = float32(0)
    for k in range(2):
        cuda.syncthreads()
        if k == 0:
            tiles_a[1, ty, tx] = a[row, 16 + tx]
            tiles_b[1, ty, tx] = b[16 + ty, col]
        for j in range(16):
            total += tiles_a[k, ty, j] * tiles_b[k, j, tx]
    c[row, col] = total


@correct(2, N, ints(2 * N, 8, modulus=8))
@cuda.jit
def histogram_in_shared_memory(x, y):
    bins = cuda.shared.array(8, int32)
    tid = cuda.threadIdx.x
    if tid < 8:
        bins[tid] = 0
    cuda.syncthreads()
    cuda.atomic.add(bins, x[cuda.grid(1)], 1)
    cuda.syncthreads()
    if tid < 8:
        cuda.atomic.add(y, tid, bins[tid])


@correct(1, N, floats(N, N))
@cuda.jit
def scan_with_two_barriers(x, y):
    sums = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    sums[tid] = x[tid]
    cuda.syncthreads()
    offset = 1
    while offset < N:
        before = sums[tid - offset] if tid >= offset else float32(0)
        cuda.syncthreads()
        sums[tid] += before
        cuda.syncthreads()
        offset *= 2
    y[tid] = sums[tid]


@correct((2, 2), (16, 16), floats((32, 20), (20, 32)))
@cuda.jit
def transpose_with_a_spare_column(x, y):
    tile = cuda.shared.array((16, 17), float32)
    tx = cuda.threadIdx.x
    ty = cuda.threadIdx.y
    col, row = cuda.grid(2)
    if row < x.shape[0] and col < x.shape[1]:
        tile[ty, tx] = x[row, col]
    cuda.syncthreads()
    row = cuda.blockIdx.x * 16 + ty
    col = cuda.blockIdx.y * 16 + tx
    if row < y.shape[0] and col < y.shape[1]:
        y[row, col] = tile[tx, ty]


@correct(3, 32, floats(90, 90))
@cuda.jit
def stencil_with_halo(x, y):
    tile = cuda.shared.array(34, float32)
    i = cuda.grid(1)
    tid = cuda.threadIdx.x
    tile[tid + 1] = x[i] if i < x.size else float32(0)
    if tid == 0:
        tile[0] = x[i - 1] if i > 0 else float32(0)
        tile[33] = x[i + 32] if i + 32 < x.size else float32(0)
    cuda.syncthreads()
    if i < y.size:
        y[i] = tile[tid] + tile[tid + 1] + tile[tid + 2]


@correct(5, 32, floats(96, 96))
@cuda.jit
def whole_blocks_return(x, y):
    tile = cuda.shared.array(32, float32)
    if cuda.blockIdx.x * 32 >= x.size:
        return
    tid = cuda.threadIdx.x
    tile[tid] = x[cuda.grid(1)]
    cuda.syncthreads()
    y[cuda.grid(1)] = tile[31 - tid]


@correct(1, N, floats(N, 32))
@cuda.jit
def whole_warps_return(x, y):
    """The hardware counts a warp that has left out of later barriers."""
    tile = cuda.shared.array(32, float32)
    tid = cuda.threadIdx.x
    if tid >= 32:
        return
    tile[tid] = x[tid]
    cuda.syncthreads()
    y[tid] = tile[31 - tid]


@correct(4, 32, floats(4 * 32, 4 * 32))
@cuda.jit
def barrier_in_a_branch_for_whole_blocks(x, y):
    tile = cuda.shared.array(32, float32)
    tid = cuda.threadIdx.x
    i = cuda.grid(1)
    tile[tid] = x[i]
    if cuda.blockIdx.x % 2 == 0:
        cuda.syncthreads()
        y[i] = tile[31 - tid]
    else:
        y[i] = tile[tid]


@correct(2, N, floats(100, 2 * N))
@cuda.jit
def guarded_work_before_barrier(x, y):
    tile = cuda.shared.array(N, float32)
    i = cuda.grid(1)
    tid = cuda.threadIdx.x
    tile[tid] = x[i] if i < x.size else float32(0)
    cuda.syncthreads()
    y[i] = tile[N - 1 - tid]


@correct(1, N, floats(N, N), shared=8 * N)
@cuda.jit
def dynamic_memory_in_slices(x, y):
    one = cuda.shared.array(0, float32)[:N]
    two = cuda.shared.array(0, int32)[N:]
    tid = cuda.threadIdx.x
    one[tid] = x[tid]
    two[tid] = tid
    cuda.syncthreads()
    y[tid] = one[two[N - 1 - tid]]


@correct(1, N, floats(N, N))
@cuda.jit
def shared_memory_used_again(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    cuda.syncthreads()
    value = tile[N - 1 - tid]
    cuda.syncthreads()
    tile[tid] = value + 1
    cuda.syncthreads()
    y[tid] = tile[(tid + 1) % N]


@correct(1, 32, floats(128, 32))
@cuda.jit
def local_sums_zeroed(x, y):
    sums = cuda.local.array(2, float32)
    i = cuda.grid(1)
    for k in range(2):
        sums[k] = 0
    for k in range(4):
        sums[k % 2] += x[4 * i + k]
    y[i] = sums[0] - sums[1]


@correct(2, N, ints(2 * N, 1))
@cuda.jit
def all_write_the_same(x, found):
    """A flag that many raise to the same value: whoever comes last, it is raised."""
    if x[cuda.grid(1)] % 2 == 1:
        found[0] = 1


@correct(2, N, floats(100, 100))
@cuda.jit
def neighbours_inside(x, y):
    i = cuda.grid(1)
    if 0 < i < x.size - 1:
        y[i] = x[i - 1] + x[i + 1]
    elif i < x.size:
        y[i] = x[i]


@correct(1, N, ints(N, 3))
@cuda.jit
def votes_at_barriers(x, y):
    tid = cuda.threadIdx.x
    flags = cuda.shared.array(N, int32)
    flags[tid] = x[tid] % 3
    count = cuda.syncthreads_count(x[tid] % 2)
    if tid == 0:
        y[0] = count
        y[1] = flags[N - 1]


@correct(1, N, floats(N, N))
@cuda.jit
def two_arrays_on_one_line(x, y):
    """They are two, whatever numba's own simulator makes of it."""
    tid = cuda.threadIdx.x
    one, two = cuda.shared.array(N, float32), cuda.shared.array(N, float32)
    one[tid] = x[tid]
    two[tid] = 2 * x[tid]
    cuda.syncthreads()
    y[tid] = one[N - 1 - tid] + two[tid]
