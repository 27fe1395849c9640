"""The rung `resident` of squeeze and excitation: what fits where, and its results in float64."""

import math
from pathlib import Path

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
    inputs,
    run,
    safe,
)
from test_squeeze_excite import check as check_passes
from turns import in_turns

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import operation
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import resident, resident_plan
from course_lib.kernels.squeeze_excite.problem import problem_of
from course_lib.runtime.host import counters
from course_lib.runtime.host import launch as launching

ROOT = Path(__file__).resolve().parent.parent
DRAWS = 4 if SIMULATED else 16
H200 = 132, 227 << 10
#: (C, H, R) of the blocks of EfficientNet-B4 at 380 × 380.
NETWORK = (
    (48, 190, 12), (24, 190, 6), (144, 95, 6), (192, 95, 8), (192, 48, 8), (336, 48, 14),
    (336, 24, 14), (672, 24, 28), (960, 24, 40), (960, 12, 40), (1632, 12, 68), (2688, 12, 112),
)  # fmt: skip
every_dtype = pytest.mark.parametrize("dtype", ROUNDING)


@pytest.fixture
def few_blocks(monkeypatch):
    """As on a chip of four multiprocessors: a sample's planes are cut, and samples take turns."""
    monkeypatch.setattr(resident, "room_of", lambda x: (4, 26 << 10))
    monkeypatch.setattr(resident_plan, "LEAST_BYTES", 64)
    resident_plan.plan_of.cache_clear()
    yield
    resident_plan.plan_of.cache_clear()


def problem(N, C, H, R, channels_last=False, itemsize=4):
    return problem_of((N, C, H, H), R, channels_last, "silu", "sigmoid", itemsize)


def check(dy, x, weights, activation="silu", gate="sigmoid", twice=not SIMULATED):
    """Forward and backward into memory that was NaN: y, what it saves, and the gradients."""
    options = {"activation": activation, "gate": gate}
    y, saved, gradients = check_passes(dy, x, weights, "resident", **options)
    if twice:
        other, others, more = run(dy, x, weights, "resident", **options)
        assert all(map(torch.equal, (y, *saved, *gradients), (other, *others, *more)))
    w1, b1, w2, b2 = (double(w) for w in weights)
    mean, hidden, logit = saved
    mean_true = double(x).mean(axis=(2, 3))
    hidden_true = mean_true @ w1.T + b1
    act = {"silu": reference.swish, "relu": reference.relu}[activation](hidden_true)
    size = np.abs(double(x)).mean(axis=(2, 3))
    assert_close(mean, mean_true, size, "mean")
    size = size @ np.abs(w1).T + np.abs(b1)
    assert_close(hidden, hidden_true, size, "hidden")
    assert_close(logit, act @ w2.T + b2, size @ np.abs(w2).T + np.abs(b2), "logit")
    return y, *saved, *gradients


# ------------------------------------------------------------------------ the plan


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("N", [1, 8, 32])
@pytest.mark.parametrize("shape", NETWORK)
def test_all_blocks_run_at_once_and_hold_all_of_a_sample(N, shape, itemsize):
    made = problem(N, *shape, itemsize=itemsize)
    plan = resident_plan.plan_of(made, *H200)
    size = made.C * made.n_pixels
    assert plan.at_once * plan.n_blocks <= 132 * resident_plan.BLOCKS
    assert (plan.n_blocks - 1) * plan.share < size <= plan.n_blocks * plan.share
    per_block = (
        plan.shared_bytes(itemsize) + resident_plan.STATIC_BYTES + resident_plan.RESERVED_BYTES
    )
    assert resident_plan.BLOCKS * per_block <= 228 << 10
    for rank in range(plan.n_blocks):
        low, high = rank * plan.share, min((rank + 1) * plan.share, size)
        n_planes = (high - 1) // made.n_pixels - low // made.n_pixels + 1
        assert n_planes <= resident.MOST_CHANNELS
        assert n_planes * plan.n_pieces <= resident.TOTALS


def test_one_block_after_the_other_begins_where_samples_take_turns():
    def leading(N, C, H, R, n_multiprocessors=132):
        made = problem(N, C, H, R)
        plan = resident_plan.plan_of(made, n_multiprocessors, 227 << 10)
        return resident_plan.blocks_that_lead(made, plan, n_multiprocessors), plan

    assert leading(32, *NETWORK[0])[0] == 132
    for made in ((1, *NETWORK[0]), (8, *NETWORK[1])):  # all samples at once
        n_leading, plan = leading(*made)
        assert n_leading == plan.at_once * plan.n_blocks
    n_leading, plan = leading(2, *NETWORK[0], 33)  # one at a time
    assert plan.n_blocks > 33 and n_leading == plan.n_blocks


def test_old_chips_are_refused(monkeypatch):
    a10 = launching.Chip((8, 6), 99 << 10, 72, 6 << 20, "A10")
    for module in (launching, operation):
        monkeypatch.setattr(module, "chip_of", lambda x: a10)
    _, x, weights = inputs((1, 8, 3, 3), 2)
    with pytest.raises(ValueError, match="'resident' needs compute capability 9.0.* has 8.6"):
        se.forward(x, *weights, variant="resident")
    assert (
        se.default_for(problem(1, *NETWORK[0]), "forward", resident_plan.room_of(x)) == "two_pass"
    )


def test_what_does_not_fit_is_refused():
    assert resident_plan.plan_of(problem(1, 24, 190, 6, channels_last=True), *H200) is None
    assert resident_plan.plan_of(problem(1, 64, 16, 2000), *H200) is None
    assert resident_plan.plan_of(problem(1, 512, 256, 16), *H200) is None  # 134 MB
    dy, x, weights = inputs((1, 8, 3, 3), 2, layout="channels_last")
    with pytest.raises(ValueError, match="resident takes contiguous images"):
        se.forward(x, *weights, variant="resident")
    _, *saved = se.forward(x, *weights)
    with pytest.raises(ValueError, match="resident takes contiguous images"):
        se.backward(dy, x, weights[0], weights[2], *saved, variant="resident")


def test_auto_takes_it_where_it_fits_and_the_small_layers_are_small():
    small = {(N, *shape) for N in (1, 8) for shape in NETWORK[:-1]}
    large = {4: NETWORK[:6], 2: (NETWORK[0], *NETWORK[2:4])}
    for itemsize, shapes in large.items():
        taken = {
            (N, *shape) for N in (1, 8, 32) for shape in NETWORK
            if se.default_for(problem(N, *shape, itemsize=itemsize), "forward", H200) == "resident"
        }  # fmt: skip
        assert taken == small | {(1, *NETWORK[-1])} | {(32, *shape) for shape in shapes}
    backward = {
        (N, *shape): se.default_for(problem(N, *shape), "backward", H200)
        for N in (1, 8, 32) for shape in NETWORK
    }  # fmt: skip
    assert all(backward[key] == "resident" for key in small - {(8, *NETWORK[0])} if key[1] > 192)
    assert backward[32, *NETWORK[0]] == backward[8, *NETWORK[0]] == "fused"
    assert {key for key, rung in backward.items() if rung == "two_pass"} == {
        (N, *NETWORK[-1]) for N in (1, 8, 32)
    }
    assert se.default_for(problem(1, *NETWORK[0]), "forward", (108, 163 << 10)) == "two_pass"


# ------------------------------------------------------------------------ against float64


@pytest.mark.parametrize("shape, R, dtype", in_turns((
    ((2, 24, 5, 7), 6), ((1, 3, 9, 11), 2), ((1, 1, 1, 1), 1), ((3, 9, 1, 1), 5), ((9, 2, 1, 3), 3),
    ((5, 40, 4, 4), 12),
), ROUNDING))  # fmt: skip
def test_images(few_blocks, dtype, shape, R):
    check(*inputs(shape, R, dtype))


@every_dtype
def test_planes_in_parts_and_samples_in_turns(few_blocks, dtype):
    dy, x, weights = inputs((3, 3, 37, 116 // dtype.itemsize), 4, dtype)
    plan = resident_plan.plan_of(problem_of(
        tuple(x.shape), 4, False, "silu", "sigmoid", x.element_size()), 4, 26 << 10
    )  # fmt: skip
    assert plan.at_once < 3 and plan.n_blocks > 3
    check(dy, x, weights)


@settings(deadline=None, max_examples=DRAWS * 4)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (4, 24, 8, 8))),
    R=st.integers(1, 12),
    dtype=st.sampled_from(list(ROUNDING)),
    wide=st.booleans(),
    activation=st.sampled_from(["silu", "relu"]),
    gate=st.sampled_from(["sigmoid", "hard_sigmoid"]),
    seed=st.integers(0, 99),
)
def test_random_images(shape, R, dtype, wide, activation, gate, seed):
    dy, x, weights = inputs(
        shape, R, dtype, weight_dtype=torch.float32 if wide else dtype, seed=seed
    )  # fmt: skip
    if safe(x, weights, activation, gate):
        check(dy, x, weights, activation, gate)


def beside(x):
    """A copy of `x` that begins three elements behind a boundary."""
    memory = torch.full((x.numel() + 3,), math.nan, dtype=x.dtype, device=PLACE)
    return memory[3:].view(x.shape).copy_(x)


@every_dtype
def test_images_that_begin_beside_a_boundary(few_blocks, dtype):
    dy, x, weights = inputs((2, 5, 7, 9), 3, dtype)
    aligned = se.forward(x, *weights, variant="resident")
    layers, saved = (weights[0], weights[2]), aligned[1:]
    gradients = se.backward(dy, x, *layers, *saved, variant="resident")
    for out in (lambda: None, lambda: beside(x)):
        found = se.forward(beside(x), *weights, variant="resident", out=out())
        pairs = [*zip(found, aligned, strict=True)]
        for one, other in ((beside(dy), x), (dy, beside(x)), (beside(dy), beside(x))):
            found = se.backward(one, other, *layers, *saved, variant="resident", out=out())
            pairs += zip(found, gradients, strict=True)
        for one, other in pairs:
            assert_close(one, double(other), np.abs(double(other)) + 1, "beside")


def test_many_weights_of_a_block_and_many_hidden_channels(few_blocks):
    for shape, R in (((1, 96, 2, 2), 40), ((2, 8, 3, 3), 300), ((1, 200, 1, 2), 9)):
        check(*inputs(shape, R))


def test_a_nan_spreads_through_its_sample_alone(few_blocks):
    dy, x, weights = inputs((3, 6, 5, 5), 3)
    x[1, 2, 3, 3] = math.nan
    y, saved, gradients = run(dy, x, weights, "resident")
    for image in (y, gradients[0]):
        assert image[1].isnan().all() and not image[0].isnan().any() and not image[2].isnan().any()
    assert all(gradient.isnan().any() for gradient in gradients[1:])


# ------------------------------------------------------------------------ its blocks


@pytest.mark.skipif(not SIMULATED, reason="the simulator has the orders to try")
def test_in_any_order_of_blocks_and_the_counters_are_left_at_zero(few_blocks, monkeypatch):
    seen = []

    def noted(n, like):
        seen.append(counters.counters(n, like))
        return seen[-1]

    monkeypatch.setattr(resident, "counters", noted)
    for seed in range(3):
        with simulator.options(seed=seed):
            check(*inputs((4, 5, 7, 9), 3, seed=seed), twice=True)
    assert len(seen) == 12 and not any(np.asarray(c).any() for c in seen)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer belongs to the simulator")
def test_the_sanitizer_finds_nothing(few_blocks):
    for shape, dtype in (((2, 5, 7, 9), torch.float32), ((3, 17, 4, 4), torch.bfloat16)):
        with simulator.sanitize() as report:
            run(*inputs(shape, 3, dtype), "resident")
        assert not report.findings, report


@pytest.mark.gpu
@every_dtype
@pytest.mark.parametrize("N", [1, 8])
@pytest.mark.parametrize("shape", NETWORK)
def test_the_images_of_a_network(N, shape, dtype):
    C, side, R = shape
    check(*inputs((N, C, side, side), R, dtype, weight_dtype=torch.float32))


@pytest.mark.gpu
def test_captured_in_a_graph_and_beside_other_kernels():
    dy, x, weights = inputs((4, 96, 40, 40), 24)
    expected = [t.clone() for t in check(dy, x, weights)]
    y, dx = torch.empty_like(x), torch.empty_like(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            kept = se.forward(x, *weights, variant="resident", out=y)
            kept += se.backward(
                dy, x, weights[0], weights[2], *kept[1:], variant="resident", out=dx
            )
    other, a = torch.cuda.Stream(), torch.randn(2048, 2048, device=PLACE)
    for _ in range(20):
        with torch.cuda.stream(other):
            a = a @ a * 1e-3
        y.fill_(math.nan)
        dx.fill_(math.nan)
        graph.replay()
        for found, wanted in zip(kept, expected, strict=True):
            assert torch.equal(found, wanted)
