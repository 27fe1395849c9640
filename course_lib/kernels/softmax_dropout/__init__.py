"""Softmax over the last axis, then dropout: z = softmax(x)·mask / (1 − p), in one pass.

Any shape; float32, float16 or bfloat16 in and out, float32 in between. An element is dropped with
probability p in [0, 1], met to within 2⁻¹⁷. With `n` elements of `s` bytes the forward pass must
move 2·n·s bytes (read x, write z), the backward pass 3·n·s (read dz and x, write dx). Neither
stores the softmax or the mask: the backward pass computes both again, from two numbers per row
(`stats`: its maximum m and the sum s of exp(x − m)) and from the generator. With y = softmax(x) and
g = dz·mask / (1 − p), dx = y·(g − Σ y·g).

=========== =========================================== ===================== =====================
rung        a row is worked on by                       reads of x, then of   random numbers
                                                        dz and x together
=========== =========================================== ===================== =====================
`naive`     one thread, in three passes                 3 / 2                 a call per element
`online`    a block; maximum and sum in one pass        2 / 2                 a call per element
`registers` some lanes of a warp or a block, 16 bytes   1 / 1; 2 / 2 for rows a call per 16 bytes
            at a time; held in registers                beyond ROW_LIMIT
=========== =========================================== ===================== =====================

Element i of x, counted in C order, has the 16-bit random number `offset + i` of the generator
(Philox, `runtime/philox.py`, keyed by `seed`; a call gives eight). It is kept if that number is at
least p·2¹⁶, rounded: a comparison of integers, so that the mask is the same on every chip, for
every dtype and in the simulator. Where `offset` is no multiple of 8, or rows do not begin on
16-byte boundaries, `registers` goes element by element, with a call for each. Equal (seed, offset)
give equal masks, so advance `offset` by at least the number of elements from one use to the next.

As in PyTorch: −inf is a masked element, of which y is 0; a row of nothing but −inf, and one with
NaN or +inf anywhere, is NaN throughout, its dropped elements too; p = 0 drops nothing, and p = 1
everything. Sums are taken in a fixed order: two runs agree bit for bit.

Dropout: Srivastava et al., Dropout: a simple way to prevent neural networks from overfitting
(2014). Derivation: notebook 05.
"""

import functools
import math

from course_lib.kernels.blocks.dropout_mask import generator_arguments
from course_lib.kernels.blocks.row_plan import MOST_VALUES, SLOTS, usable_slots
from course_lib.kernels.blocks.row_teams import WHOLE_BLOCK, share_out
from course_lib.kernels.blocks.rows import on_boundaries
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.kernels.softmax_dropout import ladder, registers
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.outputs import output

DTYPES = ("float32", "float16", "bfloat16")
#: Threads whose registers fit one multiprocessor on any chip, by the number of arrays held …
MOST_THREADS = {1: 640, 2: 384}
#: … and elements of a row that fit the registers of one block.
ROW_LIMIT = {n_arrays: threads * MOST_VALUES for n_arrays, threads in MOST_THREADS.items()}
LONG_SLOTS = 2  # slots per thread and array for rows that are read in parts …
LONG_BLOCK_SIZE = 512  # … and threads per block


def _kernels(make):
    """{(slots per thread, whether rows fit): kernel}."""
    made = {n_slots: make(n_slots) for n_slots in SLOTS}
    kernels = {(n_slots, True): fitting for n_slots, (fitting, _) in made.items()}
    return kernels | {(LONG_SLOTS, False): made[LONG_SLOTS][1]}


_forward = _kernels(registers.forward_kernels)
_backward = _kernels(registers.backward_kernels)


def forward(x, p, seed, offset, *, variant=AUTO, out=None):
    """(z, stats): softmax of `x` over its last axis, then dropout; and what `backward` needs.

    p             probability of dropping an element, in [0, 1]
    seed, offset  Python ints that fix the mask: `seed` modulo 2⁶⁴; `offset` at least 0, and less
                  than 2⁶³ together with the number of elements

    z has shape, dtype and device of `x` and is contiguous; `out`, if given, receives it. `stats` is
    float32 of shape (rows, 2). Raises ArrayError for a wrong dtype, shape or device, TypeError or
    ValueError for a wrong p, seed or offset, ValueError for an unknown variant. An `x` that is not
    contiguous is copied first, because the kernels take rows one after another.
    """
    arrays.require(x, "x", dtypes=DTYPES)
    rung = FORWARD.rung(variant, x)
    x = arrays.contiguous(x)
    numbers = generator_arguments(p, seed, offset, arrays.size_of(x))
    n_rows, n_cols = _rows_of(x)
    stats = arrays.empty((n_rows, 2), like=x, dtype="float32")
    z = output(out, x.shape, like=x, reads=dict(x=x))
    if n_rows * n_cols:
        rung.launch((x, z, stats), n_rows, n_cols, numbers)
    return z, stats


def backward(dz, x, stats, p, seed, offset, *, variant=AUTO, out=None):
    """dx from `dz`, the gradient of z, and what `forward` was given and gave.

    Raises as `forward` does; dz and x must agree in shape and dtype.
    """
    arrays.require(x, "x", dtypes=DTYPES)
    arrays.require(dz, "dz", shape=x.shape, dtypes=(arrays.dtype_name(x),))
    n_rows, n_cols = _rows_of(x)
    arrays.require(stats, "stats", shape=(n_rows, 2), dtypes=("float32",))
    rung = BACKWARD.rung(variant, x)
    dz, x, stats = arrays.contiguous(dz), arrays.contiguous(x), arrays.contiguous(stats)
    numbers = generator_arguments(p, seed, offset, arrays.size_of(x))
    dx = output(out, x.shape, like=x, reads=dict(dz=dz, x=x, stats=stats))
    if n_rows * n_cols:
        rung.launch((dz, x, stats, dx), n_rows, n_cols, numbers)
    return dx


def _rows_of(x):
    n_cols = x.shape[-1] if len(x.shape) else 1
    return (arrays.size_of(x) // n_cols if n_cols else math.prod(x.shape[:-1])), n_cols


def _launch_by_element(kernel, rows_of_block, operands, n_rows, n_cols, numbers):
    n_blocks = -(-n_rows // rows_of_block)
    launch(kernel, n_blocks, ladder.BLOCK_SIZE, *operands, n_cols, *numbers, flat=True)


def _launch_registers(kernels, operands, n_rows, n_cols, numbers):
    rows = [operand for i, operand in enumerate(operands) if i != 2]  # all but stats
    vectors = numbers[2] % 8 == 0 and on_boundaries(n_cols, rows)
    found = plan(n_cols, operands[0].dtype.itemsize, len(rows) - 1)
    n_slots, fits, team_bits, n_threads, n_shared = found
    launch(
        kernels[n_slots, fits], -(-n_rows // n_shared), n_threads, *operands, n_rows, n_cols,
        team_bits, vectors, *numbers, flat=True, overlap=True,
    )  # fmt: skip


def plan(n_cols, itemsize, n_held):
    """(slots per thread, whether a row fits, team_bits, threads per block, rows per block).

    n_held  arrays held in registers: 1 forward, 2 backward
    """
    if n_cols > ROW_LIMIT[n_held]:
        return LONG_SLOTS, False, WHOLE_BLOCK, LONG_BLOCK_SIZE, 1
    n_slots, team_bits, n_threads, n_shared = share_out(n_cols, itemsize, n_held)
    return n_slots, True, team_bits, n_threads, n_shared


def _ladder(naive_kernel, online_kernel, kernels):
    return Ladder(
        Rung(
            "naive", functools.partial(_launch_by_element, naive_kernel, ladder.BLOCK_SIZE),
            (naive_kernel,),
        ),
        Rung(
            "online", functools.partial(_launch_by_element, online_kernel, 1), (online_kernel,),
        ),
        Rung(
            "registers", functools.partial(_launch_registers, kernels), tuple(kernels.values()),
        ),
        auto="registers",
    )  # fmt: skip


FORWARD = _ladder(ladder.naive_kernel, ladder.online_kernel, _forward)
BACKWARD = _ladder(ladder.naive_backward_kernel, ladder.online_backward_kernel, _backward)


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    numbers = ["float32", "uint32", "int64", "uint32", "uint32"]
    for dtype in DTYPES:
        row, stats = (dtype, 1), ("float32", 1)
        for direction, operands, rungs, kernels in (
            ("forward", [row, row, stats], FORWARD, _forward),
            ("backward", [row, row, stats, row], BACKWARD, _backward),
        ):
            label = f"softmax_dropout.{direction}"
            for name in ("naive", "online"):
                types = [*operands, "int64", *numbers]
                yield f"{label} {name} {dtype}", *rungs[name].kernels, types
            types = [*operands, "int64", "int64", "int64", "boolean", *numbers]
            for n_slots in usable_slots(4 if dtype == "float32" else 2):
                yield f"{label} registers, {n_slots} slots, {dtype}", kernels[n_slots, True], types
            yield f"{label} registers, long rows, {dtype}", kernels[LONG_SLOTS, False], types
