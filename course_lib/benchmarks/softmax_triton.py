"""Softmax in Triton, a peer: the fused kernel of its tutorial, given its best settings.

A program holds a row, padded to a power of two, in its registers, and goes on to the row n further
down, n being the number of programs. Needs Triton, and is imported only where it is installed.
"""

import itertools

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

from course_lib import bench

MOST_STAGE_BYTES = 200 * 1024  # of shared memory, for rows on their way


@triton.jit
def softmax_kernel(
    x, y, n_rows, N_COLS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, LOG: tl.constexpr
):
    cols = tl.arange(0, BLOCK)
    inside = cols < N_COLS
    for row in tl.range(tl.program_id(0), n_rows, tl.num_programs(0), num_stages=STAGES):
        start = tl.full((), N_COLS, tl.int64) * row
        values = tl.load(x + start + cols, mask=inside, other=float("-inf")).to(tl.float32)
        values -= tl.max(values, axis=0)
        exponentials = tl.exp(values)
        total = tl.sum(exponentials, axis=0)
        if LOG:
            result = values - tl.log(total)
        else:
            result = exponentials / total
        tl.store(y + start + cols, result, mask=inside)


def run(x, y, *, n_programs, num_warps, stages, log):
    """y = softmax or log-softmax of the rows of x, with these settings."""
    n_rows, n_cols = x.shape
    block = triton.next_power_of_2(n_cols)
    softmax_kernel[(n_programs,)](x, y, n_rows, n_cols, block, stages, log, num_warps=num_warps)


def settings(n_rows, n_cols, itemsize, n_multiprocessors):
    """Settings worth trying: a program for each row, or a few for each multiprocessor."""
    block = triton.next_power_of_2(n_cols)
    warps = [n for n in (1, 2, 4, 8, 16, 32) if 4 <= block // (32 * n) <= 32] or [16, 32]
    for num_warps in warps[-3:]:
        yield {"n_programs": n_rows, "num_warps": num_warps, "stages": 1}
    for num_warps, stages in itertools.product(warps[-2:], (2, 4)):
        if stages * block * itemsize <= MOST_STAGE_BYTES:
            for share in (2, 4, 8, 16):
                if share * num_warps <= 64 and share * n_multiprocessors < n_rows:
                    n_programs = share * n_multiprocessors
                    yield {"n_programs": n_programs, "num_warps": num_warps, "stages": stages}


def tuned(inputs, outputs, *, log, calls):
    """function(i), on buffer set i, with the settings that are fastest on this device.

    None where a row is too long for all of them.
    """
    sets = len(inputs)
    n_rows, n_cols = inputs[0].shape
    n_multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    candidates = {}
    for found in settings(n_rows, n_cols, inputs[0].itemsize, n_multiprocessors):

        def candidate(i, found=found):
            run(inputs[i % sets], outputs[i % sets], **found, log=log)
            return outputs[i % sets]

        try:
            candidate(0)
        except OutOfResources:
            continue
        candidates[tuple(found.items())] = candidate
    if not candidates:
        return None
    timings = bench.device_times(candidates, calls=calls, rounds=5)
    return candidates[min(timings, key=lambda key: timings[key].microseconds)]
