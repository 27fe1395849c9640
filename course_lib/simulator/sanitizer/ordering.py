"""Happens-before: which accesses are in order, and what orders them.

Two accesses of different threads to one byte, at least one of them a write and not both *relaxed*,
race unless one comes before the other. Relaxed are atomics, loads in the condition of a loop that
waits, stores right after a fence; but a plain store races with another, and with an atomic, relaxed
or not. A cache hint makes no difference. Before each other come:

- in one block, what lies on different sides of a block barrier that both threads passed;
- among the lanes of its mask, what lies on different sides of a warp operation or syncwarp;
- in one cluster, what lies on different sides of a barrier of the cluster;
- in the whole grid, what lies on different sides of a grid barrier;
- what a thread did before a fence and then a relaxed write, and what another thread does after it
  has seen that write (or a later atomic there) with a relaxed read and passed a fence or a block
  barrier; of a plain store, the store itself too. `threadfence_block` reaches threads of its own
  block alone;
- what atomics did to an element before an atomic whose answer a thread uses, and that thread's
  plain store there: the last block resets the counter that told it so;
- and whatever follows from these together.

Two plain writes of the same value race harmlessly, and are no finding. CUDA's memory model is
stricter in one point: there a store after a fence and the load of a loop that waits for it race as
well, because both are plain. They are no finding, since numba.cuda has no other loads and stores:
an aligned element arrives whole, and `polls` tells where the compiler would read only once.
"""

from course_lib.simulator.sanitizer.shadow import (
    BLOCK_AT,
    CLOCK_AT,
    CLOCK_MASK,
    EPOCH_AT,
    EPOCH_MASK,
    NEVER,
    ONE_CLOCK,
    ONE_EPOCH,
    SEVERAL,
    THREAD_AT,
    learn,
    thread_key,
)

_NOTHING = {}


class Ordering:
    """The part of `checking.Checking` that keeps threads' clocks."""

    def start_clocks(self):
        """Before the first block."""
        self.blocks_seen = [None]  # by the number in a stamp: the block's index
        self.first_after_grid = 0
        # Else blocks run one after another, and only their own barriers order anything.
        self.precise = any(site is not None and (
                               site.kind in ("warp", "fence", "grid")
                               or site.kind == "call" and site.relaxed)  # fences inside
                           for site in self.launch.sites) or self.uses_flags or (
            self.launch.program.greenlets or self.launch.program.interleaved
            or self.launch.cluster > 1)

    def number_block(self, block):
        """Give a block, or a block after a grid barrier, its number in stamps."""
        number = len(self.blocks_seen)
        self.blocks_seen.append(block.index)
        low = number << BLOCK_AT
        floor = low | ONE_EPOCH
        many = NEVER if self.precise else floor | SEVERAL
        for thread in block.threads:
            thread.low, thread.floor, thread.many = low, floor, many
            thread.stamp = floor | thread.tid << THREAD_AT
            thread.slot = number
            thread.known, thread.told, thread.pending = _NOTHING, None, None

    def in_order(self, thread, stamp):
        """True if the access `stamp` comes before what `thread` does now."""
        block = stamp >> BLOCK_AT
        if block == thread.slot and stamp < thread.floor or block < self.first_after_grid:
            return True
        key = thread_key(stamp)
        if key == thread_key(thread.stamp):
            return True
        known = thread.known
        if known:
            clock = known.get(key)
            if clock is not None and (stamp >> CLOCK_AT & CLOCK_MASK) < clock:
                return True
            epoch = known.get(-block)
            return epoch is not None and (stamp >> EPOCH_AT & EPOCH_MASK) < epoch
        return False

    def all_done(self, thread):
        """What others know when they know of everything that `thread` has done and knows."""
        stamp = thread.stamp
        return learn(thread.known, {
            thread_key(stamp): (stamp >> CLOCK_AT & CLOCK_MASK) + 1,
            -(stamp >> BLOCK_AT): stamp >> EPOCH_AT & EPOCH_MASK})

    # -- block barrier, warp, cluster, grid ------------------------------------------------------

    def pass_barrier(self, threads):
        """`threads`, all live ones of a block, have met."""
        if self.precise:
            known, told = _NOTHING, None
            for thread in threads:
                if thread.pending:
                    thread.known, thread.pending = learn(thread.known, thread.pending), None
                if thread.known is not known:
                    known = learn(known, thread.known)
                if thread.told and thread.told is not told:
                    # All fenced, then met: any of them may tell of it.
                    told = thread.told if told is None else {
                        reach: learn(told.get(reach, _NOTHING), thread.told.get(reach))
                        for reach in {*told, *thread.told}}
            if known:
                own = threads[0].slot  # the epoch says it all about this block
                known = {key: count for key, count in known.items()
                         if -key != own and (key < 0 or key >> 11 != own)} or _NOTHING
            for thread in threads:
                thread.known, thread.told = known, told
                thread.stamp += ONE_EPOCH
                thread.floor += ONE_EPOCH
        else:
            for thread in threads:
                thread.stamp += ONE_EPOCH
                thread.floor += ONE_EPOCH
                thread.many += ONE_EPOCH

    def pass_warp(self, threads):
        """The lanes `threads` have met at a warp operation."""
        known, met = _NOTHING, {}
        for thread in threads:
            if thread.pending:
                thread.known, thread.pending = learn(thread.known, thread.pending), None
            if thread.known is not known:
                known = learn(known, thread.known)
            stamp = thread.stamp
            met[thread_key(stamp)] = (stamp >> CLOCK_AT & CLOCK_MASK) + 1
            thread.stamp += ONE_CLOCK
        known = learn(known, met)
        for thread in threads:
            thread.known = known

    def pass_cluster(self, groups):
        """The live threads of a cluster have met; `groups` has a list for each block."""
        known, met = _NOTHING, {}
        for threads in groups:
            self.pass_barrier(threads)
            known = learn(known, threads[0].known)
            met[-threads[0].slot] = threads[0].stamp >> EPOCH_AT & EPOCH_MASK
        known = learn(known, met)
        for threads in groups:
            for thread in threads:
                thread.known = known

    def pass_grid(self, threads):
        """All live threads of the grid have met: everything before comes before."""
        self.first_after_grid = len(self.blocks_seen)
        for block in dict.fromkeys(thread.b for thread in threads):
            self.number_block(block)

    # -- fences and atomics ----------------------------------------------------------------------

    def pass_fence(self, thread, scope):
        """A fence: what was seen before it is known now; what was done can be told."""
        if thread.pending:
            thread.known, thread.pending = learn(thread.known, thread.pending), None
        reach = thread.slot if scope == "block" else None
        thread.told = {**(thread.told or {}), reach: self.all_done(thread)}
        thread.stamp += ONE_CLOCK

    @staticmethod
    def acquire(thread, shadow, place):
        """A relaxed read: after a fence, the thread will know what was told here."""
        told = shadow.released.get(place)
        if told:
            for reach in (None, thread.slot):
                if reach in told:
                    thread.pending = learn(thread.pending, told[reach])

    @staticmethod
    def release(thread, shadow, place, whole=False):
        """A relaxed write: whoever reads it can learn what was done before the last fence.

        Of a plain store (`whole`), that it was made, too: the next one may then follow it.
        """
        if thread.told:
            told = shadow.released.setdefault(place, {})
            stamp = thread.stamp
            store = {thread_key(stamp): (stamp >> CLOCK_AT & CLOCK_MASK) + 1} if whole else None
            for reach, known in thread.told.items():
                told[reach] = learn(learn(told.get(reach), known), store)
