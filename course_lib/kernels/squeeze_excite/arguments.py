"""What the launchers are given, checked and made ready for the kernels, and their results."""

from course_lib.kernels.squeeze_excite.problem import DTYPES, problem_of
from course_lib.runtime.host import arrays
from course_lib.runtime.host.outputs import output


def checked_forward(x, weight1, bias1, weight2, bias2, activation, gate, out):
    """(problem, inputs, results): the arrays as the kernels take them."""
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    x, channels_last = arrays.as_images(x)
    R = _check_weights(weight1, weight2, x)
    for bias, name, size in ((bias1, "bias1", R), (bias2, "bias2", x.shape[1])):
        arrays.require(bias, name, shape=(size,), dtypes=(arrays.dtype_name(weight1),))
    problem = problem_of(tuple(x.shape), R, channels_last, activation, gate, x.dtype.itemsize)
    inputs = (x, *(arrays.contiguous(array) for array in (weight1, bias1, weight2, bias2)))
    N, C = problem.N, problem.C
    saved = (arrays.empty((N, n), like=x, dtype="float32") for n in (C, R, C))
    reads = dict(zip(("x", "weight1", "bias1", "weight2", "bias2"), inputs, strict=True))
    y = output(out, x.shape, like=x, channels_last=channels_last, reads=reads)
    return problem, inputs, (y, *saved)


def checked_backward(dy, x, weight1, weight2, mean, hidden, logit, activation, gate, out):
    """(problem, inputs, dx, gradients): the arrays as the kernels take them."""
    arrays.require(x, "x", dtypes=DTYPES, n_dims=4)
    arrays.require(dy, "dy", shape=x.shape, dtypes=(arrays.dtype_name(x),))
    x, channels_last = arrays.as_images(x)
    R = _check_weights(weight1, weight2, x)
    problem = problem_of(tuple(x.shape), R, channels_last, activation, gate, x.dtype.itemsize)
    N, C = problem.N, problem.C
    for array, name, size in ((mean, "mean", C), (hidden, "hidden", R), (logit, "logit", C)):
        arrays.require(array, name, shape=(N, size), dtypes=("float32",))
    small = (arrays.contiguous(array) for array in (weight1, weight2, mean, hidden, logit))
    inputs = (arrays.laid_out_like(dy, x), x, *small)
    shapes = tuple(weight1.shape), (R,), tuple(weight2.shape), (C,)
    gradients = tuple(arrays.empty(shape, like=weight1) for shape in shapes)
    names = "dy", "x", "weight1", "weight2", "mean", "hidden", "logit"
    reads = dict(zip(names, inputs, strict=True))
    dx = output(out, x.shape, like=x, channels_last=channels_last, reads=reads)
    return problem, inputs, dx, gradients


def _check_weights(weight1, weight2, x):
    """R, once shapes and dtypes are found right."""
    if x.shape[1] < 1:
        raise arrays.ArrayError(f"x must have a channel at least, not shape {tuple(x.shape)}")
    C, dtypes = x.shape[1], tuple(dict.fromkeys(("float32", arrays.dtype_name(x))))
    arrays.require(weight1, "weight1", dtypes=dtypes)
    shape = tuple(weight1.shape)
    if len(shape) not in (2, 4) or shape[1:] not in ((C,), (C, 1, 1)) or shape[0] < 1:
        raise arrays.ArrayError(
            f"weight1 must have shape (R, {C}) or (R, {C}, 1, 1) with an R from 1 on, not {shape}"
        )
    R = shape[0]
    arrays.require(weight2, "weight2", dtypes=(arrays.dtype_name(weight1),))
    if tuple(weight2.shape) not in ((C, R), (C, R, 1, 1)):
        raise arrays.ArrayError(
            f"weight2 must have shape {(C, R)} or {(C, R, 1, 1)}, not {tuple(weight2.shape)}"
        )
    return R
