"""Multi-head attention on our kernels, and PyTorch's encoders, which would pass it by."""

import torch
import torch.nn.functional as F
from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer

MOST = 256  # elements of a head that kernels take


class MultiheadAttention(Layer, nn.MultiheadAttention):
    """As `torch.nn.MultiheadAttention`.

    With ``need_weights=False`` no weight is stored. With weights, the default as in PyTorch, the
    two products beside the softmax are PyTorch's. Nested tensors are refused. In inference
    `torch.nn.TransformerEncoderLayer` passes it by; ours does not.
    """

    inner = ("out_proj",)

    def forward(
        self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None,
        average_attn_weights=True, is_causal=False,
    ):  # fmt: skip
        if any(x.is_nested for x in (query, key, value)):
            raise RuntimeError("course_lib's MultiheadAttention takes no nested tensors: pad them")
        is_batched = F._mha_shape_check(
            query, key, value, key_padding_mask, attn_mask, self.num_heads
        )
        if is_causal and attn_mask is None:
            raise RuntimeError("Need attn_mask if specifying the is_causal hint.")
        self._require_sizes(query, key, value)
        is_causal = is_causal and key_padding_mask is None and not need_weights
        rows_first = not self.batch_first or not is_batched
        q, k, v = self._projected(query, key, value)
        q, k, v = (x if is_batched else x.unsqueeze(1) for x in (q, k, v))
        q, k, v = (x.transpose(0, 1) if rows_first else x for x in (q, k, v))  # (N, L, E)
        mask = None
        if not is_causal:
            mask = self._mask(attn_mask, key_padding_mask, q.shape[:2], k.shape[1], q.dtype)
        k, v, n_more = self._longer(k, v)
        if n_more and mask is not None:
            mask = F.pad(mask, (0, n_more), value=mask.dtype is torch.bool)
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        p = self.dropout if self.training else 0.0
        if need_weights:
            o, weights = self._with_weights(q, k, v, mask, p)
        else:
            o, weights = ops.scaled_dot_product_attention(q, k, v, mask, p, is_causal), None
        o = o.permute(2, 0, 1, 3) if rows_first else o.transpose(1, 2)
        o = ops.linear(o.flatten(-2), self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if is_batched:
            return o, weights
        return o.squeeze(1), weights if weights is None else weights.squeeze(0)

    def _require_sizes(self, query, key, value):
        wanted = self.embed_dim, self.kdim, self.vdim
        found = tuple(x.shape[-1] for x in (query, key, value))
        if found != wanted or key.shape[:-1] != value.shape[:-1]:
            shapes = ", ".join(str(tuple(x.shape)) for x in (query, key, value))
            raise AssertionError(
                f"query, key and value must have {', '.join(map(str, wanted))} features, and key "
                f"and value the same rows; their shapes are {shapes}"
            )

    def _projected(self, query, key, value):
        bias = self.in_proj_bias
        if self.in_proj_weight is None:
            weights = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        elif query is key is value:
            return ops.linear(query, self.in_proj_weight, bias).chunk(3, -1)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if bias is None else bias.chunk(3)
        return map(ops.linear, (query, key, value), weights, biases)

    def _longer(self, k, v):
        """k and v with what the options append to every sequence, and how many rows that is."""
        n, more = k.shape[0], []
        if self.bias_k is not None:
            more.append((self.bias_k, self.bias_v))
        if self.add_zero_attn:
            more.append((k.new_zeros(1, 1, k.shape[-1]),) * 2)
        for rows in more:
            k, v = (
                torch.cat((x, row.expand(n, -1, -1)), 1)
                for x, row in zip((k, v), rows, strict=True)
            )
        return k, v, len(more)

    def _mask(self, attn_mask, padding, rows, n_keys, dtype):
        """`attn_mask` and `padding` in one: bool, True where a query may look, or numbers."""
        if attn_mask is None and padding is None:
            return None
        (n, n_rows), H = rows, self.num_heads
        if attn_mask is not None:
            wanted = (n_rows, n_keys) if attn_mask.dim() == 2 else (n * H, n_rows, n_keys)
            if tuple(attn_mask.shape) != wanted:
                raise RuntimeError(
                    f"The shape of the {attn_mask.dim()}D attn_mask is {tuple(attn_mask.shape)}, "
                    f"but should be {wanted}."
                )
            if attn_mask.dim() == 3:
                attn_mask = attn_mask.unflatten(0, (n, H))
        if padding is not None:
            if padding.numel() != n * n_keys:
                raise AssertionError(
                    f"key_padding_mask must be of {n} × {n_keys}, not {tuple(padding.shape)}"
                )
            padding = padding.reshape(n, 1, 1, n_keys)
        given = [x for x in (attn_mask, padding) if x is not None]
        if all(x.dtype is torch.bool for x in given):
            masked = given[0] if len(given) == 1 else given[0] | given[1]
            return ~(masked if masked.dim() > 2 else masked[None, None])
        numbers = [
            F._canonical_mask(x, "attn_mask", None, "", dtype, check_other=False) for x in given
        ]
        mask = numbers[0] if len(given) == 1 else numbers[0] + numbers[1]
        return mask if mask.dim() > 2 else mask[None, None]

    def _with_weights(self, q, k, v, mask, p):
        scores = (q * q.shape[-1] ** -0.5) @ k.mT
        if mask is not None:
            masked = mask.dtype is torch.bool
            scores = scores.masked_fill(~mask, float("-inf")) if masked else scores + mask
        weights = ops.softmax(scores, -1)
        weights = ops.dropout(weights, p) if p else weights
        return weights @ v, weights

    @staticmethod
    def fault(layer):
        return fault_of_heads(layer)


def fault_of_heads(layer):
    """Why our kernels can't compute attention with heads as those of `layer`; or None."""
    if layer.head_dim > MOST:
        return f"its heads have {layer.head_dim} elements; our kernels take {MOST} at most"
    return None


def _always(value, name):
    """An attribute that reads as `value`, whatever PyTorch's class has written to it."""
    return property(lambda self: value, lambda self, given: vars(self).update({name: given}))


class TransformerEncoderLayer(Layer, nn.TransformerEncoderLayer):
    """As `torch.nn.TransformerEncoderLayer`; it calls its layers in inference, too.

    PyTorch's calls one operator of its own there, where its activation is ReLU or GELU.
    """

    holds_layers = True
    activation_relu_or_gelu = _always(0, "activation_relu_or_gelu")


class TransformerEncoder(Layer, nn.TransformerEncoder):
    """As `torch.nn.TransformerEncoder`; its layers get padded tensors in inference, too."""

    holds_layers = True
    use_nested_tensor = _always(False, "use_nested_tensor")
