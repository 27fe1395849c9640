"""What `sanitize_launches` runs of convolutions on tensor cores, with copies of 16 bytes.

These are `halo` for forward and dx, and `pixel_sums` for dweight, which large convolutions get with
large tiles, small ones with the blocks of clusters. Each part has one way of multiplication, and
goes through all tiles of it; it raises AssertionError where another kernel was launched.
"""

from unittest import mock

import torch
from sanitize_planned import (
    LAYOUTS,
    UNEVEN,
    WHOLE,
    Case,
    changed,
    gathered,
    launched,
    nothing,
    y_shape,
)

#: Ways of multiplication (`mma.mainloop`), the dtypes that they are for, and the number of terms
#: from which on float32 is "mixed", that is: always, or never.
MODES = (
    ("narrow", torch.float16, 0), ("narrow", torch.bfloat16, 0), ("tf32", torch.float32, 0),
    ("split", torch.float32, 1 << 30), ("mixed", torch.float32, 0),
)  # fmt: skip
PLANAR, LAST = LAYOUTS
STRIDED = Case((3, 2, 9, 11), 40, (3, 2), dict(stride=(2, 1), padding=(1, 0)))
# For clusters: channels of the result in whole vectors, several blocks side by side; few of all.
CLUSTERED = Case((2, 9, 9, 8), 72, (3, 3), dict(padding=1))
DILATED = Case((3, 3, 5, 7), 8, (2, 3), dict(padding=(1, 0), dilation=(1, 2)))
LEAST = Case((1, 1, 1, 1), 8, (1, 1), {})
# Images and filters, and options, for dweight: several tiles each way, and one that is not full.
SUMMED = (
    ((2, 72, 9, 8), (136, 72, 3, 3), dict(padding=1)),
    ((3, 8, 9, 11), (40, 8, 3, 2), dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2))),
)


def _others():
    from course_lib.kernels.conv2d import (
        halo_small,
        pixel_sums_small,
        warpgroup_mixed_plan,
        warpgroup_plan,
    )

    return nothing(halo_small, pixel_sums_small, warpgroup_mixed_plan, warpgroup_plan)


def _precision(mode):
    return "tf32" if mode == "tf32" else "float32"


# Each generator below yields what a kernel has written.


def tiles_with_halo(mode, dtype):
    from course_lib.kernels.conv2d import halo_plan

    for tile in halo_plan.SHAPES[mode]:
        way = dtype, halo_plan.kernel_for(tile, dtype.itemsize, mode), _precision(mode)
        with _others(), changed(halo_plan, SHAPES={mode: {tile: 1.0}}):
            for layout in LAYOUTS:
                for backward in (False, True):
                    yield gathered(WHOLE, layout, *way, backward=backward)
            yield gathered(UNEVEN, LAST, *way)
            yield gathered(UNEVEN, PLANAR, *way, backward=True)
            yield gathered(STRIDED, LAST, *way)


def clusters_with_halo(mode, dtype):
    from course_lib.kernels.conv2d import halo_plan, halo_small

    def passes(choice, *cases):
        """Both passes of the cases, by the plan that is `choice` of all that there are."""

        def fastest(gather, mode, plans):
            return choice(plans, key=lambda plan: plan.n_blocks(gather.R * gather.S))

        with changed(halo_small, SHAPES={mode: (tile,)}, fastest=fastest):
            for case, layout in cases:
                yield gathered(case, layout, dtype, forward, _precision(mode))
                yield gathered(case, layout, dtype, dx, _precision(mode), backward=True)

    for tile in halo_small.SHAPES[mode]:
        forward, dx = (
            halo_plan.kernel_for(tile, dtype.itemsize, mode, source)
            for source in ("by_k", "by_row")
        )
        yield from passes(max, (CLUSTERED, LAST), (CLUSTERED, PLANAR), (DILATED, PLANAR))
        yield from passes(min, (CLUSTERED, PLANAR), (DILATED, LAST), (LEAST, LAST))

        if dtype.itemsize == halo_small.ELEMENT_BYTES:
            yield from _weights_as_given(mode, dtype, tile)


def _weights_as_given(mode, dtype, tile):
    """Contiguous weights of channels-last images, read as they lie."""
    from course_lib.kernels.conv2d import halo_plan, halo_small

    source = "by_element"
    kernel = halo_plan.kernel_for(tile, dtype.itemsize, mode, source)
    for choice in (max, min):

        def fastest(gather, mode, plans, choice=choice):
            plans = [plan for plan in plans if plan.source == source]
            return choice(plans, key=lambda plan: plan.n_blocks(gather.R * gather.S))

        with changed(halo_small, SHAPES={mode: (tile,)}, fastest=fastest):
            for case in (CLUSTERED, DILATED):
                way = dtype, kernel, _precision(mode)
                yield gathered(case, LAST, *way, weights_layout=PLANAR)


def sums_over_pixels(mode, dtype):
    from course_lib.kernels.conv2d import pixel_sums, pixel_sums_plan, pixel_sums_small

    for tile in pixel_sums_plan.SHAPES[mode]:
        kernel = pixel_sums_plan.kernel_for(tile, dtype.itemsize, mode)
        tiles = changed(pixel_sums_plan, SHAPES={mode: {tile: 1.0}}, LEAST_TILES=1)
        with _others(), tiles:
            yield from _summed(mode, dtype, kernel, pixel_sums.sum_kernel)
    for tile in pixel_sums_small.SHAPES[mode]:
        kernel = pixel_sums_plan.kernel_for(tile, dtype.itemsize, mode, True)
        for choice in (max, min):

            def fastest(problem, mode, plans, choice=choice):
                return choice(plans, key=lambda plan: plan.n_splits)

            with changed(pixel_sums_small, SHAPES={mode: (tile,)}, fastest=fastest):
                yield from _summed(mode, dtype, kernel)


def _summed(mode, dtype, *kernels):
    from course_lib.kernels import conv2d

    for x_shape, weight_shape, options in SUMMED:
        for layout in LAYOUTS:
            x, weight = (
                torch.randn(shape).to(dtype, memory_format=layout)
                for shape in (x_shape, weight_shape)
            )
            dy = torch.randn(y_shape(x, weight, options)).to(dtype, memory_format=layout)
            way = dict(variant="tensor_core", precision=_precision(mode))
            with launched(*kernels):
                _, *found = conv2d.backward(
                    dy, x, weight, needs=(False, True, True), **way, **options
                )
            yield from found


def _each_mode(part):
    """`part` in each mode, as parts of their own."""

    def named(mode, dtype, long):
        def found():
            from course_lib.kernels.conv2d import halo_plan

            with mock.patch.object(halo_plan, "LONG", long):
                yield from part(mode, dtype)

        name = mode if dtype is torch.float32 else str(dtype).removeprefix("torch.")
        found.__name__ = f"{part.__name__}_{name}"
        return found

    return [named(*mode) for mode in MODES]


PARTS = [
    found
    for part in (tiles_with_halo, clusters_with_halo, sums_over_pixels)
    for found in _each_mode(part)
]
