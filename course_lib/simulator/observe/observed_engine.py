"""The scheduler's parts for an observed launch: the same turns, with every event passed on."""

from course_lib.simulator import errors
from course_lib.simulator.engine.launching import Launch
from course_lib.simulator.engine.report import annotate
from course_lib.simulator.engine.scheduler import Block, Thread
from course_lib.simulator.observe.execution import Execution, aligned
from course_lib.simulator.observe.observer import memories_of, watch_arguments, watch_within
from course_lib.simulator.observe.reporting import Reporting


class ObservedThread(Thread):
    """A thread that knows its Execution, `o`; observers may set further attributes.

    `at` is the number of the site it last waited at, `left_at` that of the `return` it took,
    `caller` that of the intrinsic's call it is in. `calls` are the calls of device functions around
    it, innermost first: (number of the site, rounds of the loops around, calls outside); `where` is
    the same of the site it last waited at.
    """

    # What follows the first line is the sanitizer's.
    __slots__ = ("o", "at", "left_at", "caller", "calls", "where",
                 "stamp", "floor", "low", "many", "slot", "key", "known", "told", "pending",
                 "unfenced", "asked_at", "__dict__")

    def __init__(self, tx, ty, tz, tid, block):
        super().__init__(tx, ty, tz, tid, block)
        self.o = block.o
        self.at = self.left_at = self.caller = 0
        self.calls = self.where = ()


class ObservedBlock(Block):
    """A block that tells its launch's Execution what happens to its threads."""

    thread_type = ObservedThread

    def __init__(self, launch, index):
        super().__init__(launch, index)
        self.o = launch.execution_for(self)
        self.watched = {}
        self.readers = {}  # the sanitizer's: what other blocks of the cluster read here, and where
        self.dynamic_memory = None
        self.next_static = 0

    def place_static(self, array, alignment):
        """The address of a new static shared array."""
        start = aligned(self.next_static, alignment or max(array.itemsize, 16))
        self.next_static = start + array.nbytes
        return start

    def start(self):
        super().start()
        self.o.block_start(self)

    def release_barrier(self):
        threads = list(self.barrier)
        super().release_barrier()
        self.o.barrier_released(self, threads)

    def finish_group(self, warp, key):
        group = warp.groups[key]
        super().finish_group(warp, key)
        self.o.warp_released(self, group)

    def exit(self, thread):
        super().exit(thread)
        self.o.exited(thread)
        if self.live == 0:
            self.o.block_end(self)


class ObservedLaunch(Launch):
    """A launch under observers."""

    block_type = ObservedBlock

    def __init__(self, program, grid_dim, block_dim, args, shared_bytes, options, name,
                 cluster, observers):
        code = program.root.__code__
        names = [*code.co_varnames[:code.co_argcount]]
        names += [f"argument {n + 1}" for n in range(len(names), len(args))]
        super().__init__(program, grid_dim, block_dim, watch_arguments(args, names),
                         shared_bytes, options, name, cluster)
        self.memories = memories_of(self.args)
        self.sites = program.observed_sites
        self.observers = observers
        executions = [made for made in (observer.execution(self) for observer in observers)
                      if made is not None]
        self.quiet = executions[-1] if executions else Execution(self)
        self.reporters = [observer for observer in observers
                          if any(hook.startswith("on_") for hook in dir(observer))]
        self.o = Reporting(self, self.reporters, self.quiet) if self.reporters else self.quiet

    def watched(self, array):
        """`array`, watched if it lies in the memory of an argument."""
        return watch_within(array, self.memories)

    def execution_for(self, block):
        """The Execution of a block's threads: without reports to observers that do not want it."""
        if not self.reporters:
            return self.quiet
        wanted = [o for o in self.reporters if o.wants_block(block)]
        if len(wanted) == len(self.reporters):
            return self.o
        return Reporting(self, wanted, self.quiet) if wanted else self.quiet

    def run(self):
        self.o.launch_start()
        try:
            super().run()
        except errors.SimulatorError as error:
            if not self.quiet.absorbs(error):
                raise
        finally:
            self.o.launch_end()

    def run_plain(self):
        function, args = self.program.function, self.args
        thread = None
        try:
            for index in self.block_indices():
                block = ObservedBlock(self, index)
                block.threads = block.make_threads()
                block.live = len(block.threads)
                block.o.block_start(block)
                exited = block.o.exited
                for thread in self.ordered(block.threads):
                    function(thread, *args)
                    exited(thread)
                block.o.block_end(block)
        except errors.SimulatorError:
            raise
        except Exception as error:
            raise annotate(error, thread)  # noqa: B904

    def is_stuck(self, block):
        while super().is_stuck(block):
            if not block.live:
                return False
            if not block.o.stuck(block):
                return True
            self.advance(block.cluster)
        return False

    def release_cluster(self, cluster):
        threads = [list(block.at_cluster) for block in cluster.blocks]
        super().release_cluster(cluster)
        self.o.cluster_released(cluster, threads)

    def release_grid(self, active):
        threads = [thread for block in active for thread in block.at_grid]
        super().release_grid(active)
        self.o.grid_released(threads)
