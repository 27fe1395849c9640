"""Tensor cores of Hopper: products whose left side is in registers.

As `warpgroup.multiply_tiles`, with 64 rows of A that the four warps of a warpgroup hold, 16 rows
each, in fragments as of `matrix`: 64 k are four fragments of 16, 16 words of a lane. B lies by rows
in shared memory (`warpgroup`).

=================================================== ==============================================
`multiply_held(acc, words, w, tiles, j, n, rows)`   begins acc += A·Bᵀ, A in words[w : w+16], B of
                                                    `n` rows and 64 k at tiles[j], 16-bit numbers.
                                                    Its panels lie `rows` times 128 bytes apart
                                                    (PTX wgmma.mma_async with A in registers)
`wait_for_products_but(count, acc, n)`              until all that this warpgroup began is complete
                                                    but the last `count` products; `acc` is
                                                    complete then (PTX wgmma.wait_group)
=================================================== ==============================================

`n` and `rows`, multiples of 64, and `count` are constants of the kernel. Neither `acc` nor the
words may be touched until the product is complete. Machine code in `ptx.held`, and a
twin, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import twins
from course_lib.runtime.intrinsics.matrix import _A_PLACES, _numbers
from course_lib.runtime.intrinsics.warpgroup import (
    B_BY_ROW,
    CHUNKS,
    ROWS,
    WARP_ROWS,
    _check_by_row,
    _check_columns,
    _check_tile,
    _chunk,
    _rows,
)

WORDS, STEPS = 16, 4  # of 64 k: words of a lane, fragments
MOST_GROUPS = 7
_LANES = np.arange(32)
_GROUP, _MEMBER = _LANES // 4, _LANES % 4


def _product(payloads):
    like = payloads[0][3]
    acc = np.array([payload[0] for payload in payloads], np.float32)
    words = np.array([payload[1] for payload in payloads], np.uint32).reshape(32, STEPS, 4)
    a = [np.ascontiguousarray(words[:, step]).take(_A_PLACES) for step in range(STEPS)]
    with np.errstate(invalid="ignore", over="ignore"):
        a = _numbers(np.concatenate(a, axis=1), like.dtype)
        b = _rows([payload[2] for payload in payloads], like, B_BY_ROW, like.dtype)
        product = (a @ b.T).reshape(WARP_ROWS, -1, 8)
        for r in range(4):
            found = product[_GROUP + r // 2 * 8, :, 2 * _MEMBER + r % 2]
            acc[:, r::4] = acc[:, r::4] + found
    return list(acc)


_multiply_together = simulator.whole_warp("multiply_held", _product)


def _multiply_held(acc, words, w, tiles, j, columns, rows):
    _check_columns(acc, columns)
    _check_by_row(tiles, columns, B_BY_ROW)
    _check_tile(tiles, j, B_BY_ROW)
    if rows % ROWS:
        raise ValueError(f"panels have a multiple of {ROWS} rows, not {rows}")
    tid = simulator.cuda.threadIdx.x
    row, chunk = tid % 32 // CHUNKS, tid % CHUNKS
    sums, a, b = [], [], []
    for r in range(columns // 2):
        sums.append(acc[r])
    for r in range(WORDS):
        a.append(words[w + r])
    for r in range(row, columns, 4):
        b.append(_chunk(tiles, j, r // ROWS * rows + r % ROWS, chunk))
    found = _multiply_together((sums, a, b, tiles))
    for r in range(columns // 2):
        acc[r] = found[r]


def _wait_for_products_but(count, acc, columns):
    if not 0 <= count <= MOST_GROUPS:
        raise ValueError(f"wait_for_products_but leaves 0 to {MOST_GROUPS} products, not {count}")
    _check_columns(acc, columns)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"multiply_held": _multiply_held, "wait_for_products_but": _wait_for_products_but}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.held")
multiply_held, wait_for_products_but = _here["multiply_held"], _here["wait_for_products_but"]
