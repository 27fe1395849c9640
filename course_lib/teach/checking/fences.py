"""Arrays that give a wrong kernel away: poisoned inside, fenced on both sides.

A `FencedArray` is a view into the middle of a bigger buffer. What lies before and after it is a
loud number, so that reading past the end shows in the result, and writing past the end shows in
the fence. Outputs start as NaN (integers: as a rare number), so that an element nobody wrote
can't pass for a result.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import numpy as np

from course_lib.teach.checking.deadline import held

#: Elements of fence on each side: more than one warp, and a multiple of any vector access.
FENCE = 64

_LOUD = {"f": 5.5e4, "i": 0x5A, "u": 0x5A, "b": True}


#: The kinds of poison: one that spreads, one to compare with it, one that wins in `max`, and one
#: that is lost in a sum.
NAN, SMALL, HUGE, FAINT = range(4)


def poison(dtype: np.dtype, which: int = NAN) -> np.generic:
    """Return what an unwritten element of `dtype` holds.

    The poisons differ. An element that still holds one of them in one run, and another in another,
    was certainly not written.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "iu":
        return dtype.type((0x3D, 0x6B, 0x7E, 0x11)[which])
    if dtype.kind == "b":
        return dtype.type(which == SMALL)
    huge, faint = (6e4, 1e-7) if dtype == np.float16 else (1e30, 1e-30)
    return dtype.type((np.nan, -777.0, huge, -faint)[which])


class FencedArray:
    """An array of `shape` and `dtype` in the middle of a buffer of loud numbers.

    Attributes
    ----------
    buffer: the whole, one-dimensional.
    view: the array itself, C-contiguous.
    """

    def __init__(self, shape: tuple[int, ...], dtype: np.dtype, fill: np.ndarray | np.generic):
        dtype = np.dtype(dtype)
        size = int(np.prod(shape))
        loud = _LOUD.get(dtype.kind, _LOUD["f"])  # bfloat16 is of no kind of its own
        self.shape, self.size = tuple(shape), size
        self.buffer = np.full(size + 2 * FENCE, loud, dtype=dtype)
        self.view = self.middle(self.buffer)
        self.view[...] = fill
        self._fence = self._outside().copy()

    def middle(self, buffer):
        """Return the part of `buffer` (this one, or its copy on a GPU) that is the array."""
        return buffer[FENCE : FENCE + self.size].reshape(self.shape)

    def _outside(self) -> np.ndarray:
        return np.concatenate([self.buffer[:FENCE], self.buffer[FENCE + self.size :]])

    def broken_at(self) -> int | None:
        """Return the flat index of the first write outside the array, None if there is none.

        A negative index is before the start; one of `size` or more is past the end.
        """
        broken = np.flatnonzero(~same_bits(self._outside(), self._fence))
        if not broken.size:
            return None
        first = int(broken[0])
        return first - FENCE if first < FENCE else first - FENCE + self.size


def same_bits(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return where two arrays of one dtype hold the same bits, so that NaN equals itself."""
    a, b = np.ascontiguousarray(a), np.ascontiguousarray(b)
    unsigned = f"u{a.dtype.itemsize}"
    return a.view(unsigned) == b.view(unsigned)


@contextlib.contextmanager
def poisoned_allocation(which: int) -> Iterator[None]:
    """Let `empty` and `empty_like` of NumPy and PyTorch return poison, for those who allocate."""
    libraries = [np, *filter(None, [sys.modules.get("torch")])]
    saved = [(each, name, getattr(each, name)) for each in libraries for name in _ALLOCATE]
    held.n += 1  # or a deadline would leave some of them behind
    try:
        for library, name, allocate in saved:
            setattr(library, name, lambda *args, _of=allocate, **named: _poisoned(
                _of(*args, **named), which))
        held.n -= 1
        yield
    finally:
        held.n += 1
        for library, name, allocate in saved:
            setattr(library, name, allocate)
        held.n -= 1


_ALLOCATE = "empty", "empty_like"


def _poisoned(array, which: int):
    """Return an array or tensor, filled with poison if its numbers are of a kind that has any."""
    if isinstance(array, np.ndarray):
        if array.dtype.kind in "fiub":
            array[...] = poison(array.dtype, which)
    elif array.is_floating_point():
        kind = np.float16 if array.dtype.itemsize == 2 else np.float32
        array.detach().fill_(float(poison(kind, which)))
    return array
