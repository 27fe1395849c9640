"""Tensor cores of Hopper: four warps multiply tiles that stay in shared memory.

`matrix.multiply_add` takes its factors from registers, so that every number is first read from
shared memory by each warp that needs it. `wgmma.mma_async` reads them there by itself. Four
warps, a *warpgroup*, give it two *tiles*, and go on while it multiplies: A of 64 rows, B of up to
256 rows, each row 128 bytes along k: 32 float32, of which it sees the upper 19 bits (see `matrix`),
or 64 float16 or bfloat16. The sums of A·Bᵀ are float32, held in registers. Of the 64 rows each warp
of the four has 16; with ``g = lane // 4`` and ``t = lane % 4``, a thread has, for each 8 columns,

    acc[4j], acc[4j + 1]: row g, columns 8j + 2t and 8j + 2t + 1
    acc[4j + 2], acc[4j + 3]: row g + 8, the same columns

In shared memory a tile's rows follow each other, 128 bytes apart. The eight 16-byte chunks of a row
change places, so that neighbouring rows' equal chunks lie in different banks: chunk c of the row
that is the r-th 128 bytes of shared memory is at place ``c ^ (r % 8)``. A tile may begin at any
row: what matters is where a row lies, not which it is of the tile. (PTX ISA, "Asynchronous
Warpgroup Level Matrix Instructions": register fragments, 128-byte swizzle, K-major.)

16-bit tiles may also lie *by rows*, the row number fastest (MN-major), from a multiple of 1024
bytes on: in panels of 64 rows, one after another, each of 64 times 128 bytes, one for each k, whose
chunks change places by k. Of one panel the first or the last 32 rows may be B.

    show_to_products()               # all threads: what this thread stored
    cuda.syncthreads()               # all have stored the tiles
    multiply_tiles(acc, tiles, i, j, 256, 0)
    ...                              # the tiles are being multiplied: touch neither them nor acc
    wait_for_products(acc, 256)

========================================= ======================================================
`tiles_in_shared(like)`                   as `shared.dynamic_shared`, from a 1024-byte boundary on
                                          if the kernel has no shared arrays of fixed size
`show_to_products()`                      tensor cores may read what this thread has written to
                                          shared memory, `copy_async` included once it is waited
                                          for; a barrier must follow (PTX fence.proxy.async)
`multiply_tiles(acc, tiles, i, j, n,      begins acc += A·Bᵀ, A at tiles[i], B of `n` rows at
by_row)`                                  tiles[j]; which lie by rows, `by_row` says: A_BY_ROW,
                                          B_BY_ROW, their sum, or 0 (PTX wgmma.mma_async)
`multiply_halves(acc, tiles, i, j, n)`    begins acc = A·Bᵀ, from 0 on, of tiles that are made of
                                          bfloat16, whatever the array `tiles` is made of
`wait_for_earlier_products()`             until all that this warpgroup began is complete but the
                                          last product (PTX wgmma.wait_group 1)
`wait_for_products(acc, n)`               until `acc` is complete (PTX wgmma.wait_group 0)
========================================= ======================================================

`acc` is a local array of n/2 float32; `n`, a multiple of 8, and `by_row` are constants of the
kernel. All threads of the warpgroup call products and waits; blocks have one dimension. Compute
capability 9.0 and no other has the instruction: elsewhere they stop the kernel with a trap. Machine
code in `ptx.warpgroup`, and twins, as told in `intrinsics`. The twin multiplies at once, sums
exactly and rounds once: it does not see a tile overwritten too early.
"""

import ml_dtypes
import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import VECTOR_BYTES, twins
from course_lib.runtime.intrinsics.matrix import _numbers

ROWS, ROW_BYTES, BOUNDARY, MOST_COLUMNS = 64, 128, 1024, 256
A_BY_ROW, B_BY_ROW = 1, 2
WARP_ROWS, CHUNKS = 16, ROW_BYTES // VECTOR_BYTES
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
_LANES = np.arange(32)
_GROUP, _MEMBER = _LANES // 4, _LANES % 4


def _tiles_in_shared(like):
    return simulator.cuda.shared.array(0, like.dtype, alignment=BOUNDARY)


def _show_to_products():
    """PTX fence.proxy.async; in the simulator there is one way to memory."""


def _check_tile(tiles, i, by_row, halves=False):
    if tiles.dtype.itemsize not in (2, 4):
        raise TypeError(f"multiply_tiles takes float32, float16 or bfloat16, not {tiles.dtype}")
    boundary = BOUNDARY if by_row else ROW_BYTES
    beyond = i * tiles.dtype.itemsize % boundary
    if beyond and not (halves and beyond == ROW_BYTES // 2):
        raise ValueError(
            f"a tile at element {i} begins {beyond} bytes past a multiple of {boundary}: a tensor "
            "core would find its chunks in other places"
        )


def _check_columns(acc, columns):
    if columns % 8 or not 8 <= columns <= MOST_COLUMNS:
        raise ValueError(f"products have 8, 16 … {MOST_COLUMNS} columns, not {columns}")
    if len(acc) < columns // 2:
        raise ValueError(f"sums of {columns} columns take {columns // 2} float32, not {len(acc)}")


def _check_by_row(tiles, columns, by_row, least=ROWS):
    if by_row not in (0, A_BY_ROW, B_BY_ROW, A_BY_ROW + B_BY_ROW):
        raise ValueError(f"by_row is a sum of {A_BY_ROW} and {B_BY_ROW}, not {by_row}")
    if by_row and tiles.dtype.itemsize != 2:
        raise TypeError(f"tiles by rows are of 16-bit numbers, not {tiles.dtype}")
    if by_row & B_BY_ROW and columns % ROWS and columns != least:
        raise ValueError(f"tiles by rows have panels of {ROWS} columns, which {columns} are not")


def _rows(words, like, by_row, kind):
    """Numbers of a tile, given what each lane read: 128 bytes by each eight lanes."""
    words = np.concatenate([np.array(part, like.dtype) for part in zip(*words, strict=True)])
    size = ROW_BYTES // like.dtype.itemsize
    found = _numbers(words.reshape(-1, size).view(np.uint32), kind)
    if by_row:  # panels of k by row
        return found.reshape(-1, size, size).swapaxes(1, 2).reshape(-1, size)
    return found


def _product(payloads):
    like, kind = payloads[0][3], payloads[0][6]
    acc = np.array([payload[0] for payload in payloads], np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        a, b = (
            _rows([payload[part] for payload in payloads], like, payloads[0][4] & flag, kind)
            for part, flag in ((1, A_BY_ROW), (2, B_BY_ROW))
        )
        b = b[payloads[0][7] :][: 2 * acc.shape[1]]
        product = (a[payloads[0][5] :][:WARP_ROWS] @ b.T).reshape(WARP_ROWS, -1, 8)
        for r in range(4):
            found = product[_GROUP + r // 2 * 8, :, 2 * _MEMBER + r % 2]
            acc[:, r::4] = acc[:, r::4] + found
    return list(acc)


_multiply_together = simulator.whole_warp("multiply_tiles", _product)


def _chunk(tiles, i, row, chunk):
    width = VECTOR_BYTES // tiles.dtype.itemsize
    row += i // (CHUNKS * width)
    place = row * CHUNKS * width + (chunk ^ row % 8) * width
    return simulator.read_elements(tiles, place, width)


def _multiply_tiles(acc, tiles, i, j, columns, by_row):
    _check_columns(acc, columns)
    _check_by_row(tiles, columns, by_row, least=ROWS // 2)
    _check_tile(tiles, i, by_row & A_BY_ROW)
    of_panels = by_row & B_BY_ROW
    _check_tile(tiles, j, of_panels, of_panels and columns < ROWS)
    sums = []
    for r in range(columns // 2):
        sums.append(acc[r])
    _multiply(acc, sums, tiles, i, j, columns, by_row, tiles.dtype)


def _multiply_halves(acc, tiles, i, j, columns):
    _check_columns(acc, columns)
    _check_tile(tiles, i, 0)
    _check_tile(tiles, j, 0)
    _multiply(acc, [np.float32(0)] * (columns // 2), tiles, i, j, columns, 0, _BFLOAT16)


def _multiply(acc, sums, tiles, i, j, columns, by_row, kind):
    tid = simulator.cuda.threadIdx.x
    row, chunk = tid % 32 // CHUNKS, tid % CHUNKS
    # Of a tile of A by rows, a warp finds its rows at every k.
    first, count = tid // 32 % 4 * WARP_ROWS, WARP_ROWS
    offset = 0
    if by_row & A_BY_ROW:
        offset, first, count = first, 0, ROWS
    # Of half a panel too, a warp finds the whole of it.
    half, lines = 0, columns
    if by_row & B_BY_ROW:
        half, lines = j % ROWS, max(columns, ROWS)
    a, b = [], []
    for r in range(row, count, 4):
        a.append(_chunk(tiles, i, first + r, chunk))
    for r in range(row, lines, 4):
        b.append(_chunk(tiles, j - half, r, chunk))
    found = _multiply_together((sums, a, b, tiles, by_row, offset, kind, half))
    for r in range(columns // 2):
        acc[r] = found[r]


def _wait_for_earlier_products():
    """PTX wgmma.wait_group 1; nothing is on its way in the simulator."""


def _wait_for_products(acc, columns):
    _check_columns(acc, columns)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {
    "tiles_in_shared": _tiles_in_shared,
    "show_to_products": _show_to_products,
    "multiply_tiles": _multiply_tiles,
    "multiply_halves": _multiply_halves,
    "wait_for_earlier_products": _wait_for_earlier_products,
    "wait_for_products": _wait_for_products,
}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.warpgroup")
tiles_in_shared, show_to_products = _here["tiles_in_shared"], _here["show_to_products"]
multiply_tiles, wait_for_products = _here["multiply_tiles"], _here["wait_for_products"]
multiply_halves = _here["multiply_halves"]
wait_for_earlier_products = _here["wait_for_earlier_products"]
