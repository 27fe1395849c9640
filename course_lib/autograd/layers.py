"""Layers for images, N·C·H·W: their parameters, `forward` and `backward`; and modules made of them.

A layer is a `Function` with parameters. Called with a tensor it computes and is written on the
tape, which calls its `backward`. By hand, on arrays, the same two do without a tape::

    conv = Conv2D(3, 8, kernel_size=3, padding=1)
    y = conv.forward(x)
    dx, dweight, dbias = conv.backward(dy)      # of the last forward

On a GPU, and in the simulator, layers launch the kernels of the course; on the CPU they call
`on_numpy`, which has the same functions.
"""

import contextlib
import functools
import math
from types import SimpleNamespace

import numpy as np

from course_lib.backend import get_array_module, get_backend

from . import on_numpy
from .functions import cast
from .tape import Function, Tensor

#: What layers compute with, by name; see `operations`.
OPERATIONS = ("batch_norm", "conv2d", "conv_transpose2d", "max_pool2d", "relu")


class Module:
    """Whatever has parameters: they, and those of modules in its attributes, are found by name."""

    training = True

    def __call__(self, x):
        return self.forward(x)

    def named_parameters(self, prefix=""):
        """Yield (name, Tensor) of all that is learned."""
        for name, value in _members(self, prefix):
            if isinstance(value, Tensor):
                yield name, value

    def parameters(self):
        """What is learned, a list of Tensors."""
        return [parameter for _, parameter in self.named_parameters()]

    def state_dict(self):
        """{name: NumPy array} of parameters and running statistics, as PyTorch names them."""
        to_cpu = get_backend().to_cpu
        return {
            name: np.array(to_cpu(value.data if isinstance(value, Tensor) else value))
            for name, value in _members(self)
        }

    def load_state_dict(self, state):
        """Take over what `state_dict` gave, of this backend or another one.

        Raises ValueError, and changes nothing, where a name is missing, unknown, or of another
        shape.
        """
        members = dict(_members(self))
        ignored = {name for name in state if name.endswith("num_batches_tracked")}  # PyTorch's
        if wrong := sorted(members.keys() ^ (state.keys() - ignored)):
            missing = [name for name in wrong if name in members]
            unknown = [name for name in wrong if name not in members]
            raise ValueError(f"missing: {missing}; unknown: {unknown}")
        for name, value in members.items():
            if tuple(value.shape) != tuple(state[name].shape):
                raise ValueError(
                    f"{name} must have shape {tuple(value.shape)}, not {tuple(state[name].shape)}"
                )
        for name, value in members.items():
            array = value.data if isinstance(value, Tensor) else value
            array[...] = get_backend().to_device(np.asarray(state[name], np.float32))

    def train(self, mode=True):
        """Set the mode of this module and of all in it; returns the module."""
        self.training = mode
        for value in vars(self).values():
            for module in value if isinstance(value, list) else [value]:
                if isinstance(module, Module):
                    module.train(mode)
        return self

    def eval(self):
        return self.train(False)


def _members(module, prefix=""):
    """Yield (name, parameter or running statistic), in order of definition, in depth first."""
    for key, value in vars(module).items():
        if isinstance(value, Module):
            yield from _members(value, f"{prefix}{key}.")
        elif isinstance(value, list):
            for i, each in enumerate(value):
                if isinstance(each, Module):
                    yield from _members(each, f"{prefix}{key}.{i}.")
        elif (isinstance(value, Tensor) and value.requires_grad) or key.startswith("running_"):
            yield prefix + key, value


class Layer(Module, Function):
    """A `Function` whose last inputs are its parameters."""

    own = ()  # names of parameters, in the order in which `backward` returns their gradients

    def __call__(self, x):
        own = [p for name in self.own if (p := getattr(self, name)) is not None]
        return Function.__call__(self, x, *(self.fitted(p, x.dtype) for p in own))

    def fitted(self, parameter, dtype):
        """A parameter as an input of this `dtype` wants it."""
        return parameter

    def wants(self, i):
        """Whether the gradient of input i is needed; by hand, without a tape, all are."""
        return not self.needs or (i < len(self.needs) and self.needs[i])


def _parameter(array):
    return Tensor(get_backend().to_device(np.ascontiguousarray(array, np.float32)), True)


def _uniform(random, shape, fan_in):
    """He and others' (2015) bound as PyTorch takes it for convolutions: 1/√fan_in."""
    bound = 1 / math.sqrt(fan_in)
    return _parameter(random.uniform(-bound, bound, shape))


class _Convolution(Layer):
    own = ("weight", "bias")

    def fitted(self, parameter, dtype):
        return cast(parameter, dtype)  # float32 is what is learned, half is what is multiplied

    def forward(self, x, weight=None, bias=None):
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(
                f"{type(self).__name__} expects (N, {self.in_channels}, H, W), not {tuple(x.shape)}"
            )
        if weight is None:  # by hand
            weight, bias = self.weight.data, None if self.bias is None else self.bias.data
        self.inputs = x, weight
        return self.operation().forward(
            x, weight, bias, stride=self.stride, padding=self.padding
        )

    def backward(self, dy):
        dx, dweight, dbias = self.operation().backward(
            dy, *self.inputs, stride=self.stride, padding=self.padding,
            with_bias=self.bias is not None, needs=tuple(map(self.wants, range(3))),
        )  # fmt: skip
        return (dx, dweight) if self.bias is None else (dx, dweight, dbias)


class Conv2D(_Convolution):
    """As `torch.nn.Conv2d`: weight (out_channels, in_channels, kernel_size, kernel_size).

    random  a `numpy.random.Generator` for the first weights; one of seed 0 by default

    `forward` raises ValueError for an input of another number of channels or axes.
    """

    def __init__(
        self, in_channels, out_channels, kernel_size, stride=1, padding=0, bias=True, random=None
    ):
        random = random or np.random.default_rng(0)
        self.in_channels, self.stride, self.padding = in_channels, stride, padding
        shape = out_channels, in_channels, kernel_size, kernel_size
        fan_in = in_channels * kernel_size**2
        self.weight = _uniform(random, shape, fan_in)
        self.bias = _uniform(random, (out_channels,), fan_in) if bias else None

    def operation(self):
        return operations().conv2d


class TransposeConv2D(_Convolution):
    """As `torch.nn.ConvTranspose2d`: weight (in_channels, out_channels, kernel_size, kernel_size).

    The default doubles height and width; `random` and errors as for `Conv2D`.
    """

    def __init__(
        self, in_channels, out_channels, kernel_size=2, stride=2, padding=0, bias=True, random=None
    ):
        random = random or np.random.default_rng(0)
        self.in_channels, self.stride, self.padding = in_channels, stride, padding
        shape = in_channels, out_channels, kernel_size, kernel_size
        fan_in = out_channels * kernel_size**2
        self.weight = _uniform(random, shape, fan_in)
        self.bias = _uniform(random, (out_channels,), fan_in) if bias else None

    def operation(self):
        return operations().conv_transpose2d


class BatchNorm2D(Layer):
    """As `torch.nn.BatchNorm2d`, with running statistics for evaluation (Ioffe, Szegedy, 2015)."""

    own = ("weight", "bias")

    def __init__(self, num_features, momentum=0.1, eps=1e-5):
        self.momentum, self.eps = momentum, eps
        self.weight = _parameter(np.ones(num_features))
        self.bias = _parameter(np.zeros(num_features))
        self.running_mean = _parameter(np.zeros(num_features)).data
        self.running_var = _parameter(np.ones(num_features)).data

    def forward(self, x, *_):
        if x.ndim != 4 or x.shape[1] != self.weight.shape[0]:
            raise ValueError(
                f"BatchNorm2D expects (N, {self.weight.shape[0]}, H, W), not {tuple(x.shape)}"
            )
        self.x, statistics = x, (self.running_mean, self.running_var)
        affine = self.weight.data, self.bias.data
        operation = operations().batch_norm
        if self.training:
            y, self.mean, self.rstd = operation.forward(
                x, *affine, *statistics, momentum=self.momentum, eps=self.eps
            )
            return y
        self.mean, self.rstd = self.running_mean, (self.running_var + self.eps) ** -0.5
        return operation.inference(x, *affine, *statistics, eps=self.eps)

    def backward(self, dy):
        return operations().batch_norm.backward(
            dy, self.x, self.weight.data, self.mean, self.rstd, training=self.training
        )


class MaxPool2D(Layer):
    """As `torch.nn.MaxPool2d`; the stride is the kernel size by default."""

    def __init__(self, kernel_size=2, stride=None):
        self.kernel_size, self.stride = kernel_size, stride or kernel_size

    def forward(self, x):
        if x.ndim != 4 or min(x.shape[2:]) < self.kernel_size:
            size = self.kernel_size
            raise ValueError(
                f"MaxPool2D expects (N, C, H, W), H and W ≥ {size}, not {tuple(x.shape)}"
            )
        self.shape = x.shape
        y, self.indices = operations().max_pool2d.forward(x, self.kernel_size, stride=self.stride)
        return y

    def backward(self, dy):
        return operations().max_pool2d.backward(
            dy, self.indices, tuple(self.shape), self.kernel_size, stride=self.stride
        )


class ReLU(Layer):
    """max(x, 0); a NaN passes."""

    def forward(self, x):
        self.y = operations().relu.forward(x)
        return self.y

    def backward(self, dy):
        return operations().relu.backward(dy, self.y)


_replaced = {}  # operation -> what `replacing` has put in its place


def operations():
    """What layers call on the backend in force: `on_numpy`, or kernels of the same names."""
    backend = get_backend()
    found = _kernels(backend.on_gpu) if backend.kernels else on_numpy
    return SimpleNamespace(**(vars(found) | _replaced)) if _replaced else found


@contextlib.contextmanager
def replacing(**others):
    """Within this block layers call these objects in place of the operations of their names.

    relu, conv2d, conv_transpose2d, max_pool2d, batch_norm
        objects with `forward` and `backward` (and batch_norm with `inference`), which take and
        return what those of `on_numpy` do

    Blocks may be nested. Raises ValueError for a name that no layer calls.
    """
    if unknown := sorted(others.keys() - OPERATIONS):
        raise ValueError(f"layers call {', '.join(OPERATIONS)}; not {', '.join(unknown)}")
    global _replaced
    before, _replaced = _replaced, _replaced | others
    try:
        yield
    finally:
        _replaced = before


@functools.cache
def _kernels(on_gpu):
    # Imported late: on a CPU nobody needs numba for this.
    from course_lib.kernels import activation, batch_norm, conv2d, conv_transpose2d, max_pool2d

    found = {
        "relu": activation.relu, "batch_norm": batch_norm, "max_pool2d": max_pool2d,
        "conv2d": conv2d, "conv_transpose2d": conv_transpose2d,
    }  # fmt: skip
    if not on_gpu:  # the rungs that the simulator takes least time for; they compute the same
        cheap = {"conv2d": "direct", "conv_transpose2d": "gather"}
        found |= {name: _rung(found[name], variant) for name, variant in cheap.items()}
    return SimpleNamespace(**found)


def _rung(operation, variant):
    return SimpleNamespace(
        forward=functools.partial(operation.forward, variant=variant),
        backward=functools.partial(operation.backward, variant=variant),
    )


def cropped(x, size):
    """The middle (H, W) = `size` of a tensor, with zeros around it where it is smaller."""
    return x if tuple(x.shape[2:]) == tuple(size) else Crop(size)(x)


class Crop(Function):
    """The middle of `size` of each image; zeros around an image that is smaller."""

    def __init__(self, size):
        self.size = size

    def forward(self, x):
        self.shape = x.shape
        y = get_array_module(x).zeros(
            (*x.shape[:2], *self.size), dtype=x.dtype, device=x.device
        )
        inner, outer = self._places()
        y[outer] = x[inner]
        return y

    def backward(self, dy):
        dx = get_array_module(dy).zeros(tuple(self.shape), dtype=dy.dtype, device=dy.device)
        inner, outer = self._places()
        dx[inner] = dy[outer]
        return dx

    def _places(self):
        """Where the common middle lies in the input, and where in the result."""
        places = [], []
        for n, m in zip(self.shape[2:], self.size, strict=True):
            common = min(n, m)
            for length, place in zip((n, m), places, strict=True):
                first = (length - common) // 2
                place.append(slice(first, first + common))
        return tuple((..., *place) for place in places)
