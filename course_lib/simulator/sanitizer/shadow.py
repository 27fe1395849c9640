"""What the sanitizer remembers about memory: who wrote each element last, who has read it since.

An access is one integer, its *stamp*: block, epoch, thread, clock and site, from high bits to low.
A block's epoch counts its barriers, so that within a block a stamp below the present epoch's
`floor` is in order, whoever made it; that one comparison settles nearly every access. A thread's
clock counts the moments at which it told others what it had done: warp operations and fences.
What a thread was told is in its `known`, a dictionary from thread to clock and from -block to
epoch: everything that thread did below that clock, or that block below that epoch, came before.
"""

import numpy as np

from course_lib.simulator.cuda_api import unwritten

SITE_BITS, CLOCK_BITS, THREAD_BITS, EPOCH_BITS = 12, 20, 11, 20
CLOCK_AT = SITE_BITS
THREAD_AT = CLOCK_AT + CLOCK_BITS
EPOCH_AT = THREAD_AT + THREAD_BITS
BLOCK_AT = EPOCH_AT + EPOCH_BITS
SITE_MASK = (1 << SITE_BITS) - 1
CLOCK_MASK = (1 << CLOCK_BITS) - 1
THREAD_MASK = (1 << THREAD_BITS) - 1
EPOCH_MASK = (1 << EPOCH_BITS) - 1
ONE_CLOCK, ONE_EPOCH = 1 << CLOCK_AT, 1 << EPOCH_AT
#: The thread number in the mark of an element that several threads have used in this epoch.
SEVERAL = THREAD_MASK << THREAD_AT
#: The mark of an element used by several threads, not all of this block and epoch.
SCATTERED = 1 << 100
#: A mark above all others: nothing is settled by it.
NEVER = 1 << 200

#: `written` of an element that nobody has written in this launch: its memory is fresh, or not
UNINITIALISED, INITIAL = 0, -1
#: Larger memories are remembered in dictionaries.
MOST_LISTED = 1 << 22


class _Sparse(dict):
    """Like a list full of one value."""

    def __init__(self, value):
        super().__init__()
        self.value = value

    def __missing__(self, key):
        return self.value


def _filled(count, value):
    return [value] * count if count <= MOST_LISTED else _Sparse(value)


class Shadow:
    """The accesses to one Memory, by granule (an element; bytes where views differ).

    Attributes
    ----------
    written, read : list of int
        The stamp of the last write; of the last read since, or a mark for several.
    readers, writers : dict
        granule -> {thread: stamp} where there are several; writers are atomic ones.
    released : dict
        granule -> {None or block: known}, what a reader of the atomic there can learn.
    through : dict
        granule -> number of the declaration it was last written through; dynamic memory only.
    newest : dict
        granule -> stamp of the last atomic there, if its answer is used.
    plain : dict
        granule -> stamp of the last plain write, where atomics came after it.
    views : list
        Weak references to the arrays that hold `written` and `read`.
    """

    __slots__ = ("granule", "written", "read", "readers", "writers", "released", "through",
                 "plain", "newest", "views")

    def __init__(self, memory, granule):
        self.views = []
        self.fill(memory, granule)

    def fill(self, memory, granule):
        self.granule = granule
        count = -(-memory.nbytes // granule)
        self.written = self.first_state(memory, count)
        self.read = _filled(count, 0)
        self.readers, self.writers, self.released, self.through = {}, {}, {}, {}
        self.plain, self.newest = {}, {}

    def first_state(self, memory, count):
        """`written` as it is before the launch."""
        if memory.space != "global":
            return _filled(count, UNINITIALISED)
        states = _filled(count, INITIAL)
        for place in self.fresh_places(memory):
            states[place] = UNINITIALISED
        return states

    def mark_written(self, memory):
        """Let later launches know what this one has written."""
        marks, size = unwritten.of(memory.keep, memory.base, memory.nbytes), self.granule
        for place in self.fresh_places(memory):
            if self.written[place] != UNINITIALISED:
                marks[place * size:(place + 1) * size] = False

    def fresh_places(self, memory):
        """The granules that nobody had written before the launch."""
        marks = unwritten.of(memory.keep, memory.base, memory.nbytes)
        if marks is None or not marks.any():
            return []
        whole = marks.size // self.granule
        fresh = marks[:whole * self.granule].reshape(whole, -1).all(1)
        return np.flatnonzero(fresh).tolist()

    def dictionaries(self):
        """Everything that is kept by granule for few of them."""
        return (self.readers, self.writers, self.released, self.through, self.plain,
                self.newest)

    def refine(self, memory, granule):
        """Use a smaller granule; what is known is kept."""
        factor = self.granule // granule
        old = self.written, self.read
        dictionaries = self.dictionaries()
        self.fill(memory, granule)
        count = len(self.written) if isinstance(self.written, list) else 0
        for before, after in zip(old, (self.written, self.read), strict=True):
            pairs = before.items() if isinstance(before, dict) else enumerate(before)
            for place, stamp in pairs:
                for k in range(place * factor, (place + 1) * factor):
                    if not count or k < count:
                        after[k] = stamp
        for before, after in zip(dictionaries, self.dictionaries(), strict=True):
            for place, value in before.items():
                for k in range(place * factor, (place + 1) * factor):
                    after[k] = dict(value) if isinstance(value, dict) else value
        for view in self.views:
            array = view()
            if array is not None:
                array.one = array.two = None
        self.views.clear()


def thread_key(stamp):
    """Block and thread of a stamp, as one integer."""
    return stamp >> BLOCK_AT << THREAD_BITS | stamp >> THREAD_AT & THREAD_MASK


def site_of(stamp):
    """The number of the site of a stamp."""
    return stamp & SITE_MASK


def same_thread(one, other):
    """True if two stamps are of one thread."""
    return thread_key(one) == thread_key(other)


def learn(known, more):
    """`known` joined with `more`, both {thread or -block: count}; neither is changed."""
    if not more or known is more:
        return known
    if not known:
        return more
    last = _last[0]
    if known is last[0] and more is last[1]:
        return last[2]  # all threads of a block often learn the same
    joined = dict(known)
    for key, count in more.items():
        if joined.get(key, 0) < count:
            joined[key] = count
    _last[0] = known, more, joined
    return joined


_last = [(None, None, None)]


def learn_all(parts):
    """What several know, joined."""
    joined = dict(parts[0])
    for part in parts[1:]:
        for key, count in part.items():
            if joined.get(key, 0) < count:
                joined[key] = count
    return joined
