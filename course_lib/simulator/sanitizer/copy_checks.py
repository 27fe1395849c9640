"""The sanitizer's view of asynchronous copies, which read and write at any time until the wait."""

from course_lib.simulator.observe.execution import elements
from course_lib.simulator.observe.observer import Watched
from course_lib.simulator.sanitizer.shadow import (
    EPOCH_AT,
    SCATTERED,
    THREAD_AT,
    THREAD_MASK,
    UNINITIALISED,
    same_thread,
    site_of,
)


class CopyChecks:
    """The part of `checking.Checking` that looks at copies under way.

    Where a copy begins it counts as a write, and where it ends once more. What is written or read
    there in between, in whatever order, is found at the end.
    """

    def begin_copy(self, thread, number, target, i, values, source, j, n):
        super().begin_copy(thread, number, target, i, values, source, j, n)
        if target.__class__ is not Watched:
            return
        into, memory = list(self.granules(target, i, len(values))), target.memory
        shadow = memory.shadow
        for place, index in into:
            last = shadow.written[place]
            if last > 0 and not self.writes_the_same(target, index, values[index - i]):
                self.against_writes(thread, number, memory, shadow, place, last, index, "write")
            self.against_reads(thread, number, memory, shadow, place, index)
        thread.postponed[-1].began = (number, thread.stamp, self.last_writes(target, into), (
            self.last_writes(source, self.granules(source, j, n))
            if source.__class__ is Watched else ({}, 0)))

    def finish_copy(self, thread, number, copy):
        self.check_copy(thread, copy)
        if copy.source.__class__ is Watched:  # which may have been read only now
            for place, index in self.granules(copy.source, copy.j, copy.n):
                self.note_read(thread, number, copy.source.memory, place, index)
        super().finish_copy(thread, number, copy)

    def exited(self, thread):
        super().exited(thread)
        for copy in thread.postponed:
            if copy is not None:
                self.check_copy(thread, copy)

    def granules(self, array, first, count):
        """(granule, index) of `count` elements from `first` on, of those inside the array."""
        granule = self.shadow_of(array).granule
        for index in range(int(first), int(first) + count):
            try:
                offsets, size = elements(array, index)
            except IndexError:
                continue
            for offset in offsets:
                for place in range(offset // granule, (offset + size) // granule):
                    yield place, index

    @staticmethod
    def last_writes(array, places):
        """{(granule, index): its last write}, and how large granules are."""
        found = {each: array.memory.shadow.written[each[0]] for each in places}
        return found, array.memory.shadow.granule if found else 0

    def check_copy(self, thread, copy):
        """What has been done to the target and the source of a copy since it began."""
        if copy.began is None:
            return
        number, stamp, *sides = copy.began
        for array, (places, granule) in zip((copy.target, copy.source), sides, strict=True):
            if not places or array.memory.shadow.granule != granule:
                continue
            memory, shadow = array.memory, array.memory.shadow
            for (place, index), before in places.items():
                last, seen = shadow.written[place], shadow.read[place]
                into = array is copy.target
                if last != before and not (into and self.writes_the_same(
                        array, index, copy.values[index - copy.i])):
                    last = one_of(last, shadow.writers.get(place))
                    # Else it is, or has been, a race without the copy too.
                    if self.in_order(thread, last) if into else follows(last, stamp):
                        self.under_way(thread, number, memory, index, "write", into, last)
                if into and seen and before != UNINITIALISED:
                    seen = one_of(seen, shadow.readers.get(place))
                    if self.in_order(thread, seen):
                        shadow.read[place] = 0
                        if follows(seen, stamp):
                            self.under_way(thread, number, memory, index, "read", True, seen)
                        else:
                            self.race(thread, number, memory, seen, place, index,
                                      ("read", "write"))

    def under_way(self, thread, number, memory, index, verb, into, stamp):
        """Report an access to the target (`into`) or the source of a copy that has begun."""
        site, copy = self.sites[site_of(stamp)], self.sites[number]
        name = self.thread_name(self.thread_at(stamp))

        def sentence():
            other = "may still read it" if not into else "may land before or after"
            return (f"thread {name} {verb}s {memory.space} "
                    f"`{self.element(site.number, memory, index)}` on line {site.line} while "
                    f"the copy that line {copy.line} has begun {other}; wait for the copy first")

        self.report((number, site.number, verb), "race", site, (name,), thread.b.index, sentence,
                    (site.line, copy.line))


def follows(stamp, began):
    """True if an access came after a copy began: by its own thread, or after a barrier."""
    return same_thread(stamp, began) or stamp >> EPOCH_AT > began >> EPOCH_AT


def one_of(stamp, several):
    """A stamp, or one of those that the mark of several stands for."""
    if stamp < SCATTERED and (stamp >> THREAD_AT & THREAD_MASK) != THREAD_MASK:
        return stamp
    return next(iter(several.values()))
