"""The kernels of the rung `vectorised` for contiguous images; what a thread does is in `planes`.

Either the blocks of a cluster do all of a channel (`channel_kernel`): each a part of it, which its
SM still has when it comes back to it, and they read each other's results in shared memory. Or
blocks take a part each and leave what they found in memory, which `merging` puts together in a
fixed order. Block b of the kernels with parts takes channel b % C, so that blocks that run together
read neighbouring planes. The second pass goes through the parts backwards: what the first one read
last is still in the L2.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.planes import (
    part_affine,
    part_gradient,
    part_moments,
    part_sums,
)
from course_lib.kernels.batch_norm.statistics import keep_statistics, shares_of_gradient
from course_lib.kernels.blocks.constants import ONE, ZERO
from course_lib.kernels.blocks.moments import (
    affine_of,
    block_moments,
    reciprocal_deviation,
    warp_moments,
)
from course_lib.runtime.intrinsics import (
    FULL_MASK,
    allow_next_kernel,
    block_sum,
    load,
    store,
    wait_for_previous_kernel,
    warp_sum,
)
from course_lib.runtime.intrinsics.cluster import (
    cluster_rank,
    cluster_size,
    cluster_sync,
    load_from_cluster,
)


@cuda.jit
def channel_kernel(
    x, y, C, P, total, length, team, offset, weight, bias, has_weight, has_bias, relu, means, rstds,
    running_mean, running_var, tracked, momentum, eps,
):  # fmt: skip
    # A cluster for each channel: statistics, then the normalised values.
    scratch = cuda.shared.array((3, 32), np.float32)
    mine = cuda.shared.array(3, np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    c, begin, end = share_of_block(length, total)
    count, mean, m2 = part_moments(x, c, C, P, begin, end, team, offset)
    count, mean, m2 = block_moments(count, mean, m2, scratch)
    count, mean, m2 = cluster_moments(count, mean, m2, mine)
    rstd = reciprocal_deviation(m2 / count, eps)
    if cuda.threadIdx.x == 0 and begin == 0:
        keep_statistics(
            c, count, mean, m2, means, rstds, running_mean, running_var, tracked, momentum, eps
        )
    scale, shift = affine_of(c, weight, bias, has_weight, has_bias)
    part_affine(x, y, c, C, P, begin, end, team, offset, mean, scale * rstd, shift, relu, False)
    cluster_sync()  # others may be reading `mine` until here


@cuda.jit(device=True)
def share_of_block(length, total):
    """(channel, first element, end) of this block of a cluster."""
    begin = cluster_rank() * length
    return cuda.blockIdx.x // cluster_size(), begin, min(begin + length, total)


@cuda.jit(device=True)
def cluster_moments(count, mean, m2, mine):
    """The triples of a cluster's blocks as one, in every thread; `mine` is shared, of 3 float32.

    Every thread must call it, and `cluster_sync` before it ends.
    """
    if cluster_size() == 1:
        return count, mean, m2
    if cuda.threadIdx.x == 0:
        mine[0], mine[1], mine[2] = count, mean, m2
    cluster_sync()
    lane_id = cuda.threadIdx.x % 32
    count = mean = m2 = ZERO
    if lane_id < cluster_size():
        count = load_from_cluster(mine, 0, lane_id)
        mean = load_from_cluster(mine, 1, lane_id)
        m2 = load_from_cluster(mine, 2, lane_id)
    count, mean, m2 = warp_moments(count, mean, m2)
    return (
        cuda.shfl_sync(FULL_MASK, count, 0),
        cuda.shfl_sync(FULL_MASK, mean, 0),
        cuda.shfl_sync(FULL_MASK, m2, 0),
    )


@cuda.jit(device=True)
def cluster_sums(first, second, mine):
    """Two sums over a cluster's blocks, as `cluster_moments`."""
    if cluster_size() == 1:
        return first, second
    if cuda.threadIdx.x == 0:
        mine[0], mine[1] = first, second
    cluster_sync()
    lane_id = cuda.threadIdx.x % 32
    first = second = ZERO
    if lane_id < cluster_size():
        first, second = load_from_cluster(mine, 0, lane_id), load_from_cluster(mine, 1, lane_id)
    return warp_sum(first), warp_sum(second)


@cuda.jit
def statistics_kernel(x, partial, C, P, total, length, n_parts, team, offset):
    scratch = cuda.shared.array((3, 32), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    c, part = cuda.blockIdx.x % C, cuda.blockIdx.x // C
    begin = part * length
    count, mean, m2 = part_moments(x, c, C, P, begin, min(begin + length, total), team, offset)
    count, mean, m2 = block_moments(count, mean, m2, scratch)
    if cuda.threadIdx.x == 0:
        partial[part * C + c] = count
        partial[(n_parts + part) * C + c] = mean
        partial[(2 * n_parts + part) * C + c] = m2


@cuda.jit
def normalise_kernel(
    x, y, C, P, total, length, n_parts, team, offset, weight, bias, has_weight, has_bias, relu,
    means, spreads, is_variance, eps,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    c, part = cuda.blockIdx.x % C, n_parts - 1 - cuda.blockIdx.x // C
    begin = part * length
    scale, shift = affine_of(c, weight, bias, has_weight, has_bias)
    rstd = load(spreads, c)
    if is_variance:
        rstd = reciprocal_deviation(rstd, eps)
    part_affine(
        x, y, c, C, P, begin, min(begin + length, total), team, offset, load(means, c),
        scale * rstd, shift, relu, False,
    )  # fmt: skip


@cuda.jit
def channel_backward_kernel(
    dy, x, y, dx, C, P, total, length, team, offset, weight, has_weight, relu, means, rstds,
    dweight, dbias, training,
):  # fmt: skip
    scratch = cuda.shared.array(32, np.float32)
    mine = cuda.shared.array(2, np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    c, begin, end = share_of_block(length, total)
    mean, rstd = load(means, c), load(rstds, c)
    factor = rstd * (load(weight, c) if has_weight else ONE)
    sum_dy, product = part_sums(dy, x, y, c, C, P, begin, end, team, offset, mean, relu)
    sum_dy, product = block_sum(sum_dy, scratch), block_sum(product, scratch)
    sum_dy, product = cluster_sums(sum_dy, product, mine)
    if cuda.threadIdx.x == 0 and begin == 0:
        store(dweight, c, product * rstd)
        store(dbias, c, sum_dy)
    mean_dy, slope = shares_of_gradient(sum_dy, product, rstd, total, training)
    part_gradient(
        dy, x, y, dx, c, C, P, begin, end, team, offset, mean, factor, mean_dy, slope, relu
    )
    cluster_sync()  # others may be reading `mine` until here


@cuda.jit
def sums_kernel(dy, x, y, partial, C, P, total, length, n_parts, team, offset, relu, means):
    scratch = cuda.shared.array(32, np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    c, part = cuda.blockIdx.x % C, cuda.blockIdx.x // C
    begin = part * length
    end = min(begin + length, total)
    sum_dy, product = part_sums(dy, x, y, c, C, P, begin, end, team, offset, means[c], relu)
    sum_dy, product = block_sum(sum_dy, scratch), block_sum(product, scratch)
    if cuda.threadIdx.x == 0:
        partial[part * C + c] = sum_dy
        partial[(n_parts + part) * C + c] = product


@cuda.jit
def gradient_kernel(
    dy, x, y, dx, C, P, total, length, n_parts, team, offset, weight, has_weight, relu, means,
    rstds, terms,
):  # fmt: skip
    allow_next_kernel()
    wait_for_previous_kernel()
    c, part = cuda.blockIdx.x % C, n_parts - 1 - cuda.blockIdx.x // C
    begin = part * length
    factor = rstds[c] * (load(weight, c) if has_weight else ONE)
    part_gradient(
        dy, x, y, dx, c, C, P, begin, min(begin + length, total), team, offset, means[c], factor,
        terms[c], terms[C + c], relu,
    )  # fmt: skip
