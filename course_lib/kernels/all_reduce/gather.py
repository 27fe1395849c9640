"""All-reduce by reading everything: each rank adds up all buffers for itself.

Nobody may read a buffer before its rank has come, nor overwrite it before all have read it. So the
ranks meet twice: before they add, and before they replace their buffers by the sum, which waits in
their inboxes. Block b of a rank works on one part of the buffer and meets block b of the others.
"""

from course_lib import cuda
from course_lib.kernels.all_reduce.memory import MEETINGS, MET, N_FLAGS, ROW
from course_lib.runtime.intrinsics.pointers import array_at
from course_lib.runtime.intrinsics.system_signals import load_acquire, store_release


@cuda.jit(device=True)
def meet(flags, all_flags, rank, world, row, meeting):
    """Until this block of every rank has come. Thread q tells rank q, and waits for it."""
    cuda.syncthreads()
    q = cuda.threadIdx.x
    if q < world:
        store_release(array_at(all_flags[q], N_FLAGS, flags), row + MET + rank, meeting)
        own = array_at(all_flags[rank], N_FLAGS, flags)
        while load_acquire(own, row + MET + q) < meeting:
            pass
    cuda.syncthreads()


@cuda.jit
def gather_kernel(buffer, inbox, flags, buffers, inboxes, all_flags, shares):
    """A group of blocks for each rank.

    buffer, inbox, flags          arrays of the dtypes of all ranks' ones, which alone are used
    buffers, inboxes, all_flags   `Ranks`: addresses of (n,) numbers to sum, as many in which sums
                                  wait, and (N_FLAGS,) int64
    shares                        `Shares`: `part` is one of the buffer
    """
    rank = shares.first + cuda.blockIdx.x // shares.n_blocks
    block = cuda.blockIdx.x % shares.n_blocks
    n, row = shares.n, block * ROW
    own_flags = array_at(all_flags[rank], N_FLAGS, flags)
    meetings = own_flags[row + MEETINGS]
    start = block * shares.part
    end = min(n, start + shares.part)
    own, totals = array_at(buffers[rank], n, buffer), array_at(inboxes[rank], n, inbox)

    meet(flags, all_flags, rank, shares.world, row, meetings + 1)
    for i in range(start + cuda.threadIdx.x, end, cuda.blockDim.x):
        total = array_at(buffers[0], n, buffer)[i]
        for q in range(1, shares.world):
            total += array_at(buffers[q], n, buffer)[i]
        totals[i] = total
    meet(flags, all_flags, rank, shares.world, row, meetings + 2)
    for i in range(start + cuda.threadIdx.x, end, cuda.blockDim.x):
        own[i] = totals[i]
    if cuda.threadIdx.x == 0:
        own_flags[row + MEETINGS] = meetings + 2
