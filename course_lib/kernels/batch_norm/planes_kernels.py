"""The kernels of the rung `vectorised` for contiguous images; what a thread does is in `planes`.

Either a block does all of a channel (`channel_kernel`), or blocks take a part each and leave their
partial results in memory, which `merging` puts together in a fixed order. Block b of the kernels
with parts takes channel b % C, so that blocks that run together read neighbouring planes. The
second pass goes through the parts backwards: what the first one read last is still in the L2.
"""

import numpy as np

from course_lib import cuda
from course_lib.kernels.batch_norm.moments import (
    ONE,
    ZERO,
    affine_of,
    block_moments,
    keep_statistics,
    reciprocal_deviation,
)
from course_lib.kernels.batch_norm.planes import (
    part_affine,
    part_gradient,
    part_moments,
    part_sums,
)
from course_lib.runtime.intrinsics import (
    allow_next_kernel,
    block_sum,
    load,
    store,
    wait_for_previous_kernel,
)


@cuda.jit
def channel_kernel(
    x, y, C, P, total, team, offset, weight, bias, has_weight, has_bias, relu, means, rstds,
    running_mean, running_var, tracked, momentum, eps,
):  # fmt: skip
    # A block for each channel: statistics, then the normalised values.
    scratch = cuda.shared.array((3, 32), np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    c = cuda.blockIdx.x
    count, mean, m2 = part_moments(x, c, C, P, 0, total, team, offset)
    count, mean, m2 = block_moments(count, mean, m2, scratch)
    rstd = reciprocal_deviation(m2 / count, eps)
    if cuda.threadIdx.x == 0:
        keep_statistics(
            c, count, mean, m2, means, rstds, running_mean, running_var, tracked, momentum, eps
        )
    scale, shift = affine_of(c, weight, bias, has_weight, has_bias)
    part_affine(x, y, c, C, P, 0, total, team, offset, mean, scale * rstd, shift, relu)


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
        scale * rstd, shift, relu,
    )  # fmt: skip


@cuda.jit
def channel_backward_kernel(
    dy, x, y, dx, C, P, total, team, offset, weight, has_weight, relu, means, rstds, dweight, dbias,
    training,
):  # fmt: skip
    scratch = cuda.shared.array(32, np.float32)
    allow_next_kernel()
    wait_for_previous_kernel()
    c = cuda.blockIdx.x
    mean, rstd = means[c], rstds[c]
    sum_dy, product = part_sums(dy, x, y, c, C, P, 0, total, team, offset, mean, relu)
    sum_dy, product = block_sum(sum_dy, scratch), block_sum(product, scratch)
    if cuda.threadIdx.x == 0:
        store(dweight, c, product * rstd)
        store(dbias, c, sum_dy)
    factor = rstd * (load(weight, c) if has_weight else ONE)
    share = ONE / np.float32(total) if training else ZERO
    part_gradient(
        dy, x, y, dx, c, C, P, 0, total, team, offset, mean, factor, sum_dy * share,
        product * rstd * rstd * share, relu,
    )  # fmt: skip


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
