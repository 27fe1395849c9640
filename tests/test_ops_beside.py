"""Gradients side by side while a CUDA graph is captured: on two streams, joined again."""

import contextlib
import itertools

import pytest
import torch
from tensors import PLACE, choosing, close, randn

from course_lib import nn, ops
from course_lib.kernels import conv2d
from course_lib.ops import beside
from course_lib.ops.registration import simulate_on_cpu

LIKE = torch.empty(0)


class Stream:
    """Notes who waits for whom, and which gradients are launched where."""

    def __init__(self, name, told, number=0):
        self.name, self.told, self.device, self.stream_id = name, told, None, number

    def wait_stream(self, other):
        self.told.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def told(monkeypatch):
    """What streams are told, on stand-ins for those of a GPU."""
    told, current, names = [], [], (f"side {i}" for i in itertools.count())
    current.append(Stream("main", told, 1))

    @contextlib.contextmanager
    def within(stream):
        current.append(stream)
        try:
            yield
        finally:
            current.pop()

    monkeypatch.setattr(beside, "captured", lambda like: True)
    monkeypatch.setattr(beside, "_streams", {})
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), told))
    monkeypatch.setattr(torch.cuda, "stream", within)

    def of(needs):
        told.append(f"{current[-1].name} launches {needs}")
        return tuple(i if needed else "empty" for i, needed in enumerate(needs))

    return told, of, within


def test_weights_have_a_stream_of_their_own_and_both_join(told):
    told, of, within = told
    for _ in range(2):  # the stream is the same again
        told.clear()
        assert beside.gradients(of, (True, True, False), LIKE) == (0, 1, "empty")
        assert told == [
            "side 0 waits for main", "side 0 launches (False, True, False)",
            "main launches (True, False, False)", "main waits for side 0",
        ]  # fmt: skip
    told.clear()
    with within(Stream("another", told, 7)):  # as of a pathway of its own
        beside.gradients(of, (True, True, True), LIKE)
    assert told[0] == "side 1 waits for another" and told[-1] == "another waits for side 1"


def test_after_an_error_the_streams_have_joined(told):
    told, of, _ = told
    for fails in ((False, True, True), (True, False, False)):
        told.clear()

        def failing(needs, fails=fails):
            return 1 / 0 if needs == fails else of(needs)

        with pytest.raises(ZeroDivisionError):
            beside.gradients(failing, (True, True, True), LIKE)
        assert told[-1] == "main waits for side 0"


@pytest.mark.parametrize("needs", [(True, False, False), (False, True, True)])
def test_one_kind_of_gradient_stays_where_it_is(told, needs):
    told, of, _ = told
    beside.gradients(of, needs, LIKE)
    assert told == [f"main launches {needs}"]


def test_without_a_graph_nothing_is_split(monkeypatch):
    monkeypatch.setattr(beside, "gradients", None)
    with choosing("direct", conv2d):
        step(layers(), randn(1, 2, 5, 5))


def layers():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        nn.Conv2d(2, 3, 3, bias=False), nn.BatchNorm2d(3), nn.ConvTranspose2d(3, 2, 2, 2),
        nn.Conv2d(2, 2, 3), torch.nn.Flatten(), nn.Linear(2 * 4 * 4, 3),
    ).to(PLACE)  # fmt: skip


def step(model, x):
    y = model(x)
    y = ops.linear(y, y.new_ones(2, 3).requires_grad_(), relu=True)
    return torch.autograd.grad(y.square().sum(), list(model.parameters()))


def test_split_gradients_have_the_same_bits(monkeypatch):
    """As every layer's backward pass makes them in a graph, without the streams."""
    model, x, splits = layers(), randn(1, 2, 5, 5), []

    def gradients(of, needs, like):
        first, others = of((True, *(False for _ in needs[1:]))), of((False, *needs[1:]))
        splits.append(needs)
        return first[0], *others[1:]

    with choosing("direct", conv2d):  # which simulates fastest
        expected = step(model, x)
        monkeypatch.setattr(beside, "captured", lambda like: True)
        monkeypatch.setattr(beside, "gradients", gradients)
        found = step(model, x)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert len(splits) == 5 or not simulate_on_cpu


@pytest.mark.gpu
def test_in_a_captured_graph():
    model, x = layers(), randn(64, 2, 5, 5)
    expected = step(model, x)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step(model, x)
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        found = step(model, x)
    for _ in range(3):
        for each in found:
            each.fill_(float("nan"))
        graph.replay()
        for ours, theirs in zip(found, expected, strict=True):
            close(ours, theirs, scale=16)
