"""The sanitizer's Execution: carries out every access, and looks at what it collides with.

`load1` and its kin settle the common cases in a few comparisons of stamps (see `shadow`); whatever
they cannot settle goes to `note_read` and `note_write`.
"""

import math
import weakref
from operator import index as as_int

import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.engine import arithmetic, guards
from course_lib.simulator.engine.checked import check_index
from course_lib.simulator.observe.execution import Execution, elements, is_view, part_of
from course_lib.simulator.observe.observer import Watched
from course_lib.simulator.sanitizer.cluster_checks import ClusterChecks
from course_lib.simulator.sanitizer.collisions import Collisions
from course_lib.simulator.sanitizer.copy_checks import CopyChecks
from course_lib.simulator.sanitizer.ordering import Ordering
from course_lib.simulator.sanitizer.shadow import INITIAL, ONE_CLOCK, SITE_MASK, THREAD_AT, Shadow
from course_lib.simulator.sanitizer.verdicts import Verdicts
from course_lib.simulator.sanitizer.waits import Waits


class Checking(ClusterChecks, CopyChecks, Collisions, Ordering, Waits, Verdicts, Execution):
    """One launch under the sanitizer."""

    def __init__(self, launch, reports):
        super().__init__(launch)
        self.reports = reports
        self.sites = launch.sites
        self.unread = {}  # (memory, granule) -> {site: (thread, index)}
        self.global_memories = []  # those with a shadow
        self.cluster_barriers = set()  # numbers of the sites where clusters have met

    def launch_start(self):
        if len(self.sites) > SITE_MASK:
            raise errors.SimulatorError(
                f"{self.launch.name} has {len(self.sites):,} places that access memory or wait; "
                f"the sanitizer can tell {SITE_MASK:,} apart")
        self.start_clocks()

    def launch_end(self):
        self.tell_unread(("shared", "local", "global"))
        for memory in self.global_memories:
            memory.shadow.mark_written(memory)

    def block_start(self, block):
        self.number_block(block)

    def block_end(self, block):
        self.check_readers(block)
        if self.launch.cluster == 1:
            self.tell_unread(("shared", "local"))  # else another block may still write, too late

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
                self.remember_read(thread, number, array.memory.shadow, place)
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
                self.remember_read(thread, number, array.memory.shadow, place)
        else:
            self.note_read(thread, number, array.memory, place, (i, j))
        return array[i, j]

    def load(self, thread, number, array, index):
        if index.__class__ is str:
            return self.load_named(thread, number, array, index)
        if array.__class__ is not Watched:
            return self.load_elsewhere(thread, number, array, index)
        if is_view(array, index):
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
            check_index(array, index)
            return part_of(array, index)
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
            check_index(array, index)
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
        if array.dtype.kind == "f":
            array[i] = value
        else:
            arithmetic.store(array, i, value)

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
        if array.dtype.kind == "f":
            array[i, j] = value
        else:
            arithmetic.store(array, (i, j), value)

    def store(self, thread, number, value, array, index):
        if index.__class__ is str:
            self.store_named(thread, number, value, array, index)
            return
        value = self.whole(thread, number, value)
        if array.__class__ is not Watched:
            check_index(array, index)
            arithmetic.store(array, index, value)
            return
        places = self.places(thread, number, array, index)
        if places is None:
            return
        for place in places:
            self.note_write(thread, number, array, place, index, value)
        arithmetic.store(array, index, value)

    def relaxed_load(self, thread, number, array, index):
        if array.__class__ is Watched and not is_view(array, index):
            try:
                offsets, _ = elements(array, index)
            except IndexError:
                offsets = ()
            for offset in offsets:
                shadow = self.shadow_of(array)
                self.acquire(thread, number, shadow, offset // shadow.granule)
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
                self.release(thread, shadow, offset // shadow.granule, whole=True)
            thread.stamp += ONE_CLOCK

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
            self.acquire(thread, number, shadow, place)
            self.note_atomic(thread, number, memory, shadow, place, index)
            if operation.__name__ != "add" or args[-1] != 0:  # else nobody sees that it was there
                self.release(thread, shadow, place)
        return operation(array, *args)

    # -- where an access falls -------------------------------------------------------------------

    def shadow_of(self, array):
        """The Shadow of an array's memory, fine enough for this array."""
        memory = array.memory
        shadow, granule = memory.shadow, array.granule
        if granule is None:
            granule = array.granule = math.gcd(array.itemsize, array.start, *array.strides)
        if shadow is None:
            shadow = memory.shadow = Shadow(memory, granule)
            if memory.space == "global":
                self.global_memories.append(memory)
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
            if array.ndim <= 2 and not array.memory.dynamic and array.dtype.names is None:
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
