"""How each rung of attention is planned and launched."""

import itertools
import math

from course_lib.kernels.attention import products
from course_lib.kernels.attention import separate as separately
from course_lib.kernels.attention import streaming as streams
from course_lib.kernels.attention import tensor_core as tensors
from course_lib.kernels.attention import tensor_core_backward as tensors_backwards
from course_lib.kernels.attention import tiled as tiles
from course_lib.kernels.attention import tiled_backward as backwards
from course_lib.kernels.attention.multiplying import ITEMSIZE, by_warpgroups, by_warps
from course_lib.kernels.attention.options import memory, place_of, rows_together
from course_lib.kernels.attention.problem import DSCORES
from course_lib.kernels.attention.products import Matrix, Products
from course_lib.kernels.blocks.mma.warpgroup import ONLY
from course_lib.kernels.operation import Refusal
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch

#: (queries, keys, elements of a head at most) of a tile; backwards keys, queries for dk and dv, and
#: queries, keys for dq.
FORWARD_TILES = ((16, 16, 32), (64, 32, 64), (64, 32, 128), (32, 16, 256))
BACKWARD_TILES = ((16, 16, 32), (32, 32, 64), (32, 16, 128), (16, 16, 256))
#: (keys of a tile, fragments of a warp at most, elements of a head at most) of `tensor_core` by
#: warps; backwards, rows that come by.
MMA_TILES = ((64, 2, 64), (32, 2, 128), (32, 1, 256))
MMA_BACKWARD_TILES = ((32, 2, 64), (32, 1, 128))
#: (by_element, source) of what they are compiled for.
MMA_KINDS = ((False, "by_k"), (True, "by_k"), (True, "any"))
#: (keys of a tile, warpgroups, blocks of a multiprocessor, elements of a head at most) of
#: `tensor_core` by warpgroups.
WARPGROUP_TILES = ((64, 2, 2, 64), (128, 2, 1, 128), (64, 2, 1, 256))
WARPGROUP_BACKWARD_TILES = ((64, 2, 1, 64), (64, 2, 1, 128))
THREADS_OF_MASK = 128
HOPPER, RESERVED = (9, 0), 1024  # from there on a kernel has bytes of shared memory of its own


# ---- plans --------------------------------------------------------------------------------------


def _plan(shapes, bytes_of, problem, chip):
    """The first of `shapes` for such heads whose shared memory this chip has."""
    refusal = None
    for shape in shapes:
        if shape[-1] >= max(problem.D, problem.E):
            n_bytes = bytes_of(*shape) + (RESERVED if chip.capability >= HOPPER else 0)
            if n_bytes <= chip.shared_bytes:
                return shape
            refusal = Refusal(
                f"needs {n_bytes:,} bytes of shared memory for heads of "
                f"{max(problem.D, problem.E)}, and this GPU has {chip.shared_bytes:,}"
            )
    return refusal or Refusal(f"takes heads of {shapes[-1][-1]} at most")


def plan_tiled(problem, chip):
    return _plan(FORWARD_TILES, lambda *shape: tiles.kernel_for(*shape)[1], problem, chip)


def plan_tiled_backward(problem, chip):
    return _plan(BACKWARD_TILES, lambda *shape: backwards.kernels_for(*shape)[2], problem, chip)


def of_warps(shape, by_element, source):
    """What `tensor_core.kernel_for` makes the kernel of: (make, cols, depth, by_element, *how)."""
    cols, fragments, depth = shape
    # Options need registers of their own.
    return by_warps, cols, depth, by_element, source, 1 if by_element else fragments


def of_warpgroups(shape, by_element):
    cols, n_groups, together, depth = shape
    return by_warpgroups, cols, depth, by_element, n_groups, 1 if by_element else together


def _of_warps(problem):
    how = (problem.by_element, "by_k") if problem.is_aligned else (True, "any")
    return lambda *shape: of_warps(shape, *how)


def _of_warpgroups(problem):
    return lambda *shape: of_warpgroups(shape, problem.by_element)


def _plan_tensors(module_kernels, of, shapes, problem, chip):
    if problem.itemsize != ITEMSIZE:
        return Refusal("takes float16 and bfloat16 alone")
    shape = _plan(shapes, lambda *shape: module_kernels(*of(*shape))[-1], problem, chip)
    return shape if isinstance(shape, Refusal) else of(*shape)


def plan_mma(problem, chip):
    return _plan_tensors(tensors.kernel_for, _of_warps(problem), MMA_TILES, problem, chip)


def plan_mma_backward(problem, chip):
    kernels = tensors_backwards.kernels_for
    return _plan_tensors(kernels, _of_warps(problem), MMA_BACKWARD_TILES, problem, chip)


def plan_warpgroup(problem, chip):
    return _plan_warpgroup(tensors.kernel_for, WARPGROUP_TILES, problem, chip)


def plan_warpgroup_backward(problem, chip):
    return _plan_warpgroup(tensors_backwards.kernels_for, WARPGROUP_BACKWARD_TILES, problem, chip)


def _plan_warpgroup(module_kernels, shapes, problem, chip):
    if chip.capability > ONLY:
        return Refusal("needs wgmma, an instruction of compute capability 9.0 alone")
    if not problem.is_aligned:
        return Refusal("takes q, k, v and do whose rows begin on 16-byte boundaries")
    return _plan_tensors(module_kernels, _of_warpgroups(problem), shapes, problem, chip)


def plan_separate(problem, chip):
    return Refusal("takes no packed sequences") if problem.is_packed else problem


def _choices(mma_tiles, warpgroup_tiles):
    """(way, label, what kernels are made of) of all that the two ways of `tensor_core` launch."""
    for shape, (by_element, source) in itertools.product(mma_tiles, MMA_KINDS):
        yield "mma", _named(shape, by_element, source), of_warps(shape, by_element, source)
    for shape, by_element in itertools.product(warpgroup_tiles, (False, True)):
        yield "warpgroup", _named(shape, by_element), of_warpgroups(shape, by_element)


def _named(shape, by_element, *source):
    return ", ".join([*map(str, (*shape, *source)), *(["by element"] if by_element else [])])


def tensor_core_kernels(of_way=None):
    """(label, kernel, threads of a block) of all that `tensor_core` launches forwards."""
    for way, label, choice in _choices(MMA_TILES, WARPGROUP_TILES):
        if of_way in (None, way):
            kernel, unit, _ = tensors.kernel_for(*choice)
            yield f"{way} {label}", kernel, unit.n_threads


def tensor_core_backward_kernels(of_way=None):
    """(label, kernel of dk and dv, kernel of dq, threads) of all that it launches backwards."""
    for way, label, choice in _choices(MMA_BACKWARD_TILES, WARPGROUP_BACKWARD_TILES):
        if of_way in (None, way):
            *two, unit, _ = tensors_backwards.kernels_for(*choice)
            yield f"{way} {label}", *two, unit.n_threads


def tiled_kernels():
    return [tiles.kernel_for(*shape)[0] for shape in FORWARD_TILES]


def tiled_backward_kernels():
    kernels = (backwards.kernels_for(*shape)[:2] for shape in BACKWARD_TILES)
    return [backwards.delta_kernel, separately.mask_gradient_kernel, *sum(kernels, ())]


# ---- forwards -----------------------------------------------------------------------------------


def _readable(*xs):
    """(the stretches of memory, their places) of arrays of four dimensions."""
    xs = [rows_together(x) for x in xs]
    return [memory(x) for x in xs], [place_of(x) for x in xs]


def streaming(plan, request, inputs, o, lse):
    n_blocks = request.n_heads * math.ceil(request.T / streams.N_WARPS)
    _walk(streams.streaming_kernel, n_blocks, 32 * streams.N_WARPS, 0, request, inputs, o, lse)


def tiled(plan, request, inputs, o, lse):
    kernel, shared_bytes = tiles.kernel_for(*plan)
    n_blocks = request.n_heads * math.ceil(request.T / plan[0])
    _walk(kernel, n_blocks, tiles.N_THREADS, shared_bytes, request, inputs, o, lse)


def tensor_core(plan, request, inputs, o, lse):
    kernel, unit, shared_bytes = tensors.kernel_for(*plan)
    n_blocks = request.n_heads * math.ceil(request.T / unit.rows)
    _walk(kernel, n_blocks, unit.n_threads, shared_bytes, request, inputs, o, lse)


def _walk(kernel, n_blocks, n_threads, shared_bytes, request, inputs, o, lse):
    xs, places = _readable(*inputs, o)
    launch(
        kernel, n_blocks, n_threads, *xs[:3], *request.read(), xs[3], memory(lse), request.shape,
        *places, request.look(), request.dropping, shared_bytes=shared_bytes,
    )  # fmt: skip


def separate(plan, request, inputs, o, lse):
    scores = _scores(request, *inputs[:2])
    bias, allowed, slopes, _, lengths = request.read()
    n_rows = request.n_heads * request.T
    launch(
        separately.weights_kernel, n_rows, separately.BLOCK_SIZE, scores, bias, allowed, slopes,
        lengths, memory(lse), request.shape, request.look(), request.dropping,
    )  # fmt: skip
    _times(request, scores, inputs[2], o)


# ---- products of matrices -----------------------------------------------------------------------


def _matrix(x):
    """`Matrix` of (batches, heads, rows, elements)."""
    return Matrix(*place_of(x), 1)


def _of_scores(request, transposed=False):
    H, T, S = request.shape.n_heads, request.shape.T, request.shape.S
    return Matrix(H * T * S, T * S, *((1, S) if transposed else (S, 1)))


def _scores(request, x, y):
    """x·yᵀ of each head, float32 (B, H, T, S): x is by queries, y by keys."""
    H, share, T, S, *_ = request.shape
    found = arrays.empty((request.B * H * T * S,), like=x, dtype="float32")
    x, y = rows_together(x), rows_together(y)
    of = Products(T, S, x.shape[-1], H, 1, 1, share)
    places = _matrix(x), _matrix(y), _of_scores(request)
    return products.multiply(memory(x), memory(y), found, request.B, of, *places)


def _times(request, scores, y, out):
    """out = scores·y of each head: y is by keys, out by queries."""
    H, share, T, S, *_ = request.shape
    y = rows_together(y)
    of = Products(T, out.shape[-1], S, H, 1, 1, share)
    batch, head, row, _ = _matrix(y)
    places = _of_scores(request), Matrix(batch, head, 1, row), _matrix(out)
    if out.shape[-1]:
        products.multiply(scores, memory(y), memory(out), request.B, of, *places)


def _transposed_times(request, scores, x, out):
    """out = scoresᵀ·x, summed over the heads that share keys: x is by queries, out by keys."""
    H, share, T, S, *_ = request.shape
    x = rows_together(x)
    of = Products(S, out.shape[-1], T, H // share, share, 1, 1)
    batch, head, row, _ = _matrix(x)
    places = _of_scores(request, transposed=True), Matrix(batch, head, 1, row), _matrix(out)
    if out.shape[-1]:
        products.multiply(scores, memory(x), memory(out), request.B, of, *places)


# ---- backwards ----------------------------------------------------------------------------------


def launch_backward(way, plan, request, saved, gradients):
    """delta, then the way's own kernels; and the mask's gradient, where it is asked for."""
    do, q, k, v, o, lse, dlse = saved
    delta = arrays.empty(tuple(lse.shape), like=q, dtype="float32")
    (do_, o_), (do_at, o_at) = _readable(do, o)
    n_rows = arrays.size_of(lse)
    lse = memory(arrays.contiguous(lse))
    launch(
        backwards.delta_kernel, math.ceil(n_rows / backwards.N_WARPS),
        32 * backwards.N_WARPS, do_, o_,
        lse if dlse is None else memory(arrays.contiguous(dlse)), memory(delta), request.shape,
        do_at, o_at, n_rows, dlse is not None,
    )  # fmt: skip
    dscores = None
    if len(gradients) == 4:
        dscores = arrays.empty((request.n_heads * request.T * request.S,), like=q, dtype="float32")
        arrays.fill(dscores, 0)  # tiles that no query looks at are not visited
    way.launch(plan, request, (do, q, k, v), lse, memory(delta), gradients[:3], dscores)
    if dscores is not None:
        _launch_mask_gradient(request, dscores, gradients[3])


def _launch_mask_gradient(request, dscores, dmask):
    n = arrays.size_of(dmask)
    extents = (1,) * (4 - len(dmask.shape)) + tuple(dmask.shape)
    launch(
        separately.mask_gradient_kernel, math.ceil(n / THREADS_OF_MASK), THREADS_OF_MASK, dscores,
        memory(dmask), request.shape, *extents, n,
    )  # fmt: skip


def tiled_backward(plan, request, *saved):
    _two_walks(backwards.kernels_for(*plan), plan[0], tiles.N_THREADS, request, *saved)


def tensor_core_backward(plan, request, *saved):
    of_keys, of_queries, unit, shared_bytes = tensors_backwards.kernels_for(*plan)
    kernels = of_keys, of_queries, shared_bytes
    _two_walks(kernels, unit.rows, unit.n_threads, request, *saved)


def _two_walks(kernels, rows, n_threads, request, inputs, lse, delta, gradients, dscores):
    """dk and dv, then dq; `rows` of keys, or of queries, a block."""
    of_keys, of_queries, shared_bytes = kernels
    xs, places = _readable(*inputs)
    (dq, dk, dv), (dq_at, dk_at, dv_at) = _readable(*gradients)
    saved = *xs, *request.read(), lse, delta
    n_blocks = request.B * (request.shape.n_heads // request.shape.share)
    launch(
        of_keys, n_blocks * math.ceil(request.S / rows), n_threads, *saved, dk, dv, request.shape,
        *places, dk_at, dv_at, request.look(), request.dropping, shared_bytes=shared_bytes,
    )  # fmt: skip
    more = 0 if dscores is None else DSCORES
    launch(
        of_queries, request.n_heads * math.ceil(request.T / rows), n_threads, *saved, dq,
        delta if dscores is None else dscores, request.shape, *places, dq_at, request.look(more),
        request.dropping, shared_bytes=shared_bytes,
    )  # fmt: skip


def separate_backward(plan, request, inputs, lse, delta, gradients, dscores):
    do, q, k, v = inputs
    dq, dk, dv = gradients
    scores, dweights = _scores(request, q, k), _scores(request, do, v)
    bias, allowed, slopes, _, lengths = request.read()
    more = 0 if dscores is None else DSCORES
    launch(
        separately.gradients_kernel, request.n_heads * request.T, separately.BLOCK_SIZE, scores,
        dweights, bias, allowed, slopes, lengths, lse, delta,
        delta if dscores is None else dscores, request.shape, request.look(more), request.dropping,
    )  # fmt: skip
    _times(request, dweights, k, dq)
    _transposed_times(request, dweights, q, dk)
    _transposed_times(request, scores, do, dv)
