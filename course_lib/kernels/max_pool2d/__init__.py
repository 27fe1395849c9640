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
(`pixel_patches`). Other windows and indices have kernels for any. Contiguous images then go through
shared memory, some rows or planes a block (`bands`): forward for windows of 2×2 and 3×3; backward,
where it scatters there, in rounds of windows that do not overlap. All others, channels-last images,
and backward those too few to give each multiprocessor such rounds or too wide for shared memory,
have a thread for each element, or 16 bytes of channels (`pixels`). Where that is more than 2³¹
threads, `rows` does the work. Either way two runs agree bit for bit.

An index says where in its plane the largest element is, h·W + w, as PyTorch's does; or, in a single
byte, where in its window, kh·KW + kw. The first of equal elements counts; a NaN is larger than all,
and the last of several counts: as in PyTorch. Of 0 and -0, which are equal, y may be either. A
dilated window that steps over all of a small image has the maximum -inf and passes no gradient on.
Derivation: notebook 10.
"""

from course_lib.kernels.max_pool2d import ladder, launching, vectorised
from course_lib.kernels.max_pool2d.window import window_of
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.outputs import output

DTYPES = ("float32", "float16", "bfloat16")
INDEX_DTYPES = ("int32", "int64", "uint8")
MOST_THREADS = 256  # of a block of any rung


def _kernels_of(direction):
    """Every kernel of the rung `vectorised`, once."""
    rows = [row for dtype in DTYPES for row in vectorised.kernels(direction, dtype)]
    return tuple(dict.fromkeys(kernel for _, kernel, _ in rows))


FORWARD = Ladder(
    Rung("naive", launching.launch_naive, (ladder.naive_kernel, ladder.relu_kernel)),
    Rung("rows", launching.launch_rows, (ladder.rows_kernel, ladder.relu_kernel)),
    Rung(
        "vectorised", vectorised.forward,
        (*_kernels_of("forward"), ladder.rows_kernel, ladder.relu_kernel),
    ),
    auto="vectorised",
)  # fmt: skip
BACKWARD = Ladder(
    Rung("naive", launching.launch_naive_backward, (ladder.naive_backward_kernel,)),
    Rung("rows", launching.launch_rows_backward, (ladder.rows_backward_kernel,)),
    Rung(
        "vectorised", vectorised.backward,
        (*_kernels_of("backward"), ladder.rows_backward_kernel),
    ),
    auto="vectorised",
)  # fmt: skip


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
    variant=AUTO,
    out=None,
):
    """(y, indices) of x, N·C·H·W; the options are those of `torch.nn.functional.max_pool2d`.

    `index_dtype` is "int32" or "int64" for indices in the plane, or "uint8" for indices in the
    window, of which there may be 256. With `relu`, y is what ReLU makes of it, and where that is 0
    the index points nowhere (-1, or 255 in a byte, and then of 255 at most), so that `backward`
    passes no gradient on, without being told. `out`, if given, receives y; it must have x's memory
    format. An `x` of another memory layout is copied first. Raises ArrayError
    for a wrong rank, dtype, shape or device, ValueError for an unknown variant or options that
    don't fit.
    """
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    rung = FORWARD.rung(variant, x)
    relu = bool(relu)  # or it would be a number to the kernels
    N, C, H, W = x.shape
    window = window_of((H, W), kernel_size, stride, padding, dilation, ceil_mode)
    _check_indices(index_dtype, window, relu)
    x, channels_last = arrays.as_images(x)
    shape = (N, C, window.OH, window.OW)
    y = output(out, shape, like=x, channels_last=channels_last, reads=dict(x=x))
    indices = arrays.empty(shape, like=x, dtype=index_dtype, channels_last=channels_last)
    if N * C:
        rung.launch((x, y, indices), window, channels_last, relu)
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
    variant=AUTO,
    out=None,
):
    """dx of `shape`, N·C·H·W, from dy and what `forward` was given and found.

    dx has the dtype of dy and the memory format of `indices`; a `dy` of another one is copied.
    `out`, if given, receives dx. Raises as `forward` does.
    """
    arrays.require(dy, "dy", dtypes=DTYPES, n_dims=4)
    rung = BACKWARD.rung(variant, dy)
    shape = tuple(shape)
    if len(shape) != 4:
        raise ValueError(f"shape must be that of the input, N·C·H·W, not {shape}")
    N, C, H, W = shape
    window = window_of((H, W), kernel_size, stride, padding, dilation, ceil_mode)
    arrays.require(dy, "dy", shape=(N, C, window.OH, window.OW))
    arrays.require(indices, "indices", shape=dy.shape, dtypes=INDEX_DTYPES)
    _check_indices(arrays.dtype_name(indices), window)
    indices, channels_last = arrays.as_images(indices)
    dy = _like(indices, dy, channels_last)
    reads = dict(dy=dy, indices=indices)
    dx = output(out, shape, like=dy, channels_last=channels_last, reads=reads)
    if N * C * H * W:
        rung.launch((dy, indices, dx), window, channels_last)
    return dx


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


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    flag, sizes = "boolean", ["int64"] * 12
    for dtype in DTYPES:
        image, indices = (dtype, 1), ("uint8", 1)
        for direction, rungs, arrays_ in (
            ("forward", FORWARD, [image, image, indices]),
            ("backward", BACKWARD, [image, indices, image]),
        ):
            for name in ("naive", "rows"):
                types = [*arrays_, "int64", flag, *sizes]
                yield f"max_pool2d {direction} {name} {dtype}", rungs[name].kernels[0], types
            if direction == "forward":
                types = [image, indices, "int64"]
                yield f"max_pool2d forward ReLU {dtype}", ladder.relu_kernel, types
            for name, kernel, numbers in vectorised.kernels(direction, dtype):
                yield (
                    f"max_pool2d {direction} vectorised, {name} {dtype}",
                    kernel,
                    arrays_ + numbers,
                )
