"""Messages of `check` that once misled: each names the learner's own line and what to change."""

import linecache
import re
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
from bank.mistakes import changed

import course_lib
from course_lib import cuda, simulator
from course_lib.teach import TODO, CheckFailed, check
from course_lib.teach.checking import check as checking
from course_lib.teach.checking import deadline
from course_lib.teach.exercise import exercises
from course_lib.teach.explaining import mutation


def mistaken(exercise, *changes):
    """The exercise's solution with every first text replaced by the second, as a learner has it."""
    return changed(exercise, "mine", exercises()[exercise].solution, changes)


def told(exercise, *changes):
    """The message about the solution with these mistakes."""
    with pytest.raises(CheckFailed) as caught:
        check(exercise, mistaken(exercise, *changes), seed=1)
    return str(caught.value)


# ---- float64 ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "exercise, changes, line, words",
    [
        ("softmax_online", ("(m - value) + ONE", "(m - value) + 1"), "(m - value) + 1`",
         "float32 with the integer `1` gives float64. Write np.float32(1)"),
        ("channel_moments", ("n += ONE", "n += 1"), "n += 1`",
         "float32 with the integer `1` gives float64. Write np.float32(1)"),
        ("channel_moments", ("n += ONE", "n += 1.0"), "n += 1.0`",
         "numba makes the constant 1.0 float64. Write np.float32(1)"),
        ("softmax_naive", ("total = np.float32(0)", "total = 0"), "total = 0`",
         "`total` is float64, because it is given the integer 0 here"),
        ("softmax_online", ("MINUS_INF, ZERO", "MINUS_INF, 0"), "m, s = MINUS_INF, 0`",
         "`s` is float64, because it is given the integer 0 here"),
    ],
)  # fmt: skip
def test_float64_is_blamed_on_the_literal_in_its_line(exercise, changes, line, words):
    message = told(exercise, *changes)
    headline, cause = message.splitlines()[:2]
    assert "float64-promotion in line " in headline and headline.endswith(line)
    assert words in cause
    assert "ZERO" not in cause and "nothing asks for it" not in message


def test_a_print_that_was_left_in_is_no_finding(capsys):
    kernel = mistaken("softmax_naive", "            total += ", "            print(total)\n"
                      "            total += ")  # fmt: skip
    check("softmax_naive", kernel, seed=1)
    assert "✓ softmax_naive" in capsys.readouterr().out


def test_what_is_computed_in_float64_beside_a_print_is_still_found():
    message = told("softmax_naive", "total = np.float32(0)", "total = 0.0\n        print(total)")
    assert "float64-promotion" in message and "print" not in message.splitlines()[0]


GUARDED = "a[row + i, k] if row + i < M and k < K else "


@pytest.mark.parametrize("number", ["0", "0.0"])
def test_float64_of_a_conditional_expression_is_blamed_on_its_number(number):
    message = told("matmul_registers", GUARDED + "ZERO", GUARDED + number)
    assert re.search(r"float64-promotion in line \d+, `sa\[ty \+ i, tx\] = ", message)
    assert "Write np.float32(0)" in message and "nothing asks for it" not in message


def test_float64_of_a_name_that_is_only_stored_is_blamed_on_its_start():
    message = told("pool_relu_backward", "h // k, w // k, ZERO", "h // k, w // k, 0.0")
    assert re.search(r"float64-promotion in line \d+, `p, q, gradient = .*, 0\.0`", message)
    assert "`gradient` is float64" in message and "nothing asks for it" not in message


# ---- what Python and numba say of kernels that compute with whole arrays ---------------------


COLUMNS = "        for col in range(n_cols):\n            "
LAST = COLUMNS + "y[row, col] = math.exp(x[row, col] - largest) / total"
FIRST = COLUMNS + "largest = max(largest, x[row, col])"
SUM = COLUMNS + "total += math.exp(x[row, col] - largest)"


def test_an_array_without_its_index_is_named():
    message = told("adam_step", "beta1 * m[i] + (ONE - beta1) * g[i]",
                   "beta1 * m + (ONE - beta1) * g")  # fmt: skip
    assert re.search(r"a whole array in arithmetic in line \d+, `new_m\[i\] = beta1 \* m ", message)
    assert "`m` is an array" in message and "write `m[i]`" in message
    assert "IndexError" not in message and "out of range" not in message


def test_a_whole_row_in_arithmetic_is_named():
    message = told("softmax_naive", LAST, "        y[row] = (x[row] - largest) / total")
    assert re.search(r"in arithmetic in line \d+, `y\[row\] = \(x\[row\]", message)
    assert "`x[row]` lacks an index" in message and "no arithmetic on whole rows" in message
    assert "IndexError" not in message


def test_an_index_that_is_no_arithmetic_keeps_its_error():
    message = told("mma_tile", "ra[0] = load_word(a, g * K + k + t)", "ra[0] = a[g, k + t]")
    assert "too many indices" in message and "whole" not in message


@pytest.mark.parametrize(
    "exercise, old, new, words",
    [
        ("softmax_naive", "total += math.exp", "total += np.exp", "write math.exp"),
        ("adam_step", "math.sqrt(new_v", "np.sqrt(new_v", "write math.sqrt"),
    ],
)
def test_numpys_functions_of_a_number_are_told_their_names_in_math(exercise, old, new, words):
    message = told(exercise, old, new)
    assert words in message and "KeyError" not in message and new.split("(")[0] in message


@pytest.mark.parametrize(
    "old, new",
    [
        (FIRST, "        largest = max(x[row, c] for c in range(n_cols))"),
        (SUM, "        total = sum(math.exp(x[row, c] - largest) for c in range(n_cols))"),
    ],
)
def test_a_kernel_has_no_generator_expressions(old, new):
    message = told("softmax_naive", old, new)
    assert "a generator expression does not work in a kernel" in message
    assert "write a loop" in message and "in place of" not in message
    assert f"`{new.strip()}`" in message
    assert "empty sequence" not in message and "yield" not in message


def test_a_kernel_has_no_lists():
    message = told("softmax_naive", SUM, "        total = sum([math.exp(x[row, c] - largest) "
                   "for c in range(n_cols)])")  # fmt: skip
    assert "a list comprehension does not work in a kernel" in message and "append" not in message


# ---- what the sanitizer sees -----------------------------------------------------------------


ADDS = "            s[t] += s[t + step]\n        cuda.syncthreads()\n        step //= 2\n"


def test_nan_of_bits_that_are_misread_is_not_called_an_overflow():
    message = told("mma_tile", "ra[0] = load_word(a, g * K + k + t)", "ra[0] = 0x7FFFFFFF")
    assert re.search("seen +NaN was computed from finite inputs$", message, re.MULTILINE)


def test_nan_of_a_quotient_is_still_called_one():
    message = told("softmax_naive", "range(n_cols):\n            largest",
                   "range(1, n_cols):\n            largest")  # fmt: skip
    assert "an intermediate result overflows to infinity, or 0 is divided by 0" in message
    assert "or one infinite number is taken from another" in message  # MINUS_INF is in the kernel


@pytest.mark.parametrize(
    "exercise, changes, element",
    [
        ("channel_moments", ("t < step and ", ""), "counts"),
        ("softmax_shared",
         ("= total\n    cuda.syncthreads()\n    step = cuda.blockDim.x // 2",
          "= total\n    cuda.syncthreads()\n    step = 128"), "s"),
    ],
)  # fmt: skip
def test_what_no_thread_ever_writes_need_not_be_filled_first(exercise, changes, element):
    message = told(exercise, *changes)
    assert re.search(rf"uninitialised-read in line \d+, `.*{element}\[t \+ step\]", message)
    assert "no thread ever writes it" in message
    assert "fill it first" not in message and "syncthreads() between" not in message


def test_what_is_written_later_is_still_to_be_filled_first():
    early = "    largest = max(largest, s[t])\n    cuda.syncthreads()\n"
    message = told("softmax_shared", "    s[t] = largest\n", early + "    s[t] = largest\n")
    assert "before any thread has written it" in message and "fill it first" in message


def test_two_stores_into_one_element_need_no_barrier():
    message = told("mma_tile", "c[g, 2 * t] =", "c[g, t] =", "c[g, 2 * t + 1]", "c[g, t + 1]")
    assert re.search(r"race in line \d+, `c\[g, t \+ 1\] = acc\[1\]`", message)
    cause = "without one factor in an index of c; line "  # that both lines lack it is one mistake
    assert cause in message or "two threads write the same element: look at the index" in message
    assert "barrier" not in message and "syncthreads" not in message


def test_two_stores_at_a_fixed_place_have_no_wrong_index():
    @cuda.jit
    def tells_both(x, found):
        if x[cuda.grid(1)] > 0:
            found[0] = 1
        else:
            found[0] = 0

    x, found = np.array([1, -1], np.float32), np.zeros(1, np.float32)
    with simulator.sanitize() as report:
        tells_both[1, 2](x, found)
    (finding,) = report
    assert finding.message.endswith("let threads write one thing there, or none")
    assert "index" not in finding.message and "barrier" not in finding.message


def test_a_loop_with_a_barrier_that_never_ends_is_no_deadlock():
    message = told("softmax_shared", ADDS, ADDS.replace("        step //= 2\n", ""))
    assert re.search(r"endless loop in line \d+, `while step > 0:`", message)
    assert "threads 0-31 of block 0 go round the loop" in message and "deadlock" not in message


def test_a_loop_of_one_thread_that_never_ends_waits_for_nobody():
    message = told("softmax_naive", FIRST, "        col = 0\n        while col < n_cols:\n"
                   "            largest = max(largest, x[row, col])")  # fmt: skip
    assert re.search(r"endless loop in line \d+, `while col < n_cols:`", message)
    assert "waits for another" not in message and "deadlock" not in message


def test_threads_that_wait_for_an_endless_loop_are_not_in_it():
    """One thread goes round, the others wait at the barrier below."""
    message = told("softmax_shared", "    s[t] = largest\n", "    s[t] = largest\n"
                   "    while t == 0:\n        largest = max(largest, MINUS_INF)\n")  # fmt: skip
    assert re.search(r"deadlock in line \d+, `while t == 0:`", message)
    assert "thread 0 of block 0 goes round" in message


# ---- answers that do nothing, or end or stop what checks them --------------------------------


def written(exercise, *lines, **names):
    """An answer with these lines, which may use these names."""
    parameters = ", ".join(exercises()[exercise].parameters)
    kernel = exercises()[exercise].kind == "kernel"
    text = "@cuda.jit\n" * kernel + f"def mine({parameters}):\n"
    text += "".join(f"    {line}\n" for line in lines)
    file = f"<{exercise}: {lines}>"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"cuda": cuda, "np": np, "sys": sys, "time": time, **names}
    exec(compile(text, file, "exec"), space)
    return space["mine"]


@pytest.mark.parametrize(
    "exercise, lines, says",
    [
        ("squeeze_excite_fused", ("pass",), "was never written"),
        ("transposed_backward", ("return dy",), "return 2 values, dx, dweight; it returned one"),
        ("amdahl", ("return 1.5",), "should return 2 values, .*; it returned one, of type float"),
        ("self_times", ("begin + end",), r"returned nothing \(None\): is the return missing"),
        ("relu", ("sys.exit(1)",), r"Exit in line 3, `sys.exit\(1\)`: this ends Python itself"),
        ("walk_back", ("sys.exit()",), r"Exit in line 2, `sys.exit\(\)`: this ends Python"),
        ("walk_back", ("time.sleep(100)",), r"did not end in [\d.]+ seconds in line 2, `time"),
        ("walk_back", ("while True:", "    try:", "        dy[0] = 0", "    except Exception:",
                       "        pass"), r"did not end in [\d.]+ seconds in line"),
    ],
)  # fmt: skip
def test_what_does_nothing_or_never_ends_gets_a_verdict(exercise, lines, says, monkeypatch):
    answer = written(exercise, *lines)
    exercises()[exercise].cases(np.random.default_rng(0))  # which may import PyTorch
    if "seconds" in says:
        monkeypatch.setattr(checking, "TIME_LIMIT", 0.3)
        monkeypatch.setattr(deadline, "PATIENCE", 2)
    begin = time.monotonic()
    with warnings.catch_warnings(action="error"), pytest.raises(CheckFailed, match=says):
        check(exercise, answer, seed=1)
    assert time.monotonic() - begin < 60  # and not the 100 that it would sleep


# ---- what is missing, and where the run came from --------------------------------------------


@pytest.mark.parametrize(
    "exercise, line, says",
    [
        ("relu", "y[0] = UNHEARD_OF", "`UNHEARD_OF` is not defined: nothing in the cells that hav"),
        ("softmax_online", "y[0, 0] = MINUS_INF", "`MINUS_INF` is not defined: run the cell above"),
        ("transposed_by_dx", "transposed_size(1, 1, 1, 0, 0)",
         r"line 2, .*: `transposed_size` is not defined: it is the exercise transposed_size of "
         r"lesson 13, and transposed_size = use\('transposed_size'\) takes it"),
    ],
)  # fmt: skip
def test_a_name_that_is_missing_has_no_other_cause(exercise, line, says):
    with pytest.raises(CheckFailed, match=says) as caught:
        check(exercise, written(exercise, line), seed=1)
    assert "  cause" not in str(caught.value)


def test_a_helper_that_holds_todo_is_named(capsys):
    helper = written("transposed_size", "return TODO")
    helper.__globals__["TODO"], helper.__name__ = TODO, "transposed_size"
    answer = written("transposed_by_dx", "return transposed_size(1, 1, 1, 0, 0)",
                     transposed_size=helper)  # fmt: skip
    check("transposed_by_dx", answer)
    assert "It calls transposed_size, which still holds TODO" in capsys.readouterr().out


def test_of_several_calls_the_one_that_went_wrong_is_told():
    file = str(Path(course_lib.__file__).parent / "made_up.py")
    text = "@cuda.jit(device=True)\ndef get(x, i):\n    return x[i]\n"
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    space = {"cuda": cuda}
    exec(compile(text, file, "exec"), space)
    kernel = written("relu", "i = cuda.grid(1)", "if i < x.size:", "    y[i] = get(x, i)",
                     "    y[i] = get(x, i + 1)", get=space["get"])  # fmt: skip
    with pytest.raises(CheckFailed) as caught:
        check("relu", kernel, seed=1)
    assert "in line 6, `y[i] = get(x, i + 1)`, in get, which it calls" in str(caught.value)


@pytest.mark.parametrize(
    "exercise, lines, says",
    [
        ("relu", ("i = cuda.grid(1)", "if i < x.size and x[i] > 0:", "    y[i] = x[i]"),
         "never written: just what should be 0"),
        ("mma_tile", ("c[0, 1] = 0",), "never written, in a launch of 32 threads"),
    ],
)  # fmt: skip
def test_elements_left_out_on_purpose_need_no_more_threads(exercise, lines, says, monkeypatch):
    monkeypatch.setattr(mutation, "cause", lambda *_, **__: "")  # its search takes long
    with pytest.raises(CheckFailed, match=says) as caught:
        check(exercise, written(exercise, *lines), seed=1)
    assert "so a thread must handle more than one" not in str(caught.value)


def test_what_the_exercise_objects_to_is_no_error_of_the_learners():
    with pytest.raises(CheckFailed, match="^walk_back: there is no gradient of t"):
        check("walk_back", written("walk_back", "return {}"), seed=1)
    with pytest.raises(CheckFailed, match="^walk_back: ValueError in line 2, `raise ValueError"):
        check("walk_back", written("walk_back", "raise ValueError('mine')"), seed=1)
