"""Mailboxes between blocks, copies in groups, and who may share a mailbox."""

import numpy as np
import pytest

from course_lib import SIMULATED, cuda, simulator
from course_lib.runtime import mailboxes
from course_lib.runtime.launch import launch
from course_lib.runtime.mailbox import look, post
from course_lib.runtime.pipeline import end_group, wait_for_groups_but
from course_lib.runtime.shared import copy_async, dynamic_shared

in_simulator = pytest.mark.skipif(not SIMULATED, reason="the simulator's arrays and sanitizer")


@cuda.jit
def ring_kernel(box, y, mark):
    # Each block sends a number to the next one and waits for that of the one before.
    block, n_blocks = cuda.blockIdx.x, cuda.gridDim.x
    if cuda.threadIdx.x == 0:
        post(box, (block + 1) % n_blocks, np.float32(block) - np.float32(0.5), mark)
        value, found = look(box, block)
        while found != mark:
            value, found = look(box, block)
        y[block] = value


@cuda.jit
def pipeline_kernel(x, y):
    # Four vectors are on their way; each is looked at while the later ones still are.
    cache, tid = dynamic_shared(x), cuda.threadIdx.x
    for k in range(4):
        copy_async(cache, (k * 32 + tid) * 4, x, (k * 32 + tid) * 4)
        end_group()
    for k in range(4):
        wait_for_groups_but(3 - k)
        y[k * 32 + tid] = cache[(k * 32 + tid) * 4]


@cuda.jit
def hasty_kernel(x, y):
    cache, tid = dynamic_shared(x), cuda.threadIdx.x
    for k in range(2):
        copy_async(cache, (k * 32 + tid) * 4, x, (k * 32 + tid) * 4)
        end_group()
    wait_for_groups_but(1)
    y[tid] = cache[(32 + tid) * 4]  # of the second group, which may be on its way


@in_simulator
def test_a_word_carries_its_value_and_its_mark():
    box, y = np.full(5, -1, np.int64), np.full(5, np.nan, np.float32)
    with simulator.sanitize() as report:
        for mark in (1, 2, 2**30):
            launch(ring_kernel, 5, 32, box, y, mark, cooperative=True)
            np.testing.assert_array_equal(y, np.roll(np.arange(5) - np.float32(0.5), 1))
    assert not report, str(report)


@in_simulator
def test_groups_arrive_in_order():
    x = np.arange(512, dtype=np.float32)
    y = np.full(128, np.nan, np.float32)
    with simulator.sanitize() as report:
        launch(pipeline_kernel, 1, 32, x, y, shared_bytes=2048)
    assert not report, str(report)
    np.testing.assert_array_equal(y, x[::4])


@in_simulator
def test_what_is_read_before_its_group_arrived_is_not_there():
    x, y = np.arange(256, dtype=np.float32), np.zeros(32, np.float32)
    launch(hasty_kernel, 1, 32, x, y, shared_bytes=1024)
    assert np.isnan(y).all()


@in_simulator
def test_in_the_simulator_every_launch_gets_a_new_mailbox():
    first, second = (mailboxes.mailbox(np.empty(1), 10) for _ in range(2))
    assert first is not second and first.dtype == np.int64 and not first.any()


@pytest.mark.gpu
def test_a_mailbox_for_each_stream_and_for_each_graph():
    import torch

    x = torch.empty(1, device="cuda")
    here = mailboxes.mailbox(x, 10)
    assert mailboxes.mailbox(x, 20) is here
    larger = mailboxes.mailbox(x, here.shape[0] + 1)
    assert larger is not here and not larger.any()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert mailboxes.mailbox(x, 10) is not larger
    found = []
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found.append(mailboxes.mailbox(x, 10))
            assert mailboxes.mailbox(x, 10) is found[-1]
            found[-1].add_(1)
        for _ in range(2):  # cleared at the start of every replay
            graph.replay()
            assert int(found[-1].max()) == 1
    assert found[0] is not found[1] and mailboxes.mailbox(x, 10) is larger


@pytest.mark.gpu
def test_blocks_exchange_numbers_on_the_gpu():
    import torch

    box = torch.zeros(264, dtype=torch.int64, device="cuda")
    y = torch.empty(132, device="cuda")
    for mark in range(1, 200):
        launch(ring_kernel, 100, 32, box, y, mark, cooperative=True)
    expected = torch.arange(100, device="cuda").roll(1) - 0.5
    assert torch.equal(y[:100], expected)
