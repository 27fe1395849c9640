"""Planted: blocks that race, and data passed between them without a fence."""

from numba import cuda, float32, int32, uint32

from sanitizer_cases.case import floats, ints, planted

N = 32
WITH_HALO = N + 1
GLOBAL_ONLY = "racecheck looks at shared memory, and this race is on global memory"
NO_FENCE = "no tool of compute-sanitizer sees a missing fence"


@planted("race-between-blocks", 8, 1, floats(8, 1), reason=GLOBAL_ONLY)
@cuda.jit
def block_sums_without_atomics(x, y):
    y[0] += x[cuda.blockIdx.x]  # BUG: changes are lost


@planted("race-between-blocks", 4, N, floats(4 * N + 1), reason=GLOBAL_ONLY)
@cuda.jit
def stencil_in_place(x):
    tile = cuda.shared.array(WITH_HALO, float32)
    i = cuda.grid(1)
    tid = cuda.threadIdx.x
    tile[tid] = x[i]
    if tid == 0:
        tile[N] = x[i + N]
    cuda.syncthreads()
    x[i] = tile[tid] + tile[tid + 1]  # BUG: the block to the left may not have read it


@planted("race-between-blocks", 4, N, floats(4 * N, 1), reason=GLOBAL_ONLY)
@cuda.jit
def every_block_writes_the_result(x, y):
    if cuda.threadIdx.x == 0:
        y[0] = x[cuda.grid(1)]  # BUG: the last block wins


@planted("race-between-blocks", 4, N, floats(4 * N, 4, 1), reason=GLOBAL_ONLY)
@cuda.jit
def totals_read_by_block_0(x, partial, total):
    tid = cuda.threadIdx.x
    if tid == 0:
        first = cuda.grid(1)
        partial[cuda.blockIdx.x] = x[first] + x[first + 1]
    cuda.syncthreads()
    if cuda.blockIdx.x == cuda.gridDim.x - 1 and tid == 0:
        for block in range(cuda.gridDim.x):
            total[0] += partial[block]  # BUG: a block barrier does not wait for other blocks


@planted("race-between-blocks", 4, N, lambda: (*floats(4 * N, 4)(), *ints(1)(), *floats(1)()),
         reason=NO_FENCE)
@cuda.jit
def last_block_without_fence(x, partial, finished, total):
    is_last = cuda.shared.array(1, int32)
    tid = cuda.threadIdx.x
    if tid == 0:
        partial[cuda.blockIdx.x] = x[cuda.grid(1)]
        is_last[0] = cuda.atomic.add(finished, 0, 1) == cuda.gridDim.x - 1
    cuda.syncthreads()
    if is_last[0] and tid == 0:
        sum_of_blocks = float32(0)
        for block in range(cuda.gridDim.x):
            sum_of_blocks += partial[block]  # BUG: no fence between partial and finished
        total[0] = sum_of_blocks


@planted("race-between-blocks", 6, 1, ints(1, 1), reason=NO_FENCE)
@cuda.jit
def lock_without_fence(lock, total):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        cuda.nanosleep(uint32(20))
    total[0] += cuda.blockIdx.x + 1  # BUG: no fence after taking the lock and before giving it up
    cuda.atomic.exch(lock, 0, 0)


@planted("race-between-blocks", 2, 1, lambda: (*ints(1)(), *floats(1, 1)()), reason=NO_FENCE)
@cuda.jit
def flag_before_data(flag, data, out):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
        cuda.threadfence()
        data[0] = 42
    else:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(uint32(20))
        cuda.threadfence()
        out[0] = data[0]  # BUG: the flag says ready before the data is written


@planted("race-between-blocks", 2, 1, lambda: (*ints(1)(), *floats(1, 1)()), reason=NO_FENCE)
@cuda.jit
def fence_for_the_block_alone(flag, data, out):
    if cuda.blockIdx.x == 0:
        data[0] = 42
        cuda.threadfence_block()
        cuda.atomic.exch(flag, 0, 1)
    else:
        while cuda.atomic.add(flag, 0, 0) == 0:
            cuda.nanosleep(uint32(20))
        cuda.threadfence()
        out[0] = data[0]  # BUG: the writer's fence reaches its own block alone
