"""Collisions: an access compared with those before it, where one comparison did not settle it."""

from course_lib.simulator.rewrite.resolve import cast
from course_lib.simulator.sanitizer.shadow import (
    EPOCH_AT,
    INITIAL,
    NEVER,
    SCATTERED,
    SEVERAL,
    THREAD_AT,
    THREAD_BITS,
    THREAD_MASK,
    UNINITIALISED,
    site_of,
    thread_key,
)


class Collisions:
    """The part of `checking.Checking` that looks at one granule's past, and adds to it."""

    def note_read(self, thread, number, memory, place, index):
        """A read: against the last write, then remembered."""
        shadow = memory.shadow
        last = shadow.written[place]
        if last == UNINITIALISED:
            self.uninitialised(thread, number, memory, place, index)
        elif last != INITIAL:
            self.against_writes(thread, number, memory, shadow, place, last, index, "read")
        if memory.space != "local":
            self.remember_read(thread, number, shadow, place)

    def remember_read(self, thread, number, shadow, place):
        """A read that is in order with all writes: kept beside the reads since the last of them."""
        stamp, seen = thread.stamp + number, shadow.read[place]
        if seen == SCATTERED and self.precise:  # several readers already, as most often
            shadow.readers[place][thread.key] = stamp
            return
        if not seen or thread.low <= seen < thread.floor or (
                not (seen ^ stamp) >> THREAD_AT):
            shadow.read[place] = stamp
            return
        readers = shadow.readers.get(place)
        if seen < SCATTERED and (seen >> THREAD_AT & THREAD_MASK) != THREAD_MASK:
            if self.in_order(thread, seen):
                shadow.read[place] = stamp
                return
            readers = shadow.readers[place] = {thread_key(seen): seen}
        if self.precise or is_telling(readers, thread.slot):
            readers[thread.key] = stamp
        same = seen >> EPOCH_AT == stamp >> EPOCH_AT
        shadow.read[place] = thread.floor | SEVERAL if same and not self.precise else SCATTERED

    def against_writes(self, thread, number, memory, shadow, place, last, index, now):
        """Compare an access, a `now`, with the last write, or with the atomics since."""
        if last < SCATTERED and (last >> THREAD_AT & THREAD_MASK) != THREAD_MASK:
            if not self.in_order(thread, last):
                self.race(thread, number, memory, last, place, index, ("write", now))
        elif not (now == "write" and self.in_order(thread, shadow.newest.get(place, NEVER))):
            for stamp in shadow.writers[place].values():
                if not self.in_order(thread, stamp):
                    self.race(thread, number, memory, stamp, place, index, ("write", now))
                    break

    def against_reads(self, thread, number, memory, shadow, place, index, forget=True):
        """Compare a write with the reads since the last plain one.

        They may be forgotten after a plain write, because the next write must come after it. The
        next atomic need not.
        """
        seen = shadow.read[place]
        if not seen:
            return
        if seen < SCATTERED and (seen >> THREAD_AT & THREAD_MASK) != THREAD_MASK:
            if not self.in_order(thread, seen):
                self.race(thread, number, memory, seen, place, index, ("read", "write"))
        else:
            for stamp in shadow.readers[place].values():
                if not self.in_order(thread, stamp):
                    self.race(thread, number, memory, stamp, place, index, ("read", "write"))
                    break
        if forget:
            shadow.read[place] = 0

    def note_write(self, thread, number, array, place, index, value):
        """A plain write: against the last write and the reads since."""
        memory = array.memory
        shadow = memory.shadow
        last = shadow.written[place]
        if memory.space != "local":
            if last > 0 and not self.writes_the_same(array, index, value):
                self.against_writes(thread, number, memory, shadow, place, last, index, "write")
            self.against_reads(thread, number, memory, shadow, place, index)
        shadow.written[place] = thread.stamp + number
        if memory.dynamic:
            shadow.through[place] = array.declared

    @staticmethod
    def writes_the_same(array, index, value):
        """True if the element holds `value` already, so that it does not matter who writes it."""
        try:
            return bool(array[index] == cast(array.dtype.type)(value))
        except (TypeError, ValueError):
            return False

    def note_atomic(self, thread, number, memory, shadow, place, index):
        """An atomic: it races with plain accesses only."""
        last, stamp = shadow.written[place], thread.stamp + number
        if last == UNINITIALISED:
            self.uninitialised(thread, number, memory, place, index)
        if memory.space == "local":
            shadow.written[place] = stamp
            return
        writers = shadow.writers.get(place)
        if writers is None or not self.is_atomic(last):
            if last > 0:
                self.against_writes(thread, number, memory, shadow, place, last, index, "write")
                shadow.plain[place] = last
            writers = shadow.writers[place] = {thread_key(last): last} if last > 0 else {}
        elif thread.low <= last < thread.floor and not self.precise:
            writers.clear()  # a barrier since: they are in order with whatever comes
        plain = shadow.plain.get(place)
        if plain is not None and plain != last and not self.in_order(thread, plain):
            self.race(thread, number, memory, plain, place, index, ("write", "write"))
        self.against_reads(thread, number, memory, shadow, place, index, forget=False)
        key = thread_key(stamp)
        shadow.newest[place] = stamp if self.sites[number].relaxed else NEVER
        if self.precise or key in writers or is_telling(writers, thread.slot):
            writers[key] = stamp
        if len(writers) == 1 and key in writers:
            shadow.written[place] = stamp
        elif last >> EPOCH_AT == stamp >> EPOCH_AT and not self.precise:
            shadow.written[place] = thread.floor | SEVERAL
        else:
            shadow.written[place] = SCATTERED

    def is_atomic(self, stamp):
        """True if a last write was an atomic, or several."""
        return (stamp >= SCATTERED or stamp >> THREAD_AT & THREAD_MASK == THREAD_MASK
                or stamp > 0 and self.sites[site_of(stamp)].kind == "atomic")


def is_telling(accesses, slot):
    """True if one more access, by a thread of block `slot`, could reveal another race.

    Where only block barriers order accesses, a later access races with some thread if it races
    with one of two in a block, or with one in another block.
    """
    return len(accesses) < 2 or len(accesses) == 2 and all(
        key >> THREAD_BITS != slot for key in accesses) and len(
        {key >> THREAD_BITS for key in accesses}) == 1
