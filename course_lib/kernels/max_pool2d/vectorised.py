"""Which kernel does the work of the rung `vectorised`, and how it is launched.

Where none of them can, it is `rows`.
"""

import math

from course_lib.kernels.max_pool2d import (
    bands,
    columns,
    launching,
    patches,
    pixel_patches,
    pixels,
    plan,
)
from course_lib.kernels.max_pool2d.fixed import WIDE_WINDOWS, WINDOWS, Fixed
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES


def forward(images, window, channels_last, relu):
    """The launch of the rung; `images` are x, y and the indices."""
    x, y, indices = images
    n_planes, itemsize = x.shape[0] * x.shape[1], x.dtype.itemsize
    fixed = _fixed(window, indices)
    if channels_last:
        if fixed and _launch_pixel_patches(
            pixel_patches.forward_kernel, images, fixed, window, plan.forward_tall, window.OH,
            window.OW, relu,
        ):  # fmt: skip
            return
        return _launch_any(images, window, channels_last, relu)
    if fixed and (p := plan.plan_forward_patches(n_planes, window, itemsize, *_starts(images))):
        kernel = _forward_kernel(fixed, p.across, p.rows, p.aligned)
        return _launch_patches(kernel, images, p, window, relu)
    if (wide := _fixed(window, indices, WIDE_WINDOWS)) and (
        p := plan.plan_columns(n_planes, window.OH, window.OW)
    ):
        return _launch_patches(columns.forward_kernel(wide, p.rows), images, p, window, relu)
    size = (window.KH, window.KW) if window.DH == window.DW == 1 else None
    b = None
    if size in bands.FORWARD_KERNELS:
        b = plan.plan_forward(n_planes, window, itemsize, chip_of(x))
    if b is None:
        return _launch_any(images, window, channels_last, relu)
    multiplier = math.ceil(2**bands.SHIFT / window.OH) if b.planes > 1 else 0
    launch(
        bands.FORWARD_KERNELS[size], b.n_blocks, plan.BAND_THREADS,
        *images, n_planes, b.planes, b.rows, b.bands, multiplier, b.bits, _offset(x),
        launching.in_plane(indices), *window, shared_bytes=_bytes(b.elements, itemsize),
        flat=True, overlap=True,
    )  # fmt: skip
    launching.apply_relu(y, indices, relu)


def backward(images, window, channels_last):
    """The launch of the rung; `images` are dy, the indices and dx."""
    dy, indices, dx = images
    n_planes, itemsize = dx.shape[0] * dx.shape[1], dx.dtype.itemsize
    fixed = _fixed(window, indices)
    if channels_last:
        if fixed and _launch_pixel_patches(
            pixel_patches.backward_kernel, images, fixed, window, plan.backward_tall,
            plan.ceil_div(window.H, fixed.stride), plan.ceil_div(window.W, fixed.stride),
        ):  # fmt: skip
            return
        return _launch_any_backward(images, window, channels_last)
    if fixed and (p := plan.plan_backward_patches(n_planes, window, itemsize, *_starts(images))):
        kernel = patches.backward_kernel(fixed, p.across, p.rows, p.aligned)
        return _launch_patches(kernel, images, p, window)
    if (wide := _fixed(window, indices, WIDE_WINDOWS)) and (
        p := plan.plan_columns(n_planes, window.H, window.W)
    ):
        return _launch_patches(columns.backward_kernel(wide, p.rows), images, p, window)
    b, rows_apart, columns_apart = plan.plan_backward(n_planes, window, chip_of(dx))
    if b is None:
        return _launch_any_backward(images, window, channels_last)
    launch(
        bands.BACKWARD_KERNELS[rows_apart == columns_apart == 1], b.n_blocks, plan.BAND_THREADS,
        *images, n_planes, b.planes, b.rows, b.bands, rows_apart, columns_apart, b.bits,
        _offset(dx), math.ceil(2**16 / window.KW), launching.in_plane(indices), *window,
        shared_bytes=_bytes(b.elements, 4), flat=True, overlap=True,
    )  # fmt: skip


def _launch_any(images, window, channels_last, relu):
    """The forward launch of windows that have no kernel of their own."""
    x, y, indices = images
    make = pixels.forward_kernel
    if not _launch_pixels(make, images, (x, y), indices, window, y, channels_last):
        return launching.launch_rows(images, window, channels_last, relu)
    launching.apply_relu(y, indices, relu)


def _launch_any_backward(images, window, channels_last):
    """As `_launch_any`."""
    dy, indices, dx = images
    make = pixels.backward_kernel
    if not _launch_pixels(make, images, (dy, dx), indices, window, dx, channels_last):
        launching.launch_rows_backward(images, window, channels_last)


def _fixed(window, indices, windows=WINDOWS):
    """The `Fixed` window that this is, where there are kernels for it; else None."""
    found = Fixed(window.KH, window.SH, window.PH)
    square = found == (window.KW, window.SW, window.PW) and window.DH == window.DW == 1
    return found if square and found in windows and not launching.in_plane(indices) else None


def _forward_kernel(fixed, across, rows, aligned):
    if aligned:
        return patches.forward_kernel(fixed, across, rows)
    return columns.forward_kernel(fixed, rows)


def _launch_patches(kernel, images, p, window, *flags):
    is_wide = p.across * window.SW * images[0].dtype.itemsize > VECTOR_BYTES
    block = plan.PATCH_THREADS[is_wide]
    launch(
        kernel, plan.ceil_div(p.n_patches, block), block, *images, p.n_patches, p.columns,
        *plan.divider(p.columns), p.groups, *plan.divider(p.groups), *window[:4], *flags,
        flat=True, overlap=True,
    )  # fmt: skip


def _launch_pixel_patches(make, images, fixed, window, tall, height, width, *flags):
    """Launch it and return True; or return False, where it can't.

    `height`×`width` is what an image has windows for; `tall` tells how tall patches may be.
    """
    N, C, _, _ = images[0].shape
    itemsize, block = images[0].dtype.itemsize, plan.PIXEL_PATCH_THREADS
    tall = tall(fixed, itemsize)
    n_columns, rest = divmod(C * itemsize, VECTOR_BYTES)
    if N * height * width * n_columns < tall * plan.ENOUGH_PATCHES:
        tall = 1
    groups = plan.ceil_div(height, tall)
    n_patches = N * groups * width * n_columns
    most = max(n_patches, window.H * window.W)
    if rest or any(_starts(images)) or most > plan.MOST_THREADS:
        return False
    dividers = (number for n in (n_columns, width, groups) for number in plan.divider(n))
    launch(
        make(fixed, VECTOR_BYTES // itemsize, tall), plan.ceil_div(n_patches, block), block,
        *images, n_patches, n_columns, *dividers, width, groups, C, *window[:4], *flags,
        flat=True, overlap=True,
    )  # fmt: skip
    return True


def _launch_pixels(make, images, vectors, indices, window, result, channels_last):
    """As `_launch_pixel_patches`; `vectors` are read or written 16 bytes at a time, if they can."""
    N, C, height, width = result.shape
    inner, planes = (C, N) if channels_last else (1, N * C)
    wide = inner * result.dtype.itemsize % VECTOR_BYTES == 0 and not any(_starts(vectors))
    n_columns = inner // (VECTOR_BYTES // result.dtype.itemsize if wide else 1)
    n_threads = planes * height * width * n_columns
    if max(n_threads, window.H * window.W, window.OH * window.OW) > plan.MOST_THREADS:
        return False
    block = plan.PIXEL_PATCH_THREADS
    launch(
        make(wide), plan.ceil_div(n_threads, block), block, *images, n_threads, inner, n_columns,
        launching.in_plane(indices), *window, flat=True, overlap=True,
    )  # fmt: skip
    return True


def _starts(images):
    """Bytes from the last 16-byte boundary to each image."""
    return [arrays.address_of(image) % VECTOR_BYTES for image in images]


def _offset(image):
    """Elements from the last 16-byte boundary to the image."""
    return arrays.address_of(image) % VECTOR_BYTES // image.dtype.itemsize


def _bytes(n_elements, itemsize):
    return math.ceil(n_elements * itemsize / VECTOR_BYTES) * VECTOR_BYTES


def kernels(direction, dtype):
    """(label, kernel, types of its numbers) of all that the rung alone launches."""
    flag, sizes = "boolean", ["int64"] * 12
    itemsize = 4 if dtype == "float32" else 2
    if direction == "forward":
        for size, kernel in bands.FORWARD_KERNELS.items():
            yield "×".join(map(str, size)), kernel, ["int64"] * 7 + [flag, *sizes]
    else:
        for alone, kernel in bands.BACKWARD_KERNELS.items():
            yield "alone" if alone else "any", kernel, ["int64"] * 9 + [flag, *sizes]
    for vectors in (False, True):
        make = pixels.forward_kernel if direction == "forward" else pixels.backward_kernel
        label = "channels-last" if vectors else "by element"
        yield label, make(vectors), ["int64"] * 3 + [flag, *sizes]
    for wide in WIDE_WINDOWS:
        make = columns.forward_kernel if direction == "forward" else columns.backward_kernel
        types = ["int64"] * 11 + [flag] * (direction == "forward")
        yield f"columns of {wide.kernel}×{wide.kernel}", make(wide, plan.COLUMN_ROWS), types
    for fixed in WINDOWS:
        name = f"{fixed.kernel}×{fixed.kernel}/{fixed.stride}/{fixed.padding}"
        if direction == "forward":
            make, make_pixels = _forward_kernel, pixel_patches.forward_kernel
            shapes, tall = plan.forward_shapes(fixed.stride, itemsize), plan.forward_tall
            flags = [flag]
        else:
            make, make_pixels = patches.backward_kernel, pixel_patches.backward_kernel
            shapes, tall = plan.backward_shapes(fixed, itemsize), plan.backward_tall
            flags = []
        for across, rows, aligned in shapes:
            label = f"{name}, {rows}×{across}{'' if aligned else ' one by one'}"
            yield label, make(fixed, across, rows, aligned), ["int64"] * 11 + flags
        for n in sorted({1, tall(fixed, itemsize)}):
            kernel = make_pixels(fixed, VECTOR_BYTES // itemsize, n)
            yield f"channels-last {name}, {n} tall", kernel, ["int64"] * 15 + flags
