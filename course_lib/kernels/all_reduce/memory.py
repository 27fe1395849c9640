"""What the ranks keep from call to call: an inbox and flags each.

Flags are never set back. Each counts up from call to call, and whoever waits knows the number that
it waits for from a count of its own. So a call finds no flag that an earlier one has left raised,
and a CUDA graph can repeat it.

A rank has a row of `ROW` numbers for each of its blocks, 128 bytes: a line of the L2 cache.

=================== ============================================================================
`MET` + q           how often rank q has come to a meeting: rank q writes
`ARRIVED`           how many chunks have arrived from the left neighbour: that one writes
`MEETINGS`          how many meetings the block has had: its own
`STEPS`             how many steps of the ring the block has made: its own
=================== ============================================================================
"""

from typing import NamedTuple

from course_lib import cuda
from course_lib.runtime.host import arrays
from course_lib.runtime.intrinsics import VECTOR_BYTES
from course_lib.runtime.intrinsics.system_signals import load_acquire, store_release

MOST_RANKS = 8  # the GPUs of one machine
MOST_BLOCKS = 256  # of a rank
ROW = 16
MET, ARRIVED, MEETINGS, STEPS = 0, 8, 9, 10
N_FLAGS = MOST_BLOCKS * ROW


class Ranks(NamedTuple):
    """A number for each rank: where something of it lies, as an address. 0 for what is no rank."""

    r0: int
    r1: int
    r2: int
    r3: int
    r4: int
    r5: int
    r6: int
    r7: int


class Shares(NamedTuple):
    """Which rank and block works on what. Numbers of elements, but for the last three."""

    n: int  # of each buffer
    chunk: int  # that one rank adds up: `world` of them cover the buffer
    part: int  # of a chunk, or of the buffer, that one block works on
    world: int
    n_blocks: int  # of a rank
    first: int  # the rank of the launch's first block


@cuda.jit(device=True)
def raise_flag(flags, i, value):
    """The block has written: let who reads flags[i] know. For all threads of a block."""
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        store_release(flags, i, value)


@cuda.jit(device=True)
def wait_for_flag(flags, i, value):
    """Until flags[i] has come to `value`; then the block may read. For all threads of a block."""
    if cuda.threadIdx.x == 0:
        while load_acquire(flags, i) < value:
            pass
    cuda.syncthreads()


def addresses_of(parts):
    """The `Ranks` of an array for each rank."""
    found = [arrays.address_of(part) for part in parts]
    return Ranks(*found, *[0] * (MOST_RANKS - len(found)))


class Memory:
    """An inbox and flags for each rank; `models` has an array of each, of its dtype and device.

    one_device  whether all are on one device; they then are rows of one array, so that a launch
                can be given all of them
    """

    def __init__(self, models, one_device):
        # Of the models themselves nothing is kept: they are the caller's.
        self._models = [arrays.empty((1,), like=model) for model in models]
        self._one_device = one_device
        self.all_flags, self.flags = self._made(N_FLAGS, "int64")
        for flags in self.flags:
            arrays.fill(flags, 0)
        self.all_inboxes, self.inboxes, self.n_elements = None, None, 0
        self.ready = set()  # kernels that are compiled and loaded on every device

    def _made(self, n, dtype=None):
        """(the array that holds all, or None; an array of `n` elements for each rank)."""
        if self._one_device:
            made = arrays.empty((len(self._models), n), like=self._models[0], dtype=dtype)
            return made, [made[rank] for rank in range(len(self._models))]
        return None, [arrays.empty((n,), like=model, dtype=dtype) for model in self._models]

    def grow(self, n):
        """Let each inbox have `n` elements or more, or twice what it had; whole vectors."""
        n = max(n, 2 * self.n_elements)
        self.n_elements = -(-n // VECTOR_BYTES) * VECTOR_BYTES  # rows of one array are aligned
        self.all_inboxes, self.inboxes = self._made(self.n_elements)
