"""Many products with one matrix: c[i] (M, N) = a (M, K) · b[i] (K, N), of images i plane by plane.

`b` is (images, K, N) and `c` (images, M, N), n fastest; `a` lies with k or m fastest. Row m may get
a bias. The kernels are those of one product.
"""

import functools
import math

from course_lib.kernels.blocks.mma.epilogue import ADD_BIAS, VECTORS
from course_lib.kernels.gemm import plan, tensor_core, warpgroup, warpgroup_plan
from course_lib.kernels.operation import Refusal, Way
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

MOST_IMAGES = 65_535  # the most that a grid's y counts
SOURCES = ("by_k", "by_row"), ("by_row", "by_row")
#: Tiles from large to small, by mode.
SHAPES = {mode: [s for s in found if s.m in (128, 64)] for mode, found in plan.SHAPES.items()}
WARPGROUP_SHAPES = {m: warpgroup_plan.SHAPES[n][1:] for m, n in (("narrow", 2), ("tf32", 4))}


def multiply(a, b, c, sizes, n_images, *, a_by_k=True, bias=None, precision="float32"):
    """c[i, m, n] = Σ a[m, k]·b[i, k, n] over k (+ bias[m]); `sizes` are M, N, K. Returns `c`.

    Returns None and does nothing unless all rows begin on 16-byte boundaries.
    """
    M, N, K = sizes
    whole = arrays.begins_on(VECTOR_BYTES, a, K if a_by_k else M)
    if not (whole and arrays.begins_on(VECTOR_BYTES, b, N) and n_images <= MOST_IMAGES):
        return None
    itemsize = c.dtype.itemsize
    mode = "narrow" if itemsize == 2 else "tf32" if precision == "tf32" else "split"
    problem = plan.Problem(*sizes, itemsize, mode, SOURCES[0 if a_by_k else 1])
    way, found = _chosen((problem, n_images), chip_of(c))
    options = 0 if bias is None else ADD_BIAS
    strides = (*((K, 1) if a_by_k else (1, M)), 1, N)
    operands = a, b, c if bias is None else bias, c, *sizes
    way.launch(found, operands, strides, options, n_images)
    return c


def _mma(problem, chip):
    """The largest tiles that leave no multiprocessor idle, or the smallest."""
    (M, N, _, itemsize, mode, sources, _), n_images = problem
    large, small = (kernel_for(tensor_core, s, sources, itemsize, mode) for s in SHAPES[mode])
    shape = large.shape
    enough = n_images * tensor_core.n_blocks(shape, M, N) >= chip.multiprocessors
    fits = 2 * M > shape.m and 2 * N > shape.n and large.shared_bytes <= chip.shared_bytes
    return large if enough and fits else small


def _wgmma(problem, chip):
    product, n_images = problem
    if chip.capability != warpgroup.ONLY or product.mode == "split":
        return Refusal("needs wgmma, and numbers of 16 bits or rounded to TF32")
    if min(product.M, product.N) < warpgroup_plan.LEAST_ROWS:
        return Refusal(f"takes matrices of at least {warpgroup_plan.LEAST_ROWS} rows and columns")

    def cost(shape):
        n_blocks = n_images * warpgroup_plan.n_blocks(shape, product.M, product.N)
        rounds = math.ceil(n_blocks / chip.multiprocessors)
        return rounds * warpgroup_plan.block_cost(shape, product)

    best = min(WARPGROUP_SHAPES[product.mode], key=cost)
    return kernel_for(warpgroup, best, product.sources, product.itemsize)


@functools.cache
def kernel_for(module, *choices):
    """The `Kernel` of these choices, made once."""
    return module.make(*choices, in_planes=True)


def _launch_mma(found, operands, strides, options, n_images):
    (kernel, shape, shared_bytes), (_, _, _, c, M, N, K) = found, operands
    if arrays.begins_on(VECTOR_BYTES, c, N):
        options += VECTORS
    launch(
        kernel, (tensor_core.n_blocks(shape, M, N), n_images), shape.n_threads, *operands,
        *strides, options, 1, max(K, 1), shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def _launch_wgmma(found, operands, strides, options, n_images):
    warpgroup.multiply_planes(found, operands, strides, options, n_images)


def _made(module):
    """(mode, sources, `Kernel`) of all that a way may launch."""
    by_mode = SHAPES if module is tensor_core else WARPGROUP_SHAPES
    for mode, shapes in by_mode.items():
        rest = (2 if mode == "narrow" else 4, *[mode] * (module is tensor_core))
        for shape in shapes:
            for sources in SOURCES:
                yield mode, sources, kernel_for(module, shape, sources, *rest)


def _way(name, plan, launch, module, needs):
    return Way(name, plan, launch, lambda: (k for *_, (k, *_) in _made(module)), needs)


TENSOR_CORES = (8, 0)
WAYS = (
    _way("wgmma", _wgmma, _launch_wgmma, warpgroup, warpgroup.ONLY),
    _way("mma", _mma, _launch_mma, tensor_core, TENSOR_CORES),
)


@functools.lru_cache(maxsize=4096)
def _chosen(problem, chip):
    """The first of WAYS that takes the problem, and its plan."""
    plans = ((way, way.plan(problem, chip)) for way in WAYS)
    return next(found for found in plans if not isinstance(found[1], Refusal))


def kernels():
    """Every kernel that `multiply` may launch."""
    return [kernel for way in WAYS for kernel in way.kernels]


def specialisations(dtypes):
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for module, way in ((tensor_core, "mma"), (warpgroup, "warpgroup")):
        for mode, sources, (kernel, shape, _) in _made(module):
            for dtype in dtypes:
                if (dtype == "float32") == (mode != "narrow"):
                    tile = f"{shape.m}x{shape.n}" if way == "mma" else shape.label
                    label = f"{way} {mode} {tile} {sources[0]} {dtype}"
                    n_numbers = 10 if way == "mma" else 6 if dtype == "float32" else 9
                    types = [(dtype, 1)] * 4 + ["int64"] * n_numbers
                    yield f"tensor_core planes {label}", kernel, types
