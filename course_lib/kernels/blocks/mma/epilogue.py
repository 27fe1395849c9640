"""What is done to a sum before it is stored: a bias is added, ReLU applied."""


from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.runtime.intrinsics import load

#: `options` of the kernels are the sum of these. VECTORS: rows of c begin on 16-byte boundaries.
#: CLUSTER: the blocks that have parts of k are a cluster.
ADD_BIAS, RELU, VECTORS, CLUSTER = 1, 2, 4, 8


@cuda.jit(device=True)
def relu(total):
    return ZERO if total <= ZERO else total  # a NaN is not <= 0, and passes


@cuda.jit(device=True)
def finish(total, bias, n, options):
    """The number to store for the sum `total` in column `n`."""
    if options & ADD_BIAS:
        total += load(bias, n)
    if options & RELU:
        total = relu(total)
    return total
