"""The linear layer, y = x·weightᵀ + bias, and its gradients.

x is (..., I), weight (O, I), bias (O,), y (..., O); float32, float16 or bfloat16 in and out, summed
in float32. With M rows of x,

    y = x·weightᵀ + bias         dx = dy·weight
    dweight = dyᵀ·x              dbias = Σ dy over the rows

Each of the three products is 2·M·I·O FLOPs, must move at least (M·I + O·I + M·O)·s bytes of `s`
bytes an element, and is one call of `gemm.multiply`: which of its inputs lie transposed is all that
tells them apart. The rungs, what they move, and what "tf32" means are told there. dbias reads dy
once more.

Derivation: notebook 10.
"""

import functools

from course_lib.kernels import gemm
from course_lib.kernels.blocks import column_sums
from course_lib.kernels.blocks.options import PRECISIONS, unknown_precision
from course_lib.kernels.operation import AUTO, Ladder, Rung, Way
from course_lib.runtime.host import arrays
from course_lib.runtime.host.outputs import output

DTYPES = gemm.DTYPES
ACTIVATIONS = ("none", "relu")
MOST_THREADS = 256  # of a block, for any kernel


def forward(
    x, weight, bias=None, *, activation="none", precision="float32", variant=AUTO, out=None
):
    """y = x·weightᵀ + bias, of x's dtype and device, contiguous.

    x, weight, bias  (..., I), (O, I), and (O,) or None, of one dtype
    activation       "none", or "relu": y is max(y, 0)
    precision        of float32 inputs: "float32", or "tf32" (see `gemm.multiply`)

    `out`, if given, receives y. Raises ArrayError for a wrong dtype, shape or device, and
    ValueError for an unknown variant, activation or precision. What is not contiguous is copied
    first, because the kernels take rows one after another.
    """
    if precision not in PRECISIONS:
        raise unknown_precision(precision)
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}; there are {', '.join(ACTIVATIONS)}")
    n_rows, n_in, n_out = _check(x, weight)
    dtype = arrays.dtype_name(x)
    if bias is not None:
        arrays.require(bias, "bias", shape=(n_out,), dtypes=(dtype,))
        bias = arrays.contiguous(bias)
    shape = (*x.shape[:-1], n_out)
    x, weight = arrays.contiguous(x), arrays.contiguous(weight)
    if out is None:
        y = arrays.empty(shape, like=x)
    else:
        y = output(out, shape, like=x, reads=dict(x=x, weight=weight, bias=bias))
    return gemm.multiply(
        x, weight, y, n_rows, n_out, n_in, bias=bias,
        relu=activation == "relu", precision=precision, variant=variant,
    )  # fmt: skip


def backward(
    dy, x, weight, *, with_bias=True, needs=(True, True, True), precision="float32",
    variant=AUTO,
):  # fmt: skip
    """(dx, dweight, dbias), of the shapes of x, of weight, and (O,); of one dtype with them.

    dy         (..., O), the gradient of y as it was before the activation
    with_bias  whether there was a bias; without one, dbias is None
    needs      whether dx, dweight and dbias are wanted; what is not is None

    Raises as `forward` does, which says more.
    """
    if precision not in PRECISIONS:
        raise unknown_precision(precision)
    n_rows, n_in, n_out = _check(x, weight)
    rung = BACKWARD.rung(variant, x)
    arrays.require(dy, "dy", shape=(*x.shape[:-1], n_out), dtypes=(arrays.dtype_name(x),))
    dx = arrays.empty(tuple(x.shape), like=x) if needs[0] else None
    dweight = arrays.empty(tuple(weight.shape), like=weight) if needs[1] else None
    dbias = arrays.empty((n_out,), like=weight) if needs[2] and with_bias else None
    sizes = n_rows, n_in, n_out
    rung.launch(sizes, arrays.contiguous(dy), x, weight, dx, dweight, dbias, precision)
    return dx, dweight, dbias


def _launch_backward(variant, sizes, dy, x, weight, dx, dweight, dbias, precision):
    """Fill each gradient that is not None."""
    n_rows, n_in, n_out = sizes
    chosen = dict(precision=precision, variant=variant)
    if dx is not None:
        weight = arrays.contiguous(weight)
        gemm.multiply(dy, weight, dx, n_rows, n_in, n_out, b_by_k=False, **chosen)
    if dweight is not None:
        x, by_rows = arrays.contiguous(x), dict(a_by_k=False, b_by_k=False)
        gemm.multiply(dy, x, dweight, n_out, n_in, n_rows, **by_rows, **chosen)
    if dbias is not None and n_out:
        column_sums.sum_columns(dy, dbias, n_rows, n_out)


def _backward_rung(rung):
    """Two of the products, by a rung of `gemm`, or one of its ways by name; and the sum for dbias.

    Their inputs never lie both by k, as `few_rows` takes them.
    """
    ways = [way for way in rung.ways if way.name != "few_rows"]
    named = [
        Way(
            way.name, None, functools.partial(_launch_backward, f"{rung.name}/{way.name}"),
            _with_sums(way), way.needs,
        )
        for way in ways if way is not rung
    ]  # fmt: skip
    launch = functools.partial(_launch_backward, rung.name)
    return Rung(rung.name, launch, _with_sums(*ways), rung.needs, ways=named)


def _with_sums(*ways):
    """A function that gives the kernels of these, and that of dbias."""
    return lambda: (*(k for way in ways for k in way.kernels), column_sums.column_sums_kernel)


FORWARD = gemm.FORWARD
BACKWARD = Ladder(*map(_backward_rung, gemm.FORWARD.values()), auto=gemm.FORWARD.auto)


def _check(x, weight):
    """(M, I, O); ArrayError for arrays that do not go together."""
    arrays.require(x, "x", dtypes=DTYPES)
    if not x.shape:
        raise arrays.ArrayError("x must have at least one dimension, not shape ()")
    arrays.require(weight, "weight", dtypes=(arrays.dtype_name(x),), n_dims=2)
    n_out, n_in = weight.shape
    if x.shape[-1] != n_in:
        raise arrays.ArrayError(
            f"x must have {n_in} columns, as weight has, not shape {tuple(x.shape)}"
        )
    n_rows = 1
    for extent in x.shape[:-1]:
        n_rows *= extent
    return n_rows, n_in, n_out


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for label, kernel, types in gemm.specialisations():
        yield label.replace("gemm", "linear", 1), kernel, types
