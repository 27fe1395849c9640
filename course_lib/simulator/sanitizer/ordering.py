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
  block alone. Where a loop waited for what it read, no barrier takes the place of the fence: the
  thread that left the loop must pass one, and of another block's writes one for the device, or
  else each reader after the barrier must;
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
    THREAD_BITS,
    learn,
    learn_all,
    thread_key,
)

_NOTHING = {}


def covers(known, stamp):
    """True if whoever knows `known` knows of the access `stamp`."""
    clock = known.get(thread_key(stamp))
    if clock is not None and (stamp >> CLOCK_AT & CLOCK_MASK) < clock:
        return True
    epoch = known.get(-(stamp >> BLOCK_AT))
    return epoch is not None and (stamp >> EPOCH_AT & EPOCH_MASK) < epoch


def all_told(tellers):
    """What several threads tell, as one; None if there are none."""
    if len(tellers) < 2:
        return tellers[0] if tellers else None
    joined = {}  # what is joined -> the result, which is often that of several reaches
    told = {}
    for reach in {reach: None for told in tellers for reach in told}:
        parts = tuple({id(told[reach]): None for told in tellers if reach in told})
        if parts not in joined:
            joined[parts] = learn_all([told[reach] for told in tellers if reach in told])
        told[reach] = joined[parts]
    return told


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
        self.polls = any(site is not None and site.polled for site in self.launch.sites)

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
            thread.slot, thread.key = number, number << THREAD_BITS | thread.tid
            thread.known, thread.told, thread.pending = _NOTHING, None, None
            thread.unfenced, thread.asked_at = None, 0

    def in_order(self, thread, stamp):
        """True if the access `stamp` comes before what `thread` does now."""
        block = stamp >> BLOCK_AT
        if block == thread.slot and stamp < thread.floor or block < self.first_after_grid:
            return True
        key = thread_key(stamp)
        if key == thread.key:
            return True
        return bool(thread.known) and covers(thread.known, stamp)

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
            known, tellers = _NOTHING, {}
            for thread in threads:
                if thread.pending:
                    thread.known, thread.pending = learn(thread.known, thread.pending), None
                if thread.known is not known:
                    known = learn(known, thread.known)
                if thread.told:
                    tellers[id(thread.told)] = thread.told
            # All fenced, then met: any of them may tell of it.
            told = all_told(list(tellers.values()))
            if known:
                own = threads[0].slot  # the epoch says it all about this block
                known = {key: count for key, count in known.items()
                         if -key != own and (key < 0 or key >> 11 != own)} or _NOTHING
            if self.polls:
                self.share_unfenced(threads, known)
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
        if self.polls:
            self.share_unfenced(threads, known)
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
        if self.polls:
            self.share_unfenced([thread for threads in groups for thread in threads], known)
        for threads in groups:
            for thread in threads:
                thread.known = known

    @staticmethod
    def share_unfenced(threads, known):
        """What one of `threads` has seen of a flag without a fence since, all have seen so."""
        unfenced, asked_at = None, 0
        for thread in threads:
            if thread.unfenced and thread.unfenced is not unfenced:
                unfenced, asked_at = learn(unfenced, thread.unfenced), thread.asked_at
        if unfenced:
            unfenced = {key: count for key, count in unfenced.items()
                        if known.get(key, 0) < count}
        for thread in threads:
            thread.unfenced, thread.asked_at = unfenced, asked_at

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
        done = {thread.slot: self.all_done(thread)} if scope == "block" else {}
        if scope != "block":
            if thread.unfenced:
                thread.known, thread.unfenced = learn(thread.known, thread.unfenced), None
            done[None] = self.all_done(thread)
            if self.polls:
                done[thread.slot] = done[None]  # for its own block such a fence is one, too
        thread.told = {**(thread.told or {}), **done}
        thread.stamp += ONE_CLOCK

    def acquire(self, thread, number, shadow, place):
        """A relaxed read: after a fence, the thread will know what was told here."""
        told = shadow.released.get(place)
        if told and self.sites[number].polled:
            thread.pending = learn(thread.pending, told.get(thread.slot))
            thread.unfenced, thread.asked_at = learn(thread.unfenced, told.get(None)), number
        elif told:
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
