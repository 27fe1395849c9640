"""Planted and correct: loops that wait for another thread's write.

A planted one compiles to a loop that reads nothing and jumps to itself.
"""

from numba import cuda, int32, uint32

from sanitizer_cases.case import correct, floats, ints, planted

N = 32
PAIR = 0b11
HANGS = "it would hang the GPU"
GLOBAL_ONLY = "racecheck looks at shared memory, and this race is on global memory"
GOAL = 3


@planted("endless-poll", 2, 1, ints(1, 1), reason=HANGS)
@cuda.jit
def flag_read_plainly(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while flag[0] == 0:  # BUG: read once
            pass
    y[0] = 1


@planted("endless-poll", (GOAL, 2), 1, ints(2, 2), reason=HANGS)
@cuda.jit
def counter_read_plainly(done, y):
    n = cuda.blockIdx.y
    cuda.threadfence()
    cuda.atomic.add(done, n, 1)
    while done[n] < GOAL:  # BUG: read once
        pass
    y[n] = 1


@planted("endless-poll", GOAL, 1, ints(1, 1), reason=HANGS)
@cuda.jit
def counter_unequal(done, y):
    cuda.atomic.add(done, 0, 1)
    while done[0] != GOAL:  # BUG: read once
        pass
    y[0] = 1


@planted("endless-poll", GOAL, 1, ints(1, 1), reason=HANGS)
@cuda.jit
def counter_less_its_goal(done, y):
    cuda.atomic.add(done, 0, 1)
    while done[0] - GOAL < 0:  # BUG: read once
        pass
    y[0] = 1


@planted("endless-poll", 2, 1, ints(1, 1), reason=HANGS)
@cuda.jit
def flag_read_with_a_hint(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while cuda.ldcv(flag, 0) == 0:  # BUG: the compiler takes this load out of the loop too
            pass
    y[0] = 1


@planted("endless-poll", 2, 1, ints(1, 1), reason=HANGS)
@cuda.jit
def left_by_a_break(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while True:
            if flag[0] != 0:  # BUG: read once
                break
    y[0] = 1


@planted("endless-poll", 2, 1, ints(1, 1), reason=HANGS)
@cuda.jit
def read_into_a_name(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        seen = int32(0)
        while seen == 0:
            seen = flag[0]  # BUG: read once
    y[0] = 1


@planted("endless-poll", 2, 1, ints(1, 2), reason=HANGS)
@cuda.jit
def rounds_are_counted(flag, y):
    rounds = 0
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while flag[0] == 0:  # BUG: counting makes the compiler read nothing again
            rounds += 1
    y[cuda.blockIdx.x] = rounds


@cuda.jit(device=True)
def is_set(flag):
    """Reads once."""
    return flag[0] != 0


@planted("endless-poll", 2, 1, ints(1, 1), reason=HANGS, also=("race-between-blocks",))
@cuda.jit
def flag_read_by_a_function(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while not is_set(flag):  # BUG: what the function does is put in here
            pass
    y[0] = 1


@planted("endless-poll", 1, N, floats(N, N), reason=HANGS)
@cuda.jit
def shared_flag_read_plainly(x, y):
    ready = cuda.shared.array(1, int32)
    tid = cuda.threadIdx.x
    if tid == 0:
        ready[0] = 0
    cuda.syncthreads()
    if tid == 0:
        cuda.atomic.exch(ready, 0, 1)
    else:
        while ready[0] == 0:  # BUG: read once
            pass
    y[tid] = x[tid]


@planted("endless-poll", 3, 1, ints(2, 1), reason=HANGS)
@cuda.jit
def two_flags_read_plainly(flags, y):
    if cuda.blockIdx.x < 2:
        cuda.atomic.exch(flags, cuda.blockIdx.x, 1)
    else:
        while flags[0] == 0 or flags[1] == 0:  # BUG: each is read once
            pass
        y[0] = 1


@correct(2, 1, ints(1, 1))
@cuda.jit
def read_between_sleeps(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while flag[0] == 0:
            cuda.nanosleep(uint32(20))
        y[0] = 1


@correct(2, 1, ints(1, 1))
@cuda.jit
def read_between_fences(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while flag[0] == 0:
            cuda.threadfence()
        y[0] = 1


@cuda.jit(device=True)
def fence():
    """A fence in a function."""
    cuda.threadfence()


@correct(2, 1, ints(1, 1))
@cuda.jit
def fenced_by_a_function(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while flag[0] == 0:
            fence()
        y[0] = 1


@correct(2, 1, ints(1, 2))
@cuda.jit
def read_between_atomics(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while flag[0] == 0:
            cuda.atomic.add(y, 1, 1)
        y[0] = 1


@correct(2, 1, ints(1, 2))
@cuda.jit
def read_between_stores(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        rounds = 0
        while flag[0] == 0:
            y[1] = rounds
            rounds += 1
        y[0] = 1


@correct(2, 2, ints(1, 4))
@cuda.jit
def read_between_warp_barriers(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while flag[0] == 0:
            cuda.syncwarp(PAIR)
        y[cuda.grid(1)] = 1


@correct(2, 2, ints(1, 4))
@cuda.jit
def read_for_a_vote(flag, y):
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while not cuda.all_sync(PAIR, flag[0] != 0):
            pass
        y[cuda.grid(1)] = 1


@correct(GOAL, 1, ints(1, GOAL))
@cuda.jit
def counter_asked_with_an_atomic(done, y):
    cuda.atomic.add(done, 0, 1)
    while cuda.atomic.add(done, 0, 0) < GOAL:
        pass
    y[cuda.blockIdx.x] = 1


@planted("race-between-blocks", 2, 1, ints(1, 2), reason=GLOBAL_ONLY)
@cuda.jit
def given_up_after_a_while(flag, y):
    """It ends, but whether it sees the flag is anybody's guess."""
    rounds = 0
    if cuda.blockIdx.x == 0:
        cuda.atomic.exch(flag, 0, 1)
    else:
        while flag[0] == 0 and rounds < 100:  # BUG: a plain read beside an atomic
            rounds += 1
    y[cuda.blockIdx.x] = rounds


@correct(1, N, floats(N, N))
@cuda.jit
def searched_from_the_start(x, y):
    """The index moves on, so that each round reads another element."""
    place = 0
    while x[place] < cuda.threadIdx.x:
        place += 1
    y[cuda.threadIdx.x] = place


@correct(1, N, floats(N, N))
@cuda.jit
def searched_by_halves(x, y):
    low, high = 0, x.size
    while low < high:
        middle = (low + high) // 2
        if x[middle] < cuda.threadIdx.x:
            low = middle + 1
        else:
            high = middle
    y[cuda.threadIdx.x] = low


@correct(1, 1, floats(1, 1))
@cuda.jit
def left_in_the_first_round(x, y):
    while x[0] > 0:
        y[0] = 1
        break
