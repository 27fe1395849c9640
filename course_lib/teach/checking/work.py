"""What a kernel does beside its result: who works, and what the exercise is about.

A result may be right and the exercise missed: one thread has done everything, or the histogram in
shared memory is none. So the largest case runs once more, with the learner's kernel and with the
lesson's, and what both did is counted and compared. The lesson's own kernel is the measure: no
number stands in an exercise.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from course_lib.simulator.observe.observer import ObservedSite, Observer, pointer
from course_lib.simulator.tracing.counts import SECTOR_BYTES
from course_lib.teach.checking.engines import Simulator
from course_lib.teach.checking.fences import FencedArray
from course_lib.teach.checking.running import Attempt, Failure, Run, close
from course_lib.teach.exercise import Case, Exercise
from course_lib.teach.explaining.places import where

#: How much more a kernel may read than the lesson's before it is told, and before it is refused.
MORE, TOO_MUCH = 1.25, 16.0

#: How many times as much as in the lesson's kernel one thread may do, if others do nearly nothing.
ALONE = 8.0

_TIMES = {1: "once", 2: "twice", 3: "three times", 4: "four times"}


@dataclass(frozen=True)
class Spares:
    """The exercise is about reading an array seldom: `readings` per element, or `pieces`.

    With `point`, a kernel that reads more than the lesson's is refused; else it is told so.
    """

    array: str
    point: bool = False
    pieces: bool = False

    def objection(self, mine: Work, lessons: Work) -> tuple[str, bool]:
        """Return what to say, "" if nothing, and whether it is a failure."""
        if self.pieces:
            one, other = mine.pieces[self.array], lessons.pieces[self.array]
            text = f"{self.array} is read in {one} pieces; the lesson's way reads it in {other}"
        else:
            one, other = mine.readings(self.array), lessons.readings(self.array)
            text = f"{self.array} is read {_times(one)}; the lesson's way reads it {_times(other)}"
        if one <= MORE * other:
            return "", False
        return text, self.point or one > TOO_MUCH * other


@dataclass(frozen=True)
class Coalesces:
    """The exercise is about neighbouring lanes that read neighbouring pieces of an array."""

    array: str

    def objection(self, mine: Work, lessons: Work) -> tuple[str, bool]:
        """Return what to say, "" if nothing, and whether it is a failure."""
        one, other = mine.sectors(self.array), lessons.sectors(self.array)
        if one <= MORE * other:
            return "", False
        return (
            f"its requests touch {one} sectors of {self.array}, and those of the lesson's way "
            f"{other}: neighbouring lanes should read neighbouring pieces"
        ), True


@dataclass(frozen=True)
class Bounds:
    """The exercise is about shared and local memory that does not grow with the number of `what`.

    `make(cases, number)` makes a case with so many of them, `few` or `many`, of the exercise's.
    """

    what: str
    few: int
    many: int
    make: Callable[[Sequence[Case], int], Case]

    def objection(self, mine: Work, lessons: Work) -> tuple[str, bool]:
        """Return what to say, "" if nothing, and whether it is a failure."""
        few, many = (mine.again(self.make, number).kept for number in (self.few, self.many))
        if many <= MORE * few:
            return "", False
        return (
            f"with {self.few} {self.what} it keeps {few} bytes in shared and local memory, with "
            f"{self.many} {many}: what it keeps should not grow with the number of {self.what}"
        ), True


@dataclass(frozen=True)
class Uses:
    """The exercise is about `what`: "shuffles", "shared memory", "the tensor core"."""

    what: str
    point: bool = True

    def objection(self, mine: Work, lessons: Work) -> tuple[str, bool]:
        """Return what to say, "" if nothing, and whether it is a failure."""
        if 2 * mine.uses[self.what] >= lessons.uses[self.what]:
            return "", False
        often = "without" if not mine.uses[self.what] else "with hardly any use of"
        return f"it is made {often} {self.what}, which this exercise is about", self.point


@dataclass(frozen=True)
class Avoids:
    """The exercise is about doing without `what`: "atomics"."""

    what: str

    def objection(self, mine: Work, lessons: Work) -> tuple[str, bool]:
        """Return what to say, "" if nothing, and whether it is a failure."""
        if mine.uses[self.what] <= lessons.uses[self.what]:
            return "", False
        return f"it is made with {self.what}, and this exercise is about doing without", True


class Launches:
    """The exercise is about launching kernels, and not about what NumPy can do."""

    def objection(self, mine: Work, lessons: Work) -> tuple[str, bool]:
        """Return what to say, "" if nothing, and whether it is a failure."""
        return ("", False) if mine.launched else ("no kernel was launched to make it", True)


@dataclass(frozen=True)
class Shares:
    """Every exercise is about sharing the work among threads.

    It is refused when not even one thread writes for each second warp that does in the lesson's, or
    when what is read and combined is read by few: then one thread has done what all should. When
    fewer than half as many threads work, it is told. With `evenly`, the exercise is the sharing
    itself: a quarter of the lesson's threads, or fewer, are refused.
    """

    evenly: bool = False

    def objection(self, mine: Work, lessons: Work) -> tuple[str, bool]:
        """Return what to say, "" if nothing, and whether it is a failure."""
        pairs = (mine.readers, lessons.readers), (mine.writers, lessons.writers)
        too_few = any(4 * len(found) <= len(usual) for found, usual in pairs)
        few, warps = len(mine.writers), len({_warp(each) for each in lessons.writers})
        if 2 * few < warps or few == 1 < warps:
            number = f"only {few} of {mine.threads} threads write" if few > 1 else (
                f"one of {mine.threads} threads writes everything"
            )
            return f"{number}: the threads should share the work", True
        if mine.most > ALONE * lessons.most and mine.uneven > ALONE * lessons.uneven:
            return (
                f"one thread reads or combines {mine.most} numbers, and in the lesson's way none "
                f"does more than {lessons.most}: the threads should share the work"
            ), True
        for verb, found, usual in (
            ("write", mine.writers, lessons.writers),
            ("read", mine.readers, lessons.readers),
        ):
            if 2 * len(found) < len(usual):
                return (
                    f"{len(found)} of {mine.threads} threads {verb}; the lesson's way, "
                    f"{len(usual)} do"
                ), self.evenly and too_few
        return "", False


def _warp(thread: tuple) -> tuple:
    block, number = thread
    return block, number // 32


def _times(count: float) -> str:
    rounded = round(count, 1)
    return _TIMES.get(rounded, f"{rounded:g} times")


class Work(Observer):
    """Counts what launches do.

    Attributes
    ----------
    launched: names of the kernels that were launched.
    threads: how many threads were, in all.
    readers, writers: the threads that read an input, that write an output, each as its block's
        index and its number in the block.
    pieces: how many loads there were of each array, by name; a vector is one.
    steps: how often each thread loads from memory, or combines by an atomic or a shuffle.
    uses: how often "shuffles", "shared memory", "atomics" and "the tensor core" were used.
    again: counts another case, which a function makes of the exercise's cases and a number.
    where: tells the line of a site, as `places.where`.
    """

    again: Callable[[Callable, int], Work]
    where: Callable[[ObservedSite], str]

    def __init__(self, arrays: dict[str, FencedArray], outputs: tuple[str, ...]):
        self.launched, self.threads = [], 0
        self.readers, self.writers, self.steps = set(), set(), Counter()
        self.pieces, self.uses, self._bytes = Counter(), Counter(), Counter()
        self._names = {pointer(a.view): name for name, a in arrays.items() if a.size}
        self._sizes = {name: a.view.nbytes for name, a in arrays.items()}
        self._outputs = outputs
        self._last = {}
        self._rounds, self._touched = Counter(), defaultdict(set)
        self._kept = {}

    def readings(self, name: str) -> float:
        """How often each element of an array was read, on average."""
        return self._bytes[name] / max(self._sizes.get(name, 0), 1)

    def sectors(self, name: str) -> int:
        """How many sectors the requests of the warps touch in an array, in all."""
        return sum(len(touched) for (of, *_), touched in self._touched.items() if of == name)

    @property
    def kept(self) -> int:
        """How many bytes of shared and local memory were written, in all blocks and threads."""
        return sum(self._kept.values())

    @property
    def most(self) -> int:
        """How many steps the thread makes that makes most."""
        return max(self.steps.values(), default=1)

    @property
    def uneven(self) -> float:
        """How many times as many steps that thread makes as there are for each."""
        return self.most * self.threads / max(self.steps.total(), 1)

    def on_launch(self, launch):
        """An observer's hook, as the others."""
        self.launched.append(launch.name)
        count = 1
        for n in (*launch.grid_dim, *launch.block_dim):
            count *= n
        self.threads += count

    def on_load(self, thread, site, memory, offset, size):
        """Count a load. A compiler merges what a thread reads twice without another in between."""
        me = thread.b.index, thread.tid
        self.steps[me] += 1
        if memory.space == "shared":
            self.uses["shared memory"] += 1
            return
        name = self._names.get(memory.base)
        if name is None or self._last.get((name, me)) == offset:
            return
        self._last[name, me] = offset
        self._bytes[name] += size
        self.pieces[name] += 1
        # The lanes of a warp make one request of what each of them loads there for the nth time.
        self._rounds[id(site), me] += 1
        request = name, _warp(me), id(site), self._rounds[id(site), me]
        first, last = offset // SECTOR_BYTES, (offset + size - 1) // SECTOR_BYTES
        self._touched[request].update(range(first, last + 1))
        if name not in self._outputs:
            self.readers.add(me)

    def on_store(self, thread, site, memory, offset, size):
        """Count a store."""
        if memory.space != "global":
            owner = thread.tid if memory.space == "local" else None
            self._kept[thread.b.index, owner, memory.name, offset] = size
            self.uses["shared memory"] += memory.space == "shared"
        elif self._names.get(memory.base) in self._outputs:
            self.writers.add((thread.b.index, thread.tid))

    def on_atomic(self, thread, site, memory, offset, size):
        """Count an atomic, which is a store as well."""
        self.steps[thread.b.index, thread.tid] += 1
        if memory.space != "shared":
            self.uses["atomics"] += 1
        self.on_store(thread, site, memory, offset, size)

    def on_warp_op(self, thread, site, kind, mask):
        """Count an operation of a warp."""
        self.steps[thread.b.index, thread.tid] += 1
        if kind.startswith("shfl"):
            self.uses["shuffles"] += 1
        elif "multiply" in kind:
            self.uses["the tensor core"] += 1

def count_work(attempt: Attempt) -> Failure | None:
    """Compare what the learner's object does with what the lesson's does, on the largest case.

    Fails where one thread does the work of all, or the point of the exercise is missed. What is
    only worth telling is noted in `attempt`.
    """
    exercise = attempt.exercise
    if exercise.kind == "function":
        return None
    if exercise.kind == "launcher" and (failure := _made_without_kernels(attempt)):
        return failure
    run, mine = _counted(attempt, attempt.obj, attempt.largest)
    mine.where = lambda site: where(attempt.obj, site.filename, site.line)
    _, lessons = _counted(attempt, exercise.solution, attempt.largest)
    mine.again = lambda make, number: (
        _counted(attempt, attempt.obj, make(attempt.cases, number))[1]
    )
    for each in (*exercise.about, Shares()):
        text, fails = each.objection(mine, lessons)
        if fails:
            return Failure("returned", run, text=f"the result is right, but {text}")
        if text:
            attempt.notes.append(f"right, but {text}")
    return None


def _counted(attempt: Attempt, obj, case: Case) -> tuple[Run, Work]:
    engine = Simulator("forward", attempt.seed)
    run = Run(attempt.exercise, case, engine)
    counts = next((c.counts for c in attempt.exercise.about if hasattr(c, "counts")), Work)
    work = engine.observer = counts(run.arrays, _outputs(attempt.exercise))
    run.execute(obj)
    return run, work


def _outputs(exercise: Exercise) -> tuple[str, ...]:
    return exercise.outputs if exercise.kind == "kernel" else ()


class Undone(Observer):
    """Undoes what each launch has written. `ready` is an output that was there before a launch."""

    def __init__(self, run: Run):
        self.run, self.ready, self.launches, self._before = run, "", 0, []

    def on_launch(self, launch):
        """Remember the arrays as they are; an observer's hook."""
        self.launches += 1
        arrays = [each for each in launch.args if isinstance(each, np.ndarray)]
        self._before = [(each, each.copy()) for each in arrays]
        for name, expected in self.run.expected.items():
            alike = (each for each in arrays if each.size == expected.size > 1)
            if any(close(self.run, expected, a.reshape(expected.shape)).all() for a in alike):
                self.ready = self.ready or name

    def on_launch_end(self, launch):
        """Undo it."""
        for array, before in self._before:
            array[...] = before


def _made_without_kernels(attempt: Attempt) -> Failure | None:
    """Return the failure of a launcher whose result comes from elsewhere: a launch for show."""
    engine = Simulator("forward", attempt.seed)
    # Other numbers than before: memory that is not initialised may hold an earlier run's result.
    drawn = attempt.exercise.cases(np.random.default_rng((attempt.seed, 1)))
    run = Run(attempt.exercise, dataclasses.replace(attempt, cases=drawn).largest, engine)
    undone = engine.observer = Undone(run)
    with contextlib.suppress(Exception):  # it may well want what its kernels make
        run.execute(attempt.obj)
    if undone.ready:
        text = f"{undone.ready} is there before any kernel has made it"
        return Failure("returned", run, text=f"the result is right, but {text}")
    for name, expected in run.expected.items() if undone.launches else ():
        got = run.got.get(name)
        if isinstance(got, np.ndarray) and got.shape == expected.shape and expected.size > 1:
            if close(run, expected, got).all():
                text = f"{name} is the same without what its kernels write: they have no part in it"
                return Failure("returned", run, text=f"the result is right, but {text}")
    return None
