"""A launch: which blocks run when, and what those wait for that wait for each other."""

import random

import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.cuda_api.cluster import Cluster
from course_lib.simulator.engine.report import annotate, describe_waiting
from course_lib.simulator.engine.scheduler import Block

#: Rounds of the whole grid in which threads only ask and nothing changes, until they are given up.
ROUNDS_IN_VAIN = 3


class Launch:
    """One launch of a program over a grid."""

    block_type = Block

    def __init__(self, program, grid_dim, block_dim, args, shared_bytes, options, name,
                 cluster=1):
        self.program, self.args, self.name = program, args, name
        self.grid_dim, self.block_dim, self.cluster = grid_dim, block_dim, cluster
        self.shared_bytes = shared_bytes
        self.order, self.max_steps = options.order, options.max_steps
        self.progress, self.float_error = options.progress, options.float_error
        self.random = random.Random(options.seed) if options.order == "random" else None
        self.steps = self.in_vain = 0
        self.moved = False
        self.active = []

    def ordered(self, items):
        """`items` in the order of this launch, as a new list."""
        items = list(items)
        if self.order == "reverse":
            items.reverse()
        elif self.random:
            self.random.shuffle(items)
        return items

    def shuffled(self, items):
        """`items` reordered in place if the order is random."""
        if self.random:
            self.random.shuffle(items)
        return items

    def block_indices(self):
        """The (x, y, z) of every block, of each cluster's first, in the order of this launch."""
        gx, gy, gz = self.grid_dim
        gx //= self.cluster
        count = gx * gy * gz
        numbers = range(count)
        if self.order == "reverse":
            numbers = reversed(numbers)
        elif self.random:
            numbers = self.ordered(numbers)
        if self.progress:
            numbers = self.progress(numbers, total=count)
        for number in numbers:
            yield number % gx * self.cluster, number // gx % gy, number // (gx * gy)

    def clusters(self):
        """Every cluster, in the order of this launch. Without clusters, each block is its own."""
        for x, y, z in self.block_indices():
            yield Cluster([self.block_type(self, (x + rank, y, z))
                           for rank in range(self.cluster)])

    def run(self):
        """Run every block. Floating-point warnings stay off: a GPU has none."""
        told = self.float_error and (lambda kind, flag: self.float_error(kind))
        with np.errstate(all="call" if told else "ignore", under="ignore", call=told):
            if self.program.plain and self.cluster == 1:
                self.run_plain()
            else:
                self.run_scheduled()

    def run_plain(self):
        """No thread ever waits: one call per thread."""
        function, args = self.program.function, self.args
        block = thread = None
        try:
            for index in self.block_indices():
                if block is None:
                    block = Block(self, index)
                    threads = block.make_threads()
                    if self.order == "reverse":
                        threads.reverse()
                else:
                    block.move(index)
                if self.random:
                    self.random.shuffle(threads)
                for thread in threads:
                    function(thread, *args)
        except errors.SimulatorError:
            raise
        except Exception as error:
            raise annotate(error, thread)  # noqa: B904

    def run_scheduled(self):
        """Run clusters one after another; keep several alive only if they wait for each other."""
        clusters = self.clusters()
        active = self.active
        more = True
        while True:
            if more:
                cluster = next(clusters, None)
                if cluster is None:
                    more = False
                else:
                    active += cluster.blocks
                    for block in cluster.blocks:
                        block.start()
                    self.advance(cluster)
                    if any(block.live and self.is_stuck(block) for block in cluster.blocks):
                        self.fail_deadlock()
                    del active[-self.cluster:]
                    active += [block for block in cluster.blocks if block.live]
                    continue
            if not active:
                return
            self.round(active)

    def advance(self, cluster):
        """Run the blocks of a cluster until none can go on without another cluster."""
        blocks = self.ordered(cluster.blocks)
        for block in blocks:
            block.advance()
        while cluster.has_met():
            self.release_cluster(cluster)
            for block in blocks:
                block.advance()

    def release_cluster(self, cluster):
        """Every live thread of a cluster has arrived: let them go on."""
        for block in cluster.blocks:
            block.ready, block.at_cluster = self.shuffled(block.at_cluster), []

    @staticmethod
    def is_stuck(block):
        """True if nothing another block does can let `block` go on."""
        others = block.cluster.blocks if block.at_cluster else (block,)
        return not any(other.spinning or other.at_grid for other in others)

    def round(self, active):
        """All blocks have started: release the grid barrier, or let spinning threads try again."""
        if all(len(block.at_grid) == block.live for block in active):
            self.release_grid(active)
        elif any(block.spinning for block in active):
            for block in active:
                block.ready, block.spinning = block.spinning, []
        else:
            self.fail_deadlock()
        self.moved = False
        for cluster in dict.fromkeys(block.cluster for block in active):
            for block in cluster.blocks:
                block.patience = 0
            self.advance(cluster)
        active[:] = [block for block in active if block.live]
        self.in_vain = 0 if self.moved else self.in_vain + 1
        if active and self.in_vain == ROUNDS_IN_VAIN:
            self.fail_in_vain()

    def release_grid(self, active):
        """Every live thread of the grid has arrived: let them go on."""
        for block in active:
            block.ready, block.at_grid = self.shuffled(block.at_grid), []

    def fail_deadlock(self):
        """Raise Deadlock, naming who waits where."""
        raise errors.Deadlock(
            f"deadlock in {self.name}: no thread can go on.\n{describe_waiting(self.active)}")

    def fail_in_vain(self):
        """Raise Deadlock for threads that wait for memory which nobody is left to change."""
        raise errors.Deadlock(
            f"endless loop in {self.name}: all threads that are left wait, and none of them "
            f"changes what they wait for.\n{describe_waiting(self.active)}")

    def fail_endless(self):
        """Raise Deadlock for loops past the step budget."""
        raise errors.Deadlock(
            f"endless loop in {self.name}: {self.max_steps:,} loop iterations passed and no thread "
            f"finished (simulator.options(max_steps=...) allows more).\n"
            f"{describe_waiting(self.active)}")
