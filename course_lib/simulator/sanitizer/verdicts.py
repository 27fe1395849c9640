"""The sanitizer's sentences about memory: races, reads of nothing, indices outside, aliasing."""

import re

import numpy as np

from course_lib.simulator.engine.report import is_outside
from course_lib.simulator.sanitizer.findings import (
    BETWEEN,
    Finding,
    element_text,
    index_of,
    name_of,
)
from course_lib.simulator.sanitizer.ordering import covers
from course_lib.simulator.sanitizer.races import RaceSentences, made_to_meet
from course_lib.simulator.sanitizer.shadow import (
    BLOCK_AT,
    THREAD_AT,
    THREAD_MASK,
    UNINITIALISED,
    site_of,
)

#: `s`, `x.field`, `rows[i]`: what may stand before an index in a sentence.
_NAMES_AN_ARRAY = re.compile(r"[^\W\d][\w.]*(\[[^()]*\][\w.]*)?$")


class Verdicts(RaceSentences):
    """The part of `checking.Checking` that puts findings about memory into words."""

    def report(self, key, kind, site, threads, block, message, lines=()):
        """Note a finding, once for each `key`; later ones are counted.

        `message` may be a function that makes the sentence, so that repetitions cost little.
        """
        name = self.launch.name
        key = ("race" if kind == BETWEEN else kind, name, site.filename, *key)
        known = [report.again(key, kind) for report in self.reports]
        if all(known):
            return
        text = message() if callable(message) else message
        block_name = tuple(block) if isinstance(block, Pair) else name_of(
            block, self.launch.grid_dim)
        for report, seen in zip(self.reports, known, strict=True):
            if not seen:
                report.add(key, Finding(kind, site.line, site.filename, site.source,
                                        tuple(threads), block_name, text,
                                        tuple(lines) or (site.line,), name))

    def thread_name(self, index):
        """A thread as a sentence names it."""
        return name_of(index, self.launch.block_dim)

    def element(self, number, memory, index):
        """`s[0]` as the source calls it."""
        site = self.sites[number]
        if index.__class__ is tuple and not index:
            return site.text  # the field of a record
        name = site.array if _NAMES_AN_ARRAY.match(site.array) else memory.name
        return element_text(name, index)

    # -- races -----------------------------------------------------------------------------------

    def race(self, thread, number, memory, stamp, place, index, what):
        """Two accesses that nothing orders; `what` tells read or write, the earlier one first."""
        self.acting = thread
        then, now = self.sites[site_of(stamp)], self.sites[number]
        if made_to_meet(then, now):
            return
        same_block = stamp >> BLOCK_AT == thread.slot
        kind = "race" if same_block else BETWEEN
        site = max(then, now, key=lambda s: (s.filename == self.filename, s.line))
        key = tuple(sorted(((then.line, then.col), (now.line, now.col))))
        unread = self.unread.get((memory, place))
        if unread is not None:
            for reader in (then.number, now.number):
                unread.pop(reader, None)  # it was written, only too late
        threads = self.thread_name(self.thread_at(stamp)), self.thread_name(thread.index)
        other_block = self.blocks_seen[stamp >> BLOCK_AT]
        blocks = tuple(name_of(b, self.launch.grid_dim)
                       for b in (other_block, thread.b.index))
        sides = [(what[0], then, threads[0], blocks[0]), (what[1], now, threads[1], blocks[1])]
        if what == ("read", "write"):
            sides.reverse()  # the write is named first

        polled = None  # where a flag told of it, and no fence followed
        if not same_block and thread.unfenced and covers(thread.unfenced, stamp):
            polled = self.sites[thread.asked_at]

        def sentence():
            element = f"{memory.space} `{self.element(number, memory, index)}`"
            if same_block:
                return self.race_in_block(sides, element, stamp)
            if memory.space == "shared":
                element += f" of block {name_of(memory.owner.index, self.launch.grid_dim)}"
            return self.race_between(sides, element, self.in_one_cluster(
                other_block, thread.b.index), polled)

        self.report(key, kind, site, (sides[0][2], sides[1][2]),
                    (Pair((sides[0][3], sides[1][3])) if not same_block else thread.b.index),
                    sentence, tuple(each.line for each in (sides[0][1], sides[1][1], polled)
                                    if each))

    def thread_at(self, stamp):
        """The index of the thread of a stamp."""
        return index_of(stamp >> THREAD_AT & THREAD_MASK, self.launch.block_dim)

    @property
    def filename(self):
        """The file of the kernel itself."""
        return self.launch.program.root.__code__.co_filename

    def in_one_cluster(self, one, two):
        """True if two blocks, by their indices, belong to one cluster of several."""
        size = self.launch.cluster
        return size > 1 and one[1:] == two[1:] and one[0] // size == two[0] // size

    # -- the rest --------------------------------------------------------------------------------

    def uninitialised(self, thread, number, memory, place, index):
        """A read of what nobody has written: told at the end, unless it turns out to be a race."""
        self.unread.setdefault((memory, place), {}).setdefault(
            number, (thread, index, memory.shadow.granule))

    def tell_unread(self, spaces):
        """Report the reads of what nobody had written, in memories of these spaces."""
        for memory, place in [key for key in self.unread if key[0].space in spaces]:
            reads, shadow = self.unread.pop((memory, place)), memory.shadow
            for number, (thread, index, granule) in reads.items():
                # With a finer granule since, `place` is another element.
                never = shadow.granule == granule and shadow.written[place] == UNINITIALISED
                self.was_uninitialised(thread, number, memory, index, never)

    def was_uninitialised(self, thread, number, memory, index, never):
        """Report one read of what nobody had written; `never` if nobody has written it since."""
        site, name = self.sites[number], self.thread_name(thread.index)

        def sentence():
            whole_record = site.kind == "store"  # copied elsewhere by this line
            element = memory.name if whole_record else self.element(number, memory, index)
            start = f"thread {name} reads {memory.space} `{element}` on line {site.line}"
            if memory.space == "shared" and never:
                return (f"{start}, and no thread ever writes it; look at the index there, and at "
                        f"which elements the block writes")
            if memory.space == "global":
                return (f"{start}, which nobody has written since cuda.device_array made it; "
                        f"write it first, or copy zeros there by cuda.to_device")
            start += " before "
            if memory.space == "shared":
                barrier = "cuda.syncthreads()" if memory.owner is thread.b else "cluster_sync()"
                return f"{start}any thread has written it; fill it first, and put {barrier} between"
            return f"{start}writing it; give it a value first"

        self.report((number,), "uninitialised-read", site, (name,), thread.b.index, sentence)

    def outside(self, thread, number, array, index):
        """An index below 0 or past the end. Raises the present error if it is something else."""
        if not is_outside(index, array.shape):
            raise  # noqa: PLE0704 - too many indices, or one that is no integer
        site, name = self.sites[number], self.thread_name(thread.index)

        def sentence():
            parts = index if isinstance(index, tuple) else (index,)
            text = site.array or getattr(getattr(array, "memory", None), "name", "the array")
            axis, part, size = next(
                ((k, p, n) for k, (p, n) in enumerate(zip(parts, array.shape, strict=False))
                 if isinstance(p, (int, np.integer)) and not 0 <= p < n), (0, parts[0], 0))
            verb = {"store": "writes", "load": "reads", "atomic": "updates"}.get(
                site.kind, "uses")
            place = element_text(text, index)
            length = f"axis {axis} of `{text}` has" if len(array.shape) > 1 else f"`{text}` has"
            count = f"{text}.shape[{axis}]" if len(array.shape) > 1 else f"{text}.size"
            mend = "look at how this index is computed"
            if self.lacks_guard(site, thread, parts, text, array.shape):
                mend = f"guard it: only where the index is below {count} (here {size})"
            return (f"thread {name} of block {name_of(thread.b.index, self.launch.grid_dim)} "
                    f"{verb} `{place}` on line {site.line}, but {length} {size} "
                    f"element{'s' if size != 1 else ''}; {mend}")

        self.report((number,), "out-of-bounds", site, (name,), thread.b.index, sentence)

    def lacks_guard(self, site, thread, parts, text, shape):
        """True if an argument's indices are the thread's numbers, one for each, and reach its end.

        Then there are more threads than elements, and a guard is missing. Any other index may be a
        wrong formula, which a guard would only hide; so may a single one inside of an `if`, or one
        that another argument has room for, `scale[i]` beside a longer `x[i]`; and what a choice
        guards, `x[i] if i < n else 0`, has its guard.
        """
        if " if " in site.source and " else " in site.source:
            return False
        if len(parts) == 1:
            shapes = [getattr(value, "shape", ()) for value in self.launch.args]
            if self.branch_around(site, 0) is not None or any(
                    parts[0] < n for each in shapes for n in each):
                return False
        code = self.launch.program.root.__code__
        if text not in code.co_varnames[:code.co_argcount]:
            return False
        own = [(b * n + t, blocks * n) for b, n, t, blocks in zip(
            thread.b.index, self.launch.block_dim, thread.index, self.launch.grid_dim,
            strict=True) if blocks * n > 1]
        return len(own) == len(parts) == len(shape) and any(
            all(p == number and threads >= n
                for p, (number, threads), n in zip(parts, order, shape, strict=True))
            for order in (own, own[::-1]))

    def check_aliasing(self, thread, number, array, place, index):
        """Dynamic memory read through another declaration than it was written through."""
        other = array.memory.shadow.through.get(place, array.declared)
        if other == array.declared:
            return
        mine, its = self.sites[array.declared], self.sites[other]
        if mine.function != its.function and mine.text == its.text:
            return  # a device function that finds the kernel's array again
        name = self.thread_name(thread.index)
        text = self.element(number, array.memory, index)

        def sentence():
            return (f"thread {name} reads `{text}`, whose bytes were last written through "
                    f"`{its.array}`: both dynamic shared arrays start at the same byte (lines "
                    f"{its.line} and {mine.line}); cut one allocation into slices that do not "
                    f"overlap")

        self.report((mine.number, its.number), "shared-aliasing", max(
            mine, its, key=lambda s: s.line), (name,), thread.b.index, sentence,
            (its.line, mine.line))


class Pair(tuple):
    """Two blocks, named already."""
