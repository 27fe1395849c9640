"""Counters that each launch finds at zero, and who shares them."""

import numpy as np
import pytest
import torch

from course_lib.runtime.host import counters


def test_in_the_simulator_they_are_new_each_time():
    like = np.zeros(3, np.float32)
    first, second = counters.counters(7, like), counters.counters(7, like)
    assert first.shape == (7,) and first.dtype == np.int32 and not first.any()
    first += 1
    assert not second.any()
    tensor = counters.counters(5, torch.zeros(2))
    assert tensor.dtype == torch.int32 and tensor.tolist() == [0] * 5


@pytest.mark.gpu
def test_launches_of_a_stream_share_them_and_others_do_not():
    like = torch.zeros(1, device="cuda")
    first = counters.counters(40, like)
    assert counters.counters(33, like).data_ptr() == first.data_ptr()
    assert first.numel() >= 40 and not first.any()
    with torch.cuda.stream(torch.cuda.Stream()):
        assert counters.counters(33, like).data_ptr() != first.data_ptr()
    more = counters.counters(10 * counters.PAGE, like)
    assert more.numel() >= 10 * counters.PAGE and not more.any()


@pytest.mark.gpu
@pytest.mark.parametrize("n", [8, 40 * counters.PAGE])
def test_captured_launches_have_their_own(n):
    like = torch.zeros(1, device="cuda")
    eager = counters.counters(8, like)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = [counters.counters(n, like) for _ in range(2)]
        sums = [each.sum() for each in found]
    addresses = {each.data_ptr() for each in (eager, *found)}
    assert len(addresses) == 3
    graph.replay()
    assert [int(each) for each in sums] == [0, 0]


@pytest.mark.gpu
def test_there_are_some_left_for_launches_that_are_captured():
    """Many graphs, each after a launch that was not captured: none of them sets any to zero."""
    like = torch.zeros(1, device="cuda")
    for _ in range(8):
        counters.counters(5, like)
        page, given = counters._pages[like.get_device()][-1]
        assert page.numel() - given >= counters.SPARE
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            found = counters.counters(counters.SPARE, like)
        assert found.data_ptr() == page[given:].data_ptr()
