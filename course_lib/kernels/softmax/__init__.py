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
`split`     a cluster of blocks that exchange partial         1 / 1, or 2 / 2 where 2·n·s / 3·n·s,
            results; any length                               no cluster can hold   or 3·n·s / 5·n·s
                                                              the row
=========== ================================================= ===================== ===============

By default a row goes to `registers` if a block's registers can hold it, else to `split`. Clusters
need compute capability 9.0.

As in PyTorch: −inf is a masked element, of which y is 0 (log-softmax: −inf); a row of nothing but
−inf, and one with NaN or +inf anywhere, is NaN throughout. Sums are taken in a fixed order: two
runs agree bit for bit.

Maximum and sum in one pass: Milakov and Gimelshein, Online normalizer calculation for softmax
(2018). Derivations: notebooks 03 (forward) and 04 (backward).
"""

import math

from course_lib.kernels.softmax import formulas, ladder, registers
from course_lib.kernels.softmax.plan import ROW_LIMIT, SLOTS, plan
from course_lib.runtime import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.launch import launch

DTYPES = ("float32", "float16", "bfloat16")
DEFAULT = "auto"  # `registers` where the row fits, else `split`


class Softmax:
    """One of the two operations: its kernels and their launchers."""

    saves = "y"  # what `backward` needs beside dy

    def __init__(self, operation):
        self.name = operation.name
        made = [registers.forward_kernels(operation, n) for n in SLOTS]
        self._registers = dict(zip(SLOTS, made, strict=True))
        made = [registers.backward_kernels(operation, n) for n in SLOTS]
        self._registers_backward = dict(zip(SLOTS, made, strict=True))
        self.VARIANTS = ladder.forward_kernels(operation) | {"registers": self._registers}
        self.BACKWARD_VARIANTS = ladder.backward_kernels(operation) | {
            "registers": self._registers_backward
        }

    def forward(self, x, *, variant=DEFAULT, out=None):
        """y, of the shape, dtype and device of `x`; contiguous.

        `out`, if given, receives y. Raises ArrayError for a wrong dtype, shape or device and
        ValueError for an unknown variant, or for rows too long for `registers`. An `x` that is not
        contiguous is copied first, because the kernels take rows one after another.
        """
        arrays.require(x, "x", dtypes=DTYPES)
        return self._run(self.VARIANTS, variant, (arrays.contiguous(x),), out)

    def backward(self, dy, y, *, variant=DEFAULT, out=None):
        """dx from `dy` and forward's output `y`; of one shape and dtype. Raises as `forward`."""
        arrays.require(y, "y", dtypes=DTYPES)
        arrays.require(dy, "dy", shape=y.shape, dtypes=(arrays.dtype_name(y),))
        inputs = arrays.contiguous(dy), arrays.contiguous(y)
        return self._run(self.BACKWARD_VARIANTS, variant, inputs, out)

    def _run(self, variants, variant, inputs, out):
        if variant != DEFAULT and variant not in variants:
            raise ValueError(f"unknown variant {variant!r}; there are {', '.join(variants)}")
        model = inputs[0]
        shape = tuple(model.shape)
        result = arrays.empty(shape, like=model) if out is None else out
        if out is not None:
            dtype = arrays.dtype_name(model)
            arrays.require(out, "out", shape=shape, dtypes=(dtype,), writable=True)
            if not arrays.is_contiguous_array(out):
                raise arrays.ArrayError(
                    f"out must be contiguous; its strides are {arrays.strides_of(out)}"
                )
        n_elements = math.prod(shape)
        if n_elements == 0:
            return result
        n_cols = shape[-1] if shape else 1
        n_rows = n_elements // n_cols
        if variant == DEFAULT:
            variant = default_variant(n_cols, len(inputs))
        operands = (*inputs, result)
        if variant == "registers":
            _launch_registers(variants[variant], n_rows, n_cols, operands)
        else:
            n_blocks = -(-n_rows // ladder.BLOCK_SIZE) if variant == "naive" else n_rows
            launch(variants[variant], n_blocks, ladder.BLOCK_SIZE, *operands, n_cols, flat=True)
        return result


def default_variant(n_cols, n_inputs):
    """The rung that DEFAULT takes for rows of `n_cols`; `n_inputs` is 1 forward, 2 backward."""
    return "registers" if n_cols <= ROW_LIMIT[n_inputs] else "split"


def _launch_registers(kernels, n_rows, n_cols, operands):
    n_arrays = len(operands) - 1
    if n_cols > ROW_LIMIT[n_arrays]:
        raise ValueError(
            f"variant 'registers' takes rows of at most {ROW_LIMIT[n_arrays]:,} elements, not "
            f"{n_cols:,}: use 'split'"
        )
    n_slots, team_bits, n_threads = plan(n_rows, n_cols, operands[0].dtype.itemsize, n_arrays)
    team_kernel, block_kernel = kernels[n_slots]
    vectors = on_boundaries(n_cols, operands)
    if team_bits is None:
        launch(block_kernel, n_rows, n_threads, *operands, n_cols, vectors, flat=True, overlap=True)
        return
    n_blocks = -(-(n_rows << team_bits) // n_threads)
    launch(
        team_kernel, n_blocks, n_threads, *operands, n_rows, n_cols, team_bits, vectors,
        flat=True, overlap=True,
    )  # fmt: skip


def on_boundaries(n_cols, operands):
    """Whether every row of every operand begins on a 16-byte boundary."""
    row_bytes = n_cols * operands[0].dtype.itemsize
    addresses = [arrays.address_of(operand) for operand in operands]
    return not any(number % VECTOR_BYTES for number in (row_bytes, *addresses))


softmax = Softmax(formulas.SOFTMAX)
log_softmax = Softmax(formulas.LOG_SOFTMAX)
OPERATIONS = {operation.name: operation for operation in (softmax, log_softmax)}
