"""What an attention kernel is told beside its arrays: named numbers, which it reads by name.

Arrays go flat, as the stretch of memory that they lie in; a `Place` says where in it an element is.
So (B, H, T, D) and (B, T, H, D), slices and stride-0 masks need no copies.
"""

from typing import NamedTuple

import numpy as np


class Shape(NamedTuple):
    """Extents of a problem.

    n_heads  H, of q; `share` of them read the same keys and values
    T, S     queries and keys of a sequence, at most
    rows     queries that lse counts for each head: T, or the queries of all packed sequences
    D, E     numbers of a query and of a key; of a value
    """

    n_heads: int
    share: int
    T: int
    S: int
    rows: int
    D: int
    E: int


class Place(NamedTuple):
    """Elements from one batch, head and row of an array to the next."""

    batch: int
    head: int
    row: int


class Look(NamedTuple):
    """Which keys a query looks at, and what scores become.

    Query i looks at keys i + low … i + high, counted from the key that stands beside it; `bits`
    are those below. The mask's and ALiBi's elements lie so far apart from batch to batch and so on.
    """

    bits: int
    scale: float
    softcap: float
    low: int
    high: int
    mask: int
    mask_head: int
    mask_row: int
    mask_col: int
    slopes: int
    slopes_head: int


class Dropping(NamedTuple):
    """Dropout of the weights, as `blocks.dropout_mask` takes it."""

    scale: float
    threshold: np.uint32
    offset: int
    key0: np.uint32
    key1: np.uint32


#: Bits of `Look.bits`.
LOWER_RIGHT, SOFTCAP, SLOPES, BIAS, ALLOWED, LENGTHS, PACKED, DROPOUT, DSCORES = (
    1 << n for n in range(9)
)
FAR = 1 << 40  # more keys than there are: no limit
