"""One block tells another that what it wrote can be read."""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, cuda, simulator
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics.signals import count, look

BLOCK_SIZE = 64


@cuda.jit
def pass_on_kernel(x, y, flags, tickets):
    """The first block to start doubles x, the second one waits for that and adds one."""
    shared = cuda.shared.array(1, np.int32)
    tid = cuda.threadIdx.x
    if tid == 0:
        shared[0] = cuda.atomic.add(tickets, 0, 1)
    cuda.syncthreads()
    if shared[0] == 0:
        y[tid] = 2 * x[tid]
        cuda.syncthreads()
        if tid == 0:
            count(flags, 1, 3)
    else:
        if tid == 0:
            while look(flags, 1) < 3:
                pass
        cuda.syncthreads()
        y[BLOCK_SIZE + tid] = y[tid] + 1


@cuda.jit
def counting_kernel(flags, before):
    if cuda.threadIdx.x == 0:
        before[cuda.blockIdx.x] = count(flags, 0, 1)


@cuda.jit
def hasty_kernel(x, y, flags):
    tid = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        y[tid] = 2 * x[tid]
        if tid == 0:  # the other threads may not have written
            count(flags, 0, 1)
    else:
        if tid == 0:
            while look(flags, 0) < 1:
                pass
        cuda.syncthreads()
        y[BLOCK_SIZE + tid] = y[tid] + 1


def tensors(*sizes, dtype=torch.float32):
    made = [torch.zeros(n, dtype=dtype, device="cpu" if SIMULATED else "cuda") for n in sizes]
    return [t.numpy() for t in made] if SIMULATED else made


def host(array):
    return array if SIMULATED else array.cpu().numpy()


def test_what_was_written_before_is_seen():
    for _ in range(3 if SIMULATED else 200):
        x, y = tensors(BLOCK_SIZE, 2 * BLOCK_SIZE)
        flags, tickets = tensors(2, 1, dtype=torch.int32)
        x += 5
        with simulator.sanitize() as report:
            launch(pass_on_kernel, 2, BLOCK_SIZE, x, y, flags, tickets)
        assert not SIMULATED or not report.findings, report.findings
        assert (host(y)[:BLOCK_SIZE] == 10).all() and (host(y)[BLOCK_SIZE:] == 11).all()


def test_count_returns_what_was_before():
    flags, before = tensors(1, 20, dtype=torch.int32)
    launch(counting_kernel, 20, 32, flags, before)
    assert sorted(host(before)) == list(range(20)) and host(flags)[0] == 20


@pytest.mark.skipif(not SIMULATED, reason="a race: on a GPU it may go well")
def test_the_sanitizer_sees_who_was_not_waited_for():
    x, y = tensors(BLOCK_SIZE, 2 * BLOCK_SIZE)
    (flags,) = tensors(1, dtype=torch.int32)
    with simulator.sanitize() as report:
        launch(hasty_kernel, 2, BLOCK_SIZE, x, y, flags)
    assert any(finding.kind == "race" or "race" in finding.message for finding in report.findings)


@pytest.mark.skipif(SIMULATED, reason="the compiler's types")
def test_flags_of_another_type_are_refused():
    with pytest.raises(Exception, match="count takes an array of int32"):
        launch(counting_kernel, 1, 32, *tensors(1, 20))
