"""The way `block_diagonal` of `tensor_core`: groups of few channels, multiplied many at a time.

A tile of a product has 64 columns, and a group of 4 filters would fill a sixteenth of it. So the
weights are *spread*: some groups become one, whose weights are zero where filter and channel are of
different groups. It is a convolution like others, and of the gradient of its weights the blocks on
the diagonal are taken. The zeros are multiplied too: an infinity or NaN in x or dy gives NaN to the
results of all groups that its own was joined with.

On compute capability 9.0 `warpgroup` takes passes without strides: the columns of a tile read the
channels of their own groups, and the weights are spread straight to where it reads them.
"""

import functools
import math

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks import memory_format
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.memory_format import empty, formatted
from course_lib.kernels.blocks.transpose import load_rounded, transpose, transpose_rounded
from course_lib.kernels.conv2d import (
    gathering,
    halo_plan,
    layout,
    pixel_sums_plan,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.arranging import alone, beside
from course_lib.kernels.conv2d.problem import DTYPES
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import (
    VECTOR_BYTES,
    allow_next_kernel,
    load,
    store,
    wait_for_previous_kernel,
)
from course_lib.runtime.intrinsics.warpgroup import ROW_BYTES

BLOCK_SIZE = 256
COLUMNS = 64  # of a tile
#: Bytes of a number -> channels up to which all groups become one, where the kernels for that are
#: so much faster (`halo`, `pixel_sums`) than those with groups.
DENSE = {2: 256, 4: 512}
MOST_CHANNELS = 32  # of a group
SHAPES = tuple(shape for shape in warpgroup_plan.SHAPES if shape.n == COLUMNS)


def _place_in(load_weight):
    @cuda.jit(device=True)
    def weight_of(weight, column, channel, tap, counts, n_taps, swapped, last):
        """The weight that joins a column with a channel, or 0 where their groups are not the same.

        counts   columns and channels of a group
        swapped  whether columns are the weights' channels, and taps are turned, as for dx
        """
        of_column, column_in = divided(column, counts[0])
        of_channel, channel_in = divided(channel, counts[1])
        k, c, n_channels = column, channel_in, counts[1]
        if swapped:
            k, c, n_channels, tap = channel, column_in, counts[0], n_taps - 1 - tap
        place = np.int64(k) * (n_channels * n_taps)
        place += tap * n_channels + c if last else c * n_taps + tap
        return load_weight(weight, place) if of_column == of_channel else ZERO

    return weight_of


_weight_of, _rounded_of = _place_in(load), _place_in(load_rounded)


@cuda.jit
def spread_kernel(
    weight, spread, n_columns, n_channels, per_part, part_channels, n_joined, n_taps, gathers, last
):
    """spread (filters, n_joined, taps) = weight (filters, n_channels, taps) among zeros.

    n_columns, n_channels    of a group
    per_part, part_channels  filters of the groups that are joined, and their channels
    gathers                  the reverse: `spread` is read, and its blocks become `weight`
    last                     whether channels lie behind taps
    """
    allow_next_kernel()
    wait_for_previous_kernel()
    i, width = np.int32(cuda.grid(1)), n_channels if gathers else n_joined
    if i < (weight.shape[0] if gathers else spread.shape[0]):
        line, inner = divided(i, np.int32(width * n_taps))
        (tap, c) = divided(inner, width) if last else divided(inner, n_taps)
        if not last:
            tap, c = c, tap
        part, _ = divided(line, per_part)
        if gathers:
            channel = divided(line, n_columns)[0] * n_channels + c - part * part_channels
            place = np.int64(line) * (n_joined * n_taps)
            place += tap * n_joined + channel if last else channel * n_taps + tap
            store(weight, i, load(spread, place))
        else:
            channel = np.int32(part * part_channels + c)
            counts = n_columns, n_channels
            store(spread, i, _weight_of(weight, line, channel, tap, counts, n_taps, False, last))


def _tiling(weight_of):
    @cuda.jit(device=True)
    def spread_tiles(
        i, weight, tiles, k_size, n_lines, n_columns, n_channels, all_columns, part_channels,
        n_taps, last, swapped,
    ):  # fmt: skip
        """tiles[chunk, tap, column, k], ordered as `arrange` does it for `warpgroup`; element i.

        k_size, n_lines        channels of a chunk; columns, those that fill the last tile included
        n_columns, n_channels  of a group; there are all_columns
        part_channels          channels that each COLUMNS columns read
        last, swapped          as `weight_of` has them
        """
        if i < tiles.shape[0]:
            line, k = divided(i, k_size)
            line, column = divided(line, n_lines)
            chunk, tap = divided(line, n_taps)
            column = np.int32(column // 16 * 16 + column % 8 * 2 + column % 16 // 8)
            c, value = np.int32(chunk * k_size + k), ZERO
            if column < all_columns and c < part_channels:
                channel = np.int32(column // COLUMNS * part_channels + c)
                counts = n_columns, n_channels
                value = weight_of(weight, column, channel, tap, counts, n_taps, swapped, last)
            store(tiles, i, value)

    return spread_tiles


_tiles, _rounded_tiles = _tiling(_weight_of), _tiling(_rounded_of)
#: Bytes of a number -> (kernel that spreads weights for `warpgroup`, and with images, transposed).
TILES = {
    2: (alone(_tiles), beside(transpose, _tiles)),
    4: (alone(_rounded_tiles), beside(transpose_rounded, _rounded_tiles)),
}
KERNELS = spread_kernel, *TILES[2], *TILES[4]


def joined(problem):
    """The `Problem` with as many groups joined as fill a tile's columns."""
    p, largest = problem, max(problem.C, problem.K) // problem.groups
    n = max(n for n in range(1, COLUMNS // largest + 1) if p.groups % n == 0)
    return p._replace(groups=p.groups // n)


def joined_for(problem, source, is_planned):
    """The same, or with all groups joined where is_planned(problem) and channels are few."""
    dense = problem._replace(groups=1)
    few = max(problem.C, problem.K) <= DENSE[source.dtype.itemsize]
    return dense if few and is_planned(dense) else joined(problem)


def _by_halo(gather_of, source, precision):
    """Whether `halo` takes the pass of a problem, as a function of that."""

    def is_planned(problem):
        gather = gather_of(problem)
        n_terms = gather.n_channels * gather.R * gather.S if gather else 0
        mode = halo_plan.mode_of(source, precision, n_terms)
        return halo_plan.planned(gather, source.dtype.itemsize, mode, chip_of(source)) is not None

    return is_planned


def _by_pixel_sums(source, precision):
    def is_planned(problem):
        mode = halo_plan.mode_of(source, precision, problem.N * problem.P * problem.Q)
        chosen = problem, source.dtype.itemsize, mode, chip_of(source)
        return pixel_sums_plan.planned(*chosen) is not None

    return is_planned


def plan(problem, chip):
    """The problem itself, or a `Refusal`."""
    p = problem
    if p.groups == 1 or p.C == p.groups or not p.K:
        return Refusal("takes groups of several channels")
    if max(p.C, p.K) // p.groups > MOST_CHANNELS:
        return Refusal(
            f"takes groups of at most {MOST_CHANNELS} channels and filters, not of "
            f"{p.C // p.groups} and {p.K // p.groups}"
        )
    if found := gathering.fault(joined(p)) or gathering.fault(p):
        return Refusal(f"takes {found}")
    return problem


def _launch_spread(problem, joined, weight, spread, gathers):
    """Launch `spread_kernel`; `problem` is that of `weight`, `joined` that of `spread`."""
    p, size = problem, arrays.size_of(weight if gathers else spread)
    filters, channels = p.K // joined.groups, p.C // joined.groups
    numbers = p.K // p.groups, p.C // p.groups, filters, channels, channels, p.R * p.S
    launch(
        spread_kernel, math.ceil(size / BLOCK_SIZE), BLOCK_SIZE, weight, spread,
        *map(np.int32, numbers), gathers, joined.channels_last, flat=True, overlap=True,
    )  # fmt: skip


def forward(problem, x, weight, bias, y, precision):
    """y = x * weight + bias."""
    weight = formatted(weight, problem)
    if not _by_warpgroups(problem, x, weight, bias, y, precision, False):
        p = joined_for(problem, x, _by_halo(halo_plan.forward_of, x, precision))
        _join(gathering.launch_forward, problem, p, x, weight, y, precision, bias)


def dx(problem, dy, weight, dx, precision):
    """dx, from dy and weight."""
    p = problem
    pads = (p.R - 1) * p.dilation_h - p.pad_h, (p.S - 1) * p.dilation_w - p.pad_w
    if (p.stride_h, p.stride_w) == (1, 1) and min(pads) >= 0:
        turned = p._replace(C=p.K, H=p.P, W=p.Q, K=p.C, P=p.H, Q=p.W, pad_h=pads[0], pad_w=pads[1])
        if _by_warpgroups(turned, dy, weight, None, dx, precision, True):
            return
    p = joined_for(problem, dy, _by_halo(halo_plan.dx_of, dy, precision))
    _join(gathering.launch_dx, problem, p, dy, weight, dx, precision)


def _join(launch_pass, problem, joined, source, weight, result, precision, *bias):
    """A pass of the problem by that whose groups are joined."""
    p, source, weight = _side_by_side(joined, source, weight)
    room = result if p.channels_last == problem.channels_last else empty(result.shape, result, p)
    spread = empty(p.weight_shape, weight, p)
    _launch_spread(problem, p, weight, spread, False)
    if bias:
        launch_pass("tensor_core", p, source, spread, *bias, room, precision)
    else:
        launch_pass("tensor_core", p, source, spread, room, precision)
    if room is not result:
        N, C, H, W = result.shape
        memory_format.transpose(room, result, N, H * W, C)


def dweight(problem, dy, x, dweight, precision):
    """dweight, from dy and x."""
    p = joined_for(problem, x, _by_pixel_sums(x, precision))
    p, dy, x = _side_by_side(p, dy, x)
    spread = empty(p.weight_shape, x, p)
    gathering.launch_dweight("tensor_core", p, dy, x, spread, precision)
    own = p._replace(groups=problem.groups)
    result = dweight if own == problem else empty(own.weight_shape, x, own)
    _launch_spread(own, p, result, spread, True)
    if result is not dweight:
        memory_format.transpose(result, dweight, p.K, p.R * p.S, p.C // problem.groups)


def _side_by_side(p, *images):
    """(problem, *images) with channels side by side, where 16-bit groups are then copied faster."""
    if p.channels_last or p.groups == 1 or images[0].dtype.itemsize == 4:
        return p, *images
    return p._replace(channels_last=True), *map(memory_format.channels_last, images)


def _by_warpgroups(problem, source, weight, bias, result, precision, swapped):
    """Whether the pass is one for `warpgroup`, which then has been launched."""
    p, itemsize = problem, source.dtype.itemsize
    channels, filters = p.C // p.groups, p.K // p.groups
    mode = halo_plan.mode_of(source, precision, channels * p.R * p.S)
    gather = halo_plan.forward_of(p._replace(groups=1))
    plan = planned(gather, channels, filters, itemsize, mode, chip_of(source))
    if plan is None or p.channels_last and arrays.address_of(source) % VECTOR_BYTES:
        return False
    part, k_size = COLUMNS // filters * channels, ROW_BYTES // itemsize
    n_lines, n_taps = math.ceil(p.K / COLUMNS) * COLUMNS, p.R * p.S
    size = plan.n_chunks * n_taps * n_lines * k_size
    tiles = arrays.empty((size,), like=weight)
    numbers = k_size, n_lines, filters, channels, p.K, part, n_taps, p.channels_last
    numbers = weight, tiles, *map(np.int32, numbers), swapped
    source = layout.launch_both(TILES[itemsize], p, source, p.C, size, numbers, itemsize == 4)
    warpgroup_plan.run_laid_out(gather, plan, p, source, tiles, bias, result, part)
    return True


@functools.lru_cache(maxsize=4096)
def planned(gather, channels, filters, itemsize, mode, chip):
    """The fastest `warpgroup_plan.Plan` for groups of so many; None if it can't take them."""
    g = gather._replace(n_channels=COLUMNS // filters * channels)
    if mode not in warpgroup_plan.MODES or chip.capability != warpgroup_plan.ONLY:
        return None
    whole = not (COLUMNS % filters or (g.n_channels | gather.n_channels) * itemsize % VECTOR_BYTES)
    if not whole or g.stride != (1, 1):
        return None
    plans = (warpgroup_plan.plan_of(g, shape, itemsize, chip) for shape in SHAPES)
    plans = [plan for plan in plans if plan is not None]
    return min(plans, key=functools.partial(warpgroup_plan.cost, g), default=None)


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        array, numbers = (dtype, 1), [*["int32"] * 8, "boolean"]
        types = [array, array, *["int32"] * 6, "boolean", "boolean"]
        yield f"conv2d.spread {dtype}", spread_kernel, types
        alone, with_images = TILES[4 if dtype == "float32" else 2]
        yield f"conv2d.spread tiles {dtype}", alone, [array, array, *numbers]
        images = [array, array, "int64", "int64", "boolean", "int64"]
        label = f"conv2d.spread tiles and transpose {dtype}"
        yield label, with_images, [*images, array, array, *numbers]
