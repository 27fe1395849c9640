"""Many products with one matrix: c[i] (M, N) = a (M, K) · b[i] (K, N), of images i plane by plane.

`b` is (images, K, N) and `c` (images, M, N), n fastest; `a` lies with k or m fastest. Row m may get
a bias. The kernels are those of one product; the grid's y counts images.
"""

import functools
import math

from course_lib.kernels.blocks.mma.epilogue import ADD_BIAS, VECTORS
from course_lib.kernels.gemm import plan, tensor_core, warpgroup, warpgroup_plan
from course_lib.kernels.operation import AUTO, Ladder, Refusal, Rung, Way
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.intrinsics import VECTOR_BYTES

MOST_IMAGES = 65_535  # the most that a grid's y counts
SOURCES = ("by_k", "by_row"), ("by_row", "by_row")
#: Tiles by mode, from large to small.
SHAPES = {mode: tuple(s for s in found if s.m in (128, 64)) for mode, found in plan.SHAPES.items()}
WARPGROUP_SHAPES = {itemsize: found[1:] for itemsize, found in warpgroup_plan.SHAPES.items()}


def takes(a, b, a_by_k, sizes, n_images):
    """Whether `multiply` takes these: rows begin on 16-byte boundaries."""
    M, N, K = sizes
    whole = arrays.begins_on(VECTOR_BYTES, a, K if a_by_k else M)
    return whole and arrays.begins_on(VECTOR_BYTES, b, N) and 0 < n_images <= MOST_IMAGES


def multiply(a, b, c, sizes, n_images, *, a_by_k=True, bias=None, precision="float32"):
    """c[i, m, n] = Σ a[m, k]·b[i, k, n] over k (+ bias[m]), for arrays that `takes` allows.

    sizes  M, N, K
    """
    M, N, K = sizes
    itemsize = c.dtype.itemsize
    mode = "narrow" if itemsize == 2 else "tf32" if precision == "tf32" else "split"
    problem = plan.Problem(*sizes, itemsize, mode, SOURCES[0 if a_by_k else 1])
    _, way, found = FORWARD.choose(AUTO, (problem, n_images), chip_of(c))
    options = ADD_BIAS if bias is not None else 0
    if arrays.begins_on(VECTOR_BYTES, c, N):
        options += VECTORS
    way.launch(found, (a, b, c if bias is None else bias, c, *sizes), n_images, options)


def _mma(problem, chip):
    """The largest tiles that leave no multiprocessor idle, or the smallest."""
    of_image, n_images = problem
    M, N, _, itemsize, mode, sources = of_image
    for shape in SHAPES[mode]:
        kernel = kernel_for(tensor_core, shape, sources, itemsize, mode)
        enough = n_images * tensor_core.n_blocks(shape, M, N) >= chip.multiprocessors
        if enough and 2 * M > shape.m and 2 * N > shape.n:
            if kernel.shared_bytes <= chip.shared_bytes:
                break
    return of_image, kernel


def _wgmma(problem, chip):
    of_image, n_images = problem
    if chip.capability != warpgroup.ONLY or of_image.mode == "split":
        return Refusal("needs wgmma, and numbers of 16 bits or rounded to TF32")
    if min(of_image[:2]) < warpgroup_plan.LEAST_ROWS:
        return Refusal(f"takes matrices of at least {warpgroup_plan.LEAST_ROWS} rows and columns")
    itemsize, best = of_image.itemsize, (math.inf, None)
    for shape in WARPGROUP_SHAPES[itemsize]:
        blocks = n_images * warpgroup_plan.n_blocks(shape, *of_image[:2])
        rounds = math.ceil(blocks / chip.multiprocessors)
        best = min(best, (rounds * warpgroup_plan.block_cost(shape, of_image), shape))
    return of_image, kernel_for(warpgroup, best[1], of_image.sources, itemsize)


@functools.cache
def kernel_for(module, *choices):
    """The `Kernel` of these choices, made once."""
    return module.make(*choices, in_planes=True)


def _launch_mma(found, operands, n_images, options):
    (M, N, K, *_, sources), (kernel, shape, shared_bytes) = found
    a_strides = (K, 1) if sources[0] == "by_k" else (1, M)
    blocks = tensor_core.n_blocks(shape, M, N), n_images
    _run(kernel, blocks, shape, shared_bytes, *operands, *a_strides, 1, N, options, 1, max(K, 1))


def _launch_wgmma(found, operands, n_images, options):
    (M, N, *_), (kernel, shape, shared_bytes) = found
    blocks = warpgroup_plan.n_blocks(shape, M, N), n_images
    _run(kernel, blocks, shape, shared_bytes, *operands, options)


def _run(kernel, blocks, shape, shared_bytes, *arguments):
    launch(
        kernel, blocks, shape.n_threads, *arguments,
        shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


def _kernels(module, shapes):
    """(mode, `Kernel`) of all that a way may launch, for each of SOURCES."""
    for key, found in shapes.items():
        for shape in found:
            for sources in SOURCES:
                mode = key if module is tensor_core else "narrow" if key == 2 else "tf32"
                itemsize = 2 if mode == "narrow" else 4
                rest = (mode,) if module is tensor_core else ()
                yield mode, sources, kernel_for(module, shape, sources, itemsize, *rest)


WAYS = {warpgroup: WARPGROUP_SHAPES, tensor_core: SHAPES}


def kernels(*modules):
    """Every kernel of these ways, or of all."""
    return [k for each in modules or WAYS for *_, (k, *_) in _kernels(each, WAYS[each])]


FORWARD = Ladder(
    Rung(
        "tensor_core", needs=(8, 0),
        ways=(
            Way("wgmma", _wgmma, _launch_wgmma, lambda: kernels(warpgroup), warpgroup.ONLY),
            Way("mma", _mma, _launch_mma, lambda: kernels(tensor_core), (8, 0)),
        ),
    ),
    auto="tensor_core",
)  # fmt: skip


def specialisations(dtypes):
    """(label, kernel, argument types) of all that is compiled; arrays as (dtype, 1)."""
    for module, shapes in WAYS.items():
        n_numbers, name = (10, "mma") if module is tensor_core else (4, "warpgroup")
        for mode, sources, (kernel, shape, _) in _kernels(module, shapes):
            for dtype in dtypes:
                if (dtype == "float32") == (mode != "narrow"):
                    label = f"planes {name} {mode} {shape.m}x{shape.n} {sources[0]} {dtype}"
                    yield label, kernel, [(dtype, 1)] * 4 + ["int64"] * n_numbers
