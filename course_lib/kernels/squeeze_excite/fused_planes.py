"""The rung `fused` for contiguous images: a block's part of a sample is the planes of its slice.

A part is one stretch of memory, and positions in it count from the 16-byte boundary at or before
its first element. What lies before `held` is copied to shared memory, what lies behind is read
again when it is scaled, out of the L2 cache if all goes well.

Planes are cut into pieces, so that all teams of lanes have about as much to do; pieces of one plane
meet at 16-byte boundaries.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.softmax.rows import team_sum
from course_lib.kernels.squeeze_excite.formulas import ZERO, gate_gradient, gate_of
from course_lib.kernels.squeeze_excite.fused_dense import (
    copy_matrix,
    copy_vector,
    excite,
    excite_backward,
    places,
    quotient,
    save,
)
from course_lib.runtime.cluster import cluster_rank, cluster_size, cluster_sync
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)
from course_lib.runtime.shared import copy_async, dynamic_shared, wait_for_copies
from course_lib.runtime.shared_views import dynamic_shared_view

MAX_WIDTH = 8
UNROLL = 4  # vectors that a thread has on their way
DOT_UNROLL = 2  # of each of two arrays
MOST_REGISTERS = 80  # three blocks of 256 threads on a multiprocessor


@cuda.jit(device=True)
def part_of(x, C, n_pixels, n_most, vectors):
    """(sample, first channel, channels, element of x at position 0, first position, end).

    Without `vectors` no boundary matters, and positions count from the first element.
    """
    n, c = quotient(cuda.blockIdx.x, cluster_size()), cluster_rank() * n_most
    n_mine = max(0, min(n_most, C - c))  # none, if others have them all
    start = (n * C + c) * n_pixels
    phase = start & (vector_width(x) - 1) if vectors else 0
    return n, c, n_mine, start - phase, phase, phase + n_mine * n_pixels if n_mine > 0 else 0


@cuda.jit(device=True)
def fetch(cache, place, x, start, stop, vectors):
    """Begin to copy x[start : start + stop] to cache[place:]."""
    width, i = vector_width(x), np.int64(cuda.threadIdx.x)
    if vectors:
        i *= width
        last = min(stop, x.shape[0] - start - width + 1)  # vectors that lie in x as a whole
        while i < last:
            copy_async(cache, place + i, x, start + i)
            i += cuda.blockDim.x * width
        i = (max(0, last + width - 1) & -width) + cuda.threadIdx.x
    while i < stop:
        store(cache, place + i, load(x, start + i))
        i += cuda.blockDim.x


@cuda.jit(device=True)
def piece_of(task, n_pieces, phase, n_pixels, width):
    """(channel of the slice, first position, end) of a task."""
    j = quotient(task, n_pieces)
    k, low = task - j * n_pieces, phase + j * n_pixels
    step = (quotient(n_pixels, n_pieces) + width) & -width
    first = low if k == 0 else min(low + n_pixels, (low + k * step) & -width)
    stop = low + n_pixels
    return j, first, stop if k == n_pieces - 1 else min(stop, (low + (k + 1) * step) & -width)


@cuda.jit(device=True)
def inner(low, high, width, vectors):
    """(first, last) position between which all goes by 16 bytes."""
    if not vectors:
        return high, high
    first = min((low + width - 1) & -width, high)
    return first, max(first, high & -width)


@cuda.jit(device=True)
def sum_of(values, width):
    total = values[0]
    for k in range(1, width):
        total += values[k]
    return total


@cuda.jit(device=True)
def sum_of_products(left, right, width):
    total = left[0] * right[0]
    for k in range(1, width):
        total += left[k] * right[k]
    return total


@cuda.jit(device=True)
def sum_range(a, at, low, high, vectors, rank, lanes):
    """This lane's share of the sum of a[at + i] over low ≤ i < high."""
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    width, total = vector_width(a), ZERO
    first, last = inner(low, high, width, vectors)
    step, i = lanes * width, first + rank * width
    while i + (UNROLL - 1) * step < last:  # all loads of a batch before their sums
        for u in range(UNROLL):
            load_vector(values[u], a, at + i + u * step)
        for u in range(UNROLL):
            total += sum_of(values[u], width)
        i += UNROLL * step
    while i < last:
        load_vector(values[0], a, at + i)
        total += sum_of(values[0], width)
        i += step
    i = low + rank
    while i < first:
        total += load(a, at + i)
        i += lanes
    i = last + rank
    if i < high:  # fewer than there are lanes
        total += load(a, at + i)
    return total


@cuda.jit(device=True)
def dot_range(a, at, b, there, low, high, vectors, rank, lanes):
    """This lane's share of the sum of a[at + i] · b[there + i] over low ≤ i < high."""
    left = cuda.local.array((DOT_UNROLL, MAX_WIDTH), np.float32)
    right = cuda.local.array((DOT_UNROLL, MAX_WIDTH), np.float32)
    width, total = vector_width(a), ZERO
    first, last = inner(low, high, width, vectors)
    step, i = lanes * width, first + rank * width
    while i + (DOT_UNROLL - 1) * step < last:
        for u in range(DOT_UNROLL):
            load_vector(left[u], a, at + i + u * step)
            load_vector(right[u], b, there + i + u * step)
        for u in range(DOT_UNROLL):
            total += sum_of_products(left[u], right[u], width)
        i += DOT_UNROLL * step
    while i < last:
        load_vector(left[0], a, at + i)
        load_vector(right[0], b, there + i)
        total += sum_of_products(left[0], right[0], width)
        i += step
    i = low + rank
    while i < first:
        total += load(a, at + i) * load(b, there + i)
        i += lanes
    i = last + rank
    if i < high:  # fewer than there are lanes
        total += load(a, at + i) * load(b, there + i)
    return total


@cuda.jit(device=True)
def scale_range(a, at, y, there, low, high, factor, shift, vectors, rank, lanes):
    """y[there + i] = a[at + i] · factor + shift for this lane's share of low ≤ i < high."""
    values = cuda.local.array((UNROLL, MAX_WIDTH), np.float32)
    width = vector_width(a)
    first, last = inner(low, high, width, vectors)
    step, i = lanes * width, first + rank * width
    while i + (UNROLL - 1) * step < last:
        for u in range(UNROLL):
            load_vector(values[u], a, at + i + u * step)
        for u in range(UNROLL):
            for k in range(width):
                values[u, k] = values[u, k] * factor + shift
            store_vector(y, there + i + u * step, values[u])
        i += UNROLL * step
    while i < last:
        load_vector(values[0], a, at + i)
        for k in range(width):
            values[0, k] = values[0, k] * factor + shift
        store_vector(y, there + i, values[0])
        i += step
    i = low + rank
    while i < first:
        store(y, there + i, load(a, at + i) * factor + shift)
        i += lanes
    i = last + rank
    if i < high:  # fewer than there are lanes
        store(y, there + i, load(a, at + i) * factor + shift)


@cuda.jit(device=True)
def scale_piece(cache, place, x, base, y, held, low, high, factor, shift, tasks, vectors):
    """y = x · factor + shift from position `low` to `high`: out of `cache` what is held there."""
    rank, lanes = tasks[2], tasks[3]
    middle = max(low, min(high, held))
    scale_range(cache, place, y, base, low, middle, factor, shift, vectors, rank, lanes)
    if middle < high:
        scale_range(x, base, y, base, middle, high, factor, shift, vectors, rank, lanes)


@cuda.jit(device=True)
def put_total(tables, at, total, added, rank, lanes, is_task):
    """tables[at] = the sum of the lanes' totals, plus what is there if `added`."""
    total = team_sum(total, lanes)
    if rank == 0 and is_task:
        store(tables, at, total + load(tables, at) if added else total)


@cuda.jit(device=True)
def pool(tables, scratch, a, at, start, stop, added, tasks, n_pixels, vectors):
    """tables[scratch + task] = the sum of each task's elements from position `start` to `stop`."""
    team, n_teams, rank, lanes, n_tasks, n_pieces, phase = tasks
    first = 0
    while first < n_tasks:  # alike for all lanes, which must all take part in the sum
        task, total = first + team, ZERO
        if task < n_tasks:
            _, low, high = piece_of(task, n_pieces, phase, n_pixels, vector_width(a))
            low, high = max(low, start), min(high, stop)
            if low < high:
                total = sum_range(a, at, low, high, vectors, rank, lanes)
        put_total(tables, scratch + task, total, added, rank, lanes, task < n_tasks)
        first += n_teams


@cuda.jit(device=True)
def pool_products(tables, scratch, a, at, b, there, start, stop, added, tasks, n_pixels, vectors):
    """As `pool`, of the products a[at + i] · b[there + i]."""
    team, n_teams, rank, lanes, n_tasks, n_pieces, phase = tasks
    first = 0
    while first < n_tasks:  # alike for all lanes, which must all take part in the sum
        task, total = first + team, ZERO
        if task < n_tasks:
            _, low, high = piece_of(task, n_pieces, phase, n_pixels, vector_width(a))
            low, high = max(low, start), min(high, stop)
            if low < high:
                total = dot_range(a, at, b, there, low, high, vectors, rank, lanes)
        put_total(tables, scratch + task, total, added, rank, lanes, task < n_tasks)
        first += n_teams


@cuda.jit(device=True)
def pool_parts(
    tables, scratch, cache, place, other, dy, x, base, held, stop, tasks, n_pixels, vectors
):  # fmt: skip
    """As `pool_products`, of dy and x wherever they are, once the copies have come."""
    if held < stop:
        pool_products(
            tables, scratch, dy, base, x, base, held, stop, False, tasks, n_pixels, vectors
        )
    wait_for_copies()
    cuda.syncthreads()
    if other > 0:
        pool_products(
            tables, scratch, cache, place, cache, other, 0, stop, False, tasks, n_pixels, True
        )
    else:
        pool_products(
            tables, scratch, cache, place, x, base, 0, min(held, stop), held < stop, tasks,
            n_pixels, vectors,
        )  # fmt: skip
    cuda.syncthreads()


@cuda.jit(device=True)
def share_out(phase, n_mine, n_pieces, lanes):
    """`tasks`: which of them this lane works on, and what they are."""
    team = quotient(cuda.threadIdx.x, lanes)
    n_teams, rank = quotient(cuda.blockDim.x, lanes), cuda.threadIdx.x - team * lanes
    return team, n_teams, rank, lanes, n_mine * n_pieces, n_pieces, phase


@cuda.jit(device=True)
def sum_of_pieces(tables, at, n_pieces):
    total, end = load(tables, at), at + n_pieces
    at += 1
    while at < end:
        total += load(tables, at)
        at += 1
    return total


@cuda.jit(device=True)
def finish_means(tables, scratch, n_pieces, n_mine, factor):
    """The means of the slice's channels at tables[0:], from the sums of pieces."""
    j = np.int64(cuda.threadIdx.x)
    while j < n_mine:
        store(tables, j, sum_of_pieces(tables, scratch + j * n_pieces, n_pieces) * factor)
        j += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def finish_dlogits(tables, scratch, n_pieces, n_mine, given, gate):
    """The gradients of the slice's logits at tables[0:], from the sums of pieces."""
    j = np.int64(cuda.threadIdx.x)
    while j < n_mine:
        total = sum_of_pieces(tables, scratch + j * n_pieces, n_pieces)
        store(tables, j, gate_gradient(total, load(tables, given + j), gate))
        j += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(device=True)
def finish_logits(tables, outputs, given, n_mine):
    """The logits of the slice's channels at tables[outputs:]."""
    j = np.int64(cuda.threadIdx.x)
    while j < n_mine:
        store(tables, outputs + j, load(tables, outputs + j) + load(tables, given + j))
        j += cuda.blockDim.x
    cuda.syncthreads()


@cuda.jit(max_registers=MOST_REGISTERS)
def fused_planes_kernel(
    x, weight1, bias1, weight2, bias2, y, mean, hidden, logit,
    C, n_pixels, R, n_most, n_pieces, lanes, held, first, second, fit, place, vectors, factor,
    activation, gate,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    tables, cache = cuda.shared.array(0, np.float32), dynamic_shared(x)  # one memory
    weights = dynamic_shared_view(weight1)
    n, c, n_mine, base, phase, stop = part_of(x, C, n_pixels, n_most, vectors)
    fetch(cache, place, x, base, min(held, stop), vectors)
    given, outputs, _, _, given_hidden, scratch = places(n_most, R)
    copy_matrix(weights, first, weight1, c, C, R, n_mine, fit)
    if first != second:
        copy_matrix(weights, second, weight2, c * R, R, 1, n_mine * R, fit)
    copy_vector(tables, given, bias2, c, n_mine)
    copy_vector(tables, given_hidden, bias1, 0, R)
    tasks = share_out(phase, n_mine, n_pieces, lanes)
    if held < stop:  # the rest is read while what is held is on its way
        pool(tables, scratch, x, base, held, stop, False, tasks, n_pixels, vectors)
    wait_for_copies()
    cuda.syncthreads()
    pool(tables, scratch, cache, place, 0, min(held, stop), held < stop, tasks, n_pixels, True)
    cuda.syncthreads()
    finish_means(tables, scratch, n_pieces, n_mine, factor)
    excite(tables, weights, (first, second, fit), weight2, c, n_mine, n_most, R, activation)
    finish_logits(tables, outputs, given, n_mine)
    task = tasks[0]
    while task < tasks[4]:
        j, low, high = piece_of(task, n_pieces, phase, n_pixels, vector_width(x))
        scale = gate_of(load(tables, outputs + j), gate)
        scale_piece(cache, place, x, base, y, held, low, high, scale, ZERO, tasks, vectors)
        task += tasks[1]
    save(tables, 0, n_mine, mean, n * C + c)
    save(tables, outputs, n_mine, logit, n * C + c)
    save(tables, given_hidden, R if c == 0 else 0, hidden, n * R)
    cluster_sync()  # others may read this block's shares up to here


@cuda.jit(max_registers=MOST_REGISTERS)
def fused_planes_backward_kernel(
    dy, x, weight1, weight2, hidden, logit, dx, dlogit, dhidden,
    C, n_pixels, R, n_most, n_pieces, lanes, held, other, first, second, fit, place, vectors,
    factor, activation, gate,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    tables, cache = cuda.shared.array(0, np.float32), dynamic_shared(x)  # one memory
    weights = dynamic_shared_view(weight1)
    n, c, n_mine, base, phase, stop = part_of(x, C, n_pixels, n_most, vectors)
    fetch(cache, place, dy, base, min(held, stop), vectors)
    if other > 0:
        fetch(cache, other, x, base, stop, vectors)
    given, outputs, _, _, given_hidden, scratch = places(n_most, R)
    copy_matrix(weights, second, weight2, c * R, R, 1, n_mine * R, fit)
    if first != second:
        copy_matrix(weights, first, weight1, c, C, R, n_mine, fit)
    copy_vector(tables, given, logit, n * C + c, n_mine)
    copy_vector(tables, given_hidden, hidden, n * R, R)
    tasks = share_out(phase, n_mine, n_pieces, lanes)
    pool_parts(tables, scratch, cache, place, other, dy, x, base, held, stop, tasks, n_pixels,
               vectors)  # fmt: skip
    finish_dlogits(tables, scratch, n_pieces, n_mine, given, gate)
    excite_backward(
        tables, weights, (first, second, fit), weight1, c, n_mine, n_most, C, R, activation, scratch
    )
    task = tasks[0]
    while task < tasks[4]:
        j, low, high = piece_of(task, n_pieces, phase, n_pixels, vector_width(x))
        scale, shift = gate_of(load(tables, given + j), gate), load(tables, outputs + j) * factor
        scale_piece(cache, place, dy, base, dx, held, low, high, scale, shift, tasks, vectors)
        task += tasks[1]
    save(tables, 0, n_mine, dlogit, n * C + c)
    save(tables, given_hidden, R if c == 0 else 0, dhidden, n * R)
    cluster_sync()  # others may read this block's shares up to here
