"""The mistake found by a piece of right code put in the learner's, whose form is another."""

import ast
import contextlib
import inspect
import warnings

import numpy as np
import pytest

from course_lib import cuda
from course_lib.teach import CheckFailed, check
from course_lib.teach.checking import check as checking
from course_lib.teach.exercise import exercises
from course_lib.teach.explaining import causes
from course_lib.teach.explaining.mutation import repair, sentence
from course_lib.teach.explaining.mutation.changes import EVERY, built, parsed, program
from course_lib.teach.explaining.mutation.grafts import Graft, grafts
from course_lib.teach.explaining.mutation.repair import reverse
from course_lib.teach.explaining.mutation.words import words_for

pytestmark = pytest.mark.usefixtures("patience")


@cuda.jit
def not_divided(dy, dx):  # the solution gives the share a name
    _, channels, rows, cols = dx.shape
    picture, channel = cuda.blockIdx.x // channels, cuda.blockIdx.x % channels
    for i in range(cuda.threadIdx.x, rows * cols, cuda.blockDim.x):
        dx[picture, channel, i // cols, i % cols] = dy[picture, channel]


@cuda.jit
def lanes_for_sums(x, y):  # the solution's loop over the steps is another
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = np.float32(0)
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        for k in range(5):
            total += cuda.shfl_down_sync(0xFFFFFFFF, lane, 16 >> k)
        if lane == 0:
            y[row] = total


@cuda.jit
def asks_for_the_sign(x, y):
    i = cuda.grid(1)
    if x[i] > 0:
        y[i] = max(x[i], np.float32(0))


@cuda.jit
def one_too_many(x, y):
    partial = cuda.shared.array(256, np.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    mine = np.float32(0)
    for col in range(t, x.shape[1], cuda.blockDim.x):
        mine += x[row, col]
    partial[t] = mine
    cuda.syncthreads()
    half = cuda.blockDim.x // 2
    while half > 0:
        if t <= half:
            partial[t] += partial[t + half]
        cuda.syncthreads()
        half //= 2
    if t == 0:
        y[row] = partial[0]


NAME = asks_for_the_sign.py_func.__name__


@pytest.mark.parametrize(
    "exercise, kernel, words, line",
    [
        (
            "global_avg_pool_backward", not_divided, "without one of its divisions",
            "dx[picture, channel, i // cols, i % cols] = dy[picture, channel]",
        ),
        ("warp_sum", lanes_for_sums, "with one number in place of another", "lane, 16 >> k)"),
        ("relu", asks_for_the_sign, "with `x[i] > 0` in place of `i < x.size`", "if x[i] > 0:"),
        # A race has a cure as a rule, but not this one: its barrier is where it should be.
        ("block_sum", one_too_many, "with `<=` in place of `<`", "if t <= half:"),
    ],
)  # fmt: skip
def test_the_mistake_in_code_of_another_form(exercise, kernel, words, line):
    with pytest.raises(CheckFailed) as caught:
        check(exercise, kernel, seed=1)
    (cause,) = (each for each in str(caught.value).splitlines() if each.startswith("  cause"))
    assert f"behaves exactly like the right one {words}; line " in cause
    assert line in cause and "fix" not in str(caught.value)


def test_what_a_barrier_cures_is_told_as_that():
    solution = exercises()["block_sum"].solution
    barrier = inspect.getsource(solution.py_func).partition("    cuda.syncthreads()\n")
    without_barrier = built(barrier[0] + barrier[2], solution)
    with pytest.raises(CheckFailed, match=r"put cuda.syncthreads\(\) between them") as caught:
        check("block_sum", without_barrier, seed=1)
    assert "behaves exactly" not in str(caught.value)


def test_two_lines_that_would_do_name_none(monkeypatch):
    attempt = checking._attempt(exercises()["relu"], asks_for_the_sign, 1)
    failure = checking._first_failure(attempt)
    right = inspect.getsource(attempt.exercise.solution.py_func).replace("relu(", f"{NAME}(")
    changed = right.replace("i < x.size", "i + 1 <= x.size")
    both = [Graft(right, 1), Graft(changed, 2)]
    monkeypatch.setattr(sentence, "grafts", lambda *_: both)
    monkeypatch.setattr(sentence, "words_for", lambda text, *_: str(text == right))
    nothing = sentence.Told()
    search = sentence.Grafting(attempt, failure, parsed(asks_for_the_sign), EVERY, nothing)
    assert search.conclusion([*search.found()]) == nothing


@pytest.mark.parametrize(
    "call",
    [
        "cuda.shfl_xor_sync(total, 1 << k)",
        "cuda.shfl_xor_sync(0xFFFFFFFF, total, mask=1 << k)",
        "cuda.shfl_xor_sync()",
        "cuda.atomic.add(y, row)",
        "cuda.atomic.add(*y)",
        "max()",
        "np.float32()",
        "range()",
        "abs",
        "(lambda: total)()",
        "x[...]",
        "x[row, :][k]",
        "-+~k",
    ],
)
def test_no_code_breaks_the_search(call, monkeypatch):
    """Every piece and change is made and put into words; few of them need to run for that.

    The warning that would tell of what breaks is an error in tests.
    """
    tried = []

    def makes_a_kernel(_, text):
        tried.append(text)
        with contextlib.suppress(SyntaxError):
            return bool(ast.parse(text))

    def is_built(_, build):
        with contextlib.suppress(SyntaxError):
            return bool(build())

    monkeypatch.setattr(sentence, "passes", makes_a_kernel)
    # As if no piece had words, for where one has, the search ends.
    monkeypatch.setattr(sentence, "words_for", lambda *about: words_for(*about) and "")
    monkeypatch.setattr(repair, "passes", lambda _, text: tried.append(text))
    monkeypatch.setattr(sentence.Reproduction, "reproduced", is_built)
    check_warp_sum_with(call)
    assert len(tried) > 20


@pytest.mark.parametrize("call", ["cuda.atomic.add(y, row)", "(lambda: total)()", "x[...]"])
def test_no_code_breaks_the_search_when_it_runs(call):
    check_warp_sum_with(call)


def check_warp_sum_with(call):
    """Check a sum that calls this in place of a shuffle, which must be rejected."""
    text = inspect.getsource(lanes_for_sums.py_func).replace(
        "cuda.shfl_down_sync(0xFFFFFFFF, lane, 16 >> k)", call
    )
    assert call in text
    with pytest.raises(CheckFailed):
        check("warp_sum", built(text, lanes_for_sums), seed=1)


def test_a_search_that_breaks_hides_no_verdict(monkeypatch):
    def breaks(*_, **__):
        raise KeyError("broken")

    monkeypatch.setattr(causes.mutation, "cause", breaks)
    with pytest.warns(UserWarning, match=r"broke off: KeyError\('broken'\)"):
        with pytest.raises(CheckFailed, match="wrong values in y"):
            check("warp_sum", lanes_for_sums, seed=1)


@pytest.mark.parametrize(
    "right, own, words",
    [
        ("y[i] = x[i] * 2", "y[i] = x[i]", "without the factor 2"),
        ("y[i] = x[i]", "y[i] = i", "with `i` in place of `x[i]`"),
        ("y[i] = x[i] + n", "y[i] = x[i] + m", "with one size in place of another"),
        ("y[i] = x[i] * n / m", "y[i] = x[i] * m / n", "with one size and another"),
        ("y[i] = x[n * m]", "y[i] = x[m * m * n]", "with `m * m * n` in place of `n * m`"),
        ("y[i] = x[i] * n * x[2]", "y[i] = x[i] * n * x[0]", "with `x[0]` in place of `x[2]`"),
        ("y[i] = x[i] * 8", "y[i] = x[i] * 32", "with `32` in place of `8`"),
        ("y[i] = abs(x[i]) * n", "y[i] = x[i] * n", "without abs"),
        ("y[i] = x[i] * n", "y[i] = abs(x[i]) * n", "with abs too much"),
        ("y[i] = x[i] * n", "y[i] = x[i] * n * m", "with a size too much as a factor"),
        ("y[i] = math.exp(x[i] - n) / m", "y[i] = math.exp(x[i] - n / m)", "brackets elsewhere"),
        ("y[i] = x[i] - n", "y[i] = y[i] + x[i] * x[i] / m + n * m - x[0]", ""),
    ],
)
def test_what_is_otherwise_is_told(right, own, words):
    name = lanes_for_sums.py_func.__name__  # the changed text takes its place
    texts = [
        f"def {name}(x, y):\n    n, m = x.shape\n    for i in range(n):\n        {line}"
        for line in (right, own)
    ]
    told = words_for(texts[0], ast.parse(texts[1]), lanes_for_sums, EVERY)
    assert words in told and bool(words) == bool(told)


def test_words_of_what_mends_become_those_of_what_is_wrong():
    assert reverse("with `>=` in place of `>`") == "with `>` in place of `>=`"
    assert reverse("without the condition of an `if`") == "with an `if` too much"
    assert reverse("with two indices of x swapped") == "with two indices of x swapped"
    assert reverse("with a mask that names half the lanes") == ""


def test_causes_are_looked_for_in_findings_too(monkeypatch):
    attempt = checking._attempt(exercises()["block_sum"], one_too_many, 1)
    failure = checking._first_failure(attempt)
    assert failure.finding.kind == "race"
    monkeypatch.setattr(causes.mutation, "cause", lambda *_, thorough: f"thorough: {thorough}")
    assert causes.explain(attempt, failure).cause == "thorough: False"


TWINS = """
def {name}(x, y):
    n, m = x.shape
    for r in range(n):
        p = {p}
        for s in range(m):
            q = {q}
            y[p, q] = x[r, s]
"""


@pytest.mark.parametrize(
    "right, own, words",
    [
        (("r * 2 // n", "s * 2 // m"), ("r * 2", "s * 2"), "without one of its `//`"),
        (("r - y[0, n]", "s - y[0, m]"), ("r - y[5, n]", "s - y[5, m]"),
         "with `y[5, n]` in place of `y[0, n]`"),
    ],
)  # fmt: skip
def test_the_same_in_two_lines_is_one_mistake(right, own, words):
    name = lanes_for_sums.py_func.__name__
    texts = [TWINS.format(name=name, p=p, q=q).strip() for p, q in (right, own)]
    learners = ast.parse(texts[1])
    solution = built(texts[0], lanes_for_sums)
    assert texts[0] in [graft.text for graft in grafts(learners, solution)]
    assert words in words_for(texts[0], learners, lanes_for_sums, EVERY)


def test_a_line_that_sets_names_within_names_is_compared():
    """`(B, H, T, D), S = ...` sets two parts, of which one has four: no line of its kernels has.

    The learner's is that function and the smallest of what it calls: every line takes its turn.
    """
    solution = exercises()["attention"].solution
    own = program(solution)
    del own.body[3:], own.body[1]
    assert len([*grafts(own, solution)]) > 100


def test_what_is_tried_warns_nobody():
    text = f"def {NAME}(x, y):\n    return 1 is x"
    with warnings.catch_warnings(action="error"):
        assert built(text, asks_for_the_sign)(2, 0) is False
