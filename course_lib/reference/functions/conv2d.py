"""Two-dimensional convolution and its gradients, one tap of the filter at a time."""

import numpy as np

from .double import double


def _pair(value):
    return (value, value) if np.ndim(value) == 0 else tuple(value)


class _Taps:
    """Which pixels of the padded x each tap (r, s) of the filter meets, and the sizes of it all."""

    def __init__(self, x, weight, stride, padding, dilation, groups):
        N, C, H, W = x.shape
        K, _, self.R, self.S = weight.shape
        self.stride, self.padding, self.dilation = map(_pair, (stride, padding, dilation))
        size, taps = (H, W), (self.R, self.S)
        self.size = tuple(
            (size[a] + 2 * self.padding[a] - self.dilation[a] * (taps[a] - 1) - 1) // self.stride[a]
            + 1
            for a in (0, 1)
        )
        self.x_groups = (N, groups, C // groups)
        self.y_groups = (N, groups, K // groups, *self.size)
        self.weight_groups = (groups, K // groups, C // groups, self.R, self.S)

    def __iter__(self):
        """Yield (r, s, the rows that tap meets, the columns), the last two as slices."""
        for r, s in np.ndindex(self.R, self.S):
            rows, cols = (
                slice(tap * d, tap * d + step * (n - 1) + 1, step)
                for tap, d, step, n in zip(
                    (r, s), self.dilation, self.stride, self.size, strict=True
                )
            )
            yield r, s, rows, cols

    def padded(self, x):
        """x with its groups apart and zeros around it."""
        (p, q), shape = self.padding, x.shape
        x = np.pad(x, ((0, 0), (0, 0), (p, p), (q, q)))
        return x.reshape(*self.x_groups, shape[2] + 2 * p, shape[3] + 2 * q)


def conv2d(x, weight, bias=None, *, stride=1, padding=0, dilation=1, groups=1):
    """y[n, k, p, q] = Σ over c, r, s of x[n, c, p·stride − padding + r·dilation, …]·weight[k, c, r, s].

    x (N, C, H, W), weight (K, C/groups, R, S), bias (K,); what lies outside x is 0.
    """  # noqa: E501
    x, weight = double(x, weight)
    taps = _Taps(x, weight, stride, padding, dilation, groups)
    x, w = taps.padded(x), weight.reshape(taps.weight_groups)
    y = np.zeros(taps.y_groups)
    for r, s, rows, cols in taps:
        y += np.einsum("ngchw,gkc->ngkhw", x[..., rows, cols], w[..., r, s])
    y = y.reshape(len(y), len(weight), *taps.size)
    return y if bias is None else y + double(bias)[0][:, None, None]


def conv2d_backward(dy, x, weight, *, stride=1, padding=0, dilation=1, groups=1):
    """(dx, dweight, dbias), from dy of y's shape."""
    dy, x, weight = double(dy, x, weight)
    taps = _Taps(x, weight, stride, padding, dilation, groups)
    grouped = dy.reshape(taps.y_groups)
    w, padded = weight.reshape(taps.weight_groups), taps.padded(x)
    dx, dweight = np.zeros_like(padded), np.zeros_like(w)
    for r, s, rows, cols in taps:
        dx[..., rows, cols] += np.einsum("ngkhw,gkc->ngchw", grouped, w[..., r, s])
        dweight[..., r, s] = np.einsum("ngkhw,ngchw->gkc", grouped, padded[..., rows, cols])
    (p, q), (H, W) = taps.padding, x.shape[2:]
    dx = dx[..., p : p + H, q : q + W].reshape(x.shape)
    return dx, dweight.reshape(weight.shape), dy.sum((0, 2, 3))
