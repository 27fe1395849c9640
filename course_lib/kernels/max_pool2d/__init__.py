"""Max pooling: the largest element of each window of an image, and where it was.

x is N·C·H·W, contiguous or channels-last; y and the indices are N·C·OH·OW of the same memory
format. float32, float16 or bfloat16; nothing is computed, only compared, so y is exact. With `s`
bytes an element and `i` bytes an index, the forward pass must move N·C·(H·W·s + OH·OW·(s + i))
bytes (read x, write y and the indices), the backward pass as many (read dy and the indices, write
dx). KH·KW comparisons for each output; memory is the limit.

============ ============================================ =====================================
rung         forward                                      backward
============ ============================================ =====================================
`naive`      a thread for each output, which finds its    a thread for each input: which of the
             row and column by divisions                  windows that cover it took it?
`rows`       a block for each row of the output           a block for each row of the input
============ ============================================ =====================================

The backward pass gathers: every input position looks at the windows that cover it, and adds up dy
where the index is its own. Scattering, window by window, would need atomic additions where windows
overlap, and their order would change from run to run; so two runs agree bit for bit.

An index says where in its plane the largest element is, h·W + w, as PyTorch's does; or, in a single
byte, where in its window, kh·KW + kw. The first of equal elements counts; a NaN is larger than all,
and the last of several counts: as in PyTorch. A dilated window that steps over all of a small image
has the maximum -inf and passes no gradient on. Derivation: notebook 10.
"""

import math

from course_lib.kernels.max_pool2d import ladder
from course_lib.kernels.max_pool2d.window import window_of
from course_lib.runtime import arrays
from course_lib.runtime.launch import launch

DTYPES = ("float32", "float16", "bfloat16")
INDEX_DTYPES = ("int32", "int64", "uint8")
DEFAULT = "rows"
BLOCK_SIZE = 256

VARIANTS = {"naive": ladder.naive_kernel, "rows": ladder.rows_kernel}
BACKWARD_VARIANTS = {"naive": ladder.naive_backward_kernel, "rows": ladder.rows_backward_kernel}


def forward(
    x,
    kernel_size,
    *,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    index_dtype="int32",
    variant=DEFAULT,
    out=None,
):
    """(y, indices) of x, N·C·H·W; the options are those of `torch.nn.functional.max_pool2d`.

    `index_dtype` is "int32" or "int64" for indices in the plane, or "uint8" for indices in the
    window, of which there may be 256. `out`, if given, receives y; it must have x's memory format.
    An `x` of another memory layout is copied to a contiguous one first. Raises ArrayError for a
    wrong rank, dtype, shape or device, ValueError for an unknown variant or options that don't fit.
    """
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    _check_variant(variant, VARIANTS)
    N, C, H, W = x.shape
    window = window_of((H, W), kernel_size, stride, padding, dilation, ceil_mode)
    _check_indices(index_dtype, window)
    x, channels_last = _laid_out(x)
    shape = (N, C, window.OH, window.OW)
    y = arrays.empty(shape, like=x, channels_last=channels_last) if out is None else out
    if out is not None:
        _check_out(y, shape, arrays.dtype_name(x), channels_last)
    indices = arrays.empty(shape, like=x, dtype=index_dtype, channels_last=channels_last)
    if N * C:
        _launch(VARIANTS[variant], variant, (x, y, indices), N, C, channels_last, window, y)
    return y, indices


def backward(
    dy,
    indices,
    shape,
    kernel_size,
    *,
    stride=None,
    padding=0,
    dilation=1,
    ceil_mode=False,
    variant=DEFAULT,
    out=None,
):
    """dx of `shape`, N·C·H·W, from dy and what `forward` was given and found.

    dx has the dtype of dy and the memory format of `indices`; a `dy` of another one is copied.
    `out`, if given, receives dx. Raises as `forward` does.
    """
    arrays.require(dy, "dy", dtypes=DTYPES, n_dims=4)
    _check_variant(variant, BACKWARD_VARIANTS)
    shape = tuple(shape)
    if len(shape) != 4:
        raise ValueError(f"shape must be that of the input, N·C·H·W, not {shape}")
    N, C, H, W = shape
    window = window_of((H, W), kernel_size, stride, padding, dilation, ceil_mode)
    arrays.require(dy, "dy", shape=(N, C, window.OH, window.OW))
    arrays.require(indices, "indices", shape=dy.shape, dtypes=INDEX_DTYPES)
    _check_indices(arrays.dtype_name(indices), window)
    indices, channels_last = _laid_out(indices)
    dy = _like(indices, dy, channels_last)
    dx = arrays.empty(shape, like=dy, channels_last=channels_last) if out is None else out
    if out is not None:
        _check_out(dx, shape, arrays.dtype_name(dy), channels_last)
    if N * C * H * W:
        operands = (dy, indices, dx)
        _launch(BACKWARD_VARIANTS[variant], variant, operands, N, C, channels_last, window, dx)
    return dx


def _launch(kernel, variant, operands, N, C, channels_last, window, result):
    inner = C if channels_last else 1
    numbers = (inner, arrays.dtype_name(operands[2 if result is operands[1] else 1]) != "uint8")
    if variant == "naive":
        n_blocks, block = math.ceil(arrays.size_of(result) / BLOCK_SIZE), BLOCK_SIZE
    else:
        height, width = result.shape[2:]
        n_blocks = N * C // inner * height
        block = min(BLOCK_SIZE, 32 * math.ceil(width * inner / 32))
    launch(kernel, n_blocks, block, *operands, *numbers, *window, flat=True)


def _laid_out(x):
    """x in a memory format that the kernels know, and whether that is channels-last."""
    if arrays.is_contiguous_array(x):
        return x, False
    if arrays.is_channels_last(x):
        return x, True
    return arrays.contiguous(x), False


def _like(indices, dy, channels_last):
    """dy, in the memory format of the indices."""
    if arrays.same_layout(indices, dy):
        return dy
    copy = arrays.empty(tuple(dy.shape), like=dy, channels_last=channels_last)
    if hasattr(copy, "copy_"):
        copy.copy_(dy)
    else:
        copy[...] = dy
    return copy


def _check_out(out, shape, dtype, channels_last):
    arrays.require(out, "out", shape=shape, dtypes=(dtype,), writable=True)
    if not (arrays.is_channels_last(out) if channels_last else arrays.is_contiguous_array(out)):
        wanted = "channels-last" if channels_last else "contiguous"
        raise arrays.ArrayError(f"out must be {wanted}; its strides are {arrays.strides_of(out)}")


def _check_indices(dtype, window):
    if dtype not in INDEX_DTYPES:
        raise ValueError(f"indices must be {' or '.join(INDEX_DTYPES)}, not {dtype!r}")
    if dtype == "uint8" and window.KH * window.KW > 256:
        raise ValueError(f"a byte can't tell {window.KH}×{window.KW} positions of a window apart")
    if dtype == "int32" and window.H * window.W > 2**31 - 1:
        raise ValueError(f"planes of {window.H}×{window.W} need indices of int64, not int32")


def _check_variant(variant, variants):
    if variant not in variants:
        raise ValueError(f"unknown variant {variant!r}; there are {', '.join(variants)}")


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    numbers = ["int64", "boolean"] + ["int64"] * 12
    for dtype in DTYPES:
        image, indices = (dtype, 1), ("int32", 1)
        for variant, kernel in VARIANTS.items():
            yield f"max_pool2d forward {variant} {dtype}", kernel, [image, image, indices, *numbers]
        for variant, kernel in BACKWARD_VARIANTS.items():
            label = f"max_pool2d backward {variant} {dtype}"
            yield label, kernel, [image, indices, image, *numbers]
