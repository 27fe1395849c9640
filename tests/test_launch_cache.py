"""The launch cache: which runs are repeated without their launcher, and which never are."""

import functools
import sys
import threading

import pytest
import torch
import torchvision
from cached_launches import PLACE, difference_kernel, made, run, scale_kernel, stand_in, tensor

from course_lib import SIMULATED, ops, simulator
from course_lib.runtime.host import arrays, counters, launch_cache
from course_lib.runtime.host import launch as launching
from course_lib.runtime.host.launch import launch


@pytest.fixture(autouse=True)
def state(monkeypatch):
    return stand_in(monkeypatch)


def two_results(x, y, factor):
    """(x − factor·y, factor·y), by way of workspace."""
    scaled, copied = arrays.empty_like(x), arrays.empty_like(x)
    run(scale_kernel, y, scaled, factor)
    run(scale_kernel, scaled, copied, 1.0)
    result = arrays.empty(tuple(x.shape), like=x, channels_last=x.dim() == 4)
    run(difference_kernel, x, scaled, result)
    return result, copied


def thoughts(launcher, *calls, factor=3.0):
    """How often `launcher` thinks about calls with these pairs, which must all come out right."""
    before = launcher.thought
    for x, y in calls:
        kept = x.clone(), y.clone()
        difference, scaled = launcher(x, y, factor)
        torch.testing.assert_close(scaled, y * factor, rtol=0, atol=0)
        torch.testing.assert_close(difference, x - y * factor, rtol=0, atol=0)
        assert torch.equal(x, kept[0]) and torch.equal(y, kept[1])
        assert type(difference) is torch.Tensor and not difference.requires_grad
    return launcher.thought - before


def test_a_run_of_several_launches_and_workspace_is_repeated():
    launcher = made(two_results)
    assert thoughts(launcher, *((tensor(5, 7), tensor(5, 7)) for _ in range(5))) == 1
    first, _ = launcher(tensor(5, 7), tensor(5, 7), 3.0)
    second, _ = launcher(tensor(5, 7), tensor(5, 7), 3.0)
    assert first.data_ptr() != second.data_ptr()


def test_other_looks_are_checked_anew_after_right_ones():
    def checked(x, y, factor):
        arrays.require(y, "y", shape=x.shape, dtypes=("float32",))
        return two_results(x, y, factor)

    launcher = made(checked)
    assert thoughts(launcher, *((tensor(5, 7), tensor(5, 7)) for _ in range(3))) == 1
    for wrong in (tensor(5, 8), tensor(7, 5), tensor(35), tensor(5, 7).double()):
        for _ in range(2):
            with pytest.raises(arrays.ArrayError, match="y must"):
                launcher(tensor(5, 7), wrong, 3.0)
    assert thoughts(launcher, (tensor(5, 7), tensor(5, 7))) == 0


def test_the_results_lie_as_the_launcher_laid_them():
    launcher = made(two_results)
    shape = 2, 3, 4, 5
    for _ in range(3):
        x = tensor(*shape).contiguous(memory_format=torch.channels_last)
        y = tensor(*shape).contiguous(memory_format=torch.channels_last)
        difference, _ = launcher(x, y, 2.0)
        assert difference.is_contiguous(memory_format=torch.channels_last)
        torch.testing.assert_close(difference, x - y * 2, rtol=0, atol=0)
    assert launcher.thought == 1


def test_another_shape_layout_number_or_stream_is_another_run(state):
    launcher = made(two_results)
    pair = tensor(6, 8), tensor(6, 8)
    assert thoughts(launcher, pair, pair) == 1
    assert thoughts(launcher, (tensor(8, 6), tensor(8, 6)), (tensor(48), tensor(48))) == 2
    assert thoughts(launcher, pair, factor=4.0) == 1
    assert thoughts(launcher, pair, pair, factor=3.0) == 0
    turned = tensor(8, 6).T, tensor(8, 6).T
    assert launcher(*turned, 3.0) and launcher.thought == 5
    if SIMULATED:
        state.stream = 1
        assert thoughts(launcher, pair, pair) == 1


def test_threads_do_not_share_runs():
    launcher, pair, found = made(two_results), (tensor(9), tensor(9)), []
    assert thoughts(launcher, pair) == 1
    other = threading.Thread(target=lambda: found.append(thoughts(launcher, pair, pair)))
    other.start()
    other.join()
    assert found == [1]


def test_what_does_not_begin_on_16_bytes_is_thought_about():
    launcher = made(two_results)
    off = tensor(41)[1:], tensor(40)
    assert thoughts(launcher, (tensor(40), tensor(40)), off, off) == 3
    assert thoughts(launcher, (tensor(40), tensor(40))) == 0


def test_arrays_that_share_memory():
    launcher, x, whole = made(two_results), tensor(40), tensor(80)
    shared = (x, x), (whole[:40], whole[40:]), (whole[:40], whole[20:60]), (whole, whole.view(80))
    for first in shared:  # none of these may be taken for what all that look so do
        thoughts(launcher, first, (torch.randn_like(first[0]), torch.randn_like(first[0])), first)
    assert launcher.thought > 2


def test_absent_arrays():
    def body(x, y, z):
        result = arrays.empty_like(x)
        run(scale_kernel, x, result, 2.0 if y is None else 3.0)
        return result

    launcher = made(body, 3)
    x = tensor(12)
    for y, factor in ((None, 2.0), (tensor(12), 3.0)) * 3:
        assert torch.equal(launcher(x, y, None), x * factor)
    assert launcher.thought == 2


@pytest.mark.parametrize("what", ["filled", "copied", "looked into", "an argument", "a part"])
def test_runs_in_which_pytorch_did_more_are_never_repeated(what):
    def body(x, y):
        result = arrays.empty_like(x)
        if what == "filled":
            result.fill_(0)
        elif what == "copied":
            y = y.clone()
        elif what == "looked into":
            y = y * y.abs().max().item()
        run(difference_kernel, x, y, result)
        if what == "an argument":
            return x
        return result[: len(result) // 2] if what == "a part" else result

    launcher = made(body)
    x = tensor(40)
    for _ in range(launch_cache.TRIES + 2):
        y = tensor(40)
        expected = x - y * y.abs().max() if what == "looked into" else x - y
        found = launcher(x, y)
        if what == "an argument":
            assert found is x
        else:
            assert torch.equal(found, expected[: len(found)])
    assert launcher.thought == launch_cache.TRIES + 2


def test_a_run_without_launches_or_elements():
    launcher = made(two_results)
    for _ in range(3):
        difference, scaled = launcher(tensor(0, 4), tensor(0, 4), 3.0)
        assert difference.shape == scaled.shape == (0, 4)


def test_counters_are_kept_and_graphs_get_their_own(monkeypatch):
    zeros = torch.zeros(40, device=PLACE)
    monkeypatch.setattr(counters, "counters", lambda n, like: zeros)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def body(x):
        result = arrays.empty_like(x)
        run(difference_kernel, x, counters.counters(40, x), result)
        return result

    launcher = made(body, 1)
    for _ in range(3):
        x = tensor(40)
        assert torch.equal(launcher(x), x)
    assert launcher.thought == 1
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    launcher = made(body, 1)
    for _ in range(3):
        assert torch.equal(launcher(x), x)
    assert launcher.thought == 3


def test_the_memory_of_runs_has_its_limit(monkeypatch):
    monkeypatch.setattr(launch_cache, "MOST_REMEMBERED", 2)
    launcher = made(two_results)
    pairs = [(tensor(n), tensor(n)) for n in (4, 8, 12)]
    assert thoughts(launcher, *pairs) == 3
    assert thoughts(launcher, pairs[2], pairs[0]) == 1


class Scale:
    """A method of one launch, as softmax has; it counts how often it had to think."""

    def __init__(self, factor):
        self.factor, self.thought = factor, 0

    @launch_cache.cached_launch(1)
    def forward(self, x, *, variant="plain", out=None):
        """y = factor · x."""
        self.thought += 1
        x = x.contiguous()
        y = arrays.empty_like(x) if out is None else out
        run(scale_kernel, x, y, self.factor)
        return y


def thoughts_of(scale, *calls, **options):
    """How often `scale` thinks about calls with these tensors, all of which must come out right."""
    before = scale.thought
    for x in calls:
        assert torch.equal(scale.forward(x, **options), x * scale.factor)
    return scale.thought - before


def test_a_method_is_repeated_for_each_object_and_option():
    scale, other, x = Scale(3.0), Scale(5.0), tensor(5, 8)
    assert thoughts_of(scale, x, tensor(5, 8), torch.nn.Parameter(tensor(5, 8)).detach()) == 1
    assert thoughts_of(other, x) == 1
    assert thoughts_of(scale, x, x, variant="plain") == thoughts_of(scale, x, variant="b") == 1
    assert thoughts_of(scale, x, tensor(5, 8)) == 0
    assert scale.forward.__doc__ == "y = factor · x."


def test_a_method_runs_where_it_has_more_to_do():
    scale, x, out = Scale(2.0), tensor(40), tensor(40)
    assert thoughts_of(scale, x, tensor(41)[1:], x) == 2
    gaps = tensor(8, 8)[:, ::2]
    assert thoughts_of(scale, *[gaps] * 5) == 5  # which are copied first
    for _ in range(2):
        assert scale.forward(x, out=out) is out and torch.equal(out, x * 2)
        assert torch.equal(scale.forward(x=x), x * 2)
    assert scale.thought == 11


def test_a_cached_launcher_within_another():
    """The outer one's run is noted with the inner one's launches, whether or not it knows them."""
    inner = Scale(2.0)

    def body(x, y):
        result = arrays.empty_like(x)
        run(difference_kernel, x, inner.forward(y), result)
        return result

    assert thoughts_of(inner, tensor(16), tensor(16)) == 1
    outer = made(body)
    for _ in range(4):
        x, y = tensor(16), tensor(16)
        assert torch.equal(outer(x, y), x - 2 * y)
    assert (outer.thought, inner.thought) == (1, 2)


def test_a_repetition_calls_few_functions_of_the_course():
    """Up to the driver, or what stands in for it."""
    launcher, scale, x = made(two_results), Scale(3.0), tensor(40)
    for call, expected in (
        (lambda: scale.forward(x), ["call", "launch"]),
        (lambda: launcher(x, x + 1, 3.0), ["call", "repeat", "launch"]),
    ):
        call()
        called = []

        def note(frame, event, _, called=called):
            if event == "call" and "course_lib" in frame.f_code.co_filename:
                called.append(frame.f_code.co_name)

        sys.setprofile(note)
        call()
        sys.setprofile(None)
        assert [name for name in called if name != "on_gpu"][: len(expected)] == expected


def test_an_error_is_raised_each_time():
    @launch_cache.cached_launch(1)
    def refusing(x):
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            refusing(tensor(4))
    assert not launching._recorders


@pytest.mark.skipif(not SIMULATED, reason="in the simulator")
def test_in_the_simulator_the_launcher_always_runs(monkeypatch):
    monkeypatch.undo()
    assert thoughts_of(Scale(3.0), *[tensor(5)] * 3) == 3


def test_launches_are_recorded_of_this_thread_only():
    x, y = tensor(8), tensor(8)
    with launching.recorded() as outer:
        with launching.recorded() as record:
            launch(scale_kernel, 1, 64, x, y, 2.0, flat=True)
            thread = threading.Thread(target=lambda: launch(scale_kernel, 1, 64, y, y, 1.0))
            thread.start()
            thread.join()
    assert outer == record and len(record) == 1
    kernel, grid, block, args, options = record[0]
    assert (kernel, grid, block, args[0] is x, options["flat"]) == (scale_kernel, 1, 64, True, True)


@pytest.mark.gpu
def test_streams_of_a_gpu():
    scale, streams = Scale(3.0), [torch.cuda.Stream() for _ in range(2)]
    x = tensor(1 << 20)
    for _ in range(3):
        for each in streams:
            each.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(each):
                torch.cuda._sleep(2_000_000)
                moved = x + 1
                y = scale.forward(moved)
            torch.cuda.current_stream().wait_stream(each)
            assert torch.equal(y, (x + 1) * 3)
    assert scale.thought == 2


@pytest.mark.gpu
def test_in_a_captured_graph():
    scale, x = Scale(3.0), tensor(64)
    scale.forward(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(2):  # launched, then repeated, both into the graph
            y = scale.forward(x)
    x.fill_(2)
    graph.replay()
    assert y.eq(6).all()


@pytest.mark.gpu
def test_another_gpu_than_the_current_one():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    scale = Scale(3.0)
    for _ in range(2):
        for place in ("cuda:1", "cuda:0"):
            x = torch.randn(100, device=place)
            y = scale.forward(x)
            assert y.device == x.device and torch.equal(y, x * 3)
    assert scale.thought == 2 and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_under_the_sanitizer_the_launcher_runs():
    scale, x = Scale(3.0), tensor(64)
    thoughts_of(scale, x, x)
    with simulator.sanitize() as report:
        thoughts_of(scale, x)
    assert scale.thought == 2 and not report.findings


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_operators_say_the_same_when_repeated(layout):
    """Twice each, with other tensors: the second run is a repetition."""
    layers = (
        torch.nn.Conv2d(16, 24, 3, padding=1), torch.nn.MaxPool2d(3, 2, 1), torch.nn.ReLU(),
    )  # fmt: skip
    torch_conv, pool, relu = (layer.to(PLACE, memory_format=layout) for layer in layers)
    linear = torch.nn.Linear(64, 32, device=PLACE)
    block = torchvision.ops.SqueezeExcitation(16, 4, torch.nn.SiLU).to(PLACE)
    for _ in range(3):
        x = tensor(4, 16, 12, 12).to(memory_format=layout).requires_grad_()
        rows = tensor(40, 64).requires_grad_()
        conv = torch_conv.weight, torch_conv.bias
        labels = torch.randint(64, (40,), device=PLACE)
        for ours, theirs, inputs in (
            (functools.partial(ops.conv2d, weight=conv[0], bias=conv[1], padding=1), torch_conv,
             (x, *conv)),
            (lambda x: ops.max_pool2d(x, 3, 2, 1), pool, (x,)),
            (ops.relu, relu, (x,)),
            (lambda x: ops.squeeze_excite(x, *block.parameters()), block,
             (x, *block.parameters())),
            (lambda x: ops.linear(x, linear.weight, linear.bias), linear,
             (rows, linear.weight, linear.bias)),
            (lambda x, labels=labels: ops.cross_entropy(x, labels),
             lambda x, labels=labels: torch.nn.functional.cross_entropy(x, labels), (rows,)),
        ):  # fmt: skip
            y, expected = ours(inputs[0]), theirs(inputs[0])
            torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)
            dy = torch.randn_like(expected)
            gradients = torch.autograd.grad(y, inputs, dy)
            for found, wanted in zip(
                gradients, torch.autograd.grad(expected, inputs, dy), strict=True
            ):
                torch.testing.assert_close(found, wanted, rtol=2e-3, atol=2e-2)
