"""Images made larger or smaller by their nearest or their four surrounding pixels."""

import numpy as np

from .double import double


def _axis(n, n_out, scale_factor, mode, align_corners):
    """(n_out, n): how much of each pixel of a line each pixel of the new line is."""
    ratio = n / n_out if scale_factor is None else 1 / scale_factor
    at = np.arange(n_out)
    matrix = np.zeros((n_out, n))
    if mode == "nearest":
        # In float32, like PyTorch: which pixel is nearest depends on its rounding.
        places = np.floor(at.astype(np.float32) * np.float32(ratio)).astype(int)
        matrix[at, np.minimum(places, n - 1)] = 1
        return matrix
    if align_corners:
        places = at * ((n - 1) / (n_out - 1) if n_out > 1 else 0.0)
    else:
        places = np.maximum((at + 0.5) * ratio - 0.5, 0)
    first = np.minimum(places.astype(int), n - 1)
    second = np.minimum(first + 1, n - 1)
    share = np.clip(places - first, 0, 1)
    np.add.at(matrix, (at, first), 1 - share)
    np.add.at(matrix, (at, second), share)
    return matrix


def _matrices(shape, size, scale_factor, mode, align_corners):
    factors = (None, None) if scale_factor is None else scale_factor
    return [
        _axis(n, n_out, factor, mode, align_corners)
        for n, n_out, factor in zip(shape[2:], size, factors, strict=True)
    ]


def upsample(x, size, *, mode="nearest", align_corners=False, scale_factor=None):
    """x (N, C, H, W) with planes of `size`, by "nearest" or "bilinear".

    scale_factor  a pair, if that and not the sizes' ratio is what pixels are apart
    """
    (x,) = double(x)
    down, right = _matrices(x.shape, size, scale_factor, mode, align_corners)
    return np.einsum("ph,nchw,qw->ncpq", down, x, right)


def upsample_backward(dy, shape, *, mode="nearest", align_corners=False, scale_factor=None):
    """dx of `shape`, from dy."""
    (dy,) = double(dy)
    down, right = _matrices(shape, dy.shape[2:], scale_factor, mode, align_corners)
    return np.einsum("ph,ncpq,qw->nchw", down, dy, right)
