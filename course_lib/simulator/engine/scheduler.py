"""The scheduler: threads of a block take turns, and switch only where they must wait.

A thread is either a plain call (a kernel that never waits), a generator or a greenlet. The last
two look the same from here: `thread.resume(value)` runs it until it waits, and returns what it
waits for; StopIteration says that it has finished. What it waits for is `BARRIER`, `SPIN`, `POLL`,
or a tuple whose first item is called as `handler(block, thread, operation)`.
"""

import contextvars

from course_lib.simulator import errors
from course_lib.simulator.engine import greenlets
from course_lib.simulator.engine.report import annotate

WARP_SIZE = 32
FULL_MASK = 0xFFFFFFFF
#: A loop that may be waiting for another thread lets others run once in so many iterations.
SPIN_STRIDE = 16
#: How often a block's spinning threads are tried again before other blocks get a turn.
PATIENCE = 16


class _Wait:
    def __init__(self, name):
        self.name = name

    def __repr__(self):
        return f"<{self.name}>"


BARRIER = _Wait("cuda.syncthreads()")
SPIN = _Wait("a loop that may wait for memory to change")
#: After each round of a loop that asks memory the same again and does nothing else.
POLL = _Wait("a loop that only waits for memory to change")


def pause(block, thread, op):
    """Handler of PAUSE."""
    block.spinning.append(thread)


#: What a thread yields before a store or atomic in the order "interleaved": others have a turn.
PAUSE = (pause,)


class Thread:
    """One CUDA thread: its indices, its block, and how to resume it."""

    __slots__ = ("tx", "ty", "tz", "tid", "lane", "b", "warp", "resume", "switch", "value", "op",
                 "handle", "accesses", "postponed")

    def __init__(self, tx, ty, tz, tid, block):
        self.tx, self.ty, self.tz, self.tid = tx, ty, tz, tid
        self.lane = tid % WARP_SIZE
        self.b = block
        self.warp = None
        self.value = self.op = self.handle = self.resume = self.switch = None
        self.accesses = 0
        self.postponed = []

    @property
    def index(self):
        """(x, y, z) within the block."""
        return self.tx, self.ty, self.tz

    def pause(self):
        """Called at each access of a function that could not be rewritten: let others run.

        Its loops cannot be seen, and one of them may wait for another thread to write.
        """
        self.accesses += 1
        if self.accesses % SPIN_STRIDE == 0:
            self.switch(SPIN)


class Warp:
    """32 threads with consecutive numbers: which still live, and what they wait for together."""

    __slots__ = ("live", "groups", "gathering")

    def __init__(self, live):
        self.live = live
        self.groups = {}
        self.gathering = []


class Block:
    """One thread block: its place in the grid, its shared memory, its threads' states."""

    __slots__ = ("x", "y", "z", "ox", "oy", "oz", "dx", "dy", "dz", "gx", "gy", "gz",
                 "launch", "arrays", "static_bytes", "dynamic", "threads", "warps", "live",
                 "ready", "barrier", "votes", "spinning", "at_cluster", "at_grid", "patience",
                 "cluster")

    thread_type = Thread

    def __init__(self, launch, index):
        self.launch = launch
        self.dx, self.dy, self.dz = launch.block_dim
        self.gx, self.gy, self.gz = launch.grid_dim
        self.patience = 0 if launch.order == "interleaved" else PATIENCE
        self.cluster = None
        self.move(index)

    def move(self, index):
        """Become the block at `index`, with fresh shared memory."""
        self.x, self.y, self.z = index
        self.ox, self.oy, self.oz = self.x * self.dx, self.y * self.dy, self.z * self.dz
        self.arrays = {}
        self.static_bytes = 0
        self.dynamic = None

    @property
    def index(self):
        """(x, y, z) within the grid."""
        return self.x, self.y, self.z

    @property
    def rank(self):
        """Which block of its cluster it is."""
        return self.x % self.launch.cluster

    def make_threads(self):
        """All threads, in order of x, then y, then z."""
        threads, tid, make = [], 0, self.thread_type
        for z in range(self.dz):
            for y in range(self.dy):
                for x in range(self.dx):
                    threads.append(make(x, y, z, tid, self))
                    tid += 1
        return threads

    def start(self):
        """Make the threads ready to run."""
        launch = self.launch
        self.threads = threads = self.make_threads()
        self.live = count = len(threads)
        self.warps = [Warp((1 << min(WARP_SIZE, count - first)) - 1)
                      for first in range(0, count, WARP_SIZE)]
        launch.program.start(launch, threads)
        for thread in threads:
            thread.warp = self.warps[thread.tid // WARP_SIZE]
        self.ready = launch.ordered(threads)
        self.barrier, self.votes, self.spinning = [], [], []
        self.at_cluster, self.at_grid = [], []

    def advance(self):
        """Run until no thread of this block can go on without another block."""
        launch = self.launch
        thread, in_vain = None, False
        try:
            while True:
                while self.ready:
                    ready, self.ready = self.ready, []
                    arrive, asked = self.barrier.append, 0
                    for thread in ready:
                        try:
                            op = thread.resume(thread.value)
                        except StopIteration:
                            self.exit(thread)
                            continue
                        if op is BARRIER:
                            arrive(thread)
                        elif op is SPIN:
                            thread.op = op
                            self.spinning.append(thread)
                            launch.steps += SPIN_STRIDE
                            if launch.steps > launch.max_steps:
                                launch.fail_endless()
                        elif op is POLL:
                            thread.op = op
                            self.spinning.append(thread)
                            asked += 1
                        else:
                            thread.op = op
                            op[0](self, thread, op)
                    if self.barrier and len(self.barrier) == self.live:
                        self.release_barrier()
                    if asked:
                        launch.steps += SPIN_STRIDE + asked // 8
                        if launch.steps > launch.max_steps:
                            launch.fail_endless()
                    in_vain = asked == len(ready)
                    launch.moved |= not in_vain
                if self.gather_active():
                    continue
                if not self.spinning or self.patience == 0 or (
                        in_vain and asked == len(self.spinning)):
                    return  # nothing in this block changes what its threads wait for
                self.patience -= 1
                self.ready, self.spinning = self.spinning, []
        except errors.SimulatorError:
            raise
        except Exception as error:
            raise annotate(error, thread)  # noqa: B904

    def waiting_for(self, thread):
        """What `thread`, which is alive, waits for, in words."""
        if thread in self.barrier:
            return "wait at a block barrier"
        if thread in self.at_cluster:
            return "wait at the barrier of the cluster"
        if thread in self.at_grid:
            return "wait at the grid barrier"
        if thread in self.spinning or thread in self.ready:
            return "go round a loop"
        for key, group in thread.warp.groups.items():
            if any(entry[0] is thread for entry in group.values()):
                return f"wait for the lanes of mask {key[1]:#010x} at a warp operation"
        return "run"

    def release_barrier(self):
        """Every live thread has arrived: let them go on."""
        released, self.barrier = self.barrier, []
        if self.votes:
            self.count_votes(released)
        self.ready = self.launch.shuffled(released)

    def count_votes(self, released):
        """Answer syncthreads_count, _and and _or."""
        votes, self.votes = self.votes, []
        count = sum(1 for _, _, predicate in votes if predicate)
        for thread, kind, _ in votes:
            if kind == "count":
                thread.value = count
            elif kind == "and":
                thread.value = int(count == len(votes))
            else:
                thread.value = int(count > 0)

    def exit(self, thread):
        """`thread` has finished; whoever waited for it alone may go on."""
        self.live -= 1
        self.launch.steps = 0
        thread.resume = None
        warp = thread.warp
        warp.live &= ~(1 << thread.lane)
        if warp.groups:
            for key in list(warp.groups):
                complete_group(self, warp, key)

    def finish_group(self, warp, key):
        """The lanes have met for the warp operation key = (compute, mask): let them go on."""
        group = warp.groups.pop(key)
        key[0](group)
        self.ready += self.launch.shuffled([entry[0] for entry in group.values()])

    def gather_active(self):
        """Answer activemask: the lanes that wait at one place, when no other can come."""
        found = False
        for warp in self.warps:
            if warp.gathering:
                waiting, warp.gathering = warp.gathering, []
                places = {}
                for thread, place in waiting:
                    places.setdefault(place, []).append(thread)
                for threads in places.values():
                    mask = 0
                    for thread in threads:
                        mask |= 1 << thread.lane
                    for thread in threads:
                        thread.value = mask
                    self.ready += threads
                found = True
        return found


def complete_group(block, warp, key):
    """Finish the warp operation `key` if every live lane of its mask has arrived."""
    group = warp.groups[key]
    if group and len(group) == (key[1] & warp.live).bit_count():
        block.finish_group(warp, key)


def warp_operation(block, thread, op):
    """Handler of every collective of a warp: op = (this, compute, mask, payload)."""
    warp = thread.warp
    _, compute, mask, payload = op
    key = compute, mask
    group = warp.groups.get(key)
    if group is None:
        group = warp.groups[key] = {}
    group[thread.lane] = (thread, payload)
    if len(group) == (mask & warp.live).bit_count():
        block.finish_group(warp, key)


def vote_at_barrier(block, thread, op):
    """Handler of syncthreads_count, _and, _or: op = (this, kind, predicate)."""
    block.votes.append((thread, op[1], op[2]))
    block.barrier.append(thread)


def wait_for_cluster(block, thread, op):
    """Handler of the barrier of a cluster."""
    block.at_cluster.append(thread)


def resident_blocks(block_dim):
    """How many blocks run at once on 132 multiprocessors of 2048 threads and 32 blocks each."""
    return 132 * min(32, 2048 // (block_dim[0] * block_dim[1] * block_dim[2]))


def wait_for_grid(block, thread, op):
    """Handler of the grid barrier; LaunchError if a GPU could not hold all blocks at once."""
    if not block.at_grid:
        launch = block.launch
        count = launch.grid_dim[0] * launch.grid_dim[1] * launch.grid_dim[2]
        most = resident_blocks(launch.block_dim)
        if count > most:
            raise errors.LaunchError(
                f"a grid barrier needs all blocks on the GPU at once: {launch.name} has {count:,} "
                f"blocks of {launch.block_dim}, and {most:,} fit")
    block.at_grid.append(thread)


def start_calls(function):
    """A `start` for programs whose threads never wait."""

    def start(launch, threads):
        for thread in threads:
            thread.resume = _call_resume(function, thread, launch.args)

    return start


def _call_resume(function, thread, args):
    def resume(value):
        function(thread, *args)
        raise StopIteration

    return resume


def start_generators(function):
    """A `start` for programs rewritten into generators."""

    def start(launch, threads):
        args = launch.args
        for thread in threads:
            thread.handle = generator = function(thread, *args)
            thread.resume = generator.send

    return start


def start_greenlets(function):
    """A `start` for programs whose threads are greenlets."""
    kind = greenlets.kind()

    def start(launch, threads):
        args = launch.args
        context = contextvars.copy_context()
        for thread in threads:
            thread.handle = task = kind(function)
            task.thread = thread
            # A greenlet starts with an empty context, and NumPy keeps its error state in there.
            task.gr_context = context.copy()
            thread.switch = task.parent.switch
            thread.resume = _greenlet_resume(task, thread, args)

    return start


def _greenlet_resume(task, thread, args):
    def first(value):
        thread.resume = resume
        result = task.switch(thread, *args)
        if task.dead:
            raise StopIteration
        return result

    def resume(value):
        result = task.switch(value)
        if task.dead:
            raise StopIteration
        return result

    return first
