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
`vectorised` a thread for some neighbouring outputs, in   a thread for a patch of dx, from the
             registers, 16 bytes at a time                windows that reach it, in registers
============ ============================================ =====================================

The backward pass gathers: every input position looks at the windows that cover it, and adds up dy
where the index is its own. Scattering, window by window, would need atomic additions where windows
overlap, and their order would change from run to run.

A kernel that asks for every element which window it is in, and whether that ends before the image
does, computes more than it moves. So `vectorised` compiles a kernel for each window that networks
have (`fixed`), for indices of a byte: contiguous images (`patches`) and channels-last ones
(`pixels`). Other windows and indices have kernels for any. Contiguous images then go through shared
memory, some rows or planes a block (`bands`), and the backward pass scatters there, in rounds of
windows that do not overlap. Either way two runs agree bit for bit. Where a row is too long for
shared memory, or channels-last pixels do not begin on 16-byte boundaries, `rows` does the work.

An index says where in its plane the largest element is, h·W + w, as PyTorch's does; or, in a single
byte, where in its window, kh·KW + kw. The first of equal elements counts; a NaN is larger than all,
and the last of several counts: as in PyTorch. Of 0 and -0, which are equal, y may be either. A
dilated window that steps over all of a small image has the maximum -inf and passes no gradient on.
Derivation: notebook 10.
"""

import math

from course_lib.kernels.max_pool2d import bands, ladder, vectorised
from course_lib.kernels.max_pool2d.window import window_of
from course_lib.runtime import arrays
from course_lib.runtime.launch import launch
from course_lib.runtime.outputs import output

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
    relu=False,
    variant=DEFAULT,
    out=None,
):
    """(y, indices) of x, N·C·H·W; the options are those of `torch.nn.functional.max_pool2d`.

    `index_dtype` is "int32" or "int64" for indices in the plane, or "uint8" for indices in the
    window, of which there may be 256. With `relu`, y is what ReLU makes of it, and where that is 0
    the index points nowhere (-1, or 255 in a byte, and then of 255 at most), so that `backward`
    passes no gradient on, without being told. `out`, if given, receives y; it must have x's memory
    format. An `x` of another memory layout is copied to a contiguous one first. Raises ArrayError
    for a wrong rank, dtype, shape or device, ValueError for an unknown variant or options that
    don't fit.
    """
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    _check_variant(variant, VARIANTS)
    relu = bool(relu)  # or it would be a number to the kernels
    N, C, H, W = x.shape
    window = window_of((H, W), kernel_size, stride, padding, dilation, ceil_mode)
    _check_indices(index_dtype, window, relu)
    x, channels_last = _laid_out(x)
    shape = (N, C, window.OH, window.OW)
    y = output(out, shape, like=x, channels_last=channels_last, reads=dict(x=x))
    indices = arrays.empty(shape, like=x, dtype=index_dtype, channels_last=channels_last)
    if N * C:
        images = x, y, indices
        if variant != "vectorised" or not vectorised.forward(images, window, channels_last, relu):
            _launch_ladder(VARIANTS, variant, images, channels_last, window, y, indices)
            vectorised.apply_relu(y, indices, relu)
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
    reads = dict(dy=dy, indices=indices)
    dx = output(out, shape, like=dy, channels_last=channels_last, reads=reads)
    if N * C * H * W:
        images = dy, indices, dx
        if variant != "vectorised" or not vectorised.backward(images, window, channels_last):
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


def _in_plane(indices):
    return arrays.dtype_name(indices) != "uint8"


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


def _check_indices(dtype, window, relu=False):
    if dtype not in INDEX_DTYPES:
        raise ValueError(f"indices must be {' or '.join(INDEX_DTYPES)}, not {dtype!r}")
    if dtype == "uint8" and window.KH * window.KW > 256 - relu:
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
        for direction, variants, arrays_ in (
            ("forward", VARIANTS, [image, image, indices]),
            ("backward", BACKWARD_VARIANTS, [image, indices, image]),
        ):
            for name in ("naive", "rows"):
                types = [*arrays_, "int64", flag, *sizes]
                yield f"max_pool2d {direction} {name} {dtype}", variants[name], types
            if direction == "forward":
                types = [image, indices, "int64"]
                yield f"max_pool2d forward ReLU {dtype}", ladder.relu_kernel, types
            for name, kernel, numbers in vectorised.kernels(direction, dtype):
                yield (
                    f"max_pool2d {direction} vectorised, {name} {dtype}",
                    kernel,
                    arrays_ + numbers,
                )
