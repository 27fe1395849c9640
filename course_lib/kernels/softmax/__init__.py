"""Softmax and log-softmax over an axis: y = exp(x − m) / Σ exp(x − m), m the row's largest.

Any shape; float32, float16 or bfloat16 in and out, float32 in between. With `n` elements of `s`
bytes the forward pass must move 2·n·s bytes (read x, write y), the backward pass 3·n·s (read dy and
y, write dx: dx = y·(dy − Σ y·dy)); about five FLOPs and one exponential per element, so memory is
the limit.

=========== ================================================= ===================== ===============
rung        a row is worked on by                             reads of x, then of   bytes moved
                                                              dy and y together
=========== ================================================= ===================== ===============
`naive`     one thread, in three passes                       3 / 2                 4·n·s / 5·n·s
`shared`    a block; trees in shared memory                   3 / 2                 4·n·s / 5·n·s
`warp`      a block; shuffles                                 3 / 2                 4·n·s / 5·n·s
`online`    a block; maximum and sum in one pass              2 / no such rung      3·n·s
`registers` some lanes of a warp or a block, 16 bytes at a    1 / 1                 2·n·s / 3·n·s
            time; held in registers until it is stored
`split`     a block or a cluster of blocks that hold it in    1 / 1, or 2 / 2 where 2·n·s / 3·n·s,
            shared memory, copied there asynchronously; any   the row fits no       or 3·n·s / 5·n·s
            length                                            shared memory
`strided`   a thread that takes 16 bytes of neighbouring      1 / 1, or 2 / 2       2·n·s / 3·n·s,
            rows, along another axis than the last                                  or 3·n·s / 5·n·s
=========== ================================================= ===================== ===============

The last three have several ways, which `variant` may name as well. A rung takes the first that can
have the row:

==================== ============================================================================
way                  a row is held
==================== ============================================================================
`registers/team`     by neighbouring lanes of a warp: up to 512 float32, forward
`registers/block`    by a block
`split/shared`       in a block's shared memory
`split/cluster`      in that of the 2, 4 or 8 blocks of a cluster; needs compute capability 9.0
`split/streamed`     nowhere: two launches read it in parts, on any chip
`strided/held`       by a thread, up to 16 numbers of each of its rows
`strided/streamed`   nowhere: a thread reads it twice
==================== ============================================================================

Rows may begin between two 16-byte boundaries: only their ends go by single elements. Arrays that
begin there are copied first (`plan.on_boundaries`).

By default a row goes to `registers` if a block's registers can hold it, else to `split`. Along
another axis than the last, its numbers are far apart in memory, and neighbouring rows side by side:
there short or many rows go to `strided`, which reads memory in order. All other rungs take rows in
one piece: along such an axis they get a transposed copy, and their result is copied back.

As in PyTorch: −inf is a masked element, of which y is 0 (log-softmax: −inf); a row of nothing but
−inf, and one with NaN or +inf anywhere, is NaN throughout. Sums are taken in a fixed order: two
runs agree bit for bit.

Maximum and sum in one pass: Milakov and Gimelshein, Online normalizer calculation for softmax
(2018). Derivations: notebooks 03 (forward) and 04 (backward).
"""

import math

from course_lib.kernels.blocks.softmax_formulas import LOG_SOFTMAX, SOFTMAX
from course_lib.kernels.operation import AUTO
from course_lib.kernels.softmax.direction import backward_direction, forward_direction
from course_lib.kernels.softmax.plan import Problem
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of
from course_lib.runtime.host.launch_cache import cached_launch
from course_lib.runtime.host.outputs import output
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float16", "bfloat16")


class Softmax:
    """One of the two operations: its kernels and their launchers."""

    saves = "y"  # what `backward` needs beside dy

    def __init__(self, formulas):
        self.name = formulas.name
        self._forward, self._backward = forward_direction(formulas), backward_direction(formulas)
        self.FORWARD, self.BACKWARD = self._forward.LADDER, self._backward.LADDER

    @cached_launch(1)
    def forward(self, x, *, axis=-1, variant=AUTO, out=None):
        """y, of the shape, dtype and device of `x`; contiguous.

        `out`, if given, receives y. Raises ArrayError for a wrong dtype, shape or device, and
        ValueError for an axis or a variant that there is not, or for one that does not take such
        rows. An `x` that is not contiguous is copied first, because the kernels take memory in
        order.
        """
        arrays.require(x, "x", dtypes=DTYPES)
        return _run(self.FORWARD, self.forward, (arrays.contiguous(x),), axis, variant, out)

    @cached_launch(2)
    def backward(self, dy, y, *, axis=-1, variant=AUTO, out=None):
        """dx from `dy` and forward's output `y`; of one shape and dtype. Raises as `forward`."""
        arrays.require(y, "y", dtypes=DTYPES)
        arrays.require(dy, "dy", shape=y.shape, dtypes=(arrays.dtype_name(y),))
        inputs = arrays.contiguous(dy), arrays.contiguous(y)
        return _run(self.BACKWARD, self.backward, inputs, axis, variant, out)


def _run(ladder, launcher, inputs, axis, variant, out):
    shape = tuple(inputs[0].shape) or (1,)
    if not -len(shape) <= axis < len(shape):
        raise ValueError(f"an array of shape {tuple(inputs[0].shape)} has no axis {axis}")
    result = _result(out, inputs)
    if 0 in shape:
        ladder.require(variant)
        return result
    problem = _problem(shape, axis % len(shape), (*inputs, result))
    choice = ladder.choose(variant, problem, chip_of(result))
    if problem.step > 1 and choice.rung != "strided":
        return _by_rows(launcher, inputs, axis, variant, result)
    choice.way.launch(choice.plan, (*inputs, result))
    return result


def default_choice(ladder, inputs, axis=-1):
    """The `Choice` of AUTO for contiguous inputs, along an axis, and a result like them."""
    shape = tuple(inputs[0].shape) or (1,)
    problem = _problem(shape, axis % len(shape), (*inputs, inputs[0]))
    return ladder.choose(AUTO, problem, chip_of(inputs[0]))


def _problem(shape, axis, operands):
    """The `plan.Problem` of `operands` of this shape, along `axis`, counted from 0."""
    step, addresses = math.prod(shape[axis + 1 :]), 0
    for operand in operands:
        addresses |= arrays.address_of(operand)
    n_rows, aligned = math.prod(shape[:axis]) * step, not addresses % VECTOR_BYTES
    itemsize = operands[0].dtype.itemsize
    return Problem(n_rows, shape[axis], step, itemsize, len(operands) - 1, aligned)


def _by_rows(launcher, inputs, axis, variant, result):
    """`result`, by kernels that take rows in one piece: they get copies with `axis` last."""
    copies = (arrays.contiguous(arrays.with_axis_last(x, axis)) for x in inputs)
    arrays.fill(arrays.with_axis_last(result, axis), launcher(*copies, variant=variant))
    return result


def _result(out, inputs):
    if out is None:
        return arrays.empty(tuple(inputs[0].shape), like=inputs[0])
    names = ("x",) if len(inputs) == 1 else ("dy", "y")
    # One of them may be `out` itself: the thread that writes an element has read it before.
    reads = {
        name: array for name, array in zip(names, inputs, strict=True)
        if arrays.address_of(array) != arrays.address_of(out)
    }  # fmt: skip
    return output(out, inputs[0].shape, like=inputs[0], reads=reads)


softmax = Softmax(SOFTMAX)
log_softmax = Softmax(LOG_SOFTMAX)
FORWARD, BACKWARD, forward, backward = (
    softmax.FORWARD, softmax.BACKWARD, softmax.forward, softmax.backward,
)  # fmt: skip
OPERATIONS = {operation.name: operation for operation in (softmax, log_softmax)}


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for operation in OPERATIONS.values():
        for n_inputs, direction in ((1, operation._forward), (2, operation._backward)):
            name = "forward" if n_inputs == 1 else "backward"
            for label, kernel, types in direction.specialisations(n_inputs, DTYPES):
                yield f"{operation.name}.{name} {label}", kernel, types
