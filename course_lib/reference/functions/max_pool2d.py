"""Max pooling with indices, window by window."""

import numpy as np

from .double import double


def max_pool2d(x, kernel_size, *, stride=None, padding=0, dilation=1, ceil_mode=False):
    """(y, indices): the largest element of each window of x, N·C·H·W, and its h·W + w.

    The first of equals counts; a NaN is larger than all, and the last of several counts.
    """
    (x,) = double(x)
    kernel, stride = _pair(kernel_size), _pair(kernel_size if stride is None else stride)
    padding, dilation = _pair(padding), _pair(dilation)
    N, C, H, W = x.shape
    sizes = [
        _output_size(*numbers, ceil_mode)
        for numbers in zip((H, W), kernel, stride, padding, dilation, strict=True)
    ]
    y = np.empty((N, C, *sizes))
    indices = np.empty((N, C, *sizes), np.int64)
    for oh in range(sizes[0]):
        for ow in range(sizes[1]):
            h = [oh * stride[0] - padding[0] + k * dilation[0] for k in range(kernel[0])]
            w = [ow * stride[1] - padding[1] + k * dilation[1] for k in range(kernel[1])]
            h, w = [i for i in h if i >= 0], [i for i in w if i >= 0]
            best = np.full((N, C), -np.inf)
            at = np.full((N, C), h[0] * W + w[0])
            for row in h:
                for col in w:
                    if row < H and col < W:
                        value = x[:, :, row, col]
                        larger = (value > best) | np.isnan(value)
                        best = np.where(larger, value, best)
                        at = np.where(larger, row * W + col, at)
            y[:, :, oh, ow], indices[:, :, oh, ow] = best, at
    return y, indices


def max_pool2d_backward(dy, indices, shape):
    """dx of `shape`: each dy added where the largest element of its window was."""
    (dy,) = double(dy)
    N, C, H, W = shape
    dx = np.zeros((N * C, H * W))
    planes = np.arange(N * C)[:, None]
    windows = N * C, dy.shape[2] * dy.shape[3]
    np.add.at(dx, (planes, np.asarray(indices).reshape(windows)), dy.reshape(windows))
    return dx.reshape(shape)


def _pair(value):
    return (value, value) if isinstance(value, int) else tuple(value)


def _output_size(n, kernel, stride, padding, dilation, ceil_mode):
    """Windows that fit; with `ceil_mode` also one that ends behind the padded image.

    None begins in the padding behind the image.
    """
    room = n + 2 * padding - dilation * (kernel - 1) - 1
    if not ceil_mode:
        return room // stride + 1
    found = -(-room // stride) + 1
    return found - ((found - 1) * stride >= n + padding)
