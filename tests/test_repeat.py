"""`host.repeat`: which runs are repeated without their launcher, and which never are."""

import ctypes
import functools
import itertools
import threading
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from test_replay import PLACE, difference_kernel, scale_kernel

from course_lib import SIMULATED, ops
from course_lib.runtime.host import arrays, counters, repeat
from course_lib.runtime.host import launch as launching
from course_lib.runtime.host.launch import launch


def run_scale(x, y, factor):
    y[:] = x * factor


def run_difference(x, y, z):
    z[:] = x - y


@pytest.fixture(autouse=True)
def stream(monkeypatch):
    """Where there is no GPU: CPU tensors count as a GPU's, and a repeated launch is worked out.

    Everything but the driver's call is then the real thing. Returns what tells the stream.
    """
    state = SimpleNamespace(current=0)
    if SIMULATED:

        def prepare(kernel, grid, block, *args, **options):
            arrays = [arg for arg in args if hasattr(arg, "data_ptr")]
            numbers = [arg for arg in args if not hasattr(arg, "data_ptr")]
            work = run_scale if kernel is scale_kernel else run_difference
            n = arrays[0].numel()

            def run(addresses):
                number = ctypes.c_float * n
                memory = (np.ctypeslib.as_array(number.from_address(a)) for a in addresses)
                work(*memory, *numbers)

            return SimpleNamespace(launch=run)

        monkeypatch.setattr(launching, "prepare", prepare)
        monkeypatch.setattr(launching, "_stream_of", lambda index: state.current)
        monkeypatch.setattr(launching, "tensor_types", {torch.Tensor, torch.nn.Parameter})
        monkeypatch.setattr(repeat, "_index_of", lambda x: 0)
    else:
        launching.tensor_types.add(torch.Tensor)  # as after a process's first launch
    return state


def run(kernel, *args):
    n = args[0].numel()
    if n:
        launch(kernel, -(-n // 64), 64, *args, flat=True)


def made(body, n_arrays=2):
    """`body` as a repeated launcher, that counts how often it had to think."""

    @repeat.repeated(n_arrays)
    def launcher(*inputs):
        launcher.thought += 1
        return body(*inputs)

    launcher.thought = 0
    return launcher


def two_results(x, y, factor):
    """(x − factor·y, factor·y), by way of workspace."""
    scaled, copied = arrays.empty_like(x), arrays.empty_like(x)
    run(scale_kernel, y, scaled, factor)
    run(scale_kernel, scaled, copied, 1.0)
    result = arrays.empty(tuple(x.shape), like=x, channels_last=x.dim() == 4)
    run(difference_kernel, x, scaled, result)
    return result, copied


def tensor(*shape):
    return torch.randn(*shape, device=PLACE)


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


def test_another_shape_layout_number_or_stream_is_another_run(stream):
    launcher = made(two_results)
    pair = tensor(6, 8), tensor(6, 8)
    assert thoughts(launcher, pair, pair) == 1
    assert thoughts(launcher, (tensor(8, 6), tensor(8, 6)), (tensor(48), tensor(48))) == 2
    assert thoughts(launcher, pair, factor=4.0) == 1
    assert thoughts(launcher, pair, pair, factor=3.0) == 0
    turned = tensor(8, 6).T, tensor(8, 6).T
    assert launcher(*turned, 3.0) and launcher.thought == 5
    if SIMULATED:
        stream.current = 1
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
    for _ in range(repeat.TRIES + 2):
        y = tensor(40)
        expected = x - y * y.abs().max() if what == "looked into" else x - y
        found = launcher(x, y)
        if what == "an argument":
            assert found is x
        else:
            assert torch.equal(found, expected[: len(found)])
    assert launcher.thought == repeat.TRIES + 2


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


def chain(x, y, factor):
    """As `two_results`, by a chain of arrays, each of which two launches need."""
    last = y
    for _ in range(5):
        last, before = arrays.empty_like(x), last
        run(scale_kernel, before, last, 1.0)
    result, scaled = arrays.empty_like(x), arrays.empty_like(x)
    run(scale_kernel, last, scaled, factor)
    run(difference_kernel, x, scaled, result)
    arrays.empty_like(x)  # which no launch needs
    return result, scaled


def test_the_workspace_holds_what_is_needed_at_one_time(monkeypatch):
    sizes, empty = [], torch.empty_strided

    def noted(shape, strides, *, dtype, device):
        sizes.append(shape[0] if dtype is torch.uint8 else 0)
        return empty(shape, strides, dtype=dtype, device=device)

    launcher = made(chain)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", noted)
        assert thoughts(launcher, *((tensor(8, 32), tensor(8, 32)) for _ in range(3))) == 1
    assert max(sizes) == 2 * 8 * 32 * 4


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), max_size=12))
def test_pieces_of_the_workspace(found):
    sizes = {name: size * repeat.APART for name, (size, _, _) in enumerate(found)}
    times = {name: (first, first + more) for name, (_, first, more) in enumerate(found)}
    offsets = repeat._offsets(sizes, times)
    for a, b in itertools.combinations(sizes, 2):
        together = times[a][0] <= times[b][1] and times[b][0] <= times[a][1]
        apart = offsets[a] + sizes[a] <= offsets[b] or offsets[b] + sizes[b] <= offsets[a]
        assert apart or not together
    assert all(offset >= 0 and offset % repeat.APART == 0 for offset in offsets.values())
    # No place is higher than all the others together would make it.
    assert all(offset <= sum(sizes.values()) - sizes[n] for n, offset in offsets.items())


@pytest.mark.parametrize("worth", [1, 64 << 10])
def test_a_result_may_lie_where_workspace_lay(monkeypatch, worth):
    live, seen, empty = [], [], torch.empty_strided

    def noted(shape, strides, *, dtype, device):
        made = empty(shape, strides, dtype=dtype, device=device)
        live.append(made.nbytes)
        weakref.finalize(made, live.remove, made.nbytes)
        seen.append(sum(live))
        return made

    def body(x, y):
        """The first result needs three arrays on the way, the second one."""
        ways = [arrays.empty_like(x) for _ in range(3)]
        for way in ways:
            run(scale_kernel, x, way, 2.0)
        first, second, way = (arrays.empty_like(x) for _ in range(3))
        run(difference_kernel, ways[0], ways[1], first)
        run(difference_kernel, first, ways[2], first)
        run(scale_kernel, y, way, 3.0)
        run(difference_kernel, way, x, second)
        return first, second

    monkeypatch.setattr(repeat, "WORTH", worth)
    launcher, n = made(body), 8 * 32 * 4
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty_strided", noted)
        for _ in range(3):
            x, y = tensor(8, 32), tensor(8, 32)
            live.clear()
            first, second = launcher(x, y)
            assert torch.equal(first, -2 * x) and torch.equal(second, 3 * y - x)
            del first, second
    assert launcher.thought == 1
    assert max(seen) == (4 * n if worth == 1 else 5 * n)


@given(
    pieces=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9), st.integers(0, 5)), max_size=9),
    results=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 14)), min_size=1, max_size=4),
    worth=st.integers(1, 4000),
)
def test_parts_of_a_run(pieces, results, worth):
    n_launches = 15
    sizes = {name: size * repeat.APART for name, (size, _, _) in enumerate(pieces)}
    times = {name: (first, first + more) for name, (_, first, more) in enumerate(pieces)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(repeat, "WORTH", worth)
        parts = repeat._parts(n_launches, sizes, times, results)
    assert [part.first for part in parts] == [0, *(part.end for part in parts[:-1])]
    assert parts[-1].end == n_launches
    assert sorted(i for part in parts for i in part.results) == list(range(len(results)))
    assert sorted(name for part in parts for name in part.offsets) == sorted(sizes)
    for part in parts:
        assert all(part.first <= results[i][1] < part.end for i in part.results)
        for name, offset in part.offsets.items():
            assert part.first <= times[name][0] and times[name][1] < part.end
            assert offset + sizes[name] <= part.n_bytes
    for before, part in itertools.pairwise(parts):
        assert repeat._saved(before.n_bytes, part, results) >= worth


def test_the_memory_of_runs_has_its_limit(monkeypatch):
    monkeypatch.setattr(repeat, "MOST_REMEMBERED", 2)
    launcher = made(two_results)
    pairs = [(tensor(n), tensor(n)) for n in (4, 8, 12)]
    assert thoughts(launcher, *pairs) == 3
    assert thoughts(launcher, pairs[2], pairs[0]) == 1


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
