"""Telling observers what happens in a launch, before another Execution carries it out."""

import contextlib

from course_lib.simulator import errors
from course_lib.simulator.cuda_api.cluster import elsewhere
from course_lib.simulator.engine import scheduler
from course_lib.simulator.observe.execution import LOADS, STORES, Execution, elements, is_view
from course_lib.simulator.observe.observer import Watched


def _name_of(operation):
    return getattr(operation, "__name__", "")


class Reporting(Execution):
    """Tells observers what happens, then lets another Execution carry it out."""

    def __init__(self, launch, observers, inner):
        super().__init__(launch)
        self.inner = inner
        for hook in ("load", "store", "atomic", "barrier", "barrier_release", "warp_op",
                     "warp_release", "cluster_barrier", "cluster_release", "grid_barrier",
                     "grid_release", "fence", "branch", "exit", "shared_declaration",
                     "block_start", "block_end", "launch", "launch_end"):
            found = [getattr(observer, f"on_{hook}") for observer in observers
                     if hasattr(observer, f"on_{hook}")]
            setattr(self, f"on_{hook}", found)
        # What nobody listens to goes straight to what carries it out.
        on_wait = (self.on_barrier, self.on_warp_op, self.on_cluster_barrier,
                   self.on_grid_barrier)
        for hooks, names in ((self.on_load, LOADS), (self.on_store, STORES),
                             (self.on_branch, ("branch", "loop")), (any(on_wait), ["wait"]),
                             (self.on_atomic, ["atomic"]), (self.on_fence, ["fence"])):
            if not hooks:
                for name in names:
                    setattr(self, name, getattr(inner, name))

    def touch(self, hooks, thread, number, array, index, count=None):
        """Tell of an access, unless it is outside or only makes a view of the array."""
        if not hooks or array.__class__ is not Watched:
            return
        try:
            offsets, size = elements(array, index)
        except (IndexError, TypeError):
            return
        if count is not None:
            offsets, size = offsets[:1], size * count
        site = self.launch.sites[number]
        for offset in offsets:
            for hook in hooks:
                hook(thread, site, array.memory, offset, size)

    def load(self, thread, number, array, index):
        if index.__class__ is str:
            return self.load_named(thread, number, array, index)
        if not is_view(array, index):
            self.touch(self.on_load, thread, number, array, index)
        return self.inner.load(thread, number, array, index)

    def store(self, thread, number, value, array, index):
        if index.__class__ is str:
            self.store_named(thread, number, value, array, index)
            return
        value = self.whole(thread, number, value)
        self.touch(self.on_store, thread, number, array, index)
        self.inner.store(thread, number, value, array, index)

    def store1(self, thread, number, value, array, i):
        if i.__class__ is str or value.__class__ is Watched:
            self.store(thread, number, value, array, i)
            return
        self.touch(self.on_store, thread, number, array, i)
        self.inner.store1(thread, number, value, array, i)

    def store2(self, thread, number, value, array, i, j):
        self.touch(self.on_store, thread, number, array, (i, j))
        self.inner.store2(thread, number, value, array, i, j)

    def atomic(self, thread, number, operation, array, *args):
        first = (0,) * array.ndim if _name_of(operation) == "_compare_and_swap" else args[0]
        self.touch(self.on_atomic, thread, number, array, first)
        return self.inner.atomic(thread, number, operation, array, *args)

    def relaxed_load(self, thread, number, array, index):
        if not is_view(array, index):
            self.touch(self.on_load, thread, number, array, index)
        return self.inner.relaxed_load(thread, number, array, index)

    def relaxed_store(self, thread, number, array, index, value):
        self.touch(self.on_store, thread, number, array, index)
        self.inner.relaxed_store(thread, number, array, index, value)

    def load_cluster(self, thread, number, array, i, rank):
        with contextlib.suppress(errors.Unreachable):  # for whoever carries it out to say
            self.touch(self.on_load, thread, number, elsewhere(thread, array, rank), i)
        return self.inner.load_cluster(thread, number, array, i, rank)

    def load_many(self, thread, number, array, index, count):
        self.touch(self.on_load, thread, number, array, index, count)
        return self.inner.load_many(thread, number, array, index, count)

    def store_many(self, thread, number, array, index, values):
        self.touch(self.on_store, thread, number, array, index, len(values))
        self.inner.store_many(thread, number, array, index, values)

    def begin_copy(self, thread, number, *what):
        self.inner.begin_copy(thread, number, *what)

    def finish_copy(self, thread, number, copy):
        self.touch(self.on_store, thread, number, copy.target, copy.i, len(copy.values))
        self.inner.finish_copy(thread, number, copy)

    def shared(self, thread, number, name, key, shape, dtype, alignment=None):
        is_new = key not in thread.b.watched
        array = self.inner.shared(thread, number, name, key, shape, dtype, alignment)
        if is_new:
            for hook in self.on_shared_declaration:
                hook(thread, self.launch.sites[number], array.memory)
        return array

    def local(self, thread, number, name, shape, dtype, alignment=None):
        return self.inner.local(thread, number, name, shape, dtype, alignment)

    def wait(self, thread, number, operation, rounds=()):
        site = self.launch.sites[number]
        handler = operation if operation is scheduler.BARRIER else operation[0] if (
            type(operation) is tuple) else None
        if handler is scheduler.BARRIER or handler is scheduler.vote_at_barrier:
            for hook in self.on_barrier:
                hook(thread, site)
        elif handler is scheduler.warp_operation:
            kind = site.text.partition("(")[0].rpartition(".")[2]
            for hook in self.on_warp_op:
                hook(thread, site, kind, operation[2])
        elif handler is scheduler.wait_for_cluster:
            for hook in self.on_cluster_barrier:
                hook(thread, site)
        elif handler is scheduler.wait_for_grid:
            for hook in self.on_grid_barrier:
                hook(thread, site)
        return self.inner.wait(thread, number, operation, rounds)

    def fence(self, thread, number, scope):
        for hook in self.on_fence:
            hook(thread, self.launch.sites[number], scope)
        self.inner.fence(thread, number, scope)

    def branch(self, thread, number, condition):
        taken = bool(condition)
        for hook in self.on_branch:
            hook(thread, self.launch.sites[number], taken)
        return condition

    def loop(self, thread, number, iterable):
        site = self.launch.sites[number]
        for value in iterable:
            for hook in self.on_branch:
                hook(thread, site, True)
            yield value
        for hook in self.on_branch:
            hook(thread, site, False)

    def endless_poll(self, thread, number, array):
        self.inner.endless_poll(thread, number, array)

    def returning(self, thread, number):
        self.inner.returning(thread, number)

    def launch_start(self):
        for hook in self.on_launch:
            hook(self.launch)
        self.inner.launch_start()

    def launch_end(self):
        self.inner.launch_end()
        for hook in self.on_launch_end:
            hook(self.launch)

    def block_start(self, block):
        for hook in self.on_block_start:
            hook(block)
        self.inner.block_start(block)

    def block_end(self, block):
        self.inner.block_end(block)
        for hook in self.on_block_end:
            hook(block)

    def barrier_released(self, block, threads):
        for hook in self.on_barrier_release:
            hook(block, threads)
        self.inner.barrier_released(block, threads)

    def warp_released(self, block, group):
        for hook in self.on_warp_release:
            hook(block, [entry[0] for entry in group.values()])
        self.inner.warp_released(block, group)

    def cluster_released(self, cluster, threads):
        for hook in self.on_cluster_release:
            hook([thread for group in threads for thread in group])
        self.inner.cluster_released(cluster, threads)

    def grid_released(self, threads):
        for hook in self.on_grid_release:
            hook(threads)
        self.inner.grid_released(threads)

    def exited(self, thread):
        for hook in self.on_exit:
            hook(thread)
        self.inner.exited(thread)

    def stuck(self, block):
        return self.inner.stuck(block)

    def absorbs(self, error):
        return self.inner.absorbs(error)
