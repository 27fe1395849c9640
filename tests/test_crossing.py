"""Batches that cross over to a GPU, by tensors that stand for those of one."""

import contextlib
import threading
import time
from types import SimpleNamespace

import pytest
import torch

from course_lib.runtime.host import crossing

GPU = SimpleNamespace(type="cuda")


class Tensor:
    """A number in memory that may be written again; what is done with it is noted."""

    def __init__(self, memory, thread=None):
        self.memory, self.thread, self.streams = memory, thread, []

    def is_pinned(self):
        return self.thread is not None

    def pin_memory(self):
        time.sleep(0.01)
        return Tensor(list(self.memory), threading.current_thread())

    def to(self, place, non_blocking):
        assert place is GPU and non_blocking and self.is_pinned()
        return Tensor(list(self.memory), self.thread)

    def record_stream(self, stream):
        self.streams.append(stream)


@pytest.fixture(autouse=True)
def streams(monkeypatch):
    """What is asked of `torch.cuda`: [stream that is waited for]."""
    waited = []
    stream = SimpleNamespace(synchronize=lambda: waited.append("copies"))
    cuda = SimpleNamespace(
        Stream=lambda place: stream,
        current_stream=lambda place: "current",
        stream=lambda chosen: contextlib.nullcontext(),
    )
    monkeypatch.setattr(crossing, "torch", SimpleNamespace(cuda=cuda))
    return waited


def test_batches_come_in_order_by_another_thread(streams):
    batches = [[Tensor([i]), Tensor([-i])] for i in range(5)]
    found = list(crossing.crossing(batches, GPU))
    assert [[t.memory for t in batch] for batch in found] == [[[i], [-i]] for i in range(5)]
    tensors = [tensor for batch in found for tensor in batch]
    assert all(tensor.streams == ["current"] for tensor in tensors)
    (thread,) = {tensor.thread for tensor in tensors}
    assert thread is not threading.current_thread() and not thread.is_alive()
    assert len(streams) == 5 and list(crossing.crossing([], GPU)) == []


def test_a_batch_may_lie_where_the_one_before_it_lay():
    memory, made = [0], []

    def batches():
        for i in range(5):
            memory[0] = i
            made.append(i)
            yield [Tensor(memory)]

    for i, (tensor,) in enumerate(crossing.crossing(batches(), GPU)):
        assert tensor.memory == [i]
        assert made == list(range(min(i + 2, 5)))  # the next one is on its way, and no other


def test_what_is_pinned_is_not_pinned_again():
    here = threading.current_thread()
    ((tensor,),) = crossing.crossing([[Tensor([1], here)]], GPU)
    assert tensor.thread is here


def test_an_error_and_an_early_end_leave_no_thread():
    before = threading.active_count()
    batches = crossing.crossing(([Tensor([i])] for i in range(9)), GPU)
    next(batches)
    batches.close()

    def spoilt():
        yield [Tensor([0])]
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        list(crossing.crossing(spoilt(), GPU))
    with pytest.raises(AttributeError, match="is_pinned"):
        list(crossing.crossing([["no tensor"]], GPU))
    assert threading.active_count() == before


def test_a_cpu_has_nothing_to_wait_for():
    x = torch.ones(2)
    ((found,),) = crossing.crossing([[x]], torch.device("cpu"))
    assert found is x
