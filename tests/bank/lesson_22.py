"""Of lesson 22: a step of the online softmax for a whole tile, in NumPy."""

import math

import numpy as np

from bank import right
from bank.mistakes import mistakes


@right("tile_step")
def tile_step_by_rows(m, s, tile):
    m_new, s_new = m.copy(), s.copy()
    for i, row in enumerate(tile):
        m_new[i] = max(m[i], row.max())
        if m_new[i] > -math.inf:
            s_new[i] = s[i] * np.exp(m[i] - m_new[i]) + np.exp(row - m_new[i]).sum()
    return m_new, s_new


@right("tile_step")
def tile_step_as_a_merge(m, s, tile):
    m_tile = tile.max(1)
    seen = np.maximum(m_tile, np.float32(-1e38))
    s_tile = np.exp(tile - seen[:, None]).sum(1)
    m_new = np.maximum(m, m_tile)
    base = np.maximum(m_new, np.float32(-1e38))
    return m_new, s * np.exp(m - base) + s_tile * np.exp(np.maximum(m_tile, -1e38) - base)


mistakes("tile_step",
    ("tile_step_keeps_the_sum", "wrong values in s_new", "s * np.exp(m - shift)", "s"),
    ("tile_step_without_guard", "wrong values in s_new|nan",
     "np.where(np.isneginf(largest), np.float32(0), largest)", "largest"),
    ("tile_step_forgets_m", "wrong values in", "np.maximum(m, tile.max(1))", "tile.max(1)"),
    ("tile_step_old_shift", "wrong values in s_new|inf",
     "np.where(np.isneginf(largest), np.float32(0), largest)",
     "np.where(np.isneginf(m), np.float32(0), m)"),
    ("tile_step_one_maximum", "wrong values in m_new", "tile.max(1)", "tile.max()"),
    ("tile_step_one_sum", "wrong values in s_new", ".sum(1)", ".sum()"),
    ("tile_step_returns_old_m", "wrong values in m_new", "return largest,", "return m,"),
    ("tile_step_factor_upside_down", "wrong values in s_new|inf", "m - shift", "shift - m"),
    ("tile_step_of_columns", "shape|wrong|broadcast", "tile.max(1)", "tile.max(0)"),
    ("tile_step_forgets_s", "wrong values in s_new", "s * np.exp(m - shift) + ", ""))
