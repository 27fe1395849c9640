"""What a thread has begun and not yet waited for: for twins of asynchronous instructions.

An asynchronous copy may land at any time until its thread waits for it. Its twin postpones the
write to the wait, so that whoever reads too early finds what was there before.

    simulator.postponed.begin(target, i, values, source, j, n)
                                    write `values` to target[i:] at the wait; n of them were read
                                    from source[j:], which may be read until then
    simulator.postponed.add(item)   keep a copy that was taken, or a mark between copies
    simulator.postponed.take()      everything begun or kept since the last `take`, oldest first
    simulator.postponed.finish(copy)
                                    the write of a copy that was taken
"""

from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.engine import guards


class Copy:
    """A copy under way; `began` is the observer's: what it found where the copy began."""

    __slots__ = ("target", "i", "values", "source", "j", "n", "began")

    def __init__(self, target, i, values, source, j, n):
        self.target, self.i, self.values = target, i, values
        self.source, self.j, self.n, self.began = source, j, n, None


def _begin(thread, target, i, values, source, j, n):
    """Begin a copy."""
    thread.postponed.append(Copy(target, i, values, source, j, n))


def _add(thread, item):
    """Keep `item` for this thread."""
    thread.postponed.append(item)


def _take(thread):
    """Everything this thread has kept since the last time, oldest first."""
    items, thread.postponed = thread.postponed, []
    return items


def _finish(thread, copy):
    """Write what was copied."""
    guards.write_elements(copy.target, copy.i, copy.values)


begin = Primitive("simulator.postponed.begin", _begin, "thread", access="begin_copy")
add = Primitive("simulator.postponed.add", _add, "thread")
take = Primitive("simulator.postponed.take", _take, "thread")
finish = Primitive("simulator.postponed.finish", _finish, "thread", access="finish_copy")
