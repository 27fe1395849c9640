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
`vectorised` a block for some rows or planes, which it    a block for some rows or planes of dx,
             copies to shared memory 16 bytes at a time;  which it adds up in shared memory,
             channels-last: a thread for 16 bytes         channels-last: a thread for 16 bytes
============ ============================================ =====================================

The backward pass gathers: every input position looks at the windows that cover it, and adds up dy
where the index is its own. Scattering, window by window, would need atomic additions where windows
overlap, and their order would change from run to run. `vectorised` does scatter, contiguous images,
within a block and in rounds of windows that do not overlap (`bands`). Either way two runs agree bit
for bit. Where a row is too long for shared memory, or channels-last pixels do not begin on 16-byte
boundaries, `rows` does the work of `vectorised`.

An index says where in its plane the largest element is, h·W + w, as PyTorch's does; or, in a single
byte, where in its window, kh·KW + kw. The first of equal elements counts; a NaN is larger than all,
and the last of several counts: as in PyTorch. A dilated window that steps over all of a small image
has the maximum -inf and passes no gradient on. Derivation: notebook 10.
"""

import math

from course_lib.kernels.max_pool2d import bands, ladder, pixels
from course_lib.kernels.max_pool2d.plan import (
    BAND_THREADS,
    PIXEL_THREADS,
    plan_backward,
    plan_forward,
)
from course_lib.kernels.max_pool2d.window import window_of
from course_lib.runtime import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.launch import launch

DTYPES = ("float32", "float16", "bfloat16")
INDEX_DTYPES = ("int32", "int64", "uint8")
DEFAULT = "vectorised"
BLOCK_SIZE = MOST_THREADS = 256

VARIANTS = {
    "naive": ladder.naive_kernel,
    "rows": ladder.rows_kernel,
    "vectorised": bands.FORWARD_KERNELS[None],
}
BACKWARD_VARIANTS = {
    "naive": ladder.naive_backward_kernel,
    "rows": ladder.rows_backward_kernel,
    "vectorised": bands.BACKWARD_KERNELS[False],
}


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
        images = x, y, indices
        if variant != "vectorised" or not _forward_vectorised(images, window, channels_last):
            _launch_ladder(VARIANTS, variant, images, channels_last, window, y, indices)
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
        images = dy, indices, dx
        if variant != "vectorised" or not _backward_vectorised(images, window, channels_last):
            _launch_ladder(BACKWARD_VARIANTS, variant, images, channels_last, window, dx, indices)
    return dx


def _launch_ladder(variants, variant, images, channels_last, window, result, indices):
    N, C, height, width = result.shape
    inner = C if channels_last else 1
    if variant == "naive":
        kernel, block = variants["naive"], BLOCK_SIZE
        n_blocks = math.ceil(arrays.size_of(result) / BLOCK_SIZE)
    else:
        kernel, n_blocks = variants["rows"], N * C // inner * height
        block = min(BLOCK_SIZE, 32 * math.ceil(width * inner / 32))
    launch(kernel, n_blocks, block, *images, inner, _in_plane(indices), *window, flat=True)


def _forward_vectorised(images, window, channels_last):
    """Launch it; False where these images can't be."""
    x, y, indices = images
    N, C, _, _ = x.shape
    if channels_last:
        return _launch_pixels(pixels.pixel_kernel, images, (x, y), indices, window, y)
    if (plan := plan_forward(N * C, window, x.dtype.itemsize)) is None:
        return False
    undilated = window.DH == window.DW == 1
    fixed = (window.KH, window.KW) if undilated else None
    kernel = bands.FORWARD_KERNELS.get(fixed, bands.FORWARD_KERNELS[None])
    multiplier = math.ceil(2**bands.SHIFT / window.OH) if plan.planes > 1 else 0
    launch(
        kernel, plan.n_blocks, BAND_THREADS,
        *images, N * C, plan.planes, plan.rows, plan.bands, multiplier, plan.bits, _offset(x),
        _in_plane(indices), *window, shared_bytes=_bytes(plan.elements, x.dtype.itemsize),
        flat=True, overlap=True,
    )  # fmt: skip
    return True


def _backward_vectorised(images, window, channels_last):
    dy, indices, dx = images
    N, C, _, _ = dx.shape
    if channels_last:
        return _launch_pixels(pixels.pixel_backward_kernel, images, (dy, dx), indices, window, dx)
    plan, a, b = plan_backward(N * C, window)
    if plan is None:
        return False
    launch(
        bands.BACKWARD_KERNELS[a == b == 1], plan.n_blocks, BAND_THREADS,
        *images, N * C, plan.planes, plan.rows, plan.bands, a, b, plan.bits, _offset(dx),
        math.ceil(2**16 / window.KW), _in_plane(indices), *window,
        shared_bytes=_bytes(plan.elements, 4), flat=True, overlap=True,
    )  # fmt: skip
    return True


def _launch_pixels(kernel, images, vectors, indices, window, result):
    """`vectors` are the images that are read or written 16 bytes at a time."""
    N, C, height, width = result.shape
    row_bytes = C * result.dtype.itemsize
    if row_bytes % VECTOR_BYTES or any(arrays.address_of(v) % VECTOR_BYTES for v in vectors):
        return False
    n_columns = row_bytes // VECTOR_BYTES
    block = min(PIXEL_THREADS, 32 * math.ceil(width * n_columns / 32))
    launch(
        kernel, N * height, block, *images, C, n_columns, _in_plane(indices), *window,
        flat=True, overlap=True,
    )  # fmt: skip
    return True


def _in_plane(indices):
    return arrays.dtype_name(indices) != "uint8"


def _offset(image):
    """Elements from the last 16-byte boundary to the image."""
    return arrays.address_of(image) % VECTOR_BYTES // image.dtype.itemsize


def _bytes(n_elements, itemsize):
    return math.ceil(n_elements * itemsize / VECTOR_BYTES) * VECTOR_BYTES


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
    flag, sizes = "boolean", ["int64"] * 12
    for dtype in DTYPES:
        image, indices = (dtype, 1), ("uint8", 1)
        forward = [
            (name, VARIANTS[name], [image, image, indices, "int64", flag])
            for name in ("naive", "rows")
        ]
        forward += [
            (f"vectorised, {'×'.join(map(str, fixed)) if fixed else 'any'}", kernel,
             [image, image, indices, *["int64"] * 7, flag])
            for fixed, kernel in bands.FORWARD_KERNELS.items()
        ]  # fmt: skip
        forward += [("vectorised, channels-last", pixels.pixel_kernel,
                     [image, image, indices, "int64", "int64", flag])]  # fmt: skip
        backward = [
            (name, BACKWARD_VARIANTS[name], [image, indices, image, "int64", flag])
            for name in ("naive", "rows")
        ]
        backward += [
            (
                f"vectorised, {'alone' if alone else 'any'}",
                kernel,
                [image, indices, image, *["int64"] * 9, flag],
            )
            for alone, kernel in bands.BACKWARD_KERNELS.items()
        ]
        backward += [
            ("vectorised, channels-last", pixels.pixel_backward_kernel,
             [image, indices, image, "int64", "int64", flag]),
        ]  # fmt: skip
        for direction, found in (("forward", forward), ("backward", backward)):
            for name, kernel, types in found:
                yield f"max_pool2d {direction} {name} {dtype}", kernel, types + sizes
