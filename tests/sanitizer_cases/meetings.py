"""Planted and correct: barriers in functions, in loops, and of the whole grid."""

from numba import cuda, float32

from sanitizer_cases.case import correct, floats, planted

N = 32
UNTRIED = "not tried with compute-sanitizer yet"
HANGS = "it would hang the GPU"


@cuda.jit(device=True)
def turned(tile, value):
    """The value of the thread at the other end of the block."""
    tile[cuda.threadIdx.x] = value
    cuda.syncthreads()
    return tile[N - 1 - cuda.threadIdx.x]


@planted("barrier-divergence", 1, N, floats(N, N), reason=UNTRIED)
@cuda.jit
def function_called_in_both_branches(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    if tid % 2 == 0:
        y[tid] = turned(tile, x[tid])  # BUG: odd threads wait in the other call
    else:
        y[tid] = turned(tile, -x[tid])


@correct(1, N, floats(N, N))
@cuda.jit
def function_called_after_the_branch(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    value = x[tid] if tid % 2 == 0 else -x[tid]
    y[tid] = turned(tile, value)


@correct(1, N, floats(N, N))
@cuda.jit
def function_called_twice(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    value = turned(tile, x[tid])
    cuda.syncthreads()
    y[tid] = turned(tile, value)


@correct(1, N, floats((4, N), (4, N)))
@cuda.jit
def function_called_in_a_loop(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    for row in range(x.shape[0]):
        y[row, tid] = turned(tile, x[row, tid])
        cuda.syncthreads()


@planted("barrier-divergence", 1, N, floats(N, N), reason=UNTRIED)
@cuda.jit
def every_other_round(x, y):
    tid = cuda.threadIdx.x
    for k in range(4):
        if k % 2 == tid % 2:
            cuda.syncthreads()  # BUG: even threads come in other rounds than odd ones
        y[tid] += x[tid]


@correct(1, N, floats(N, N))
@cuda.jit
def every_other_round_for_all(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    for k in range(4):
        if k % 2 == 0:
            tile[tid] = x[tid] + k
            cuda.syncthreads()
        y[tid] += tile[N - 1 - tid]
        if k % 2 == 0:
            continue
        cuda.syncthreads()


@planted("barrier-divergence", 1, N, floats(N, N), reason=UNTRIED, also=("race",))
@cuda.jit
def function_in_other_rounds(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    k = 0
    while k < 4:
        if k % 2 == tid % 2:
            y[tid] = turned(tile, x[tid])  # BUG: half of the threads come a round later
        k += 1


@planted("barrier-divergence", 1, N, floats(N, N), reason=UNTRIED)
@cuda.jit
def rounds_skipped(x, y):
    tid = cuda.threadIdx.x
    for k in range(5):
        if k == tid % 2:
            continue
        cuda.syncthreads()  # BUG: even threads skip round 0, odd ones round 1
        y[tid] += x[tid]


@correct(1, N, floats((3, N), N))
@cuda.jit
def loops_in_loops(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    for row in range(x.shape[0]):
        tile[tid] = x[row, tid]
        half = N // 2
        while half > 0:
            cuda.syncthreads()
            if tid < half:
                tile[tid] += tile[tid + half]
            half //= 2
        cuda.syncthreads()
        y[tid] += tile[0]
        cuda.syncthreads()


@correct(1, N, floats(N, N))
@cuda.jit
def all_break_in_one_round(x, y):
    tile = cuda.shared.array(1, float32)
    tid = cuda.threadIdx.x
    k = 0
    while True:
        if tid == k:
            tile[0] = x[tid]
        cuda.syncthreads()
        if tile[0] > 4:
            break
        k += 1
        cuda.syncthreads()
    y[tid] = k


@correct(2, N, floats(2 * N, 2 * N))
@cuda.jit
def rounds_of_blocks_differ(x, y):
    """Threads of one block come equally often; what another block does is no matter."""
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    i = cuda.grid(1)
    for _ in range(2 + cuda.blockIdx.x):
        tile[tid] = x[i]
        cuda.syncthreads()
        y[i] += tile[N - 1 - tid]
        cuda.syncthreads()


@planted("barrier-mismatch", 2, N, floats(2 * N, 2 * N), reason=HANGS)
@cuda.jit
def grid_barrier_for_some_threads(x, y):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    x[i] = 2 * x[i]
    if cuda.threadIdx.x < 8:
        grid.sync()  # BUG: the other threads never come
    y[i] = x[i]


@planted("exited-before-barrier", 2, 2 * N, floats(4 * N, 4 * N), reason=HANGS)
@cuda.jit
def warps_return_before_the_grid_barrier(x, y):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    if cuda.threadIdx.x < N:
        return  # BUG: a grid barrier counts every thread
    grid.sync()
    y[i] = x[i]


@planted("barrier-mismatch", 3, N, floats(3 * N, 3 * N), reason=HANGS)
@cuda.jit
def grid_barrier_for_some_blocks(x, y):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    if cuda.blockIdx.x < 2:
        grid.sync()  # BUG: the last block never comes
    y[i] = x[i]


@planted("barrier-divergence", 2, N, floats(2 * N, 2 * N), reason=UNTRIED)
@cuda.jit
def grid_barrier_in_both_branches(x, y):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    if i % 2 == 0:
        y[i] = x[i]
        grid.sync()  # BUG: odd threads wait at the other one
    else:
        y[i] = -x[i]
        grid.sync()


@correct(2, N, floats(2 * N, 2 * N))
@cuda.jit
def grid_barrier_in_a_loop(x, y):
    grid = cuda.cg.this_grid()
    i = cuda.grid(1)
    for _ in range(3):
        y[i] = x[x.size - 1 - i]
        grid.sync()
        x[i] = y[i] + 1
        grid.sync()
