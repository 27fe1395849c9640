"""Attention with PyTorch's signature: all shapes that PyTorch takes, made those of `attention`."""

import math

import torch

from course_lib.ops.attention import attend
from course_lib.ops.checks import number, require_tensor
from course_lib.ops.dropout import require_probability


def scaled_dot_product_attention(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None,
    enable_gqa=False,
):  # fmt: skip
    """Attention, as `torch.nn.functional.scaled_dot_product_attention`, with all its shapes.

    query       (…, T, D), with key (…, S, D) and value (…, S, E); leading axes are broadcast
    attn_mask   broadcast to (…, T, S): bool, True where a query may look; or numbers to be added,
                float32 or of query's dtype, with a gradient
    enable_gqa  heads, in the third axis from the end, may be fewer of key and value

    For more options, and all else: `attention`.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        require_tensor(x, name)
    if not isinstance(is_causal, bool):
        raise TypeError(f"is_causal must be bool, not {type(is_causal).__name__}")
    if attn_mask is not None:
        require_tensor(attn_mask, "attn_mask")
        if is_causal:
            raise RuntimeError("attn_mask must not be set when is_causal=True: use ops.attention")
        if attn_mask.dim() < 2:
            raise RuntimeError(
                f"attn_mask must have 2 dimensions at least, not shape {tuple(attn_mask.shape)}"
            )
    options = (
        None if scale is None else number(scale, "scale"), is_causal, False, None, None, 0.0,
        number(dropout_p, "dropout_p"), False,
    )  # fmt: skip
    require_probability(dropout_p)
    nothing = (None,) * 6
    if _is_plain(query, key, value, enable_gqa):
        return attend(query, key, value, attn_mask, *nothing, *options)[0]
    *inputs, leading = _folded(query, key, value, attn_mask, enable_gqa)
    o = attend(*inputs, *nothing, *options)[0]
    return o if len(leading) == 2 else o.reshape(*leading, *o.shape[2:])


def _is_plain(q, k, v, shared):
    return (
        q.dim() == k.dim() == v.dim() == 4
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
        and (shared or q.shape[1] == k.shape[1])
    )


def _folded(query, key, value, mask, shared):
    """(q, k, v, mask) with leading axes broadcast and made one, and the leading axes of o."""
    given = query, key, value
    rank = max(x.dim() for x in given)
    if min(x.dim() for x in given) < 2:
        raise RuntimeError(
            f"query, key and value must have 2 dimensions at least, not {_shapes(*given)}"
        )
    q, k, v = (x[(None,) * (max(rank, 4) - x.dim())] for x in given)
    H, *others = (x.shape[-3] for x in (q, k, v))
    try:
        batch = torch.broadcast_shapes(*(x.shape[:-3] for x in (q, k, v)))
        if shared and any(n == 0 or H % n for n in others):
            raise RuntimeError
        heads = H if shared else torch.broadcast_shapes((H,), *((n,) for n in others))[0]
        many = math.prod(batch)
        if mask is not None and len(batch) > 1 and mask.dim() > 3:
            mask = mask.expand(*batch, *mask.shape[-3:]).reshape(many, *mask.shape[-3:])
    except RuntimeError:
        wanted = "and heads of key and value that divide query's" if shared else "(or enable_gqa)"
        raise RuntimeError(
            f"query, key, value and attn_mask need leading axes that broadcast {wanted}; their "
            f"shapes are {_shapes(*given, mask)}"
        ) from None
    if others[0] != others[1] or not shared and others[0] != 1:
        k, v = (x.repeat_interleave(heads // x.shape[-3], -3) if x.shape[-3] not in (heads, 0)
                else x for x in (k, v))  # fmt: skip
    q = q.expand(*q.shape[:-3], heads, *q.shape[-2:])
    q, k, v = (x.expand(*batch, *x.shape[-3:]).reshape(many, *x.shape[-3:]) for x in (q, k, v))
    return q, k, v, mask, (*batch, heads)[max(rank, 4) - rank :]


def _shapes(*tensors):
    return ", ".join(str(None if x is None else tuple(x.shape)) for x in tensors)
