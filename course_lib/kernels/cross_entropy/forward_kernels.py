"""The forward rungs of cross-entropy; `finishing` sums up what they leave.

A row's loss is Σ q·(lse − x) over its classes, lse = m + log s, with m the largest logit and s the
sum of exp(x − m). Beside the online pair (m, s) a pass gathers `mass`, the sum of the shares, and
`moment`, the sum of share·(x − m), from which the loss follows without the difference of two
large numbers. Like s, the moment is corrected when a larger m turns up.

A row leaves four numbers behind for the backward pass: m, s, the sum of all q, and its weight in
the mean.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import NAN, ONE, ZERO
from course_lib.kernels.blocks.labels import IGNORED, INVALID
from course_lib.kernels.blocks.rows import team_sum
from course_lib.kernels.blocks.softmax_steps import shift_for
from course_lib.kernels.blocks.sums import careful_add
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    LOWEST,
    allow_next_kernel,
    block_online,
    block_sum,
    fast_exp,
    load,
    load_vector,
    online_add,
    online_merge,
    store,
    vector_width,
    wait_for_previous_kernel,
)

BLOCK_SIZE = 256  # of the rungs before the last
MIN_WIDTH, MAX_WIDTH = 4, 8  # elements in 16 bytes
MAX_BATCH = 16  # elements in flight per thread; half of it where a target comes with each
N_STATS = 4  # numbers saved for a row


@cuda.jit(device=True)
def row_online(m, s, team, scratch_m, scratch_s):
    """The online pair of a team: neighbouring lanes, a power of two up to 32, or a block."""
    if team > 32:
        return block_online(m, s, scratch_m, scratch_s)
    step = team >> 1
    while step > 0:
        other_m = cuda.shfl_xor_sync(FULL_MASK, m, step)
        other_s = cuda.shfl_xor_sync(FULL_MASK, s, step)
        m, s = online_merge(m, s, other_m, other_s)
        step >>= 1
    return m, s


@cuda.jit(device=True)
def row_sum(value, team, scratch):
    """Sum of `value` over such a team."""
    if team > 32:
        return block_sum(value, scratch)
    return team_sum(value, team)


@cuda.jit(device=True)
def keep_row(stats, losses, row, m, s, mass, weight, loss):
    stats[row * N_STATS] = m
    stats[row * N_STATS + 1] = s
    stats[row * N_STATS + 2] = mass
    stats[row * N_STATS + 3] = weight
    store(losses, row, loss)


def make_forward_kernels(kind):
    """The rungs for one kind of target, simple to fast. All arrays are one-dimensional."""
    HAS_LABEL, HAS_SHARES, label_of, share_of, load_shares, shares_of = kind
    BATCH = MAX_BATCH if HAS_LABEL else MAX_BATCH // 2
    SLOTS = BATCH // MIN_WIDTH

    @cuda.jit(device=True)
    def finish_row(
        logits, weight, weighted, stats, losses, row, n_classes, label, m, s, mass, moment, keep
    ):
        if label == IGNORED:
            keep_row(stats, losses, row, ZERO, ZERO, ZERO, ZERO, ZERO)
        elif label == INVALID:
            keep_row(stats, losses, row, NAN, NAN, NAN, NAN, NAN)
        else:
            log_sum = math.log(s)
            loss, row_weight = ZERO, ONE
            if HAS_SHARES:
                loss = mass * log_sum - moment
            if HAS_LABEL:
                if weighted:
                    row_weight = load(weight, label)
                on_label = keep * row_weight
                loss += on_label * (m - load(logits, row * n_classes + label) + log_sum)
                mass += on_label
            keep_row(stats, losses, row, m, s, mass, row_weight, loss)

    @cuda.jit(device=True)
    def add_element(m, s, mass, moment, x, share):
        before = shift_for(m)
        m, s = online_add(m, s, x)
        if HAS_SHARES:
            shift = shift_for(m)
            moment += mass * (before - shift) + share * (x - shift)
            mass += share
        return m, s, mass, moment

    @cuda.jit
    def naive_kernel(
        logits, target, weight, weighted, stats, losses, n_classes, ignore_index, keep, spread
    ):
        row = cuda.grid(1)
        if row < losses.shape[0]:
            label = label_of(target, row, n_classes, ignore_index)
            m, s, mass, moment = LOWEST, ZERO, ZERO, ZERO
            if label >= 0:
                start = row * n_classes
                for i in range(start, start + n_classes):
                    m = max(m, load(logits, i))
                shift = shift_for(m)
                lost_s, lost_mass, lost_moment = ZERO, ZERO, ZERO
                for i in range(start, start + n_classes):
                    s, lost_s = careful_add(s, lost_s, math.exp(load(logits, i) - shift))
                if HAS_SHARES:
                    for col in range(n_classes):
                        i = start + col
                        share = share_of(target, weight, weighted, i, col, keep, spread)
                        term = share * (load(logits, i) - shift)
                        mass, lost_mass = careful_add(mass, lost_mass, share)
                        moment, lost_moment = careful_add(moment, lost_moment, term)
                        if moment == LOWEST:  # a masked class: nothing to correct any more
                            lost_moment = ZERO
            finish_row(
                logits, weight, weighted, stats, losses, row, n_classes, label, m, s, mass, moment,
                keep,
            )  # fmt: skip

    @cuda.jit
    def online_kernel(
        logits, target, weight, weighted, stats, losses, n_classes, ignore_index, keep, spread
    ):
        scratch_m = cuda.shared.array(32, np.float32)
        scratch_s = cuda.shared.array(32, np.float32)
        row, tid = cuda.blockIdx.x, cuda.threadIdx.x
        start = row * n_classes
        label = label_of(target, row, n_classes, ignore_index)
        own_m, s, mass, moment = LOWEST, ZERO, ZERO, ZERO
        if label >= 0:
            for col in range(tid, n_classes, BLOCK_SIZE):
                x, share = load(logits, start + col), ZERO
                if HAS_SHARES:
                    share = share_of(target, weight, weighted, start + col, col, keep, spread)
                own_m, s, mass, moment = add_element(own_m, s, mass, moment, x, share)
        m, s = block_online(own_m, s, scratch_m, scratch_s)
        if HAS_SHARES:
            moment += mass * (shift_for(own_m) - shift_for(m))
            moment = block_sum(moment, scratch_m)
            mass = block_sum(mass, scratch_s)
        if tid == 0:
            finish_row(
                logits, weight, weighted, stats, losses, row, n_classes, label, m, s, mass, moment,
                keep,
            )  # fmt: skip

    @cuda.jit(device=True)
    def vector_pass(
        logits, target, weight, weighted, start, stop, keep, spread, offset, rank, n_ranks
    ):
        """(m, s, mass, moment) of this thread's share of logits[start:stop]."""
        width = vector_width(logits)
        unroll = BATCH // width
        values = cuda.local.array((SLOTS, MAX_WIDTH), np.float32)
        shares = cuda.local.array((SLOTS, MAX_WIDTH), np.float32)
        first = stop
        if offset >= 0:
            first = min(start + (-(start + offset) & (width - 1)), stop)
        n_vectors = (stop - first) // width
        m, s, mass, moment = LOWEST, ZERO, ZERO, ZERO
        vector = rank
        while vector < n_vectors:
            # All loads of a batch come before their use: memory answers them together. Past the
            # end the last vector is loaded again, and not counted.
            for u in range(unroll):
                i = first + min(vector + u * n_ranks, n_vectors - 1) * width
                load_vector(values[u], logits, i)
                load_shares(shares[u], target, i)
            # One correction for a batch, not one for each element.
            top = m
            for u in range(unroll):
                for k in range(width):
                    top = max(top, values[u, k])
            shift = shift_for(top)
            s *= fast_exp(m - shift)
            if HAS_SHARES:
                moment += mass * (shift_for(m) - shift)
            for u in range(unroll):
                if vector + u * n_ranks < n_vectors:
                    for k in range(width):
                        s += fast_exp(values[u, k] - shift)
                    if HAS_SHARES:
                        col = first - start + (vector + u * n_ranks) * width
                        shares_of(shares[u], weight, weighted, col, keep, spread, width)
                        for k in range(width):
                            mass += shares[u, k]
                            moment += shares[u, k] * (values[u, k] - shift)
            m = top
            vector += unroll * n_ranks
        # What is left before the first 16-byte boundary and behind the last.
        head = first - start
        edge = rank
        while edge < stop - start - n_vectors * width:
            col = edge if edge < head else edge + n_vectors * width
            x, share = load(logits, start + col), ZERO
            if HAS_SHARES:
                share = share_of(target, weight, weighted, start + col, col, keep, spread)
            m, s, mass, moment = add_element(m, s, mass, moment, x, share)
            edge += n_ranks
        return m, s, mass, moment

    @cuda.jit
    def vectorised_kernel(
        logits, target, weight, weighted, stats, losses, n_classes, ignore_index, keep, spread,
        offset, log_team,
    ):  # fmt: skip
        # A row is read by a team of 2^log_team threads, see `row_online`. `offset` counts the
        # elements from the last 16-byte boundary to logits[0]; it is -1 where target's differ.
        allow_next_kernel()
        wait_for_previous_kernel()
        scratch_m = cuda.shared.array(32, np.float32)
        scratch_s = cuda.shared.array(32, np.float32)
        thread, team = cuda.grid(1), 1 << log_team
        row, rank = thread >> log_team, thread & (team - 1)
        label = IGNORED
        own_m, s, mass, moment = LOWEST, ZERO, ZERO, ZERO
        if row < losses.shape[0]:
            label = label_of(target, row, n_classes, ignore_index)
        if label >= 0:
            start = row * n_classes
            own_m, s, mass, moment = vector_pass(
                logits, target, weight, weighted, start, start + n_classes, keep, spread,
                offset, rank, team,
            )  # fmt: skip
        m, s = row_online(own_m, s, team, scratch_m, scratch_s)
        if HAS_SHARES:
            moment += mass * (shift_for(own_m) - shift_for(m))
            moment = row_sum(moment, team, scratch_m)
            mass = row_sum(mass, team, scratch_s)
        if rank == 0 and row < losses.shape[0]:
            finish_row(
                logits, weight, weighted, stats, losses, row, n_classes, label, m, s, mass, moment,
                keep,
            )  # fmt: skip

    return {"naive": naive_kernel, "online": online_kernel, "vectorised": vectorised_kernel}
