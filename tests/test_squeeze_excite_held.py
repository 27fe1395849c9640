"""Rungs of squeeze and excitation that hold images in shared memory: `resident`, and `batched`.

Results in float64; what fits where: `test_squeeze_excite_plans`. `batched` goes forward alone.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_squeeze_excite import (
    NETWORK,
    PLACE,
    ROUNDING,
    assert_close,
    double,
    every_dtype,
    inputs,
    problem,
    run,
    safe,
    sizes,
)
from test_squeeze_excite import check as check_passes
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import batched, resident, resident_plan
from course_lib.kernels.squeeze_excite.problem import problem_of
from course_lib.runtime.host import counters
from course_lib.runtime.host.launch import recorded

ACTIVATIONS = {"silu": reference.swish, "relu": reference.relu}
RUNGS = "resident", "batched"
every_rung = pytest.mark.parametrize("rung", RUNGS)
#: Chips of eight multiprocessors that hold all planes of small images, some, or none.
HELD = {"all": 227 << 10, "some": 30 << 10, "none": 27 << 10}


@pytest.fixture
def few_blocks(monkeypatch):
    """As on a chip of four multiprocessors: a sample's planes are cut, and samples take turns."""
    monkeypatch.setattr(resident, "room_of", lambda x: (4, 26 << 10))
    monkeypatch.setattr(resident_plan, "LEAST_BYTES", 64)
    resident_plan.plan_of.cache_clear()
    yield
    resident_plan.plan_of.cache_clear()


@pytest.fixture(params=HELD)
def held(request, monkeypatch):
    monkeypatch.setattr(batched, "room_of", lambda x: (8, HELD[request.param]))
    return request.param


def forward(x, weights, rung="batched", **options):
    return se.forward(x, *weights, variant=rung, **options)


def check(rung, dy, x, weights, activation="silu", gate="sigmoid", runs=1 if SIMULATED else 2):
    """What the rung makes of them, `runs` times with one result, into memory that was NaN."""
    options = {"activation": activation, "gate": gate}

    def once():
        if rung == "resident":
            y, saved, gradients = check_passes(dy, x, weights, rung, **options)
            return y, *saved, *gradients
        return forward(x, weights, out=torch.full_like(x, math.nan), **options)

    first, *again = (once() for _ in range(runs))
    for other in again:
        assert all(map(torch.equal, first, other))
    y, mean, hidden, logit = first[:4]
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


def test_by_auto(monkeypatch):
    monkeypatch.setattr(batched, "LARGE_LAYERS", 60)
    with recorded() as launches:
        check("auto", *inputs((17, 12, 2, 2), 6), runs=1)
    assert tuple(kernel for kernel, *_ in launches) == batched.FORWARD_KERNELS


@pytest.mark.parametrize("rung, shape, R, dtype", [
    *(("resident", *row) for row in in_turns((
        ((2, 24, 5, 7), 6), ((1, 3, 9, 11), 2), ((1, 1, 1, 1), 1), ((3, 9, 1, 1), 5),
        ((9, 2, 1, 3), 3), ((5, 40, 4, 4), 12),
    ), ROUNDING)),
    # Many weights of a block, and many hidden channels.
    *(("resident", *row, torch.float32) for row in (
        ((1, 96, 2, 2), 40), ((2, 8, 3, 3), 300), ((1, 200, 1, 2), 9))),
    *(("batched", *row) for row in in_turns((
        ((5, 24, 5, 7), 6), ((1, 3, 9, 11), 2), ((1, 1, 1, 1), 1), ((6, 9, 1, 1), 5),
        ((9, 2, 1, 3), 3), ((2, 3, 30, 44), 4), ((33, 20, 2, 2), 7),
    ), ROUNDING)),
    *(("batched", *row, torch.float32) for row in (
        ((5, 8, 3, 3), batched.MOST_HIDDEN), ((1, 33, 1, 2), 215))),
])  # fmt: skip
def test_images(few_blocks, monkeypatch, rung, shape, R, dtype):
    monkeypatch.setattr(resident, "room_of", lambda x: (2, 26 << 10))  # 4 blocks at once
    check(rung, *inputs(shape, R, dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_planes_in_parts_and_samples_in_turns(few_blocks, dtype):
    dy, x, weights = inputs((3, 3, 37, 116 // dtype.itemsize), 4, dtype)
    plan = resident_plan.plan_of(problem_of(
        tuple(x.shape), 4, False, "silu", "sigmoid", x.element_size()), 4, 26 << 10
    )  # fmt: skip
    assert plan.at_once < 3 and plan.n_blocks > 3
    check("resident", dy, x, weights)


@pytest.mark.parametrize("shape, R, dtype", in_turns((
    ((6, 24, 8, 8), 16), ((3, 35, 4, 10), 8), ((3, 24, 8, 8), 8)
), ROUNDING))  # fmt: skip
def test_planes_that_are_held_and_planes_that_are_not(held, shape, R, dtype):
    dy, x, weights = inputs(shape, R, dtype)
    made = problem(*shape[:3], R, itemsize=dtype.itemsize)._replace(n_pixels=shape[2] * shape[3])
    plan = batched.plan_of(made, *batched.room_of(x))
    most = batched.SAMPLES * plan.group
    assert {"all": plan.n_held == most, "some": 0 < plan.n_held, "none": plan.n_held == 0}[held]
    if held == "some" and dtype == torch.float32:
        assert plan.n_held % plan.group and plan.n_held < most  # a sample in part
    check("batched", dy, x, weights)


@every_rung
@settings(deadline=None, max_examples=6 if SIMULATED else 64)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (5, 32, 8, 8))),
    R=st.integers(1, 16),
    dtype=st.sampled_from(list(ROUNDING)),
    wide=st.booleans(),
    activation=st.sampled_from(["silu", "relu"]),
    gate=st.sampled_from(["sigmoid", "hard_sigmoid"]),
    seed=st.integers(0, 99),
)
def test_random_images(rung, shape, R, dtype, wide, activation, gate, seed):
    dy, x, weights = inputs(
        shape, R, dtype, weight_dtype=torch.float32 if wide else dtype, seed=seed
    )  # fmt: skip
    if safe(x, weights, activation, gate):
        check(rung, dy, x, weights, activation, gate)


def beside(x):
    """A copy of `x` that begins three elements behind a boundary."""
    memory = torch.full((x.numel() + 3,), math.nan, dtype=x.dtype, device=PLACE)
    return memory[3:].view(x.shape).copy_(x)


@pytest.mark.parametrize("rung, dtype", in_turns(RUNGS, ROUNDING))
def test_images_that_begin_beside_a_boundary(few_blocks, rung, dtype):
    dy, x, weights = inputs((2, 3, 7, 9), 3, dtype)
    aligned, pairs = forward(x, weights, rung), []
    for out in (None, beside(x)):
        pairs += zip(forward(beside(x), weights, rung, out=out), aligned, strict=True)
    if rung == "resident":
        saved = weights[0], weights[2], *aligned[1:]
        gradients = se.backward(dy, x, *saved, variant=rung)
        for one, other, out in (
            (beside(dy), x, None), (dy, beside(x), beside(x)), (beside(dy), beside(x), beside(x)),
        ):
            found = se.backward(one, other, *saved, variant=rung, out=out)
            pairs += zip(found, gradients, strict=True)
    for one, other in pairs:
        assert_close(one, double(other), np.abs(double(other)) + 1, "beside")


def test_a_nan_spreads_through_its_sample_alone(few_blocks):
    dy, x, weights = inputs((3, 6, 5, 5), 3)
    x[1, 2, 3, 3] = math.nan
    y, saved, gradients = run(dy, x, weights, "resident")
    for image in (y, gradients[0]):
        assert image[1].isnan().all() and not image[0].isnan().any() and not image[2].isnan().any()
    assert all(gradient.isnan().any() for gradient in gradients[1:])


def test_a_nan_spreads_through_its_sample_alone_in_a_batch(held):
    _, x, weights = inputs((6, 6, 4, 4), 3)
    x[1, 2, 3, 3] = math.nan
    y, *_ = forward(x, weights)
    assert y[1].isnan().all() and not y[[0, 2, 3, 4, 5]].isnan().any()


def test_an_infinite_weight_stays_in_its_row():
    _, x, weights = inputs((5, 9, 4, 4), 20)
    weights[2][3, 19] = math.inf
    *_, hidden, logit = forward(x, weights)
    assert hidden.isfinite().all()
    assert not logit[:, 3].isfinite().any()
    assert logit[:, [0, 1, 2, 4, 5, 6, 7, 8]].isfinite().all()


# ------------------------------------------------------------------------ their blocks


@pytest.mark.skipif(not SIMULATED, reason="the simulator has the orders to try")
@pytest.mark.parametrize("rung, room, shape", [
    ("resident", None, (4, 5, 7, 9)), *(("batched", room, (6, 12, 4, 4)) for room in HELD),
])  # fmt: skip
def test_in_any_order_of_blocks_and_the_counters_are_left_at_zero(
    few_blocks, monkeypatch, rung, room, shape
):
    seen, module = [], getattr(se, rung)

    def noted(n, like):
        seen.append(counters.counters(n, like))
        return seen[-1]

    monkeypatch.setattr(module, "counters", noted)
    if room:
        monkeypatch.setattr(batched, "room_of", lambda x: (8, HELD[room]))
    first = None
    for seed in range(2):
        with simulator.options(seed=seed):
            found = check(rung, *inputs(shape, 3))
        first = first or found
        assert all(map(torch.equal, found, first))
    assert len(seen) == (4 if rung == "resident" else 2)
    assert not any(np.asarray(c).any() for c in seen)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer belongs to the simulator")
@pytest.mark.parametrize("rung, room, shape, dtype", [
    ("resident", None, (2, 5, 7, 9), torch.float32),
    ("resident", None, (3, 17, 4, 4), torch.bfloat16),
    ("batched", "all", (3, 5, 7, 9), torch.float32),
    ("batched", "some", (3, 17, 4, 4), torch.float16),
    ("batched", "none", (2, 24, 4, 2), torch.bfloat16),
])  # fmt: skip
def test_the_sanitizer_finds_nothing(few_blocks, monkeypatch, rung, room, shape, dtype):
    monkeypatch.setattr(resident, "room_of", lambda x: (2, 26 << 10))
    if room:
        monkeypatch.setattr(batched, "room_of", lambda x: (8, HELD[room]))
    with simulator.sanitize() as report:
        check(rung, *inputs(shape, 3, dtype))
    assert not report.findings, report


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize(
    "rung, N", [("resident", 1), ("resident", 8), ("batched", 6), ("batched", 32)]
)
@pytest.mark.parametrize("shape", NETWORK)
def test_the_images_of_a_network(rung, N, shape, dtype):
    if rung == "batched" and shape not in NETWORK[-8:]:
        pytest.skip("its blocks are not all there at once")
    C, side, R = shape
    check(rung, *inputs((N, C, side, side), R, dtype, weight_dtype=torch.float32))


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("rung, shape, R", [
    ("resident", (4, 96, 40, 40), 24), ("batched", (22, 960, 12, 12), 40),
])  # fmt: skip
def test_captured_in_a_graph_and_beside_other_kernels(rung, shape, R, dtype):
    dy, x, weights = inputs(shape, R, dtype)
    expected = [t.clone() for t in check(rung, dy, x, weights)]
    y, dx = torch.empty_like(x), torch.empty_like(x)
    layers = weights[0], weights[2]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            kept = forward(x, weights, rung, out=y)
            if rung == "resident":
                kept += se.backward(dy, x, *layers, *kept[1:], variant=rung, out=dx)
    other, a = torch.cuda.Stream(), torch.randn(2048, 2048, device=PLACE)
    for _ in range(20):
        with torch.cuda.stream(other):
            a = a @ a * 1e-3
        y.fill_(math.nan)
        dx.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(one, wanted) for one, wanted in zip(kept, expected, strict=True))
