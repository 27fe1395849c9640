"""Attention composed of PyTorch's operators, for tensors on a CPU: with every option of ours.

Shapes and options as in `attention`; differentiable by PyTorch's autograd.
"""

import itertools
import math

import torch
import torch.nn.functional as F

from course_lib.ops.checks import of_sums


def plain(q, k, v, mask, scale, causal):
    """o, by PyTorch's own function, which has no other options."""
    shared = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(
        q, k, v, mask, 0.0, causal, scale=scale, enable_gqa=shared
    )


def composed(q, k, v, mask, kept, *, slopes, scale, causal, lower_right, left, right, softcap,
             key_lengths=None):  # fmt: skip
    """(o, lse). `kept`, if given, is what dropout multiplies weights by, (B, H, T, S)."""
    exact = of_sums(q.dtype)
    (_, H, T, D), (_, G, S, _) = q.shape, k.shape
    keys, values = (x.to(exact).repeat_interleave(H // max(G, 1), 1) for x in (k, v))
    scores = q.to(exact) @ keys.mT * (D**-0.5 if scale is None else scale)
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    cols = torch.arange(S, device=q.device)
    lengths = S if key_lengths is None else key_lengths.view(-1, 1, 1, 1)
    beside = torch.arange(T, device=q.device)[:, None] + (lengths - T if lower_right else 0)
    distance = cols - beside
    if slopes is not None:
        scores = scores - slopes.to(exact)[..., None, None] * distance.abs()
    visible = cols < lengths
    if causal:
        visible = visible & (distance <= 0)
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    if mask is not None and mask.dtype is torch.bool:
        visible = visible & mask
    elif mask is not None:
        scores = scores + mask
    scores = scores.masked_fill(~visible, -math.inf)
    blind = (scores == -math.inf).all(-1, keepdim=True)  # queries that look at nothing
    scores = scores.masked_fill(blind, 0.0)
    lse = scores.logsumexp(-1).masked_fill(blind[..., 0], -math.inf)
    weights = scores.softmax(-1).masked_fill(blind, 0.0)
    if kept is not None:
        weights = weights * kept
    return (weights @ values).to(q.dtype), lse


def packed(q, k, v, mask, kept, q_starts, k_starts, *, slopes, **options):
    """`composed` for one sequence after another; what lies between them has o = 0, lse = −inf."""
    o = q.new_zeros(*q.shape[:-1], v.shape[-1])
    lse = torch.full(q.shape[:-1], -math.inf, dtype=of_sums(q.dtype), device=q.device)
    places = zip(q_starts.tolist(), k_starts.tolist(), strict=True)
    for n, ((first, begin), (last, end)) in enumerate(itertools.pairwise(places)):
        T, S = last - first, end - begin
        given = q[:, :, first:last], *(x[:, :, begin:end] for x in (k, v))
        many = slopes is not None and slopes.dim() == 2
        found = composed(
            *given, _part(mask, n, T, S), _part(kept, n, T, S),
            slopes=slopes[n] if many else slopes, **options,
        )  # fmt: skip
        rows = torch.arange(first, last, device=q.device)
        o, lse = (x.index_copy(2, rows, y) for x, y in zip((o, lse), found, strict=True))
    return o, lse


def _part(mask, n, T, S):
    """Of a mask that broadcasts to (n_sequences, H, max_q, max_k): that of one sequence."""
    if mask is None:
        return None
    mask = mask[(None,) * (4 - mask.dim())]
    for axis, extent in ((2, T), (3, S)):
        if mask.shape[axis] != 1:
            mask = mask.narrow(axis, 0, extent)
    return mask.narrow(0, n, 1) if mask.shape[0] != 1 else mask
