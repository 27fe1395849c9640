"""Two-dimensional transposed convolution and its gradients, one tap of the filter at a time."""

import numpy as np

from .double import double


def _pair(value):
    return (value, value) if np.ndim(value) == 0 else tuple(value)


class _Taps:
    """Which pixels of the padded y each tap (r, s) of the filter adds to, and the sizes of it all.

    The padded y has `padding` more pixels on each side, which are cut off in the end.
    """

    def __init__(self, x, weight, stride, padding, output_padding, dilation, groups):
        N, C, *self.size = x.shape
        _, per_group, self.R, self.S = weight.shape
        self.stride, self.padding, self.dilation = map(_pair, (stride, padding, dilation))
        more, taps = _pair(output_padding), (self.R, self.S)
        self.padded_size = tuple(
            (self.size[a] - 1) * self.stride[a] + self.dilation[a] * (taps[a] - 1) + more[a] + 1
            for a in (0, 1)
        )
        self.x_groups = (N, groups, C // groups, *self.size)
        self.y_groups = (N, groups, per_group)
        self.weight_groups = (groups, C // groups, per_group, self.R, self.S)

    def __iter__(self):
        """Yield (r, s, the rows that tap adds to, the columns), the last two as slices."""
        for r, s in np.ndindex(self.R, self.S):
            rows, cols = (
                slice(tap * d, tap * d + step * (n - 1) + 1, step)
                for tap, d, step, n in zip(
                    (r, s), self.dilation, self.stride, self.size, strict=True
                )
            )
            yield r, s, rows, cols

    def inside(self, y):
        """The padded y without its padding; a view."""
        (p, q), (H, W) = self.padding, self.padded_size
        return y[..., p : H - p, q : W - q]


def conv_transpose2d(
    x, weight, bias=None, *, stride=1, padding=0, output_padding=0, dilation=1, groups=1
):
    """Each x[n, c, h, w]·weight[c, k, r, s] is added to y[n, k, h·stride − padding + r·dilation, …].

    x (N, C, H, W), weight (C, K/groups, R, S), bias (K,); what falls outside y is lost.
    """  # noqa: E501
    x, weight = double(x, weight)
    taps = _Taps(x, weight, stride, padding, output_padding, dilation, groups)
    x, w = x.reshape(taps.x_groups), weight.reshape(taps.weight_groups)
    y = np.zeros((*taps.y_groups, *taps.padded_size))
    for r, s, rows, cols in taps:
        y[..., rows, cols] += np.einsum("ngchw,gck->ngkhw", x, w[..., r, s])
    y = taps.inside(y)
    y = y.reshape(len(y), -1 if y.size else groups * y.shape[2], *y.shape[3:])
    return y if bias is None else y + double(bias)[0][:, None, None]


def conv_transpose2d_backward(
    dy, x, weight, *, stride=1, padding=0, output_padding=0, dilation=1, groups=1
):
    """(dx, dweight, dbias), from dy of y's shape."""
    dy, x, weight = double(dy, x, weight)
    taps = _Taps(x, weight, stride, padding, output_padding, dilation, groups)
    padded = np.zeros((*taps.y_groups, *taps.padded_size))
    inside = taps.inside(padded)
    inside[...] = dy.reshape(inside.shape)
    grouped, w = x.reshape(taps.x_groups), weight.reshape(taps.weight_groups)
    dx, dweight = np.zeros_like(grouped), np.zeros_like(w)
    for r, s, rows, cols in taps:
        dx += np.einsum("ngkhw,gck->ngchw", padded[..., rows, cols], w[..., r, s])
        dweight[..., r, s] = np.einsum("ngkhw,ngchw->gck", padded[..., rows, cols], grouped)
    return dx.reshape(x.shape), dweight.reshape(weight.shape), dy.sum((0, 2, 3))
