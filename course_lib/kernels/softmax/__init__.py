"""Softmax and log-softmax over the last axis: y = exp(x − m) / Σ exp(x − m), m the row's largest.

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
=========== ================================================= ===================== ===============

Along another axis than the last, numbers of a row are far apart in memory, and neighbouring rows
side by side. There `forward_along` and `backward_along` take the rung `strided`: a thread takes 16
bytes of neighbouring rows, so that memory is read in order. Up to 16 numbers of each are held in
registers and read once; longer rows are read twice (3·n·s / 5·n·s).

By default a row goes to `registers` if a block's registers can hold it, else to `split`. Clusters
need compute capability 9.0.

As in PyTorch: −inf is a masked element, of which y is 0 (log-softmax: −inf); a row of nothing but
−inf, and one with NaN or +inf anywhere, is NaN throughout. Sums are taken in a fixed order: two
runs agree bit for bit.

Maximum and sum in one pass: Milakov and Gimelshein, Online normalizer calculation for softmax
(2018). Derivations: notebooks 03 (forward) and 04 (backward).
"""

import math

from course_lib.kernels.blocks.columns import seen_from
from course_lib.kernels.blocks.softmax_formulas import LOG_SOFTMAX, SOFTMAX
from course_lib.kernels.operation import AUTO
from course_lib.kernels.softmax import strided
from course_lib.kernels.softmax.direction import backward_direction, forward_direction
from course_lib.kernels.softmax.plan import ROW_LIMIT
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch_cache import cached_launch
from course_lib.runtime.host.outputs import output

DTYPES = ("float32", "float16", "bfloat16")


class Softmax:
    """One of the two operations: its kernels and their launchers."""

    saves = "y"  # what `backward` needs beside dy

    def __init__(self, formulas):
        self.name = formulas.name
        self._forward, self._backward = forward_direction(formulas), backward_direction(formulas)
        self._forward_strided = strided.forward_strided(formulas)
        self._backward_strided = strided.backward_strided(formulas)
        self.FORWARD, self.BACKWARD = self._forward.LADDER, self._backward.LADDER

    @cached_launch(1)
    def forward(self, x, *, variant=AUTO, out=None):
        """y, of the shape, dtype and device of `x`; contiguous.

        `out`, if given, receives y. Raises ArrayError for a wrong dtype, shape or device and
        ValueError for an unknown variant, or for rows too long for `registers`. An `x` that is not
        contiguous is copied first, because the kernels take rows one after another.
        """
        arrays.require(x, "x", dtypes=DTYPES)
        return _run(self.FORWARD, variant, (arrays.contiguous(x),), out)

    @cached_launch(2)
    def backward(self, dy, y, *, variant=AUTO, out=None):
        """dx from `dy` and forward's output `y`; of one shape and dtype. Raises as `forward`."""
        arrays.require(y, "y", dtypes=DTYPES)
        arrays.require(dy, "dy", shape=y.shape, dtypes=(arrays.dtype_name(y),))
        inputs = arrays.contiguous(dy), arrays.contiguous(y)
        return _run(self.BACKWARD, variant, inputs, out)

    def forward_along(self, x, axis, *, out=None):
        """As `forward`, along axis `axis` of `x`, counted from the front; by the rung `strided`."""
        arrays.require(x, "x", dtypes=DTYPES)
        return _run_along(self._forward_strided, axis, (arrays.contiguous(x),), out)

    def backward_along(self, dy, y, axis, *, out=None):
        """As `backward`, along axis `axis`, counted from the front; by the rung `strided`."""
        arrays.require(y, "y", dtypes=DTYPES)
        arrays.require(dy, "dy", shape=y.shape, dtypes=(arrays.dtype_name(y),))
        inputs = arrays.contiguous(dy), arrays.contiguous(y)
        return _run_along(self._backward_strided, axis, inputs, out)


def _result(out, inputs):
    names = ("x",) if len(inputs) == 1 else ("dy", "y")
    # One of them may be `out` itself: the thread that writes an element has read it before.
    reads = {
        name: array for name, array in zip(names, inputs, strict=True)
        if out is None or arrays.address_of(array) != arrays.address_of(out)
    }  # fmt: skip
    return output(out, inputs[0].shape, like=inputs[0], reads=reads)


def _run_along(direction, axis, inputs, out):
    shape = tuple(inputs[0].shape)
    if not 0 <= axis < len(shape):
        raise ValueError(f"an array of shape {shape} has no axis {axis}")
    result = _result(out, inputs)
    if math.prod(shape):
        direction.launch(*seen_from(shape, axis), (*inputs, result))
    return result


def _run(ladder, variant, inputs, out):
    shape = tuple(inputs[0].shape)
    n_cols = shape[-1] if shape else 1
    rung = ladder.rung(variant, inputs[0], lambda: default_variant(n_cols, len(inputs)))
    result = _result(out, inputs)
    if n_elements := math.prod(shape):
        rung.launch(n_elements // n_cols, n_cols, (*inputs, result))
    return result


def default_variant(n_cols, n_inputs):
    """The rung that AUTO takes for rows of `n_cols`; `n_inputs` is 1 forward, 2 backward."""
    return "registers" if n_cols <= ROW_LIMIT[n_inputs] else "split"


softmax = Softmax(SOFTMAX)
log_softmax = Softmax(LOG_SOFTMAX)
FORWARD, BACKWARD, forward, backward = (
    softmax.FORWARD, softmax.BACKWARD, softmax.forward, softmax.backward,
)  # fmt: skip
OPERATIONS = {operation.name: operation for operation in (softmax, log_softmax)}


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for operation in OPERATIONS.values():
        for n_inputs, *directions in (
            (1, operation._forward, operation._forward_strided),
            (2, operation._backward, operation._backward_strided),
        ):
            name = "forward" if n_inputs == 1 else "backward"
            for direction in directions:
                for label, kernel, types in direction.specialisations(n_inputs, DTYPES):
                    yield f"{operation.name}.{name} {label}", kernel, types
