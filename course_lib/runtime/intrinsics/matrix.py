"""Tensor cores: a warp multiplies small matrices that its lanes hold in registers.

One instruction, `mma.sync`, computes acc += A·B for a 16×8 matrix acc, with A of 16 rows and B of 8
columns, each 32 bytes long: 8 float32, of which it sees the upper 19 bits (TF32: 8 bits of exponent
and 10 of mantissa), or 16 float16 or bfloat16. Sums are float32. All 32 lanes take part, and each
holds a share: of A four registers, of B two, of acc four float32. A register is 32 bits, one
float32 or two 16-bit numbers, so arrays of registers are uint32. With ``g = lane // 4`` and
``t = lane % 4``, and words of 32 bits counted along k,

    A: word t of row g, of row g + 8, then word t + 4 of row g, of row g + 8
    B: word t of column g, then word t + 4 of column g
    acc: row g, columns 2t and 2t + 1; row g + 8, columns 2t and 2t + 1

(PTX ISA, "Matrix fragments for mma.m16n8k8" and "for mma.m16n8k16".) `ldmatrix` brings shares from
shared memory: it reads four matrices of 8 rows of 16 bytes. Lane l says where row l % 8 of matrix
l // 8 begins, and gets word l % 4 of row l // 4 of each of the four.

================================================ ==============================================
`multiply_add(acc, c, a, i, b, j, like)`         acc[c : c+4] += A·B, with A in a[i : i+4] and B
                                                 in b[j : j+2], numbers of the dtype of `like`
                                                 (PTX mma.sync, from sm_80 on; on sm_75
                                                 float16 alone, in two halves of k)
`load_matrices(target, k, array, i)`             target[k : k+4] from four matrices in shared
                                                 memory; this lane's row begins at array[i], a
                                                 multiple of 16 bytes (PTX ldmatrix.x4)
`load_matrices_transposed(target, k, array, i)`  the same, each matrix transposed: a lane gets rows
                                                 2(l % 4) and the next of column l // 4. 16-bit
                                                 dtypes only (PTX ldmatrix.x4.trans)
`load_word(array, i)`                            the bits of a float32
`round_tf32(word)`                               a float32 rounded to TF32, to nearest even (PTX
                                                 cvt.rn.tf32.f32; before sm_90 ties go away from
                                                 0, cvt.rna.tf32.f32)
`subtract_words(word, other)`                    the difference of two float32, rounded as always
`copy_part_async(target, i, source, j, n)`       as `shared.copy_async`, but only the first `n`
                                                 elements; the rest of the 16 bytes become 0
`copy_one_async(target, i, source, j, present)`  one element, or 0 if not `present`; any alignment
                                                 (cp.async for float32; a load and a store for
                                                 16-bit dtypes)
================================================ ==============================================

Each is machine code (`ptx.matrix`) and a twin, as told in `intrinsics`. The twin of `multiply_add`
sums exactly and rounds once. A tensor core does not: it cuts off after each few terms, which a long
sum notices (Ootomo and Yokota, 2022). Below sm_80 other products and the rounding stop the kernel
with a trap: launchers don't start such kernels there. Copies are waited for with `pipeline` or
`shared`.
"""

import struct

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import VECTOR_BYTES, _check_alignment, twins

_LOWER_BITS = np.uint32(0x1FFF)  # of a float32 that TF32 has not
_LANES = np.arange(32)
_GROUP, _MEMBER = _LANES // 4, _LANES % 4
_WORD, _FLOAT, _WORDS, _FLOATS = map(struct.Struct, ("<I", "<f", "<II", "<ff"))
_INFINITIES = np.float32([np.inf, -np.inf]).view(np.uint32)


# --- products -----------------------------------------------------------------------------------


def _numbers(words, dtype):
    """float64 numbers that rows of words stand for."""
    if dtype == np.float32:
        return (words & ~_LOWER_BITS).view(np.float32).astype(np.float64)
    return np.ascontiguousarray(words).view(dtype).astype(np.float64)


def _places(n_rows, row_of, column_of, n_registers):
    """Where each element of a matrix of 8 columns lies among its lanes' registers, and back."""
    r = np.arange(n_registers)
    home = row_of(_GROUP[:, None], r) * 8 + column_of(_MEMBER[:, None], r)
    place = np.empty(n_rows * 8, np.intp)
    place[home.ravel()] = np.arange(32 * n_registers)
    return place.reshape(n_rows, 8), home


_A_PLACES, _ = _places(16, lambda g, r: g + 8 * (r % 2), lambda m, r: m + 4 * (r // 2), 4)
_B_PLACES, _ = _places(8, lambda g, r: g + 0 * r, lambda m, r: m + 4 * r, 2)  # a row is a column
_ACC_PLACES, _ACC_HOMES = _places(16, lambda g, r: g + 8 * (r // 2), lambda m, r: 2 * m + r % 2, 4)


def _product(payloads):
    acc, a, b, dtypes = zip(*payloads, strict=True)
    acc = np.array(acc, np.float32).take(_ACC_PLACES).astype(np.float64)
    a = np.array(a, np.uint32).take(_A_PLACES)
    b = np.array(b, np.uint32).take(_B_PLACES)
    with np.errstate(invalid="ignore", over="ignore"):
        acc += _numbers(a, dtypes[0]) @ _numbers(b, dtypes[0]).T
        return list(acc.astype(np.float32).take(_ACC_HOMES))


_multiply_together = simulator.whole_warp("multiply_add", _product)


def _multiply_add(acc, c, a, i, b, j, like):
    mine = (
        [acc[c], acc[c + 1], acc[c + 2], acc[c + 3]],
        [a[i], a[i + 1], a[i + 2], a[i + 3]],
        [b[j], b[j + 1]],
        like.dtype,
    )
    found = _multiply_together(mine)
    for r in range(4):
        acc[c + r] = found[r]


def _round_tf32(word):
    bits = int(word)
    if bits & 0x7F800000 != 0x7F800000:  # infinities and NaN stay
        # A carry into the exponent is right: the next power of two, or infinity.
        bits += 0x0FFF + (bits >> 13 & 1)
    elif bits & 0x007FFFFF:
        bits = 0x7FFFFFFF
    return np.uint32(bits & 0xFFFFE000)


def _subtract_words(word, other):
    a, b = _FLOATS.unpack(_WORDS.pack(word, other))
    try:
        return np.uint32(_WORD.unpack(_FLOAT.pack(a - b))[0])  # rounded once more: no difference
    except OverflowError:
        return _INFINITIES[int(a < b)]


# --- from shared memory to registers ------------------------------------------------------------


def _dealt_out(rows, transposed):
    """What each lane gets of four matrices, given the 16 bytes that each lane's address meant."""
    matrices = np.array(rows).reshape(4, 8, -1)
    if transposed:
        matrices = np.ascontiguousarray(matrices.swapaxes(1, 2))
    return list(matrices.view(np.uint32).reshape(4, 32).T)


_deal = simulator.whole_warp("load_matrices", lambda rows: _dealt_out(rows, False))
_deal_transposed = simulator.whole_warp(
    "load_matrices_transposed", lambda rows: _dealt_out(rows, True)
)


def _row(array, i):
    _check_alignment(array, i)
    values = simulator.read_elements(array, i, VECTOR_BYTES // array.dtype.itemsize)
    return np.array(values, array.dtype)


def _load_matrices(target, k, array, i):
    found = _deal(_row(array, i))
    for r in range(4):
        target[k + r] = found[r]


def _load_matrices_transposed(target, k, array, i):
    if array.dtype.itemsize != 2:
        raise TypeError(f"load_matrices_transposed takes 16-bit arrays, not {array.dtype}")
    found = _deal_transposed(_row(array, i))
    for r in range(4):
        target[k + r] = found[r]


def _load_word(array, i):
    return np.float32(array[i]).view(np.uint32)


# --- from global to shared memory ---------------------------------------------------------------


def _copy_part_async(target, i, source, j, n):
    width = VECTOR_BYTES // source.dtype.itemsize
    if not 0 <= n <= width:
        raise ValueError(f"copy_part_async copies 0 to {width} elements, not {n}")
    _check_alignment(target, i)
    values = []
    if n > 0:
        _check_alignment(source, j)
        values = simulator.read_elements(source, j, n)
    values = values + [source.dtype.type(0)] * (width - n)
    simulator.postponed.begin(target, i, values, source, j, n)


def _copy_one_async(target, i, source, j, present):
    value = source[j] if present else source.dtype.type(0)
    simulator.postponed.begin(target, i, [value], source, j, 1 if present else 0)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {
    "multiply_add": _multiply_add,
    "load_matrices": _load_matrices,
    "load_matrices_transposed": _load_matrices_transposed,
    "load_word": _load_word,
    "round_tf32": _round_tf32,
    "subtract_words": _subtract_words,
    "copy_part_async": _copy_part_async,
    "copy_one_async": _copy_one_async,
}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.matrix")
multiply_add, load_word = _here["multiply_add"], _here["load_word"]
load_matrices = _here["load_matrices"]
load_matrices_transposed = _here["load_matrices_transposed"]
round_tf32, subtract_words = _here["round_tf32"], _here["subtract_words"]
copy_part_async, copy_one_async = _here["copy_part_async"], _here["copy_one_async"]
