"""The sanitizer's view of clusters: reads of other blocks' shared memory, and their barrier."""

from course_lib.simulator.cuda_api.cluster import elsewhere
from course_lib.simulator.errors import Unreachable
from course_lib.simulator.sanitizer.findings import name_of, threads_text


class ClusterChecks:
    """The part of `checking.Checking` that looks at clusters."""

    def load_cluster(self, thread, number, array, i, rank):
        try:
            there = elsewhere(thread, array, rank)
        except Unreachable as error:
            if error.exited is None:
                self.no_such_rank(thread, number, rank)
            else:
                self.read_after_exit(thread, number, error.exited, array.memory, i)
            return self.garbage(array)
        value = self.load1(thread, number, there, i)
        owner = there.memory.owner
        if owner is not thread.b:
            owner.readers[thread, number] = thread.stamp, there.memory, i
        return value

    def check_readers(self, block):
        """A block has exited: whoever read its shared memory must be known to have done so."""
        ends = {id(thread.known): thread for thread in block.threads}.values()
        for (thread, number), (stamp, memory, i) in block.readers.items():
            if not any(self.in_order(end, stamp) for end in ends):
                self.read_after_exit(thread, number, block, memory, i)
        block.readers.clear()

    def cluster_released(self, cluster, threads):
        for block, group in zip(cluster.blocks, threads, strict=True):
            block.readers.clear()
            if group and block.live < len(block.threads):
                self.exited_before(block, group)
            if any(thread.where != group[0].where for thread in group):
                self.different_barriers(block, group)
        waiting = [thread for group in threads for thread in group]
        for block, group in zip(cluster.blocks, threads, strict=True):
            if not group and not all(thread.left_at for thread in block.threads):
                self.block_never_came(block, waiting)
        self.cluster_barriers.update(thread.at for thread in waiting)
        self.pass_cluster([group for group in threads if group])

    # -- findings --------------------------------------------------------------------------------

    def block_name(self, block):
        """A block as a sentence names it."""
        return name_of(block.index, self.launch.grid_dim)

    def no_such_rank(self, thread, number, rank):
        """A read from a block that the cluster does not have."""
        site, name = self.sites[number], self.thread_name(thread.index)
        size = self.launch.cluster

        def sentence():
            return (f"thread {name} of block {self.block_name(thread.b)} reads from rank {rank} "
                    f"of its cluster on line {site.line}, but there are {size} blocks in it; keep "
                    f"the rank from 0 to {size - 1}")

        self.report((number, "rank"), "out-of-bounds", site, (name,), thread.b.index, sentence)

    def read_after_exit(self, thread, number, owner, memory, i):
        """A read of a block's shared memory which that block does not wait for."""
        site, name = self.sites[number], self.thread_name(thread.index)

        def sentence():
            other = self.block_name(owner)
            return (f"thread {name} of block {self.block_name(thread.b)} reads shared "
                    f"`{self.element(number, memory, i)}` of block {other} on line {site.line}, "
                    f"but nothing keeps block {other} from exiting first, and its shared memory "
                    f"with it; let every thread of the cluster reach a cluster_sync() after the "
                    f"read")

        self.report((number,), "read-after-exit", site, (name,), thread.b.index, sentence)

    def block_never_came(self, block, waiting):
        """A block ran to its end while others of its cluster wait for it."""
        site = self.sites[waiting[0].at]

        def sentence():
            return (f"no thread of block {self.block_name(block)} reaches the barrier of the "
                    f"cluster on line {site.line} that {threads_text(self.names(waiting[:1]))} "
                    f"of block {self.block_name(waiting[0].b)} waits at; every thread of every "
                    f"block of the cluster must reach it, and equally often, so take it out of "
                    f"the branch or loop")

        self.report((site.number,), "barrier-mismatch", site,
                    self.names([block.threads[0], waiting[0]]), block.index, sentence)
