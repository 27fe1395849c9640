"""What both rungs need: how much of a row is seen, and what each kind of mask does to a score."""

from typing import NamedTuple

import numpy as np

from course_lib import cuda
from course_lib.kernels.blocks.constants import ZERO
from course_lib.kernels.blocks.indexing import divided
from course_lib.kernels.blocks.softmax_formulas import SOFTMAX
from course_lib.runtime.intrinsics import LOWEST, load

reciprocal = SOFTMAX.row_factor


class Rows(NamedTuple):
    """n_rows = B·H·T rows of n_cols = S scores, one after another, and what becomes of them.

    batch, head, row, col  elements of the mask from one batch, head, row and score to the next
    words                  whether a boolean mask can be read by words: a vector's scores at once
    """

    n_rows: int
    n_cols: int
    H: int
    T: int
    scale: float
    causal: bool
    batch: int
    head: int
    row: int
    col: int
    words: bool


@cuda.jit(device=True)
def seen_of_row(row, rows):
    """How many scores the row sees; 0 past the last row."""
    seen = rows.n_cols
    if rows.causal:
        seen = min(seen, np.int64(divided(row, rows.T)[1]) + 1)
    return np.int64(seen) if row < rows.n_rows else np.int64(0)


@cuda.jit(device=True)
def mask_of_row(row, rows):
    """Where the row's part of the mask begins."""
    rest, i = divided(row, rows.T)
    b, h = divided(rest, rows.H)
    return np.int64(b) * rows.batch + np.int64(h) * rows.head + np.int64(i) * rows.row


@cuda.jit(device=True)
def factor_of(total):
    """What exponentials are multiplied by, 1 / Σ; 0 in a row that sees nothing."""
    return reciprocal(total) if total != ZERO else ZERO


# ---- kinds of masks: how an element is read, and what it makes of a scaled score ----------------


@cuda.jit(device=True)
def _no_mark(mask, at):
    return ZERO


@cuda.jit(device=True)
def _flag(mask, at):
    return np.float32(mask[np.uint64(at)])


@cuda.jit(device=True)
def _unmasked(score, mark):
    return score


@cuda.jit(device=True)
def _if_seen(score, mark):
    return score if mark != ZERO else LOWEST


@cuda.jit(device=True)
def _add(score, mark):
    return score + mark


#: {kind of mask: (mark = read(mask, place), masked(score, mark))}
KINDS = {
    "plain": (_no_mark, _unmasked),
    "boolean": (_flag, _if_seen),
    "additive": (load, _add),
}
