"""`check`: run the learner's own object on every case, and tell what is wrong.

A check is a list of stages (`STAGES`), from the one that can do no harm to the one that could
kill the session: a wrong kernel is stopped in the simulator and never reaches the GPU. Each stage
returns the first `Failure` it meets, going from the smallest case to the largest. Why it failed
is worked out afterwards, by `course_lib.teach.explaining.causes`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import random
import time
from collections.abc import Callable

import numpy as np

from course_lib.simulator.engine.kernel import Kernel
from course_lib.simulator.engine.options import ORDERS
from course_lib.teach.checking.compiling import compile_for_gpu, prepare_compiler
from course_lib.teach.checking.deadline import TimeUp, deadline
from course_lib.teach.checking.engines import Gpu, Simulator
from course_lib.teach.checking.fences import same_bits
from course_lib.teach.checking.printing import printing_little
from course_lib.teach.checking.running import Attempt, Failure, Run, attempt_case
from course_lib.teach.checking.snapshot import Snapshot
from course_lib.teach.checking.work import count_work
from course_lib.teach.display import user_facing
from course_lib.teach.exercise import Case, Exercise, exercises, find, python_function
from course_lib.teach.explaining.causes import explain
from course_lib.teach.explaining.mutation import fresh
from course_lib.teach.explaining.report import CheckFailed, describe
from course_lib.teach.keeping import kept, record
from course_lib.teach.todo import contains_todo, unfinished

#: Seconds after which a kernel that is still running is stopped. Right ones take well under 1 on a
#: fast machine. On one where the lesson's own may take nearly as long, SLOWER times as many.
TIME_LIMIT, SLOWER = 2.0, 3


#: The objects that passed their last check in this session, by exercise; None where it failed.
_passed: dict[str, object] = {}


@user_facing
def check(name: str, obj: Callable, *, seed: int | None = None) -> None:
    """Check the learner's kernel or launcher `obj` against the exercise `name`.

    It runs in the simulator, under the sanitizer, on many inputs and in several thread orders;
    then it is compiled for a GPU; and where there is a GPU, it runs there as well. A pass prints
    one line and is recorded. An object that still holds `TODO` is reported as not solved yet,
    without an error (unless `COURSE_LIB_STRICT=1`).

    `seed` repeats the inputs of an earlier check; each check draws new ones otherwise.

    Raises
    ------
    CheckFailed: the object is wrong. The message tells the smallest input on which it fails.
    TypeError: `obj` isn't the kind of object that this exercise is about.
    UnknownExercise: there is no exercise called `name`.
    """
    exercise = find(name)
    _passed.pop(name, None)
    _passed[name] = None  # the last one in the dictionary
    if (helper := unfinished(obj)) is not None:
        message = f"{name}: not solved yet. Put your code in place of TODO; hint({name!r}) helps."
        if helper and helper in exercises():
            message = (
                f"{name}: not solved yet. It calls {helper}, which still holds TODO: solve that "
                f"first, or write {helper} = use({helper!r}), which takes the course's."
            )
        elif helper:
            message = f"{name}: not solved yet. It calls {helper}, which still holds TODO."
        if os.environ.get("COURSE_LIB_STRICT") == "1":
            raise CheckFailed(message)
        print(message)
        return
    if exercise.kind == "answer":
        _check_answer(exercise, obj)
        return
    _require_kind(exercise, obj)
    prepare_compiler()
    attempt = _attempt(exercise, obj, _new_seed() if seed is None else seed)
    try:
        with printing_little():
            failure = _first_failure(attempt)
    finally:  # one that is interrupted counts as well
        record.update(name, _count_attempt)
    if failure is not None:
        kept.drop(exercise, obj)
        failure = explain(_without_the_largest(attempt, failure), failure)
        # The learner's own line is in the message; the frames of the check are of no use.
        raise CheckFailed(describe(attempt, failure)) from None
    _passed[name] = obj
    attempt.notes += kept.keep(exercise, obj)
    print(f"✓ {name} — {_account(attempt)}")
    for note in attempt.notes:
        print(f"  note      {note}")


@user_facing
def use(name: str, obj: Callable | None = None) -> Callable:
    """Return the learner's own kernel or function if it has passed its check, else the course's.

    With `obj`: that one, if it is what passed. Without: the one that passed last, in whichever
    lesson and session that was. Prints one line saying which, so that the cells below work either
    way. Solved notebooks (`COURSE_LIB_STRICT=1`) take nothing that was kept.

    Raises UnknownExercise when there is no exercise called `name`.
    """
    exercise = find(name)
    passed = _passed.get(name)
    if passed is not None and (obj is None or obj is passed):
        print(f"Using your {name}.")
        return passed
    found, words = kept.take(exercise, obj, name in _passed, _whats_wrong)
    print(words)
    return exercise.solution if found is None else found


def lesson_of_session() -> str | None:
    """Return the lesson of the last check in this session, "01"; None before the first."""
    return find(next(reversed(_passed))).lesson if _passed else None


def _attempt(exercise: Exercise, obj: Callable, seed: int) -> Attempt:
    cases = sorted(exercise.cases(np.random.default_rng(seed)), key=lambda case: case.size)
    return Attempt(exercise, obj, cases, seed)


def _without_the_largest(attempt: Attempt, failure: Failure) -> Attempt:
    """Return the attempt without its largest case, which takes long, unless that is what failed."""
    kept = [
        case for case in attempt.cases if case is not attempt.largest or case is failure.run.case
    ]
    return dataclasses.replace(attempt, cases=kept)


def _first_failure(attempt: Attempt) -> Failure | None:
    for stage in STAGES:
        failure = stage(attempt)
        if failure is not None:
            return failure
    return None


def _whats_wrong(exercise: Exercise, obj: Callable) -> str:
    """Check `obj` without a word; return "" if it passes, else what is wrong, in one line."""
    try:
        if contains_todo(obj):
            return "it still holds TODO"
        _require_kind(exercise, obj)
        attempt = _attempt(exercise, obj, _new_seed())
        failure = _first_failure(attempt)
    except TypeError as error:
        return str(error)
    return "" if failure is None else describe(attempt, failure).splitlines()[0]


def _account(attempt: Attempt) -> str:
    """Return what a check that passed has done."""
    n_cases = len(attempt.cases)
    if attempt.exercise.kind == "function":
        return f"{n_cases} cases"
    compiled = ", compiled for a GPU" if attempt.compiled else ""
    gpu = ", then on the GPU" if Gpu.available() else ""
    n_runs = sum(len(_orders(attempt, case)) for case in attempt.cases)
    return f"{n_runs} cases: {n_cases} inputs, {len(ORDERS)} thread orders{compiled}{gpu}"


def run_in_simulator(attempt: Attempt) -> Failure | None:
    """Run every case in every thread order in the simulator."""
    failure = _in_simulator(attempt, TIME_LIMIT)
    if failure is not None and isinstance(failure.error, TimeUp):
        # Once more: the machine may be slow, or have stood still.
        failure = _in_simulator(attempt, TIME_LIMIT * (SLOWER if _is_slow_here(attempt) else 1))
    return failure


def _is_slow_here(attempt: Attempt) -> bool:
    """Tell whether this machine is so slow that the lesson's own code takes long as well."""
    begin, exercise = time.process_time(), attempt.exercise
    lessons = dataclasses.replace(attempt, obj=exercise.solution)
    with contextlib.suppress(TimeUp), deadline(TIME_LIMIT):
        for case in attempt.cases:
            attempt_case(lessons, case, Simulator("forward", attempt.seed, sanitized=True))
    n_orders = len(_orders(attempt, attempt.cases[0]))
    return 5 * n_orders * (time.process_time() - begin) > TIME_LIMIT


def _in_simulator(attempt: Attempt, seconds: float) -> Failure | None:
    try:
        with deadline(seconds):
            earlier = None
            for case in (*attempt.cases, *_one_after_the_other(attempt)):
                first = {}
                for order in _orders(attempt, case):
                    engine = Simulator(order, attempt.seed, sanitized=True)
                    failure = attempt_case(attempt, case, engine)
                    if failure is not None:
                        return _timed(failure, seconds)
                    first = first or engine.got
                    text = _other_bits(attempt, first, engine) or _changed_since(earlier)
                    if text:
                        return Failure("returned", Run(attempt.exercise, case, engine), text=text)
                earlier = engine.results
    except TimeUp as error:  # between two runs
        run = Run(attempt.exercise, case, engine)
        return _timed(Failure("endless", run, error=error), seconds)
    return None


def _timed(failure: Failure, seconds: float) -> Failure:
    """Return the failure; one of time says after how long."""
    if failure.problem == "endless":
        failure.text = f"in {seconds:.2g} seconds"
    return failure


def _orders(attempt: Attempt, case: Case) -> tuple[str, ...]:
    """Return the thread orders that a case runs in. A result that depends on them is a race."""
    if attempt.exercise.kind == "function":  # it has no threads
        return ORDERS[:1]
    # A turn of all threads before each store takes long, and shows in small cases as well.
    return tuple(each for each in ORDERS if each != "interleaved" or case is not attempt.largest)


def _one_after_the_other(attempt: Attempt) -> list[Case]:
    """Return two cases that differ in their numbers alone, for a function that may keep some."""
    if attempt.exercise.kind == "kernel":
        return []
    others = fresh(attempt, 4)
    for other in reversed(others):  # the size of the last may be drawn
        alike = [case for case in attempt.cases if case.shapes == other.shapes]
        if alike:
            return [alike[-1], other]
    return others[-1:]


def _changed_since(earlier: Snapshot | None) -> str:
    """Return what to say where a call has changed what the one before it returned."""
    changed = earlier.changed() if earlier is not None else ""
    return changed and (
        f"a call with other inputs has changed what the call before it had returned, {changed}: "
        "each call needs its own"
    )


def _other_bits(attempt: Attempt, first: dict[str, np.ndarray], engine: Simulator) -> str:
    """Return what to say where the order of threads has changed a bit, and must not."""
    for name, value in first.items() if attempt.exercise.repeatable else ():
        if not same_bits(value, engine.got[name]).all():
            return (
                f"{name} is right, but its last bits depend on the order in which threads run: "
                "terms are added in an order that nobody has fixed, as by atomics"
            )
    return ""


def run_on_gpu(attempt: Attempt) -> Failure | None:
    """Run every case once on the GPU, if there is one."""
    if attempt.exercise.kind == "function" or not Gpu.available():
        return None
    for case in attempt.cases:
        failure = attempt_case(attempt, case, Gpu())
        if failure is not None:
            return failure
    return None


def _check_answer(exercise: Exercise, obj: object) -> None:
    """Compare what the learner found out, or a function that returns it, with the solution."""
    record.update(exercise.name, _count_attempt)
    try:
        given = obj() if callable(obj) else obj
    except SystemExit:
        raise CheckFailed(f"{exercise.name}: this ends Python itself: return the answer") from None
    given = given if isinstance(given, tuple | list) else (given,)
    wanted = exercise.solution()
    parts = ", ".join(exercise.outputs)
    if len(given) != len(wanted):
        raise CheckFailed(f"{exercise.name}: the answer has {len(wanted)} parts: {parts}")
    right = list(map(_same_answer, wanted, given))
    if not all(right):
        shown = ", ".join(map(str, given))
        if any(isinstance(part, str) for part in wanted):
            # Which part is wrong is not said: it would turn finding into guessing.
            raise CheckFailed(f"{exercise.name}: {shown} is not the answer ({parts})")
        wrong = [name for name, ok in zip(exercise.outputs, right, strict=True) if not ok]
        raise CheckFailed(f"{exercise.name}: {shown}: wrong is {', '.join(wrong)}")
    _passed[exercise.name] = obj
    record.update(exercise.name, lambda entry: entry.setdefault("solved", record.today()))
    print(f"✓ {exercise.name} — found")


def _same_answer(wanted: str | float, given: object) -> bool:
    if isinstance(wanted, str):
        return isinstance(given, str) and given.strip().lower() == wanted
    try:
        return abs(float(given) - wanted) < 0.5
    except (TypeError, ValueError):
        return False


def _new_seed() -> int:
    """Return a seed nobody can foresee; that of `COURSE_LIB_SEED` when set, as builds do."""
    fixed = os.environ.get("COURSE_LIB_SEED")
    return int(fixed) if fixed else random.SystemRandom().randrange(2**32)


def _count_attempt(entry: dict) -> None:
    entry["attempts"] = entry.get("attempts", 0) + 1
    entry["tried"] = record.today()


def _require_kind(exercise: Exercise, obj: object) -> None:
    """Raise TypeError, saying what to pass, if `obj` can't be a solution of this exercise."""
    name = exercise.name
    passed = f"check({name!r}, ...) takes the {exercise.kind} itself, {name}"
    if obj is None:
        raise TypeError(f"{passed}; it got None, which is what {name}(...) or a launch returns")
    if hasattr(obj, "dispatcher") or (callable(obj) and hasattr(obj, "griddim")):
        raise TypeError(f"{passed}; it got {name}[grid, block]: leave the brackets away")
    function = python_function(obj)
    if not inspect.isfunction(function):
        raise TypeError(f"{passed}; it got a value of type {type(obj).__name__}")
    if exercise.kind == "kernel" and function is obj:
        raise TypeError(f"{passed}; it got a plain function: is @cuda.jit missing above it?")
    if exercise.kind == "kernel" and type(obj) not in (type(exercise.solution), Kernel):
        raise TypeError(f"{passed}; it got a {type(obj).__name__} of its own making")
    if exercise.kind == "launcher" and function is not obj:
        raise TypeError(f"{passed}; it got a kernel: pass the function that launches it")
    if exercise.kind == "function" and function is not obj:
        raise TypeError(f"{passed}; it got a kernel, and this is a function for the CPU")
    theirs = list(inspect.signature(function).parameters.values())
    needed = [p for p in theirs if p.default is p.empty]
    wanted = exercise.parameters
    if not len(needed) <= len(wanted) <= len(theirs):
        have = ", ".join(p.name for p in theirs)
        raise TypeError(f"{name} takes ({', '.join(wanted)}), and yours takes ({have})")


#: What a check does, in order. What only reads the code goes before what runs it on the GPU.
STAGES = (run_in_simulator, count_work, compile_for_gpu, run_on_gpu)
