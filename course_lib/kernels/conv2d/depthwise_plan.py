"""Which depthwise convolutions go by `windows`, and how these are dealt out and launched."""

import math

import numpy as np

from course_lib.kernels.blocks.memory_format import formatted
from course_lib.kernels.conv2d import depthwise_windows as windows
from course_lib.kernels.conv2d import gathering
from course_lib.kernels.conv2d.depthwise_sums import (
    LINE_THREADS,
    MOST_LINES,
    columns_of,
    window_sums_kernel,
)
from course_lib.kernels.conv2d.launching import depthwise_plan as by_element
from course_lib.kernels.conv2d.problem import DTYPES
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

SIZES, STRIDES = (3, 5, 7), (1, 2)  # columns of a filter, that there are kernels for
MOST_STRIDE = 8  # of taps whole strides apart: dx writes stride² pixels for each that taps meet
MOST = 2**29  # of what is counted in 32 bits
LANES = 8  # vectors of channels that a block has side by side, at most
BUSY = 0.9  # of the threads that could be, beyond which more blocks are not worth shorter lines
ENOUGH_BLOCKS = 8  # for each multiprocessor
MOST_TURNS = 4  # of a block's lines of tiles
LEAST_RUNS = 2  # of a thread, for dweight, where pixels are shared among blocks


def plan(problem, chip):
    """The problem itself, or a `Refusal`."""
    p = problem
    if p.groups != p.C:
        return by_element(problem, chip)
    if p.S not in SIZES or p.R > MOST_LINES:
        return Refusal(
            f"takes filters of {', '.join(map(str, SIZES))} columns and at most "
            f"{MOST_LINES} lines, not {p.R} × {p.S}"
        )
    if _stride_of_kernel(p) is None:
        return Refusal(
            f"takes strides up to {MOST_STRIDE} that divide the dilation, or 2 both ways without "
            f"dilation, not {p.stride_h} × {p.stride_w} with one of {p.dilation_h} × {p.dilation_w}"
        )
    reach = max(p.pad_h, p.pad_w, p.dilation_h, p.dilation_w) * MOST_LINES
    lines = max(p.N, 1) * max(p.K * p.P, p.C * p.H, p.P * p.Q)
    if not p.H * p.W or max(p.C * p.H * p.W, p.K * p.P * p.Q, lines, reach) >= MOST:
        return Refusal(f"takes images of 1 to {MOST:,} elements, and as many lines of all images")
    return problem


def _stride_of_kernel(p):
    """1 where taps are whole strides apart, else 2; None where there is no kernel."""
    whole = p.dilation_h % p.stride_h == p.dilation_w % p.stride_w == 0
    if whole and max(p.stride_h, p.stride_w) <= MOST_STRIDE:
        return 1
    return 2 if (p.stride_h, p.stride_w, p.dilation_h, p.dilation_w) == (2, 2, 1, 1) else None


def _apart(p):
    """Results down, and across, from one of a thread to its next."""
    return max(1, p.dilation_h // p.stride_h), max(1, p.dilation_w // p.stride_w)


def forward(problem, x, weight, bias, y, precision):
    """y = x * weight + bias."""
    p, fan_out, weight = problem, problem.K // problem.C, formatted(weight, problem)
    strides, dilations = (p.stride_h, p.stride_w), (p.dilation_h, p.dilation_w)
    tiles = (-p.pad_h, -p.pad_w), (0, 0), strides, dilations, (1, 1)
    _launch(p, x, weight, bias, y, tiles, (1, fan_out), False)


def dx(problem, dy, weight, dx, precision):
    """dx, from dy and weight."""
    p, fan_in = problem, problem.K // problem.C
    apart_h, apart_w = _apart(p)
    if _stride_of_kernel(p) == 1:
        offset_h = p.pad_h // p.stride_h - (p.R - 1) * apart_h
        offset_w = p.pad_w // p.stride_w - (p.S - 1) * apart_w
        leads, spreads = (p.pad_h % p.stride_h, p.pad_w % p.stride_w), (p.stride_h, p.stride_w)
        tiles = (offset_h, offset_w), leads, (1, 1), (apart_h, apart_w), spreads
        _launch(p, dy, weight, None, dx, tiles, (fan_in, 1), True)
        return
    lead = (p.pad_w - windows.phase_of(p.S, 2)) % 2
    offset_w = (p.pad_w - windows.phase_of(p.S, 2) - lead) // 2 - windows.before(p.S, 2)
    tiles = (p.pad_h, offset_w), (0, lead), (1, 1), (1, 1), (1, 1)
    _launch(p, dy, weight, None, dx, tiles, (fan_in, 1), False, for_dx=True)


def is_wide(problem, *operands):
    """Whether channels are read and written 16 bytes at a time."""
    p, itemsize = problem, operands[0].dtype.itemsize
    whole = p.channels_last and p.K == p.C and p.C * itemsize % VECTOR_BYTES == 0
    return whole and not any(arrays.address_of(array) % VECTOR_BYTES for array in operands)


def _lanes(problem, wide, itemsize, n_threads):
    """(threads for channels, blocks for them): the fewest that keep a block's `n_threads` busy."""
    if not problem.channels_last:
        return 1, 1
    count, most = (problem.K * itemsize // VECTOR_BYTES, LANES) if wide else (problem.K, 32)

    def busy(n_groups):  # channels at a time of each block
        return n_threads // math.ceil(count / n_groups) * count / n_groups

    fewest = math.ceil(count / most)
    choice = range(fewest, fewest + 1 if wide else 2 * fewest + 1)
    enough = BUSY * max(map(busy, choice))
    n_groups = next(n for n in choice if busy(n) >= enough)
    return math.ceil(count / n_groups), n_groups


def _runs(size, n, dilation):
    """Tiles of a side of `size` results: n of them, `dilation` apart, in each."""
    return min(size, dilation * math.ceil(size / (n * dilation)))


def _launch(problem, source, weight, bias, result, tiles, fans, flipped, for_dx=False):
    """`tiles`: offsets, leads, strides, dilations and spreads, as the kernel's docstring says."""
    p, last, itemsize = problem, problem.channels_last, source.dtype.itemsize
    stride, (apart_h, apart_w) = _stride_of_kernel(p), _apart(p)
    _, (lead_h, lead_w), _, _, (spread_h, spread_w) = tiles
    wide = is_wide(p, source, result)
    (_, channels, H, W), (_, filters, P, Q) = source.shape, result.shape
    columns, rows = windows.columns_of(stride, for_dx), windows.rows_of(wide)
    runs_h = _runs(math.ceil((P + lead_h) / spread_h), rows, apart_h)
    runs_w = _runs(math.ceil((Q + lead_w) / spread_w), columns, apart_w)
    lanes, n_groups = _lanes(p._replace(K=filters), wide, itemsize, windows.BLOCK_SIZE)
    workers = windows.BLOCK_SIZE // lanes
    n_across = math.ceil(runs_w / min(workers, 8 if last else 32))
    across = math.ceil(runs_w / n_across)
    n_outer = p.N if last else p.N * filters
    down = max(1, min(workers // across, n_outer * runs_h))
    n_tiles = math.ceil(n_outer * runs_h / down)
    enough = ENOUGH_BLOCKS * chip_of(result).multiprocessors
    turns = max(1, min(MOST_TURNS, n_tiles * n_across * n_groups // enough))
    n_blocks = math.ceil(n_tiles / turns) * n_across * n_groups
    together = columns
    if last or lead_w or apart_w > 1 or spread_w > 1 or Q % columns:
        together = 1
    if arrays.address_of(result) % (columns * itemsize):
        together = 1
    numbers = (
        lanes, across, down, turns, n_groups, n_across, runs_h, runs_w, n_outer, *fans, together,
        channels, filters, p.R, H, W, P, Q, *tiles[0], *tiles[1], *tiles[2], *tiles[3],
        apart_h, apart_w, spread_h, spread_w,
    )  # fmt: skip
    n_threads = math.ceil(lanes * across * down / 32) * 32
    shared_bytes = p.R * p.S * lanes * VECTOR_BYTES // itemsize * 4 if wide else 0
    launch(
        windows.window_kernel(p.S, stride, for_dx, wide), n_blocks, n_threads,
        source, weight, weight if bias is None else bias, result, bias is not None, flipped, last,
        *map(np.int32, numbers), shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def dweight(problem, dy, x, dweight, precision):
    """dweight, from dy and x."""
    p, last, threads = problem, problem.channels_last, LINE_THREADS
    wide = is_wide(p, dy, x)
    lanes, n_groups = _lanes(p, wide, x.dtype.itemsize, threads)
    if not last:
        n_groups = p.K
    stride, (_, apart_w) = _stride_of_kernel(p), _apart(p)
    runs_w = _runs(p.Q, columns_of(stride, wide), apart_w)
    n_runs, workers = p.N * p.P * runs_w, threads // lanes
    wanted = math.ceil(ENOUGH_BLOCKS * chip_of(x).multiprocessors / n_groups)
    wanted = max(1, min(wanted, n_runs // (workers * LEAST_RUNS)))
    length = max(1, math.ceil(n_runs / (wanted * workers))) * workers  # in whole turns
    n_splits = max(1, math.ceil(n_runs / length))
    partial = dweight
    if n_splits > 1:
        partial = arrays.empty((n_splits, arrays.size_of(dweight)), like=x, dtype="float32")
    numbers = (
        lanes, length, n_splits, n_groups, runs_w, n_runs, p.K // p.C, p.C, p.K, p.R, p.H, p.W,
        p.P, p.Q, p.stride_h, p.stride_w, p.pad_h, p.pad_w, p.dilation_h, p.dilation_w, apart_w,
    )  # fmt: skip
    launch(
        window_sums_kernel(p.S, stride, wide), n_groups * n_splits, (threads, p.R),
        dy, x, partial, last, *map(np.int32, numbers), flat=True, overlap=True,
    )  # fmt: skip
    if n_splits > 1:
        gathering.add_up(partial, dweight, n_splits)


def _kinds():
    """(S, stride, whether channels are wide) of all that there are kernels for."""
    return [(S, stride, wide) for S in SIZES for stride in STRIDES for wide in (True, False)]


def forward_kernels():
    return [windows.window_kernel(S, stride, False, wide) for S, stride, wide in _kinds()]


def dx_kernels():
    return [windows.window_kernel(S, stride, stride > 1, wide) for S, stride, wide in _kinds()]


def dweight_kernels():
    return [window_sums_kernel(*kind) for kind in _kinds()]


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        array = (dtype, 1)
        types = [array] * 4 + ["boolean"] * 3 + ["int32"] * 31
        for S, stride, wide in _kinds():
            name = f"{S} columns{' by vectors' if wide else ''}, stride {stride}, {dtype}"
            kernel = windows.window_kernel(S, stride, False, wide)
            yield f"conv2d.depthwise forward {name}", kernel, types
            if stride > 1:
                kernel = windows.window_kernel(S, stride, True, wide)
                yield f"conv2d.depthwise dx {name}", kernel, types
            kernel = window_sums_kernel(S, stride, wide)
            for result in dict.fromkeys(("float32", dtype)):
                sums = [array, array, (result, 1), "boolean", *["int32"] * 21]
                yield f"conv2d.depthwise dweight {name} to {result}", kernel, sums
