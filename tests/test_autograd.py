"""The learner's tape: each function's gradient against finite differences, and the tape's rules."""

import gc
import weakref

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import autograd as ag
from course_lib import backend
from course_lib.autograd import functions
from course_lib.autograd.tape import Function, Tensor

STEP = 1e-6


@pytest.fixture(autouse=True)
def on_numpy():
    backend.set_backend(False, library="numpy")


def difference(run, arrays, i, dy):
    """d Σ(dy·run)/d arrays[i] by central differences, in float64."""
    found = np.empty_like(arrays[i])
    for index in np.ndindex(arrays[i].shape):
        sides = []
        for step in (STEP, -STEP):
            moved = [a.copy() for a in arrays]
            moved[i][index] += step
            with ag.no_grad():
                sides.append(float((run(*map(Tensor, moved)).data * dy).sum()))
        found[index] = (sides[0] - sides[1]) / (2 * STEP)
    return found


def require_right_gradients(run, *arrays, seed=0):
    inputs = [ag.tensor(a, requires_grad=True) for a in arrays]
    y = run(*inputs)
    dy = np.random.default_rng(seed).standard_normal(y.shape)
    y.backward(dy)
    for i, x in enumerate(inputs):
        expected = difference(run, arrays, i, dy)
        assert x.grad.shape == x.shape and x.grad.dtype == np.float64
        np.testing.assert_allclose(x.grad, expected, rtol=1e-5, atol=1e-7)


@st.composite
def broadcast_pairs(draw):
    """Two shapes that broadcast with each other."""
    shape = draw(st.lists(st.integers(1, 3), min_size=0, max_size=3))
    shapes = []
    for _ in range(2):
        kept = [draw(st.sampled_from([n, 1])) for n in shape]
        shapes.append(tuple(kept[draw(st.integers(0, len(kept))):]))
    return shapes


@settings(max_examples=40, deadline=None)
@given(broadcast_pairs(), st.sampled_from(["+", "-", "*", "/"]), st.integers(0, 99))
def test_arithmetic_with_broadcasting(shapes, sign, seed):
    random = np.random.default_rng(seed)
    a, b = (np.asarray(random.uniform(0.5, 2, shape)) for shape in shapes)
    run = {"+": lambda a, b: a + b, "-": lambda a, b: a - b,
           "*": lambda a, b: a * b, "/": lambda a, b: a / b}[sign]
    require_right_gradients(run, a, b)


UNARY = {
    "exp": lambda x: x.exp(),
    "log": lambda x: (x * x + 1.0).log(),
    "relu": lambda x: x.relu(),
    "negative": lambda x: -x,
    "cube": lambda x: x**3,
    "reciprocal": lambda x: 1.0 / (x * x + 1.0),
    "root": lambda x: (x * x + 1.0) ** 0.5,
    "power 0": lambda x: x**0,
    "number on the left": lambda x: 2.0 - 3.0 * x,
    "sum": lambda x: x.sum(),
    "sum over one": lambda x: x.sum(axis=1),
    "sum over two, kept": lambda x: x.sum(axis=(0, -1), keepdims=True),
    "mean": lambda x: x.mean(),
    "mean over one": lambda x: x.mean(axis=-1),
    "max": lambda x: x.max(axis=1),
    "max of all": lambda x: x.max(),
    "max, kept": lambda x: x.max(axis=(1, 2), keepdims=True),
    "reshape": lambda x: x.reshape(4, -1) ** 2,
    "permute": lambda x: x.permute(2, 0, 1) ** 2,
    "slice": lambda x: x[1:, ::2, -1] ** 2,
    "ellipsis": lambda x: x[..., None, 0] ** 2,
    "used twice": lambda x: x * x + x,
    "a chain that meets again": lambda x: (x * 2.0).exp() * (x * 2.0) + x.sum(),
    "softmax": lambda x: (x - x.max(axis=1, keepdims=True)).exp()
    / (x - x.max(axis=1, keepdims=True)).exp().sum(axis=1, keepdims=True),
}


@pytest.mark.parametrize("name", UNARY)
def test_functions_of_one_tensor(name):
    x = np.random.default_rng(3).standard_normal((2, 3, 4))
    require_right_gradients(UNARY[name], x)


@pytest.mark.parametrize("a, b", [((2, 3), (3, 4)), ((5, 2, 3), (3, 4)), ((1, 2, 3), (5, 3, 1))])
def test_matrix_products(a, b):
    random = np.random.default_rng(0)
    a, b = (random.standard_normal(shape) for shape in (a, b))
    require_right_gradients(lambda a, b: a @ b, a, b)


def test_a_cast_gives_its_gradient_back_in_the_first_dtype():
    x = ag.tensor(np.array([1.0, 1e-3], np.float32), requires_grad=True)
    y = functions.cast(x, np.float16)
    assert y.dtype == np.float16 and functions.cast(x, np.float32) is x
    (y * 3.0).sum().backward()
    assert x.grad.dtype == np.float32 and x.grad.tolist() == [3, 3]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_concatenation(axis):
    random = np.random.default_rng(0)
    shapes = [[2, 2, 2] for _ in range(3)]
    for i, shape in enumerate(shapes):
        shape[axis] = i + 1
    parts = [random.standard_normal(shape) for shape in shapes]
    require_right_gradients(lambda *parts: ag.concat(parts, axis) ** 2, *parts)


STEPS = [
    lambda a, b: a + b,
    lambda a, b: a * b * 0.5,
    lambda a, b: a / (b * b + 1.0),
    lambda a, b: (a * 0.1).exp(),
    lambda a, b: a - b.mean(axis=0),
    lambda a, b: a.max(axis=1, keepdims=True) + b,
]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(STEPS), min_size=1, max_size=12), st.integers(0, 999))
def test_drawn_programs(steps, seed):
    """A chain of drawn functions, each of two earlier results."""
    random = np.random.default_rng(seed)
    x = random.uniform(0.5, 1.5, (2, 3))
    choices = [random.integers(0, 99, 2) for _ in steps]

    def run(x):
        made = [x]
        for step, (i, j) in zip(steps, choices, strict=True):
            made.append(step(made[i % len(made)], made[j % len(made)]))
        return made[-1]

    if float(abs(run(Tensor(x)).data).max()) < 1e3:
        require_right_gradients(run, x)


def test_gradients_are_added_up_over_several_calls():
    x = ag.tensor(np.ones(3, np.float32), requires_grad=True)
    (x * 2.0).sum().backward()
    (x * 3.0).sum().backward()
    assert x.grad.tolist() == [5, 5, 5] and x.grad.dtype == np.float32


class Step(Function):
    """1 where x is positive, else 0: flat, so that nobody learns from it."""

    def forward(self, x):
        return (x > 0).astype(x.dtype)

    def backward(self, dy):
        return None


def test_a_function_may_have_no_gradient():
    x = ag.tensor(np.ones(3, np.float32), requires_grad=True)
    Step()(x * 2.0).sum().backward()
    assert x.grad is None
    (x * 3.0 + Step()(x * 2.0)).sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


def test_two_tensors_never_share_one_gradient():
    a, b = (ag.tensor(np.ones(2, np.float32), requires_grad=True) for _ in range(2))
    (a + b).sum().backward()
    a.grad *= 10
    assert b.grad.tolist() == [1, 1]


def test_nothing_is_recorded_without_need():
    x = ag.tensor(np.ones(2, np.float32), requires_grad=True)
    with ag.no_grad():
        with ag.no_grad():
            pass
        assert not (x * 2.0).requires_grad
    assert (x * 2.0).requires_grad
    assert not (x.detach() * 2.0).requires_grad
    with pytest.raises(RuntimeError, match="depends on none"):
        x.detach().sum().backward()


def test_an_error_within_no_grad_records_again():
    with pytest.raises(ZeroDivisionError), ag.no_grad():
        _ = 1 / 0
    assert (ag.tensor(np.ones(1, np.float32), True) * 2.0).requires_grad


def test_the_tape_is_walked_once_and_given_up():
    x = ag.tensor(np.ones(2, np.float32), requires_grad=True)
    y = x * x
    kept = weakref.ref(y.made_by)
    y.sum().backward()
    gc.collect()
    assert kept() is None
    with pytest.raises(RuntimeError, match="walked before"):
        y.sum().backward()


def test_a_chain_longer_than_pythons_stack():
    x = y = ag.tensor(np.ones(1, np.float32), requires_grad=True)
    for _ in range(5000):
        y = y + x
    y.backward()
    assert x.grad.tolist() == [5001]


def test_a_number_takes_the_dtype_of_the_tensor():
    x = ag.tensor(np.ones(2, np.float32))
    for y in (x + 1, 1 + x, 2.5 * x, x / 3, x**2, x**0.5, x.mean(), x.sum(), -x, x.exp()):
        assert y.dtype == np.float32


def test_an_array_on_the_left_leaves_it_to_the_tensor():
    y = np.ones(2, np.float32) + ag.tensor(np.ones(2, np.float32))
    assert isinstance(y, Tensor) and y.data.tolist() == [2, 2]


def test_a_wrong_gradient_is_named():
    class Wrong(Function):
        def forward(self, x):
            return x * 2

        def backward(self, dy):
            return dy[:1]

    x = ag.tensor(np.ones(3, np.float32), requires_grad=True)
    with pytest.raises(ValueError, match=r"Wrong.backward.*\(1,\).*\(3,\)"):
        Wrong()(x).backward(np.ones(3, np.float32))


@pytest.mark.parametrize("call, error, words", [
    (lambda x: (x * x).backward(), ValueError, "needs a gradient"),
    (lambda x: (x * x).backward(np.ones(2, np.float32)), ValueError, r"\(3,\), not \(2,\)"),
    (lambda x: x @ x, ValueError, "two axes"),
    (lambda x: x[[0, 1]], TypeError, "slices and numbers"),
    (lambda x: ag.tensor([1.0]), TypeError, "list"),
    (lambda x: ag.tensor(np.ones(2, np.int64), True), ValueError, "int64"),
])
def test_wrong_calls(call, error, words):
    with pytest.raises(error, match=words):
        call(ag.tensor(np.ones(3, np.float32), requires_grad=True))


def test_every_function_is_tested_here():
    names = {f.__name__ for f in vars(functions).values()
             if isinstance(f, type) and issubclass(f, Function)} - {"Function"}  # fmt: skip
    assert names == {
        "Add", "Subtract", "Multiply", "Divide", "Power", "Matmul", "Exp", "Log", "Relu", "Sum",
        "Max", "Reshape", "Permute", "GetItem", "Cast", "Concat",
    }  # fmt: skip
