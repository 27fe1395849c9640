"""What a failed check tells: the cause found by experiment, its line, and what was only seen."""

import math
import re
import time

import numpy as np
import pytest
from bank import messages

from course_lib import cuda
from course_lib.runtime.intrinsics import warp_sum
from course_lib.teach import CheckFailed, check
from course_lib.teach.checking import check as checking
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.checking.running import Failure, Run
from course_lib.teach.exercise import exercises
from course_lib.teach.explaining import causes, mutation
from course_lib.teach.explaining.influence import influence
from course_lib.teach.explaining.mutation import sentence
from course_lib.teach.explaining.mutation.changes import EVERY, changes, changes_alike
from course_lib.teach.explaining.mutation.edits import OPERATORS
from course_lib.teach.explaining.mutation.lines import Line, patched
from course_lib.teach.explaining.mutation.repair import opposite

ZERO, ONE = np.float32(0), np.float32(1)


@pytest.fixture(autouse=True)
def _patient(request):
    """One test looks at the time itself."""
    if "time_for_the_cause" not in request.node.name:
        request.getfixturevalue("patience")


def told(exercise, kernel):
    with pytest.raises(CheckFailed) as caught:
        check(exercise, kernel, seed=1)
    return str(caught.value)


def cause_of(exercise, kernel):
    """The sentence on the cause, "" if there is none."""
    found = re.search(r"^  cause +(.*)$", told(exercise, kernel), re.MULTILINE)
    return found[1] if found else ""


# ---- the cause, in the learner's own words ---------------------------------------------------


@cuda.jit
def swapped(values, result):
    me = cuda.grid(1)
    if me < values.shape[1]:
        acc = ZERO
        for k in range(values.shape[0]):
            acc += values[me, k]
        result[me] = acc


@cuda.jit
def unguarded(x, y):
    i = cuda.grid(1)
    y[i] = max(x[i], ZERO)


@cuda.jit
def one_bias_for_all(x, bias, y):
    n_pics, n_ch, height, width = x.shape
    t = cuda.grid(1)
    if t < x.size:
        w = t % width
        h = t // width % height
        c = t // (width * height) % n_ch
        n = t // (width * height * n_ch)
        y[n, c, h, w] = x[n, c, h, w] + bias[0]


@pytest.mark.parametrize(
    "exercise, kernel, words, line",
    [
        ("column_sum", swapped, "swapped|the other way round", "acc += values[me, k]"),
        ("relu", unguarded, "without the condition of an `if`", "y[i] = max(x[i], ZERO)"),
        ("nchw_index", one_bias_for_all, "0 for an index of bias", "+ bias[0]"),
    ],
)
def test_the_cause_and_its_line_are_told(exercise, kernel, words, line):
    cause = cause_of(exercise, kernel)
    assert re.search(f"behaves exactly like the right one .*({words})", cause)
    assert line in cause and re.search(r"(;|before) line \d+, `", cause)


@cuda.jit
def secretive(x, y):
    qq_rows, qq_cols = x.shape
    qq_me, qq_half = cuda.grid(1), cuda.threadIdx.x
    qq_tile = cuda.shared.array(32, np.float32)
    if qq_me < qq_cols and qq_half < qq_rows:
        qq_sum = ZERO
        for qq_row in range(qq_rows):
            qq_sum += qq_tile[qq_row] - x[qq_row, qq_me] / (qq_rows * qq_cols)
        cuda.atomic.add(qq_tile, qq_half, max(qq_sum, ZERO))
        y[qq_me] = qq_sum if qq_half > qq_me // 2 else -qq_sum


def test_nothing_is_told_of_the_solutions_own_names():
    for change in (*changes(secretive, EVERY), *changes_alike(secretive, EVERY)):
        assert "qq" not in change.words and change.words


# ---- or nothing ------------------------------------------------------------------------------


@cuda.jit
def of_its_own_make(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = min(max(x[i], ZERO), np.float32(6)) * np.float32(0.7)


@cuda.jit
def overflows(x, y):
    """Many formulas overflow as this one does: that says little about which of them it is."""
    i = cuda.grid(1)
    if i < x.size:
        e = math.exp(x[i])
        y[i] = e / (ONE + e)


@pytest.mark.parametrize(
    "exercise, kernel", [("relu", of_its_own_make), ("sigmoid", overflows)]
)
def test_no_cause_is_named_where_nothing_certain_matches(exercise, kernel):
    cause = cause_of(exercise, kernel)
    assert cause == "" or cause.startswith("another line in place of line ")


@cuda.jit
def all_but_the_first(values, result):
    """Another form than the solution's: nothing that is done to that one makes it."""
    me = cuda.threadIdx.x + cuda.blockIdx.x * cuda.blockDim.x
    if me < values.shape[1]:
        acc, k = ZERO, values.shape[0] - 1
        while k > 0:
            acc += values[k, me]
            k -= 1
        result[me] = acc


def test_the_only_change_of_the_learners_own_code_is_told():
    cause = cause_of("column_sum", all_but_the_first)
    assert cause.startswith("your kernel behaves exactly like the right one with `>` in place of")
    assert cause.endswith("`while k > 0:`")


def test_changes_that_disagree_name_nothing(monkeypatch):
    found = changes(exercises()["relu"].solution, EVERY)[:2]
    assert found[0].words != found[1].words
    monkeypatch.setattr(sentence, "grafts", lambda *_: ())
    monkeypatch.setattr(sentence.Matching, "found", lambda _: found)
    monkeypatch.setattr(sentence, "place_of_all", lambda *_: 1)
    attempt = checking._attempt(exercises()["relu"], unguarded, 1)
    cause = mutation.cause(attempt, checking._first_failure(attempt))
    assert cause.startswith("another line in place of line 1, ")


def test_a_change_that_cannot_be_undone_names_nothing(monkeypatch):
    monkeypatch.setattr(sentence, "grafts", lambda *_: ())
    found = changes(exercises()["relu"].solution, EVERY)[:1]
    monkeypatch.setattr(sentence.Matching, "found", lambda _: found)
    attempt = checking._attempt(exercises()["relu"], of_its_own_make, 1)
    assert mutation.cause(attempt, checking._first_failure(attempt)) == ""


@pytest.mark.parametrize("name", ["implicit_gemm", "walk_back"])
def test_the_time_for_the_cause_is_kept(name):
    """The largest kernel, and a function whose loops can be made endless."""
    exercise = exercises()[name]
    wrong = next(c for c in changes(exercise.solution, OPERATORS) if c.operator == "drop_statement")
    attempt = checking._attempt(exercise, wrong.build(), 1)
    failure = checking._first_failure(attempt)
    begin = time.process_time()
    causes.explain(attempt, failure)
    assert time.process_time() - begin < 2.5


def test_what_a_kernel_prints_is_not_printed_again(capsys):
    @cuda.jit
    def talks(x, y):
        i = cuda.grid(1)
        print("here", i)
        if i < x.size:
            y[i] = abs(x[i])

    attempt = checking._attempt(exercises()["relu"], talks, 1)
    failure = checking._first_failure(attempt)
    capsys.readouterr()
    assert "abs in place of max" in causes.explain(attempt, failure).cause
    assert capsys.readouterr().out == ""


# ---- the parts -------------------------------------------------------------------------------


def lines(text):
    return [
        Line((len(each) - len(each.lstrip())) // 4, each.strip(), number)
        for number, each in enumerate(text.strip("\n").splitlines(), 1)
    ]


def test_a_patch_is_merged_in_the_learners_names():
    wrong = lines("i = cuda.grid(1)\ny[i] = x[i]\n")
    right = lines("i = cuda.grid(1)\nif i < x.size:\n    y[i] = x[i]\n")
    own = lines("n = x.size\nme = cuda.grid(1)\nb[me] = x[me]\n")
    merged, concerned = patched(own, wrong, right)
    assert [(each.depth, each.text) for each in merged] == [
        (0, "n = x.size"), (0, "me = cuda.grid(1)"), (0, "if me < x.size:"), (1, "b[me] = x[me]"),
    ]  # fmt: skip
    assert concerned == [3]


def test_only_lines_that_change_are_concerned():
    wrong, right = lines("a = 1\ns = e(x)\ny = e(x)"), lines("a = 1\ns = e(x - m)\ny = e(x - m)")
    own = lines("a = 1\ns = e(x - m)\ny = e(x)")
    assert patched(own, wrong, right)[1] == [3]


@pytest.mark.parametrize(
    "words, others",
    [
        ("with `<=` in place of `<`", "with `<` in place of `<=`"),
        ("with an index of x that is one too large", "with an index of x that is one too small"),
        ("with 32 in place of cuda.blockDim.x, at all 2 places that are alike",
         "with cuda.blockDim.x in place of 32"),
        ("with two indices of y swapped", "with two indices of y swapped"),
    ],
)  # fmt: skip
def test_what_undoes_a_change_is_told_in_opposite_words(words, others):
    assert opposite(words) == others


def test_alike_places_are_changed_together():
    found = changes_alike(exercises()["conv2d_dx"].solution, EVERY)
    texts = [each.text for each in found if each.operator == "drop_operand"]
    assert any("h - r, w - s" in text for text in texts)  # no padding, for rows and columns


def test_every_operator_finds_something():
    solutions = [each.solution for each in exercises().values() if each.kind != "answer"]
    made = {change.operator for solution in solutions for change in changes(solution, EVERY)}
    assert made == {each.__name__ for each in EVERY}


# ---- the judge of the messages ---------------------------------------------------------------


@pytest.mark.parametrize("name", ["relu", "output_size"])
def test_messages_of_a_sample_are_never_false(name):
    found = [each for each in map(messages._judged, *messages._subjects(name, 2)) if each]
    assert found and all(each.kind != "false" for each in found), found


# ---- what is told beside the cause -----------------------------------------------------------


@cuda.jit
def both_wrong(logits, target, loss, m, s):
    row = cuda.blockIdx.x * (cuda.blockDim.x // 32) + cuda.threadIdx.x // 32
    if row < logits.shape[0] and cuda.threadIdx.x % 32 == 0:
        m[row] = logits[row, 0] + ONE
        s[row] = ZERO
        loss[row] = m[row]


def test_the_first_wrong_array_is_the_first_that_is_stored(monkeypatch):
    monkeypatch.setattr(mutation, "cause", lambda *_, **__: "")
    assert "wrong values in m" in told("cross_entropy", both_wrong)


def test_inputs_that_the_kernel_is_not_given_are_not_shown():
    wrong = next(c for c in changes(exercises()["conv2d_dx"].solution, OPERATORS)
                 if c.operator == "drop_operand").build()  # fmt: skip
    assert "x" in exercises()["conv2d_dx"].cases(np.random.default_rng(1))[0].inputs
    assert not re.search(r"^  x  |x\[0, 0, 0, 0\] =", told("conv2d_dx", wrong).replace("dx[", "d["),
                         re.MULTILINE)


def test_nan_of_an_overflow_is_told_with_the_line_that_overflows():
    assert re.search(r"infinity in line \d+, `e = math.exp\(x\[i\]\)`, before NaN is computed in "
                     r"line \d+, `y\[i\] = e /", told("sigmoid", overflows))  # fmt: skip


@cuda.jit
def almost(x, y):
    """A wrong sign where the number is small, and one input has a share of 0.743."""
    i = cuda.grid(1)
    if i < x.size:
        y[i] = x[i] * np.float32(0.743) if x[i] > 0 else -x[i]


def test_only_factors_that_mean_something_are_told():
    message = told("relu", almost)
    assert "0.743 times" not in message and "off by" not in message


@cuda.jit
def a_round_and_one_more(x, y):
    for i in range(cuda.grid(1), min(x.size, cuda.gridsize(1) + 1), cuda.gridsize(1)):
        y[i] = max(x[i], ZERO)


def test_who_handles_more_than_one_element_is_not_told_to():
    assert "never written, in a launch of" in told("relu_grid_stride", a_round_and_one_more)


@cuda.jit
def adds_nothing(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] += max(x[i], ZERO)


def test_what_is_added_to_is_read_and_not_left_out():
    message = told("relu", adds_nothing)
    assert "never written" not in message and "`+=` in place of `=`" in message


@cuda.jit
def rounds_ties_up(x, kept, y):
    drop = 23 - kept
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        bits = np.int64(x[i])
        if bits & 0x7F800000 != 0x7F800000:
            bits = bits + (1 << (drop - 1)) >> drop << drop
        y[i] = bits


def test_bits_that_are_rounded_have_a_part_in_the_result(monkeypatch):
    monkeypatch.setattr(mutation, "cause", lambda *_, **__: "")  # its search takes long
    for seed in range(4):
        with pytest.raises(CheckFailed) as caught:
            check("round_bits", rounds_ties_up, seed=seed)
        assert "no part" not in str(caught.value)
        assert re.search(r"expected  y\[\d+\] = 0x[0-9a-f]{8}, the bits of ", str(caught.value))


@cuda.jit
def counts_the_step(weight, average, steps, decay, y):
    kept = min(decay, (1 + steps[0]) / np.float32(10 + steps[0]))
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = average[i] + (ONE - kept) * (weight[i] - average[i])
    if cuda.grid(1) == 0:
        steps[0] += 1


def test_of_an_input_that_is_changed_no_barrier_is_asked_for():
    """Others may have read it before or not: a race, which no barrier mends."""
    message = told("ema", counts_the_step)
    assert "it changes its input steps" in message and "syncthreads" not in message


def test_integers_that_are_places_are_left_alone():
    """One more than the last place is none: the reference refuses it, and nothing is said."""
    exercise = exercises()["max_pool_backward"]
    attempt = checking._attempt(exercise, exercise.solution, 1)
    case = next(each for each in attempt.cases if 0 < each.size[1] < 20)
    run = Run(exercise, case, Simulator("forward", 1))
    run.execute(exercise.solution)
    places = [name for name, x in case.inputs.items() if np.ndim(x) and x.dtype.kind == "i"]
    assert places
    for name in places:
        assert influence(attempt, Failure("values", run), name) is None


# ---- lines -----------------------------------------------------------------------------------


@cuda.jit(device=True)
def helper(x, i):
    return x[i + 1]


@cuda.jit
def calls_helper(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(helper(x, i), ZERO)


@cuda.jit
def shuffles_inside_a_guard(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0] and lane < min(16, x.shape[1]):
        y[row] = warp_sum(x[row, lane])


def test_a_line_of_another_function_is_told_with_its_name():
    assert re.search(r"out-of-bounds in line \d+ of helper, `return", told("relu", calls_helper))


def test_a_line_of_the_course_is_told_as_the_line_that_calls_it():
    message = told("warp_sum", shuffles_inside_a_guard)
    assert re.search(r"in line \d+, `y\[row\] = warp_sum\(x\[row, lane\]\)`, in warp_sum", message)


def test_what_counts_nothing_is_no_count():
    """A share may be so small that it divides 1 into infinity."""
    exercise = exercises()["relu"]
    run = Run(exercise, exercise.cases(np.random.default_rng(1))[-1], Simulator("forward", 1))
    for factor in (0.0, 1e-320, np.float64(0.0)):
        assert not causes._is_count(factor, run)
    assert causes._is_count(0.5, run)
