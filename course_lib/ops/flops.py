"""How many FLOPs `torch.utils.flop_counter.FlopCounterMode` counts: as many as of PyTorch's own.

They are those of convolutions and products; what it counts for PyTorch's convolutions, it counts
for ours, by its own formulas.
"""

import math

import torch
from torch.utils.flop_counter import _offsets_to_lengths, flop_registry, register_flop_formula

_aten = torch.ops.aten


def _conv2d(x, weight, bias, stride, padding, dilation, groups, *, out_val):
    options = stride, padding, dilation, False, [0, 0], groups
    return flop_registry[_aten.convolution](x, weight, bias, *options, out_val=out_val)


def _conv2d_backward(dy, x, weight, stride, padding, dilation, groups, needs, *, out_val):
    options = stride, padding, dilation, False, [0, 0], groups, needs
    return flop_registry[_aten.convolution_backward](dy, x, weight, None, *options, out_val=out_val)


def _conv2d_batch_norm(x, weight, *rest, out_val):
    return _conv2d(x, weight, None, *rest[4:8], out_val=out_val[0])


def _conv2d_batch_norm_backward(dy, x, weight, *rest, out_val):
    *options, needs = rest[5:]
    return _conv2d_backward(dy, x, weight, *options, [*needs, False], out_val=out_val[:3])


def _conv_transpose2d(
    x, weight, bias, stride, padding, output_padding, groups, dilation, *, out_val
):
    options = stride, padding, dilation, True, output_padding, groups
    return flop_registry[_aten.convolution](x, weight, bias, *options, out_val=out_val)


def _conv_transpose2d_backward(
    dy, x, weight, stride, padding, output_padding, groups, dilation, needs, *, out_val
):
    options = stride, padding, dilation, True, output_padding, groups, needs
    return flop_registry[_aten.convolution_backward](dy, x, weight, None, *options, out_val=out_val)


def _linear(input, weight, *_, out_val):
    return 2 * out_val.numel() * weight.shape[1]


def _linear_backward(dy, input, weight, y, needs, *, out_val):
    return 2 * dy.numel() * weight.shape[1] * sum(needs[:2])


def _pairs(q, k, q_starts, k_starts, max_q, max_k):
    """How many scores there are, of all heads; those that a mask leaves out are counted, too."""
    if q_starts is None:
        return q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
    lengths = (
        _offsets_to_lengths(starts, most) for starts, most in ((q_starts, max_q), (k_starts, max_k))
    )
    return q.shape[1] * sum(T * S for T, S in zip(*lengths, strict=True))


def _attention(q, k, v, mask, slopes, key_lengths, *starts, out_val):
    return 2 * _pairs(q, k, *starts[:4]) * (q.shape[-1] + v.shape[-1])


def _attention_backward(dy, q, k, v, *inputs, out_val):
    # The scores once more, and then the gradients of weights, v, q and k.
    return 2 * _pairs(q, k, *inputs[7:11]) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _squeeze_excite(x, weight1, *_, out_val):
    return 2 * 2 * x.shape[0] * math.prod(weight1.shape)


def _squeeze_excite_backward(dy, x, weight1, *_, out_val):
    return 2 * _squeeze_excite(x, weight1, out_val=out_val)


def register():
    """Tell PyTorch, once the operators are there."""
    for formula in (
        _attention, _attention_backward,
        _conv2d, _conv2d_backward, _conv2d_batch_norm, _conv2d_batch_norm_backward,
        _conv_transpose2d, _conv_transpose2d_backward, _linear, _linear_backward, _squeeze_excite,
        _squeeze_excite_backward,
    ):  # fmt: skip
        operator = getattr(torch.ops.course_lib, formula.__name__.removeprefix("_"))
        register_flop_formula(operator, get_raw=True)(formula)
