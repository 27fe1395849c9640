"""Numbers compared as they lie in memory: 32-bit words of one float32 or two half-width numbers.

Converting a bfloat16 to float32 and back costs instructions, and one comparison after another
costs twice as many as two at a time. A kernel that only compares need not convert: it loads words,
and every instruction below works on a word's *lanes*, of which float32 has 1, and float16 and
bfloat16 have 2. `array` says which of these a word is made of. Words are uint32.

================================================= ==============================================
`lanes(array)`                                    1 or 2
`lowest_word(array)`                              -inf in every lane
`load_words(target, k, array, i, n)`              n elements from array[i] on become target[k],
                                                  …; an element of 2 bytes alone fills both lanes
`store_words(array, i, source, n)`                the reverse, from source[0] on
`store_floats(array, i, source, k, n)`            n float32, from source[k] on, rounded to nearest
                                                  even
`as_float(array, a, k)`                           lane k as float32
`largest(array, a, b)`                            the larger of each lane, NaN where one is NaN
`where_equal(array, a, b, yes, no)`               of each lane: `yes` where a == b, else `no`
`ordinary(array, a)`                              whether all lanes are above -inf; a NaN is not
`select_bytes(a, b, selector)`                    4 of the 8 bytes of a and b; each hex digit of
                                                  `selector` names one, 0 … 3 of a, 4 … 7 of b
================================================= ==============================================

`n`, a constant of the kernel, makes 1, 2, 4, 8 or 16 bytes, which are one access, or a multiple of
16; they must lie on a multiple of that, or of 16. `load_words` and `store_words` take arrays of
bytes as well. -0 equals 0, and `largest` of them is 0 (PTX max.NaN) from sm_80 on. Machine code in
`ptx.words`, and twins, as told in `intrinsics`.
"""

import numpy as np

from course_lib import simulator
from course_lib.runtime.intrinsics import twins


def _check(array, i, n):
    size = array.dtype.itemsize
    address, n_bytes = array.__array_interface__["data"][0] + i * size, min(n * size, 16)
    if address % n_bytes:
        raise ValueError(
            f"misaligned {n_bytes}-byte access: element {i} lies {address % n_bytes} bytes past a "
            "multiple of that; a GPU stops with a misaligned address error here"
        )


def _lanes(array):
    return 4 // array.dtype.itemsize


def _lowest_word(array):
    return np.full(_lanes(array), -np.inf, array.dtype).view(np.uint32)[0]


def _load_words(target, k, array, i, n):
    _check(array, i, n)
    data = np.array(simulator.read_elements(array, i, n), array.dtype).tobytes()
    if len(data) < 4:
        data = data * 2 if array.dtype.itemsize == 2 else data.ljust(4, b"\0")
    for place, word in enumerate(np.frombuffer(data, np.uint32)):
        target[k + place] = word


def _store_words(array, i, source, n):
    _check(array, i, n)
    n_words = -(-n * array.dtype.itemsize // 4)
    words = np.array([source[k] for k in range(n_words)], np.uint32)
    simulator.write_elements(array, i, list(words.view(array.dtype)[:n]))


def _store_floats(array, i, source, k, n):
    _check(array, i, n)
    simulator.write_elements(array, i, [source[k + place] for place in range(n)])


def _as_float(array, a, k):
    return np.float32(np.array([a], np.uint32).view(array.dtype)[k])


def _numbers(array, *words):
    return np.array(words, np.uint32).view(array.dtype).reshape(len(words), -1)


def _largest(array, a, b):
    a, b = _numbers(array, a, b)
    larger = np.where((a > b) | (a != a) | ((a == b) & np.signbit(b)), a, b)
    return larger.astype(array.dtype).view(np.uint32)[0]


def _where_equal(array, a, b, yes, no):
    a, b = _numbers(array, a, b)
    yes, no = np.array([yes, no], np.uint32).view(f"u{array.dtype.itemsize}").reshape(2, -1)
    return np.where(a == b, yes, no).view(np.uint32)[0]


def _ordinary(array, a):
    return bool((_numbers(array, a)[0] > -np.inf).all())


def _select_bytes(a, b, selector):
    both = np.array([a, b], np.uint32).tobytes()
    return np.frombuffer(bytes(both[selector >> 4 * k & 7] for k in range(4)), np.uint32)[0]


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {
    "lanes": _lanes,
    "lowest_word": _lowest_word,
    "load_words": _load_words,
    "store_words": _store_words,
    "store_floats": _store_floats,
    "as_float": _as_float,
    "largest": _largest,
    "where_equal": _where_equal,
    "ordinary": _ordinary,
    "select_bytes": _select_bytes,
}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.words")
lanes, lowest_word = _here["lanes"], _here["lowest_word"]
load_words, store_words = _here["load_words"], _here["store_words"]
store_floats, as_float = _here["store_floats"], _here["as_float"]
largest, where_equal, ordinary = _here["largest"], _here["where_equal"], _here["ordinary"]
select_bytes = _here["select_bytes"]
