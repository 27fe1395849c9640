"""The product of two matrices, c[m, n] = Σ a[m, k]·b[n, k] over k: what layers are made of.

float32, float16 or bfloat16 in and out, summed in float32. `a` is (M, K), `b` (N, K), `c` (M, N);
each of `a` and `b` lies in memory either with k fastest or with its rows' number fastest, so that
all three products of a linear layer are this one. Column n may get a bias, and the result pass
through ReLU, before it is stored.

2·M·N·K FLOPs, and at least (M·K + N·K + M·N)·s bytes of `s` bytes an element. What a rung reads
beyond that, and from where, decides its speed:

================ ======================================================= ===================
rung             what a thread does                                      reads of a and of b
================ ======================================================= ===================
`naive`          an element of c, from global memory                     N, M
`tiled`          an element of c, from tiles in shared memory            N/16, M/16
`register_tiled` 4×4 elements: what it reads is used four times          N/64, M/64
`vectorised`     8×8 elements, from 16 bytes at a time; tiles are copied N/128, M/128
                 to shared memory while others are multiplied
`tensor_core`    a share of its warp's fragments, which `mma.sync`       N/128, M/256
                 multiplies; smaller tiles if c has few of them          (N/32, M/32)
================ ======================================================= ===================

`tensor_core` needs sm_80, and `vectorised` runs before it. Its float32 is as exact as float32: see
`mma.mainloop`. It has eight ways, which `variant` may name, such as "tensor_core/mma". Which is the
fastest follows from the shape and the chip (`plan`, `warpgroup_plan`):

================= ================================================================================
way               what it does
================= ================================================================================
`few_rows`        `a` of 8 rows at most: no fragments, since all the work is to read `b` once
`thin`            16 outputs, inputs or rows of a layer at most, which may begin anywhere
`wgmma`           Hopper's instruction, which reads tiles of up to 256 × 128 from shared memory:
                  16-bit numbers, and float32 as TF32. On 9.0 alone, not on later chips
`wgmma_split_k`   16-bit numbers as by `wgmma`, k dealt out to more tiles; a second launch adds up
`wgmma_padded`    the same, or `wgmma` of float32 by k, from copies whose rows are whole vectors
`mma`             a block computes a tile of c
`split_k_cluster` k is dealt out to the blocks of a cluster, which add up their sums; from 9.0 on
`split_k`         k is dealt out to more blocks, whose sums a second launch adds up
================= ================================================================================

Sums are taken in a fixed order: two runs agree bit for bit. `multiply_planes`: many by one.
"""

import functools
import math

from course_lib.kernels.blocks import column_sums
from course_lib.kernels.blocks.mma.epilogue import ADD_BIAS, CLUSTER, RELU, VECTORS
from course_lib.kernels.gemm import (
    few_rows,
    ladder,
    padded,
    plan,
    planes,
    split,
    tensor_core,
    thin,
    vectorised,
    warpgroup,
    warpgroup_plan,
)
from course_lib.kernels.operation import AUTO, Ladder, Rung, Way
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float16", "bfloat16")
TENSOR_CORES = (8, 0)  # compute capability from which on `tensor_core` runs
multiply_planes, kernels_of_planes = planes.multiply, planes.kernels
#: How the inputs of the three products of a linear layer come (see `mma.tiles`), and of odd shapes.
SOURCES = (("by_k", "by_k"), ("by_k", "by_row"), ("by_row", "by_row"), ("any", "any"))


def multiply(
    a, b, c, M, N, K, *, a_by_k=True, b_by_k=True, bias=None, relu=False, precision="float32",
    variant=AUTO,
):  # fmt: skip
    """c[m, n] = Σ a[m, k]·b[n, k] over k (+ bias[n], then ReLU). Returns `c`.

    a, b       M·K and N·K elements, contiguous, of c's dtype
    c          M·N elements, contiguous
    a_by_k     whether `a` lies as (M, K), k fastest; else as (K, M). `b_by_k`: so for `b`
    precision  of float32 inputs: "float32", or "tf32", which allows a tensor core to round them
               to 10 bits; other rungs take no notice

    For layers, which have checked their arguments; it allocates what it needs beside them.
    """
    if not M * N:
        FORWARD.require(variant)
        return c
    a_strides, b_strides = (K, 1) if a_by_k else (1, M), (K, 1) if b_by_k else (1, N)
    itemsize = c.dtype.itemsize
    mode = "narrow" if itemsize == 2 else "tf32" if precision == "tf32" else "split"
    sources = _sources(a, b, a_strides, b_strides)
    lies = ["by_k" if by_k else "by_row" for by_k in (a_by_k, b_by_k)]
    problem = plan.Problem(M, N, K, itemsize, mode, sources, tuple(lies))
    _, way, found = FORWARD.choose(variant, problem, chip_of(c))
    options = (ADD_BIAS if bias is not None else 0) + (RELU if relu else 0)
    bias = c if bias is None else bias
    way.launch(found, (a, b, bias, c, M, N, K, *a_strides, *b_strides, options))
    return c


def _sources(a, b, a_strides, b_strides):
    """How the inputs get to shared memory (see `mma.tiles`)."""
    for array, strides in ((a, a_strides), (b, b_strides)):
        if not arrays.begins_on(VECTOR_BYTES, array, max(strides)):
            return SOURCES[-1]
    return "by_k" if a_strides[1] == 1 else "by_row", "by_k" if b_strides[1] == 1 else "by_row"


# --- launchers: of the plan, and of the kernels' operands; those of tensor cores' other ways are in
# --- `few_rows`, `padded`, `thin` and `warpgroup`


def _launch_by_blocks(kernel, tile, n_threads, problem, operands):
    n_blocks = math.ceil(problem.M / tile[0]) * math.ceil(problem.N / tile[1])
    launch(kernel, n_blocks, n_threads, *operands, flat=True)


def _launch_vectorised(problem, operands):
    kernel, shared_bytes = vectorised_kernel_for(problem.sources, problem.itemsize)
    n_blocks = math.ceil(problem.M / vectorised.TILE) * math.ceil(problem.N / vectorised.TILE)
    launch(
        kernel, n_blocks, vectorised.N_THREADS, *operands,
        shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def _launch_tiles(found, operands):
    """Of `mma`, and of both ways of `split_k`."""
    a, b, bias, c, *numbers, options = operands
    (M, N, _, itemsize, mode, sources, _), shape, n_splits, length, in_cluster = found
    kernel, _, shared_bytes = kernel_for(shape, sources, itemsize, mode)
    target, chosen_options = c, options
    in_parts = n_splits > 1 and not in_cluster
    if in_parts:
        target = arrays.empty((n_splits, M, N), like=c, dtype="float32")
        chosen_options = 0
    if arrays.begins_on(VECTOR_BYTES, target, N):
        chosen_options += VECTORS
    if in_cluster:
        chosen_options += CLUSTER
    launch(
        kernel, tensor_core.n_blocks(shape, M, N) * n_splits, shape.n_threads, a, b, bias, target,
        *numbers, chosen_options, n_splits, length, shared_bytes=shared_bytes, flat=True,
        overlap=True, cluster=n_splits if in_cluster else 1,
    )  # fmt: skip
    if in_parts:
        launch(
            split.finish_kernel, math.ceil(M * N / split.BLOCK_SIZE), split.BLOCK_SIZE,
            target, bias, c, N, n_splits, options, flat=True, overlap=True,
        )  # fmt: skip


@functools.cache
def kernel_for(shape, sources, itemsize, mode):
    """The `tensor_core.Kernel` of these choices, made once."""
    return tensor_core.make(shape, sources, itemsize, mode)


@functools.cache
def vectorised_kernel_for(sources, itemsize):
    """(kernel, bytes of shared memory) of the rung `vectorised`, made once."""
    return vectorised.make(sources, itemsize)


def _tensor_core_kernels():
    """(mode, sources, `tensor_core.Kernel`) of all that linear layers launch."""
    for mode, shapes in plan.SHAPES.items():
        for shape in shapes:
            for sources in SOURCES:
                yield mode, sources, kernel_for(shape, sources, 2 if mode == "narrow" else 4, mode)


def _of_tiles(*more):
    """A function that gives every kernel of `_launch_tiles`, and these."""
    return lambda: (*(kernel for *_, (kernel, *_) in _tensor_core_kernels()), *more)


def _kernels_of_vectorised():
    return (vectorised_kernel_for(s, itemsize)[0] for s in SOURCES for itemsize in (4, 2))


def _kernels_of_padded():
    found = (k for k in warpgroup.kernels() if k[0] == "narrow" or k[1] == SOURCES[0])
    of_wgmma = (kernel for _, _, (kernel, *_), _ in found)
    return *of_wgmma, split.finish_kernel, padded.pad_rows_kernel


def _preferred(problem, chip):
    """The ways of `tensor_core` to try, the fastest first; found out as far as needed."""
    yield "few_rows"
    if thin.is_fastest(problem, chip):
        yield "thin"
    yield from warpgroup_plan.preferred(problem, chip)
    found = plan.best(problem, chip)
    yield "mma" if found.n_splits == 1 else "split_k_cluster" if found.in_cluster else "split_k"


#: Rung -> (kernel, the block's tile of c, its threads).
_BLOCKS = {
    "naive": (
        ladder.naive_kernel, (ladder.NAIVE_M, ladder.NAIVE_N), (ladder.NAIVE_N, ladder.NAIVE_M),
    ),
    "tiled": (ladder.tiled_kernel, (ladder.TILE, ladder.TILE), (ladder.TILE, ladder.TILE)),
    "register_tiled": (
        ladder.register_tiled_kernel, (ladder.WIDE, ladder.WIDE), ladder.WIDE_THREADS,
    ),
}  # fmt: skip
FORWARD = Ladder(
    *(
        Rung(name, functools.partial(_launch_by_blocks, *how), how[:1])
        for name, how in _BLOCKS.items()
    ),
    Rung("vectorised", _launch_vectorised, _kernels_of_vectorised),
    Rung(
        "tensor_core", needs=TENSOR_CORES, prefer=_preferred,
        ways=(
            Way("thin", thin.plan, thin.multiply, thin.all_kernels, TENSOR_CORES),
            Way("few_rows", few_rows.plan, few_rows.multiply, few_rows.KERNELS.values,
                TENSOR_CORES),
            Way("wgmma", warpgroup.plan, warpgroup.multiply,
                functools.partial(warpgroup.all_of, False), warpgroup.ONLY),
            Way("wgmma_split_k", warpgroup.plan_in_parts, warpgroup.multiply_in_parts,
                lambda: (*warpgroup.all_of(True), split.finish_kernel), warpgroup.ONLY),
            Way("wgmma_padded", padded.plan, padded.multiply, _kernels_of_padded, warpgroup.ONLY),
            Way("mma", plan.mma, _launch_tiles, _of_tiles(), TENSOR_CORES),
            Way("split_k_cluster", plan.split_k_cluster, _launch_tiles, _of_tiles(),
                plan.CLUSTERS),
            Way("split_k", plan.split_k, _launch_tiles, _of_tiles(split.finish_kernel),
                TENSOR_CORES),
        ),
    ),
    auto=("tensor_core", "vectorised"),
)  # fmt: skip


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        array = (dtype, 1)
        for name, (kernel, *_) in _BLOCKS.items():
            yield f"gemm {name} {dtype}", kernel, [array] * 4 + ["int64"] * 8
        for sources in SOURCES:
            kernel, _ = vectorised_kernel_for(sources, 4 if dtype == "float32" else 2)
            name = f"gemm vectorised {'-'.join(sources)} {dtype}"
            yield name, kernel, [array] * 4 + ["int64"] * 8
        types = [("float32", 1), array, array, "int64", "int64", "int64"]
        yield f"gemm finish {dtype}", split.finish_kernel, types
    for mode, sources, (kernel, shape, _) in _tensor_core_kernels():
        for dtype in DTYPES[1:] if mode == "narrow" else DTYPES[:1]:
            name = f"gemm tensor_core {mode} {shape.m}x{shape.n} {'-'.join(sources)} {dtype}"
            array, numbers = (dtype, 1), ["int64"] * 10
            yield name, kernel, [array] * 4 + numbers
            if dtype != "float32":
                yield f"{name} in parts", kernel, [array] * 3 + [("float32", 1), *numbers]
    for label, kernel, types in (
        *column_sums.specialisations(DTYPES), *few_rows.specialisations(DTYPES),
        *padded.specialisations(DTYPES), *warpgroup.specialisations(DTYPES),
        *thin.specialisations(DTYPES), *planes.specialisations(DTYPES),
    ):  # fmt: skip
        yield f"gemm {label}", kernel, types
