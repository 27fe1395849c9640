"""What networks share: layers that are computed at once, and a look at what they are given."""

from numbers import Integral

import torch
from torch.nn.modules.module import _has_any_global_hook

from course_lib import nn

_OURS = {nn.Conv2d, nn.BatchNorm2d, nn.Linear, nn.MaxPool2d, nn.ReLU}


class Steps(torch.nn.Sequential):
    """Layers one after another; a convolution, its batch norm and their ReLU at once, and so a
    pooling or a linear layer and its ReLU.

    They are called one by one where somebody has hooked or changed one of them, and where torch.fx
    traces, whose graph has a node for each layer.
    """

    def forward(self, x):
        layers, i = list(self), 0
        while i < len(layers):
            ahead = layers[i : i + 3]
            convolution = ahead.pop(0) if type(ahead[0]) is nn.Conv2d else None
            norm = ahead.pop(0) if ahead and type(ahead[0]) is nn.BatchNorm2d else None
            relu = ahead.pop(0) if ahead and type(ahead[0]) is nn.ReLU else None
            if norm is not None:
                x = normalised(x, convolution, norm, relu)
                i += 1 + (convolution is not None) + (relu is not None)
            elif i + 1 < len(layers) and type(layers[i + 1]) is nn.ReLU:
                x = rectified(x, *layers[i : i + 2])
                i += 2
            else:
                x = layers[i](x)
                i += 1
        return x


def normalised(x, convolution, norm, relu=None):
    """relu(norm(convolution(x))), for networks that hold layers by other names than `Steps`.

    convolution, relu  layers or None
    """
    if convolution is not None and not _are_plain((convolution, norm), x):
        x, convolution = convolution(x), None
    layers = (norm,) if relu is None else (norm, relu)
    if not _are_plain(layers, x):
        for layer in layers:
            x = layer(x)
        return x
    if convolution is None:
        return norm.normalised(x, relu is not None)
    return norm.normalised_convolution(convolution, x, relu is not None)


def rectified(x, layer, relu):
    """relu(layer(x)); at once where that is our max pooling or linear layer."""
    if type(layer) in (nn.MaxPool2d, nn.Linear) and _are_plain((layer, relu), x):
        if not getattr(layer, "return_indices", False):
            return layer.rectified(x)
    return relu(layer(x))


def _are_plain(layers, x):
    """Whether these are layers of ours that do what they are for, and nobody looks between them."""
    return (
        all([type(layer) in _OURS and not is_changed(layer) for layer in layers])
        and isinstance(x, torch.Tensor)
        and not _has_any_global_hook()
    )


def is_changed(layer):
    """Whether calling `layer` does more than its class's `forward`."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in vars(layer)
    )


def require_counts(**counts):
    """ValueError unless each is a whole number from 1 on."""
    for name, n in counts.items():
        if not _is_count(n):
            raise ValueError(f"{name} must be a whole number from 1 on, not {n!r}")


def require_widths(widths, n):
    """ValueError unless `widths` are `n` whole numbers from 1 on."""
    is_list = isinstance(widths, list | tuple)
    if not is_list or len(widths) != n or not all(map(_is_count, widths)):
        raise ValueError(f"widths must be {n} whole numbers from 1 on, not {widths!r}")


def _is_count(n):
    return isinstance(n, Integral) and not isinstance(n, bool) and n >= 1


def require_images(x, who, channels, least=1, size=None):
    """ValueError unless `x` is (N, channels, H, W), each way of `least` pixels, or just `size`.

    A module that calls it says ``torch.fx.wrap("require_images")``: it depends on shapes, and so
    is a node of its own in a graph of torch.fx.
    """
    shape = tuple(x.shape)
    fits = len(shape) == 4 and shape[1] == channels and min(shape[2:]) >= least
    if not fits or size is not None and shape[2:] != (size, size):
        wanted = f"(N, {channels}, H, W) of at least {least} pixels each way"
        if size is not None:
            wanted = f"(N, {channels}, {size}, {size})"
        raise ValueError(f"{who} expects {wanted}, not {shape}")
