"""The rung `batched` of squeeze and excitation: how it cuts images, and its results in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_squeeze_excite import (
    PLACE,
    ROUNDING,
    assert_close,
    double,
    every_dtype,
    inputs,
    safe,
    sizes,
)
from test_squeeze_excite_resident import H200, NETWORK, beside, problem
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import operation
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import batched, resident_plan
from course_lib.runtime.host import counters
from course_lib.runtime.host import launch as launching
from course_lib.runtime.host.launch import recorded

DRAWS = 4 if SIMULATED else 16
ACTIVATIONS = {"silu": reference.swish, "relu": reference.relu}


@pytest.fixture(params=["all", "some", "none"])
def held(request, monkeypatch):
    """As on chips of eight multiprocessors that hold all planes of small images, some, or none."""
    shared_bytes = {"all": 227 << 10, "some": 30 << 10, "none": 27 << 10}[request.param]
    monkeypatch.setattr(batched, "room_of", lambda x: (8, shared_bytes))
    return request.param


def forward(x, weights, **options):
    return se.forward(x, *weights, variant="batched", **options)


def check(x, weights, activation="silu", gate="sigmoid", runs=1 if SIMULATED else 2):
    """Forward into memory that was NaN, `runs` times with one result: against float64."""
    first, *again = (
        forward(x, weights, out=torch.full_like(x, math.nan), activation=activation, gate=gate)
        for _ in range(runs)
    )
    for other in again:
        assert all(map(torch.equal, first, other))
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
    return first


# ------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("N", [1, 8, 32, 1000])
@pytest.mark.parametrize("shape", [*NETWORK[4:], (1, 1, 1), (3, 7, 2), (200, 1, 9)])
def test_all_blocks_run_at_once_and_groups_cover_every_channel_once(N, shape, itemsize):
    made = problem(N, *shape, itemsize=itemsize)
    plan = batched.plan_of(made, *H200)
    if plan is None:  # more channels to a block than it has room for
        assert N == 1000 and made.C > batched.MOST_CHANNELS
        return
    assert (plan.n_groups - 1) * plan.group < made.C <= plan.n_groups * plan.group
    assert plan.group <= batched.MOST_CHANNELS
    assert plan.group == 1 or plan.group * made.n_pixels**2 < 2**32
    assert -(-N // batched.SAMPLES) * plan.n_groups <= resident_plan.BLOCKS * H200[0]
    held_bytes = plan.n_held * made.n_pixels * itemsize
    per_block = held_bytes + batched.STATIC_BYTES + resident_plan.RESERVED_BYTES
    assert resident_plan.BLOCKS * per_block <= 228 << 10
    assert held_bytes % 16 == 0


def test_an_h200_holds_most_of_the_last_blocks():
    for itemsize, least in ((4, 0.5), (2, 1.0)):
        for shape in NETWORK[-2:]:
            plan = batched.plan_of(problem(32, *shape, itemsize=itemsize), *H200)
            assert plan.n_held >= least * plan.group * batched.SAMPLES


def test_what_it_cannot_take_is_refused(monkeypatch):
    refused = pytest.raises(ValueError, match="batched takes contiguous images")
    for shape, R, layout in (
        ((2, 8, 3, 3), 2, "channels_last"), ((2, 3, 2, 2), 300, "contiguous"),
        ((1200, 1, 1, 1), 1, "contiguous"),
    ):  # fmt: skip
        _, x, weights = inputs(shape, R, layout=layout)
        with refused:
            forward(x, weights)
    dy, x, weights = inputs((1, 2, 2, 2), 1)
    _, *saved = se.forward(x, *weights)
    with pytest.raises(ValueError, match="unknown variant 'batched'"):
        se.backward(dy, x, weights[0], weights[2], *saved, variant="batched")
    a10 = launching.Chip((8, 6), 99 << 10, 72, 6 << 20, "A10")
    for module in (launching, operation):
        monkeypatch.setattr(module, "chip_of", lambda x: a10)
    _, x, weights = inputs((1, 8, 3, 3), 2)
    with pytest.raises(ValueError, match="'batched' needs compute capability 9.0"):
        forward(x, weights)


def test_auto_takes_it_for_many_samples_and_large_layers():
    found = {
        (N, *shape, itemsize) for N in (1, 8, 32) for shape in NETWORK for itemsize in (2, 4)
        if se.default_for(problem(N, *shape, itemsize=itemsize), "forward", H200) == "batched"
    }  # fmt: skip
    assert found == {(32, *shape, 4) for shape in NETWORK[-4:]} | {
        (32, *shape, 2) for shape in NETWORK[-2:]
    }
    for made, direction, rung in (
        (problem(32, *NETWORK[-1]), "backward", "two_pass"),
        (problem(32, *NETWORK[-1], channels_last=True), "forward", "two_pass"),
        (problem(32, 2688, 60, 112), "forward", "two_pass"),  # planes weigh more than weights
        (problem(16, *NETWORK[-1], itemsize=2), "forward", "two_pass"),
        (problem(16, *NETWORK[-1]), "forward", "batched"),
        (problem(2000, *NETWORK[-1]), "forward", "two_pass"),  # not all at once
    ):
        assert se.default_for(made, direction, H200) == rung
    assert se.default_for(problem(32, *NETWORK[-1]), "forward", (108, 163 << 10)) == "two_pass"


# ------------------------------------------------------------------------ against float64


@pytest.mark.parametrize("shape, R, dtype", in_turns((
    ((5, 24, 5, 7), 6), ((1, 3, 9, 11), 2), ((1, 1, 1, 1), 1), ((6, 9, 1, 1), 5), ((9, 2, 1, 3), 3),
    ((2, 3, 30, 44), 4), ((33, 20, 2, 2), 7),
), ROUNDING))  # fmt: skip
def test_images(shape, R, dtype):
    _, x, weights = inputs(shape, R, dtype)
    check(x, weights)


@pytest.mark.parametrize("shape, R, dtype", in_turns((
    ((6, 24, 8, 8), 16), ((3, 35, 4, 10), 8), ((3, 24, 8, 8), 8)
), ROUNDING))  # fmt: skip
def test_planes_that_are_held_and_planes_that_are_not(held, shape, R, dtype):
    _, x, weights = inputs(shape, R, dtype)
    made = problem(*shape[:3], R, itemsize=dtype.itemsize)._replace(n_pixels=shape[2] * shape[3])
    plan = batched.plan_of(made, *batched.room_of(x))
    most = batched.SAMPLES * plan.group
    assert {"all": plan.n_held == most, "some": 0 < plan.n_held, "none": plan.n_held == 0}[held]
    if held == "some" and dtype == torch.float32:
        assert plan.n_held % plan.group and plan.n_held < most  # a sample in part
    check(x, weights)


def test_by_auto(monkeypatch):
    _, x, weights = inputs((33, 12, 2, 2), 6)
    monkeypatch.setattr(batched, "LARGE_LAYERS", 60)
    with recorded() as launches:
        y, *_ = se.forward(x, *weights)
    assert tuple(kernel for kernel, *_ in launches) == batched.FORWARD_KERNELS
    assert torch.equal(y, forward(x, weights)[0])


@settings(deadline=None, max_examples=DRAWS * 4)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (6, 40, 7, 7))),
    R=st.integers(1, 20),
    dtype=st.sampled_from(list(ROUNDING)),
    wide=st.booleans(),
    activation=st.sampled_from(["silu", "relu"]),
    gate=st.sampled_from(["sigmoid", "hard_sigmoid"]),
    seed=st.integers(0, 99),
)
def test_random_images(shape, R, dtype, wide, activation, gate, seed):
    _, x, weights = inputs(
        shape, R, dtype, weight_dtype=torch.float32 if wide else dtype, seed=seed
    )  # fmt: skip
    if safe(x, weights, activation, gate):
        check(x, weights, activation, gate)


def test_many_hidden_channels():
    for shape, R in (((5, 8, 3, 3), batched.MOST_HIDDEN), ((1, 33, 1, 2), 215)):
        _, x, weights = inputs(shape, R)
        check(x, weights)


@every_dtype
def test_images_that_begin_beside_a_boundary(dtype):
    _, x, weights = inputs((5, 9, 4, 8), 3, dtype)
    expected = forward(x, weights)
    for out in (None, beside(x)):
        for one, other in zip(forward(beside(x), weights, out=out), expected, strict=True):
            assert_close(one, double(other), np.abs(double(other)) + 1, "beside")


def test_a_nan_spreads_through_its_sample_alone(held):
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


# ------------------------------------------------------------------------ its blocks


@pytest.mark.skipif(not SIMULATED, reason="the simulator has the orders to try")
def test_in_any_order_of_blocks_and_the_counters_are_left_at_zero(held, monkeypatch):
    seen = []

    def noted(n, like):
        seen.append(counters.counters(n, like))
        return seen[-1]

    monkeypatch.setattr(batched, "counters", noted)
    for seed in range(3):
        _, x, weights = inputs((6, 12, 4, 4), 3, seed=seed)
        with simulator.options(seed=seed):
            check(x, weights, runs=2)
    assert len(seen) == 6 and not any(np.asarray(c).any() for c in seen)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer belongs to the simulator")
def test_the_sanitizer_finds_nothing(held):
    shapes = (5, 5, 7, 9), (3, 17, 4, 4), (2, 24, 4, 2)
    for shape, dtype in zip(shapes, ROUNDING, strict=True):
        _, x, weights = inputs(shape, 3, dtype)
        with simulator.sanitize() as report:
            forward(x, weights)
        assert not report.findings, report


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("N", [6, 32])
@pytest.mark.parametrize("shape", NETWORK[-8:])
def test_the_images_of_a_network(N, shape, dtype):
    C, side, R = shape
    _, x, weights = inputs((N, C, side, side), R, dtype)
    check(x, weights)


@pytest.mark.gpu
@every_dtype
def test_captured_in_a_graph_and_beside_other_kernels(dtype):
    _, x, weights = inputs((22, 960, 12, 12), 40, dtype)
    expected = [t.clone() for t in forward(x, weights)]
    y = torch.empty_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            found = forward(x, weights, out=y)
    other, a = torch.cuda.Stream(), torch.randn(2048, 2048, device=PLACE)
    for _ in range(20):
        with torch.cuda.stream(other):
            a = a @ a * 1e-3
        y.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(one, wanted) for one, wanted in zip(found, expected, strict=True))
