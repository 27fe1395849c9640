"""The sanitizer against a slow and simple judge: full vector clocks, every pair of accesses.

Random programs of loads, stores, atomics, barriers, warp barriers and fences run in two blocks on
shared and global memory; some as a cluster, whose blocks read each other's shared memory. The judge
keeps each thread's whole history and compares every pair by the rules of
`course_lib.simulator.sanitizer.ordering`. Both must agree, memory by memory, on whether
there is a race.
"""

import itertools

import numpy as np
import pytest

from course_lib import simulator
from course_lib.simulator import cuda
from course_lib.simulator.cuda_api import cluster
from course_lib.simulator.observe.observer import Observer
from course_lib.simulator.observe.real import observing_with

THREADS, BLOCKS, PLACES = 34, 2, 3
NOTHING, LOAD, STORE, ATOMIC, AWAY, FENCE, BLOCK_FENCE, WARP, BARRIER, CLUSTER = range(10)
FULL_MASK = 0xFFFFFFFF


@cuda.jit
def with_warps(ops, places, shared_too, data):
    own = cuda.shared.array(PLACES, np.int32)
    tid = cuda.threadIdx.x
    for k in range(PLACES):
        if tid == k:
            own[k] = -1
    cuda.syncthreads()
    me = cuda.blockIdx.x * THREADS + tid
    for k in range(ops.shape[1]):
        op, place = ops[me, k], places[me, k]
        if op == STORE:
            if shared_too[k]:
                own[place] = me * 1000 + k
            else:
                data[place] = me * 1000 + k
        elif op == LOAD:
            own[place] if shared_too[k] else data[place]
        elif op == ATOMIC:
            if shared_too[k]:
                cuda.atomic.add(own, place, 1)
            else:
                cuda.atomic.add(data, place, 1)
        elif op == FENCE:
            cuda.threadfence()
        elif op == BLOCK_FENCE:
            cuda.threadfence_block()
        elif op == WARP:
            cuda.syncwarp(FULL_MASK)
        elif op == BARRIER:
            cuda.syncthreads()


@cuda.jit
def barriers_only(ops, places, shared_too, data):
    own = cuda.shared.array(PLACES, np.int32)
    tid = cuda.threadIdx.x
    if tid < PLACES:
        own[tid] = -1
    cuda.syncthreads()
    me = cuda.blockIdx.x * THREADS + tid
    for k in range(ops.shape[1]):
        op, place = ops[me, k], places[me, k]
        if op == STORE:
            if shared_too[k]:
                own[place] = me * 1000 + k
            else:
                data[place] = me * 1000 + k
        elif op == LOAD:
            own[place] if shared_too[k] else data[place]
        elif op == ATOMIC:
            if shared_too[k]:
                cuda.atomic.add(own, place, 1)
            else:
                cuda.atomic.add(data, place, 1)
        elif op == BARRIER:
            cuda.syncthreads()


@cuda.jit
def with_clusters(ops, places, shared_too, data):
    own = cuda.shared.array(PLACES, np.int32)
    tid = cuda.threadIdx.x
    if tid < PLACES:
        own[tid] = -1
    cluster.sync()
    me = cuda.blockIdx.x * THREADS + tid
    for k in range(ops.shape[1]):
        op, place = ops[me, k], places[me, k]
        if op == STORE:
            if shared_too[k]:
                own[place] = me * 1000 + k
            else:
                data[place] = me * 1000 + k
        elif op == LOAD:
            own[place] if shared_too[k] else data[place]
        elif op == ATOMIC:
            if shared_too[k]:
                cuda.atomic.add(own, place, 1)
            else:
                cuda.atomic.add(data, place, 1)
        elif op == AWAY:
            cluster.load(own, place, 1 - cluster.rank())
        elif op == FENCE:
            cuda.threadfence()
        elif op == BLOCK_FENCE:
            cuda.threadfence_block()
        elif op == WARP:
            cuda.syncwarp(FULL_MASK)
        elif op == BARRIER:
            cuda.syncthreads()
        elif op == CLUSTER:
            cluster.sync()
    cluster.sync()


class Judge(Observer):
    """Vector clocks written down in full: {thread: count} for every thread, all accesses kept."""

    def __init__(self):
        self.known, self.told, self.pending = {}, {}, {}
        self.accesses, self.released, self.racy = {}, {}, set()

    def clock(self, thread):
        return self.known.setdefault(thread, {thread: 1})

    @staticmethod
    def join(target, source):
        for key, count in source.items():
            target[key] = max(target.get(key, 0), count)

    def access(self, thread, memory, offset, writes, relaxed):
        mine = self.clock(thread)
        history = self.accesses.setdefault((memory, offset), [])
        for other, count, wrote, was_relaxed in history:
            if other is not thread and (writes or wrote) and not (relaxed and was_relaxed) and (
                    count > mine.get(other, 0)):
                self.racy.add(memory.space)
        history.append((thread, mine[thread], writes, relaxed))

    def on_load(self, thread, site, memory, offset, size):
        self.access(thread, memory, offset, False, False)

    def on_store(self, thread, site, memory, offset, size):
        self.access(thread, memory, offset, True, False)

    def on_atomic(self, thread, site, memory, offset, size):
        released = self.released.setdefault((memory, offset), [])
        for reach, known in released:
            if reach in (None, thread.b):
                self.join(self.pending.setdefault(thread, {}), known)
        self.access(thread, memory, offset, True, True)
        released += self.told.get(thread, [])

    def on_fence(self, thread, site, scope):
        mine = self.clock(thread)
        self.join(mine, self.pending.pop(thread, {}))
        reach = thread.b if scope == "block" else None
        self.told[thread] = [*self.told.get(thread, []), (reach, dict(mine))]
        mine[thread] += 1

    def meet(self, threads):
        everything = {}
        for thread in threads:
            self.join(self.clock(thread), self.pending.pop(thread, {}))
            self.join(everything, self.clock(thread))
        for thread in threads:
            self.known[thread] = {**everything, thread: everything[thread] + 1}

    def on_barrier_release(self, block, threads):
        self.meet(threads)
        self.share_told(threads)

    def share_told(self, threads):
        told = itertools.chain(*(self.told.get(thread, []) for thread in threads))
        told = list({id(entry): entry for entry in told}.values())  # each once
        for thread in threads:
            self.told[thread] = told

    def on_warp_release(self, block, threads):
        self.meet(threads)

    def on_cluster_release(self, threads):
        self.meet(threads)
        for block in {thread.b for thread in threads}:
            self.share_told([thread for thread in threads if thread.b is block])


def random_program(rng, kinds, length=7, busy=0.04):
    """Few accesses among much waiting, so that about half of the programs race."""
    shape = BLOCKS * THREADS, length
    accesses = [LOAD, STORE, ATOMIC] + [AWAY] * (CLUSTER in kinds)
    ops = np.where(rng.random(shape) < busy, rng.choice(accesses, shape), NOTHING)
    if FENCE in kinds:
        ops = np.where((ops == NOTHING) & (rng.random(shape) < 0.3),
                       rng.choice([FENCE, BLOCK_FENCE], shape), ops)
    for k in range(length):
        if rng.random() < 0.4:
            ops[:, k] = rng.choice([kind for kind in kinds if kind >= WARP])
    only = rng.random(shape[0]) < rng.choice([0.1, 0.3, 1.0])
    ops = np.where(only[:, None] | (ops >= WARP), ops, NOTHING)
    return ops, rng.integers(0, PLACES, shape), rng.random(length) < 0.5


@pytest.mark.parametrize("kernel, kinds", [
    (with_warps, (FENCE, WARP, BARRIER)), (barriers_only, (BARRIER,)),
    (with_clusters, (FENCE, WARP, BARRIER, CLUSTER)), (with_clusters, (BARRIER, CLUSTER))])
def test_races_are_those_of_full_vector_clocks(kernel, kinds):
    racy = clean = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        ops, places, shared_too = random_program(rng, kinds, busy=rng.choice([0.02, 0.1, 0.4]))
        judge = Judge()
        data = np.zeros(PLACES, np.int32)
        order = ("forward", "reverse", "random")[seed % 3]
        with simulator.options(order=order, seed=seed), observing_with(judge):
            with simulator.sanitize() as report:
                simulator.run(kernel, BLOCKS, THREADS, ops, places, shared_too, data,
                              cluster=BLOCKS if CLUSTER in kinds else 1)
        found = {"shared" if "shared `" in finding.message else "global" for finding in report}
        assert found == judge.racy, (seed, report)
        assert {finding.kind for finding in report} <= {"race", "race-between-blocks"}
        racy += bool(found)
        clean += not found
    assert min(racy, clean) >= 20, "the programs must be of both sorts"
