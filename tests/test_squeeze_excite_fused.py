"""The rung `fused` of squeeze and excitation: its plans, and what only blocks that wait can break.

That its results are right on all kinds of inputs: `test_squeeze_excite`.
"""

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import fused
from course_lib.kernels.squeeze_excite.fused_backward import groups_left
from course_lib.kernels.squeeze_excite.fused_plan import (
    MOST_LAG,
    MOST_STAGES,
    SHARED_RESERVE,
    Room,
    plan_of,
)
from course_lib.kernels.squeeze_excite.problem import problem_of

#: (C, H, R) of the blocks of EfficientNet-B4 at 380 × 380.
SHAPES = (
    (48, 190, 12), (24, 190, 6), (144, 95, 6), (192, 95, 8), (192, 48, 8), (336, 48, 14),
    (336, 24, 14), (672, 24, 28), (960, 24, 40), (960, 12, 40), (1632, 12, 68), (2688, 12, 112),
)  # fmt: skip
H200 = Room(132, 227 << 10, fused.BLOCK_SIZE)
T4 = Room(40, 64 << 10, fused.BLOCK_SIZE)
SMALL = Room(6, 227 << 10, 64)


def problem(N, C, H, R, channels_last=False, itemsize=4):
    return problem_of((N, C, H, H), R, channels_last, "silu", "sigmoid", itemsize)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("itemsize", [4, 2])
def test_plans_fit_the_chip(itemsize, channels_last):
    for N in (1, 8, 32):
        for C, H, R in SHAPES:
            for n_held in (1, 2):
                found = plan_of(problem(N, C, H, R, channels_last, itemsize), n_held, H200)
                assert found is not None, (N, C, H, R, n_held)
                assert found.n_parts * found.n_teams <= H200.n_blocks
                assert found.shared_bytes + SHARED_RESERVE <= H200.shared_limit
                n_steps = -(-N // found.n_teams)
                assert 1 <= found.n_stages <= min(MOST_STAGES, n_steps)
                assert found.n_stages > found.lag and (n_steps == 1 or found.n_stages > 1)


def test_a_sample_too_large_for_all_blocks_has_no_plan():
    assert plan_of(problem(1, 64, 512, 4), 1, H200) is None
    assert plan_of(problem(1, 64, 300, 4), 1, H200) is not None
    assert plan_of(problem(2, 48, 190, 12), 1, T4) is None


def test_copies_are_waited_for_as_long_as_they_need():
    """By the order in which groups end: none that a step needs may be among those left."""
    for n_stages in range(1, MOST_STAGES + 1):
        for n_others in range(1, min(2, n_stages) + 1):
            for lag in range(min(MOST_LAG, max(0, n_stages - 2)) + 1):
                ended = [{("dy", k), ("x", k) if k < n_others else None} for k in range(n_stages)]
                for k in range(20):
                    left = simulated(groups_left)(k, n_stages, n_others, lag)
                    assert left >= 0
                    arrived = set().union(*ended[: len(ended) - left])
                    assert {("dy", k), ("x", k)} <= arrived, (n_stages, n_others, lag, k)
                    ended.append({("x", k + n_others)})
                    ended.append({("dy", k - lag + n_stages)} if k >= lag else set())


def simulated(function):
    return getattr(function, "py_func", function)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@pytest.mark.parametrize("lag", range(MOST_LAG + 1))
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_teams_of_several_blocks_walk_many_samples(layout, lag):
    found = SMALL if lag else SMALL._replace(n_blocks=3)
    rng, channels_last = np.random.default_rng(lag), layout == "channels_last"
    x, dy = (rng.normal(size=(7, 5, 6, 6)).astype(np.float32) for _ in range(2))
    if channels_last:
        x, dy = (np.ascontiguousarray(a.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
                 for a in (x, dy))  # fmt: skip
    w1, b1, w2, b2 = (rng.normal(size=s).astype(np.float32) for s in ((3, 5), 3, (5, 3), 5))
    this = problem(7, 5, 6, 3, channels_last)
    nan = [np.full(s, np.nan, np.float32) for s in ((7, 5), (7, 3), (7, 5), (7, 5), (7, 3))]
    y, dx = np.full_like(x, np.nan), np.full_like(x, np.nan)
    with simulator.sanitize() as report:
        plan = plan_of(this, 1, found, 3, lag)
        fused.launch_forward(this, plan, found, x, w1, b1, w2, b2, y, *nan[:3])
        plan = plan_of(this, 2, found, 3, lag)
        _, hidden, logit = nan[:3]
        fused.launch_backward(this, plan, found, dy, x, w1, w2, hidden, logit, dx, *nan[3:])
    assert plan.lag == lag and plan.n_parts == 3
    assert not report, str(report)
    arrays = [a.astype(np.float64) for a in (dy, x, w1, b1, w2, b2)]
    wanted = reference.squeeze_excite(*arrays[1:], "silu", "sigmoid")
    gradients = reference.squeeze_excite_backward(*arrays, "silu", "sigmoid")
    np.testing.assert_allclose(y, wanted, atol=2e-6)
    np.testing.assert_allclose(nan[0], x.mean((2, 3)), atol=1e-6)
    np.testing.assert_allclose(dx, gradients[0], atol=1e-5)
    np.testing.assert_allclose(nan[3].sum(0), gradients[4], atol=1e-5)
    np.testing.assert_allclose(nan[4].sum(0), gradients[2], atol=1e-5)


def block(N, C, H, R, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    return normal(N, C, H, H), normal(R, C), normal(R), normal(C, R), normal(C)


@pytest.mark.gpu
def test_several_streams_at_once_do_not_disturb_each_other():
    calls = [block(9, C, H, R, seed=C) for C, H, R in SHAPES[:6]]
    expected = [se.forward(*call, variant="two_pass")[0] for call in calls]
    streams = [torch.cuda.Stream() for _ in calls]
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        for call, stream in zip(calls, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(se.forward(*call, variant="fused")[0])
    torch.cuda.synchronize()
    for i, y in enumerate(found):
        torch.testing.assert_close(y, expected[i % len(calls)], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_captured_in_a_graph_and_replayed_beside_another():
    graphs = []
    for seed, (C, H, R) in enumerate(SHAPES[4:6]):
        call = block(8, C, H, R, seed=seed)
        se.forward(*call, variant="fused")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(3):
                y = se.forward(*call, variant="fused")[0]
        expected = se.forward(*call, variant="two_pass")[0]
        graphs.append((graph, y, expected, torch.cuda.Stream(), call))  # replays read the inputs
    for _ in range(5):
        for graph, y, _, stream, _ in graphs:
            with torch.cuda.stream(stream):
                y.fill_(float("nan"))
                graph.replay()
    torch.cuda.synchronize()
    for _, y, expected, *_ in graphs:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_blocks_of_efficientnet(dtype):
    for N in (1, 8, 32):
        for C, H, R in SHAPES:
            call = block(N, C, H, R, dtype, seed=C)
            for layout in (torch.contiguous_format, torch.channels_last):
                x = call[0].to(memory_format=layout)
                found = se.forward(x, *call[1:], variant="fused")
                again = se.forward(x, *call[1:], variant="fused")
                wanted = se.forward(x, *call[1:], variant="two_pass")
                for a, b, c in zip(found, again, wanted, strict=True):
                    assert torch.equal(a, b)
                    tolerance = 1e-4 if a.dtype == torch.float32 else 2e-2
                    torch.testing.assert_close(a, c, rtol=tolerance, atol=tolerance)
