"""What is seen of a wrong result, and why it is wrong: said only where the evidence is certain.

Each function in `OBSERVATIONS` looks at one failure, and at further runs of the same case where
that settles the question, and returns a sentence or None. The first that speaks is believed. None
of them knows the exercises or the usual mistakes: what they say was seen in the run. The cause is
found by experiment, in `course_lib.teach.explaining.mutation`.
"""

from __future__ import annotations

import contextlib
import io
import warnings

import numpy as np

from course_lib.simulator.observe.real import observing_with
from course_lib.teach.checking.deadline import TimeUp, deadline, uncollected
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.checking.fences import FAINT, poison, same_bits
from course_lib.teach.checking.running import Attempt, Failure, Run, attempt_case, close
from course_lib.teach.checking.writers import Writers
from course_lib.teach.explaining import mutation
from course_lib.teach.explaining.influence import MOST, influence
from course_lib.teach.explaining.places import element
from course_lib.teach.explaining.raised import is_unfinished, origin_of_nan

#: Seconds of the processor for what is seen; the experiment has its own limits.
LOOKING = 0.4

#: Whose cause is looked for by all means. The sanitizer's other findings tell theirs as a rule.
SOUGHT = ("values", "outside", "twice", "raised")


def explain(attempt: Attempt, failure: Failure) -> Failure:
    """Return the failure with what is seen, and with the cause where an experiment shows it.

    Where the smallest input shows nothing and a larger one does, the failure with that. Takes 2
    seconds at most.
    """
    # Every experiment runs the kernel again, and a race may end differently each time.
    # What it prints has been seen.
    with contextlib.redirect_stdout(io.StringIO()), uncollected(), warnings.catch_warnings():
        for noise in (SyntaxWarning, RuntimeWarning):  # of what is tried
            warnings.simplefilter("ignore", noise)
        with contextlib.suppress(TimeUp), deadline(LOOKING / 2):
            failure.seen = observed(attempt, failure)
        failure.cause = _cause(attempt, failure)
        if not failure.seen and not failure.cause.startswith("your "):  # which says what it is
            with contextlib.suppress(TimeUp), deadline(LOOKING / 2):
                return _telling_more(attempt, failure)
    return failure


def _cause(attempt: Attempt, failure: Failure) -> str:
    """Return the cause if an experiment shows it. What breaks there must not hide the verdict."""
    if not failure.run.engine.simulated or is_unfinished(failure.error):
        return ""  # what is missing is no mistake in what is there
    outside = failure.problem == "finding" and failure.finding.kind == "out-of-bounds"
    thorough = failure.problem in SOUGHT or outside
    try:
        if thorough or failure.problem in ("finding", "endless"):
            return mutation.cause(attempt, failure, thorough=thorough)
    except Exception as error:  # the course's fault, not the learner's: told, and an error in tests
        warnings.warn(f"the search for the cause broke off: {error!r}", stacklevel=2)
    return ""


def observed(attempt: Attempt, failure: Failure) -> str:
    """Return a sentence on what is seen of the failure, empty if nothing is certain."""
    for look in OBSERVATIONS[failure.problem]:
        sentence = look(attempt, failure)
        if sentence and (look not in BY_CHANCE or _seen_again(attempt, failure, look)):
            return sentence
    return ""


def _telling_more(attempt: Attempt, failure: Failure) -> Failure:
    """Return how the largest case fails, if that shows what the smallest doesn't."""
    engine = failure.run.engine
    if not isinstance(engine, Simulator) or failure.problem != "values":
        return failure
    for case in reversed(attempt.cases):
        if case.size <= failure.run.case.size:
            break
        other = attempt_case(attempt, case, engine)
        if other is not None and other.problem == "values":
            other.seen, other.cause = observed(attempt, other), failure.cause
            return other if other.seen else failure
    return failure


def _seen_again(attempt: Attempt, failure: Failure, look) -> bool:
    """Tell whether a large input, drawn afresh, shows the same: few elements may by chance."""
    if not isinstance(failure.run.engine, Simulator):
        return False
    for case in reversed(mutation.fresh(attempt, 3)):
        if look is counts_too_much and case.size[1] > MOST:
            continue  # each element is a launch
        other = attempt_case(attempt, case, failure.run.engine)
        if other is not None and other.problem == "values":
            return look(attempt, other) is not None
    return False


def never_written(attempt: Attempt, failure: Failure) -> str | None:
    """Elements that nobody wrote."""
    unwritten = _unwritten(attempt, failure)
    if unwritten is None:
        return None
    threads, size = failure.run.case.threads, unwritten.size
    count = f"{threads} thread{'s' * (threads > 1)}"
    where, several = _span(failure.array, unwritten)
    where += " were" if several else " was"
    if attempt.exercise.kind != "kernel":  # it launches what it likes
        return f"{where} never written"
    if threads < size and (unwritten.ravel() == (np.arange(size) >= threads)).all():
        return (
            f"{where} never written: the launch has {count} for {size} elements, "
            "so a thread must handle more than one"
        )
    expected = failure.run.expected[failure.array]
    if unwritten.sum() < size and np.array_equal(unwritten, expected == 0):
        return f"{where} never written: just what should be 0"
    return f"{where} never written, in a launch of {count}"


def reads_output(attempt: Attempt, failure: Failure) -> str | None:
    """The result changes with what the output held before the launch."""
    found = _with_other_poison(attempt, failure)
    if found is None:
        return None
    first, second = failure.run.got[failure.array], found[0].got[failure.array]
    changed = ~same_bits(first, second) & ~_holds_poison(first, second, failure.run.poison)
    if (changed & failure.wrong).any():
        if attempt.exercise.kind == "launcher":  # it may be any of the arrays that it makes
            return "the result depends on what a new array held: it is read before it is written"
        return f"the result depends on what {failure.array} held before: it is read, not only set"
    return None


def depends_on_order(attempt: Attempt, failure: Failure) -> str | None:
    """The same launch is right when the threads run in another order."""
    if failure.run.engine.order == "forward":
        return None
    if attempt_case(attempt, failure.run.case, Simulator("forward", attempt.seed)) is None:
        if failure.run.engine.order == "interleaved":
            return (
                "the result depends on what other threads do between two steps of one: what is "
                "read first and written after that may have changed in between"
            )
        return (
            "the result depends on the order in which threads run: two of them write the same "
            "element, or one reads what another writes"
        )
    return None


def nan_computed(attempt: Attempt, failure: Failure) -> str | None:
    """NaN was computed, and no input is NaN."""
    got = failure.run.got[failure.array]
    floats = [x for x in failure.run.case.inputs.values() if np.asarray(x).dtype.kind == "f"]
    if not np.isnan(got[failure.index]) or any(np.isnan(x).any() for x in floats):
        return None
    if all(np.isfinite(x).all() for x in floats):
        return f"NaN was computed from finite inputs{origin_of_nan(attempt, failure)}"
    return (
        "NaN was computed, and no input is NaN: one infinite number minus another, or divided by "
        "it, 0 times infinity, or 0 divided by 0"
    )


def other_places(attempt: Attempt, failure: Failure) -> str | None:
    """The values are right and sit at other indices."""
    name, run = failure.array, failure.run
    expected, got = run.expected[name], run.got[name]
    if failure.wrong.sum() < 3 or np.unique(expected).size < 2 or np.isnan(got.astype(float)).any():
        return None
    order_expected = np.argsort(expected, axis=None, kind="stable")
    order_got = np.argsort(got, axis=None, kind="stable")
    if not close(run, expected.flat[order_expected], got.flat[order_got]).all():
        return None
    rank = np.flatnonzero(order_got == np.ravel_multi_index(failure.index, got.shape))[0]
    home = np.unravel_index(order_expected[rank], expected.shape)
    return (
        f"the right values at the wrong places: {element(name, failure.index)} holds what belongs "
        f"at {element(name, home)}"
    )


def copies_input(attempt: Attempt, failure: Failure) -> str | None:
    """All wrong elements are those of an input."""
    got = failure.run.got[failure.array]
    for name, x in failure.run.case.inputs.items():
        if np.shape(x) == got.shape and np.unique(x[failure.wrong]).size > 1:
            if np.array_equal(got[failure.wrong], x[failure.wrong]):
                return f"every wrong element is that of {name}, unchanged"
    return None


def one_factor(attempt: Attempt, failure: Failure) -> str | None:
    """All wrong elements miss by the same factor, a wrong sign for example."""
    name, run = failure.array, failure.run
    expected, got = run.expected[name], run.got[name].astype(np.float64)
    # Where little is expected, rounding alone changes the factor.
    large = failure.wrong & (np.abs(expected) > 1e-3 * np.abs(expected).max(initial=0.0))
    if large.sum() < 2 or not np.isfinite(got).all():
        return None
    factor = float(np.median(got[large] / expected[large]))
    wrong = failure.wrong
    if abs(factor) < 1e-3 or not close(run, factor * expected[wrong], got[wrong]).all():
        return None
    if np.isclose(factor, -1, rtol=1e-5):
        return "every wrong element has the right size and the wrong sign"
    if not _is_count(factor, failure.run):
        return None
    return f"every wrong element is {_in_words(factor)} what it should be"


def _is_count(factor: float, run: Run) -> bool:
    """Tell whether a factor, or what it divides by, is a small whole number, or a size."""
    sizes = {n for x in run.case.inputs.values() for n in (*np.shape(x), np.size(x))}
    sizes |= {int(np.prod(run.case.block)), run.case.threads}
    return any(
        1.5 < abs(each) < np.inf
        and np.isclose(each, round(each), rtol=1e-5, atol=0)
        and (abs(round(each)) <= 4 or round(each) in sizes)
        for each in ((factor, 1 / factor) if factor else ())
    )


def _in_words(factor: float) -> str:
    """Return a factor that is whole, or divides by what is: "3 times", "1/32 of"."""
    return f"{round(factor)} times" if abs(factor) > 1 else f"1/{round(1 / factor)} of"


def at_zero(attempt: Attempt, failure: Failure) -> str | None:
    """The result is wrong exactly where an input is zero."""
    for name, x in failure.run.case.inputs.items():
        zero = np.asarray(x) == 0
        if zero.shape == failure.wrong.shape and 0 < zero.sum() < zero.size:
            if np.array_equal(zero, failure.wrong):
                return f"it is wrong exactly where {name} is 0"
    return None


def at_negative(attempt: Attempt, failure: Failure) -> str | None:
    """The result is wrong for one sign of an input only, and for all of that sign."""
    for name, x in failure.run.case.inputs.items():
        x = np.asarray(x)
        if x.shape != failure.wrong.shape:
            continue
        for words, side in (("negative", x < 0), ("positive", x > 0)):
            if 1 < side.sum() < side.size and np.array_equal(side, failure.wrong):
                return f"it is wrong exactly where {name} is {words}"
    return None


def left_out(attempt: Attempt, failure: Failure) -> str | None:
    """Inputs without a part in the result, where the result is linear."""
    for name in failure.run.case.inputs:
        shares = influence(attempt, failure, name)
        if shares is not None and (nothing := shares == 0).any():
            where, several = _span(name, nothing)
            verb = "have" if several else "has"
            return f"{where} {verb} no part in the result: another number there changes nothing"
    return None


def counts_too_much(attempt: Attempt, failure: Failure) -> str | None:
    """Inputs with too large a part in the result, where the result is a sum that counts them."""
    if attempt.exercise.kind == "function":
        return None
    for name, x in failure.run.case.inputs.items():
        shares = influence(attempt, failure, name)
        if shares is None:
            continue
        known = shares[np.isfinite(shares)]
        factor = np.median(known) if known.size else 1.0
        if known.size and np.allclose(known, factor, rtol=0.01) and _is_count(factor, failure.run):
            return f"each element of {name} counts {_in_words(factor)} what it should"
        twice = shares > 1.5
        if x.shape == failure.wrong.shape and x.dtype.kind == "f":
            continue  # where one makes one, a large share is a wrong formula, and no count
        whole = np.allclose(known, np.round(known), atol=0.01) and (known > -0.01).all()
        if twice.any() and whole:
            place = tuple(np.argwhere(twice)[0])
            return f"{element(name, place)} counts {shares[place]:.0f} times"
    return None


def wrote_outside(attempt: Attempt, failure: Failure) -> str | None:
    """A fence was hit: the index tells on which side."""
    array = failure.run.arrays[failure.array]
    (index,) = failure.index
    side = "before the start" if index < 0 else "past the end"
    return f"a thread wrote {side} of {failure.array}, which has {array.size} elements"


def in_vain(attempt: Attempt, failure: Failure) -> str:
    """Several threads wrote the same value to one element."""
    return (
        "the result is right, but several threads do the same work for this element, and one "
        "would do"
    )


#: For each problem, what may be seen of it, the surest first.
OBSERVATIONS = {
    "values": (
        # First, since adding 0 to what was there looks like not writing.
        reads_output,
        never_written,
        depends_on_order,
        nan_computed,
        other_places,
        copies_input,
        one_factor,
        at_zero,
        at_negative,
        left_out,
        counts_too_much,
    ),
    "outside": (wrote_outside,),
    # The text of these tells the cause itself.
    "finding": (),
    "compile": (),
    "forbidden": (),
    "input": (),
    "raised": (),
    "endless": (),
    "returned": (),
    "twice": (in_vain,),
}


#: What a few elements may show by chance: it must be seen on another input, too.
BY_CHANCE = (other_places, copies_input, one_factor, at_zero, at_negative, counts_too_much)


def _span(name: str, mask: np.ndarray) -> tuple[str, bool]:
    """Return which elements are true, "y[96] to y[99]" or "y[3]", and whether they are several."""
    where = np.argwhere(mask)
    first, last = element(name, where[0]), element(name, where[-1])
    if len(where) == 1:
        return first, False
    if len(where) == 2:
        return f"{first} and {last}", True
    flat = np.flatnonzero(mask)
    if flat[-1] - flat[0] + 1 == flat.size:
        return f"{first} to {last}", True
    return f"{len(where)} elements from {first} to {last}", True


def _with_other_poison(attempt: Attempt, failure: Failure) -> tuple[Run, Writers] | None:
    """Repeat the run with outputs that start with another number. None if it can't be."""
    run = failure.run
    if not isinstance(run.engine, Simulator) or run.exercise.start is not None:
        return None
    again = Run(run.exercise, run.case, run.engine, FAINT, expected=run.expected)
    outputs = [name for name in run.exercise.outputs if name in again.arrays]
    writers = Writers({name: again.arrays[name] for name in outputs}, {})
    with observing_with(writers):
        again.execute(attempt.obj)
    return again, writers


def _unwritten(attempt: Attempt, failure: Failure) -> np.ndarray | None:
    """Return where the output was certainly never written, None if it was everywhere."""
    found = _with_other_poison(attempt, failure)
    if found is None:
        return None
    other, writers = found
    got = failure.run.got[failure.array], other.got[failure.array]
    mask = _holds_poison(*got, failure.run.poison)
    for place in np.flatnonzero(mask):
        mask.flat[place] = not writers.wrote(failure.array, int(place))
    return mask if mask.any() else None


def _holds_poison(first: np.ndarray, second: np.ndarray, which: int) -> np.ndarray:
    """Return where the outputs of two runs still hold what each of them started with."""
    marks = [np.full_like(first, poison(first.dtype, kind)) for kind in (which, FAINT)]
    return same_bits(first, marks[0]) & same_bits(second, marks[1])
