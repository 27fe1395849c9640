"""Planted and correct: plain loads and stores between blocks, with fences and cache hints."""

from numba import cuda, int32, uint32

from sanitizer_cases.case import correct, floats, ints, planted

GLOBAL_ONLY = "racecheck looks at shared memory, and this race is on global memory"


@planted("race-between-blocks", 4, 1, ints(1), reason=GLOBAL_ONLY)
@cuda.jit
def counted_around_a_fence(count):
    old = count[0]
    cuda.threadfence()
    count[0] = old + 1  # BUG: a fence makes no update whole


@planted("race-between-blocks", 4, 1, ints(1), reason=GLOBAL_ONLY)
@cuda.jit
def counted_past_the_cache(count):
    old = cuda.ldcg(count, 0)
    cuda.threadfence()
    cuda.stcg(count, 0, int32(old + 1))  # BUG: hints make no update whole


@planted("race-between-blocks", 4, 1, ints(1), reason=GLOBAL_ONLY)
@cuda.jit
def last_fenced_store_wins(y):
    cuda.threadfence()
    y[0] = cuda.blockIdx.x  # BUG: the last block wins


@planted("race-between-blocks", 4, 1, ints(4, 4), reason=GLOBAL_ONLY)
@cuda.jit
def neighbour_read_past_the_cache(x, y):
    i = cuda.blockIdx.x
    cuda.stcg(x, i, int32(7))
    y[i] = cuda.ldcg(x, (i + 1) % 4)  # BUG: the neighbour may not have stored it


@planted("race-between-blocks", 4, 1, lambda: (*ints(1)(), *floats(4)()), reason=GLOBAL_ONLY)
@cuda.jit
def tickets_without_atomics(ticket, y):
    cuda.threadfence()
    mine = ticket[0]
    cuda.threadfence()
    ticket[0] = mine + 1  # BUG: two blocks may draw the same ticket
    cuda.threadfence()
    cuda.atomic.add(y, mine % 4, 1)


@planted("race-between-blocks", 5, 1, ints(1, 1, 5), reason=GLOBAL_ONLY)
@cuda.jit
def served_by_a_store(tickets, serving, log):
    mine = cuda.atomic.add(tickets, 0, 1)
    while cuda.atomic.add(serving, 0, 0) != mine:
        cuda.nanosleep(uint32(10))
    cuda.threadfence()
    log[mine] = cuda.blockIdx.x
    if mine > 0:
        log[mine] += log[mine - 1]
    cuda.threadfence()
    serving[0] = mine + 1  # BUG: those who wait write the old number back


@planted("race-between-blocks", 6, 1, ints(1, 1), reason=GLOBAL_ONLY)
@cuda.jit
def lock_let_go_by_a_store(lock, total):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        cuda.nanosleep(uint32(20))
    cuda.threadfence()
    total[0] += cuda.blockIdx.x + 1
    cuda.threadfence()
    lock[0] = 0  # BUG: atomics are whole only beside other atomics


@planted("race-between-blocks", 3, 1, ints(1, 1), reason=GLOBAL_ONLY)
@cuda.jit
def lock_let_go_past_the_cache(lock, total):
    while cuda.atomic.cas(lock, 0, 0, 1) != 0:
        cuda.nanosleep(uint32(20))
    cuda.threadfence()
    total[0] += cuda.blockIdx.x + 1
    cuda.threadfence()
    cuda.stwt(lock, 0, int32(0))  # BUG: a hint makes it no atomic


@planted("race-between-blocks", 4, 1, ints(1, 1), reason=GLOBAL_ONLY)
@cuda.jit
def counter_reset_by_whoever_has_counted(count, y):
    cuda.threadfence()
    y[0] = cuda.atomic.add(count, 0, 1) * 0
    count[0] = 0  # BUG: others may count yet


@planted("race-between-blocks", 4, 1, ints(1, 1), reason=GLOBAL_ONLY)
@cuda.jit
def counted_while_few(count, y):
    while count[0] < 3:
        cuda.atomic.add(count, 0, 1)  # BUG: others have counted since the read


@correct(4, 1, ints(3, 3, 1))
@cuda.jit
def one_flag_for_each_block(data, flags, total):
    block = cuda.blockIdx.x
    if block < 3:
        data[block] = 10 + block
        cuda.threadfence()
        flags[block] = 1
    else:
        for other in range(3):
            while flags[other] == 0:
                cuda.nanosleep(uint32(20))
            cuda.threadfence()
            total[0] += data[other]


@correct(2, 1, ints(4, 4))
@cuda.jit
def own_elements_past_the_cache(x, y):
    for i in range(cuda.blockIdx.x, 4, 2):
        cuda.stcg(y, i, int32(cuda.ldcs(x, i) + 1))
    cuda.threadfence()
