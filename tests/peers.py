"""What PyTorch has for each function of `ops`: its own, or one made of its functions."""

import contextlib

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib import SIMULATED, ops


def __getattr__(name):
    return getattr(F, name)


def linear(input, weight, bias=None, *, relu=False):
    y = F.linear(input, weight, bias)
    return y.relu() if relu else y


def max_pool2d(input, *arguments, relu=False, **options):
    y = F.max_pool2d(input, *arguments, **options)
    return y.relu() if relu else y


def global_avg_pool(input):
    return F.adaptive_avg_pool2d(input, 1)


def batch_norm(input, running_mean, running_var, weight=None, bias=None, *arguments, relu=False,
               **options):  # fmt: skip
    # PyTorch 2.15's own gradient is wrong on a CPU for weights with gaps in memory.
    mean, var, weight, bias = (
        x if x is None or x.is_contiguous() else x.contiguous()
        for x in (running_mean, running_var, weight, bias)
    )
    y = F.batch_norm(input, mean, var, weight, bias, *arguments, **options)
    return y.relu() if relu else y


def conv2d_batch_norm(
    x, weight, scale, shift, running_mean, running_var, *, momentum=0.1, eps=1e-5, relu=False,
    **options,
):  # fmt: skip
    images = F.conv2d(x, weight, **options)
    return batch_norm(
        images, running_mean, running_var, scale, shift, True, momentum, eps, relu=relu
    )


def bn_relu_softmax(x, running_mean, running_var, weight, bias, eps=1e-5):
    y = batch_norm(x, running_mean, running_var, weight, bias, eps=eps)
    return torch.softmax(y.relu(), -1)


def attention(q, k, v, *, causal=False, lower_right=False, **options):
    mask = None
    if causal:
        T, S = q.shape[2], k.shape[2]
        mask = torch.ones(T, S, dtype=torch.bool, device=q.device)
        mask = mask.tril(S - T if lower_right else 0)
    shared = q.shape[1] != k.shape[1]
    return scaled_dot_product_attention(q, k, v, mask, enable_gqa=shared, **options)


def scaled_dot_product_attention(*qkv, **options):
    """On a GPU the composed one: the fused ones stop at masks and gradients in other layouts."""
    with contextlib.nullcontext() if SIMULATED else sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*qkv, **options)


def scaled_softmax(x, mask=None, *, scale=1.0, causal=False):
    """PyTorch's functions one after another; under autocast in float32, as its softmax is."""
    if x.is_cuda and torch.is_autocast_enabled("cuda"):
        x, mask = (y if y is None or y.dtype is torch.bool else y.float() for y in (x, mask))
    flags = mask is not None and mask.dtype is torch.bool
    scores = x * scale if mask is None or flags else x * scale + mask
    seen = torch.ones_like(x, dtype=torch.bool) & (mask if flags else True)
    scores = scores.masked_fill(~(seen.tril() if causal else seen), -torch.inf)
    nothing = (scores == -torch.inf).all(-1, keepdim=True)
    return torch.softmax(scores.masked_fill(nothing, 0), -1).masked_fill(nothing, 0)


def squeeze_excite(x, weight1, bias1, weight2, bias2, activation="silu", gate="sigmoid"):
    """What torchvision's block computes."""
    first, second = (w.reshape(*w.shape[:2], 1, 1) for w in (weight1, weight2))
    scale = F.conv2d(F.adaptive_avg_pool2d(x, 1), first, bias1)
    scale = F.conv2d(getattr(F, activation)(scale), second, bias2)
    return {"sigmoid": torch.sigmoid, "hard_sigmoid": F.hardsigmoid}[gate](scale) * x


def dice_loss(input, target, weight=None, ignore_index=-100, smooth=1.0, dice_weight=1.0,
              cross_entropy_weight=0.0):  # fmt: skip
    """The definition, differentiated by PyTorch; under autocast in float32, as its losses are."""
    if torch.is_autocast_enabled(input.device.type):
        input, weight = (x if x is None else x.float() for x in (input, weight))
    counted = target != ignore_index
    p = input.softmax(1) * counted.unsqueeze(1)
    t = F.one_hot(target.where(counted, 0), input.shape[1]).movedim(-1, 1) * counted.unsqueeze(1)
    axes = [0, *range(2, input.dim())]
    found = (2 * (p * t).sum(axes) + smooth) / (p.sum(axes) + t.sum(axes) + smooth)
    loss = dice_weight * (1 - found.mean())
    if cross_entropy_weight:
        entropy = F.cross_entropy(input, target, weight, ignore_index=ignore_index)
        loss = loss + cross_entropy_weight * entropy
    return loss


def dropout(input, p=0.5):
    """With the mask that ours draws from the generator as it is."""
    kept = ops.dropout(torch.ones_like(input.detach()), p) != 0
    return input * kept / (1 - p) if p < 1 else input * kept


def softmax_dropout(x, p=0.5, training=True, dim=-1):
    kept = ops.softmax_dropout(torch.zeros_like(x.detach()), p, training, dim) != 0
    y = torch.softmax(x, dim) * kept
    return y / (1 - p) if 0 < p < 1 and training else y
