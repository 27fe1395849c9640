"""Squeeze and excitation as an operator: what the operators' contract does not prove."""

import importlib

import peers
import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, randn

from course_lib import SIMULATED, ops
from course_lib.ops import registration

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
FORMATS = [torch.contiguous_format, torch.channels_last]
module = importlib.import_module("course_lib.ops.squeeze_excite")
pytestmark = pytest.mark.seed(11)


def images(*shape, memory_format=torch.contiguous_format, dtype=torch.float32):
    return (randn(*shape) * 2 + 0.5).to(dtype).contiguous(memory_format=memory_format)


def weights(C, R, dtype=torch.float32):
    shapes = (R, C), (R,), (C, R), (C,)
    return [randn(shape).to(dtype).requires_grad_() for shape in shapes]


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


@pytest.mark.parametrize("view", [
    lambda x: x.transpose(2, 3), lambda x: x[:, ::2], lambda x: x[:, :, 1:, 1:],
    lambda x: x.expand(3, -1, -1, -1), lambda x: x.permute(1, 0, 2, 3),
])  # fmt: skip
def test_other_layouts(view):
    x = view(images(1, 8, 6, 5))
    given = weights(x.shape[1], 3)
    dy = randn(x.shape).transpose(0, 1).contiguous().transpose(0, 1)
    found = passes(ops.squeeze_excite, x, given, dy)
    near(found, passes(peers.squeeze_excite, x, given, dy))
    assert found[0].is_contiguous() and found[1].is_contiguous()


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
        theirs = peers.squeeze_excite(x, *given)
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
    expected = peers.squeeze_excite(x, *given)
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
        ours, theirs = (passes(f, x, given, dy) for f in (ops.squeeze_excite, peers.squeeze_excite))
        doubles = [g.detach().double().requires_grad_() for g in given]
        exact = passes(peers.squeeze_excite, x.double(), doubles, dy.double())
        assert all(each.dtype == dtype for each in ours)
        for k, found in enumerate((ours, theirs)):
            gaps = [(a.double() - b).norm() / b.norm() for a, b in zip(found, exact, strict=True)]
            squares[k] += torch.stack([gap.detach() for gap in gaps]).cpu() ** 2
    ours, theirs = (squares / 8).sqrt().tolist()
    eps = torch.finfo(dtype).eps
    assert all(a <= max(1.5 * b, eps) for a, b in zip(ours, theirs, strict=True)), (ours, theirs)


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
