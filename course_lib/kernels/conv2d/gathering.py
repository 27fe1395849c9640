"""How `implicit_gemm` and `tensor_core` are launched: what forward and dx give their kernel."""

import math

import numpy as np

from course_lib.kernels.blocks.memory_format import formatted
from course_lib.kernels.conv2d import (
    channels_last,
    gather_plan,
    halo_plan,
    halo_small,
    layout,
    pixel_sums_plan,
    pixel_sums_small,
    warpgroup_mixed_plan,
    warpgroup_plan,
)
from course_lib.kernels.conv2d.implicit_dweight import (
    add_up,
    dweight_kernel,
    total_kernel,
)
from course_lib.kernels.conv2d.implicit_gemm import gather_kernel
from course_lib.kernels.conv2d.problem import DTYPES, is_as_given
from course_lib.kernels.conv2d.product import SCALAR, tensor_engine
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

MOST_TAPS = 121  # of a filter: a block keeps where each of them meets each of its pixels
MOST = 2**30  # of what is counted in 32 bits

MOST_WORKSPACE = 64 << 20  # bytes of sums that wait to be added up
ENOUGH_BLOCKS = 132 * 4  # keep the largest chip of today busy
LARGE_FROM = 132  # blocks of the larger tile; with fewer, smaller tiles make more of them
DWEIGHT_BLOCKS = 64  # that may share the pixels, for the choice between tiles
STEP = 32  # pixels by which dweight is shared among blocks: whole tiles of any kernel
LEAST_TILES = 4  # of so many pixels, that a block adds up where there are several

TENSOR_CORES_SINCE = (8, 0)
SMALL, LARGE = tensor_engine(64, 64), tensor_engine(128, 128)

#: Inner loop -> (kernel of forward and dx, kernel of dweight).
KERNELS = {
    engine: (gather_kernel(engine), dweight_kernel(engine)) for engine in (SCALAR, SMALL, LARGE)
}


def fault(problem):
    """Why these kernels can't take the problem; or None."""
    p = problem
    if p.R * p.S > MOST_TAPS:
        return f"filters of at most {MOST_TAPS} taps, not {p.R} × {p.S}"
    # The images in which a block's pixels may lie, and the weights of a group.
    images = min(128 // max(1, p.P * p.Q), 128 // max(1, p.H * p.W)) + 2
    largest = max(p.C * p.H * p.W, p.K * p.P * p.Q)
    reach = max(p.dilation_h * p.R + p.pad_h, p.dilation_w * p.S + p.pad_w)
    weights = p.K // p.groups * (p.C // p.groups) * p.R * p.S
    if max(images * largest, p.P * p.stride_h, p.Q * p.stride_w, reach, weights) >= MOST:
        return f"{MOST:,} elements at most in an image, and in a group's weights"
    return None


def engine_for(variant, n_rows, n_columns, n_groups):
    """The inner loop of a rung, for a product of so many rows and columns in each of the groups."""
    if variant == "implicit_gemm":
        return SCALAR
    n_blocks = math.ceil(n_rows / LARGE.rows) * math.ceil(n_columns / LARGE.columns) * n_groups
    wide = n_columns % LARGE.columns == 0 or n_columns % LARGE.columns > SMALL.columns
    return LARGE if wide and n_blocks >= LARGE_FROM else SMALL


def is_exact(array, precision):
    """Whether products are to have all digits; 16-bit numbers lose none in TF32."""
    return precision == "float32" and arrays.dtype_name(array) == "float32"


def check(variant, problem):
    """ValueError where a rung can't take the problem."""
    if found := fault(problem):
        raise ValueError(f"variant {variant!r} takes {found}: use 'direct'")


#: (rows of the tile, whether for dx) -> (kernel, inner loop, numbers of dynamic shared memory).
CHANNELS_LAST = {
    (engine.rows, for_dx): channels_last.kernel_of(engine.rows, engine.columns, for_dx)
    for engine in (SMALL, LARGE)
    for for_dx in (False, True)
}


def takes_channels(problem, counts, operands):
    """Whether 16-bit channels, so many of them, lie side by side and can be copied by 16 bytes."""
    whole = not any(count % channels_last.WIDTH for count in counts)
    if not (whole and problem.channels_last and operands[0].dtype.itemsize == 2):
        return False
    return not any(arrays.address_of(array) % VECTOR_BYTES for array in operands[:2])


def forward_arguments(problem):
    """(sizes, down, right, weight steps, by column) that forward gives the kernel that gathers."""
    p = problem
    per_group, n_taps = p.C // p.groups, p.R * p.S
    down, right = (p.stride_h, -p.pad_h, p.dilation_h, 1), (p.stride_w, -p.pad_w, p.dilation_w, 1)
    sizes = p.K // p.groups, p.P, p.Q, per_group, p.H, p.W
    steps = per_group * n_taps, *((1, per_group) if p.channels_last else (n_taps, 1))
    return sizes, down, right, steps, False


def dx_arguments(problem):
    """The same for dx, which is gathered from dy."""
    p = problem
    per_group, n_taps = p.C // p.groups, p.R * p.S
    down, right = (1, p.pad_h, -p.dilation_h, p.stride_h), (1, p.pad_w, -p.dilation_w, p.stride_w)
    sizes = per_group, p.H, p.W, p.K // p.groups, p.P, p.Q
    column_step, tap_step = (1, per_group) if p.channels_last else (n_taps, 1)
    return sizes, down, right, (column_step, per_group * n_taps, tap_step), column_step == 1


def launch_forward(variant, problem, x, weight, bias, y, precision):
    """y = x * weight + bias. Of `tensor_core`, some kernels read weights of either format."""
    check(variant, problem)
    if variant == "tensor_core":
        gather = halo_plan.forward_of(problem)
        if _launch_halo(gather, problem, x, weight, bias, y, precision):
            return
    exact = is_exact(x, precision)
    operands = x, formatted(weight, problem), bias, y
    _launch(variant, problem, forward_arguments(problem), operands, exact, False)


def launch_dx(variant, problem, dy, weight, dx, precision, bias=None):
    """dx, gathered from dy; and `bias` added, which a transposed convolution may have."""
    check(variant, problem)
    if variant == "tensor_core":
        gather = halo_plan.dx_of(problem)
        if _launch_halo(gather, problem, dy, weight, bias, dx, precision):
            return
    exact = is_exact(dy, precision)
    _launch(variant, problem, dx_arguments(problem), (dy, weight, bias, dx), exact, True)


def _launch_halo(gather, problem, source, weight, bias, result, precision):
    """Whether the pass is one for `halo`, which then has been launched."""
    n_terms = gather.n_channels * gather.R * gather.S if gather else 0
    mode = halo_plan.mode_of(source, precision, n_terms)
    chosen = gather, source.dtype.itemsize, mode, chip_of(source)
    aligned = not problem.channels_last or not arrays.address_of(source) % VECTOR_BYTES
    last, as_given = problem.channels_last, is_as_given(weight, problem)
    lies = weight if not last or arrays.is_channels_last(weight) else None  # else it is copied
    plan, kernels = None, halo_plan
    if halo_small.takes(problem, source, lies):
        plan = halo_small.planned(*chosen, last, last and not as_given)
    if plan is None and aligned:
        for kernels in (warpgroup_plan, warpgroup_mixed_plan, halo_plan):
            if plan := kernels.planned(*chosen):
                break
    if plan is None or not aligned:
        return False
    # Only now: where there is no plan, the caller lays the weights out.
    if kernels is halo_plan and plan.source == "by_element":
        weight = arrays.contiguous(weight)
    else:
        weight = formatted(weight, problem)
    more = (mode,) if kernels is halo_plan else ()
    kernels.run(gather, plan, problem, source, weight, bias, result, *more)
    return True


def _launch(variant, problem, arguments, operands, exact, for_dx):
    sizes, down, right, steps, by_column = arguments
    source, weight, bias, result = operands
    n_columns, P, Q = sizes[:3]
    n_rows = problem.N * P * Q
    engine = engine_for(variant, n_rows, n_columns, problem.groups)
    n_blocks = math.ceil(n_rows / engine.rows) * math.ceil(n_columns / engine.columns)
    numbers = problem.N, problem.groups, *sizes, problem.R, problem.S, *down, *right, *steps
    arguments = source, weight, weight if bias is None else bias, result, bias is not None
    counts = (sizes[3], n_columns) if for_dx else (sizes[3],)
    if variant == "tensor_core" and takes_channels(problem, counts, operands):
        kernel, _, shared_size = CHANNELS_LAST[engine.rows, for_dx]
        launch(
            kernel, n_blocks * problem.groups, engine.n_threads, *arguments,
            *map(np.int32, numbers), shared_bytes=shared_size * 2, flat=True, overlap=True,
        )  # fmt: skip
        return
    launch(
        KERNELS[engine][0], n_blocks * problem.groups, engine.n_threads, *arguments, exact,
        *map(np.int32, numbers), by_column, problem.channels_last,
        shared_bytes=(problem.R * problem.S + 1) * engine.rows * 4, flat=True, overlap=True,
    )  # fmt: skip


def launch_dweight(variant, problem, dy, x, dweight, precision, dbias=None):
    """dweight: sums over parts of the pixels, and their total. Whether dbias, if wanted, is done.

    It is where a small convolution gives both in one launch; else it is the caller's to find.
    """
    p = problem
    check(variant, p)
    if variant == "tensor_core":
        done = _launch_pixel_sums(problem, dy, x, dweight, dbias, precision)
        if done:
            return "dbias" in done
    n_weights, n_terms = arrays.size_of(dweight), p.C // p.groups * p.R * p.S
    engine = engine_for(variant, n_terms, p.K // p.groups, p.groups * DWEIGHT_BLOCKS)
    n_blocks = math.ceil(n_terms / engine.rows) * p.groups
    n_blocks *= math.ceil(p.K // p.groups / engine.columns)
    n_splits, length = split_plan(n_blocks, p.N * p.P * p.Q, n_weights)
    partial = dweight
    if n_splits > 1 or arrays.dtype_name(dweight) != "float32":
        partial = arrays.empty((n_splits, n_weights), like=x, dtype="float32")
    exact = is_exact(x, precision)
    launch(
        KERNELS[engine][1], n_blocks * n_splits, engine.n_threads,
        dy, x, partial, exact, length, n_splits, *p.numbers, flat=True, overlap=True,
    )  # fmt: skip
    if partial is not dweight:
        add_up(partial, dweight, n_splits)
    return False


def _launch_pixel_sums(problem, dy, x, dweight, dbias, precision):
    """Which gradients `pixel_sums` has been launched for; none if it does not take the problem."""
    mode = halo_plan.mode_of(x, precision, problem.N * problem.P * problem.Q)
    chosen = problem, x.dtype.itemsize, mode, chip_of(x)
    aligned = not any(arrays.address_of(array) % VECTOR_BYTES for array in (dy, x))
    plan = pixel_sums_small.planned(*chosen)
    if plan and (aligned or not problem.channels_last):
        pixel_sums_small.run(plan, problem, dy, x, dweight, dbias, mode)
        return ("dweight", "dbias")
    if plan := pixel_sums_plan.planned(*chosen):
        pixel_sums_plan.run(plan, problem, dy, x, dweight, mode)
        return ("dweight",)
    return ()


def split_plan(n_blocks, n_pixels, n_results):
    """(parts that `n_pixels` are added up in, pixels of a part), for `n_blocks` blocks a part."""
    n_tiles = max(1, math.ceil(n_pixels / STEP))
    wanted = min(math.ceil(ENOUGH_BLOCKS / n_blocks), math.ceil(n_tiles / LEAST_TILES))
    wanted = max(1, min(wanted, MOST_WORKSPACE // (4 * n_results)))
    tiles = math.ceil(n_tiles / wanted)
    return math.ceil(n_tiles / tiles), tiles * STEP


def specialisations():
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    yield from gather_plan.specialisations()
    yield from halo_plan.specialisations()
    yield from halo_small.specialisations()
    yield from layout.specialisations()
    yield from warpgroup_plan.specialisations()
    yield from warpgroup_mixed_plan.specialisations()
    yield from pixel_sums_plan.specialisations()
    yield from pixel_sums_small.specialisations()
    sums = ("float32", 1)
    for dtype in DTYPES:
        array = (dtype, 1)
        for engine, (kernel, of_dweight) in KERNELS.items():
            types = [array] * 4 + ["boolean"] * 2 + ["int32"] * 21 + ["boolean"] * 2
            yield f"conv2d.gather {engine.name} {dtype}", kernel, types
            if engine is SCALAR and dtype != "float32":  # the columns of `im2col`
                types = [*types[:3], sums, *types[4:]]
                yield f"conv2d.gather {engine.name} to float32 {dtype}", kernel, types
            types = [array, array, sums, "boolean", "int64", "int64", *["int32"] * 16, "boolean"]
            yield f"conv2d.dweight {engine.name} {dtype}", of_dweight, types
        yield f"conv2d.total {dtype}", total_kernel, [sums, array, "int64"]
        for (rows, for_dx), (kernel, *_) in CHANNELS_LAST.items():
            if dtype != "float32":
                types = [array] * 4 + ["boolean", *["int32"] * 21]
                direction = "dx" if for_dx else "forward"
                yield f"conv2d.{direction} channels-last {rows} {dtype}", kernel, types
