"""Batch normalisation, ReLU and softmax of rows in one pass: y = softmax(relu(z)).

x is (N, C); z = (x − mean)·weight / sqrt(var + eps) + bias with statistics that are given, as in
inference; the softmax is over the C features of a row. float32, float16 or bfloat16 in and out,
float32 in between. mean, var, weight and bias have C elements, all float32 or all of x's dtype.
With n = N·C elements of `s` bytes the forward pass must move 2·n·s bytes (read x, write y), the
backward pass 4·n·s (read dy, y and x, write dx); the features' own numbers are few, and stay in
caches and shared memory. PyTorch's three operations move 6·n·s forward and 11·n·s backward.

With d = y·(dy − Σ y·dy), the gradient of softmax, and dz = d where z > 0, else 0:

    dx = dz·weight / sqrt(var + eps)     dweight = Σ dz·(x − mean) / sqrt(var + eps)
                                         dbias   = Σ dz, both over the N rows

=========== ==================================================== ================= =================
rung        a row is worked on by                                reads of x        of dy, y and x
=========== ==================================================== ================= =================
`naive`     one thread, in three passes                          3                 3, 3 and 2
`online`    a block; maximum and sum in one pass                 2                 3, 3 and 2
`registers` some lanes of a warp or a block, 16 bytes at a time; 1                 1
            held in registers. Blocks stay for many rows and
            compute their features' numbers once. Rows beyond
            `row_limit` go as in `online`
=========== ==================================================== ================= =================

The sums over rows are taken in two stages: `registers` keeps them in registers as its blocks go
along and writes 2·C float32 partial sums for each block; the other rungs need a kernel that reads
dy, y and x once more. A last kernel adds the partial sums up. No atomics: two runs agree bit for
bit.

As in PyTorch: NaN passes ReLU; a row with NaN or with z = +inf anywhere is NaN throughout; ReLU's
gradient at 0 is 0.

Batch normalisation: Ioffe and Szegedy (2015). Derivation: notebook 05.
"""

import functools

import numpy as np

from course_lib.kernels.blocks.row_teams import WHOLE_BLOCK
from course_lib.kernels.blocks.rows import on_boundaries
from course_lib.kernels.bn_relu_softmax import features, ladder, registers
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.host.outputs import output
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float16", "bfloat16")
SLOTS = (1, 2)
CHOICES = tuple((n_slots, vectors) for n_slots in SLOTS for vectors in (True, False))
MOST_VALUES = 8  # numbers of each array that a thread holds: two rows forward, three rows backward
#: Most threads of a block, so that their registers fit one multiprocessor: on sm_75 and sm_80, and
#: from sm_90 on. By direction, and whether rows begin on 16-byte boundaries.
MOST_THREADS = {
    ("forward", True): (512, 1024),
    ("forward", False): (512, 1024),
    ("backward", True): (384, 1024),
    ("backward", False): (384, 640),
}
TEAM_BLOCK_SIZE = 256  # threads of a block that several rows share
#: Threads per row, by direction, up to which fewer slots beat fewer threads.
FEW_THREADS = {"forward": 128, "backward": 256}
ENOUGH_THREADS = 132 * 1024  # keep the largest chip of today busy, or as many again in small blocks
SMALL_BLOCK = 128
ROWS_PER_PART = 64  # at least, of the rungs that sum columns by a kernel of their own
STATIC_SHARED_BYTES = 2048  # more than any kernel here has beside the table of features
#: (slots per thread, whether rows begin on 16-byte boundaries) -> kernel.
_forward = {(n, vectors): registers.forward_kernel(n, vectors) for n, vectors in CHOICES}
_backward = {(n, vectors): registers.backward_kernel(n, vectors) for n, vectors in CHOICES}


def forward(x, mean, var, weight, bias, *, eps=1e-5, variant=AUTO, out=None):
    """y = softmax(relu(batch_norm(x))), of the shape, dtype and device of `x`; contiguous.

    x                        (N, C)
    mean, var, weight, bias  (C,), all float32 or all of x's dtype
    eps                      added to var

    `out`, if given, receives y. Raises ArrayError for a wrong dtype, shape or device, and
    ValueError for an unknown variant or an eps below 0. An `x` that is not contiguous is copied
    first, because the kernels take rows one after another.
    """
    parameters = _checked(x, mean, var, weight, bias, eps)
    rung = FORWARD.rung(variant, x)
    x = arrays.contiguous(x)
    names = "mean", "var", "weight", "bias"
    reads = dict(zip(("x", *names), (x, *parameters), strict=True))
    y = output(out, x.shape, like=x, reads=reads)
    n_rows, n_cols = x.shape
    if n_rows * n_cols:
        rung.launch((x, y, *parameters, np.float32(eps)), n_rows, n_cols)
    return y


def backward(dy, y, x, mean, var, weight, bias, *, eps=1e-5, variant=AUTO, out=None):
    """(dx, dweight, dbias), from `dy`, forward's output `y`, and what forward was given.

    dx has shape and dtype of x, dweight and dbias those of weight. `out`, if given, receives dx.
    Raises as `forward` does; dy, y and x must agree in shape and dtype.
    """
    parameters = _checked(x, mean, var, weight, bias, eps)
    for array, name in ((dy, "dy"), (y, "y")):
        arrays.require(array, name, shape=x.shape, dtypes=(arrays.dtype_name(x),))
    rung = BACKWARD.rung(variant, x)
    inputs = tuple(arrays.contiguous(array) for array in (dy, y, x))
    names = "dy", "y", "x", "mean", "var", "weight", "bias"
    reads = dict(zip(names, (*inputs, *parameters), strict=True))
    dx = output(out, x.shape, like=x, reads=reads)
    dweight, dbias = (arrays.empty(tuple(weight.shape), like=weight) for _ in range(2))
    n_rows, n_cols = x.shape
    if n_cols == 0:
        return dx, dweight, dbias
    eps = np.float32(eps)
    if n_rows == 0:
        partial, n_parts = _partial_sums(dx, 1, n_cols), 0
    else:
        partial, n_parts = rung.launch((*inputs, *parameters), dx, eps, n_rows, n_cols)
    launch(
        features.finish_kernel, -(-2 * n_cols // 32), features.FINISH_BLOCK_SIZE,
        partial, parameters[1], dweight, dbias, eps, n_parts, n_cols, flat=True, overlap=True,
    )  # fmt: skip
    return dx, dweight, dbias


def _checked(x, mean, var, weight, bias, eps):
    """The contiguous parameters, once all is checked."""
    arrays.require(x, "x", dtypes=DTYPES, n_dims=2)
    dtypes = tuple(dict.fromkeys(("float32", arrays.dtype_name(x))))
    arrays.require(mean, "mean", shape=x.shape[1:], dtypes=dtypes)
    parameters = mean, var, weight, bias
    for array, name in zip(parameters, ("mean", "var", "weight", "bias"), strict=True):
        arrays.require(array, name, shape=x.shape[1:], dtypes=(arrays.dtype_name(mean),))
    if not eps >= 0:
        raise ValueError(f"eps must be at least 0, not {eps!r}")
    return tuple(arrays.contiguous(array) for array in parameters)


def row_limit(direction, vectors, chip):
    """Most features that `registers` holds: `direction` "forward" or "backward", `chip` (9, 0)."""
    return MOST_VALUES * MOST_THREADS[direction, vectors][chip >= (9, 0)]


def plan(direction, x, vectors, chip):
    """(slots, team_bits, threads and rows per block, shared bytes), or None for rows too long."""
    n_cols, width = x.shape[1], VECTOR_BYTES // x.dtype.itemsize
    if n_cols > row_limit(direction, vectors, chip.capability):
        return None
    n_vectors = -(-n_cols // width)
    slots = [n for n in SLOTS if n * width <= MOST_VALUES]
    n_slots = next((n for n in slots if n_vectors <= 32 * n), None)
    if n_slots is not None:
        team_bits = (-(-n_vectors // n_slots) - 1).bit_length()
        n_threads, n_ranks = TEAM_BLOCK_SIZE, 1 << team_bits
    else:
        few = FEW_THREADS[direction]
        n_slots = next((n for n in slots if n_vectors <= few * n), slots[-1])
        n_ranks = n_threads = -(-n_vectors // (32 * n_slots)) * 32
        team_bits = WHOLE_BLOCK
    n_shared = n_threads // n_ranks
    # The table of features; at the end of the backward pass, two sums of each team in its place.
    n_floats = max((3 * n_slots * width + 1) * n_ranks, 2 * n_shared * n_cols)
    if 4 * n_floats + STATIC_SHARED_BYTES > chip.shared_bytes:
        return None
    return n_slots, team_bits, n_threads, n_shared, 4 * n_floats


def _n_blocks(n_rows, n_threads, n_shared):
    enough = ENOUGH_THREADS * (2 if n_threads <= SMALL_BLOCK else 1)
    return min(-(-n_rows // n_shared), max(1, enough // n_threads))


def _partial_sums(model, n_parts, n_cols):
    return arrays.empty((n_parts, 2, n_cols), like=model, dtype="float32")


def _launch_by_element(kernel, rows_of_block, operands, n_rows, n_cols):
    n_blocks = -(-n_rows // rows_of_block)
    launch(kernel, n_blocks, ladder.BLOCK_SIZE, *operands, n_cols, flat=True)


_launch_naive = functools.partial(_launch_by_element, ladder.naive_kernel, ladder.BLOCK_SIZE)
_launch_online = functools.partial(_launch_by_element, ladder.online_kernel, 1)


def _launch_registers(operands, n_rows, n_cols):
    x, y, *_ = operands
    vectors = on_boundaries(n_cols, (x, y))
    if (found := plan("forward", x, vectors, chip_of(x))) is None:
        return _launch_online(operands, n_rows, n_cols)
    n_slots, team_bits, n_threads, n_shared, shared_bytes = found
    launch(
        _forward[n_slots, vectors], _n_blocks(n_rows, n_threads, n_shared), n_threads,
        *operands, n_rows, n_cols, team_bits, n_shared,
        shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip


# Backward, each returns (partial sums, how many parts) for `finish_kernel`.


def _launch_by_element_backward(kernel, rows_of_block, operands, dx, eps, n_rows, n_cols):
    totals = arrays.empty((n_rows,), like=dx, dtype="float32")
    n_blocks = -(-n_rows // rows_of_block)
    launch(kernel, n_blocks, ladder.BLOCK_SIZE, *operands, dx, totals, eps, n_cols, flat=True)
    n_column_blocks = -(-n_cols // features.COLUMNS_BLOCK_SIZE)
    most_parts = max(1, ENOUGH_THREADS // (n_column_blocks * features.COLUMNS_BLOCK_SIZE))
    n_parts = min(most_parts, -(-n_rows // ROWS_PER_PART))
    partial = _partial_sums(dx, n_parts, n_cols)
    launch(
        features.column_sums_kernel, n_parts * n_column_blocks, features.COLUMNS_BLOCK_SIZE,
        *operands, totals, partial, eps, n_rows, n_cols, n_parts, flat=True,
    )  # fmt: skip
    return partial, n_parts


_launch_naive_backward = functools.partial(
    _launch_by_element_backward, ladder.naive_backward_kernel, ladder.BLOCK_SIZE
)
_launch_online_backward = functools.partial(
    _launch_by_element_backward, ladder.online_backward_kernel, 1
)


def _launch_registers_backward(operands, dx, eps, n_rows, n_cols):
    dy, y, x, *_ = operands
    vectors = on_boundaries(n_cols, (dy, y, x, dx))
    if (found := plan("backward", x, vectors, chip_of(x))) is None:
        return _launch_online_backward(operands, dx, eps, n_rows, n_cols)
    n_slots, team_bits, n_threads, n_shared, shared_bytes = found
    n_parts = _n_blocks(n_rows, n_threads, n_shared)
    partial = _partial_sums(dx, n_parts, n_cols)
    launch(
        _backward[n_slots, vectors], n_parts, n_threads,
        *operands, dx, partial, eps, n_rows, n_cols, team_bits, n_shared,
        shared_bytes=shared_bytes, flat=True, overlap=True,
    )  # fmt: skip
    return partial, n_parts


_sums = features.column_sums_kernel, features.finish_kernel
FORWARD = Ladder(
    Rung("naive", _launch_naive, (ladder.naive_kernel,)),
    Rung("online", _launch_online, (ladder.online_kernel,)),
    Rung("registers", _launch_registers, (*_forward.values(), ladder.online_kernel)),
    auto="registers",
)
BACKWARD = Ladder(
    Rung("naive", _launch_naive_backward, (ladder.naive_backward_kernel, *_sums)),
    Rung("online", _launch_online_backward, (ladder.online_backward_kernel, *_sums)),
    Rung(
        "registers", _launch_registers_backward,
        (*_backward.values(), ladder.online_backward_kernel, *_sums),
    ),
    auto="registers",
)  # fmt: skip


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        for other in dict.fromkeys((dtype, "float32")):
            yield from _specialisations(dtype, other)


def _specialisations(dtype, other):
    row, feature, sums = (dtype, 1), (other, 1), ("float32", 1)
    suffix = dtype if other == dtype else f"{dtype} with {other} features"
    width = 4 if dtype == "float32" else 8
    place = ["int64"] * 4
    operands = [row, row, *[feature] * 4, "float32"]
    for kernel, name in ((ladder.naive_kernel, "naive"), (ladder.online_kernel, "online")):
        yield f"bn_relu_softmax.forward {name} {suffix}", kernel, [*operands, "int64"]
    for (n_slots, vectors), kernel in _forward.items():
        if n_slots * width <= MOST_VALUES:
            kind = "vectors" if vectors else "elements"
            label = f"bn_relu_softmax.forward registers, {n_slots} slots, {kind}, {suffix}"
            yield label, kernel, [*operands, *place]
    inputs = [row, row, row, *[feature] * 4]
    for kernel, name in (
        (ladder.naive_backward_kernel, "naive"), (ladder.online_backward_kernel, "online"),
    ):  # fmt: skip
        types = [*inputs, row, sums, "float32", "int64"]
        yield f"bn_relu_softmax.backward {name} {suffix}", kernel, types
    for (n_slots, vectors), kernel in _backward.items():
        if n_slots * width <= MOST_VALUES:
            kind = "vectors" if vectors else "elements"
            label = f"bn_relu_softmax.backward registers, {n_slots} slots, {kind}, {suffix}"
            yield label, kernel, [*inputs, row, sums, "float32", *place]
    types = [*inputs, sums, sums, "float32", *["int64"] * 3]
    yield f"bn_relu_softmax.backward column sums {suffix}", features.column_sums_kernel, types
    types = [sums, *[feature] * 3, "float32", "int64", "int64"]
    yield f"bn_relu_softmax.backward finish {suffix}", features.finish_kernel, types
