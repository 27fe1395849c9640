"""Squeeze and excitation: every rung, both directions, both memory formats, against float64."""

import contextlib
import importlib
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cached_launches import stand_in
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tensors import PLACE, double
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import fused, plan, two_pass
from course_lib.kernels.squeeze_excite.dense import MOST_CHANNELS
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch_cache import cached_launch

ops = importlib.import_module("course_lib.ops.squeeze_excite")
VARIANTS = [name for name in se.FORWARD if name not in ("resident", "batched")]
PAIRS = [("separate", "channels_last"), ("two_pass", "channels_last")]
PAIRS += [(variant, "contiguous") for variant in VARIANTS]
# Half a unit in the last place of the output, and float32 arithmetic relative to the terms' size.
ROUNDING = {torch.float32: 2**-24, torch.float16: 2**-11, torch.bfloat16: 2**-8}
FLOOR = {torch.float32: 1e-37, torch.float16: 2**-25, torch.bfloat16: 1e-37}
ARITHMETIC = 1e-6
DRAWS = 3 if SIMULATED else 8
FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
FUNCTIONS = {
    "silu": F.silu, "relu": F.relu, "sigmoid": torch.sigmoid, "hard_sigmoid": F.hardsigmoid,
}  # fmt: skip
GRADIENTS = ("dx", "dweight1", "dbias1", "dweight2", "dbias2")

every_variant = pytest.mark.parametrize("variant", VARIANTS)
every_dtype = pytest.mark.parametrize("dtype", ROUNDING)
every_pair = pytest.mark.parametrize("variant, layout", PAIRS)
every_format = pytest.mark.parametrize("layout", FORMATS)
every_activation = pytest.mark.parametrize("activation", ["silu", "relu"])
every_gate = pytest.mark.parametrize("gate", ["sigmoid", "hard_sigmoid"])


def inputs(shape, R, dtype=torch.float32, *, layout="contiguous", weight_dtype=None, offset=0.3,
           seed=0, convolutions=False):  # fmt: skip
    """dy, x, and weights of the size that networks begin with."""
    generator = torch.Generator().manual_seed(seed)
    C = shape[1]
    x, dy = (torch.randn(shape, generator=generator) for _ in range(2))
    weight1 = torch.randn(R, C, generator=generator) / C**0.5
    weight2 = 2 * torch.randn(C, R, generator=generator) / R**0.5
    bias1, bias2 = (torch.randn(n, generator=generator) for n in (R, C))
    weights = [weight1, bias1, weight2, bias2]
    if convolutions:
        weights[::2] = weight1[:, :, None, None], weight2[:, :, None, None]
    x, dy = (t.to(PLACE, dtype).to(memory_format=FORMATS[layout]) for t in (x + offset, dy))
    return dy, x, [w.to(PLACE, weight_dtype or dtype) for w in weights]


def composition(x, weight1, bias1, weight2, bias2, activation="silu", gate="sigmoid"):
    """What PyTorch makes of it."""
    h = F.linear(x.mean((2, 3)), weight1.flatten(1), bias1)
    z = F.linear(FUNCTIONS[activation](h), weight2.flatten(1), bias2)
    return x * FUNCTIONS[gate](z)[:, :, None, None]


def sizes(dy, x, weights):
    """How large the terms are that y and each gradient are made of: what errors grow with."""
    dy, x, w1, b1, w2, b2 = (np.abs(double(t)) for t in (dy, x, *weights))
    w1, w2 = w1.reshape(w1.shape[:2]), w2.reshape(w2.shape[:2])
    n_pixels = max(1, x.shape[2] * x.shape[3])
    mean = x.sum(axis=(2, 3)) / n_pixels
    hidden = mean @ w1.T + b1
    logit = hidden @ w2.T + b2
    dlogit = (dy * x).sum(axis=(2, 3)) * (1 + logit)
    dhidden = dlogit @ w2 * (1 + hidden)
    share = dhidden @ w1 / n_pixels
    dx = dy * (1 + logit)[:, :, None, None] + share[:, :, None, None]
    y = x * (1 + logit)[:, :, None, None]
    return y, dx, dhidden.T @ mean, dhidden.sum(0), dlogit.T @ hidden, dlogit.sum(0)


def assert_close(actual, expected, size, name):
    """Equal but for one rounding and ARITHMETIC times `size`, that of the terms."""
    values, size = double(actual), size.reshape(expected.shape)
    assert values.shape == expected.shape
    assert np.array_equal(np.isnan(values), np.isnan(expected)), name
    finite = np.isfinite(expected)
    error = np.abs(values - expected)[finite]
    limit = 1.01 * ROUNDING[actual.dtype] * np.abs(expected) + FLOOR[actual.dtype]
    limit = (limit + ARITHMETIC * size)[finite]
    assert (error <= limit).all(), f"{name}: worst {np.max(error / limit):.3g} times the limit"


def safe(x, weights, activation, gate):
    """Whether no kink of the activation or the gate is so close that rounding decides its side."""
    w1, b1, w2, b2 = (double(w) for w in weights)
    h = double(x).mean(axis=(2, 3)) @ w1.reshape(w1.shape[:2]).T + b1
    act = reference.relu(h) if activation == "relu" else reference.swish(h)
    z = act @ w2.reshape(w2.shape[:2]).T + b2
    kinks = ([h] if activation == "relu" else []) + ([z - 3, z + 3] if gate != "sigmoid" else [])
    return all(np.abs(values).min(initial=1) > 1e-4 for values in kinks)


def run(dy, x, weights, variant, **options):
    """(y, saved, gradients) of `variant`; the images in memory that was NaN."""
    y, *saved = se.forward(
        x, *weights, variant=variant, out=torch.full_like(x, math.nan), **options
    )
    gradients = se.backward(
        dy, x, weights[0], weights[2], *saved, variant=variant,
        out=torch.full_like(x, math.nan), **options,
    )  # fmt: skip
    return y, saved, gradients


def check(dy, x, weights, variant, activation="silu", gate="sigmoid"):
    if variant == "fused" and not x.is_contiguous():
        with pytest.raises(ValueError, match="'fused' takes contiguous images: use 'two_pass'"):
            run(dy, x, weights, variant)
        x, dy = x.contiguous(), dy.contiguous()
    y, saved, gradients = run(dy, x, weights, variant, activation=activation, gate=gate)
    arguments = [double(w) for w in weights]
    expected = (
        reference.squeeze_excite(double(x), *arguments, activation, gate),
        *reference.squeeze_excite_backward(double(dy), double(x), *arguments, activation, gate),
    )
    of_terms = sizes(dy, x, weights)
    for name, *pair in zip(("y", *GRADIENTS), (y, *gradients), expected, of_terms, strict=True):
        assert_close(*pair, name)
    assert y.stride() == gradients[0].stride() == x.stride()
    assert all(t.dtype == torch.float32 for t in saved)
    for gradient, weight in zip(gradients[1:], weights, strict=True):
        assert gradient.dtype == weight.dtype and gradient.shape == weight.shape
    return y, saved, gradients


# ------------------------------------------------------------------------ the reference


@every_activation
@every_gate
def test_the_reference_is_what_autograd_finds(activation, gate):
    dy, x, weights = inputs((3, 7, 4, 5), 4, torch.float64, seed=1)
    leaves = [t.cpu().requires_grad_() for t in (x, *weights)]
    y = composition(*leaves, activation, gate)
    found = torch.autograd.grad(y, leaves, dy.cpu())
    arguments = [double(t) for t in (x, *weights)]
    assert np.allclose(reference.squeeze_excite(*arguments, activation, gate), y.detach())
    ours = reference.squeeze_excite_backward(double(dy), *arguments, activation, gate)
    # PyTorch's 1/6 in hard_sigmoid's gradient is that of float32, in float64 too.
    rtol = 1e-10 if gate == "sigmoid" else 1e-7
    assert all(np.allclose(a, b, rtol=rtol) for a, b in zip(ours, found, strict=True))


# -------------------------------------------------------------------------- every rung


@every_variant
@settings(max_examples=5, deadline=None)
@given(
    shape=st.tuples(
        st.integers(1, 2), st.integers(1, 40), st.integers(1, 13), st.integers(1, 13)
    ).filter(lambda shape: math.prod(shape) < 2000),
    R=st.integers(1, 20),
    dtype=st.sampled_from(list(ROUNDING)),
    wide=st.booleans(),
    layout=st.sampled_from(list(FORMATS)),
    activation=st.sampled_from(["silu", "relu"]),
    gate=st.sampled_from(["sigmoid", "hard_sigmoid"]),
    offset=st.sampled_from([0.0, 1.0, -20.0]),
    seed=st.integers(0, 2**31),
    convolutions=st.booleans(),
)
def test_random_images(variant, shape, R, dtype, wide, layout, activation, gate, offset, seed,
                       convolutions):  # fmt: skip
    made = inputs(
        shape, R, dtype, layout=layout, weight_dtype=torch.float32 if wide else dtype,
        offset=offset, seed=seed, convolutions=convolutions,
    )  # fmt: skip
    assume(safe(*made[1:], activation, gate))
    check(*made, variant, activation, gate)


@every_variant
@pytest.mark.parametrize("shape, R, layout, activation, gate", [
    ((1, 1, 1, 1), 1, "contiguous", "silu", "hard_sigmoid"),
    ((3, 9, 1, 1), 5, "channels_last", "relu", "sigmoid"),
    ((2, 1, 4, 4), 3, "contiguous", "relu", "sigmoid"),
    ((2, 1, 4, 4), 3, "channels_last", "silu", "hard_sigmoid"),
])  # fmt: skip
def test_one_pixel_one_channel_one_hidden_number(variant, shape, R, layout, activation, gate):
    made = inputs(shape, R, layout=layout, seed=4)
    assert safe(*made[1:], activation, gate)
    check(*made, variant, activation, gate)


@pytest.mark.parametrize("variant", VARIANTS[1:])
def test_many_channels_and_a_wide_hidden_layer(variant):
    for layout in FORMATS if variant == "two_pass" else ["channels_last"]:
        check(*inputs((1, 270, 1, 2), 5, layout=layout), variant)
    check(*inputs((1, 2, 3, 3), 1031), variant)


@pytest.mark.parametrize("variant, dtype", [
    (variant, dtype) for variant in VARIANTS for dtype in ROUNDING if not SIMULATED
    or dtype == torch.float32 or variant == ("fused" if dtype == torch.bfloat16 else "two_pass")
])  # fmt: skip
def test_no_less_accurate_than_pytorch(variant, dtype):
    """Over several draws: the error of a single sum of numbers that cancel is a matter of luck."""
    squares = np.zeros((2, 6))
    for seed in range(DRAWS):
        dy, x, weights = inputs((1, 24, 7, 7), 6, dtype, seed=seed)
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        y = composition(*leaves)
        theirs = y, *torch.autograd.grad(y, leaves, dy)
        arguments = [double(t) for t in (x, *weights)]
        expected = (
            reference.squeeze_excite(*arguments),
            *reference.squeeze_excite_backward(double(dy), *arguments),
        )
        ours, _, gradients = run(dy, x, weights, variant)
        for k, found in enumerate(((ours, *gradients), theirs)):
            squares[k] += [
                (np.linalg.norm(double(t) - truth) / np.linalg.norm(truth)) ** 2
                for t, truth in zip(found, expected, strict=True)
            ]
    for name, *errors in zip(("y", *GRADIENTS), *np.sqrt(squares / DRAWS), strict=True):
        assert errors[0] <= 1.5 * errors[1] + ROUNDING[dtype] / 2, (name, errors)


# ------------------------------------------------------------- how two_pass cuts images


@pytest.fixture
def fine_cuts(monkeypatch):
    """Small images are cut as only large ones are: the simulator is slow."""
    for rung in (two_pass, fused):
        monkeypatch.setattr(rung, "CUT", rung.CUT._replace(least_bytes=128))
    monkeypatch.setattr(plan, "LONG_PLANE", 30)
    monkeypatch.setattr(plan, "PIXELS", 1)
    monkeypatch.setattr(plan, "PART_VECTORS", 16)
    for planned in (plan.plan_planes, plan.plan_pixels):
        planned.cache_clear()
    yield
    for planned in (plan.plan_planes, plan.plan_pixels):
        planned.cache_clear()


@pytest.mark.parametrize("variant, layout, dtype, shape, n_parts", [
    ("two_pass", "contiguous", torch.float32, (1, 2, 13, 15), 3),
    ("fused", "contiguous", torch.float32, (2, 2, 13, 15), 3),
    ("two_pass", "contiguous", torch.bfloat16, (2, 2, 19, 17), 2),
    ("fused", "contiguous", torch.bfloat16, (1, 2, 21, 23), 3),
    ("two_pass", "channels_last", torch.float32, (1, 32, 9, 11), 3),
    ("two_pass", "channels_last", torch.bfloat16, (1, 32, 15, 13), 3),
    ("two_pass", "channels_last", torch.bfloat16, (1, 37, 4, 5), 3),
    # More slots than a thread has in flight: twice as many threads share them, and twice again.
    ("two_pass", "channels_last", torch.float32, (1, 37, 12, 9), 18),
])  # fmt: skip
def test_planes_in_parts(fine_cuts, variant, layout, dtype, shape, n_parts):
    dy, x, weights = inputs(shape, 5, dtype, layout=layout)
    problem = se.problem.problem_of(
        shape, 5, layout == "channels_last", "silu", "sigmoid", dtype.itemsize
    )
    assert plan.plan_of(problem, getattr(se, variant).CUT).n_parts == n_parts
    watched = SIMULATED and variant == "two_pass" and dtype == torch.float32 and shape[1] < 37
    with simulator.sanitize() if watched else contextlib.nullcontext() as report:
        check(dy, x, weights, variant)
    assert not watched or not report.findings, report


@pytest.mark.parametrize("shape, variant", [
    ((2, 2, 13, 14), "two_pass"), ((1, 6, 7, 7), "fused"), ((2, 13, 1, 9), "two_pass"),
    ((1, 2, 12, 16), "fused"),
])  # fmt: skip
def test_planes_in_groups(fine_cuts, shape, variant):
    check(*inputs(shape, 4), variant)


@pytest.mark.parametrize("shape, dtype", in_turns([
    ((2, 9, 4, 4),), ((1, 70, 8, 8),), ((1, 40, 12, 12),), ((1, 300, 4, 2),), ((2, 3, 20, 20),),
    ((1, 9, 28, 44),),
], ROUNDING))  # fmt: skip
def test_planes_of_whole_vectors(shape, dtype):
    """Many planes at a time, or one at a time and even that in turns."""
    check(*inputs(shape, 4, dtype), "two_pass")


@pytest.fixture
def coarse_cuts(monkeypatch):
    """A block for all planes of a sample, so that a warp has more of them than it sums at once."""
    monkeypatch.setattr(two_pass, "CUT", two_pass.CUT._replace(least_bytes=1 << 20))


@pytest.mark.parametrize(
    "dtype, shape", [(torch.float32, (1, 70, 12, 12)), (torch.float16, (1, 70, 18, 16))]
)
def test_short_planes_in_several_turns(coarse_cuts, dtype, shape):
    watched = dtype == torch.float16
    with simulator.sanitize() if watched else contextlib.nullcontext() as report:
        check(*inputs(shape, 4, dtype), "two_pass")
    assert not watched or not report.findings, report


#: (C, H, R) of the blocks of EfficientNet-B4 at 380 × 380.
NETWORK = [
    (48, 190, 12), (24, 190, 6), (144, 95, 6), (192, 95, 8), (192, 48, 8), (336, 48, 14),
    (336, 24, 14), (672, 24, 28), (960, 24, 40), (960, 12, 40), (1632, 12, 68), (2688, 12, 112),
]  # fmt: skip


def problem(N, C, H, R, channels_last=False, itemsize=4):
    return se.problem.problem_of((N, C, H, H), R, channels_last, "silu", "sigmoid", itemsize)


LARGE = [(1, 1, 2**31 + 7), (2**20, 3, 1000), (70_000, 1, 1), (1, 2**20, 2500), (3, 70_000, 49)]


@pytest.mark.parametrize("rung", [two_pass, fused])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_plans_cover_every_pixel_once(itemsize, rung):
    images = [(N, C, P) for N in (1, 8, 32) for C, side, _ in NETWORK for P in (side * side,)]
    for N, C, n_pixels in images + LARGE + [(2, 5, 1), (1, 300, 3), (1, 1, 70_001)]:
        for planned in (plan.plan_planes, plan.plan_pixels):
            found = planned(N, C, n_pixels, itemsize, rung.CUT)
            n_groups = -(-C // found.group)
            assert found.n_slots == n_groups * found.n_parts
            assert (found.n_parts - 1) * found.length < n_pixels <= found.n_parts * found.length
            assert 1 <= found.group <= MOST_CHANNELS
            assert 2 * N * found.n_slots < 2**31
        found = plan.plan_planes(N, C, n_pixels, itemsize, rung.CUT)
        assert found.n_parts == 1 or found.group == 1
        assert (found.multiplier == 0) == (found.group == 1)
        if found.group > 1:  # the division by multiplication, at both ends of every plane
            ends = np.arange(1, found.group + 1, dtype=object) * n_pixels
            for i in (*ends, *(ends - 1)):
                assert i * found.multiplier >> 32 == i // n_pixels or i == ends[-1]


# --------------------------------------------------------------------- odd circumstances


@pytest.mark.parametrize("variant, dtype, layout", [
    ("two_pass", torch.float32, "contiguous"), ("two_pass", torch.float16, "channels_last"),
    ("fused", torch.float16, "contiguous"),
])  # fmt: skip
def test_images_that_start_anywhere(variant, dtype, layout):
    dy, x, weights = inputs((2, 8, 5, 5), 3, dtype, layout=layout)
    plain = check(dy, x, weights, variant)
    buffers = [torch.full((400 + 16,), 7.0, device=PLACE).to(dtype) for _ in range(4)]
    for places in (3, 3, 1, 2), (0, 1, 0, 3):
        moved = [
            torch.as_strided(buffer.fill_(7), x.shape, x.stride(), 8 + place)
            for buffer, place in zip(buffers, places, strict=True)
        ]
        moved[0].copy_(x)
        moved[1].copy_(dy)
        y, *saved = se.forward(moved[0], *weights, variant=variant, out=moved[2])
        dx, *_ = se.backward(
            moved[1], moved[0], weights[0], weights[2], *saved, variant=variant, out=moved[3]
        )
        assert y is moved[2] and dx is moved[3]
        assert torch.allclose(y, plain[0], rtol=1e-3, atol=1e-6)
        assert torch.allclose(dx, plain[2][0], rtol=2e-3, atol=1e-5)
        for buffer, place in zip(buffers, places, strict=True):
            assert buffer[: 8 + place].eq(7).all() and buffer[408 + place :].eq(7).all()


@every_variant
def test_special_values(variant):
    dy, x, weights = inputs((5, 4, 3, 3), 2)
    x[0, 1, 2, 2], x[1, 2, 0, 0], x[2, 3, 1, 1] = math.nan, math.inf, -math.inf
    x[3] = 1e30
    for activation, gate in (("silu", "hard_sigmoid"), ("relu", "sigmoid")):
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        theirs = composition(*leaves, activation, gate)
        expected = theirs, *torch.autograd.grad(theirs, leaves, dy)
        y, _, gradients = run(dy, x, weights, variant, activation=activation, gate=gate)
        for name, a, b in zip(("y", *GRADIENTS), (y, *gradients), expected, strict=True):
            assert torch.equal(a.isnan(), b.isnan()), (name, activation, gate)
        assert torch.allclose(y, theirs, rtol=1e-5, equal_nan=True)
        assert not y[4].isnan().any()


@every_variant
@every_format
def test_empty(variant, layout):
    for shape in ((0, 3, 4, 4), (2, 3, 0, 4), (0, 3, 0, 0)):
        dy, x, weights = inputs(shape, 2, layout=layout)
        y, (mean, hidden, logit), gradients = run(dy, x, weights, variant)
        assert y.shape == gradients[0].shape == shape
        assert mean.shape == logit.shape == shape[:2] and hidden.shape == (shape[0], 2)
        leaves = [t.clone().requires_grad_() for t in (x, *weights)]
        expected = torch.autograd.grad(composition(*leaves), leaves, dy)
        for name, a, b in zip(GRADIENTS, gradients, expected, strict=True):
            assert torch.allclose(a, b, equal_nan=True), name


def test_errors_name_what_was_expected():
    dy, x, weights = inputs((2, 6, 4, 5), 3)
    weight1, bias1, weight2, bias2 = weights
    y, *saved = se.forward(x, *weights)
    back = (weight1, weight2, *saved)
    with pytest.raises(ValueError, match="unknown activation 'gelu'; there are silu, relu"):
        se.forward(x, *weights, activation="gelu")
    with pytest.raises(ValueError, match="unknown gate 'tanh'; there are sigmoid, hard_sigmoid"):
        se.backward(dy, x, *back, gate="tanh")
    with pytest.raises(ArrayError, match=r"x must have 4 dimensions, not shape \(6, 4, 5\)"):
        se.forward(x[0], *weights)
    with pytest.raises(ArrayError, match="x must have a channel at least"):
        se.forward(x[:, :0], *weights)
    with pytest.raises(ArrayError, match=r"weight1 must have shape \(R, 6\) or \(R, 6, 1, 1\)"):
        se.forward(x, weight1[:, :5], bias1, weight2, bias2)
    with pytest.raises(ArrayError, match=r"weight2 must have shape \(6, 3\) or \(6, 3, 1, 1\), no"):
        se.forward(x, weight1, bias1, weight2.t(), bias2)
    with pytest.raises(ArrayError, match=r"bias1 must have shape \(3,\), not \(6,\)"):
        se.forward(x, weight1, bias2, weight2, bias2)
    with pytest.raises(ArrayError, match="weight1 must be float32, not float16"):
        se.forward(x, weight1.half(), bias1, weight2, bias2)
    with pytest.raises(ArrayError, match="weight2 must be float16, not float32"):
        se.forward(x.half(), weight1.half(), bias1, weight2, bias2)
    with pytest.raises(ArrayError, match="bias2 must be an array, not a NoneType"):
        se.forward(x, weight1, bias1, weight2, None)
    with pytest.raises(ArrayError, match=r"dy must have shape \(2, 6, 4, 5\), not \(2, 6, 5, 4\)"):
        se.backward(dy.transpose(2, 3), x, *back)
    with pytest.raises(ArrayError, match=r"hidden must have shape \(2, 3\), not \(2, 6\)"):
        se.backward(dy, x, weight1, weight2, saved[0], saved[2], saved[2])
    with pytest.raises(ArrayError, match="mean must be float32, not float16"):
        se.backward(dy, x, weight1, weight2, saved[0].half(), *saved[1:])


@pytest.fixture
def repeating(monkeypatch):
    """A list of the launches prepared, as on a GPU."""
    return stand_in(monkeypatch).prepared


def operator(*names):
    """The operators' launchers, which have repeated nothing yet."""
    return [cached_launch(5 if "backward" not in name else 7)(getattr(ops, name).__wrapped__)
            for name in names]  # fmt: skip


@every_format
def test_what_looks_alike_is_repeated(repeating, layout):
    forward, of_y, backward = operator("_kernel", "_kernel_of_y", "_backward_kernel")
    options, counts = ("silu", "sigmoid"), []
    for seed in range(3):
        dy, x, weights = inputs((2, 12, 3, 5), 3, layout=layout, seed=seed)
        y, *saved = forward(x, *weights, *options)
        found = y, *backward(dy, x, weights[0], weights[2], *saved, *options)
        (alone,) = of_y(x, *weights, *options)
        assert torch.equal(alone, y) and alone.stride() == y.stride()
        counts.append(len(repeating))
        plain_y, _, plain = run(dy, x, weights, "auto")
        for a, b in zip(found, (plain_y, *plain), strict=True):
            assert torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype
    if SIMULATED:
        assert counts[1:] == [counts[0]] * 2 and counts[0] >= 4
    with pytest.raises(ValueError, match="unknown gate"):
        forward(x, *weights, "silu", "tanh")


def test_what_is_copied_or_given_twice_is_not_repeated(repeating):
    forward, backward = operator("_kernel", "_backward_kernel")
    options = "silu", "sigmoid"
    for seed in range(2):
        dy, x, weights = inputs((2, 4, 3, 5), 3, seed=seed)
        turned = x.transpose(2, 3)
        y, *saved = forward(turned, *weights, *options)
        assert torch.equal(y, forward(turned.contiguous(), *weights, *options)[0])
        _, *saved = forward(x, *weights, *options)
        twice = backward(x, x, weights[0], weights[2], *saved, *options)
        once = backward(x.clone(), x, weights[0], weights[2], *saved, *options)
        assert all(torch.equal(a, b) for a, b in zip(twice, once, strict=True))


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@pytest.mark.parametrize("variant, layout, shape, dtype", [
    ("two_pass", "contiguous", (2, 5, 3, 5), torch.float32),
    ("two_pass", "channels_last", (1, 8, 3, 7), torch.float16),
    ("fused", "contiguous", (2, 5, 3, 5), torch.float32),
])  # fmt: skip
def test_the_sanitizer_finds_nothing(variant, layout, shape, dtype):
    dy, x, weights = inputs(shape, 3, dtype, layout=layout)
    with simulator.sanitize() as report:
        run(dy, x, weights, variant)
    assert not report.findings, report.findings


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
def test_all_warps_have_noted_their_sums_before_a_group_is_counted(monkeypatch):
    """Two groups of more channels than a warp has lanes; another block reads the sums."""
    monkeypatch.setattr(fused, "CUT", fused.CUT._replace(least_bytes=128))
    shape = (1, 70, 1, 1)
    problem = se.problem.problem_of(shape, 3, False, "silu", "sigmoid", 4)
    found = plan.plan_of(problem, fused.CUT)
    assert found.n_slots == 2 and found.group == 35
    dy, x, weights = inputs(shape, 3)
    with simulator.sanitize() as report:
        check(dy, x, weights, "fused")
    assert not report.findings, report.findings


@pytest.mark.gpu
@every_pair
@every_dtype
@pytest.mark.parametrize("C, side, R", NETWORK)
def test_the_images_of_a_network(variant, dtype, layout, C, side, R):
    check(*inputs((2, C, side, side), R, dtype, layout=layout, weight_dtype=torch.float32), variant)


@pytest.mark.gpu
@pytest.mark.gpu_memory(32)
@every_pair
def test_more_elements_than_32_bits_count(variant, layout):
    x = torch.randn(2, 8, 12000, 12000, device=PLACE, dtype=torch.float16)
    x = x.to(memory_format=FORMATS[layout])
    assert x.numel() > 2**31
    _, _, weights = inputs((1, 8, 1, 1), 4, torch.float16)
    y, mean, *saved = se.forward(x, *weights, variant=variant)
    expected = torch.stack([image.float().mean((1, 2)) for image in x])
    assert torch.allclose(mean, expected, atol=1e-5)
    gate = torch.sigmoid(saved[1])[:, :, None, None]
    for n in range(2):
        assert torch.allclose(y[n], (x[n] * gate[n]).half(), rtol=2e-3, atol=1e-4)
    dx, *_ = se.backward(x, x, weights[0], weights[2], mean, *saved, variant=variant, out=y)
    corner = (x[-1, -1] * gate[-1, -1]).float()
    shift = (dx[-1, -1].float() - corner).mean()
    assert torch.allclose(dx[-1, -1].float(), corner + shift, rtol=5e-3, atol=2e-2)
