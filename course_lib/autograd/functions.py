"""What tensors are computed with: arithmetic, reductions, shapes; each with its gradient.

Written to the array API standard alone, so the same lines run on NumPy, CuPy and PyTorch arrays.
Importing this module gives `Tensor` its operators.
"""

import math

from course_lib.backend import get_array_module

from .tape import Function, Tensor, summed_to


class Add(Function):
    def forward(self, a, b):
        self.shapes = a.shape, b.shape
        return a + b

    def backward(self, dy):
        return tuple(summed_to(dy, shape) for shape in self.shapes)


class Subtract(Function):
    def forward(self, a, b):
        self.shapes = a.shape, b.shape
        return a - b

    def backward(self, dy):
        return summed_to(dy, self.shapes[0]), summed_to(-dy, self.shapes[1])


class Multiply(Function):
    def forward(self, a, b):
        self.inputs = a, b
        return a * b

    def backward(self, dy):
        a, b = self.inputs
        return summed_to(dy * b, a.shape), summed_to(dy * a, b.shape)


class Divide(Function):
    def forward(self, a, b):
        self.inputs = a, b
        return a / b

    def backward(self, dy):
        a, b = self.inputs
        return summed_to(dy / b, a.shape), summed_to(-dy * a / (b * b), b.shape)


class Power(Function):
    """x to a constant power."""

    def __init__(self, exponent):
        self.exponent = exponent

    def forward(self, x):
        self.x = x
        return x**self.exponent

    def backward(self, dy):
        # x⁰ is 1 everywhere, at 0 too, and 0·x⁻¹ would be NaN there.
        if self.exponent == 0:
            return dy * 0
        return dy * (self.exponent * self.x ** (self.exponent - 1))


class Matmul(Function):
    """Matrix products of the last two axes; those before are broadcast."""

    def forward(self, a, b):
        if min(len(a.shape), len(b.shape)) < 2:
            raise ValueError(f"matrices have two axes or more, not {a.shape} and {b.shape}")
        self.inputs = a, b
        return get_array_module(a).matmul(a, b)

    def backward(self, dy):
        a, b = self.inputs
        xp = get_array_module(dy)
        da = xp.matmul(dy, xp.matrix_transpose(b))
        db = xp.matmul(xp.matrix_transpose(a), dy)
        return summed_to(da, a.shape), summed_to(db, b.shape)


class Exp(Function):
    def forward(self, x):
        self.y = get_array_module(x).exp(x)
        return self.y

    def backward(self, dy):
        return dy * self.y


class Log(Function):
    def forward(self, x):
        self.x = x
        return get_array_module(x).log(x)

    def backward(self, dy):
        return dy / self.x


class Relu(Function):
    """max(x, 0); a NaN passes."""

    def forward(self, x):
        xp = get_array_module(x)
        self.negative = x <= 0
        return xp.where(self.negative, xp.zeros_like(x), x)

    def backward(self, dy):
        xp = get_array_module(dy)
        return xp.where(self.negative, xp.zeros_like(dy), dy)


class Sum(Function):
    """Over `axis`: a number, some, or None for all; `keepdims` leaves axes of length 1."""

    def __init__(self, axis=None, keepdims=False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x):
        self.shape = x.shape
        return get_array_module(x).sum(x, axis=self.axis, keepdims=self.keepdims, dtype=x.dtype)

    def backward(self, dy):
        xp = get_array_module(dy)
        kept = kept_shape(self.shape, self.axis)
        return xp.broadcast_to(xp.reshape(dy, kept), tuple(self.shape))


class Max(Function):
    """Over `axis`, as `Sum`. Where several are the largest, they share the gradient."""

    def __init__(self, axis=None, keepdims=False):
        self.axis, self.keepdims = axis, keepdims

    def forward(self, x):
        xp = get_array_module(x)
        largest = xp.max(x, axis=self.axis, keepdims=True)
        self.is_largest = xp.astype(x == largest, x.dtype)
        self.shape = x.shape
        return largest if self.keepdims else xp.reshape(largest, self._result_shape())

    def backward(self, dy):
        xp = get_array_module(dy)
        dy = xp.reshape(dy, kept_shape(self.shape, self.axis))
        share = xp.sum(self.is_largest, axis=self.axis, keepdims=True, dtype=dy.dtype)
        return dy * self.is_largest / share

    def _result_shape(self):
        axes = _axes(self.axis, len(self.shape))
        return tuple(n for i, n in enumerate(self.shape) if i not in axes)


class Reshape(Function):
    def __init__(self, shape):
        self.shape = shape

    def forward(self, x):
        self.before = x.shape
        return get_array_module(x).reshape(x, self.shape)

    def backward(self, dy):
        return get_array_module(dy).reshape(dy, tuple(self.before))


class Permute(Function):
    def __init__(self, axes):
        self.axes = axes

    def forward(self, x):
        return get_array_module(x).permute_dims(x, self.axes)

    def backward(self, dy):
        back = tuple(self.axes.index(i) for i in range(len(self.axes)))
        return get_array_module(dy).permute_dims(dy, back)


class GetItem(Function):
    """Slices and numbers; an element is taken once, so gradients go back by assignment."""

    def __init__(self, key):
        parts = key if isinstance(key, tuple) else (key,)
        if not all(isinstance(part, int | slice | type(Ellipsis) | None) for part in parts):
            raise TypeError(f"tensors are indexed by slices and numbers, not {key!r}")
        self.key = key

    def forward(self, x):
        self.x = x
        return x[self.key]

    def backward(self, dy):
        dx = get_array_module(dy).zeros_like(self.x)
        dx[self.key] = dy
        return dx


class Cast(Function):
    """The same numbers in another floating-point dtype; the gradient comes back in the first."""

    def __init__(self, dtype):
        self.dtype = dtype

    def forward(self, x):
        self.before = x.dtype
        return get_array_module(x).astype(x, self.dtype)

    def backward(self, dy):
        return get_array_module(dy).astype(dy, self.before)


class Concat(Function):
    """Tensors one behind the other along `axis`, which the other axes must agree on."""

    def __init__(self, axis=1):
        self.axis = axis

    def forward(self, *parts):
        self.lengths = [part.shape[self.axis] for part in parts]
        return get_array_module(*parts[:1]).concat(parts, axis=self.axis)

    def backward(self, dy):
        found, first = [], 0
        for n in self.lengths:
            key = [slice(None)] * len(dy.shape)
            key[self.axis] = slice(first, first + n)
            found.append(dy[tuple(key)])
            first += n
        return tuple(found)


def _axes(axis, n_dims):
    axes = range(n_dims) if axis is None else (axis,) if isinstance(axis, int) else axis
    return {i % n_dims for i in axes}


def kept_shape(shape, axis):
    """`shape` with length 1 in place of the axes that were summed over."""
    axes = _axes(axis, len(shape))
    return tuple(1 if i in axes else n for i, n in enumerate(shape))


def exp(x):
    return Exp()(x)


def log(x):
    return Log()(x)


def relu(x):
    return Relu()(x)


def cast(x, dtype):
    """`x` itself where it is of `dtype`, else a copy that is."""
    return x if x.dtype == dtype else Cast(dtype)(x)


def concat(parts, axis=1):
    return Concat(axis)(*parts)


def mean(x, axis=None, keepdims=False):
    kept = kept_shape(x.shape, axis)
    count = math.prod(x.shape) // max(1, math.prod(kept))
    return Sum(axis, keepdims)(x) * (1.0 / count)


def _operators():
    """Tensor's operators; each is a function of this module."""
    pairs = {"add": Add, "sub": Subtract, "mul": Multiply, "truediv": Divide, "matmul": Matmul}
    for name, function in pairs.items():
        setattr(Tensor, f"__{name}__", lambda a, b, f=function: f()(a, b))
        setattr(Tensor, f"__r{name}__", lambda b, a, f=function: f()(a, b))
    Tensor.__neg__ = lambda x: x * -1.0
    Tensor.__pow__ = lambda x, exponent: Power(exponent)(x)
    Tensor.__getitem__ = lambda x, key: GetItem(key)(x)
    Tensor.sum = lambda x, axis=None, keepdims=False: Sum(axis, keepdims)(x)
    Tensor.max = lambda x, axis=None, keepdims=False: Max(axis, keepdims)(x)
    Tensor.mean = mean
    Tensor.exp, Tensor.log, Tensor.relu = exp, log, relu
    Tensor.reshape = lambda x, *shape: Reshape(shape)(x)
    Tensor.permute = lambda x, *axes: Permute(axes)(x)


_operators()
