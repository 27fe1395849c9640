"""Planted: barriers that not all threads reach, shuffles without a partner, waiting for ever."""

from numba import cuda, float32, uint32

from sanitizer_cases.case import floats, ints, planted

N = 64
COUNTED = "synccheck, as tried on an H200, is content when threads that returned are missing"
HANGS = "it would hang the GPU"
UNDEFINED = "compute-sanitizer does not follow the values of shuffles"


@planted("barrier-divergence", 1, N, floats(N, N), tool="synccheck")
@cuda.jit
def barrier_in_both_branches(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    if tid % 2 == 0:
        tile[tid] = x[tid]
        cuda.syncthreads()  # BUG: odd threads wait at another barrier
    else:
        tile[tid] = -x[tid]
        cuda.syncthreads()
    y[tid] = tile[N - 1 - tid]


@planted("barrier-divergence", 1, N, floats(N, N), tool="synccheck", also=("barrier-mismatch",))
@cuda.jit
def extra_barrier_for_some(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    if tid < 16:
        cuda.syncthreads()  # BUG: the others go on to the next barrier
    cuda.syncthreads()
    y[tid] = tile[tid]


@planted("barrier-mismatch", 1, N, floats(N, N), tool="synccheck")
@cuda.jit
def barrier_for_some(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    tile[tid] = x[tid]
    if tid < 16:
        cuda.syncthreads()  # BUG: the others never come
    y[tid] = tile[tid]


@planted("barrier-mismatch", 1, N, floats((3, N), N), reason=COUNTED)
@cuda.jit
def barrier_in_uneven_loop(x, y):
    tile = cuda.shared.array(N, float32)
    tid = cuda.threadIdx.x
    rounds = 2 + tid % 2
    for k in range(rounds):
        tile[tid] = x[k, tid]
        cuda.syncthreads()  # BUG: odd threads come once more
        y[tid] += tile[tid]


@planted("exited-before-barrier", 2, N, floats(100, 2 * N), reason=COUNTED)
@cuda.jit
def return_before_barrier(x, y):
    tile = cuda.shared.array(N, float32)
    i = cuda.grid(1)
    tid = cuda.threadIdx.x
    tile[tid] = 0
    if i >= x.size:
        return  # BUG: the rest of its warp waits at the barrier
    tile[tid] = x[i]
    cuda.syncthreads()
    y[i] = tile[tid]


@planted("shuffle-inactive-lane", 1, 32, floats(32, 32),
         reason="synccheck takes lanes that have exited for absent ones")
@cuda.jit
def shuffle_in_a_branch(x, y):
    lane = cuda.laneid
    value = x[lane]
    if lane < 8:
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, 1)  # BUG: 24 lanes never come
        y[lane] = value


@planted("shuffle-inactive-lane", 1, 20, floats(20, 1), reason=UNDEFINED)
@cuda.jit
def shuffle_past_a_partial_warp(x, y):
    value = x[cuda.laneid]
    for step in range(5):
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, 16 >> step)  # BUG: the warp has 20 lanes
    if cuda.laneid == 0:
        y[0] = value


@planted("shuffle-inactive-lane", 1, 32, floats(32, 32), reason=UNDEFINED)
@cuda.jit
def shuffle_from_outside_the_mask(x, y):
    lane = cuda.laneid
    value = x[lane]
    if lane < 16:
        y[lane] = cuda.shfl_sync(0x0000FFFF, value, 16)  # BUG: lane 16 is not in the mask


@planted("shuffle-inactive-lane", 1, 32, floats(32, 32), reason=HANGS)
@cuda.jit
def partners_wait_at_the_barrier(x, y):
    lane = cuda.laneid
    value = x[lane]
    if lane < 16:
        value = cuda.shfl_down_sync(0xFFFFFFFF, value, 1)  # BUG: half of the lanes wait below
    cuda.syncthreads()
    y[lane] = value


@planted("shuffle-inactive-lane", 1, 32, floats(32, 32), reason=HANGS)
@cuda.jit
def mask_without_the_caller(x, y):
    lane = cuda.laneid
    y[lane] = cuda.shfl_xor_sync(0x0000FFFF, x[lane], 1)  # BUG: lanes 16-31 are not in the mask


@planted("deadlock", 2, 1, ints(1, 1), reason=HANGS)
@cuda.jit
def nobody_sets_the_flag(flag, y):
    if cuda.blockIdx.x == 1:
        while cuda.atomic.add(flag, 0, 0) == 0:  # BUG: nobody ever writes it
            cuda.nanosleep(uint32(20))
    y[0] = 1


@planted("deadlock", 4, 1, ints(1, 1), reason=HANGS)
@cuda.jit
def lock_never_let_go(lock, total):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:  # BUG: the first to get it keeps it
        cuda.nanosleep(uint32(20))
    cuda.threadfence()
    total[0] += 1
    cuda.threadfence()


@planted("deadlock", 1, N, floats(N, N), reason=HANGS)
@cuda.jit
def loop_that_never_ends(x, y):
    tid = cuda.threadIdx.x
    step = N
    while step > 0:  # BUG: `step` stays at 1 once it is there
        y[tid] += x[tid]
        step = (step + 1) // 2
