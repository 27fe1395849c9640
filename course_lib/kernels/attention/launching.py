"""How each rung of attention is launched, given its plan."""

import math

from course_lib.kernels.attention import products, score_products, wide_tiles
from course_lib.kernels.attention import separate as separately
from course_lib.kernels.attention import streaming as streams
from course_lib.kernels.attention import tensor_core as tensors
from course_lib.kernels.attention import tensor_core_backward as tensors_backwards
from course_lib.kernels.attention import tiled as tiles
from course_lib.kernels.attention import tiled_backward as backwards
from course_lib.kernels.attention import wide_backward as wide
from course_lib.kernels.attention.options import place_of, rows_together
from course_lib.kernels.attention.problem import DSCORES, FAR
from course_lib.kernels.attention.products import Matrix, Products
from course_lib.kernels.blocks.score_mask import memory
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch

THREADS_OF_MASK = 128


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
    """Of a plan that is `score_products`', by those; else by `products`."""
    scores = _scores(plan, request, *inputs[:2])
    bias, allowed, slopes, _, lengths = request.read()
    launch(
        separately.weights_kernel, request.n_heads * request.T, _threads_of_row(request), scores,
        bias, allowed, slopes, lengths, memory(lse), request.shape, request.look(),
        request.dropping, _around(plan),
    )  # fmt: skip
    _times(plan, request, scores, inputs[2], o)


def _around(plan):
    """Keys around those that a query looks at, whose weights are read."""
    return score_products.AROUND if isinstance(plan, score_products.Plan) else FAR


def _threads_of_row(request):
    return min(separately.BLOCK_SIZE, 32 * math.ceil(request.S / 32))


# ---- products of matrices -----------------------------------------------------------------------


def _multiply(plan, request, kind, *operands):
    if isinstance(plan, score_products.Plan):
        return score_products.multiply(plan, request, kind, *operands)
    a, b, c, *rest = operands
    return products.multiply(a, b, c, request.B, *rest)


def _matrix(x):
    """`Matrix` of (batches, heads, rows, elements)."""
    return Matrix(*place_of(x), 1)


def _of_scores(request, transposed=False):
    H, T, pitch = request.shape.n_heads, request.shape.T, score_products.pitch(request.S)
    return Matrix(H * T * pitch, T * pitch, *((1, pitch) if transposed else (pitch, 1)))


def _scores(plan, request, x, y):
    """x·yᵀ of each head, float32 (B, H, T, S or more): x is by queries, y by keys."""
    H, share, T, S, *_ = request.shape
    n = request.B * H * T * score_products.pitch(S)
    found = arrays.empty((n,), like=x, dtype="float32")
    x, y = rows_together(x), rows_together(y)
    of = Products(T, S, x.shape[-1], H, 1, 1, share)
    places = _matrix(x), _matrix(y), _of_scores(request)
    operands = memory(x), memory(y), found, of
    return _multiply(plan, request, score_products.SCORES, *operands, *places)


def _times(plan, request, scores, y, out):
    """out = scores·y of each head: y is by keys, out by queries."""
    H, share, T, S, *_ = request.shape
    y = rows_together(y)
    of = Products(T, out.shape[-1], S, H, 1, 1, share)
    batch, head, row, _ = _matrix(y)
    places = _of_scores(request), Matrix(batch, head, 1, row), _matrix(out)
    if out.shape[-1]:
        operands = scores, memory(y), memory(out), of
        _multiply(plan, request, score_products.OF_QUERIES, *operands, *places)


def _transposed_times(plan, request, scores, x, out):
    """out = scoresᵀ·x, summed over the heads that share keys: x is by queries, out by keys."""
    H, share, T, S, *_ = request.shape
    x = rows_together(x)
    of = Products(S, out.shape[-1], T, H // share, share, 1, 1)
    batch, head, row, _ = _matrix(x)
    places = _of_scores(request, transposed=True), Matrix(batch, head, 1, row), _matrix(out)
    if out.shape[-1]:
        operands = scores, memory(x), memory(out), of
        _multiply(plan, request, score_products.OF_KEYS, *operands, *places)


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
    rows = plan[0], plan[0]
    _two_walks(backwards.kernels_for(*plan), rows, 1, tiles.N_THREADS, request, *saved)


def tensor_core_backward(plan, request, *saved):
    of_keys, of_queries, unit, shared_bytes = tensors_backwards.kernels_for(*plan)
    kernels = of_keys, of_queries, shared_bytes
    rows = unit.rows, unit.rows
    _two_walks(kernels, rows, unit.parts, unit.n_threads, request, *saved)


def wide_backward(plan, request, *saved):
    rows, n_threads = (wide_tiles.ROWS, wide_tiles.N_ROWS), wide_tiles.N_THREADS
    _two_walks(wide.kernels_for(*plan), rows, 1, n_threads, request, *saved, overlap=True)


def _two_walks(
    kernels, rows, parts, n_threads, request, inputs, lse, delta, gradients, dscores, overlap=False
):  # fmt: skip
    """dk and dv, in parts of their columns, then dq; `rows` of keys, and of queries, a block.

    overlap  whether dq's blocks may begin where there is room beside those of dk and dv
    """
    of_keys, of_queries, shared_bytes = kernels
    xs, places = _readable(*inputs)
    (dq, dk, dv), (dq_at, dk_at, dv_at) = _readable(*gradients)
    saved = *xs, *request.read(), lse, delta
    n_blocks = request.B * (request.shape.n_heads // request.shape.share) * parts
    launch(
        of_keys, n_blocks * math.ceil(request.S / rows[0]), n_threads, *saved, dk, dv,
        request.shape, *places, dk_at, dv_at, request.look(), request.dropping,
        shared_bytes=shared_bytes,
    )  # fmt: skip
    more = 0 if dscores is None else DSCORES
    launch(
        of_queries, request.n_heads * math.ceil(request.T / rows[1]), n_threads, *saved, dq,
        delta if dscores is None else dscores, request.shape, *places, dq_at, request.look(more),
        request.dropping, shared_bytes=shared_bytes, overlap=overlap,
    )  # fmt: skip


def atomic_backward(plan, request, inputs, lse, delta, gradients, dscores):
    """dk, dv and the sums that dq is made of, then dq."""
    of_keys, of_sums, unit, shared_bytes = tensors_backwards.kernels_for(*plan)
    _, cols, depth, *_ = plan
    xs, places = _readable(*inputs)
    (dq, dk, dv), (dq_at, dk_at, dv_at) = _readable(*gradients)
    bias, allowed, slopes, q_starts, k_starts = request.read()
    n_tiles = request.n_heads * math.ceil(request.T / cols)
    sums = arrays.empty((n_tiles * cols * depth,), like=dq, dtype="float32")
    arrays.fill(sums, 0)
    more = 0 if dscores is None else DSCORES
    n_blocks = request.B * (request.shape.n_heads // request.shape.share)
    launch(
        of_keys, n_blocks * math.ceil(request.S / unit.rows), unit.n_threads, *xs, bias, allowed,
        slopes, q_starts, k_starts, lse, delta, dk, dv, sums, delta if dscores is None else dscores,
        request.shape, *places, dk_at, dv_at, request.look(more), request.dropping,
        shared_bytes=shared_bytes,
    )  # fmt: skip
    launch(
        of_sums, n_tiles, unit.n_threads, sums, q_starts, k_starts, dq, request.shape, dq_at,
        request.look(),
    )  # fmt: skip


def separate_backward(plan, request, inputs, lse, delta, gradients, dscores):
    do, q, k, v = inputs
    dq, dk, dv = gradients
    scores, dweights = _scores(plan, request, q, k), _scores(plan, request, do, v)
    bias, allowed, slopes, _, lengths = request.read()
    more = 0 if dscores is None else DSCORES
    launch(
        separately.gradients_kernel, request.n_heads * request.T, _threads_of_row(request), scores,
        dweights, bias, allowed, slopes, lengths, lse, delta,
        delta if dscores is None else dscores, request.shape, request.look(more), request.dropping,
        _around(plan),
    )  # fmt: skip
    _times(plan, request, dweights, k, dq)
    _transposed_times(plan, request, dweights, q, dk)
    _transposed_times(plan, request, scores, do, dv)
