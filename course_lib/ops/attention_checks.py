"""What attention refuses: tensors and options that don't go together."""

import torch

from course_lib.ops.checks import of_sums, require
from course_lib.ops.dropout import require_drawn, require_probability
from course_lib.ops.registration import require_floating_point


def sizes(q, k, q_starts, max_q, max_k):
    """(sequences, heads, queries and keys of a sequence at most)"""
    if q_starts is None:
        return q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    return q_starts.shape[0] - 1, q.shape[1], max_q, max_k


def check(
    q, k, v, mask, slopes, key_lengths, q_starts, k_starts, max_q, max_k, scale, causal,
    lower_right, left, right, softcap, dropout_p, with_lse=False,
):  # fmt: skip
    require_floating_point("attention", q.dtype, torch.float64)
    for name, x in (("q", q), ("k", k), ("v", v)):
        require(x, name, n_dims=4, dtypes=(q.dtype,))
    (B, H, _, D), (_, G, S, _) = q.shape, k.shape
    require(k, "k", shape=(B, G, S, D))
    require(v, "v", shape=(B, G, S, v.shape[-1]))
    if H % G if G else H:
        raise RuntimeError(f"q has {H} heads, which the {G} of k and v do not divide")
    packed = [x is not None for x in (q_starts, k_starts, max_q, max_k)]
    if any(packed):
        if not all(packed) or key_lengths is not None:
            raise RuntimeError(
                "packed sequences need q_starts, k_starts, max_q and max_k, all of them, and no "
                "key_lengths"
            )
        if B != 1:
            raise RuntimeError(f"packed sequences lie in one batch; q has {B}")
        require(q_starts, "q_starts", n_dims=1, dtypes=(torch.int32,))
        require(k_starts, "k_starts", shape=q_starts.shape, dtypes=(torch.int32,))
        if not q_starts.shape[0] or max_q < 0 or max_k < 0:
            raise RuntimeError("starts need an element, and max_q and max_k be at least 0")
    require(key_lengths, "key_lengths", shape=(B,), dtypes=(torch.int32,))
    all_scores = sizes(q, k, q_starts, max_q, max_k)
    if slopes is not None:
        shape = all_scores[:2] if slopes.dim() == 2 else (H,)
        require(slopes, "slopes", shape=shape, dtypes=(torch.float32,))
    if mask is not None:
        require(mask, "mask", dtypes=(torch.bool, torch.float32, q.dtype))
        extents = (1,) * (4 - mask.dim()) + tuple(mask.shape)
        if mask.dim() > 4 or any(
            n != 1 and n != m for n, m in zip(extents, all_scores, strict=True)
        ):
            raise RuntimeError(
                f"mask must broadcast to {tuple(all_scores)}, (batch, heads, queries, keys), and "
                f"its shape is {tuple(mask.shape)}"
            )
    for name, reach in (("left", left), ("right", right)):
        if reach is not None and reach < 0:
            raise ValueError(f"window must reach 0 keys or more, and {name} is {reach}")
    if not softcap >= 0:
        raise ValueError(f"softcap must be a number from 0 on, not {softcap}")
    require_probability(dropout_p)


def check_backward(do, q, k, v, o, lse, dlse, drawn, *inputs):
    *inputs, of_mask = inputs
    check(q, k, v, *inputs)
    shape, sums = (*q.shape[:3], v.shape[-1]), of_sums(q.dtype)
    for name, x in (("do", do), ("o", o)):
        require(x, name, shape=shape, dtypes=(q.dtype,))
    for name, x in (("lse", lse), ("dlse", dlse)):
        require(x, name, shape=shape[:3], dtypes=(sums,))
    if drawn is not None:
        require_drawn(drawn)
    elif inputs[-1]:
        raise RuntimeError("drawn must be what the forward pass drew, where there is dropout")
    if of_mask and (inputs[0] is None or inputs[0].dtype is torch.bool):
        raise RuntimeError("of_mask needs an additive mask")


def require_within(q, k, key_lengths, q_starts, k_starts, max_q, max_k):
    """RuntimeError where lengths reach beyond tensors. Reads them: for a CPU alone."""
    S = k.shape[2]
    if key_lengths is not None and any(not 0 <= n <= S for n in key_lengths.tolist()):
        raise RuntimeError(
            f"key_lengths must be from 0 to {S}, the keys that there are, not "
            f"{key_lengths.tolist()}"
        )
    for name, starts, rows, most in (
        ("q_starts", q_starts, q.shape[2], max_q),
        ("k_starts", k_starts, S, max_k),
    ):
        if starts is not None:
            numbers, lengths = starts.tolist(), starts.diff().tolist()
            if numbers[0] < 0 or numbers[-1] > rows or any(not 0 <= n <= most for n in lengths):
                raise RuntimeError(
                    f"{name} must rise from 0 to {rows}, the rows that there are, by {most} at "
                    f"most, not {numbers}"
                )
