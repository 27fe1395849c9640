"""Lesson 12: one program for two kinds of array, and a tape of the learner's own.

| exercise | it gets | what is new |
|---|---|---|
| choose_backend | use_cuda, three functions | no silent fallback |
| weighted_error | images, labels, weight | where float64 comes from |
| matmul_backward | dy, a, b | a function's own derivative |
| summed_to | dy, a shape | the gradient of what was broadcast |
| from_end_to_beginning | the last tensor of a tape | results before inputs |
| walk_back | tensors in that order, dy | each function is asked once |
| on_the_tape | two launchers | a kernel with a gradient |
| predict_transfers | n_batches, n_bytes, gbps, compute_ms | copying while computing |

All are functions of the host. `matmul_backward` and `summed_to` must take any library's arrays.
"""

import math

import numpy as np

from course_lib.autograd import Function
from course_lib.backend import get_array_module
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.float64 import without_float64
from course_lib.teach.checking.other_arrays import backward_on_both_kinds, summed_on_both_kinds
from course_lib.teach.checking.plain import pair_of
from course_lib.teach.exercise import Exercise, Tolerance, case
from course_lib.teach.exercises.choices import ERRORS, OUTCOMES, choose, outcome
from course_lib.teach.exercises.tapes import (
    needed,
    order_of,
    put_on_the_tape,
    softmax,
    softmax_backward,
    walk,
)
from course_lib.teach.late_torch import warm_up

# ---- choose_backend --------------------------------------------------------------------------


def choose_backend(use_cuda, missing, start_gpu, start_cpu):
    if use_cuda is not None and not isinstance(use_cuda, bool):
        raise ValueError(f"use_cuda must be True, False or None, not {use_cuda!r}")
    if use_cuda is False:
        return start_cpu()
    what = missing()
    if what and use_cuda:
        raise RuntimeError(f"use_cuda is True, but {what}")
    return start_cpu() if what else start_gpu()


def _choice_cases(rng):
    version = int(rng.integers(100, 500))
    reasons = ["", f"the driver {version} is too old", f"GPU {version} does not answer"]
    situations = [
        ("True", "has a GPU"),
        ("True", "has none"),
        ("False", "has a GPU"),
        ("False", "has none"),
        ("None", "has a GPU"),
        ("None", "has none"),
        *((use_cuda, f"has a GPU that does not start: {error}")
          for error in ERRORS for use_cuda in ("True", "None")),
        ("False", "has a GPU that does not start"),
        ("'false'", "has a GPU"),
        ("'no'", "has none"),
        ("'auto'", "has a GPU"),
        ("0", "has a GPU"),
        ("1", "has none"),
    ]  # fmt: skip
    return [
        case(
            1, 1, use_cuda=np.str_(use_cuda), machine=np.str_(machine),
            missing=np.str_(reasons[1 + int(rng.integers(2))] if machine == "has none" else ""),
        )
        for use_cuda, machine in situations
    ]  # fmt: skip


CHOOSE_BACKEND = Exercise(
    name="choose_backend",
    title="A choice that never falls back in silence",
    solution=choose_backend,
    kind="function",
    reference=lambda use_cuda, machine, missing: np.float64(
        OUTCOMES.index(outcome(str(use_cuda), str(machine)))
    ),
    cases=_choice_cases,
    tolerance=Tolerance(0.0, 0.0, "one of five outcomes"),
    outputs=("outcome",),
    dtype=np.float64,
    call=choose,
    hints=(
        "Write down the six cases: True, False, None, each with and without a GPU. In which of "
        "them is there an answer that nobody would be surprised by, and in which is there none?",
        "First refuse what is none of the three, and say which they are: the text 'false' is true "
        "in Python, and 0 equals False and is another thing. Then False: the CPU, and nothing else "
        "is called. Then ask `missing()`, once. Where it says something, True raises an error with "
        "that sentence in it, and None takes the CPU. Catch nothing: a GPU that does not start is "
        "an error for the user to see.",
        "```python\nif use_cuda is not None and not isinstance(use_cuda, bool):\n"
        "    raise ValueError(...)\nif use_cuda is False:\n    return ...\nwhat = missing()\n"
        "if what and use_cuda:\n"
        '    raise RuntimeError(f"... {what}")\n...\n```',
    ),
)


# ---- weighted_error --------------------------------------------------------------------------


def weighted_error(images, labels, weight):
    n_pixels, n_classes = weight.shape
    x = images.astype(np.float32) / 255
    is_class = labels[:, None] == np.arange(n_classes)
    share = is_class.mean(axis=0, dtype=np.float32)
    scale = 1 / math.sqrt(n_pixels)
    target = np.eye(n_classes, dtype=np.float32)[labels]
    return (x @ weight * scale - target) * share


def _error_reference(images, labels, weight):
    target = np.zeros((len(images), weight.shape[1]))
    target[np.arange(len(images)), labels] = 1
    counts = np.array([(labels == k).sum() for k in range(weight.shape[1])])
    scores = np.array(images, np.float64) / 255 @ weight / np.sqrt(len(weight))
    return (scores - target) * (counts / len(images))


def _error_cases(rng):
    sizes = [
        (1, 1, 1, "int64"), (1, 2, 2, "uint8"), (2, 3, 1, "int64"), (3, 1, 4, "int32"),
        (5, 16, 3, "int64"), (8, 7, 10, "uint8"), (33, 20, 5, "int64"), (4, 90, 2, "int16"),
        (70, 65, 12, "int64"), (2, 3, 1033, "int16"), (3, 1043, 2, "int32"),
        (drawn(rng, 1030, 1099), drawn(rng, 66, 90), drawn(rng, 5, 20), "int64"),
    ]  # fmt: skip
    return [
        case(
            1, 1, images=rng.integers(0, 256, (n, pixels)).astype(np.uint8),
            labels=rng.integers(0, classes, n).astype(dtype),
            weight=numbers(rng, (pixels, classes), 1.0, 0.3),
        )
        for n, pixels, classes, dtype in sizes
    ]  # fmt: skip


WEIGHTED_ERROR = Exercise(
    name="weighted_error",
    title="Four leaks of float64",
    solution=weighted_error,
    kind="function",
    reference=_error_reference,
    cases=_error_cases,
    tolerance=Tolerance(1e-5, 1e-5, "float32 rounds sums of up to 1,099 products"),
    outputs=("error",),
    dtype=np.float32,
    call=without_float64,
    hints=(
        "Print the dtype of every variable, as the cell above did. Which lines make float64 of "
        "something that was not? Each of them has a reason of its own.",
        "Bytes divided by a number, a mean of yes and no, a root taken by NumPy, `np.eye` without "
        "a dtype. The first array can be made float32 before it is divided; means and `np.eye` "
        "take `dtype=`; `math.sqrt` gives a number of Python, which has no dtype.",
        "```python\nx = images.astype(np.float32) / 255\n"
        "share = is_class.mean(axis=0, dtype=...)\nscale = 1 / math.sqrt(...)\n"
        "target = np.eye(n_classes, dtype=...)[labels]\n```",
    ),
)


# ---- matmul_backward -------------------------------------------------------------------------


def matmul_backward(dy, a, b):
    return dy @ b.T, a.T @ dy


def _product_cases(rng):
    warm_up()
    sizes = [
        (1, 1, 1), (2, 2, 2), (1, 3, 2), (3, 1, 2), (2, 3, 1), (4, 4, 4), (0, 2, 3), (2, 5, 0),
        (5, 7, 3), (17, 20, 9), (1033, 2, 1), (1, 1043, 2),
        (2, 1, drawn(rng, 1030, 1099)), tuple(drawn(rng, 61, 80) for _ in range(3)),
    ]  # fmt: skip
    return [
        case(
            1, 1, dy=numbers(rng, (n, m), 1.0, 0.6), a=numbers(rng, (n, k), 1.5, 0.2),
            b=numbers(rng, (k, m), 0.7, -0.4),
        )
        for n, k, m in sizes
    ]  # fmt: skip


MATMUL_BACKWARD = Exercise(
    name="matmul_backward",
    title="Backward through a matrix product",
    solution=matmul_backward,
    kind="function",
    reference=lambda dy, a, b: (
        np.einsum("nm,km->nk", dy, b), np.einsum("nk,nm->km", a, dy)
    ),
    cases=_product_cases,
    tolerance=Tolerance(1e-5, 2e-5, "float32 rounds sums of up to 1,099 products", scaled=True),
    outputs=("da", "db"),
    dtype=np.float32,
    call=backward_on_both_kinds,
    primal=lambda a, b: a @ b,
    hints=(
        "Which elements of y does one element of a have a part in, say a[0, 2]? With which "
        "factors? Or begin with the shapes: there is only one way to make (n, k) of dy (n, m) and "
        "b (k, m).",
        "`da[i, j]` is the sum of `dy[i, c] * b[j, c]` over all c: dy times b, transposed. And "
        "`db[j, c]` is the sum of `a[i, j] * dy[i, c]` over all i. `b.T` and `@` exist in every "
        "library.",
        "```python\nda = dy @ ...\ndb = ... @ dy\n```",
    ),
)


# ---- summed_to -------------------------------------------------------------------------------


def summed_to(dy, shape):
    new = len(dy.shape) - len(shape)  # axes that the input did not have
    axes = list(range(new))
    for i, n in enumerate(shape):
        if n == 1:
            axes.append(new + i)
    return get_array_module(dy).sum(dy, axis=tuple(axes)).reshape(shape)


def _summed_reference(dy, like):
    found = np.zeros(like.shape)
    # Each place of dy belongs to the place of the input whose number was repeated there.
    places = np.broadcast_to(np.arange(like.size).reshape(like.shape), dy.shape)
    np.add.at(found.reshape(-1), places.reshape(-1), dy.reshape(-1))
    return found


def _summed_cases(rng):
    warm_up()
    shapes = [
        ((), ()), ((3,), ()), ((3,), (1,)), ((2, 3), (2, 3)), ((2, 3), (3,)), ((2, 3), (2, 1)),
        ((2, 3), (1, 3)), ((2, 3), (1, 1)), ((3, 3), (3,)), ((3, 3), (3, 1)), ((1, 4), (1, 1)),
        ((2, 1, 3), (1, 3)), ((4, 2, 3), ()), ((4, 2, 3), (2, 1)), ((0, 3), (0, 1)),
        ((2, 3, 4, 5), (3, 1, 1)), ((6, 5, 1, 7), (1, 5, 1, 1)), ((2, 2, 2, 2), (2, 1, 2)),
        ((2, 3, 1, 2, 4), (3, 1, 2, 1)), ((2, 1, 3, 2, 2), (2, 1, 1, 2, 1)),
        ((2, 1, 3, 1, 2, 2), (2,)), ((drawn(rng, 5, 9), 6, drawn(rng, 7, 9)), (6, 1)),
        ((2, drawn(rng, 66_000, 70_000)), (2, 1)),
    ]  # fmt: skip
    return [
        case(1, 1, dy=numbers(rng, dy, 1.0, 0.8, (np.float32, np.float64)[place % 3 == 1]),
             like=numbers(rng, like, 1.0, 0.2))
        for place, (dy, like) in enumerate(shapes)
    ]  # fmt: skip


SUMMED_TO = Exercise(
    name="summed_to",
    title="The gradient of what was broadcast",
    solution=summed_to,
    kind="function",
    reference=_summed_reference,
    cases=_summed_cases,
    tolerance=Tolerance(1e-5, 2e-5, "float32 rounds sums of up to 70,000 numbers", scaled=True),
    outputs=("dx",),
    dtype=np.float32,
    call=summed_on_both_kinds,
    hints=(
        "A number that was used in five places has five gradients, and their sum is its own. "
        "Along which axes was the input repeated?",
        "There are two kinds: axes that the input did not have at all, which are the first "
        "`len(dy.shape) - len(shape)` ones, and axes in which the input has length 1. Sum over all "
        "of them at once with the namespace's `sum`, then reshape to `shape`. (The method "
        "`dy.sum(axis=())` means one thing to NumPy and another to PyTorch.)",
        "```python\nnew = len(dy.shape) - len(shape)\naxes = list(range(new))\n"
        "for i, n in enumerate(shape):\n    if n == 1:\n        axes.append(...)\n```",
    ),
)


# ---- from_end_to_beginning -------------------------------------------------------------------


def from_end_to_beginning(last):
    order, seen = [], set()

    def visit(x):
        if x.requires_grad and x not in seen:
            seen.add(x)
            for y in x.made_from:
                visit(y)
            order.append(x)

    visit(last)
    return order[::-1]


#: Tapes as (which leaves need a gradient, what each result is made from); see teach/tapes.py.
_TAPES = {
    "a leaf alone": ([1], []),
    "one function": ([1], [(0, -1)]),
    "a tensor used twice": ([1], [(0, 0)]),
    "one of two needs none": ([1, 0], [(0, 1)]),
    "the other needs none": ([0, 1], [(0, 1), (2, 0)]),
    "a chain": ([1], [(0, -1), (1, -1), (2, -1)]),
    "a diamond, the short way first": ([1], [(0, -1), (0, 1)]),
    "a diamond, the short way last": ([1], [(0, -1), (1, 0)]),
    "a diamond with long arms": ([1], [(0, -1), (1, -1), (0, -1), (2, 3)]),
    "its arms changed over": ([1], [(0, -1), (0, -1), (2, -1), (1, 3)]),
    "a leaf that comes in late": ([1, 1], [(0, -1), (2, 1), (3, 0), (4, 4)]),
    "a result that needs none": ([1, 0], [(1, 1), (0, 2), (3, 2)]),
    "a dead end": ([1, 1], [(0, 1), (2, 0), (2, 1)]),
    "diamonds, one after another": ([1], [(i, i) for i in range(60)]),
    "three inputs": ([1, 1, 0], [(0, 1, 2), (1, 3, 0), (4, 3, 4)]),
    "three inputs, of which the last is needed": ([0, 0, 1], [(0, 1, 2), (0, 3, 2)]),
}


def _tape_inputs(rng):
    """Yield (needs, made_from) of every tape above, of a long one, and of three drawn ones."""
    for needs, made_from in _TAPES.values():
        width = max(map(len, made_from), default=2)
        yield np.array(needs, np.int64), np.array(made_from, np.int64).reshape(-1, width)
    # Half of the one before, and again a leaf beside: it neither grows nor vanishes.
    length = drawn(rng, 260, 300)
    yield np.array([1, 0, 1]), np.array([(i + 2, i % 2 - 1) for i in range(length)])
    for n_leaves, n_results in ((3, 9), (4, 16), (5, drawn(rng, 75, 99))):
        # Each result is made from the one before and from any earlier tensor, or from none.
        rows = [
            (n_leaves + i - 1 if i else 0, int(rng.integers(-1, n_leaves + i)))
            for i in range(n_results)
        ]
        needs = rng.integers(0, 2, n_leaves)
        needs[0] = 1
        yield needs, np.array([row[:: rng.choice([1, -1]) if row[1] >= 0 else 1] for row in rows])


FROM_END_TO_BEGINNING = Exercise(
    name="from_end_to_beginning",
    title="The order of the way back",
    solution=from_end_to_beginning,
    kind="function",
    reference=lambda needs, made_from: np.float64(len(needed(made_from, needs))),
    cases=lambda rng: [
        case(1, 1, needs=needs, made_from=made_from) for needs, made_from in _tape_inputs(rng)
    ],
    tolerance=Tolerance(0.0, 0.0, "tensors are counted, and counting is exact"),
    outputs=("n_tensors",),
    dtype=np.float64,
    call=order_of,
    hints=(
        "Turn it round: in which order were the tensors *made*? Every input before every result. "
        "The order you want is that one, backwards. When may a tensor be put into the list of "
        "those that are made?",
        "A function `visit(x)` that first visits all that x was made from, and then appends x. It "
        "does nothing for a tensor that it has seen before, or that needs no gradient. In the "
        "end, the list is turned round.",
        "```python\ndef visit(x):\n    if x.requires_grad and x not in seen:\n        seen.add(x)\n"
        "        for y in x.made_from:\n            ...\n        order.append(...)\n```",
    ),
)


# ---- walk_back -------------------------------------------------------------------------------


def walk_back(order, dy):
    found = {id(order[0]): dy}
    for result in order:
        if result.made_by is not None:
            gradients = result.made_by.backward(found[id(result)])
            gradients = gradients if isinstance(gradients, tuple) else (gradients,)
            for x, dx in zip(result.made_from, gradients, strict=True):
                if x.requires_grad:
                    found[id(x)] = found[id(x)] + dx if id(x) in found else dx
    return found


_WIDTH = 3  # numbers in each tensor


def _walk_reference(needs, made_from, kinds, values, dy):
    """Forwards, which needs no order: how each tensor reacts to each leaf, place by place."""
    tensors, slopes = list(values), list(np.eye(len(values))[:, :, None] * np.ones(_WIDTH))
    for kind, (a, b, *more) in zip(kinds, made_from, strict=True):
        if kind == 0:
            tensors.append(tensors[a] + tensors[b])
            slopes.append(slopes[a] + slopes[b])
        elif kind == 1:
            tensors.append(tensors[a] * tensors[b])
            slopes.append(tensors[a] * slopes[b] + tensors[b] * slopes[a])
        elif kind == 3:
            tensors.append(tensors[a] * tensors[b] + tensors[more[0]])
            slopes.append(tensors[a] * slopes[b] + tensors[b] * slopes[a] + slopes[more[0]])
        else:
            tensors.append(0.5 * tensors[a])
            slopes.append(0.5 * slopes[a])
    return np.where(np.array(needs)[:, None] == 1, slopes[-1] * dy, 0.0)


def _walk_cases(rng):
    found = []
    for place, (needs, made_from) in enumerate(_tape_inputs(rng)):
        # Products of products grow, so a long tape is sums and halves, with a product here and
        # there; in a short one all of them come.
        kinds = [
            3 if len(row) > 2 else 2 if row[1] < 0 else int((i + place) % 2 == 0 and i < 5)
            for i, row in enumerate(made_from)
        ]
        values = rng.uniform(0.5, 1.4, (len(needs), _WIDTH)).astype(np.float32)
        found.append(
            case(1, 1, needs=needs, made_from=made_from, kinds=np.array(kinds, np.int64),
                 values=values, dy=numbers(rng, (_WIDTH,), 1.0, 0.4))
        )  # fmt: skip
    return found


WALK_BACK = Exercise(
    name="walk_back",
    title="A walk along the tape",
    solution=walk_back,
    kind="function",
    reference=_walk_reference,
    cases=_walk_cases,
    tolerance=Tolerance(2e-5, 1e-5, "float32 rounds a product or a sum in each function"),
    outputs=("gradients",),
    dtype=np.float32,
    call=walk,
    hints=(
        "The gradient of the last tensor is given. Of every other tensor it is the sum of what "
        "the functions say that used it. Where do you keep the part that you have so far?",
        "A dict from `id(x)` to what was found for x so far; it begins with dy for `order[0]`. "
        "For each result that was computed, ask `result.made_by.backward(...)` once; a gradient "
        "that comes alone goes into a tuple. Each is added to what there is of its input: a new "
        "array, `a + b`, and never `a += b`. A leaf has no `made_by`.",
        "```python\nfound = {id(order[0]): dy}\nfor result in order:\n"
        "    if result.made_by is not None:\n        gradients = ...\n"
        "        for x, dx in zip(result.made_from, gradients):\n            ...\n```",
    ),
)


# ---- on_the_tape -----------------------------------------------------------------------------


def on_the_tape(launch_forward, launch_backward):
    class Own(Function):
        def forward(self, x):
            self.y = launch_forward(x)
            return self.y

        def backward(self, dy):
            return launch_backward(dy, self.y)

    return Own()


def _softmax_reference(x, dy, x_other, dy_other):
    y, other = softmax(x), softmax(x_other)
    return y, other, softmax_backward(dy, y), softmax_backward(dy_other, other)


def _softmax_cases(rng):
    shapes = [(1, 1), (1, 2), (2, 3), (3, 1), (0, 4), (4, 4), (2, 7), (5, 33), (1, 100)]
    shapes.append((drawn(rng, 5, 9), drawn(rng, 40, 90)))
    found = []
    for shape in shapes:
        inputs = {
            name: numbers(rng, shape, 1.0, offset)
            for name, offset in (("x", 0.5), ("dy", 0.3), ("x_other", -1.0), ("dy_other", 0.9))
        }
        if len(found) % 2:  # all but the last number are those of x: no key to find a result by
            inputs["x_other"].flat[:-1] = inputs["x"].flat[:-1]
        found.append(case(1, 1, **inputs))
    return found


ON_THE_TAPE = Exercise(
    name="on_the_tape",
    title="A kernel on the tape",
    solution=on_the_tape,
    kind="function",
    reference=_softmax_reference,
    cases=_softmax_cases,
    tolerance=Tolerance(1e-5, 1e-5, "float32 rounds exponentials and a sum of 100"),
    outputs=("y", "y_other", "dx", "dx_other"),
    dtype=np.float32,
    call=put_on_the_tape,
    hints=(
        "`forward` gets an array, not a tensor, and returns one. What will `backward` need that "
        "it is not given? Where can it find it, if the function is used twice before anyone goes "
        "back?",
        "Keep what `launch_forward` returned in an attribute of `self`: each call on tensors has a "
        "copy of the function for itself. `launch_backward` wants dy, and y. Return an object of "
        "the class, not the class.",
        "```python\nclass Own(Function):\n    def forward(self, x):\n        self.y = ...\n"
        "        return ...\n\n    def backward(self, dy):\n        return launch_backward(...)\n\n"
        "return Own()\n```",
    ),
)


# ---- predict_transfers -----------------------------------------------------------------------


def predict_transfers(n_batches, n_bytes, gbps, compute_ms):
    copy_ms = n_bytes / (gbps * 1e6)  # a GB/s is 10⁶ bytes per ms
    one_by_one = n_batches * (copy_ms + compute_ms)
    overlapped = copy_ms + (n_batches - 1) * max(copy_ms, compute_ms) + compute_ms
    return one_by_one, overlapped


def _transfers_reference(n_batches, n_bytes, gbps, compute_ms):
    """By going through the batches: who is free when."""
    copy_ms = n_bytes / (gbps * 1e9) * 1e3
    copied = computed = 0.0
    for _ in range(int(n_batches)):
        copied += copy_ms
        computed = max(copied, computed) + compute_ms  # when its batch is there, and it is free
    return n_batches * (copy_ms + compute_ms), computed


def _transfer_cases(rng):
    sizes = [
        (1, 1_000_000, 25, 1.0),
        (2, 0, 25, 1.5),
        (2, 4_000_000, 12, 0.0),
        (3, 50_000_000, 12, 9.0),
        (10, 50_000_000, 25, 2.5),
        (10, 50_000_000, 25, 0.5),
        (100, 308_000_000, 55, 4.0),
        (1875, 100_352, 25, 0.13),
        (drawn(rng, 66_000, 70_000), drawn(rng, 10**8, 10**9), 12, 9.0),
        (drawn(rng, 20, 30), drawn(rng, 10**7, 10**8), 55, 0.3),
    ]
    return [
        case(
            1, 1, n_batches=np.int64(n), n_bytes=np.int64(n_bytes),
            gbps=np.float64(gbps * (1 + rng.random() / 8)),
            compute_ms=np.float64(ms * (1 + rng.random() / 8)),
        )
        for n, n_bytes, gbps, ms in sizes
    ]  # fmt: skip


PREDICT_TRANSFERS = Exercise(
    name="predict_transfers",
    title="What copying costs, and what hides it",
    solution=predict_transfers,
    kind="function",
    reference=_transfers_reference,
    cases=_transfer_cases,
    tolerance=Tolerance(1e-9, 0.0, "a handful of products and sums of float64 numbers"),
    outputs=("one_by_one_ms", "overlapped_ms"),
    dtype=np.float64,
    call=pair_of,
    hints=(
        "Draw three batches on two lines, one for copying and one for computing. What stands "
        "alone at the left, what at the right, and what happens at the same time in between?",
        "Copying takes `n_bytes / (gbps * 10⁶)` ms. One by one: both, n times. Overlapped: the "
        "first copy and the last computation are alone; the `n_batches - 1` times in between, a "
        "copy and a computation run together, and the longer one counts.",
        "```python\ncopy_ms = n_bytes / (gbps * 1e6)\n"
        "overlapped = copy_ms + (n_batches - 1) * max(...) + ...\n```",
    ),
)
