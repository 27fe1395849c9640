"""All-reduce: several ranks have a buffer each, and all get the sum of all.

A rank is a GPU; or, on one GPU and in the simulator, a group of blocks that stands for one. With
`n` numbers in each of `world` buffers, so many come into each rank from others:

======== ================================================= ==================== ==================
rung     how                                               numbers              flags a rank waits
                                                                                for, one after one
======== ================================================= ==================== ==================
`gather` each rank reads all buffers and adds them in the   (world − 1)·n        2
         order of the ranks
`ring`   chunks go round from neighbour to neighbour:       2·(world − 1)/world  2·(world − 1)
         reduce-scatter, then all-gather                    ·n
======== ================================================= ==================== ==================

So the ring moves about 2·n numbers however many ranks there are, which is the least that any
all-reduce between pairs of ranks moves; and the more ranks, the longer its way for few numbers.
The sums have a fixed order: all ranks hold the same bits, and two runs agree bit for bit. Patarasuk
and Yuan, Bandwidth optimal all-reduce algorithms (2009); NCCL has the ring as one of its own.
"""

import sys

from course_lib.kernels.all_reduce import gather, ring
from course_lib.kernels.all_reduce.memory import (
    MOST_BLOCKS,
    MOST_RANKS,
    Memory,
    Ranks,
    Shares,
    addresses_of,
)
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import chip_of, launch, on_gpu, prepare
from course_lib.runtime.host.outputs import share_memory
from course_lib.runtime.intrinsics import VECTOR_BYTES

DTYPES = ("float32", "float64", "int32")
BLOCK_SIZE = 512
LINE = 32  # elements: parts begin where a line of the L2 cache may
LEAST_PART = 4 * BLOCK_SIZE  # elements for a block, before there is another one
BLOCKS_OF_A_RANK = 64  # at most, where each rank has a GPU

#: Whether float32 is moved by vectors -> kernel.
RING_KERNELS = {vectors: ring.ring_kernel_of(vectors) for vectors in (True, False)}
_kept = {}  # (kind of array, dtype, devices of the ranks) -> Memory


def all_reduce(buffers, *, variant=AUTO):
    """Replace each of `buffers` by the sum of all, in place.

    buffers  (world, n), a row for each rank, on one device; or a list of arrays of one shape, one
             for each rank: all on one device, or PyTorch tensors each on a GPU of its own.
             Contiguous, float32, float64 or int32, 1 to 8 ranks
    variant  the rung: "gather" or "ring"

    As `torch.cuda.nccl.all_reduce` with the sum, and like all launches asynchronous: work on each
    GPU's current stream sees the sum. One call after the other: calls with buffers on the same
    devices share memory that is kept for them, so those on other streams must be put in order, as
    those on one NCCL communicator. A CUDA graph can hold a call once one of its size has been made.

    Raises ArrayError for a wrong dtype, shape or device and for buffers that share memory,
    ValueError for a wrong variant or number of ranks, LaunchError for GPUs that can't access each
    other.
    """
    ranks = _ranks_of(buffers)
    rung = ALL_REDUCE.rung(variant, ranks[0])
    if len(ranks) == 1 or not arrays.size_of(ranks[0]):
        return
    devices = tuple(arrays.describe(rank).device if on_gpu() else 0 for rank in ranks)
    key = type(ranks[0]), arrays.dtype_name(ranks[0]), devices
    try:
        rung.launch(key, buffers if hasattr(buffers, "shape") else ranks[0], ranks)
    except BaseException:
        _kept.pop(key, None)  # flags of some ranks may be raised, and those of others not
        raise


def _ranks_of(buffers):
    """The array of each rank, checked."""
    if hasattr(buffers, "shape"):
        arrays.require(buffers, "buffers", dtypes=DTYPES, n_dims=2, writable=True)
        if not arrays.is_contiguous_array(buffers):
            raise arrays.ArrayError(
                f"buffers must be contiguous; the strides are {arrays.strides_of(buffers)}"
            )
        ranks = [buffers[rank] for rank in range(min(len(buffers), MOST_RANKS + 1))]
    else:
        ranks = list(buffers)
    if not 1 <= len(ranks) <= MOST_RANKS:
        found = len(buffers)
        raise ValueError(f"all_reduce takes 1 to {MOST_RANKS} buffers, not {found}")
    if not hasattr(buffers, "shape"):
        _check_each(ranks)
    return ranks


def _check_each(ranks):
    arrays.require(ranks[0], "buffers[0]", dtypes=DTYPES)
    shape, dtypes = tuple(ranks[0].shape), (arrays.dtype_name(ranks[0]),)
    for number, rank in enumerate(ranks):
        name = f"buffers[{number}]"
        arrays.require(rank, name, shape=shape, dtypes=dtypes, writable=True)
        if type(rank) is not type(ranks[0]):
            raise arrays.ArrayError(
                f"{name} is a {type(rank).__name__}, but buffers[0] a {type(ranks[0]).__name__}"
            )
        if not arrays.is_contiguous_array(rank):
            raise arrays.ArrayError(
                f"{name} must be contiguous; its strides are {arrays.strides_of(rank)}"
            )
        for other in range(number):
            if share_memory(rank, ranks[other]):
                raise arrays.ArrayError(f"buffers[{other}] and {name} share memory")


def _memory_of(key, ranks, n_elements):
    """The ranks' `Memory`, with inboxes of so many elements."""
    devices = key[-1]
    if len(set(devices)) not in (1, len(devices)):
        raise arrays.ArrayError(
            f"buffers must be on one GPU, or each on one of its own, not on {devices}"
        )
    memory = _kept.get(key)
    if memory is not None and n_elements <= memory.n_elements:
        return memory
    torch = sys.modules.get("torch") if arrays.is_tensor(ranks[0]) else None
    if torch and on_gpu() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "all_reduce needs memory that it keeps, which can't be made while a CUDA graph is "
            "being captured: call it once before, with buffers of this size"
        )
    one_device = len(set(devices)) == 1
    if not one_device:
        if torch is None:
            raise arrays.ArrayError("buffers on several GPUs must be PyTorch tensors")
        from course_lib.runtime.host.peers import let_access

        let_access(devices)
    if memory is None:
        memory = _kept[key] = Memory(ranks, one_device)
    memory.grow(n_elements)
    for device in set(devices) if torch and on_gpu() else ():
        torch.cuda.synchronize(device)  # the flags are zeros, and nobody uses older inboxes
    return memory


def _shared_out(n, at_once):
    """(part, blocks of a rank): `n` elements shared out, when so many of its blocks run at once.

    Blocks wait for each other, so all must: one for each multiprocessor at most.
    """
    n_blocks = max(1, min(n // LEAST_PART, at_once, BLOCKS_OF_A_RANK, MOST_BLOCKS))
    part = _rounded(-(-n // n_blocks), LINE)
    return part, -(-n // part)


def _rounded(n, step):
    return -(-n // step) * step


def _launch(kernel, key, whole, ranks, covered, chunk, n_elements, width):
    world, n = len(ranks), arrays.size_of(ranks[0])
    memory = _memory_of(key, ranks, n_elements)
    several = len(set(key[-1])) > 1
    at_once = min(chip_of(rank).multiprocessors for rank in ranks) // (1 if several else world)
    part, n_blocks = _shared_out(covered, at_once)
    block = min(BLOCK_SIZE, _rounded(-(-part // width), 32))
    places = [addresses_of(each) for each in (ranks, memory.inboxes, memory.flags)]
    shares = Shares(n, chunk, part, world, n_blocks, 0)
    if not several:
        models = whole, memory.all_inboxes, memory.all_flags
        launch(kernel, world * n_blocks, block, *models, *places, shares, flat=True)
        return
    calls = [
        (kernel, n_blocks, block, *models, *places, shares._replace(first=rank))
        for rank, models in enumerate(zip(ranks, memory.inboxes, memory.flags, strict=True))
    ]
    if kernel not in memory.ready:  # a kernel that runs must not wait for one that is compiled
        for call in calls:
            prepare(*call, flat=True)
        memory.ready.add(kernel)
    for call in calls:
        launch(*call, flat=True)


def _launch_gather(key, whole, ranks):
    n = arrays.size_of(ranks[0])
    _launch(gather.gather_kernel, key, whole, ranks, n, n, n, 1)


def _launch_ring(key, whole, ranks):
    world = len(ranks)
    chunk = _rounded(-(-arrays.size_of(ranks[0]) // world), ring.WIDTH)
    vectors = key[1] == "float32" and all(
        arrays.address_of(rank) % VECTOR_BYTES == 0 for rank in ranks
    )
    _launch(
        RING_KERNELS[vectors],
        key,
        whole,
        ranks,
        chunk,
        chunk,
        (world - 1) * chunk,
        ring.WIDTH if vectors else 1,
    )


ALL_REDUCE = Ladder(
    Rung("gather", _launch_gather, (gather.gather_kernel,)),
    Rung("ring", _launch_ring, tuple(RING_KERNELS.values())),
    auto="ring",
)


def specialisations():
    """(label, kernel, argument types) of all that the launchers compile; arrays as (dtype, 1)."""
    for dtype in DTYPES:
        types = [(dtype, 1), (dtype, 1), ("int64", 1), Ranks, Ranks, Ranks, Shares]
        yield f"all_reduce gather {dtype}", gather.gather_kernel, types
        yield f"all_reduce ring, elements, {dtype}", RING_KERNELS[False], types
        if dtype == "float32":
            yield f"all_reduce ring, vectors, {dtype}", RING_KERNELS[True], types
