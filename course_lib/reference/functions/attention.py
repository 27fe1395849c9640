"""Scaled dot-product attention, and its gradients, with every option that the kernels have.

q is (B, H, T, D), k (B, G, S, D) and v (B, G, S, E), where G divides H: query head h reads the keys
and values of head h // (H / G). Vaswani et al., Attention is all you need (2017); the backward pass
as in Dao et al., FlashAttention (2022). Derivations: notebooks 18 to 20.
"""

import numpy as np

from .double import double
from .fused_softmax import dropout_mask

_ANYWHERE = (None, None)


def _distance(T, S, lower_right=False, key_lengths=None):
    """j − i of key j and query i, (T, S) or (B, 1, T, S), counted from the corner asked for."""
    distance = np.arange(S) - np.arange(T)[:, None]
    if not lower_right:
        return distance
    n_keys = S if key_lengths is None else np.minimum(key_lengths, S)[:, None, None, None]
    return distance - (n_keys - T)


def attention_visible(T, S, causal=False, window=_ANYWHERE, lower_right=False, key_lengths=None):
    """Whether query i may look at key j, (T, S), or (B, 1, T, S) where there are `key_lengths`.

    The options are those of `attention`.
    """
    left, right = window
    distance = _distance(T, S, lower_right, key_lengths)
    visible = np.ones(distance.shape, bool)
    if key_lengths is not None:
        visible = visible & (np.arange(S) < np.asarray(key_lengths)[:, None, None, None])
    if left is not None:
        visible = visible & (distance >= -left)
    if right is not None:
        visible = visible & (distance <= right)
    return visible & (distance <= 0) if causal else visible


def attention_scores(
    q, k, *, scale=None, causal=False, lower_right=False, window=_ANYWHERE, mask=None, softcap=0.0,
    slopes=None, key_lengths=None,
):  # fmt: skip
    """(scores, with −inf where a query may not look; their derivative by scale·q·k), (B, H, T, S).

    The derivative is 1 without `softcap`.
    """
    q, k = double(q, k)
    (_, H, T, D), (_, G, S, _) = q.shape, k.shape
    raw = np.einsum("bhtd,bhsd->bhts", q, np.repeat(k, H // G, 1))
    scores, slope = raw * (D**-0.5 if scale is None else scale), np.ones_like(raw)
    if softcap:
        tanh = np.tanh(scores / softcap)
        scores, slope = softcap * tanh, 1 - tanh**2
    visible = attention_visible(T, S, causal, window, lower_right, key_lengths)
    if slopes is not None:
        distance = _distance(T, S, lower_right, key_lengths)
        scores = scores - np.asarray(slopes, np.float64)[..., None, None] * np.abs(distance)
    if mask is not None:
        mask = np.asarray(mask)
        if mask.dtype == bool:
            visible = visible & mask
        else:
            scores = scores + mask.astype(np.float64)
    return np.where(visible, scores, -np.inf), slope


def _weights(scores):
    """(softmax over the last axis, log-sum-exp); a row of nothing but −inf has weights of 0."""
    largest = scores.max(-1, keepdims=True, initial=-np.inf)
    shift = np.where(largest == -np.inf, 0.0, largest)
    terms = np.exp(scores - shift)
    total = terms.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (shift + np.log(total))[..., 0]
    # Where a row is NaN, what may not be looked at still takes no part.
    return np.where(scores == -np.inf, 0.0, terms / np.where(total == 0, 1.0, total)), lse


def _kept(shape, p, seed, offset):
    if not p:
        return np.ones(shape)
    return dropout_mask(shape, p, seed, offset) * (1 / (1 - p) if p < 1 else 0.0)


def _product(weights, scores, values):
    """Σ over keys of weights·values; keys that a query may not look at take no part at all."""
    if np.isfinite(values).all():
        return weights @ values
    terms = weights[..., None] * values[..., None, :, :]
    return np.where((scores == -np.inf)[..., None], 0.0, terms).sum(-2)


def attention(q, k, v, *, dropout_p=0.0, seed=0, offset=0, **options):
    """(o, lse): the weighted mean of the values that each query looks at, and log Σ exp(scores).

    q            (B, H, T, D);  k  (B, G, S, D);  v  (B, G, S, E)
    scale        of q·k; 1 / √D by default
    causal       query i looks at keys up to i; with `lower_right` up to i + S − T, where S is its
                 own of `key_lengths`, if there are some
    window       (left, right): how many keys before and behind its own place it looks at; None: all
    mask         broadcast to (B, H, T, S): bool, True where it may look; or numbers to be added
    softcap      c > 0: scores become c·tanh(score / c), before anything is added to them
    slopes       ALiBi's, (H,) or (B, H): slope·|i − j| is subtracted
    key_lengths  (B,): later keys are padding
    dropout_p, seed, offset   dropout of the weights, element ((b·H + h)·T + i)·S + j of the mask

    A query that may look at nothing has o = 0 and lse = −inf. o is (B, H, T, E), lse (B, H, T).
    """
    (v,) = double(v)
    scores, _ = attention_scores(q, k, **options)
    weights, lse = _weights(scores)
    H, G = scores.shape[1], v.shape[1]
    weights = weights * _kept(scores.shape, dropout_p, seed, offset)
    return _product(weights, scores, np.repeat(v, H // G, 1)), lse


def attention_backward(
    do, q, k, v, *, dlse=None, dropout_p=0.0, seed=0, offset=0, mask=None, **options
):
    """(dq, dk, dv, dscores) from `do`, the gradient of o; `dlse`, if given, is that of lse.

    dscores (B, H, T, S) is what an additive mask gets, before it is summed to the mask's shape.
    """
    do, q, k, v = double(do, q, k, v)
    scores, slope = attention_scores(q, k, mask=mask, **options)
    weights, lse = _weights(scores)
    (B, H, _, D), (_, G, S, _) = q.shape, v.shape
    keys, values = np.repeat(k, H // G, 1), np.repeat(v, H // G, 1)
    kept = _kept(scores.shape, dropout_p, seed, offset)
    dweights = np.einsum("bhte,bhse->bhts", do, values) * kept
    visible = scores != -np.inf
    dweights = np.where(visible, dweights, 0.0)
    total = (weights * dweights).sum(-1, keepdims=True)
    if dlse is not None:
        total = total - np.where(np.isneginf(lse), 0.0, double(dlse)[0])[..., None]
    dscores = np.where(visible, weights * (dweights - total), 0.0)
    draw = dscores * slope * (D**-0.5 if options.get("scale") is None else options["scale"])

    def transposed(x):
        return np.swapaxes(x, -1, -2)

    dq = _product(draw, scores, keys)
    dk = _product(transposed(draw), transposed(scores), q)
    dv = _product(transposed(weights * kept), transposed(scores), do)
    dk, dv = (x.reshape(B, G, H // G, S, x.shape[-1]).sum(2) for x in (dk, dv))
    return dq, dk, dv, dscores
