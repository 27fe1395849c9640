"""How the rungs `direct`, `tiled`, `depthwise` and `im2col` are launched, and dbias."""

import math

import numpy as np

from course_lib.kernels.blocks.column_sums import sum_columns
from course_lib.kernels.blocks.memory_format import empty, formatted
from course_lib.kernels.conv2d import depthwise, direct, gathering, im2col, tiled
from course_lib.kernels.conv2d.problem import DTYPES
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch

MOST_WORKSPACE = 64 << 20  # bytes of columns made at a time, unless one image takes more
ENOUGH_BLOCKS = 132 * 4  # keep the largest chip of today busy


def _run(kernel, n_threads, block, *args, shared_bytes=0):
    n_blocks = math.ceil(n_threads / block)
    launch(kernel, n_blocks, block, *args, shared_bytes=shared_bytes, flat=True, overlap=True)


def _optional(bias, weight):
    # A kernel takes an array in any case; where there is no bias it doesn't read it.
    return weight if bias is None else bias


# --- direct --------------------------------------------------------------------------------------


def direct_forward(problem, x, weight, bias, y, precision):
    weight = formatted(weight, problem)
    operands = x, weight, _optional(bias, weight), y, bias is not None
    size = arrays.size_of(y)
    _run(direct.direct_kernel, size, direct.BLOCK_SIZE, *operands, *problem.numbers)


def direct_dx(problem, dy, weight, dx, precision):
    size = arrays.size_of(dx)
    _run(direct.direct_dx_kernel, size, direct.BLOCK_SIZE, dy, weight, dx, *problem.numbers)


def direct_dweight(problem, dy, x, dweight, precision):
    size = arrays.size_of(dweight) * 32
    _run(direct.direct_dweight_kernel, size, direct.BLOCK_SIZE, dy, x, dweight, *problem.numbers)


# --- tiled ---------------------------------------------------------------------------------------


def halo_spans(problem, array, down, right, n_channels):
    """The halo's lines and columns, and its bytes; ValueError where a block can't hold it."""
    p = problem
    spans = [
        (abs(scale) * (tile - 1) + (taps - 1) * abs(step)) // divisor + 1 + (divisor > 1)
        for tile, taps, (scale, _, step, divisor) in (
            (tiled.TILE_H, p.R, down), (tiled.TILE_W, p.S, right)
        )
    ]  # fmt: skip
    n_bytes = 4 * n_channels * spans[0] * spans[1]
    most = chip_of(array)[1] - 4 * tiled.WEIGHTS_SIZE
    if n_bytes > most or p.R * p.S > tiled.MOST_TAPS:
        raise ValueError(
            f"variant 'tiled' takes filters of at most {tiled.MOST_TAPS} taps, and as much of x as "
            f"fits {most:,} bytes of shared memory, not {p.R * p.S} taps and {n_bytes:,} bytes: "
            "use 'direct'"
        )
    return spans, n_bytes


def _tiled_gather(problem, arguments, operands):
    source, weight, bias, result = operands
    sizes, down, right, steps, _ = arguments
    spans, n_bytes = halo_spans(problem, source, down, right, tiled.CHANNELS)
    n_filters, P, Q = sizes[:3]
    n_tiles = problem.N * math.ceil(P / tiled.TILE_H) * math.ceil(Q / tiled.TILE_W)
    n_blocks = n_tiles * math.ceil(n_filters / tiled.FILTERS) * problem.groups
    numbers = problem.N, problem.groups, *sizes, problem.R, problem.S, *down, *right, *steps, *spans
    _run(
        tiled.tiled_kernel, n_blocks * tiled.BLOCK_SIZE, tiled.BLOCK_SIZE,
        source, weight, _optional(bias, weight), result, bias is not None,
        *map(np.int32, numbers), problem.channels_last, shared_bytes=n_bytes,
    )  # fmt: skip


def tiled_forward(problem, x, weight, bias, y, precision):
    operands = x, formatted(weight, problem), bias, y
    _tiled_gather(problem, gathering.forward_arguments(problem), operands)


def tiled_dx(problem, dy, weight, dx, precision):
    _tiled_gather(problem, gathering.dx_arguments(problem), (dy, weight, None, dx))


def tiled_dweight(problem, dy, x, dweight, precision):
    p = problem
    _, down, right, *_ = gathering.forward_arguments(p)
    spans, n_bytes = halo_spans(p, x, down, right, 1)
    n_tiles = p.N * math.ceil(p.P / tiled.TILE_H) * math.ceil(p.Q / tiled.TILE_W)
    n_parts = math.ceil(p.K // p.groups / tiled.FILTERS) * p.groups * (p.C // p.groups)
    n_splits, length = split_plan(n_parts, n_tiles, 1)
    partial = _partial(dweight, n_splits)
    numbers = np.int32(length), np.int32(n_splits), *map(np.int32, spans)
    _run(
        tiled.tiled_dweight_kernel, n_parts * n_splits * tiled.BLOCK_SIZE, tiled.BLOCK_SIZE,
        dy, x, partial, *numbers, *p.numbers, shared_bytes=n_bytes,
    )  # fmt: skip
    if partial is not dweight:
        gathering.add_up(partial, dweight, n_splits)


def split_plan(n_blocks, n, least):
    """(parts that `n` things are summed in, things of a part, `least` of them at least)."""
    wanted = max(1, min(math.ceil(ENOUGH_BLOCKS / n_blocks), n // least))
    length = max(1, math.ceil(n / wanted))
    return max(1, math.ceil(n / length)), length


def _partial(result, n_splits):
    """What parts are summed into: `result` itself, where there is one part of the same dtype."""
    if n_splits == 1 and arrays.dtype_name(result) == "float32":
        return result
    return arrays.empty((n_splits, arrays.size_of(result)), like=result, dtype="float32")


# --- depthwise -----------------------------------------------------------------------------------


def depthwise_plan(problem, chip):
    """The problem itself, or a `Refusal`."""
    if problem.groups != problem.C:
        return Refusal(
            f"takes one channel a group, groups={problem.C} here, not {problem.groups}"
        )
    return problem


def depthwise_forward(problem, x, weight, bias, y, precision):
    weight = formatted(weight, problem)
    operands = x, weight, _optional(bias, weight), y, bias is not None
    size = arrays.size_of(y)
    _run(depthwise.depthwise_kernel, size, depthwise.BLOCK_SIZE, *operands, *problem.numbers)


def depthwise_dx(problem, dy, weight, dx, precision):
    size, block = arrays.size_of(dx), depthwise.BLOCK_SIZE
    _run(depthwise.depthwise_dx_kernel, size, block, dy, weight, dx, *problem.numbers)


def depthwise_dweight(problem, dy, x, dweight, precision):
    p, block = problem, depthwise.BLOCK_SIZE
    n_splits, length = split_plan(p.K, p.N * p.P * p.Q, 4 * block)
    partial = _partial(dweight, n_splits)
    _run(
        depthwise.depthwise_dweight_kernel, p.K * n_splits * block, block,
        dy, x, partial, length, n_splits, *p.numbers,
    )  # fmt: skip
    if partial is not dweight:
        gathering.add_up(partial, dweight, n_splits)


# --- im2col --------------------------------------------------------------------------------------


def chunks(problem, like, dtype):
    """Yield (first image, the columns' array, the 1 × 1 convolution) for a few images at a time."""
    p = problem
    n_columns = p.C * p.R * p.S
    n_bytes = n_columns * p.P * p.Q * (4 if dtype == "float32" else 2)
    most = max(1, min(p.N, MOST_WORKSPACE // max(1, n_bytes)))
    columns = empty((most, n_columns, p.P, p.Q), like, p, dtype)
    for first in range(0, p.N, most):
        n = min(most, p.N - first)
        part = p._replace(
            N=n, C=n_columns, H=p.P, W=p.Q, R=1, S=1, stride_h=1, stride_w=1, pad_h=0, pad_w=0,
            dilation_h=1, dilation_w=1,
        )  # fmt: skip
        yield first, columns[:n], part


def _fill(problem, x, first, columns):
    size, block = arrays.size_of(columns), im2col.BLOCK_SIZE
    _run(im2col.im2col_kernel, size, block, x, columns, np.int32(first), *problem.numbers)


def im2col_forward(problem, x, weight, bias, y, precision):
    weight = formatted(weight, problem)
    for first, columns, part in chunks(problem, x, arrays.dtype_name(x)):
        _fill(problem, x, first, columns)
        mine = y[first : first + part.N]
        gathering.launch_forward("implicit_gemm", part, columns, weight, bias, mine, precision)


def im2col_dx(problem, dy, weight, dx, precision):
    # The copies of a pixel are added up before they are rounded to 16 bits.
    for first, columns, part in chunks(problem, dy, "float32"):
        mine = dy[first : first + part.N]
        gathering.launch_dx("implicit_gemm", part, mine, weight, columns, precision)
        size = part.N * problem.C * problem.H * problem.W
        numbers = np.int32(first), np.int32(part.N), *problem.numbers
        _run(im2col.col2im_kernel, size, im2col.BLOCK_SIZE, columns, dx, *numbers)


def im2col_dweight(problem, dy, x, dweight, precision):
    most = max(1, problem.N)
    partial, used = arrays.empty((most, arrays.size_of(dweight)), like=x, dtype="float32"), 0
    for first, columns, part in chunks(problem, x, arrays.dtype_name(x)):
        _fill(problem, x, first, columns)
        mine = dy[first : first + part.N]
        gathering.launch_dweight("implicit_gemm", part, mine, columns, partial[used], precision)
        used += 1
    gathering.add_up(partial[:used], dweight, used)


# --- dbias, and what is compiled -----------------------------------------------------------------


def dbias(problem, dy, result):
    """dbias[k] = Σ dy[:, k], whatever the rung."""
    p, block = problem, direct.BIAS_BLOCK_SIZE
    if p.channels_last and p.N * p.P * p.Q:
        sum_columns(dy, result, p.N * p.P * p.Q, p.K)
        return
    n_splits, length = split_plan(p.K, p.N * p.P * p.Q, 8 * block)
    partial = _partial(result, n_splits)
    _run(
        direct.dbias_kernel, p.K * n_splits * block, block,
        dy, partial, length, n_splits, p.N, p.K, p.P * p.Q, p.channels_last,
    )  # fmt: skip
    if partial is not result:
        gathering.add_up(partial, result, n_splits)


def with_dbias(find_dweight, problem, dy, x, for_weight, for_bias, precision):
    """dweight and dbias, unless None, by a rung that finds dweight alone."""
    if for_weight is not None:
        find_dweight(problem, dy, x, for_weight, precision)
    if for_bias is not None:
        dbias(problem, dy, for_bias)


def gathered_dweight(variant, problem, dy, x, for_weight, for_bias, precision):
    """dweight and dbias, unless None, by a rung of `gathering`: in one launch where it can."""
    done = False
    if for_weight is not None:
        done = gathering.launch_dweight(variant, problem, dy, x, for_weight, precision, for_bias)
    if for_bias is not None and not done:
        dbias(problem, dy, for_bias)


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    numbers, sums = ["int32"] * 16 + ["boolean"], ("float32", 1)
    for dtype in DTYPES:
        array = (dtype, 1)
        forward, other = [array] * 4 + ["boolean", *numbers], [array] * 3 + numbers
        sums_tiled = [array, array, sums, *["int32"] * 4, *numbers]
        sums_depthwise = [array, array, sums, "int64", "int64", *numbers]
        tile = [array] * 4 + ["boolean", *["int32"] * 23, "boolean"]
        for label, kernel, types in (
            ("direct forward", direct.direct_kernel, forward),
            ("direct dx", direct.direct_dx_kernel, other),
            ("direct dweight", direct.direct_dweight_kernel, other),
            ("tiled", tiled.tiled_kernel, tile),
            ("tiled dweight", tiled.tiled_dweight_kernel, sums_tiled),
            ("depthwise forward", depthwise.depthwise_kernel, forward),
            ("depthwise dx", depthwise.depthwise_dx_kernel, other),
            ("depthwise dweight", depthwise.depthwise_dweight_kernel, sums_depthwise),
            ("im2col", im2col.im2col_kernel, [array, array, "int32", *numbers]),
            ("col2im", im2col.col2im_kernel, [sums, array, "int32", "int32", *numbers]),
            ("dbias", direct.dbias_kernel, [array, sums, *["int64"] * 5, "boolean"]),
        ):
            yield f"conv2d.{label} {dtype}", kernel, types
