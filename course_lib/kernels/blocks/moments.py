"""Mean and variance without cancellation: triples (count, mean, M2), and how two are merged.

M2 is the sum of (x − mean)². Welford's method adds one element to a triple, and Chan's merges two
of them; both only ever subtract numbers that are close to the mean, so a large mean costs nothing.
Σx² − (Σx)²/n subtracts two large numbers, of which almost everything cancels.

Many elements at once are cheaper than one at a time: a thread sums up x − base and (x − base)²,
where `base` is a number near the mean, with one addition and one multiplication more than Σx and
Σx² take. What cancels then is only the distance from base to mean. The base is an element at
first, and that may be a stray one, so `recentred` puts the mean of a few in its place.

Sources: B. Welford (1962); T. Chan, G. Golub and R. LeVeque (1979).
"""

import math

from course_lib import cuda
from course_lib.kernels.blocks.constants import INF, ONE, ZERO
from course_lib.runtime.intrinsics import FULL_MASK, fast_reciprocal, load


@cuda.jit(device=True)
def with_one(count, mean, m2, value):
    """The triple with one more element: Welford's method."""
    count += ONE
    before = value - mean
    mean += before / count
    return count, mean, m2 + before * (value - mean)


@cuda.jit(device=True)
def merged(count, mean, m2, other_count, other_mean, other_m2):
    """Two triples as one: Chan's method. Either may be of nothing."""
    total = count + other_count
    share = other_count * fast_reciprocal(max(total, ONE))
    apart = other_mean - mean
    # Of two factors, so that a large `apart` meets the 0 of an empty triple before it overflows.
    return total, mean + apart * share, m2 + other_m2 + (apart * count) * (apart * share)


@cuda.jit(device=True)
def less(squares, part):
    """squares − part, and inf for squares that are too large, not ∞ − ∞."""
    return squares - part if squares < INF else squares


@cuda.jit(device=True)
def recentred(count, base, total, squares):
    """(base, total, squares) of the same elements, with their mean as the base.

    total and squares are the sums of x − base and of its square.
    """
    mean = base + total * fast_reciprocal(max(count, ONE))
    apart = mean - base
    rest = total - count * apart  # what rounding left of it
    return mean, rest, less(squares, apart * (total + rest))


@cuda.jit(device=True)
def triple_of(count, base, total, squares):
    """The triple of elements of which the sums of x − base and of its square are known."""
    apart = total * fast_reciprocal(max(count, ONE))
    return count, base + apart, less(squares, total * apart)


@cuda.jit(device=True)
def warp_moments(count, mean, m2):
    """The triples of a warp's lanes as one, in lane 0."""
    for step in range(5):
        count, mean, m2 = merged(
            count, mean, m2, cuda.shfl_down_sync(FULL_MASK, count, 16 >> step),
            cuda.shfl_down_sync(FULL_MASK, mean, 16 >> step),
            cuda.shfl_down_sync(FULL_MASK, m2, 16 >> step),
        )  # fmt: skip
    return count, mean, m2


@cuda.jit(device=True)
def block_moments(count, mean, m2, scratch):
    """The triples of a block's threads as one, in every thread; `scratch` is (3, 32) float32.

    For one-dimensional blocks of a multiple of 32 threads; every thread must call it.
    """
    lane_id, warp_id = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    count, mean, m2 = warp_moments(count, mean, m2)
    if lane_id == 0:
        scratch[0, warp_id], scratch[1, warp_id], scratch[2, warp_id] = count, mean, m2
    cuda.syncthreads()
    count = mean = m2 = ZERO
    if lane_id < cuda.blockDim.x // 32:
        count, mean, m2 = scratch[0, lane_id], scratch[1, lane_id], scratch[2, lane_id]
    count, mean, m2 = warp_moments(count, mean, m2)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        scratch[0, 0], scratch[1, 0], scratch[2, 0] = count, mean, m2
    cuda.syncthreads()
    return scratch[0, 0], scratch[1, 0], scratch[2, 0]


@cuda.jit(device=True)
def reciprocal_deviation(variance, eps):
    return ONE / math.sqrt(variance + eps)


@cuda.jit(device=True)
def affine_of(c, weight, bias, has_weight, has_bias):
    """A channel's weight and bias; 1 and 0 where there is none."""
    scale, shift = ONE, ZERO
    if has_weight:
        scale = load(weight, c)
    if has_bias:
        shift = load(bias, c)
    return scale, shift
