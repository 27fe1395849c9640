"""What the targets of cross-entropy may be, as device functions.

Every option of the loss says how much of each class a row is to be, a number q for each. Part of
it may lie on one class, the row's *label*; part on all of them, a class's *share*:

================ ============================================ ================================
kind             on the label                                 share of every class c
================ ============================================ ================================
`indices`        weight[label]                                0
`smoothed`       (1 − smoothing)·weight[label]                smoothing/n_classes·weight[c]
`probabilities`  there is no label                            weight[c]·((1 − smoothing)·p[c]
                                                              + smoothing/n_classes)
================ ============================================ ================================

Kernels take `keep`, which is 1 − smoothing, and `spread`, smoothing/n_classes. `weighted` says
whether there are class weights; where not, `weight` is any array, and nobody reads it.
"""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.labels import index_label
from course_lib.runtime.intrinsics import load, load_vector


class Kind(NamedTuple):
    """One kind of target: device functions, and which of the two parts of q there are."""

    has_label: bool
    has_shares: bool
    label_of: object  # (target, row, n_classes, ignore_index)
    share_of: object  # (target, weight, weighted, i, col, keep, spread), i = row·n_classes + col
    load_shares: object  # (shares, target, i): 16 bytes, so many of what `shares_of` needs …
    shares_of: object  # (shares, weight, weighted, col, keep, spread, width): … made shares


@cuda.jit(device=True)
def no_label(target, row, n_classes, ignore_index):
    return 0


@cuda.jit(device=True)
def no_share(target, weight, weighted, i, col, keep, spread):
    return np.float32(0)


@cuda.jit(device=True)
def smoothed_share(target, weight, weighted, i, col, keep, spread):
    return spread * load(weight, col) if weighted else spread


@cuda.jit(device=True)
def probability_share(target, weight, weighted, i, col, keep, spread):
    share = load(target, i) * keep + spread
    return share * load(weight, col) if weighted else share


@cuda.jit(device=True)
def load_nothing(shares, target, i):
    pass


@cuda.jit(device=True)
def load_probabilities(shares, target, i):
    load_vector(shares, target, i)


@cuda.jit(device=True)
def no_shares(shares, weight, weighted, col, keep, spread, width):
    pass


@cuda.jit(device=True)
def smoothed_shares(shares, weight, weighted, col, keep, spread, width):
    for k in range(width):
        shares[k] = spread
    if weighted:
        for k in range(width):
            shares[k] = spread * load(weight, col + k)


@cuda.jit(device=True)
def probability_shares(shares, weight, weighted, col, keep, spread, width):
    for k in range(width):
        shares[k] = shares[k] * keep + spread
    if weighted:
        for k in range(width):
            shares[k] *= load(weight, col + k)


KINDS = {
    "indices": Kind(True, False, index_label, no_share, load_nothing, no_shares),
    "smoothed": Kind(True, True, index_label, smoothed_share, load_nothing, smoothed_shares),
    "probabilities": Kind(
        False, True, no_label, probability_share, load_probabilities, probability_shares
    ),
}
