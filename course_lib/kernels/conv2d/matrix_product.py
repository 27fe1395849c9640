"""Convolutions that are one product of matrices, and how `gemm` multiplies them.

They are those whose filters step by their own size: one tap, without strides, or patches of the
image, as at the begin of a vision transformer; and those with a filter as large as the image. None
has padding or groups. With rows of I = C·R·S numbers and M = N·P·Q pixels of y,

    y (M, K) = x (M, I) · weight (K, I)ᵀ + bias
    dx (M, I) = dy (M, K) · weight (K, I)         dweight (K, I) = dy (M, K)ᵀ · x (M, I)

Rows lie so in memory in channels-last images, and in images of one pixel. Of contiguous images x[n]
is a matrix (C, P·Q), and y[n] = weight · x[n] and dx[n] = weightᵀ · dy[n] are a product each, if
their planes begin on 16-byte boundaries. Other images are transposed before the product, and its
result behind it. Patches become rows by a copy (`patches`).
"""

from course_lib.kernels import gemm
from course_lib.kernels.blocks import memory_format
from course_lib.kernels.blocks.memory_format import formatted
from course_lib.kernels.conv2d import patches
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES

VARIANT = "tensor_core"  # of `gemm`


def plan(problem, chip):
    """The problem itself, or a `Refusal`."""
    p = problem
    one_tap = (p.R, p.S, p.stride_h, p.stride_w, p.groups) == (1, 1, 1, 1, 1)
    if not (is_whole(p) or one_tap and not (p.pad_h or p.pad_w) or patches.fits(p)):
        return Refusal(
            "takes filters of one tap, with a stride of 1, others that step by their own size, and "
            "filters as large as the image; none with padding or groups"
        )
    return problem


def is_whole(p):
    """Whether the filter of a `Problem` is as large as the image."""
    return (p.R, p.S) == (p.H, p.W) and p.groups == 1 and not (p.pad_h or p.pad_w)


def has_patches(p):
    """Whether the images of a `Problem` have to be copied to rows of patches."""
    return p.R * p.S > 1 and not is_whole(p)


def has_whole_vectors(p):
    """Whether all rows, or planes, of a `Problem` have whole vectors of 16 bytes."""
    width = VECTOR_BYTES // (2 if p.mode == "half" else 4)
    counts = (p.K, p.C * p.R * p.S) if _lie_by_rows(p) or is_whole(p) else (p.P * p.Q,)
    return not any(count % width for count in counts)


def forward(problem, x, weight, bias, y, precision):
    """y = x * weight + bias."""
    weight, options = formatted(weight, problem), dict(bias=bias, precision=precision)
    if _launch_planes(problem, weight, x, y, problem.K, problem.C, **options) is None:
        _launch_rows(problem, _x_as_rows(problem, x), weight, y, _sizes(problem), **options)


def dx(problem, dy, weight, dx, precision):
    """dx, from dy and weight."""
    (M, K, n), weight = _sizes(problem), formatted(weight, problem)
    options, sizes = dict(precision=precision), (M, n, K)
    if has_patches(problem):
        rows = arrays.empty((M, n), like=dx)
        dy = _as_rows(problem, dy)
        gemm.multiply(dy, weight, rows, *sizes, b_by_k=False, variant=VARIANT, **options)
        patches.from_rows(problem, rows, dx)
        return
    by_planes = _launch_planes(problem, weight, dy, dx, problem.C, K, a_by_k=False, **options)
    if by_planes is None:
        dy = _as_rows(problem, dy)
        _launch_rows(problem, dy, weight, dx, sizes, b_by_k=False, **options)


def dweight(problem, dy, x, dweight, precision):
    """dweight, from dy and x."""
    (M, K, n), dy, x = _sizes(problem), _as_rows(problem, dy), _x_as_rows(problem, x)
    by_rows = dict(a_by_k=False, b_by_k=False)
    gemm.multiply(dy, x, dweight, K, n, M, precision=precision, variant=VARIANT, **by_rows)


def _sizes(p):
    """(M, K, the numbers of a row) of a `Problem`."""
    return p.N * p.P * p.Q, p.K, p.C * p.R * p.S


def _launch_planes(problem, weight, source, images, M, K, **options):
    """Launch a product for each of `images`; None where that is not done."""
    if _lie_by_rows(problem) or has_patches(problem):
        return None
    sizes = M, problem.P * problem.Q, K
    return gemm.multiply_planes(weight, source, images, sizes, problem.N, **options)


def _launch_rows(problem, a, b, images, sizes, **options):
    """`images` = the product of `a` and `b`, a row of which belongs to a pixel."""
    rows = images
    if not _lie_by_rows(problem):
        rows = arrays.empty(tuple(images.shape), like=images, channels_last=True)
    gemm.multiply(a, b, rows, *sizes, variant=VARIANT, **options)
    if rows is not images:
        N, C, H, W = images.shape
        memory_format.transpose(rows, images, N, H * W, C)


def _lie_by_rows(problem):
    """Whether what belongs to a pixel of y lies side by side in all images."""
    return problem.channels_last or problem.P * problem.Q == 1


def _as_rows(problem, images):
    """`images`, or a copy, with what belongs to a pixel of y side by side."""
    return images if _lie_by_rows(problem) else memory_format.channels_last(images)


def _x_as_rows(problem, x):
    """`x`, or a copy, with all that a pixel of y depends on side by side."""
    return patches.rows_of(problem, x) if has_patches(problem) else _as_rows(problem, x)


def kernels():
    """Every kernel that a pass may launch, but those of dbias."""
    of_gemm = *gemm.FORWARD[VARIANT].kernels, *gemm.kernels_of_planes()
    return *of_gemm, patches.patches_kernel, *memory_format.KERNELS
