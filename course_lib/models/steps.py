"""What networks share: batch norm and ReLU in one pass, and a look at what they are given."""

from numbers import Integral

import torch
from torch.nn.modules.module import _has_any_global_hook

from course_lib import nn


class Steps(torch.nn.Sequential):
    """Layers one after another; our batch norm and a ReLU behind it in one pass over memory.

    The two are called one by one where somebody has hooked or changed one of them, and where
    torch.fx traces, whose graph has a node for each layer.
    """

    def forward(self, x):
        layers, i = list(self), 0
        while i < len(layers):
            together = i + 1 < len(layers) and _is_one_pass(*layers[i : i + 2], x)
            x = layers[i].normalised(x, relu=True) if together else layers[i](x)
            i += 2 if together else 1
        return x


def normalised_relu(norm, relu, x):
    """relu(norm(x)), as `Steps` compute it, for networks that hold the two by other names."""
    return norm.normalised(x, relu=True) if _is_one_pass(norm, relu, x) else relu(norm(x))


def _is_one_pass(norm, relu, x):
    return (
        type(norm) is nn.BatchNorm2d
        and type(relu) is nn.ReLU
        and isinstance(x, torch.Tensor)
        and not any(is_changed(layer) for layer in (norm, relu))
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
