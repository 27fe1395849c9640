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
                 multiplies; if c has few tiles, they are smaller, and   (N/32, M/32)
                 k is dealt out to several blocks, whose sums are added
                 (`a` of 8 rows at most: no fragments, but `few_rows`)   N, 1
                 (on 9.0, float32 as TF32 or 16-bit, if c has some tiles N/128, M/256
                 and k is not too long for so few: `wgmma`, from tiles   N/256, M/128
                 in shared memory: `warpgroup`)                          (N/64, M/128)
================ ======================================================= ===================

`tensor_core` needs sm_80, and `vectorised` runs before it. Its float32 is as exact as float32: see
`mma.mainloop`. `wgmma` is of 9.0 alone: on all other chips, later ones included, it is `mma.sync`.

Sums are taken in a fixed order: two runs agree bit for bit.
"""

import functools
import math

from course_lib.kernels.blocks import column_sums
from course_lib.kernels.blocks.mma.epilogue import ADD_BIAS, CLUSTER, RELU, VECTORS
from course_lib.kernels.gemm import (
    few_rows,
    ladder,
    plan,
    split,
    tensor_core,
    vectorised,
    warpgroup,
)
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float16", "bfloat16")
TENSOR_CORES = (8, 0)  # compute capability from which on `tensor_core` runs
CLUSTERS = (9, 0)  # from which on a chip has them
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
    rung = FORWARD.rung(variant, c)
    if M * N:
        a_strides, b_strides = (K, 1) if a_by_k else (1, M), (K, 1) if b_by_k else (1, N)
        options = (ADD_BIAS if bias is not None else 0) + (RELU if relu else 0)
        bias = c if bias is None else bias
        operands = (a, b, bias, c, M, N, K, *a_strides, *b_strides, options)
        rung.launch(operands, a_by_k and b_by_k, precision)
    return c


# --- launchers: of the kernels' operands, of whether both inputs lie by k, and of the precision ---


def _launch_by_blocks(kernel, tile, n_threads, operands, by_k, precision):
    M, N = operands[4:6]
    n_blocks = math.ceil(M / tile[0]) * math.ceil(N / tile[1])
    launch(kernel, n_blocks, n_threads, *operands, flat=True)


def _launch_vectorised(operands, by_k, precision):
    c, M, N = operands[3:6]
    kernel, shared_bytes = vectorised_kernel_for(_sources(*operands), c.dtype.itemsize)
    n_blocks = math.ceil(M / vectorised.TILE) * math.ceil(N / vectorised.TILE)
    launch(
        kernel, n_blocks, vectorised.N_THREADS, *operands,
        shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def _launch_tensor_core(operands, by_k, precision):
    a, b, bias, c, M, N, K, *_, options = operands
    if by_k and few_rows_take(a, b, M, K):
        few_rows.multiply(a, b, bias, c, M, N, K, options)
        return
    itemsize, sources, chip = c.dtype.itemsize, _sources(*operands), chip_of(c)
    mode = "narrow" if itemsize == 2 else "tf32" if precision == "tf32" else "split"
    if found := warpgroup.chosen(M, N, K, itemsize, mode, sources, chip):
        options += VECTORS if _on_boundaries(c, N) else 0
        warpgroup.multiply(found, a, b, bias, c, M, N, K, options)
        return
    found = planned(M, N, K, itemsize, mode, sources, chip)
    kernel, shape, shared_bytes = kernel_for(found.shape, sources, itemsize, mode)
    target, chosen_options = c, options
    cluster = found.n_splits if found.in_cluster else 1
    in_parts = found.n_splits > cluster
    if in_parts:
        target = arrays.empty((found.n_splits, M, N), like=c, dtype="float32")
        chosen_options = 0
    if _on_boundaries(target, N):
        chosen_options += VECTORS
    if found.in_cluster:
        chosen_options += CLUSTER
    n_blocks = tensor_core.n_blocks(shape, M, N) * found.n_splits
    launch(
        kernel, n_blocks, shape.n_threads, a, b, bias, target, *operands[4:-1],
        chosen_options, found.n_splits, found.length, shared_bytes=shared_bytes, flat=True,
        overlap=True, cluster=cluster,
    )  # fmt: skip
    if in_parts:
        launch(
            split.finish_kernel, math.ceil(M * N / split.BLOCK_SIZE), split.BLOCK_SIZE,
            target, bias, c, N, found.n_splits, options, flat=True, overlap=True,
        )  # fmt: skip


def few_rows_take(a, b, M, K):
    """Whether `few_rows` takes a product whose inputs lie by k."""
    return M <= few_rows.ROWS[-1] and _on_boundaries(a, K) and _on_boundaries(b, K)


@functools.lru_cache(maxsize=4096)
def planned(M, N, K, itemsize, mode, sources, chip):
    """The `plan.Plan` of a product on `chip`, as `launch.chip_of` gives it; found once."""
    capability, most_bytes = chip

    def fits(shape):
        return kernel_for(shape, sources, itemsize, mode).shared_bytes <= most_bytes

    return plan.choose(M, N, K, itemsize, mode, fits, clusters=capability >= CLUSTERS)


@functools.cache
def kernel_for(shape, sources, itemsize, mode):
    """The `tensor_core.Kernel` of these choices, made once."""
    return tensor_core.make(shape, sources, itemsize, mode)


@functools.cache
def vectorised_kernel_for(sources, itemsize):
    """(kernel, bytes of shared memory) of the rung `vectorised`, made once."""
    return vectorised.make(sources, itemsize)


def _sources(a, b, bias, c, M, N, K, a_m, a_k, b_n, b_k, options):
    """How the inputs get to shared memory (see `mma.tiles`)."""
    found = []
    for array, row_stride, k_stride in ((a, a_m, a_k), (b, b_n, b_k)):
        if not _on_boundaries(array, max(row_stride, k_stride)):
            return SOURCES[-1]
        found.append("by_k" if k_stride == 1 else "by_row")
    return tuple(found)


def _on_boundaries(array, length):
    """Whether each of the array's rows of `length` elements begins on a 16-byte boundary."""
    return not (arrays.address_of(array) | length * array.dtype.itemsize) % VECTOR_BYTES


def _tensor_core_kernels():
    """(mode, sources, `tensor_core.Kernel`) of all that linear layers launch."""
    for mode, shapes in plan.SHAPES.items():
        for shape in shapes:
            for sources in SOURCES:
                yield mode, sources, kernel_for(shape, sources, 2 if mode == "narrow" else 4, mode)


def _kernels_of_tensor_core():
    yield from (kernel for *_, (kernel, *_) in _tensor_core_kernels())
    yield split.finish_kernel
    yield from few_rows.KERNELS.values()
    yield from (kernel for *_, (kernel, *_) in warpgroup.kernels())


def _kernels_of_vectorised():
    return (vectorised_kernel_for(s, itemsize)[0] for s in SOURCES for itemsize in (4, 2))


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
    Rung("vectorised", _launch_vectorised, _kernels_of_vectorised, (_sources,)),
    Rung(
        "tensor_core", _launch_tensor_core, _kernels_of_tensor_core,
        (few_rows_take, _sources, warpgroup.chosen, warpgroup.choose, planned, plan.choose),
        TENSOR_CORES,
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
        *warpgroup.specialisations(DTYPES),
    ):  # fmt: skip
        yield f"gemm {label}", kernel, types
