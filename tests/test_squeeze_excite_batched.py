"""The rung `batched` of squeeze and excitation: how it cuts images, and its results in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_squeeze_excite import NETWORK, PLACE, assert_close, double, inputs, safe, sizes

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import batched
from course_lib.kernels.squeeze_excite.dense import BLOCK_SIZE
from course_lib.kernels.squeeze_excite.problem import problem_of
from course_lib.runtime.launch import launch, recorded

DRAWS = 4 if SIMULATED else 16
ACTIVATIONS = {"silu": reference.swish, "relu": reference.relu}
H200 = 132, 227 << 10


def problem(N, C, H, R, channels_last=False, itemsize=4):
    return problem_of((N, C, H, H), R, channels_last, "silu", "sigmoid", itemsize)


def forward(x, weights, **options):
    return se.forward(x, *weights, variant="batched", **options)


def check(x, weights, activation="silu", gate="sigmoid"):
    """Forward twice, each time into memory that was NaN; y and what it saves against float64."""
    x_before = x.clone()
    first, second = (
        forward(x, weights, out=torch.full_like(x, math.nan), activation=activation, gate=gate)
        for _ in range(2)
    )
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.nan_to_num(7), other.nan_to_num(7))
    assert torch.equal(x.nan_to_num(7), x_before.nan_to_num(7))
    y, mean, hidden, logit = first
    w1, b1, w2, b2 = (double(w) for w in weights)
    y_true = reference.squeeze_excite(double(x), w1, b1, w2, b2, activation, gate)
    assert_close(y, y_true, sizes(x, x, weights)[0], "y")
    mean_true = double(x).mean(axis=(2, 3))
    hidden_true = mean_true @ w1.T + b1
    logit_true = ACTIVATIONS[activation](hidden_true) @ w2.T + b2
    size = np.abs(double(x)).mean(axis=(2, 3))
    assert_close(mean, mean_true, size, "mean")
    size = size @ np.abs(w1).T + np.abs(b1)
    assert_close(hidden, hidden_true, size, "hidden")
    assert_close(logit, logit_true, size @ np.abs(w2).T + np.abs(b2), "logit")


# ------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("N", [1, 8, 32, 1000])
@pytest.mark.parametrize("shape", [*NETWORK, (1, 1, 1), (3, 7000, 2), (5000, 1, 9)])
def test_groups_cover_every_channel_once(N, shape):
    made = problem(N, *shape)
    plan = batched.plan_of(made)
    assert (plan.n_groups - 1) * plan.group < made.C <= plan.n_groups * plan.group
    assert plan.group <= batched.MOST_CHANNELS
    assert plan.group == 1 or plan.group * made.n_pixels**2 < 2**32
    if N == 32 and shape in NETWORK[-2:]:
        assert N // batched.SAMPLES * plan.n_groups <= batched.N_BLOCKS


def test_other_images_are_refused():
    for dtype, layout in ((torch.float32, "channels_last"), (torch.bfloat16, "contiguous")):
        dy, x, weights = inputs((2, 8, 3, 3), 2, dtype, layout=layout)
        with pytest.raises(ValueError, match="batched takes contiguous float32 images"):
            forward(x, weights)
        _, *saved = se.forward(x, *weights)
        with pytest.raises(ValueError, match="unknown variant 'batched'"):
            se.backward(dy, x, weights[0], weights[2], *saved, variant="batched")


def test_auto_takes_it_for_many_samples_and_large_layers():
    found = {
        (N, *shape, itemsize) for N in (1, 8, 32) for shape in NETWORK for itemsize in (2, 4)
        if se.default_for(problem(N, *shape, itemsize=itemsize), "forward", H200) == "batched"
    }  # fmt: skip
    assert found == {(32, *shape, 4) for shape in NETWORK[-2:]}
    for made, direction in (
        (problem(32, *NETWORK[-1]), "backward"),
        (problem(32, *NETWORK[-1], channels_last=True), "forward"),
        (problem(32, 2688, 24, 112), "forward"),
    ):
        assert se.default_for(made, direction, H200) == "two_pass"


# ------------------------------------------------------------------------ against float64


@pytest.mark.parametrize("shape, R", [
    ((5, 24, 5, 7), 6), ((1, 3, 9, 11), 2), ((1, 1, 1, 1), 1), ((6, 9, 1, 1), 5), ((9, 2, 1, 3), 3),
    ((4, 64, 4, 4), 16), ((7, 70, 4, 2), 40), ((2, 3, 30, 44), 4), ((33, 20, 2, 2), 7),
])  # fmt: skip
def test_images(shape, R):
    _, x, weights = inputs(shape, R)
    check(x, weights)


def test_by_auto(monkeypatch):
    _, x, weights = inputs((33, 12, 2, 2), 6)
    monkeypatch.setattr(batched, "LARGE_LAYERS", 60)
    with recorded() as launches:
        y, *_ = se.forward(x, *weights)
    assert tuple(kernel for kernel, *_ in launches) == batched.FORWARD
    assert torch.equal(y, forward(x, weights)[0])


@settings(deadline=None, max_examples=DRAWS * 4)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (9, 70, 9, 9))),
    R=st.integers(1, 40),
    activation=st.sampled_from(["silu", "relu"]),
    gate=st.sampled_from(["sigmoid", "hard_sigmoid"]),
    seed=st.integers(0, 99),
)
def test_random_images(shape, R, activation, gate, seed):
    _, x, weights = inputs(shape, R, seed=seed)
    if safe(x, weights, activation, gate):
        check(x, weights, activation, gate)


def test_many_hidden_channels():
    for shape, R in (((5, 8, 3, 3), 300), ((1, 33, 1, 2), 515)):
        _, x, weights = inputs(shape, R)
        check(x, weights)


def test_images_that_begin_beside_a_boundary():
    _, x, weights = inputs((5, 9, 4, 8), 3)
    memory = torch.zeros(x.numel() + 3, device=PLACE)
    beside = memory[3:].view(x.shape)
    beside.copy_(x)
    expected = forward(x, weights)
    for made in ({}, {"out": torch.full_like(memory, math.nan)[3:].view(x.shape)}):
        for one, other in zip(forward(beside, weights, **made), expected, strict=True):
            assert_close(one, double(other), np.abs(double(other)) + 1, "beside")


def test_no_samples():
    _, x, weights = inputs((0, 6, 5, 5), 3)
    shapes = [tuple(t.shape) for t in forward(x, weights)]
    assert shapes == [(0, 6, 5, 5), (0, 6), (0, 3), (0, 6)]


def test_a_nan_spreads_through_its_sample_alone():
    _, x, weights = inputs((6, 6, 4, 4), 3)
    x[1, 2, 3, 3] = math.nan
    y, *_ = forward(x, weights)
    assert y[1].isnan().all()
    assert not y[[0, 2, 3, 4, 5]].isnan().any()


def test_an_infinite_weight_stays_in_its_row():
    _, x, weights = inputs((5, 9, 4, 4), 20)
    weights[2][3, 19] = math.inf
    *_, hidden, logit = forward(x, weights)
    assert hidden.isfinite().all()
    assert not logit[:, 3].isfinite().any()
    assert logit[:, [0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()


@pytest.mark.parametrize("n_groups", [1, 15, 16, 17, 128, 129, 300])
def test_any_number_of_slots(n_groups):
    N, R = 3, 7
    slots, bias = torch.randn(n_groups, N, R), torch.randn(R)
    hidden = torch.full((N, R), math.nan)
    slots, bias, hidden = (t.to(PLACE) for t in (slots, bias, hidden))
    n_blocks = -(-N * R // batched.COLUMNS)
    launch(
        batched.hidden_kernel, n_blocks, BLOCK_SIZE,
        slots, bias, hidden, n_groups, N, R, flat=True,
    )  # fmt: skip
    expected = double(slots).sum(0) + double(bias)
    assert_close(hidden, expected, np.abs(double(slots)).sum(0) + 3, "hidden")


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer belongs to the simulator")
def test_the_sanitizer_finds_nothing():
    for shape in ((5, 5, 7, 9), (3, 17, 4, 4), (2, 24, 4, 2)):
        _, x, weights = inputs(shape, 3)
        with simulator.sanitize() as report:
            forward(x, weights)
        assert not report.findings, report


@pytest.mark.gpu
@pytest.mark.parametrize("N", [6, 32])
@pytest.mark.parametrize("shape", NETWORK[-5:])
def test_the_images_of_a_network(N, shape):
    C, side, R = shape
    _, x, weights = inputs((N, C, side, side), R)
    check(x, weights)


@pytest.mark.gpu
def test_captured_in_a_graph():
    _, x, weights = inputs((6, 96, 12, 12), 24)
    expected = [t.clone() for t in forward(x, weights)]
    y = torch.empty_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            found = forward(x, weights, out=y)
    for _ in range(3):
        for t in found:
            t.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
