"""Squeeze and excitation as an operator: values, gradients, layouts, tracing, autocast."""

import importlib

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, never_waiting, randn

from course_lib import SIMULATED, ops
from course_lib.ops import registration

LIBRARY = torch.ops.course_lib
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.contiguous_format, torch.channels_last]
FUNCTIONS = [("silu", "sigmoid"), ("relu", "hard_sigmoid"), ("silu", "hard_sigmoid")]
module = importlib.import_module("course_lib.ops.squeeze_excite")


@pytest.fixture(autouse=True)
def _alike_each_time():
    torch.manual_seed(11)


def images(*shape, memory_format=torch.contiguous_format, dtype=torch.float32):
    return (randn(*shape) * 2 + 0.5).to(dtype).contiguous(memory_format=memory_format)


def weights(C, R, dtype=torch.float32, convolutions=False, requires_grad=True):
    tail = (1, 1) if convolutions else ()
    shapes = (R, C, *tail), (R,), (C, R, *tail), (C,)
    return [randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


def peer(x, weight1, bias1, weight2, bias2, activation="silu", gate="sigmoid"):
    """What torchvision's block computes."""
    scale = F.adaptive_avg_pool2d(x, 1)
    scale = F.conv2d(scale, weight1.reshape(*weight1.shape[:2], 1, 1), bias1)
    scale = getattr(F, activation)(scale)
    scale = F.conv2d(scale, weight2.reshape(*weight2.shape[:2], 1, 1), bias2)
    return {"sigmoid": torch.sigmoid, "hard_sigmoid": F.hardsigmoid}[gate](scale) * x


def passes(function, x, given, dy, *names):
    """y and all five gradients."""
    x = x.detach().requires_grad_()
    y = function(x, *given, *names)
    return [y, *torch.autograd.grad(y, [x, *given], dy)]


def near(found, expected, tolerance=1e-5):
    """‖a − b‖ ≤ tolerance·‖b‖, or both empty or not a number, for each pair."""
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        ours, theirs = ours.double(), theirs.double()
        assert torch.equal(ours.isnan(), theirs.isnan())
        gap = (ours - theirs).nan_to_num().norm()
        assert gap <= tolerance * theirs.nan_to_num().norm() + 1e-30, (gap, theirs.norm())


# ── values and gradients ─────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("names", FUNCTIONS, ids="-".join)
@pytest.mark.parametrize("shape, R", [((3, 10, 7, 5), 4), ((1, 1, 1, 1), 1), ((2, 40, 3, 3), 9)])
def test_equals_pytorch(shape, R, names, memory_format):
    x, given = images(*shape, memory_format=memory_format), weights(shape[1], R)
    dy = torch.randn_like(x)
    found = passes(ops.squeeze_excite, x, given, dy, *names)
    near(found, passes(peer, x, given, dy, *names))
    for each in found[:2]:
        assert each.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("own_dtype", [False, True])
def test_narrow_types_against_float64(dtype, own_dtype):
    x, given = images(4, 6, 5, 5, dtype=dtype), weights(6, 3, dtype if own_dtype else torch.float32)
    dy = torch.randn_like(x)
    found = passes(ops.squeeze_excite, x, given, dy)
    exact = [each.detach().double().requires_grad_() for each in given]
    expected = passes(peer, x.double(), exact, dy.double())
    for ours, like in zip(found, [x, x, *given], strict=True):
        assert ours.dtype == like.dtype
    near(found, expected, torch.finfo(dtype).eps)


@pytest.mark.parametrize("shape", [(0, 4, 3, 3), (2, 4, 0, 3)], ids=str)
def test_empty_images(shape):
    x, given = images(*shape), weights(4, 2)
    dy = torch.randn_like(x)
    near(passes(ops.squeeze_excite, x, given, dy), passes(peer, x, given, dy))


def test_weights_of_convolutions():
    x, given = images(2, 6, 4, 4), weights(6, 3, convolutions=True)
    dy = torch.randn_like(x)
    near(passes(ops.squeeze_excite, x, given, dy), passes(peer, x, given, dy))


def test_an_image_without_a_batch():
    x, given = images(6, 4, 5), weights(6, 3)
    dy = torch.randn_like(x)
    near(passes(ops.squeeze_excite, x, given, dy), passes(peer, x, given, dy))


@pytest.mark.parametrize("wanted", [(0,), (1, 2, 3, 4), (2,), (0, 3), ()], ids=str)
def test_what_requires_a_gradient(wanted):
    leaves = [images(2, 5, 4, 3), *weights(5, 2, requires_grad=False)]
    for i in wanted:
        leaves[i].requires_grad_()
    found = []
    for function in (ops.squeeze_excite, peer):
        y = function(*leaves)
        assert y.requires_grad == bool(wanted)
        found.append([y, *(torch.autograd.grad(y.square().sum(), [leaves[i] for i in wanted])
                           if wanted else ())])  # fmt: skip
    near(*found)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
def test_an_expanded_gradient(reduce, memory_format):
    x, given = images(2, 5, 4, 3, memory_format=memory_format), weights(5, 2)
    found = []
    for function in (ops.squeeze_excite, peer):
        leaf = x.clone().requires_grad_()
        found.append(torch.autograd.grad(getattr(function(leaf, *given), reduce)(), [leaf, *given]))
    near(*found)


@pytest.mark.parametrize("view", [
    lambda x: x.transpose(2, 3), lambda x: x[:, ::2], lambda x: x[:, :, 1:, 1:],
    lambda x: x.expand(3, -1, -1, -1), lambda x: x.permute(1, 0, 2, 3),
])  # fmt: skip
def test_other_layouts(view):
    x = view(images(1, 8, 6, 5))
    given = weights(x.shape[1], 3)
    dy = randn(x.shape).transpose(0, 1).contiguous().transpose(0, 1)
    found = passes(ops.squeeze_excite, x, given, dy)
    near(found, passes(peer, x, given, dy))
    assert found[0].is_contiguous() and found[1].is_contiguous()


def test_nan_and_infinity_spread_as_in_pytorch():
    given = weights(4, 2)
    for value in (float("nan"), float("inf")):
        x = images(2, 4, 3, 3)
        x[1, 2, 0, 1] = value
        ours, theirs = ops.squeeze_excite(x, *given), peer(x, *given)
        assert torch.equal(ours.isnan(), theirs.isnan())
        near([ours[0]], [theirs[0]])


def test_twice_gives_the_same():
    x, given = images(3, 8, 5, 5), weights(8, 4)
    dy = torch.randn_like(x)
    first, second = (passes(ops.squeeze_excite, x, given, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({0: torch.ones(4, 3)}, TypeError, r"x must have 4 dimensions, not shape \(4, 3\)"),
        ({0: torch.ones(1, 4, 2, 2, dtype=torch.long)}, NotImplementedError, "for 'Long'"),
        ({1: torch.ones(2, 5)}, TypeError, r"weight1 must have shape .*, not \(2, 5\)"),
        ({2: torch.ones(3)}, TypeError, r"bias1 must have shape \(2,\), not \(3,\)"),
        ({3: torch.ones(2, 4)}, TypeError, r"weight2 must have shape .*, not \(2, 4\)"),
        ({4: torch.ones(4, 1)}, TypeError, r"bias2 must have shape \(4,\), not \(4, 1\)"),
        ({1: torch.ones(2, 4).half()}, TypeError, "weight1 must be .*float32, not .*float16"),
        ({4: torch.ones(4).half()}, TypeError, "bias2 must be .*float32, not .*float16"),
        ({5: "gelu"}, ValueError, "unknown activation 'gelu'; there are silu, relu"),
        ({6: "tanh"}, ValueError, "unknown gate 'tanh'; there are sigmoid, hard_sigmoid"),
    ],
)
def test_errors(change, error, words):
    args = [torch.ones(1, 4, 2, 2), *weights(4, 2), "silu", "sigmoid"]
    for i, value in change.items():
        args[i] = value
    args = [arg.to(PLACE) if torch.is_tensor(arg) else arg for arg in args]
    with pytest.raises(error, match=words):
        ops.squeeze_excite(*args)
    with pytest.raises(error, match=words), torch._subclasses.FakeTensorMode() as mode:
        ops.squeeze_excite(*(mode.from_tensor(arg) if torch.is_tensor(arg) else arg
                             for arg in args))  # fmt: skip


# ── who has a say in the call ────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("shape", "dtype", "memory_format"),
    [
        ((2, 5, 4, 3), torch.float32, torch.contiguous_format),
        ((2, 5, 4, 3), torch.float16, torch.channels_last),
        ((2, 5, 4, 3), torch.bfloat16, torch.contiguous_format),
        ((1, 1, 1, 1), torch.float32, torch.channels_last),
        ((0, 4, 2, 2), torch.float32, torch.channels_last),
    ],
    ids=str,
)
def test_opcheck(shape, dtype, memory_format):
    x = images(*shape, memory_format=memory_format, dtype=dtype)
    given, names = weights(shape[1], 3, convolutions=dtype is torch.float32), ("relu", "sigmoid")
    forward, backward = LIBRARY.squeeze_excite.default, LIBRARY.squeeze_excite_backward.default
    torch.library.opcheck(forward, (x.clone().requires_grad_(), *given, *names))
    with torch.no_grad():
        y, *saved = forward(x, *given, *names)
    plain = [given[0].detach(), given[2].detach()]
    torch.library.opcheck(backward, (torch.randn_like(y), x, *plain, *saved, *names))


def test_second_gradients_and_transforms_are_refused():
    x, given = images(2, 4, 3, 3).requires_grad_(), weights(4, 2)
    y = ops.squeeze_excite(x, *given)
    (dx,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="course_lib.squeeze_excite has no second derivative"):
        dx.sum().backward()
    with pytest.raises(RuntimeError, match="can't be transformed by torch.func"):
        torch.func.grad(lambda x: ops.squeeze_excite(x, *given).sum())(x.detach())


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap():
    x, given = images(3, 2, 4, 3, 3), weights(4, 2)
    near([torch.vmap(lambda x: ops.squeeze_excite(x, *given))(x)],
         [torch.stack([peer(each, *given) for each in x])])  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(dynamic):
    torch.compiler.reset()
    given = weights(4, 2)

    def network(x, *given):
        return ops.squeeze_excite(x * 2, *given, "relu", "hard_sigmoid") + x

    compiled = torch.compile(network, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for shape in ((2, 4, 3, 3), (3, 4, 5, 3)):
        x = images(*shape)
        dy = torch.randn_like(x)
        near(passes(compiled, x, given, dy), passes(network, x, given, dy))


def test_saved_for_the_gradient():
    x, given, saved = images(2, 8, 5, 5).requires_grad_(), weights(8, 3), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ops.squeeze_excite(x, *given)
    own = [each for each in saved if all(each is not other for other in (x, *given))]
    assert len(saved) == 6
    assert sum(each.numel() * each.element_size() for each in own) == 2 * (8 + 3 + 8) * 4


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("x_dtype", ["float32", "autocast's"])
def test_autocast_changes_nothing(dtype, x_dtype):
    x = images(2, 6, 4, 4, dtype=torch.float32 if x_dtype == "float32" else dtype)
    given, dy = weights(6, 3), torch.randn_like(x)
    plain = passes(ops.squeeze_excite, x, given, dy)
    with torch.autocast(PLACE, dtype=dtype):
        theirs = peer(x, *given)
        ours = passes(ops.squeeze_excite, x, given, dy)  # both passes in it
    assert ours[0].dtype == theirs.dtype == x.dtype
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


@pytest.fixture
def ways(monkeypatch):
    """The list of ways that calls took: "direct", or "dispatcher"; see test_ops_dispatch.py."""
    if SIMULATED:
        monkeypatch.setattr(registration, "_direct_keys", registration.plain_keys("CPU"))
    taken = []
    operator = module._squeeze_excite
    for way, name in (
        ("direct", "kernel"), ("direct", "_record"), ("dispatcher", "overload"),
    ):  # fmt: skip
        function = getattr(operator, name)
        note = lambda *inputs, w=way, f=function: (taken.append(w), f(*inputs))[1]  # noqa: E731
        monkeypatch.setattr(operator, name, note)
    return taken


def test_plain_tensors_take_the_short_way_under_autocast_too(ways):
    x, given = images(2, 4, 3, 3), weights(4, 2)
    expected = peer(x, *given)
    near([ops.squeeze_excite(x, *given)], [expected])
    with torch.autocast(PLACE, dtype=torch.bfloat16):
        near([ops.squeeze_excite(x, *given)], [expected])
    with torch.inference_mode():
        near([ops.squeeze_excite(x, *given)], [expected])
    with torch.no_grad():
        assert not ops.squeeze_excite(x.requires_grad_(), *given).requires_grad
    assert ways == ["direct"] * 4
    ops.squeeze_excite(torch._neg_view(x.detach()), *given)
    assert ways[4] == "dispatcher"


def test_both_ways_record_the_same(ways, monkeypatch):
    x, given = images(2, 4, 3, 3), weights(4, 2)
    dy, found = torch.randn_like(x), []
    for short in (True, False):
        monkeypatch.setattr(registration, "dispatcher_is_idle", lambda short=short: short)
        found.append(passes(ops.squeeze_excite, x, given, dy))
    assert ways[:2] == ["direct", "dispatcher"]
    assert [type(each[0].grad_fn).__name__ for each in found] == ["SqueezeExciteBackward"] * 2
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_operator_is_there_for_a_mac():
    for name in ("squeeze_excite", "squeeze_excite_backward"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"course_lib::{name}", "MPS")


# ── on a GPU ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.gpu
@pytest.mark.parametrize("shape, R", [((8, 48, 48, 48), 12), ((8, 672, 24, 24), 28),
                                      ((2, 2688, 12, 12), 112)], ids=str)  # fmt: skip
@pytest.mark.parametrize("memory_format", FORMATS, ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_shapes_of_efficientnet(shape, R, memory_format, dtype):
    """At most 1.5 times as far from float64 as PyTorch's own block in the same dtype.

    Over several draws: the error of a single sum of numbers that cancel is a matter of luck.
    """
    squares = torch.zeros(2, 6, dtype=torch.float64)
    for _ in range(8):
        x = images(*shape, memory_format=memory_format, dtype=dtype)
        given = weights(shape[1], R, dtype)
        with torch.no_grad():
            for weight in given:
                weight.mul_(0.1)
        dy = torch.randn_like(x)
        ours, theirs = (passes(f, x, given, dy) for f in (ops.squeeze_excite, peer))
        exact = passes(peer, x.double(), [g.detach().double().requires_grad_() for g in given],
                       dy.double())  # fmt: skip
        assert all(each.dtype == dtype for each in ours)
        for k, found in enumerate((ours, theirs)):
            gaps = [(a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
            squares[k] += torch.stack([gap.detach() for gap in gaps]).cpu() ** 2
    ours, theirs = (squares / 8).sqrt().tolist()
    eps = torch.finfo(dtype).eps
    assert all(a <= max(1.5 * b, eps) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


@pytest.mark.gpu
def test_no_wait_for_the_gpu_and_nothing_filled_with_zeros():
    x, given = images(8, 48, 20, 20).requires_grad_(), weights(48, 12)
    dy = torch.randn_like(x)

    def work():
        torch.autograd.grad(ops.squeeze_excite(x, *given), [x, *given], dy)

    work()  # the first time, kernels are loaded
    with never_waiting():
        work()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        work()
        torch.cuda.synchronize()
    names = [event.name for event in profile.events() if event.device_type.name == "CUDA"]
    assert names and not any("fill" in name.lower() or "at::" in name for name in names), names


@pytest.mark.gpu
def test_training_step_in_a_captured_graph():
    x, given = images(4, 24, 10, 10).requires_grad_(), weights(24, 6)
    dy = torch.randn_like(x)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(ops.squeeze_excite(x, *given), [x, *given], dy)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.squeeze_excite(x, *given)
        found = [y, *torch.autograd.grad(y, [x, *given], dy)]
    with torch.no_grad():
        x.copy_(images(4, 24, 10, 10))
    graph.replay()
    near(found, passes(peer, x, given, dy), 1e-5)


@pytest.mark.gpu
def test_compiles_with_the_default_backend():
    torch.compiler.reset()
    given = weights(24, 6)

    def network(x, *given):
        return F.silu(ops.squeeze_excite(x * 2 - 1, *given)) + x

    compiled = torch.compile(network, fullgraph=True)
    for memory_format in FORMATS:
        x = images(4, 24, 10, 10, memory_format=memory_format)
        dy = torch.randn_like(x)
        near(passes(compiled, x, given, dy), passes(network, x, given, dy), 1e-5)


@pytest.mark.gpu
def test_the_current_stream():
    stream, given = torch.cuda.Stream(), weights(48, 12)
    x = images(16, 48, 64, 64)
    for _ in range(3):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # about 10 ms: what runs elsewhere would be done before
            y = ops.squeeze_excite(x + 1, *given)
        torch.cuda.current_stream().wait_stream(stream)
        near([y], [peer(x + 1, *given)], 1e-5)
