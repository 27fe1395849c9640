"""The sanitizer's Execution: carries out every access, and looks at what it collides with.

`load1` and its kin settle the common cases in a few comparisons of stamps (see `shadow`); whatever
they cannot settle goes to `note_read` and `note_write`.
"""

import math
import weakref
from operator import index as as_int

import numpy as np

from . import guards
from .execution import Execution, _is_view, elements
from .observe import Watched
from .ordering import Ordering
from .shadow import (
    EPOCH_AT,
    INITIAL,
    SCATTERED,
    SEVERAL,
    THREAD_AT,
    THREAD_BITS,
    THREAD_MASK,
    UNINITIALISED,
    Shadow,
    site_of,
    thread_key,
)
from .verdicts import Verdicts
from .waits import Waits


class Checking(Ordering, Waits, Verdicts, Execution):
    """One launch under the sanitizer."""

    def __init__(self, launch, reports):
        super().__init__(launch)
        self.reports = reports
        self.sites = launch.sites
        self.unread = {}  # (memory, granule) -> {site: (thread, index)}

    def launch_start(self):
        self.start_clocks()

    def launch_end(self):
        self.tell_unread()

    def block_start(self, block):
        self.number_block(block)

    def block_end(self, block):
        self.tell_unread()

    # -- accesses --------------------------------------------------------------------------------

    def load1(self, thread, number, array, i):
        try:
            written, read, size, step, start = array.one
            if i.__class__ is not int:
                i = as_int(i)
            inside = 0 <= i < size
        except (TypeError, AttributeError):
            return self.load(thread, number, array, i)
        if not inside:
            return self.load(thread, number, array, i)
        place = start + i * step
        last, floor, low = written[place], thread.floor, thread.low
        if last == INITIAL or low <= last < floor or (
                last and not (last ^ thread.stamp) >> THREAD_AT):
            seen = read[place]
            if not seen or low <= seen < floor:
                read[place] = thread.stamp + number
            elif seen < thread.many:
                self.note_read(thread, number, array.memory, place, i)
        else:
            self.note_read(thread, number, array.memory, place, i)
        return array[i]

    def load2(self, thread, number, array, i, j):
        try:
            written, read, size, step, width, stride, start = array.two
            if i.__class__ is not int or j.__class__ is not int:
                i, j = as_int(i), as_int(j)
            inside = 0 <= i < size and 0 <= j < width
        except (TypeError, AttributeError):
            return self.load(thread, number, array, (i, j))
        if not inside:
            return self.load(thread, number, array, (i, j))
        place = start + i * step + j * stride
        last, floor, low = written[place], thread.floor, thread.low
        if last == INITIAL or low <= last < floor or (
                last and not (last ^ thread.stamp) >> THREAD_AT):
            seen = read[place]
            if not seen or low <= seen < floor:
                read[place] = thread.stamp + number
            elif seen < thread.many:
                self.note_read(thread, number, array.memory, place, (i, j))
        else:
            self.note_read(thread, number, array.memory, place, (i, j))
        return array[i, j]

    def load(self, thread, number, array, index):
        if array.__class__ is not Watched:
            return self.load_elsewhere(thread, number, array, index)
        if _is_view(array, index):
            return self.load_view(thread, number, array, index)
        places = self.places(thread, number, array, index)
        if places is None:
            return self.garbage(array)
        for place in places:
            self.note_read(thread, number, array.memory, place, index)
        if array.memory.dynamic:
            self.check_aliasing(thread, number, array, places[0], index)
        return array[index]

    def load_view(self, thread, number, array, index):
        """A part of an array, which is not read yet; garbage if it lies outside."""
        try:
            guards.check_index(array, index)
            return array[index]
        except IndexError:
            self.outside(thread, number, array, index)
        inside = tuple(0 if isinstance(part, (int, np.integer)) else part
                       for part in (index if type(index) is tuple else (index,)))
        shape = np.empty(tuple(max(size, 1) for size in array.shape), np.bool_)[inside].shape
        return guards.poisoned(shape, array.dtype)

    def load_elsewhere(self, thread, number, array, index):
        """A constant array, a tuple: nothing to remember."""
        if not isinstance(array, np.ndarray):
            return array[index]
        try:
            guards.check_index(array, index)
            return array[index]
        except IndexError:
            self.outside(thread, number, array, index)
            return self.garbage(array)

    @staticmethod
    def garbage(array):
        """What a read outside gives."""
        return guards.poisoned((1,), array.dtype)[0]

    def store1(self, thread, number, value, array, i):
        try:
            written, read, size, step, start = array.one
            if i.__class__ is not int:
                i = as_int(i)
            inside = 0 <= i < size
        except (TypeError, AttributeError):
            return self.store(thread, number, value, array, i)
        if not inside:
            return self.store(thread, number, value, array, i)
        place = start + i * step
        last, seen, floor, low = written[place], read[place], thread.floor, thread.low
        stamp = thread.stamp
        if (last <= 0 or low <= last < floor or not (last ^ stamp) >> THREAD_AT) and (
                not seen or low <= seen < floor or not (seen ^ stamp) >> THREAD_AT):
            written[place] = stamp + number
        else:
            self.note_write(thread, number, array, place, i, value)
        array[i] = value

    def store2(self, thread, number, value, array, i, j):
        try:
            written, read, size, step, width, stride, start = array.two
            if i.__class__ is not int or j.__class__ is not int:
                i, j = as_int(i), as_int(j)
            inside = 0 <= i < size and 0 <= j < width
        except (TypeError, AttributeError):
            return self.store(thread, number, value, array, (i, j))
        if not inside:
            return self.store(thread, number, value, array, (i, j))
        place = start + i * step + j * stride
        last, seen, floor, low = written[place], read[place], thread.floor, thread.low
        stamp = thread.stamp
        if (last <= 0 or low <= last < floor or not (last ^ stamp) >> THREAD_AT) and (
                not seen or low <= seen < floor or not (seen ^ stamp) >> THREAD_AT):
            written[place] = stamp + number
        else:
            self.note_write(thread, number, array, place, (i, j), value)
        array[i, j] = value

    def store(self, thread, number, value, array, index):
        if array.__class__ is not Watched:
            guards.check_index(array, index)
            array[index] = value
            return
        places = self.places(thread, number, array, index)
        if places is None:
            return
        for place in places:
            self.note_write(thread, number, array, place, index, value)
        array[index] = value

    def relaxed_load(self, thread, number, array, index):
        if array.__class__ is Watched and not _is_view(array, index):
            try:
                offsets, _ = elements(array, index)
            except IndexError:
                offsets = ()
            for offset in offsets:
                shadow = self.shadow_of(array)
                self.acquire(thread, shadow, offset // shadow.granule)
        return self.load(thread, number, array, index)

    def relaxed_store(self, thread, number, array, index, value):
        self.store(thread, number, value, array, index)
        if array.__class__ is Watched:
            try:
                offsets, _ = elements(array, index)
            except IndexError:
                return
            for offset in offsets:
                shadow = self.shadow_of(array)
                self.release(thread, shadow, offset // shadow.granule)

    def load_many(self, thread, number, array, index, count):
        return [self.load1(thread, number, array, index + k) for k in range(count)]

    def store_many(self, thread, number, array, index, values):
        for k, value in enumerate(values):
            self.store1(thread, number, value, array, index + k)

    def atomic(self, thread, number, operation, array, *args):
        index = (0,) * array.ndim if operation.__name__ == "_compare_and_swap" else args[0]
        if array.__class__ is not Watched:
            return operation(array, *args)
        places = self.places(thread, number, array, index)
        if places is None:
            return self.garbage(array)
        memory = array.memory
        shadow = memory.shadow
        for place in places:
            self.acquire(thread, shadow, place)
            self.note_atomic(thread, number, memory, shadow, place, index)
            self.release(thread, shadow, place)
        return operation(array, *args)

    # -- where an access falls -------------------------------------------------------------------

    def shadow_of(self, array):
        """The Shadow of an array's memory, fine enough for this array."""
        memory = array.memory
        shadow = memory.shadow
        granule = math.gcd(array.itemsize, array.start, *array.strides)
        if shadow is None:
            shadow = memory.shadow = Shadow(memory, granule)
        elif granule % shadow.granule:
            shadow.refine(memory, math.gcd(granule, shadow.granule))
        return shadow

    def places(self, thread, number, array, index):
        """The granules that `array[index]` covers, or None after reporting that it lies outside."""
        shadow = self.shadow_of(array)
        try:
            offsets, size = elements(array, index)
        except IndexError:
            self.outside(thread, number, array, index)
            return None
        granule = shadow.granule
        if size == granule:
            if array.ndim <= 2 and not array.memory.dynamic:
                self.prepare(array, shadow)
            return [offset // granule for offset in offsets]
        return [place for offset in offsets
                for place in range(offset // granule, (offset + size) // granule)]

    @staticmethod
    def prepare(array, shadow):
        """Let `load1` or `load2` handle this view from now on."""
        granule = shadow.granule
        steps = [stride // granule for stride in array.strides]
        start = array.start // granule
        if array.ndim == 1:
            array.one = shadow.written, shadow.read, array.shape[0], steps[0], start
        elif array.ndim == 2:
            array.two = (shadow.written, shadow.read, array.shape[0], steps[0], array.shape[1],
                         steps[1], start)
        shadow.views.append(weakref.ref(array))

    # -- what cannot be settled at once ----------------------------------------------------------

    def note_read(self, thread, number, memory, place, index):
        """A read: against the last write, then remembered."""
        shadow = memory.shadow
        last = shadow.written[place]
        if last == UNINITIALISED:
            self.uninitialised(thread, number, memory, place, index)
        elif last != INITIAL:
            self.against_writes(thread, number, memory, shadow, place, last, index, "read")
        if memory.space == "local":
            return
        stamp, seen = thread.stamp + number, shadow.read[place]
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
            readers[thread_key(stamp)] = stamp
        same = seen >> EPOCH_AT == stamp >> EPOCH_AT
        shadow.read[place] = thread.floor | SEVERAL if same and not self.precise else SCATTERED

    def against_writes(self, thread, number, memory, shadow, place, last, index, now):
        """Compare an access, a `now`, with the last write, or with the atomics since."""
        if last < SCATTERED and (last >> THREAD_AT & THREAD_MASK) != THREAD_MASK:
            if not self.in_order(thread, last):
                self.race(thread, number, memory, last, place, index, ("write", now))
        else:
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
            return bool(array[index] == array.dtype.type(value))
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
