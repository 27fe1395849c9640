"""The rung `upsample2x`: filters of 2 × 2 with stride 2, where nothing overlaps.

Each pixel of x makes a block of 2 × 2 pixels of y, and no other does: y is one product of matrices,
all pixels × C times C × 4·K, whose result is stored interleaved. Tensor cores multiply a tile of it
in each block, as those of `gemm` do; the sums go through shared memory, from where each thread
stores 16 bytes that lie together in y. So x and weight are read by 16 bytes, y is written by 16,
and nothing is multiplied by the zeros that a convolution's gradient sees between the strides.

A row of the product is a pixel. Its columns come in the order in which weights lie in memory:

============== =============================== ====================================================
layout         column                          16 bytes of y
============== =============================== ====================================================
contiguous     4·k + 2·r + s                   both s of neighbouring pixels, for one k and r
channels-last  (2·r + s)·K + k                 neighbouring k of one pixel, for one r and s
============== =============================== ====================================================
"""

import math

import numpy as np

from course_lib.kernels import gemm
from course_lib.kernels.blocks.mma.shape import Shape
from course_lib.kernels.conv_transpose2d import packed, warpgroups
from course_lib.kernels.conv_transpose2d.strided import whole_memory
from course_lib.kernels.conv_transpose2d.upsample2x_kernels import ADD_BIAS, VECTORS, kernel_for
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

TENSOR_CORES_SINCE = (8, 0)
LARGE_FROM = 264  # blocks with the larger tile: two for each multiprocessor of a large chip
#: How numbers are multiplied (`mma.mainloop`) -> tiles of pixels × columns, large and small.
SHAPES = {
    "narrow": (Shape(128, 64, 2, 2, 3, 2), Shape(64, 64, 2, 2, 4, 2)),
    "tf32": (Shape(128, 64, 2, 2, 3, 2), Shape(64, 64, 2, 2, 4, 2)),
    "split": (Shape(128, 64, 4, 2, 3, 1), Shape(64, 64, 2, 2, 4, 2)),
}


def fault(problem, operands, capability):
    """Why this rung can't take the problem, with `operands` x and weight; or None."""
    p, width = problem, VECTOR_BYTES // operands[0].dtype.itemsize
    filters = (p.R, p.S, p.stride_h, p.stride_w, p.pad_h, p.pad_w, p.P, p.Q)
    if filters != (2, 2, 2, 2, 0, 0, 2 * p.H, 2 * p.W) or p.groups != 1:
        return "filters of 2 × 2 with stride 2, without padding, dilation and groups"
    if capability < TENSOR_CORES_SINCE:
        return "GPUs of compute capability 8.0 on"
    if p.channels_last and (p.C % width or p.K % width):
        return f"channels-last images whose channels are multiples of {width}"
    if not p.channels_last and (p.H * p.W % width or 4 * p.K % width):
        return f"images whose pixels, and 4·K, are multiples of {width}"
    if p.N * p.H * p.W >= 1 << 30 or 4 * p.K >= 1 << 30:
        return "fewer than 2³⁰ pixels of x, and columns"
    if any(arrays.address_of(array) % VECTOR_BYTES for array in operands):
        return f"arrays that begin on boundaries of {VECTOR_BYTES} bytes"
    return None


def run(problem, x, weight, bias, y, precision):
    """y of x and weight, both in the problem's format; y may have any strides."""
    p, itemsize = problem, x.dtype.itemsize
    mode = "narrow" if itemsize == 2 else "tf32" if precision == "tf32" else "split"
    n_images, n_rows = (1, p.N * p.H * p.W) if p.channels_last else (p.N, p.H * p.W)
    found = chosen(p, n_images, n_rows, itemsize, mode, chip_of(x))
    memory, strides = whole_memory(y)
    fits = _fits(p, y, strides)
    if fits and warpgroups.fault(p, (x, weight, y), chip_of(x)[0]) is None:
        warpgroups.forward(p, x, weight, bias, memory, strides)
        return
    options = (ADD_BIAS if bias is not None else 0) + (VECTORS if fits else 0)
    x_steps = (p.C, 1) if p.channels_last else (1, n_rows)
    launch(
        found.kernel, _n_blocks(found.shape, n_images, n_rows, p.K), found.shape.n_threads,
        x, weight, weight if bias is None else bias, memory, n_rows, p.C, np.int32(p.H),
        np.int32(p.W), np.int32(p.K), *x_steps, *strides, options,
        shared_bytes=found.shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def finds_dx(problem, dy, weight, dx):
    """find(problem, dy, weight, dx, precision) of what takes the problem; None where nothing does.
    """
    capability = chip_of(dy)[0]
    if fault(problem, (dx, weight), capability) is not None:
        return None
    if warpgroups.fault(problem, (dy, weight, dx), capability) is None:
        return warpgroups.backward
    return packed.backward if packed.fault(problem, (dy, weight, dx)) is None else None


def dx_kernels():
    """All that these launch."""
    products = *gemm.FORWARD[gemm.FORWARD.auto[0]].kernels, *gemm.kernels_of_planes()
    return *warpgroups.dx_kernels(), packed.pack_kernel, *products


def chosen(problem, n_images, n_rows, itemsize, mode, chip):
    """The `Kernel` of the larger tile, where that makes enough blocks and fits; else the other."""
    large, small = SHAPES[mode]
    found = kernel_for(large, itemsize, mode, problem.channels_last)
    if _n_blocks(large, n_images, n_rows, problem.K) >= LARGE_FROM:
        if found.shared_bytes <= chip[1]:
            return found
    return kernel_for(small, itemsize, mode, problem.channels_last)


def _n_blocks(shape, n_images, n_rows, K):
    return n_images * math.ceil(n_rows / shape.m) * math.ceil(4 * K / shape.n)


def _fits(problem, y, strides):
    """Whether 16 bytes of y lie together, on a boundary, wherever a thread stores them."""
    width = VECTOR_BYTES // y.dtype.itemsize
    y_n, y_k, y_p, y_q = strides
    together, others = (y_k, (y_n, y_p, y_q)) if problem.channels_last else (y_q, (y_n, y_k, y_p))
    if not problem.channels_last and 2 * problem.W % width:
        return False  # a thread's pixels may be of two rows
    aligned = not arrays.address_of(y) % VECTOR_BYTES
    return together == 1 and aligned and not any(step % width for step in others)


def kernels():
    """All that there are."""
    for mode, shapes in SHAPES.items():
        for shape in shapes:
            for last in (False, True):
                yield kernel_for(shape, 2 if mode == "narrow" else 4, mode, last).kernel
    yield from warpgroups.forward_kernels()


def specialisations(dtypes):
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for mode, shapes in SHAPES.items():
        for dtype in dtypes[1:] if mode == "narrow" else dtypes[:1]:
            for shape in shapes:
                for last, layout in ((False, "contiguous"), (True, "channels-last")):
                    kernel = kernel_for(shape, 2 if mode == "narrow" else 4, mode, last).kernel
                    name = f"upsample2x {mode} {shape.m}x{shape.n} {layout} {dtype}"
                    numbers = ["int64"] * 2 + ["int32"] * 3 + ["int64"] * 7
                    yield name, kernel, [(dtype, 1)] * 4 + numbers
    yield from warpgroups.specialisations(dtypes)
    yield from packed.specialisations(dtypes)
