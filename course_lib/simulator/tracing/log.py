"""Writing down what each thread does, cheaply: one integer for each event, in the thread's order.

An event is a number of 64 bits: from the top, the site's number, what happened, a code for the
size of an access, and an address (or, for a branch, whether it was taken). Everything but the
address is the event's *signature*.
"""

import numpy as np

from course_lib.simulator.observe.execution import Execution, elements
from course_lib.simulator.observe.observer import Watched

ADDRESS_BITS, SIZE_BITS, ACTION_BITS = 40, 4, 3
ACTION_SHIFT = ADDRESS_BITS + SIZE_BITS
NUMBER_SHIFT = ACTION_SHIFT + ACTION_BITS
LOAD, STORE, ATOMIC, BRANCH, LOOP, ENTER, LEAVE, CALL = range(8)
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
_STORE = STORE << ACTION_SHIFT
_ATOMIC = ATOMIC << ACTION_SHIFT
_BRANCH = BRANCH << ACTION_SHIFT
_LOOP = LOOP << ACTION_SHIFT
_ENTER = ENTER << ACTION_SHIFT
_LEAVE = LEAVE << ACTION_SHIFT
_CALL = CALL << ACTION_SHIFT
#: A return is a call with this code in the place of the size.
RETURN_CODE = 1
_RETURN = _CALL | RETURN_CODE << ADDRESS_BITS
#: What the quick ways fail with: an array that is not watched or not yet known, a slice, an index
#: outside, a NumPy integer too narrow for an event.
_NOT_PLAIN = AttributeError, TypeError, IndexError, OverflowError, ValueError
#: Codes of sizes in bytes; other sizes are given codes as they come.
SIZES = [1, 2, 4, 8, 16, 32]


def size_code(size, sizes):
    """The code of an access of `size` bytes; `sizes` is extended by sizes not met before."""
    if size not in sizes:
        sizes.append(size)
        if len(sizes) > 1 << SIZE_BITS:
            raise ValueError(f"a trace tells {1 << SIZE_BITS} sizes of accesses apart, not more")
    return sizes.index(size)


class Untraced(Execution):
    """Carries out what a traced kernel does in a block that is not traced."""

    def loop_test(self, thread, number, condition):
        """The condition of a `while`."""
        return condition

    def enter(self, thread, number):
        """A `while` loop begins."""

    def leave(self, thread, number):
        """A `while` loop is over."""

    @staticmethod
    def entered(thread, number):
        """A device function is going to be called."""

    @staticmethod
    def returned(thread, nothing, result):
        """A device function has returned."""
        return result


class Tracing(Untraced):
    """Writes down every event of a thread in its `events`.

    `on_block(block, logs)` is called with the lists of all threads when a block is done.
    """

    def __init__(self, launch, sizes, traces, on_block):
        super().__init__(launch)
        self.sizes, self.traces, self.on_block = sizes, traces, on_block
        self.untraced = Untraced(launch)

    def block_start(self, block):
        if self.traces(block):
            for thread in block.threads:
                thread.events = []
                thread.note = thread.events.append
        else:
            block.o = self.untraced
            for thread in block.threads:
                thread.o = self.untraced

    def block_end(self, block):
        self.on_block(block, [thread.events for thread in block.threads])

    # -- accesses: each tries first what is right for Python integers inside the array -----------

    def first(self, array):
        """Code of the size and address of the first element; None for an array not traced."""
        if array.__class__ is not Watched or array.memory.space == "local":
            return None
        first = (array.memory.address + array.start) | (
            size_code(array.itemsize, self.sizes) << ADDRESS_BITS)
        if array.dtype.names is not None:
            return first  # a record is read by its fields
        if array.ndim == 1:
            array.one = first, *array.strides
        elif array.ndim == 2:
            array.two = first, *array.strides
        return first

    def load1(self, thread, number, array, i):
        try:
            first, along = array.one
            if i >= 0:
                value = array[i]
                thread.note((number << NUMBER_SHIFT) + first + i * along)
                return value
        except _NOT_PLAIN:
            pass
        return self.load(thread, number, array, i)

    def load2(self, thread, number, array, i, j):
        try:
            first, down, along = array.two
            if i >= 0 <= j:
                value = array[i, j]
                thread.note((number << NUMBER_SHIFT) + first + i * down + j * along)
                return value
        except _NOT_PLAIN:
            pass
        return self.load(thread, number, array, (i, j))

    def store1(self, thread, number, value, array, i):
        try:
            first, along = array.one
            if i >= 0:
                event = ((number << NUMBER_SHIFT) | _STORE) + first + i * along
                array[i] = value
                thread.note(event)
                return
        except _NOT_PLAIN:
            pass
        self.store(thread, number, value, array, i)

    def load(self, thread, number, array, index):
        value = super().load(thread, number, array, index)
        if not (isinstance(value, np.ndarray) or index.__class__ is str):
            self.touch(thread, number, 0, array, index)
        return value

    def store(self, thread, number, value, array, index):
        super().store(thread, number, value, array, index)
        if index.__class__ is not str:
            self.touch(thread, number, _STORE, array, index)

    def atomic(self, thread, number, operation, array, *args):
        index = args[0]
        if operation.__name__ == "_compare_and_swap":
            index = (0,) * array.ndim
        result = operation(array, *args)
        self.touch(thread, number, _ATOMIC, array, index)
        return result

    def touch(self, thread, number, action, array, index):
        """Note an access of any kind; a slice is one access for each element."""
        first = self.first(array)
        if first is not None:
            signature = (number << NUMBER_SHIFT) | action | first & ~ADDRESS_MASK
            for offset in elements(array, index)[0]:
                thread.note(signature + array.memory.address + int(offset))

    def load_many(self, thread, number, array, index, count):
        values = super().load_many(thread, number, array, index, count)
        self.touch_many(thread, number, 0, array, index, count)
        return values

    def store_many(self, thread, number, array, index, values):
        super().store_many(thread, number, array, index, values)
        self.touch_many(thread, number, _STORE, array, index, len(values))

    def touch_many(self, thread, number, action, array, index, count):
        """Note an access to `count` neighbours as one, as wide as they are together."""
        if self.first(array) is not None:
            size = size_code(array.itemsize * count, self.sizes)
            offset = int(elements(array, index)[0][0])
            thread.note((number << NUMBER_SHIFT) | action | size << ADDRESS_BITS
                        | array.memory.address + offset)

    # -- branches, loops, calls ------------------------------------------------------------------

    def branch(self, thread, number, condition):
        thread.note((number << NUMBER_SHIFT) | _BRANCH | (1 if condition else 0))
        return condition

    def loop_test(self, thread, number, condition):
        thread.note((number << NUMBER_SHIFT) | _LOOP | (1 if condition else 0))
        return condition

    def loop(self, thread, number, iterable):
        note, number = thread.note, number << NUMBER_SHIFT
        again = number | _LOOP | 1
        note(number | _ENTER)
        try:
            for value in iterable:
                note(again)
                yield value
            note(number | _LOOP)
        finally:
            note(number | _LEAVE)

    def enter(self, thread, number):
        thread.note((number << NUMBER_SHIFT) | _ENTER)

    def leave(self, thread, number):
        thread.note((number << NUMBER_SHIFT) | _LEAVE)

    @staticmethod
    def entered(thread, number):
        thread.note((number << NUMBER_SHIFT) | _CALL)
        return number

    @staticmethod
    def returned(thread, number, result):
        thread.note((number << NUMBER_SHIFT) | _RETURN)
        return result
