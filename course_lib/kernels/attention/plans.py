"""Which tiles each rung of attention takes for a problem on a chip, and all kernels there are."""

import itertools
import math

from course_lib.kernels.attention import score_products, separate
from course_lib.kernels.attention import tensor_core as tensors
from course_lib.kernels.attention import tensor_core_backward as tensors_backwards
from course_lib.kernels.attention import tiled as tiles
from course_lib.kernels.attention import tiled_backward as backwards
from course_lib.kernels.attention import wide_backward as wide
from course_lib.kernels.attention.adding import by_adding_warpgroups
from course_lib.kernels.attention.aligned_rows import copy_rows_kernel
from course_lib.kernels.attention.multiplying import HALVES, by_warpgroups, by_warps
from course_lib.kernels.attention.splitting import FLOATS, by_split_warps
from course_lib.kernels.blocks.mma.warpgroup import ONLY
from course_lib.kernels.operation import Refusal

#: (queries, keys, elements of a head at most) of a tile; backwards keys, queries for dk and dv, and
#: queries, keys for dq.
FORWARD_TILES = ((16, 16, 32), (64, 32, 64), (64, 32, 128), (32, 16, 256))
BACKWARD_TILES = ((16, 16, 32), (32, 32, 64), (32, 16, 128), (16, 16, 256))
#: (keys of a tile, fragments of a warp at most, elements of a head at most) of `tensor_core` by
#: warps; backwards, rows that come by.
MMA_TILES = ((64, 2, 64), (32, 2, 128), (32, 1, 256))
MMA_BACKWARD_TILES = ((32, 2, 64), (32, 1, 128), (32, 1, 256))
#: The same of float32.
SPLIT_TILES = ((32, 2, 64), (32, 1, 128), (16, 1, 128), (16, 1, 256))
SPLIT_BACKWARD_TILES = ((32, 1, 64), (16, 1, 128), (16, 1, 256))
#: (by_element, source) of what they are compiled for.
MMA_KINDS = ((False, "by_k"), (True, "by_k"), (True, "any"))
#: In float32 the two ways of `by_element` differ in a result's last bits: each has both sources.
SPLIT_KINDS = ((False, "by_k"), (False, "any"), (True, "any"))
#: (keys of a tile, warpgroups, blocks of a multiprocessor, elements of a head at most) of
#: `tensor_core` by warpgroups.
WARPGROUP_TILES = ((64, 2, 2, 64), (128, 2, 1, 128), (64, 2, 1, 256))
WARPGROUP_BACKWARD_TILES = ((64, 2, 1, 64), (64, 2, 1, 128))
#: (elements of a head at most,) of `wide`.
WIDE_TILES = ((128,), (192,), (256,))
#: Of float32, for scores to go to memory: elements of heads that are wide, and widest; keys of a
#: walk that are long, and many; queries at least; bytes of scores at most. And rows of a block of
#: `split`. As was measured on an H200.
WIDE, WIDEST, LONG, MANY, SHORT, MOST_SCORES, ROWS = 64, 128, 128, 80, 24, 1 << 29, 64
TENSOR_CORES = (8, 0)  # of bfloat16 and TF32, from this compute capability on; of float16 before
HOPPER, RESERVED = (9, 0), 1024  # from there on a kernel has bytes of shared memory of its own


def _plan(shapes, bytes_of, problem, chip):
    """The first of `shapes` for such heads whose shared memory this chip has."""
    needed = []
    for shape in shapes:
        if shape[-1] >= max(problem.D, problem.E):
            needed.append(bytes_of(*shape) + (RESERVED if chip.capability >= HOPPER else 0))
            if needed[-1] <= chip.shared_bytes:
                return shape
    if not needed:
        return Refusal(f"takes heads of {shapes[-1][-1]} at most")
    return Refusal(
        f"needs {min(needed):,} bytes of shared memory for heads of "
        f"{max(problem.D, problem.E)}, and this GPU has {chip.shared_bytes:,}"
    )


def plan_tiled(problem, chip):
    return _plan(FORWARD_TILES, lambda *shape: tiles.kernel_for(*shape)[1], problem, chip)


def plan_tiled_backward(problem, chip):
    return _plan(BACKWARD_TILES, lambda *shape: backwards.kernels_for(*shape)[2], problem, chip)


def _of_warps(unit, shape, by_element, source):
    """What `tensor_core.kernel_for` makes the kernel of: (make, cols, depth, by_element, *how)."""
    cols, fragments, depth = shape
    # Options need registers of their own.
    return unit, cols, depth, by_element, source, 1 if by_element else fragments


def _of_warpgroups(shape, by_element, unit=by_warpgroups):
    cols, n_groups, together, depth = shape
    return unit, cols, depth, by_element, n_groups, 1 if by_element else together


def _plan_tensors(make, shapes, of, itemsize, problem, chip):
    """As `_plan`: what the kernels are made of that `make` gives, and their bytes last."""
    if problem.itemsize != itemsize:
        kinds = "float16 and bfloat16 alone" if itemsize == HALVES else "float32 alone"
        return Refusal(f"takes {kinds}")
    shape = _plan(shapes, lambda *shape: make(*of(shape))[-1], problem, chip)
    return shape if isinstance(shape, Refusal) else of(shape)


def plan_mma(problem, chip):
    return _plan_mma(tensors.kernel_for, MMA_TILES, problem, chip)


def plan_mma_backward(problem, chip):
    return _plan_mma(tensors_backwards.kernels_for, MMA_BACKWARD_TILES, problem, chip)


def _plan_mma(make, shapes, problem, chip):
    if problem.dtype == "bfloat16" and chip.capability < TENSOR_CORES:
        return Refusal("takes float16 alone on GPUs before compute capability 8.0")
    source = "by_k" if problem.is_aligned else "any"
    # Kernels that look at each score by itself take all problems, in less shared memory.
    for by_element in dict.fromkeys((problem.by_element or source == "any", True)):

        def of(shape, by_element=by_element):
            return _of_warps(by_warps, shape, by_element, source)

        plan = _plan_tensors(make, shapes, of, HALVES, problem, chip)
        if not isinstance(plan, Refusal):
            break
    return plan


def plan_split(problem, chip):
    return _plan_split(tensors.kernel_for, SPLIT_TILES, problem, chip)


def plan_split_backward(problem, chip):
    return _plan_split(tensors_backwards.kernels_for, SPLIT_BACKWARD_TILES, problem, chip)


def _plan_split(make, shapes, problem, chip):
    source = "by_k" if problem.is_aligned and not problem.by_element else "any"

    def of(shape):
        return _of_warps(by_split_warps, shape, problem.by_element, source)

    return _plan_tensors(make, shapes, of, FLOATS, problem, chip)


def plan_warpgroup(problem, chip):
    return _plan_warpgroup(tensors.kernel_for, WARPGROUP_TILES, problem, chip)


def plan_warpgroup_backward(problem, chip):
    return _plan_warpgroup(tensors_backwards.kernels_for, WARPGROUP_BACKWARD_TILES, problem, chip)


def plan_atomic_backward(problem, chip):
    return _plan_warpgroup(
        tensors_backwards.kernels_for, WARPGROUP_BACKWARD_TILES, problem, chip,
        by_adding_warpgroups,
    )  # fmt: skip


def plan_wide_backward(problem, chip):
    """What `wide_backward.kernels_for` takes."""

    def of(shape):
        return *shape, problem.by_element

    if refusal := _no_warpgroups(problem, chip):
        return refusal
    return _plan_tensors(wide.kernels_for, WIDE_TILES, of, HALVES, problem, chip)


def plan_scores(problem, chip):
    """The `score_products.Plan`."""
    if problem.itemsize != FLOATS:
        return Refusal("takes float32 alone")
    refusal = plan_separate(problem, chip)
    return refusal if isinstance(refusal, Refusal) else score_products.plan(problem, chip)


def preferred(problem, chip):
    """The ways of `tensor_core`, in the order in which they are tried."""
    n_blocks = problem.n_heads * math.ceil(problem.T / ROWS)
    is_few = n_blocks * 2 < chip.multiprocessors
    wide = is_few or max(problem.D, problem.E) > WIDEST and problem.S > MANY
    first = ("scores",) if _take_scores(problem, chip, n_blocks, problem.S, 1, wide) else ()
    return *first, "warpgroup", "mma", "split"


def preferred_backward(problem, chip):
    """As `preferred`, backwards."""
    n_blocks = (n * math.ceil(length / ROWS) for n, length in (
        (problem.n_heads, problem.T), (problem.n_groups, problem.S),
    ))  # fmt: skip
    walk = max(problem.T, problem.S)
    first = ("scores",) if _take_scores(problem, chip, min(n_blocks), walk, 2, True) else ()
    return *first, "warpgroup", "wide", "mma", "split"


def _take_scores(problem, chip, n_blocks, walk, n_matrices, wide):
    """Whether scores go to memory, so many matrices of them, rather than the way of `split`.

    Its tiles of wide heads are small, and leave room for one block on a multiprocessor; and few
    blocks leave others idle while they walk past `walk` keys or queries, one tile after another.
    Of many more keys than queries, causal ones look at few, which a plan can't see.

    wide  what else is asked of wide heads
    """
    p = problem
    if p.itemsize != FLOATS or p.is_packed:
        return False
    fits = n_matrices * p.n_heads * p.T * score_products.pitch(p.S) * FLOATS <= MOST_SCORES
    width = max(p.D, p.E)
    if width <= WIDE or not fits:
        return fits and n_blocks * 8 < chip.multiprocessors and walk > LONG
    return wide and p.T >= SHORT and (width > WIDEST or p.S <= 8 * p.T)


def _no_warpgroups(problem, chip):
    """The `Refusal` of what no way by `wgmma` takes; else None."""
    if chip.capability > ONLY:
        return Refusal("needs wgmma, an instruction of compute capability 9.0 alone")
    if not problem.is_aligned:
        return Refusal("takes q, k, v and do whose rows begin on 16-byte boundaries")
    return None


def _plan_warpgroup(make, shapes, problem, chip, unit=by_warpgroups):
    if refusal := _no_warpgroups(problem, chip):
        return refusal

    def of(shape):
        return _of_warpgroups(shape, problem.by_element, unit)

    return _plan_tensors(make, shapes, of, HALVES, problem, chip)


def plan_separate(problem, chip):
    return Refusal("takes no packed sequences") if problem.is_packed else problem


def _choices(mma_tiles, split_tiles, warpgroup_tiles):
    """(way, label, what kernels are made of) of all that the ways of `tensor_core` launch."""
    for shape, kind in itertools.product(mma_tiles, MMA_KINDS):
        yield "mma", _named(shape, *kind), _of_warps(by_warps, shape, *kind)
    for shape, kind in itertools.product(split_tiles, SPLIT_KINDS):
        yield "split", _named(shape, *kind), _of_warps(by_split_warps, shape, *kind)
    for shape, by_element in itertools.product(warpgroup_tiles, (False, True)):
        yield "warpgroup", _named(shape, by_element), _of_warpgroups(shape, by_element)


def _named(shape, by_element, *source):
    return ", ".join([*map(str, (*shape, *source)), *(["by element"] if by_element else [])])


def tensor_core_kernels():
    """(way, label, kernel) of all that `tensor_core` launches forwards."""
    for way, label, choice in _choices(MMA_TILES, SPLIT_TILES, WARPGROUP_TILES):
        yield way, label, tensors.kernel_for(*choice)[0]


def tensor_core_backward_kernels():
    """(way, label, kernel of dk and dv, kernel of dq) of all that it launches backwards."""
    found = _choices(MMA_BACKWARD_TILES, SPLIT_BACKWARD_TILES, WARPGROUP_BACKWARD_TILES)
    for way, label, choice in found:
        yield way, label, *tensors_backwards.kernels_for(*choice)[:2]
        if way == "warpgroup":
            choice = by_adding_warpgroups, *choice[1:]
            yield "atomic", label, *tensors_backwards.kernels_for(*choice)[:2]
    for shape, by_element in itertools.product(WIDE_TILES, (False, True)):
        yield "wide", _named(shape, by_element), *wide.kernels_for(*shape, by_element)[:2]


def kernels_of(way):
    """The kernels of that way of `tensor_core`, forwards."""
    return [*copying(way), *(kernel for name, _, kernel in tensor_core_kernels() if name == way)]


def backward_kernels_of(way):
    """The kernels of that way of `tensor_core`, backwards."""
    two = [two for name, _, *two in tensor_core_backward_kernels() if name == way]
    return [*copying(way), backwards.delta_kernel, separate.mask_gradient_kernel, *sum(two, [])]


def kernels_of_scores(row_kernel):
    """The kernels of the way `scores`, of which rows of scores go through `row_kernel`."""
    return [*(kernel for _, kernel in score_products.kernels()), row_kernel]


def copying(way):
    """What AUTO launches before it, where its rows are of 16 bits and are not aligned."""
    return [] if way == "split" else [copy_rows_kernel]


def tiled_kernels():
    return [tiles.kernel_for(*shape)[0] for shape in FORWARD_TILES]


def tiled_backward_kernels():
    kernels = (backwards.kernels_for(*shape)[:2] for shape in BACKWARD_TILES)
    return [backwards.delta_kernel, separate.mask_gradient_kernel, *sum(kernels, ())]
