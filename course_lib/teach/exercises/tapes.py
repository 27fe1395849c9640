"""What the exercises of lesson 12 run: drawn tapes, and functions that notice how they are asked.

Most functions here are the `call` of an exercise: they run the learner's function on one case, say
in words what is wrong with what surrounds the numbers, and return the numbers.

A tape is drawn as two arrays. `needs` says of each tensor that nobody computed (a leaf) whether it
requires a gradient. Row i of `made_from` says which tensors the next result was made from, three at
most; −1 stands for none. Leaves come first, so results are numbered after them.

The tape belongs to whoever recorded it: `_Untouched` notes what it is before the learner's function
gets it, and objects to whatever has become something else.
"""

import numpy as np

from course_lib.autograd.tape import Function, Tensor, no_grad
from course_lib.teach.checking.other_arrays import kind_of

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


class _Untouched:
    """What a tape was before somebody else got it."""

    def __init__(self, tensors):
        self.tensors, self.before = tensors, [_noted(x) for x in tensors]

    def require(self):
        """Raise where something of it has changed."""
        for i, (x, before) in enumerate(zip(self.tensors, self.before, strict=True)):
            for (what, was), (_, now) in zip(before, _noted(x), strict=True):
                if was != now:
                    raise ValueError(
                        f"it changes {what} of t{i}: the tape is not its own, and others may need "
                        "it still"
                    )


def _noted(x):
    made = x.made_by
    return [
        ("data", (id(x.data), np.asarray(x.data).tobytes())),
        ("requires_grad", x.requires_grad),
        ("made_from", [id(y) for y in x.made_from]),
        ("made_by", id(made)),
        ("grad", id(x.grad)),
        ("an attribute", sorted(vars(x))),
        ("what is kept in made_by", sorted(vars(made)) if made else None),
    ]


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
    tape = _Untouched(tensors)
    found = function(tensors[-1])
    tape.require()
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
            what = "a function" if isinstance(x, Function) else kind_of(x)
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
    """A function of one to three arrays that notes who asks for its gradients."""

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


class _MultiplyAdd(_Strict):
    def forward(self, a, b, c):
        self.inputs = a, b
        return a * b + c

    def gradients(self, dy):
        a, b = self.inputs
        return dy * b, dy * a, dy


KINDS = _Add, _Multiply, _Halve, _MultiplyAdd


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
    tape, given = _Untouched(tensors), list(order)
    found = function(order, run.dy)
    tape.require()
    if len(order) != len(given) or any(x is not y for x, y in zip(order, given, strict=True)):
        raise ValueError("it changes the list order, which is not its own")
    if found is None:
        return None
    if not isinstance(found, dict):
        raise TypeError(f"it should return a dict from id(x) to gradients, not {kind_of(found)}")
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
        raise TypeError(f"it should return a Function, and returned {kind_of(own)}")
    tensors = [Tensor(a, True) for a in (run.x.copy(), run.x_other.copy())]
    results = [own(x) for x in tensors]
    with no_grad():
        apart = own(tensors[1])
    for y in (*results, apart):
        if not isinstance(y.data, np.ndarray):
            raise TypeError(f"forward should return an array, and returned {kind_of(y.data)}")
    for i, dy in ((1, run.dy_other), (0, run.dy)):
        results[i].backward(dy)
        _require_own(backward.last, softmax(tensors[i].data), softmax(tensors[1 - i].data))
    if any(x.grad is None for x in tensors):
        raise ValueError("backward returned nothing (None): x has no gradient")
    for name, x in zip(("x", "x_other"), tensors, strict=True):
        if not np.array_equal(x.data, run.case.inputs[name]):
            raise ValueError("forward changes its input in place: others may need it still")
    for x, y in zip((*tensors, tensors[1]), (*results, apart), strict=True):
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
