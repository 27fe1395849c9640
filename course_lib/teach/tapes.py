"""What the exercises of lesson 12 run: arrays of another library, drawn tapes, strict functions.

Most functions here are the `call` of an exercise: they run the learner's function on one case, say
in words what is wrong with what surrounds the numbers, and return the numbers.

A tape is drawn as two arrays. `needs` says of each tensor that nobody computed (a leaf) whether it
requires a gradient. Row i of `made_from` says which two tensors the next result was made from; −1
in the second place stands for none. Leaves come first, so results are numbered after them.
"""

import numpy as np

from course_lib.autograd.tape import Function, Tensor, no_grad
from course_lib.teach.late_torch import torch

# ---- the same lines, another library's arrays ------------------------------------------------


class OtherArrays(TypeError):
    """What was right with NumPy's arrays is not with another library's."""


def on_both_kinds(function, *arguments):
    """Call it with NumPy's arrays, then with PyTorch's without numbers; return the first result.

    Arrays on the device "meta" are like a GPU's: no function of NumPy can read them.
    """
    found = function(*arguments)
    other = [
        torch.empty(a.shape, dtype=getattr(torch, a.dtype.name), device="meta")
        if isinstance(a, np.ndarray)
        else a
        for a in arguments
    ]
    try:
        theirs = function(*other)
    except Exception as error:
        text = f"right with NumPy's arrays, but with another library's: {error}"
        raise OtherArrays(text).with_traceback(error.__traceback__) from None
    for one, two in zip(_several(found), _several(theirs), strict=True):
        if not isinstance(one, np.ndarray | np.generic) or one.dtype != arguments[0].dtype:
            continue  # which is wrong with NumPy's arrays already
        if not isinstance(two, torch.Tensor):
            raise OtherArrays(
                f"with another library's arrays it returned {_kind(two)}, which is not one of them"
            )
        if (tuple(two.shape), str(two.dtype)) != (one.shape, f"torch.{one.dtype}"):
            raise OtherArrays(
                f"with another library's arrays its result is {two.dtype} of shape "
                f"{tuple(two.shape)}, with NumPy's {one.dtype} of shape {one.shape}"
            )
    return found


def _several(found):
    return tuple(found) if isinstance(found, tuple | list) else (found,)


def backward_on_both_kinds(function, run):
    """Call a backward function with the case's arrays; it must return all gradients."""
    found = on_both_kinds(function, *(getattr(run, name) for name in run.case.inputs))
    wanted = run.exercise.outputs
    if found is not None and len(_several(found)) != len(wanted):
        raise ValueError(
            f"it should return {len(wanted)} arrays, {', '.join(wanted)}; it returned "
            f"{len(_several(found))}"
        )
    return found


def summed_on_both_kinds(function, run):
    """Call it with dy and the shape of the input that was broadcast, as a tuple."""
    dy = np.asarray(run.dy)
    shape = tuple(int(n) for n in run.like.shape)
    found = on_both_kinds(function, dy, shape)
    if not isinstance(found, np.ndarray | np.generic):
        return found
    if found.dtype != dy.dtype:
        raise ValueError(f"dy is {dy.dtype}, and dx is {found.dtype}")
    return found.astype(np.float32)


# ---- drawn tapes -----------------------------------------------------------------------------


def _inputs_of(row):
    return [int(i) for i in row if i >= 0]


def needed(made_from, needs):
    """Which tensors of a tape need a gradient and are on the way from the last one, a set."""
    n_leaves, requires = len(needs), [bool(each) for each in needs]
    for row in made_from:
        requires.append(any(requires[i] for i in _inputs_of(row)))
    found, waiting = set(), [len(requires) - 1]
    while waiting:
        i = waiting.pop()
        if requires[i] and i not in found:
            found.add(i)
            waiting += _inputs_of(made_from[i - n_leaves]) if i >= n_leaves else []
    return found


def _names(tensors):
    return {id(x): f"t{i}" for i, x in enumerate(tensors)}


def _drawing(tensors, names):
    """The tape in a line, where it is short: "t2 = f(t0, t1), t3 = f(t2)"."""
    results = [x for x in tensors if x.made_from]
    if not 0 < len(results) <= 6:
        return ""
    lines = (f"{names[id(x)]} = f({', '.join(names[id(y)] for y in x.made_from)})" for x in results)
    return f" (of {', '.join(lines)})"


class _Unasked(Function):
    """Its gradients are nobody's business."""

    def forward(self, *arrays):
        return arrays[0]

    def backward(self, dy):
        raise RuntimeError("the order is found without asking any function for its gradients")


def order_of(function, run):
    """Let it order a tape, and look at the order; return how many tensors there are in it."""
    tensors = [Tensor(np.float32(i), bool(each)) for i, each in enumerate(run.needs)]
    for row in run.made_from:
        tensors.append(_Unasked()(*(tensors[i] for i in _inputs_of(row))))
    found = function(tensors[-1])
    if found is None:
        return None
    found = list(found)
    _require_order(found, tensors, needed(run.made_from, run.needs))
    return np.float64(len(found))


def _require_order(found, tensors, wanted):
    """Raise unless `found` has each of the wanted tensors once, results before inputs."""
    names = _names(tensors)
    tape = _drawing(tensors, names)
    places = {}
    for place, x in enumerate(found):
        if id(x) not in names:
            what = "a function" if isinstance(x, Function) else _kind(x)
            raise ValueError(f"the order should hold tensors of the tape, and holds {what}")
        if id(x) in places:
            raise ValueError(f"{names[id(x)]} is in the order twice{tape}")
        places[id(x)] = place
    for i, x in enumerate(tensors):
        if id(x) in places and i not in wanted:
            why = "" if x.requires_grad else ": its requires_grad is False"
            raise ValueError(f"t{i} is in the order, and needs no gradient{why}{tape}")
        if i in wanted and id(x) not in places:
            raise ValueError(f"t{i} is not in the order{tape}")
    for x in found:
        for y in x.made_from:
            if y.requires_grad and places[id(y)] < places[id(x)]:
                raise ValueError(
                    f"{names[id(y)]} stands before {names[id(x)]}, which was made from it: when "
                    f"{names[id(y)]} is asked, a part of its gradient is still missing{tape}"
                )


# ---- functions that notice how they are asked ------------------------------------------------


class _Strict(Function):
    """A function of two arrays, or of one and a factor, that notes who asks for its gradients."""

    def backward(self, dy):
        self.log.ask(self.place)
        if np.shape(dy) != self.shape:
            raise ValueError(
                f"the function that made t{self.place} was given a dy of shape {np.shape(dy)}; "
                f"t{self.place} has shape {self.shape}"
            )
        found = self.gradients(dy)
        self.log.given += [(self.place, dx, dx.copy()) for dx in found]
        found = tuple(dx if need else None for dx, need in zip(found, self.needs, strict=True))
        return found if len(found) > 1 else found[0]  # as the course's own functions do


class _Add(_Strict):
    def forward(self, a, b):
        return a + b

    def gradients(self, dy):
        return dy, dy  # one array for both, as is usual


class _Multiply(_Strict):
    def forward(self, a, b):
        self.inputs = a, b
        return a * b

    def gradients(self, dy):
        a, b = self.inputs
        return dy * b, dy * a


class _Halve(_Strict):
    def forward(self, a):
        return a * np.float32(0.5)

    def gradients(self, dy):
        return (dy * np.float32(0.5),)


KINDS = _Add, _Multiply, _Halve


class _Log:
    """Who was asked, and what was handed out."""

    def __init__(self):
        self.asked, self.given, self.users = set(), [], {}

    def ask(self, place):
        if place in self.asked:
            raise ValueError(
                f"the function that made t{place} is asked a second time: each is asked once, with "
                "the sum of all that was found for its result"
            )
        if missing := [i for i in self.users.get(place, ()) if i not in self.asked]:
            raise ValueError(
                f"the function that made t{place} is asked before the one that made "
                f"t{missing[0]}, which was made from t{place}: a part of dy is still missing"
            )
        self.asked.add(place)


def _recorded(run):
    """The tape of a case with numbers, as tensors, and its log."""
    log = _Log()
    tensors = [Tensor(a.copy(), bool(n)) for a, n in zip(run.values, run.needs, strict=True)]
    for kind, row in zip(run.kinds, run.made_from, strict=True):
        result = KINDS[kind]()(*(tensors[i] for i in _inputs_of(row)))
        if result.made_by is not None:
            call, call.place = result.made_by, len(tensors)
            call.log, call.shape = log, result.shape
            for i in {i for i in _inputs_of(row) if tensors[i].requires_grad}:
                log.users.setdefault(i, []).append(len(tensors))
        tensors.append(result)
    return tensors, log


def walk(function, run):
    """Let it walk a tape whose order is given; return the gradients of the leaves."""
    tensors, log = _recorded(run)
    wanted = needed(run.made_from, run.needs)
    log.users = {i: [j for j in js if j in wanted] for i, js in log.users.items()}
    order = [tensors[i] for i in sorted(wanted, reverse=True)]
    found = function(order, run.dy)
    if found is None:
        return None
    if not isinstance(found, dict):
        raise TypeError(f"it should return a dict from id(x) to gradients, not {_kind(found)}")
    _require_gradients(found, tensors, wanted, log)
    gradients = [found.get(id(x)) for x in tensors[: len(run.needs)]]
    return np.stack([np.zeros_like(run.dy) if g is None else g for g in gradients])


def _require_gradients(found, tensors, wanted, log):
    names = _names(tensors)
    for place, now, before in log.given:
        if not np.array_equal(now, before):
            raise ValueError(
                f"the array that the function of t{place} gave back was changed in place later; a "
                "function may give one array to both of its inputs, so a sum must be a new array"
            )
    for i in sorted(wanted, reverse=True):
        if id(tensors[i]) not in found:
            raise ValueError(f"there is no gradient of t{i}{_drawing(tensors, names)}")
        gradient = found[id(tensors[i])]
        if not isinstance(gradient, np.ndarray) or gradient.dtype != np.float32:
            kind = getattr(gradient, "dtype", type(gradient).__name__)
            raise ValueError(f"the gradient of t{i} should be an array of float32, and is {kind}")
    for key in found:
        if key not in names:
            raise ValueError("a key of the dict is not the id of any tensor of the tape")
        if int(names[key][1:]) not in wanted:
            raise ValueError(f"there is an entry for {names[key]}, which needs no gradient")


# ---- launchers on the tape -------------------------------------------------------------------


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return (e / e.sum(axis=-1, keepdims=True)).astype(x.dtype)


def softmax_backward(dy, y):
    return (y * (dy - (dy * y).sum(axis=-1, keepdims=True))).astype(y.dtype)


class _Launcher:
    """Stands for a launcher of kernels: strict, and counts how often it was called."""

    def __init__(self, name, formula, arguments):
        self.name, self.formula, self.arguments = name, formula, arguments
        self.calls, self.last = 0, None

    def __call__(self, *arrays):
        if len(arrays) != len(self.arguments):
            wanted = ", ".join(self.arguments)
            raise TypeError(f"{self.name} takes {wanted}; it got {len(arrays)} arguments")
        for name, a in zip(self.arguments, arrays, strict=True):
            if not isinstance(a, np.ndarray):
                raise TypeError(f"{self.name} takes an array for {name}, not a {type(a).__name__}")
        self.calls, self.last = self.calls + 1, arrays[-1].copy()
        return self.formula(*arrays)


def put_on_the_tape(function, run):
    """Use what it returns three times; walk back from the second, then from the first."""
    forward = _Launcher("launch_forward", softmax, ("x",))
    backward = _Launcher("launch_backward", softmax_backward, ("dy", "y"))
    own = function(forward, backward)
    if not isinstance(own, Function):
        if isinstance(own, type) and issubclass(own, Function):
            raise TypeError("it returned the class; return an object of it, Own()")
        raise TypeError(f"it should return a Function, and returned {_kind(own)}")
    tensors = [Tensor(a, True) for a in (run.x.copy(), run.x_other.copy())]
    results = [own(x) for x in tensors]
    with no_grad():
        apart = own(tensors[1])
    for y in (*results, apart):
        if not isinstance(y.data, np.ndarray):
            raise TypeError(f"forward should return an array, and returned {_kind(y.data)}")
    for i, dy in ((1, run.dy_other), (0, run.dy)):
        results[i].backward(dy)
        _require_own(backward.last, softmax(tensors[i].data), softmax(tensors[1 - i].data))
    if any(x.grad is None for x in tensors):
        raise ValueError("backward returned nothing (None): x has no gradient")
    for name, x, y in zip(("x", "x_other"), tensors, results, strict=True):
        if not np.array_equal(x.data, run.case.inputs[name]):
            raise ValueError("forward changes its input in place: others may need it still")
        if not np.array_equal(y.data, softmax(x.data)):
            raise ValueError("what launch_forward returned was changed in place on the way back")
    for launcher, wanted in ((forward, 3), (backward, 2)):
        if launcher.calls != wanted:
            raise ValueError(
                f"{launcher.name} was called {launcher.calls} times in 3 forward and 2 backward "
                f"passes, and should have been called {wanted} times"
            )
    _require_other_order(own, run, [x.grad for x in tensors])
    return results[0].data, results[1].data, tensors[0].grad, tensors[1].grad


def _require_other_order(own, run, gradients):
    """Walk back from two more results, the first one first; the gradients must be the same."""
    tensors = [Tensor(a, True) for a in (run.x.copy(), run.x_other.copy())]
    results = [own(x) for x in tensors]
    for y, dy in zip(results, (run.dy, run.dy_other), strict=True):
        y.backward(dy)
    for x, before in zip(tensors, gradients, strict=True):
        if x.grad is None or not np.array_equal(x.grad, before):
            raise ValueError(
                "two calls went back in the order they came, and the gradients were not those of "
                "before: each call on tensors has a copy of the function, self, for what it keeps"
            )


def _require_own(given, wanted, others):
    """Raise where launch_backward was given the y of another call."""
    if given is None or np.array_equal(given, wanted) or not np.array_equal(given, others):
        return
    raise ValueError(
        "on the way back from one call, launch_backward was given the y of another call: each call "
        "on tensors has a copy of the function, and self is that copy"
    )


def _kind(value):
    return "nothing (None)" if value is None else f"one of type {type(value).__name__}"
