"""The rung `fused` of squeeze and excitation: the order of its tasks, and launches beside others.

That its results are right on all kinds of inputs: `test_squeeze_excite`.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import SIMULATED, simulator
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.blocks.work_queue import task_of
from course_lib.kernels.squeeze_excite import fused
from course_lib.kernels.squeeze_excite.plan import Cut
from course_lib.kernels.squeeze_excite.problem import problem_of
from course_lib.runtime.host import counters

#: (C, H, R) of the blocks of EfficientNet-B4 at 380 × 380.
NO_ROOM = 1, 0  # for `resident`
SHAPES = (
    (48, 190, 12), (24, 190, 6), (144, 95, 6), (192, 95, 8), (192, 48, 8), (336, 48, 14),
    (336, 24, 14), (672, 24, 28), (960, 24, 40), (960, 12, 40), (1632, 12, 68), (2688, 12, 112),
)  # fmt: skip


def problem(N, C, H, R, channels_last=False, itemsize=4):
    return problem_of((N, C, H, H), R, channels_last, "silu", "sigmoid", itemsize)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 30))
def test_each_part_is_summed_and_scaled_once_and_nothing_waits_for_what_comes_later(
    N, n_slots, lead
):
    n_parts = N * n_slots
    lead = min(n_parts, n_slots + lead)
    tasks = [task_of.py_func(ticket, 2 * n_parts, lead) for ticket in range(2 * n_parts)]
    summed = [part for summing, part in tasks if summing]
    assert summed == list(range(n_parts)) == [part for summing, part in tasks if not summing]
    place = {part: ticket for ticket, (summing, part) in enumerate(tasks) if summing}
    for ticket, (summing, part) in enumerate(tasks):
        if not summing:
            sample = part // n_slots
            needed = range(sample * n_slots, (sample + 1) * n_slots)
            assert all(place[other] < ticket for other in needed)


def test_auto_takes_fused_for_large_images_with_small_layers():
    taken = {
        (N, *shape): se.default_for(problem(N, *shape), "forward", NO_ROOM)
        for N in (1, 8, 32) for shape in SHAPES
    }  # fmt: skip
    assert {key for key, rung in taken.items() if rung == "fused"} == {
        (32, 48, 190, 12), (32, 24, 190, 6), (32, 192, 95, 8), (32, 144, 95, 6),
    }  # fmt: skip
    for direction in ("forward", "backward"):  # C·R is too much for one block
        assert se.default_for(problem(32, 336, 48, 14), direction, NO_ROOM) == "two_pass"
    large = problem(32, 48, 190, 12)
    assert se.default_for(large._replace(channels_last=True), "forward", NO_ROOM) == "two_pass"


@pytest.mark.skipif(not SIMULATED, reason="the simulator has the orders to try")
@pytest.mark.parametrize("lead", [0, 3])
def test_in_any_order_of_blocks_and_the_counters_are_left_at_zero(monkeypatch, lead):
    from test_squeeze_excite import check, inputs

    seen = []

    def noted(n, like):
        seen.append(counters.counters(n, like))
        return seen[-1]

    monkeypatch.setattr(fused, "counters", noted)
    monkeypatch.setattr(fused, "CUT", Cut(8, 128, 256, 8))
    monkeypatch.setattr(fused, "LEAD", lead)
    monkeypatch.setattr(fused, "BACKWARD_LEAD", lead)
    for seed in range(3):
        with simulator.options(seed=seed):
            check(*inputs((4, 5, 7, 9), 3, seed=seed), "fused")
    assert len(seen) >= 6 and not any(np.asarray(each).any() for each in seen)


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
            found = se.forward(*call, variant="fused")
            again = se.forward(*call, variant="fused")
            wanted = se.forward(*call, variant="two_pass")
            for a, b, c in zip(found, again, wanted, strict=True):
                assert torch.equal(a, b)
                tolerance = 1e-4 if a.dtype == torch.float32 else 2e-2
                torch.testing.assert_close(a, c, rtol=tolerance, atol=tolerance)
