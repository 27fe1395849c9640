"""The backward rungs of cross-entropy: dlogits = dloss/normaliser · (mass·softmax(x) − q).

With the four numbers that the forward pass saved for a row, every element is on its own: softmax(x)
is exp(x − m)/s, and nothing is left to sum.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import MAX_WIDTH, ZERO
from course_lib.kernels.blocks.labels import IGNORED
from course_lib.kernels.cross_entropy.forward_kernels import (
    BLOCK_SIZE,
    MAX_BATCH,
    MIN_WIDTH,
    N_STATS,
)
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    fast_exp,
    load,
    load_vector,
    store,
    store_vector,
    vector_width,
    wait_for_previous_kernel,
)


@cuda.jit(device=True)
def row_factors(dloss, dloss_step, stats, normaliser, row, keep):
    """(m, of exp(x − m), of a share, of the label): the row's largest logit, and three factors.

    `dloss` is one number, or with a `dloss_step` of 1 one for each row.
    """
    scale = load(dloss, row * dloss_step) / normaliser[0]
    m, s = stats[row * N_STATS], stats[row * N_STATS + 1]
    mass, weight = stats[row * N_STATS + 2], stats[row * N_STATS + 3]
    return m, scale * mass / s, scale, scale * keep * weight


def make_backward_kernels(kind):
    """The rungs for one kind of target, simple to fast. All arrays are one-dimensional."""
    HAS_LABEL, HAS_SHARES, label_of, share_of, load_shares, shares_of = kind
    BATCH = MAX_BATCH if HAS_LABEL else MAX_BATCH // 2
    SLOTS = BATCH // MIN_WIDTH

    @cuda.jit(device=True)
    def gradient(
        logits, target, weight, weighted, start, col, label, keep, spread, m, of_exp, of_share,
        of_label,
    ):  # fmt: skip
        if label == IGNORED:
            return ZERO
        dx = of_exp * fast_exp(load(logits, start + col) - m)
        if HAS_SHARES:
            dx -= of_share * share_of(target, weight, weighted, start + col, col, keep, spread)
        if HAS_LABEL and col == label:
            dx -= of_label
        return dx

    @cuda.jit
    def naive_backward_kernel(
        dloss, dloss_step, logits, target, weight, weighted, stats, normaliser, dlogits, n_classes,
        ignore_index, keep, spread,
    ):  # fmt: skip
        row = cuda.grid(1)
        if row < stats.shape[0] // N_STATS:
            start, label = row * n_classes, label_of(target, row, n_classes, ignore_index)
            m, of_exp, of_share, of_label = row_factors(
                dloss, dloss_step, stats, normaliser, row, keep
            )
            for col in range(n_classes):
                dx = gradient(
                    logits, target, weight, weighted, start, col, label, keep, spread, m, of_exp,
                    of_share, of_label,
                )  # fmt: skip
                store(dlogits, start + col, dx)

    @cuda.jit
    def online_backward_kernel(
        dloss, dloss_step, logits, target, weight, weighted, stats, normaliser, dlogits, n_classes,
        ignore_index, keep, spread,
    ):  # fmt: skip
        row = cuda.blockIdx.x
        start, label = row * n_classes, label_of(target, row, n_classes, ignore_index)
        m, of_exp, of_share, of_label = row_factors(dloss, dloss_step, stats, normaliser, row, keep)
        for col in range(cuda.threadIdx.x, n_classes, BLOCK_SIZE):
            dx = gradient(
                logits, target, weight, weighted, start, col, label, keep, spread, m, of_exp,
                of_share, of_label,
            )  # fmt: skip
            store(dlogits, start + col, dx)

    @cuda.jit
    def vectorised_backward_kernel(
        dloss, dloss_step, logits, target, weight, weighted, stats, normaliser, dlogits, n_classes,
        ignore_index, keep, spread, offset, log_team,
    ):  # fmt: skip
        # 2^log_team threads for a row, in one block or several; `offset` as in the forward kernel,
        # -1 also where dlogits differs.
        allow_next_kernel()
        wait_for_previous_kernel()
        width = vector_width(logits)
        unroll = BATCH // width
        values = cuda.local.array((SLOTS, MAX_WIDTH), np.float32)
        shares = cuda.local.array((SLOTS, MAX_WIDTH), np.float32)
        thread, team = cuda.grid(1), 1 << log_team
        row, rank = thread >> log_team, thread & (team - 1)
        if row >= stats.shape[0] // N_STATS:
            return
        start, stop = row * n_classes, (row + 1) * n_classes
        first = stop
        if offset >= 0:
            first = min(start + (-(start + offset) & (width - 1)), stop)
        n_vectors = (stop - first) // width
        label = label_of(target, row, n_classes, ignore_index)
        m, of_exp, of_share, of_label = row_factors(dloss, dloss_step, stats, normaliser, row, keep)
        vector = rank
        if label == IGNORED:  # the logits need not be read
            for k in range(width):
                values[0, k] = ZERO
            while vector < n_vectors:
                store_vector(dlogits, first + vector * width, values[0])
                vector += team
        while vector < n_vectors:
            for u in range(unroll):
                i = first + min(vector + u * team, n_vectors - 1) * width
                load_vector(values[u], logits, i)
                load_shares(shares[u], target, i)
            for u in range(unroll):
                if vector + u * team < n_vectors:
                    i = first + (vector + u * team) * width
                    col = i - start
                    if HAS_SHARES:
                        shares_of(shares[u], weight, weighted, col, keep, spread, width)
                    for k in range(width):
                        values[u, k] = of_exp * fast_exp(values[u, k] - m)
                        if HAS_SHARES:
                            values[u, k] -= of_share * shares[u, k]
                    if HAS_LABEL and col <= label < col + width:
                        for k in range(width):
                            if col + k == label:
                                values[u, k] -= of_label
                    store_vector(dlogits, i, values[u])
            vector += unroll * team
        head = first - start
        edge = rank
        while edge < n_classes - n_vectors * width:
            col = edge if edge < head else edge + n_vectors * width
            dx = gradient(
                logits, target, weight, weighted, start, col, label, keep, spread, m, of_exp,
                of_share, of_label,
            )  # fmt: skip
            store(dlogits, start + col, dx)
            edge += team

    return {
        "naive": naive_backward_kernel,
        "online": online_backward_kernel,
        "vectorised": vectorised_backward_kernel,
    }
