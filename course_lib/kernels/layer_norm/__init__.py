"""Layer normalisation: every row to mean 0 and variance 1, then weight and bias.

y = x̂·weight + bias with x̂ = (x − mean)·rstd and rstd = 1/√(var + eps), mean and variance over the
last axis. Any shape of one dimension at least; float32, float16 or bfloat16 in and out, float32 in
between. weight and bias have an element for each column, float32 or x's dtype, and either may be
missing. With `n` elements of `s` bytes the forward pass must move 2·n·s bytes (read x, write y),
the backward pass 3·n·s (read dy and x, write dx); what belongs to rows or columns alone is little.
About eight FLOPs an element forward and twelve backward, so memory is the limit.

============ =========================================== ================= =================
rung         a row is worked on by                       reads of x        of dy and x
============ =========================================== ================= =================
`registers`  some lanes of a warp or a block, 16 bytes   1: 2·n·s          1: 3·n·s
             at a time; held in registers
`streamed`   several blocks, 16 bytes at a time; any     2: 3·n·s          2: 5·n·s
             length; their moments by Chan's formulas
============ =========================================== ================= =================

Backward, with g = dy·weight and sums over the row's C columns:

    dx = rstd·(g − Σ g/C − x̂·Σ g·x̂/C)     dweight = Σ dy·x̂     dbias = Σ dy, both over the rows

The latter are taken in two stages, partial sums of some rows each and a last kernel that adds those
up: no atomics, two runs agree bit for bit. By default a row goes to `registers`, where a block can
hold it, and else to `streamed`.

Every rung subtracts the mean before it squares. `registers` also corrects what rounding left of the
mean, so that rows far from zero keep their digits. As in PyTorch, a row with NaN or ±inf is NaN
throughout.

The rungs before these, a thread and then a block for each row, are those of softmax (notebook 03)
and of batch normalisation (notebook 10), and so are not written out again.

Sources: J. Ba, J. Kiros and G. Hinton (2016); Welford (1962); Chan, Golub and LeVeque (1979).
"""

import math

from course_lib.kernels.blocks.row_plan import STREAM_THREADS
from course_lib.kernels.layer_norm import columns, features, plan, registers, streamed
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch
from course_lib.runtime.host.outputs import output

DTYPES = ("float32", "float16", "bfloat16")
#: (Slots per thread, whether rows begin on 16-byte boundaries) -> kernel.
_forward = {(n, vectors): registers.forward_kernel(n, vectors)
            for n in (1, 2, 4) for vectors in (True, False)}  # fmt: skip
_backward = {(n, vectors): registers.backward_kernel(n, vectors)
             for vectors in (True, False)
             for n in (plan.most_slots(size, plan.BACKWARD_VALUES[vectors]) for size in (2, 4))
             }  # fmt: skip


def forward(x, weight=None, bias=None, *, eps=1e-5, variant=AUTO, out=None):
    """(y, mean, rstd): y of x's shape and dtype; each row's statistics, float32, for `backward`.

    x             (…, C)
    weight, bias  (C,), both float32 or both of x's dtype; either may be None
    eps           added to the variance
    out           receives y; it may be `x`

    y is contiguous; mean and rstd have the shape of x without its last axis. An `x` that is not
    contiguous is copied first, because the kernels take rows one after another. Raises ArrayError
    for a wrong dtype, shape or device, and ValueError for an unknown variant, or for rows too long
    for `registers`.
    """
    n_rows, n_cols = _check(x, weight, bias)
    rung = FORWARD.rung(variant, x, lambda: default_variant("forward", n_cols))
    x = arrays.contiguous(x)
    y = _output(out, x=x, weight=weight, bias=bias)
    mean, rstd = (arrays.empty(tuple(x.shape[:-1]), like=x, dtype="float32") for _ in range(2))
    if n_rows * n_cols:
        rung.launch(n_rows, n_cols, x, y, _affine(weight, bias, mean), (mean, rstd), float(eps))
    elif n_rows:  # rows of nothing, as PyTorch has them
        mean[...], rstd[...] = 0, math.nan
    return y, mean, rstd


def backward(dy, x, weight, mean, rstd, *, sums=True, variant=AUTO, out=None):
    """(dx, dweight, dbias): the first of x's shape and dtype, (C,) of weight's (or float32) the
    others.

    x, weight   as given to `forward`; mean and rstd as it returned them
    sums        False where nobody wants dweight and dbias: both are None then
    out         receives dx; it may be `dy` or `x`

    Raises as `forward` does.
    """
    n_rows, n_cols = _check(x, weight, None)
    dtype = arrays.dtype_name(x)
    arrays.require(dy, "dy", shape=x.shape, dtypes=(dtype,))
    for name, array in (("mean", mean), ("rstd", rstd)):
        arrays.require(array, name, shape=tuple(x.shape[:-1]), dtypes=("float32",))
    dy, x, mean, rstd = map(arrays.contiguous, (dy, x, mean, rstd))
    dx = _output(out, dy=dy, x=x, weight=weight, mean=mean, rstd=rstd)
    stand_in, _, has_weight, _ = _affine(weight, None, mean)
    scale, statistics = (stand_in, has_weight), (mean, rstd)
    vectors = plan.on_boundaries(n_cols, dy, x, dx, stand_in)
    rung = BACKWARD.rung(variant, x, lambda: default_variant("backward", n_cols, vectors))
    dweight = dbias = None
    if sums:
        of_weight = "float32" if weight is None else arrays.dtype_name(weight)
        dweight, dbias = (arrays.empty((n_cols,), like=x, dtype=of_weight) for _ in range(2))
    if n_rows * n_cols == 0:
        for gradient in (dweight, dbias) if sums else ():
            gradient[...] = 0  # sums over nothing
        return dx, dweight, dbias
    gradients = (dweight, dbias) if sums else None
    rung.launch(n_rows, n_cols, (dy, x), scale, statistics, dx, gradients)
    return dx, dweight, dbias


def default_variant(direction, n_cols, vectors=True):
    """The rung that AUTO takes for rows of `n_cols`, "forward" or "backward".

    vectors  whether all rows begin on 16-byte boundaries; it matters backward
    """
    limit = plan.FORWARD_LIMIT if direction == "forward" else plan.BACKWARD_LIMIT[vectors]
    return "registers" if n_cols <= limit else "streamed"


def _check(x, weight, bias):
    """(rows, columns)."""
    arrays.require(x, "x", dtypes=DTYPES)
    shape = tuple(x.shape)
    if not shape:
        raise arrays.ArrayError("x must have rows to normalise, but it is a single number")
    given = {name: a for name, a in (("weight", weight), ("bias", bias)) if a is not None}
    allowed = tuple(dict.fromkeys(("float32", arrays.dtype_name(x))))
    for name, array in given.items():
        arrays.require(array, name, shape=shape[-1:], dtypes=allowed)
        allowed = (arrays.dtype_name(array),)
    return math.prod(shape[:-1]), shape[-1]


def _output(out, **reads):
    """Where the result goes; it may be an input of its shape, which each thread reads first."""
    model = reads["x"]
    if out is not None:
        same = [name for name in ("x", "dy") if name in reads and _is(out, reads[name])]
        reads = {name: array for name, array in reads.items() if name not in same}
    return output(out, tuple(model.shape), like=model, reads=reads)


def _is(a, b):
    return arrays.address_of(a) == arrays.address_of(b)


def _affine(weight, bias, unused):
    """Weight and bias as kernels take them: an array in any case, and whether it counts."""
    stand_in = next((array for array in (weight, bias) if array is not None), unused)
    found = [stand_in if array is None else array for array in (weight, bias)]
    return *map(arrays.contiguous, found), weight is not None, bias is not None


def _launch_registers(n_rows, n_cols, x, y, affine, statistics, eps):
    if n_cols > plan.FORWARD_LIMIT:
        raise _too_long(n_cols, plan.FORWARD_LIMIT)
    found = plan.forward_plan(n_cols, x.dtype.itemsize)
    vectors = plan.on_boundaries(n_cols, x, y, *affine[:2])
    launch(
        _forward[found.n_slots, vectors], math.ceil(n_rows / found.n_teams), found.n_threads, x, y,
        *affine, *statistics, eps, n_rows, n_cols, found.team_bits, flat=True, overlap=True,
    )  # fmt: skip


def _launch_registers_backward(n_rows, n_cols, inputs, scale, statistics, dx, gradients):
    """Fill dx and, as all launchers of this pass, `gradients`: dweight and dbias, or None."""
    vectors, itemsize = plan.on_boundaries(n_cols, *inputs, dx, scale[0]), dx.dtype.itemsize
    if n_cols > plan.BACKWARD_LIMIT[vectors]:
        raise _too_long(n_cols, plan.BACKWARD_LIMIT[vectors])
    found = plan.backward_plan(n_cols, itemsize, vectors)
    n_blocks = plan.n_blocks(found, n_rows, itemsize, chip_of(dx).multiprocessors)
    several = gradients is not None and n_blocks > 1
    partial = columns.partial_sums(dx, n_blocks, n_cols, several)
    launch(
        _backward[found.n_slots, vectors], n_blocks, found.n_threads, *inputs, *scale,
        *statistics, dx, partial, *(gradients or (scale[0], scale[0])), gradients is not None,
        n_rows, n_cols, found.team_bits,
        shared_bytes=found.n_threads * plan.record_bytes(vectors), flat=True, overlap=True,
    )  # fmt: skip
    if several:
        features.finish(partial, n_blocks, n_cols, *gradients)


def _too_long(n_cols, limit):
    return ValueError(
        f"variant 'registers' takes rows of at most {limit:,} elements here, not {n_cols:,}: use "
        "'streamed'"
    )


FORWARD = Ladder(
    Rung("registers", _launch_registers, tuple(_forward.values())),
    Rung("streamed", streamed.launch_forward, (streamed.moments_kernel, streamed.normalise_kernel)),
)
BACKWARD = Ladder(
    Rung("registers", _launch_registers_backward, (*_backward.values(), features.finish_kernel)),
    Rung(
        "streamed", streamed.launch_backward,
        (
            streamed.shares_kernel, streamed.merge_kernel, streamed.vector_columns_kernel,
            columns.columns_kernel, features.finish_kernel,
        ),
    ),
)  # fmt: skip


def most_threads(label, chip):
    """Of the largest block that the kernel of this label is launched with."""
    if " registers" in label:
        return plan.FORWARD_THREADS if ".forward" in label else plan.BACKWARD_THREADS
    if " finish " in label:
        return features.FINISH_BLOCK_SIZE
    return max(columns.BLOCK_SIZE, STREAM_THREADS)


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        for other in dict.fromkeys((dtype, "float32")):
            suffix = dtype if other == dtype else f"{dtype} with {other} features"
            yield from _specialisations(dtype, other, suffix)
        row, numbers = (dtype, 1), ("float32", 1)
        types = [row, numbers, "int64", "int64", "int64", "boolean"]
        yield f"layer_norm.forward streamed, moments, {dtype}", streamed.moments_kernel, types
        types = [numbers, row, row, *["int64"] * 3]
        yield f"layer_norm.backward finish {dtype}", features.finish_kernel, types
    types = [numbers, numbers, "int64", "int64", "int64"]
    yield "layer_norm.backward streamed, merge", streamed.merge_kernel, types


def _specialisations(dtype, other, suffix):
    row, feature, numbers, flag = (dtype, 1), (other, 1), ("float32", 1), "boolean"
    itemsize = 4 if dtype == "float32" else 2
    part = ["int64"] * 3 + [flag]
    forward = [row, row, feature, feature, flag, flag, numbers, numbers, "float32"]
    backward = [row, row, feature, flag, numbers, numbers]
    rows = [
        ("forward streamed, normalise,", streamed.normalise_kernel, [*forward, numbers, *part]),
        ("backward streamed, shares,", streamed.shares_kernel, [*backward, numbers, *part]),
    ]
    for name, kernel in (
        ("columns", columns.columns_kernel), ("vector columns", streamed.vector_columns_kernel),
    ):  # fmt: skip
        types = [*backward, numbers, row, numbers, flag, *["int64"] * 3]
        rows.append((f"backward {name}", kernel, types))
    for vectors, kind in ((True, "vectors"), (False, "elements")):
        for n_slots in (n for n in (1, 2, 4) if n <= plan.most_slots(itemsize)):
            label = f"forward registers, {n_slots} slots, {kind},"
            rows.append((label, _forward[n_slots, vectors], [*forward, *["int64"] * 3]))
        types = [*backward, row, numbers, feature, feature, flag, *["int64"] * 3]
        kernel = _backward[plan.most_slots(itemsize, plan.BACKWARD_VALUES[vectors]), vectors]
        rows.append((f"backward registers, {kind},", kernel, types))
    for label, kernel, types in rows:
        yield f"layer_norm.{label} {suffix}", kernel, types
