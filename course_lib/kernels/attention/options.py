"""A call of attention, checked: its extents, its options as kernels take them, and its results."""

import math
from numbers import Real
from typing import NamedTuple

import numpy as np

from course_lib.kernels.attention.problem import (
    ALLOWED,
    BIAS,
    DROPOUT,
    FAR,
    LENGTHS,
    LOWER_RIGHT,
    PACKED,
    SLOPES,
    SOFTCAP,
    Dropping,
    Look,
    Place,
    Shape,
)
from course_lib.kernels.blocks.dropout_mask import generator_arguments
from course_lib.kernels.blocks.score_mask import as_bytes, broadcast, memory
from course_lib.runtime.host import arrays
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.outputs import require_apart
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float16", "bfloat16")
MOST = 256  # of D and E


class Problem(NamedTuple):
    """What plans depend on.

    is_aligned  rows of q, k, v and do begin on 16-byte boundaries, and have even numbers of
                elements; rows of `out`, if it is given, on 4-byte boundaries
    by_element  each score must be looked at by itself: there is more than a positive scale and a
                window
    n_heads, n_groups  of q, and of k and v, of all sequences
    T, S        queries and keys of a sequence, at most
    """

    D: int
    E: int
    dtype: str
    is_packed: bool
    is_aligned: bool
    by_element: bool
    n_heads: int
    n_groups: int
    T: int
    S: int

    @property
    def itemsize(self):
        """Bytes of an element."""
        return 4 if self.dtype == "float32" else 2


def rows_together(x):
    """`x` itself, if kernels can read it: each row's elements side by side; else a copy."""
    strides = arrays.strides_of(x)
    together = (x.shape[-1] <= 1 or strides[-1] == 1) and min(strides) >= 0
    if together and (arrays.is_tensor(x) or isinstance(x, np.ndarray)):
        return x
    return arrays.contiguous(x)


def _is_aligned(x):
    """Whether each row of x begins on a 16-byte boundary, where kernels will read it."""
    strides = arrays.strides_of(rows_together(x))[:-1]
    width = VECTOR_BYTES // x.dtype.itemsize
    return not (arrays.address_of(x) % VECTOR_BYTES or any(stride % width for stride in strides))


def _in_pairs(x):
    """Whether rows of x can be written two 16-bit numbers at a time."""
    return arrays.address_of(x) % 4 == 0 and not any(n % 2 for n in arrays.strides_of(x)[:-1])


def place_of(x):
    """The `Place` of x, (batches, heads, rows, elements)."""
    return Place(*arrays.strides_of(x)[:3])


def _like(x, shape):
    """A new array of `shape`, (B, H, T, D), in memory by heads or by rows as `x` is."""
    _, head, row, _ = arrays.strides_of(x)
    if not (arrays.is_tensor(x) or isinstance(x, np.ndarray)) or head >= row:
        return arrays.empty(shape, like=x)
    B, H, T, D = shape
    if arrays.is_tensor(x):  # no view of another tensor, which autograd would tell apart
        return x.new_empty_strided(shape, (T * H * D, D, H * D, 1))
    return arrays.empty((B, T, H, D), like=x).swapaxes(1, 2)


class Request:
    """One call, forwards or backwards; raises as `attention.forward` says."""

    def __init__(self, q, k, v, options):
        for name, x in (("q", q), ("k", k), ("v", v)):
            arrays.require(x, name, n_dims=4, dtypes=DTYPES)
            arrays.require(x, name, dtypes=(arrays.dtype_name(q),))
        (B, H, T, D), (_, G, S, _), E = q.shape, k.shape, v.shape[-1]
        if H % G if G else H:
            raise ArrayError(f"q has {H} heads, which the {G} of k and v do not divide")
        arrays.require(k, "k", shape=(B, G, S, D))
        arrays.require(v, "v", shape=(B, G, S, E))
        if not 1 <= D <= MOST or E > MOST:
            raise ArrayError(f"heads must have 1 to {MOST} elements; q's have {D}, v's {E}")
        self.q, self.k, self.v, self.bits = q, k, v, 0
        self._read(**options)
        self.shape = Shape(H, H // max(G, 1), self.T, self.S, T, D, E)
        self.n_keys = S

    def _read(
        self, scale=None, causal=False, lower_right=False, window=(None, None), mask=None,
        softcap=0.0, slopes=None, key_lengths=None, q_starts=None, k_starts=None, max_q=None,
        max_k=None, dropout_p=0.0, seed=0, offset=0,
    ):  # fmt: skip
        H, D = self.q.shape[1], self.q.shape[3]
        self.scale = D**-0.5 if scale is None else _number(scale, "scale")
        self.softcap = _number(softcap, "softcap")
        if self.softcap < 0:
            raise ValueError(f"softcap must be at least 0, not {softcap!r}")
        self.bits |= (LOWER_RIGHT if lower_right else 0) | (SOFTCAP if self.softcap else 0)
        self._read_sequences(key_lengths, q_starts, k_starts, max_q, max_k)
        left, right = _window(window)
        self.low, self.high = -left, min(right, 0) if causal else right
        self.mask = mask
        self._read_mask(mask)
        self.slopes = slopes
        if slopes is not None:
            shape = (self.B, H) if len(getattr(slopes, "shape", ())) == 2 else (H,)
            arrays.require(slopes, "slopes", shape=shape, dtypes=("float32",))
            self.bits |= SLOPES
            self.slopes = arrays.contiguous(slopes)
        numbers = generator_arguments(dropout_p, seed, offset, self.B * H * self.T * self.S)
        self.dropping = Dropping(*numbers)
        self.bits |= DROPOUT if dropout_p else 0

    def _read_sequences(self, key_lengths, q_starts, k_starts, max_q, max_k):
        B, _, T, _ = self.q.shape
        self.B, self.T, self.S, self.starts = B, T, self.k.shape[2], (None, None)
        packed = [x is not None for x in (q_starts, k_starts, max_q, max_k)]
        if any(packed):
            if not all(packed) or key_lengths is not None:
                raise ValueError(
                    "packed sequences need q_starts, k_starts, max_q and max_k, all of them, and "
                    "no key_lengths"
                )
            if B != 1:
                raise ArrayError(f"packed sequences lie in one batch; q has {B}")
            arrays.require(q_starts, "q_starts", n_dims=1, dtypes=("int32",))
            arrays.require(k_starts, "k_starts", shape=q_starts.shape, dtypes=("int32",))
            self.B, self.T, self.S = q_starts.shape[0] - 1, int(max_q), int(max_k)
            if self.B < 0 or self.T < 0 or self.S < 0:
                raise ValueError("starts need an element, and max_q and max_k be at least 0")
            self.starts = arrays.contiguous(q_starts), arrays.contiguous(k_starts)
            self.bits |= PACKED
        elif key_lengths is not None:
            arrays.require(key_lengths, "key_lengths", shape=(B,), dtypes=("int32",))
            self.starts = None, arrays.contiguous(key_lengths)
            self.bits |= LENGTHS

    def _read_mask(self, mask):
        if mask is None:
            return
        whole = (self.B, self.q.shape[1], self.T, self.S)
        self.mask, self.mask_strides = broadcast(mask, whole, arrays.dtype_name(self.q))
        self.bits |= ALLOWED if arrays.dtype_name(mask) == "bool" else BIAS

    def problem(self, out=None, do=None):
        by_element = self.bits & (SOFTCAP | SLOPES | BIAS | ALLOWED | DROPOUT)
        by_element = by_element or not self.scale > 0  # the largest product is the largest score
        return Problem(
            self.shape.D, self.shape.E, arrays.dtype_name(self.q), bool(self.bits & PACKED),
            self._is_aligned(out, do), bool(by_element), self.n_heads,
            self.n_heads // max(1, self.shape.share), self.T, self.S,
        )  # fmt: skip

    def _is_aligned(self, out, do):
        even = self.shape.D % 2 == 0 and self.shape.E % 2 == 0
        even = even and (out is None or _in_pairs(out))
        read = self.q, self.k, self.v, *(() if do is None else (do,))
        return even and all(map(_is_aligned, read))

    @property
    def has_work(self):
        """Whether there is anything to compute: queries, and keys that they might look at."""
        return self.B * self.T * self.S * self.q.shape[1] * self.n_keys > 0

    @property
    def n_heads(self):
        """Of all sequences."""
        return self.B * self.shape.n_heads

    def look(self, more=0):
        """The `Look`, with `more` bits."""
        mask = self.mask_strides if self.bits & (ALLOWED | BIAS) else (0,) * 4
        slopes = (0, 0)
        if self.slopes is not None:
            slopes = (0, 1) if len(self.slopes.shape) == 1 else (self.shape.n_heads, 1)
        return Look(self.bits | more, self.scale, self.softcap, self.low, self.high, *mask, *slopes)

    def read(self):
        """(bias, allowed, slopes, q_starts, k_starts) as kernels take them; any where unread."""
        bias, allowed = memory(rows_together(self.q)), None
        if self.bits & BIAS:
            bias = memory(self.mask)
        elif self.bits & ALLOWED:
            allowed = memory(as_bytes(self.mask))
        starts = [x if x is not None else self._none("int32") for x in self.starts]
        slopes = self._none("float32") if self.slopes is None else memory(self.slopes)
        return bias, self._none("uint8") if allowed is None else allowed, slopes, *starts

    def _none(self, dtype):
        return arrays.empty((1,), like=self.q, dtype=dtype)

    def check_out(self, out):
        if out is None:
            return
        arrays.require(
            out, "out", shape=(*self.q.shape[:3], self.shape.E), writable=True,
            dtypes=(arrays.dtype_name(self.q),),
        )  # fmt: skip
        if rows_together(out) is not out:
            raise ArrayError(f"out has rows with gaps: strides {arrays.strides_of(out)}")
        reads = dict(q=self.q, k=self.k, v=self.v, mask=self.mask, slopes=self.slopes)
        require_apart(out, reads)

    def outputs(self, out):
        """(o, lse), ready to be written; filled where nothing will write."""
        _, H, rows, _ = self.q.shape
        out = _like(self.q, (*self.q.shape[:3], self.shape.E)) if out is None else out
        lse = arrays.empty((self.q.shape[0], H, rows), like=self.q, dtype="float32")
        if self.bits & PACKED or not self.has_work:
            arrays.fill(out, 0)
            arrays.fill(lse, -math.inf)
        return out, lse

    def check_saved(self, do, o, lse, dlse, mask_gradient):
        shape, dtype = (*self.q.shape[:3], self.shape.E), arrays.dtype_name(self.q)
        for name, x in (("do", do), ("o", o)):
            arrays.require(x, name, shape=shape, dtypes=(dtype,))
        arrays.require(lse, "lse", shape=shape[:3], dtypes=("float32",))
        if dlse is not None:
            arrays.require(dlse, "dlse", shape=shape[:3], dtypes=("float32",))
        if mask_gradient and not self.bits & BIAS:
            raise ValueError("mask_gradient needs an additive mask")

    def gradients(self, with_mask):
        """(dq, dk, dv[, dmask]), ready to be written."""
        found = [_like(x, tuple(x.shape)) for x in (self.q, self.k, self.v)]
        if self.bits & PACKED:
            for each in found:
                arrays.fill(each, 0)
        if with_mask:
            found.append(arrays.empty(tuple(self.mask.shape), like=self.q, dtype="float32"))
        return tuple(found)


def _number(value, name):
    if isinstance(value, bool) or not isinstance(value, (Real, np.number)):
        raise TypeError(f"{name} must be a number, not {value!r}")
    return float(value)


def _window(window):
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window must be (left, right), not {window!r}")
    for n in window:
        if n is not None and (isinstance(n, bool) or not isinstance(n, (int, np.integer))):
            raise TypeError(f"window must be of ints or None, not {window!r}")
        if n is not None and n < 0:
            raise ValueError(f"window must reach 0 keys or more, not {window!r}")
    return [FAR if n is None else min(int(n), FAR) for n in window]
