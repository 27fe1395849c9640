"""What a thread has begun and not yet waited for: for twins of asynchronous instructions.

An asynchronous copy may land at any time until its thread waits for it. Its twin postpones the
write to the wait, so that whoever reads too early finds what was there before.

    simulator.postponed.add(item)   keep `item` for this thread
    simulator.postponed.take()      everything kept since the last `take`, oldest first
"""

from .primitives import Primitive


def _add(thread, item):
    """Keep `item` for this thread."""
    thread.postponed.append(item)


def _take(thread):
    """Everything this thread has kept since the last time, oldest first."""
    items, thread.postponed = thread.postponed, []
    return items


add = Primitive("simulator.postponed.add", _add, "thread")
take = Primitive("simulator.postponed.take", _take, "thread")
