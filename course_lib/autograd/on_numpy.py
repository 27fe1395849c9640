"""What layers compute with on a CPU: the same calls as `course_lib.kernels`, in NumPy and BLAS.

Each class here stands for the kernels of its name, with `forward` and `backward` of the same
arguments. A convolution is a matrix product for each image: the windows of the image are written
side by side (`im2col`, Chellapilla, Puri and Simard, 2006), so that BLAS does the work; no Python
loop runs over pixels. Results have the dtype of x. Derivations: notebooks 08 to 10.
"""

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view


class conv2d:
    """`kernels.conv2d`; weight is (K, C, R, S), `stride` and `padding` are numbers."""

    @staticmethod
    def forward(x, weight, bias=None, *, stride=1, padding=0):
        K, _, R, S = weight.shape
        by_term = weight.reshape(K, -1)
        y = None
        for n, image in enumerate(_padded(x, padding)):
            terms, size = _im2col(image, R, S, stride)
            if y is None:
                y = np.empty((len(x), K, *size), x.dtype)
            np.matmul(by_term, terms, out=y[n].reshape(K, -1))
        if y is None:  # an empty batch
            size = (_length(x.shape[a], weight.shape[a], stride, padding) for a in (2, 3))
            return np.empty((0, K, *size), x.dtype)
        if bias is not None:
            y += bias[:, None, None]
        return y

    @staticmethod
    def backward(
        dy, x, weight, *, stride=1, padding=0, with_bias=True, needs=(True, True, True)
    ):
        K, C, R, S = weight.shape
        by_term = weight.reshape(K, -1)
        dx = conv2d.dx(dy, x.shape, weight, stride=stride, padding=padding) if needs[0] else None
        dweight = None
        if needs[1]:
            dweight = np.zeros_like(by_term)
            for image, of_y in zip(_padded(x, padding), dy, strict=True):
                dweight += of_y.reshape(K, -1) @ _im2col(image, R, S, stride)[0].T
            dweight = dweight.reshape(weight.shape)
        dbias = dy.sum((0, 2, 3), dtype=dy.dtype) if needs[2] and with_bias else None
        return dx, dweight, dbias

    @staticmethod
    def dx(dy, x_shape, weight, *, stride=1, padding=0):
        """The gradient of x alone: each pixel of dy is spread over the window it was made from."""
        K, C, R, S = weight.shape
        N, _, H, W = x_shape
        P, Q = dy.shape[2:]
        transposed = weight.reshape(K, -1).T
        padded = np.zeros((N, C, H + 2 * padding, W + 2 * padding), dy.dtype)
        for n in range(N):
            terms = (transposed @ dy[n].reshape(K, -1)).reshape(C, R, S, P, Q)
            for r in range(R):
                for s in range(S):
                    rows = slice(r, r + stride * (P - 1) + 1, stride)
                    cols = slice(s, s + stride * (Q - 1) + 1, stride)
                    padded[n, :, rows, cols] += terms[:, r, s]
        return padded[:, :, padding : padding + H, padding : padding + W]


class conv_transpose2d:
    """`kernels.conv_transpose2d`; weight is (C, K, R, S).

    It is the gradient of a convolution with respect to its input, and its own gradient is that
    convolution. Derivation: the notebook on transposed convolution.
    """

    @staticmethod
    def forward(x, weight, bias=None, *, stride=1, padding=0):
        N, _, H, W = x.shape
        _, K, R, S = weight.shape
        size = ((H - 1) * stride - 2 * padding + R, (W - 1) * stride - 2 * padding + S)
        y = conv2d.dx(x, (N, K, *size), weight, stride=stride, padding=padding)
        return y if bias is None else y + bias[:, None, None]

    @staticmethod
    def backward(
        dy, x, weight, *, stride=1, padding=0, with_bias=True, needs=(True, True, True)
    ):
        options = {"stride": stride, "padding": padding}
        dx = conv2d.forward(dy, weight, **options) if needs[0] else None
        dweight = None
        if needs[1]:
            _, dweight, _ = conv2d.backward(
                x, dy, weight, **options, with_bias=False, needs=(False, True, False)
            )
        dbias = dy.sum((0, 2, 3), dtype=dy.dtype) if needs[2] and with_bias else None
        return dx, dweight, dbias


class batch_norm:
    """`kernels.batch_norm`: over all axes but the second."""

    @staticmethod
    def forward(x, weight, bias, running_mean, running_var, *, momentum=0.1, eps=1e-5):
        count = x.size // max(1, x.shape[1])
        if count < 2:
            raise ValueError(f"a variance needs two values a channel, but x has shape {x.shape}")
        mean = x.mean((0, 2, 3), dtype=x.dtype)
        centred = x - _by_channel(mean)
        variance = np.square(centred).mean((0, 2, 3), dtype=x.dtype)
        running_mean += (mean - running_mean) * x.dtype.type(momentum)
        unbiased = variance * x.dtype.type(count / (count - 1))
        running_var += (unbiased - running_var) * x.dtype.type(momentum)
        rstd = 1 / np.sqrt(variance + x.dtype.type(eps))
        return centred * _by_channel(rstd * weight) + _by_channel(bias), mean, rstd

    @staticmethod
    def inference(x, weight, bias, running_mean, running_var, *, eps=1e-5):
        rstd = 1 / np.sqrt(running_var + x.dtype.type(eps))
        return (x - _by_channel(running_mean)) * _by_channel(rstd * weight) + _by_channel(bias)

    @staticmethod
    def backward(dy, x, weight, mean, rstd, *, training=True):
        x_hat = (x - _by_channel(mean)) * _by_channel(rstd)
        dweight, dbias = ((a).sum((0, 2, 3), dtype=x.dtype) for a in (dy * x_hat, dy))
        if training:
            count = x.dtype.type(x.size // x.shape[1])
            dy = dy - (_by_channel(dbias) + x_hat * _by_channel(dweight)) / count
        return dy * _by_channel(rstd * weight), dweight, dbias


class max_pool2d:
    """`kernels.max_pool2d`, with an index into the window for each result."""

    @staticmethod
    def forward(x, kernel_size, *, stride=None):
        stride = stride or kernel_size
        size = kernel_size, kernel_size
        windows = sliding_window_view(x, size, (2, 3))[:, :, ::stride, ::stride]
        windows = windows.reshape(*windows.shape[:4], -1)
        indices = windows.argmax(-1)[..., None]
        return np.take_along_axis(windows, indices, -1)[..., 0], indices[..., 0].astype(np.uint8)

    @staticmethod
    def backward(dy, indices, shape, kernel_size, *, stride=None):
        stride = stride or kernel_size
        dx = np.zeros(shape, dy.dtype)
        P, Q = dy.shape[2:]
        for index in range(kernel_size**2):
            r, s = divmod(index, kernel_size)
            rows = slice(r, r + stride * (P - 1) + 1, stride)
            cols = slice(s, s + stride * (Q - 1) + 1, stride)
            dx[:, :, rows, cols] += dy * (indices == index)
        return dx


class relu:
    """`kernels.activation.relu`: max(x, 0); a NaN passes."""

    @staticmethod
    def forward(x):
        return np.maximum(x, x.dtype.type(0))

    @staticmethod
    def backward(dy, y):
        return dy * (y > 0)


def _by_channel(a):
    return a[:, None, None]


def _padded(x, padding):
    if padding == 0:
        return x
    return np.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))


def _length(size, taps, stride, padding):
    return (size + 2 * padding - taps) // stride + 1


def _im2col(image, R, S, stride):
    """(C·R·S, P·Q) of a padded image (C, H, W), and (P, Q): column pq is the window of a result."""
    windows = sliding_window_view(image, (R, S), (1, 2))[:, ::stride, ::stride]
    size = windows.shape[1:3]
    return windows.transpose(0, 3, 4, 1, 2).reshape(-1, size[0] * size[1]), size
