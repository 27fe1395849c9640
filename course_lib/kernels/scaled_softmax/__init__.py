"""Softmax of attention scores in one pass: y = softmax(scale·x + mask) over the last axis.

x is (B, H, T, S), or has fewer axes in front; float32, float16 or bfloat16 in and out, float32 in
between. With `n` elements of `s` bytes the forward pass must move 2·n·s bytes (read x, write y) and
the mask, the backward pass 3·n·s (read dy and y, write dx); `causal` rows read half of it. With m
the largest of a row's scores z = scale·x + mask:

    y = exp(z − m) / Σ exp(z − m)        dx = scale·y·(dy − Σ y·dy)

=========== ================================================= ===================== ===============
rung        a row is worked on by                             reads of x, then of   bytes moved
                                                              dy and y together
=========== ================================================= ===================== ===============
`online`    a block, element by element; any length           2 / 2                 3·n·s / 5·n·s
`registers` some lanes of a warp or a block, 16 bytes at a    1 / 1                 2·n·s / 3·n·s
            time; held in registers; up to ROW_LIMIT scores
=========== ================================================= ===================== ===============

A mask is boolean, True where a score is seen, or of x's dtype, to be added; it is read where it
lies, through its strides, so that what is broadcast needs no copy. `causal` rows see the scores up
to their own number, as PyTorch's `is_causal`: what is behind is not read, and takes no part
whatever it is. A row that sees nothing, or −inf alone, has y = 0 and dx = 0. Otherwise as softmax:
a row that sees NaN or +inf is NaN throughout. Sums are taken in a fixed order: two runs agree bit
for bit. The mask has no gradient: `kernels.attention` gives it.

Milakov, Gimelshein: Online normalizer calculation for softmax (2018). Derivation: notebook 18.
"""

import math
from numbers import Real

import numpy as np

from course_lib.kernels.blocks.constants import MAX_WIDTH
from course_lib.kernels.blocks.options import MOST
from course_lib.kernels.blocks.row_plan import MOST_VALUES, SLOTS, usable_slots
from course_lib.kernels.blocks.row_teams import share_out
from course_lib.kernels.blocks.rows import on_boundaries
from course_lib.kernels.blocks.score_mask import as_bytes, broadcast, memory
from course_lib.kernels.operation import AUTO, Ladder, Refusal, Rung, Way
from course_lib.kernels.scaled_softmax import online, registers
from course_lib.kernels.scaled_softmax.scores import KINDS, Rows
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.host.launch_cache import cached_launch
from course_lib.runtime.host.outputs import output
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float16", "bfloat16")
MOST_THREADS = 384  # whose registers fit one multiprocessor on any chip
ROW_LIMIT = MOST_THREADS * MOST_VALUES  # scores of a row that fit the registers of one block

_forward = {(kind, n): registers.forward_kernel(kind, n) for kind in KINDS for n in SLOTS}
_backward = {(None, n): registers.backward_kernel(n) for n in SLOTS}
_online = {kind: online.forward_kernel(kind) for kind in KINDS}
_online_backward = {None: online.online_backward_kernel}


@cached_launch(2)
def forward(x, mask=None, *, scale=1.0, causal=False, variant=AUTO, out=None):
    """y, of the shape, dtype and device of `x`; contiguous.

    x       (B, H, T, S), or of two or three axes
    mask    broadcast to x: bool, True where a score is seen; or of x's dtype, to be added
    scale   a number; scores are multiplied by it before the mask is added
    causal  row i sees scores 0 … i

    `out`, if given, receives y. Raises ArrayError for a wrong dtype, shape or device, TypeError for
    a scale that is no number, ValueError for an unknown variant and for one that can't take such
    rows. An `x` that is not contiguous is copied first: the kernels take rows in order.
    """
    arrays.require(x, "x", dtypes=DTYPES)
    kind, strides, read = "plain", (0,) * 4, x
    if mask is not None:
        mask, strides = broadcast(mask, tuple(x.shape), arrays.dtype_name(x))
        kind = "boolean" if arrays.dtype_name(mask) == "bool" else "additive"
    rows = _rows(x, scale, causal, strides, kind == "boolean" and _reads_words(mask, strides))
    problem = rows.n_cols, x.dtype.itemsize, 1 if mask is None else 2
    _, way, plan = FORWARD.choose(variant, problem, chip_of(x))
    x = arrays.contiguous(x)
    y = output(out, x.shape, like=x, reads=dict(x=read, mask=mask))
    if arrays.size_of(y):
        vectors = on_boundaries(rows.n_cols, (x, y))
        if mask is not None:
            vectors = vectors and _reads_vectors(mask, strides)
        place = x if mask is None else memory(as_bytes(mask) if kind == "boolean" else mask)
        way.launch(plan, kind, (x, place, y), rows, vectors)
    return y


@cached_launch(2)
def backward(dy, y, *, scale=1.0, causal=False, variant=AUTO, out=None):
    """dx from `dy` and forward's output `y`, of one shape and dtype. Raises as `forward` does."""
    arrays.require(y, "y", dtypes=DTYPES)
    arrays.require(dy, "dy", shape=y.shape, dtypes=(arrays.dtype_name(y),))
    rows = _rows(y, scale, causal, (0,) * 4)
    _, way, plan = BACKWARD.choose(variant, (rows.n_cols, y.dtype.itemsize, 2), chip_of(y))
    dy, y = arrays.contiguous(dy), arrays.contiguous(y)
    dx = output(out, y.shape, like=y, reads=dict(dy=dy, y=y))
    if arrays.size_of(dx):
        way.launch(plan, None, (dy, y, dx), rows, on_boundaries(rows.n_cols, (dy, y, dx)))
    return dx


def _rows(x, scale, causal, strides, words=False):
    """The `Rows` of x or y, with the strides of a mask."""
    if not 2 <= len(x.shape) <= 4:
        raise arrays.ArrayError(f"x must have 2 to 4 dimensions, not shape {tuple(x.shape)}")
    if isinstance(scale, bool) or not isinstance(scale, (Real, np.number)):
        raise TypeError(f"scale must be a number, not {scale!r}")
    _, H, T, S = (1,) * (4 - len(x.shape)) + tuple(x.shape)
    if (n_rows := math.prod(x.shape[:-1])) > MOST:
        raise arrays.ArrayError(f"x must have fewer than 2**31 rows, not {n_rows}")
    return Rows(n_rows, S, H, T, float(scale), bool(causal), *strides, words)


def _reads_vectors(mask, strides):
    """Whether the columns of a mask are neighbours, and an additive one's rows on boundaries."""
    places = arrays.address_of(mask), *(stride * mask.dtype.itemsize for stride in strides[:3])
    aligned = not any(place % VECTOR_BYTES for place in places)
    return strides[3] == 1 and (aligned or arrays.dtype_name(mask) == "bool")


def _reads_words(mask, strides):
    """Whether a boolean mask's rows begin on boundaries of a vector's scores, in bytes."""
    return not any(place % MAX_WIDTH for place in (arrays.address_of(mask), *strides[:3]))


# ---- ladders ------------------------------------------------------------------------------------


def _plan(problem, chip):
    """(slots per thread, team_bits, threads per block, rows per block).

    problem  (columns, bytes of an element, arrays that are held, a mask among them)
    """
    if problem[0] > ROW_LIMIT:
        return Refusal(f"holds rows of at most {ROW_LIMIT:,} scores, not {problem[0]:,}")
    return share_out(*problem)


def _registers(kernels):
    def start(plan, kind, operands, rows, vectors):
        n_slots, team_bits, n_threads, n_shared = plan
        numbers = rows, team_bits, vectors
        n_blocks, options = -(-rows.n_rows // n_shared), dict(flat=True, overlap=True)
        launch(kernels[kind, n_slots], n_blocks, n_threads, *operands, *numbers, **options)

    return Rung("registers", ways=(Way("held", _plan, start, kernels.values),))


def _by_element(kernels):
    def start(plan, kind, operands, rows, vectors):
        launch(kernels[kind], rows.n_rows, online.BLOCK_SIZE, *operands, rows, flat=True)

    return Rung("online", start, tuple(kernels.values()))


_auto = "registers", "online"
FORWARD = Ladder(_by_element(_online), _registers(_forward), auto=_auto)
BACKWARD = Ladder(_by_element(_online_backward), _registers(_backward), auto=_auto)


def most_threads(label, chip):
    """Threads of the largest block that the kernel of this label is launched with."""
    return online.BLOCK_SIZE if " online " in label else MOST_THREADS


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        row, more = (dtype, 1), ["int64", "boolean"]
        of_masks = {"plain": row, "boolean": ("uint8", 1), "additive": row}
        passes = [
            (f"forward {kind}", _online[kind], (kind, _forward), [row, of_masks[kind], row, Rows])
            for kind in KINDS
        ]
        types = [row, row, row, Rows]
        passes.append(("backward", online.online_backward_kernel, (None, _backward), types))
        for name, by_element, (kind, held), types in passes:
            yield f"scaled_softmax.{name} online {dtype}", by_element, types
            for n in usable_slots(4 if dtype == "float32" else 2):
                label = f"scaled_softmax.{name} registers, {n} slots, {dtype}"
                yield label, held[kind, n], [*types, *more]
