"""Automatic differentiation in one sitting: a tensor that remembers how it was made.

A `Function` is a pair: `forward` computes an array from arrays and keeps what its derivative needs,
`backward` turns the gradient of its result into those of its inputs. Called with `Tensor`s, a
function computes, and leaves a note in its result: who made it, from what. These notes are the
*tape*. `Tensor.backward` walks it from the end to the beginning, so that each function is asked for
its gradients once, when those of all that was made from its result have been summed::

    w = tensor(np.ones(3, np.float32), requires_grad=True)
    loss = (w * w).sum()
    loss.backward()
    w.grad                  # array([2., 2., 2.], dtype=float32)

This is reverse-mode differentiation (Linnainmaa, 1970; Baydin and others, 2018). Arrays are those
of the backend (`course_lib.backend`); the tape never looks into them.
"""

import contextlib
import copy
import math

from course_lib.backend import get_array_module, get_backend

_recording = True


@contextlib.contextmanager
def no_grad():
    """Within this block functions compute, and nothing is written on the tape."""
    global _recording
    before, _recording = _recording, False
    try:
        yield
    finally:
        _recording = before


class Function:
    """One operation: a pair of `forward` and `backward` on arrays. What it takes, it is made with.

    `forward(*arrays)` returns an array, and may keep what `backward` needs in attributes of `self`:
    each call on tensors has a copy of the function for itself, so that one function may be used as
    often as you like. `backward(dy)` returns the gradient of each input, None where there is none;
    alone if there is one input, else a tuple. `needs` says which of them are wanted.
    """

    needs = ()

    def forward(self, *arrays):
        raise NotImplementedError

    def backward(self, dy):
        raise NotImplementedError

    def __call__(self, *inputs):
        inputs = [as_tensor(x, like=inputs) for x in inputs]
        call = copy.copy(self)
        call.needs = tuple(_recording and x.requires_grad for x in inputs)
        result = Tensor(call.forward(*(x.data for x in inputs)))
        if any(call.needs):
            result.requires_grad = True
            result.made_by, result.made_from = call, inputs
        return result


class Tensor:
    """An array, its gradient, and where it came from.

    data           an array of the backend
    requires_grad  whether `backward` should find the gradient with respect to it
    grad           that gradient, an array of data's shape; None before `backward`
    """

    __array_ufunc__ = None  # so that NumPy leaves `array + tensor` to the tensor

    def __init__(self, data, requires_grad=False):
        self.data, self.requires_grad = data, requires_grad
        self.grad = None
        self.made_by, self.made_from = None, ()

    @property
    def shape(self):
        return tuple(self.data.shape)

    @property
    def dtype(self):
        return self.data.dtype

    @property
    def ndim(self):
        return len(self.data.shape)

    def __len__(self):
        return self.shape[0]

    def __repr__(self):
        return f"tensor({self.data}{', requires_grad=True' if self.requires_grad else ''})"

    def item(self):
        """The only element, as a Python number. On a GPU the host waits for it."""
        return self.data.item()

    def detach(self):
        """The same array without its past."""
        return Tensor(self.data)

    def backward(self, grad=None):
        """Add to `grad`, of every tensor that requires one and was not computed, d self/d tensor.

        grad  the gradient of what comes after, an array of this tensor's shape; 1 for one element

        Raises RuntimeError where nothing was recorded, ValueError for a `grad` of another shape, or
        none where there are several elements. The tape is given up; walking it twice is an error.
        """
        if not self.requires_grad:
            raise RuntimeError("backward() of a tensor that depends on none that requires_grad")
        if grad is None:
            if math.prod(self.shape) != 1:
                raise ValueError(f"a result of shape {self.shape} needs a gradient: backward(grad)")
            grad = get_array_module(self.data).ones_like(self.data)
        if tuple(grad.shape) != self.shape:
            raise ValueError(f"grad must have shape {self.shape}, not {tuple(grad.shape)}")
        gradients = {id(self): grad}
        for result in _from_end_to_beginning(self):
            dy = gradients.pop(id(result), None)
            if dy is None:  # all functions that used it say that they have none
                continue
            if result.made_by is None:
                # A copy: functions may hand the same array to several of their inputs.
                xp = get_array_module(dy)
                result.grad = xp.asarray(dy, copy=True) if result.grad is None else result.grad + dy
                continue
            found = _gradients(result, dy)
            for x, dx in zip(result.made_from, found, strict=True):
                if x.requires_grad and dx is not None:
                    before = gradients.get(id(x))
                    gradients[id(x)] = dx if before is None else before + dx
            result.made_by, result.made_from = _USED, ()  # what it kept is free from here on


class _Used(Function):
    def backward(self, dy):
        raise RuntimeError("this part of the tape was walked before: compute the result again")


_USED = _Used()


def _gradients(result, dy):
    found = result.made_by.backward(dy)
    found = found if isinstance(found, tuple) else (found,)
    for x, dx in zip(result.made_from, found, strict=True):
        if x.requires_grad and dx is not None and tuple(dx.shape) != x.shape:
            raise ValueError(
                f"{type(result.made_by).__name__}.backward returned a gradient of shape "
                f"{tuple(dx.shape)} for an input of shape {x.shape}"
            )
    return found


def _from_end_to_beginning(last):
    """Every tensor that `last` was made from and that needs a gradient, results before inputs.

    A stack of our own, because a deep network is deeper than Python's.
    """
    order, seen, stack = [], set(), [(last, False)]
    while stack:
        x, inputs_done = stack.pop()
        if inputs_done:
            order.append(x)
        elif id(x) not in seen:
            seen.add(id(x))
            stack.append((x, True))
            stack += [(y, False) for y in x.made_from if y.requires_grad]
    return reversed(order)


def tensor(a, requires_grad=False):
    """A `Tensor` of the array `a`, of the backend in force; raises TypeError for any other kind.

    requires_grad  needs a floating-point dtype; ValueError otherwise
    """
    a = get_backend().require(a, "a")
    if requires_grad and not get_array_module(a).isdtype(a.dtype, "real floating"):
        raise ValueError(f"only floating-point tensors have gradients, not {a.dtype}")
    return Tensor(a, requires_grad)


def as_tensor(x, like):
    """`x` itself if it is a Tensor; a number becomes an array of the dtype of the tensor in `like`.

    An array becomes a tensor without a gradient.
    """
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool | int | float):
        model = next(y.data for y in like if isinstance(y, Tensor))
        xp = get_array_module(model)
        return Tensor(xp.asarray(x, dtype=model.dtype, device=model.device))
    return tensor(x)


def summed_to(dy, shape):
    """The gradient of an input of `shape` that was broadcast: dy summed over what was repeated."""
    shape = tuple(shape)
    if tuple(dy.shape) == shape:
        return dy
    xp = get_array_module(dy)
    new = len(dy.shape) - len(shape)
    axes = (*range(new), *(new + i for i, n in enumerate(shape) if n == 1 != dy.shape[new + i]))
    return xp.reshape(xp.sum(dy, axis=axes, dtype=dy.dtype), shape)
