"""Attention: causal from the lower right corner, with one pair of keys and values for all heads."""

import math

import numpy as np

from course_lib import reference
from course_lib.kernels import attention
from course_lib.operations.numbers import Draw, alike, gradient, torch
from course_lib.operations.passes import Operation, Pass
from course_lib.runtime.host.arrays import is_tensor

OPTIONS = dict(causal=True, lower_right=True)
MORE = 2  # keys than queries


def attention_operation():
    """x are the queries; keys and values are the halves of one array, `kv`, as of one product."""

    def forward_inputs(x):
        B, _, T, D = x.shape
        return {"q": x, "kv": gradient(x, (B, 1, T + MORE, 2 * D))}

    def backward_inputs(x):
        do = Draw(math.prod(x.shape) + 3).normal(tuple(x.shape))
        return {"do": alike(do, x)} | forward_inputs(x)

    def halves(q, kv):
        D = q.shape[-1]
        return q, kv[..., :D], kv[..., D:]

    def ours(q, kv, **options):
        return attention.forward(*halves(q, kv), **OPTIONS, **options)[0]

    def ours_backward(do, q, kv, variant):
        saved = attention.forward(*halves(q, kv), variant="tiled", **OPTIONS)
        return attention.backward(do, *halves(q, kv), *saved, variant=variant, **OPTIONS)

    def peer(q, kv):
        q, k, v = halves(q, kv)
        visible = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~visible.tril(MORE), -torch.inf)
        return torch.softmax(scores, -1) @ v

    def peer_backward(do, q, kv):
        q, kv = (each.detach().requires_grad_() for each in (q, kv))
        return torch.autograd.grad(peer(q, kv), (q, kv), do)

    def truth_backward(do, q, kv):
        dq, dk, dv, _ = reference.attention_backward(do, *halves(q, kv), **OPTIONS)
        return dq, np.concatenate((dk, dv), -1)

    def steepness(q, kv):
        """How much an error of a score's terms, relative to them, changes a weight."""
        q, k, _ = halves(np.abs(q), np.abs(kv))
        return 1 + (q @ np.swapaxes(k, -1, -2)).max((1, 2, 3), keepdims=True) * q.shape[-1] ** -0.5

    def scale(truth, q, kv):
        q_, k, v = halves(q, kv)
        return reference.attention(q_, k, np.abs(v), **OPTIONS)[0] * steepness(q, kv)

    def backward_scales(do, q, kv):
        """Of dq the magnitudes of its terms; of dk and dv the largest of all keys."""
        q_, k, v = halves(q, kv)
        weights = reference.softmax(reference.attention_scores(q_, k, **OPTIONS)[0])
        do, q_, k, v = map(np.abs, (do, q_, k, v))
        terms = do @ np.swapaxes(v, -1, -2)
        terms = weights * (terms + (weights * terms).sum(-1, keepdims=True))
        root, steep = q.shape[-1] ** -0.5, steepness(q, kv)
        sums = [  # over heads as well: all share keys
            (np.swapaxes(x, -1, -2) @ y).sum(1, keepdims=True).max((-2, -1), keepdims=True)
            for x, y in ((terms, q_), (weights, do))
        ]
        dk, dv = (np.broadcast_to(x, k.shape) for x in (sums[0] * root, sums[1]))
        return terms @ k * root * steep, joined(dk, dv) * steep

    def joined(dk, dv):
        return (torch.cat if is_tensor(dk) else np.concatenate)((dk, dv), -1)

    def chosen(ladder, *inputs):
        return attention.default_choice(ladder, *halves(*inputs), **OPTIONS).rung

    def of(number, ours, words):
        return Pass(
            attention.BACKWARD, backward_inputs, ours=ours,
            peer=lambda *inputs: peer_backward(*inputs)[number],
            truth=lambda *inputs: truth_backward(*inputs)[number],
            scale=lambda truth, *inputs: backward_scales(*inputs)[number],
            scale_in_words=words, whole=True,
            chosen=lambda do, *inputs: chosen(attention.BACKWARD, *inputs),
        )  # fmt: skip

    return Operation(
        attention,
        forward=Pass(
            attention.FORWARD, forward_inputs, ours=ours, peer=peer,
            truth=lambda q, kv: reference.attention(*halves(q, kv), **OPTIONS)[0],
            scale=scale, scale_in_words="Σ weights·|v|, times the largest score's terms",
            whole=True, out=True, chosen=lambda *inputs: chosen(attention.FORWARD, *inputs),
        ),
        backward=of(
            0, lambda *inputs, variant: ours_backward(*inputs, variant)[0],
            "the sum of its terms' magnitudes, times the largest score's",
        ),
        weights=of(
            1, lambda *inputs, variant: joined(*ours_backward(*inputs, variant)[1:]),
            "the largest sum of terms' magnitudes of any key, times the largest score's",
        ),
        n_dims=4, layout="queries, B x H x T x D", example=(2, 2, 20, 16),
    )  # fmt: skip
