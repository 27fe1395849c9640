"""Lesson 22: the same kernel elsewhere: numba-cuda-mlir, CUDA C++, Triton, cuTile.

| exercise | it gets | what is new |
|---|---|---|
| tile_step | m and s of each row so far, the next tile of the rows | a step for a whole tile |

m and s are float32 of (rows,), tile is float32 of (rows, columns) and has minus infinity where a
row has no number. Milakov and Gimelshein, Online normalizer calculation for softmax (2018, arXiv
1805.02867), section 3.1: tiles are merged as numbers are.
"""

import numpy as np

from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.plain import with_plain_numbers
from course_lib.teach.exercise import Exercise, Tolerance, case


def tile_step(m, s, tile):
    largest = np.maximum(m, tile.max(1))
    shift = np.where(np.isneginf(largest), np.float32(0), largest)
    return largest, s * np.exp(m - shift) + np.exp(tile - shift[:, None]).sum(1)


def _tile_reference(m, s, tile):
    largest = np.column_stack([m, tile]).max(1)
    base = np.where(np.isneginf(largest), 0.0, largest)
    return largest, s * np.exp(m - base) + np.exp(tile - base[:, None]).sum(1)


def _rows(rng, rows, columns):
    """Return rows of all kinds: far up, far down, far apart, without a number in either part."""
    m, tile = numbers(rng, rows, 2.0), numbers(rng, (rows, columns), 2.0)
    s = (1 + 9 * rng.random(rows)).astype(np.float32)
    kind = np.arange(rows) % 13
    for which, of_m, of_tile in ((1, 1e4, 1e4), (2, -1e4, -1e4), (3, 300, 0), (4, 0, 300)):
        m[kind == which] += np.float32(of_m)
        tile[kind == which] += np.float32(of_tile)
    tile[np.isin(kind, (5, 6)), columns // 2 + 1 :] = -np.inf  # the end of a row
    tile[np.isin(kind, (7, 8))] = -np.inf
    begins = np.isin(kind, (6, 8, 9, 10))
    m[begins], s[begins] = -np.inf, 0
    tile[kind == 10] -= np.float32(200)
    m[kind == 11] = tile[kind == 11].max(1)
    return {"m": m, "s": s, "tile": tile}


def _tile_cases(rng):
    sizes = [
        (1, 1),
        (2, 3),
        (5, 1),
        (9, 4),
        (13, 8),
        (14, 33),
        (1, 200),
        (26, 17),
        (drawn(rng, 30, 38), 64),
        (drawn(rng, 41, 52), drawn(rng, 300, 400)),
    ]
    return [case(1, 1, **_rows(rng, rows, columns)) for rows, columns in sizes]


TILE_STEP = Exercise(
    name="tile_step",
    title="The online step for a whole tile",
    solution=tile_step,
    kind="function",
    reference=_tile_reference,
    cases=_tile_cases,
    tolerance=Tolerance(1e-5, 0.0, "differences, exponentials and a sum of 400 are rounded"),
    outputs=("m_new", "s_new"),
    dtype=np.float32,
    call=lambda function, run: with_plain_numbers(function, run, "m", "s", "tile"),
    hints=(
        "It is `online_merge` of lesson 3, of what there was before and a tile. What are the "
        "maximum and the sum of a tile alone, and which of the two sums must be corrected?",
        "The new maximum is that of the old one and of the tile's, row by row: `tile.max(1)`. The "
        "old sum is multiplied by exp(m - largest), and the tile's numbers are added as "
        "exp(tile - largest). A row without any number has largest = −∞: subtract 0 there.",
        "```python\nlargest = np.maximum(m, ...)\n"
        "shift = np.where(np.isneginf(largest), np.float32(0), ...)\n"
        "return largest, s * np.exp(...) + np.exp(tile - shift[:, None]).sum(...)\n```",
    ),
)
