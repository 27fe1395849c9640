"""A mask of scores, boolean or additive, as kernels read it: where it lies, through its strides."""

import sys

import numpy as np

from course_lib.runtime.host import arrays
from course_lib.runtime.host.arrays import ArrayError


def memory(x):
    """The stretch of memory from the first element of x to its last, in one dimension."""
    n = 1 + sum((n - 1) * s for n, s in zip(x.shape, arrays.strides_of(x), strict=True))
    n = n if arrays.size_of(x) else 0
    if arrays.is_tensor(x):
        return x.detach().as_strided((n,), (1,))
    if isinstance(x, np.ndarray):
        return np.lib.stride_tricks.as_strided(x, (n,), (x.dtype.itemsize,))
    return x.reshape(n)


def as_bytes(mask):
    """A boolean mask as uint8, in the same memory."""
    return mask.view(sys.modules["torch"].uint8 if arrays.is_tensor(mask) else np.uint8)


def broadcast(mask, whole, dtype):
    """(`mask`, or a copy without negative strides; its strides from batch, head, row and score on).

    A stride is 0 where the mask is broadcast. Raises ArrayError for a mask that is neither boolean
    nor of this dtype, or that doesn't broadcast to the shape `whole`, of four axes at most.
    """
    arrays.require(mask, "mask", dtypes=("bool", dtype))
    n_more = len(whole) - len(mask.shape)
    extents = (1,) * n_more + tuple(mask.shape)
    if n_more < 0 or any(n not in (1, m) for n, m in zip(extents, whole, strict=True)):
        raise ArrayError(f"mask must broadcast to {whole}; its shape is {tuple(mask.shape)}")
    if min(arrays.strides_of(mask), default=0) < 0:
        mask = arrays.contiguous(mask)
    strides = (0,) * n_more + tuple(arrays.strides_of(mask))
    strides = [0 if n == 1 else s for n, s in zip(extents, strides, strict=True)]
    return mask, [0] * (4 - len(whole)) + strides
