"""Planted and correct: fields of records."""

import numpy as np
from numba import cuda

from sanitizer_cases.case import correct, planted

N = 32
GLOBAL_ONLY = "racecheck looks at shared memory, and this race is on global memory"
BODY = np.dtype([("mass", np.float32), ("count", np.int32), ("place", np.float32, (3,))])


def bodies(count=N):
    """A callable that gives records, their masses and counts 0, 1, 2 …"""
    def make():
        made = np.zeros(count, BODY)
        made["mass"] = made["count"] = np.arange(count)
        return (made,)

    return make


@planted("race", 1, N, bodies(), reason=GLOBAL_ONLY, mended="neighbours_field")
@cuda.jit
def neighbours_field_too_early(x, mended):
    tid = cuda.threadIdx.x
    x[tid].mass = 2 * tid
    if mended:
        cuda.syncthreads()
    x[tid].place[0] = x[N - 1 - tid].mass  # BUG: no barrier before


@planted("race", 1, N, bodies(), reason=GLOBAL_ONLY)
@cuda.jit
def field_counted_without_atomics(x):
    x[0]["count"] += 1  # BUG: changes are lost


@correct(1, N, bodies())
@cuda.jit
def fields_counted_with_atomics(x):
    cuda.atomic.add(x.count, 0, 1)
    cuda.atomic.add(x["mass"], 1, 1)
    cuda.atomic.add(x[0].place, 2, 1)


@planted("race", 1, N, bodies(), reason=GLOBAL_ONLY)
@cuda.jit
def field_of_a_record_with_a_name(x):
    first = x[0]
    first.mass += cuda.threadIdx.x  # BUG: a record with a name is the one in memory


@correct(1, N, bodies())
@cuda.jit
def own_record_with_a_name(x):
    own = x[cuda.threadIdx.x]
    own.mass += own.count
    own["count"] = 0


@planted("race", 1, N, bodies(), reason=GLOBAL_ONLY)
@cuda.jit
def records_rotated_in_place(x):
    tid = cuda.threadIdx.x
    x[tid] = x[(tid + 1) % N]  # BUG: the neighbour may have been overwritten


@correct(1, N // 2, bodies())
@cuda.jit
def records_copied_to_the_other_half(x):
    tid = cuda.threadIdx.x
    x[tid] = x[tid + N // 2]


@planted("race", 1, N, bodies(), reason=GLOBAL_ONLY)
@cuda.jit
def column_of_a_field(x):
    x.mass[cuda.threadIdx.x // 2] = cuda.threadIdx.x  # BUG: two threads write each


@correct(1, N, bodies())
@cuda.jit
def columns_of_two_fields(x):
    tid = cuda.threadIdx.x
    x.mass[tid] = tid
    x["count"][N - 1 - tid] = tid


@planted("race", 1, N, bodies(), reason=GLOBAL_ONLY)
@cuda.jit
def array_in_a_record(x):
    tid = cuda.threadIdx.x
    x[tid // 2].place[tid % 2 * 0] += tid  # BUG: both of a pair add to element 0


@correct(1, 3 * 8, bodies())
@cuda.jit
def arrays_in_records(x):
    tid = cuda.threadIdx.x
    x[tid // 3].place[tid % 3] += tid


@correct(1, 2, bodies())
@cuda.jit
def two_fields_of_one_record(x):
    """They share the record, and no byte of it."""
    if cuda.threadIdx.x == 0:
        x[0].mass = 1
    else:
        x[0].count = 1


@planted("race", 1, 2, bodies(), reason=GLOBAL_ONLY)
@cuda.jit
def record_and_its_field(x):
    if cuda.threadIdx.x == 0:
        x[0].mass = 7
    else:
        x[0] = x[1]  # BUG: overwrites the field as well


@planted("out-of-bounds", 1, N, bodies(), tool="memcheck")
@cuda.jit
def record_past_the_end(x):
    tid = cuda.threadIdx.x
    x[tid].count += x[tid + 1].place[0]  # BUG: the last record has no neighbour


@planted("race", 1, N, bodies(), reason=GLOBAL_ONLY, mended="field_read_after_atomics")
@cuda.jit
def field_read_beside_atomics(x, mended):
    cuda.atomic.add(x.count, 0, 1)
    if mended:
        cuda.syncthreads()
    if cuda.threadIdx.x == 5:
        x[1].mass = x[0].count  # BUG: others are still adding
