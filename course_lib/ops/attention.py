"""Scaled dot-product attention as an operator of PyTorch."""

import math

import torch

from course_lib.kernels import attention as kernels
from course_lib.ops import attention_by_torch as by_torch
from course_lib.ops import attention_checks as checks
from course_lib.ops.checks import number, of_sums, require_tensor, whole
from course_lib.ops.dropout import draw_outside_graphs
from course_lib.ops.registration import (
    Operator,
    dispatcher_is_idle,
    gradients_by_torch,
    in_autocast,
    require_floating_point,
)
from course_lib.runtime.host.launch_cache import cached_launch

#: What both operators take beside q, k and v: tensors, and then options.
_TENSORS = "Tensor? mask, Tensor? slopes, Tensor? key_lengths, Tensor? q_starts, Tensor? k_starts"
_OPTIONS = (
    "int? max_q, int? max_k, float? scale, bool causal, bool lower_right, int? left, int? right, "
    "float softcap, float dropout_p"
)
_N_TENSORS = 5

# ---- implementations ----------------------------------------------------------------------------


def _named(mask, slopes, key_lengths, q_starts, k_starts, max_q, max_k, scale, causal, lower_right,
           left, right, softcap, dropout_p, seed=0, offset=0):  # fmt: skip
    """Tensors and options as the launchers name them."""
    return dict(
        mask=mask, slopes=slopes, key_lengths=key_lengths, q_starts=q_starts, k_starts=k_starts,
        max_q=max_q, max_k=max_k, scale=scale, causal=causal, lower_right=lower_right,
        window=(left, right), softcap=softcap, dropout_p=dropout_p, seed=seed, offset=offset,
    )  # fmt: skip


def _draw(q, n_weights):
    """(seed, offset) as in `fused_softmax`, drawn when the operator runs."""
    return draw_outside_graphs(q, n_weights, "attention with dropout")


def _drawn_for(q, k, inputs):
    """(seed, offset) as a tensor on the CPU; an empty one without dropout."""
    q_starts, max_q, max_k, dropout_p = inputs[3], *inputs[5:7], inputs[-1]
    if not dropout_p:
        return torch.empty(0, dtype=torch.int64, device="cpu")
    return torch.tensor(_draw(q, math.prod(checks.sizes(q, k, q_starts, max_q, max_k))))


def _kernel(q, k, v, *inputs):
    require_floating_point("attention", q.dtype)
    drawn = _drawn_for(q, k, inputs[:-1])
    if drawn.numel():  # other numbers each time: nothing to repeat
        return *_forward.__wrapped__(q, k, v, *inputs[:-1], *drawn.tolist()), drawn
    return *_forward(q, k, v, *inputs[:-1]), drawn


@cached_launch(3 + _N_TENSORS)
def _forward(q, k, v, mask, *inputs):
    return kernels.forward(q, k, v, **_named(_readable(mask, q), *inputs))


def _readable(mask, q):
    """`mask` as kernels take it: float32 beside narrower numbers is converted."""
    return mask.to(q.dtype) if mask is not None and mask.dtype is torch.float32 else mask


def _by_torch(q, k, v, *inputs):
    *inputs, with_lse = inputs
    drawn = _drawn_for(q, k, inputs)
    found = _function_by_torch(inputs, drawn, with_lse)(q, k, v, inputs[0])
    if not isinstance(found, tuple):  # lse: what only our backward kernels read
        found = found, q.new_zeros(q.shape[:-1], dtype=of_sums(q.dtype))
    return _laid_like(q, found[0]), found[1], drawn


def _function_by_torch(inputs, drawn, with_lse):
    """A function of q, k, v and mask, that returns (o, lse), or o alone where that suffices."""
    _, slopes, key_lengths, q_starts, k_starts, max_q, max_k, scale, causal, *rest = inputs
    lower_right, left, right, softcap, p = rest
    options = dict(
        slopes=slopes, scale=scale, causal=causal, lower_right=lower_right, left=left, right=right,
        softcap=softcap,
    )  # fmt: skip
    plain = all(x is None for x in (slopes, key_lengths, q_starts, left, right)) and not (
        lower_right or softcap or p or with_lse
    )

    def function(q, k, v, mask):
        if plain and (mask is None or mask.dim() >= 2 and not causal):
            return by_torch.plain(q, k, v, mask, scale, causal)
        kept = None
        if p:
            kept = _kept_by_torch(q, checks.sizes(q, k, q_starts, max_q, max_k), p, int(drawn[0]))
        if q_starts is not None:
            return by_torch.packed(q, k, v, mask, kept, q_starts, k_starts, **options)
        return by_torch.composed(q, k, v, mask, kept, key_lengths=key_lengths, **options)

    return function


def _kept_by_torch(q, shape, p, seed):
    """1/(1 − p) where a weight is kept, 0 where it is dropped."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.empty(shape, dtype=of_sums(q.dtype)).bernoulli_(1 - p, generator=generator)
    return (kept / (1 - p) if p < 1 else kept).to(q.device)


def _like(x, shape):
    """A new tensor of `shape`, (B, H, T, D), in memory by heads or by rows as `x` is."""
    if x.stride(1) >= x.stride(2):
        return x.new_empty(shape)
    B, H, T, D = shape
    return x.new_empty_strided(shape, (T * H * D, D, H * D, 1))


def _laid_like(x, found):
    """`found` itself, if it lies in memory as `_like` and is no view; else a copy that does."""
    wanted = _like(x, found.shape)
    lies_so = found.stride() == wanted.stride() and not found._is_view()
    return found if lies_so else wanted.copy_(found)


def _fake(q, k, v, *inputs):
    return (
        _like(q, (*q.shape[:3], v.shape[-1])),
        q.new_empty(q.shape[:3], dtype=of_sums(q.dtype)),
        torch.empty(2 if inputs[-2] else 0, dtype=torch.int64, device="cpu"),
    )


def _backward_kernel(do, q, k, v, o, lse, dlse, drawn, *inputs):
    *inputs, of_mask = inputs
    given = do, q, k, v, o, lse, dlse
    if drawn is not None:
        found = _launch_backward.__wrapped__(*given, *inputs, *drawn.tolist(), of_mask=of_mask)
    else:
        found = _launch_backward(*given, *inputs, of_mask=of_mask)
    return found if of_mask else (*found, q.new_empty(0, dtype=torch.float32))


@cached_launch(7 + _N_TENSORS)
def _launch_backward(do, q, k, v, o, lse, dlse, mask, *inputs, of_mask):
    options = _named(_readable(mask, q), *inputs)
    return kernels.backward(do, q, k, v, o, lse, dlse=dlse, mask_gradient=of_mask, **options)


def _backward_by_torch(do, q, k, v, o, lse, dlse, drawn, *inputs):
    *inputs, of_mask = inputs
    function, mask = _function_by_torch(inputs, drawn, dlse is not None), inputs[0]

    def results(q, k, v, mask=mask):
        found = function(q, k, v, mask)
        return found[0] if dlse is None and isinstance(found, tuple) else found

    leaves, sums = (q, k, v, mask) if of_mask else (q, k, v), of_sums(q.dtype)
    found = gradients_by_torch(results, leaves, do if dlse is None else (do, dlse))
    gradients = (_laid_like(x, dx) for x, dx in zip((q, k, v), found, strict=False))
    dmask = found[3].to(sums).contiguous() if of_mask else q.new_empty(0, dtype=sums)
    return *gradients, dmask


def _fake_backward(do, q, k, v, o, lse, dlse, drawn, mask, *inputs):
    shape = mask.shape if inputs[-1] else (0,)
    return *(_like(x, x.shape) for x in (q, k, v)), q.new_empty(shape, dtype=of_sums(q.dtype))


# ---- operators ----------------------------------------------------------------------------------


def _save(ctx, inputs, outputs):
    n = 3 + _N_TENSORS
    ctx.options = inputs[n:-1]
    ctx.mark_non_differentiable(outputs[2])
    ctx.save_for_backward(*outputs, *inputs[:n])


def _gradient(ctx, do, dlse, _):
    o, lse, drawn, q, k, v, mask, slopes, *others = ctx.saved_tensors
    needs = ctx.needs_input_grad[1:6]
    if needs[4]:
        raise RuntimeError("course_lib.attention has no gradient for its slopes: detach them")
    do = torch.zeros_like(o) if do is None else do
    drawn = drawn if drawn.numel() else None
    found = _backward(
        do, q, k, v, o, lse, dlse, drawn, mask, slopes, *others, *ctx.options, needs[3]
    )
    gradients = [dx if needed else None for dx, needed in zip(found, needs, strict=False)]
    if needs[3]:
        gradients[3] = gradients[3].to(mask.dtype)
    return *gradients, *[None] * (len(ctx.needs_input_grad) - 1 - len(gradients))


def _vmap(info, in_dims, *inputs):
    """Samples are so many more batches; of packed sequences, one after another."""
    tensors, options, n = inputs[: 3 + _N_TENSORS], inputs[3 + _N_TENSORS :], info.batch_size
    if options[-2]:  # dropout_p
        # One by one it would pass over vmap's own `randomness`.
        raise RuntimeError(
            "course_lib.attention can't be mapped by torch.vmap with dropout: give it the whole "
            "batch, or use torch.nn.functional.scaled_dot_product_attention"
        )

    def samples(x, axis):
        return x.expand(n, *x.shape) if axis is None else x.movedim(axis, 0)

    q, k, v, mask, slopes, key_lengths, *starts = tensors
    if starts[0] is not None:
        given = [[x] * n if axis is None else x.unbind(axis)
                 for x, axis in zip(tensors, in_dims, strict=False)]  # fmt: skip
        found = [attend(*sample, *options) for sample in zip(*given, strict=True)]
        return tuple(map(torch.stack, zip(*found, strict=True))), (0, 0, 0)
    q, k, v = (samples(x, axis) for x, axis in zip((q, k, v), in_dims, strict=False))
    B, H = q.shape[1:3]
    if mask is not None and (in_dims[3] is not None or mask.dim() == 4):
        mask = samples(mask, in_dims[3])
        mask = mask[(slice(None), *(None,) * (5 - mask.dim()))]
        mask = mask.expand(n, B, *mask.shape[2:]).flatten(0, 1)
    if slopes is not None and (in_dims[4] is not None or slopes.dim() == 2):
        slopes = samples(slopes, in_dims[4])
        slopes = slopes.view(n, -1, H).expand(n, B, H).flatten(0, 1)
    if key_lengths is not None:
        key_lengths = samples(key_lengths, in_dims[5]).flatten()
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    o, lse, drawn = attend(q, k, v, mask, slopes, key_lengths, *starts, *options)
    return (o.unflatten(0, (n, B)), lse.unflatten(0, (n, B)), drawn), (0, 0, None)


_backward = Operator(
    "attention_backward",
    "(Tensor do, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor? dlse, Tensor? drawn, "
    f"{_TENSORS}, {_OPTIONS}, bool of_mask) -> (Tensor, Tensor, Tensor, Tensor)",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=_fake_backward,
    check=checks.check_backward,
    on_host=("drawn",),
    title="AttentionBackward",
)
attend = Operator(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, {_TENSORS}, {_OPTIONS}, bool with_lse) "
    "-> (Tensor, Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=_fake,
    check=checks.check,
    save=_save,
    gradient=_gradient,
    title="Attention",
    autocast=in_autocast(4),
    vmap=_vmap,
    tags=(torch.Tag.nondeterministic_seeded,),
)


# ---- functions ----------------------------------------------------------------------------------


def attention(
    q, k, v, *, scale=None, causal=False, lower_right=False, window=(None, None), mask=None,
    softcap=0.0, slopes=None, key_lengths=None, q_starts=None, k_starts=None, max_q=None,
    max_k=None, dropout_p=0.0, return_lse=False,
):  # fmt: skip
    """Attention with every option of `kernels.attention.forward`, under the same names.

    q, k, v     (B, H, T, D), (B, G, S, D) and (B, G, S, E), G dividing H; D and E up to 256, which
                only a CPU exceeds; float32, float16 or bfloat16, on a CPU float64 too
    return_lse  (o, lse) instead of o: the log-sum-exp of each query's scores, float32 (B, H, T)

    Gradients are of q, k, v, an additive mask, and through lse; two runs agree bit for bit. A query
    that may look at nothing has o = 0 and lse = −inf. o lies in memory by heads or by rows, as q
    does. Dropout is drawn as in `softmax_dropout`. Lengths and starts that reach beyond the tensors
    are refused on a CPU; a GPU's are not read. Autocast converts q, k, v and an additive mask to
    its dtype. Raises RuntimeError for what does not go together and for second gradients,
    ValueError for numbers out of range, TypeError for what is none, NotImplementedError for another
    dtype. Notebooks 18 to 20.
    """
    tensors = dict(q=q, k=k, v=v, mask=mask, slopes=slopes, key_lengths=key_lengths,
                   q_starts=q_starts, k_starts=k_starts)  # fmt: skip
    for name, x in tensors.items():
        if x is not None or name in "qkv":
            require_tensor(x, name)
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be (left, right), not {window!r}")
    left, right = (None if n is None else whole(n, "window") for n in window)
    lengths = [x.int() if x is not None and x.dtype is torch.int64 else x
               for x in (key_lengths, q_starts, k_starts)]  # fmt: skip
    most = [
        None if n is None else whole(n, name) for n, name in ((max_q, "max_q"), (max_k, "max_k"))
    ]
    inputs = (
        q, k, v, mask, slopes, *lengths, *most, None if scale is None else number(scale, "scale"),
        bool(causal), bool(lower_right), left, right, number(softcap, "softcap"),
        number(dropout_p, "dropout_p"),
    )  # fmt: skip
    if any(x is not None for x in lengths) and q.device.type == "cpu" and dispatcher_is_idle():
        checks.check(*inputs)
        checks.require_within(q, k, *lengths, *most)
    o, lse, _ = attend(*inputs, bool(return_lse))
    return (o, lse) if return_lse else o
