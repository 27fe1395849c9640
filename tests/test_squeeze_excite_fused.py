"""The rung `fused` of squeeze and excitation: its plans, and what is not held in shared memory.

That its results are right on all kinds of inputs: `test_squeeze_excite`.
"""

import math

import numpy as np
import pytest
import torch

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import fused
from course_lib.kernels.squeeze_excite.fused_plan import (
    SHARED_RESERVE,
    Room,
    part_bytes,
    plan_of,
)
from course_lib.kernels.squeeze_excite.problem import problem_of
from course_lib.runtime.launch import LaunchError

#: (C, H, R) of the blocks of EfficientNet-B4 at 380 × 380.
SHAPES = (
    (48, 190, 12), (24, 190, 6), (144, 95, 6), (192, 95, 8), (192, 48, 8), (336, 48, 14),
    (336, 24, 14), (672, 24, 28), (960, 24, 40), (960, 12, 40), (1632, 12, 68), (2688, 12, 112),
)  # fmt: skip
H200 = Room(132, 16, 227 << 10)
needs_clusters = pytest.mark.skipif(
    not SIMULATED and torch.cuda.get_device_capability() < (9, 0),
    reason="this GPU has no clusters",
)


def problem(N, C, H, R, channels_last=False, itemsize=4):
    return problem_of((N, C, H, H), R, channels_last, "silu", "sigmoid", itemsize)


@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("itemsize", [4, 2])
def test_plans_fit_the_chip(itemsize, channels_last):
    for N in (1, 8, 32):
        for C, H, R in SHAPES:
            for n_arrays in (1, 2):
                this = problem(N, C, H, R, channels_last, itemsize)
                for cluster in (None, 1, 2, 4, 8, 16):
                    found = plan_of(this, itemsize, n_arrays, H200, cluster)
                    if found is None:  # too few blocks to hold the weights
                        assert cluster and R * C * itemsize // cluster > 70_000
                        continue
                    assert found.cluster <= 16 and found.block_size % 32 == 0
                    assert found.cluster * found.n_most >= C
                    assert found.shared_bytes + SHARED_RESERVE <= H200.shared_limit
                    assert found.place * itemsize % 16 == found.other * itemsize % 16 == 0
                    assert found.first * itemsize % 16 == found.second * itemsize % 16 == 0
                    part = part_bytes(this, found.cluster)
                    held = found.held * itemsize * (C if channels_last else 1)
                    kept = held * (2 if found.other else 1)
                    assert found.place * itemsize + kept <= found.shared_bytes
                    # What is not held is little, or there was no room for it.
                    spare = H200.shared_limit - SHARED_RESERVE - found.shared_bytes
                    assert held >= part or spare < C * itemsize * (H if channels_last else 1) + 16


def test_small_layers_too_large_for_shared_memory_are_refused():
    assert plan_of(problem(1, 8192, 1, 4096), 4, 1, H200) is None
    x = np.zeros((1, 4096, 1, 1), np.float32)
    weights = [np.zeros(s, np.float32) for s in ((4096, 4096), 4096, (4096, 4096), 4096)]
    if SIMULATED:
        with pytest.raises(LaunchError, match="C = 4,096 and R = 4,096 do not fit: take 'two_pa"):
            se.forward(x, *weights, variant="fused")


def test_a_chip_without_clusters_is_refused(monkeypatch):
    from types import SimpleNamespace

    from course_lib.runtime import arrays, device

    chip = SimpleNamespace(compute_capability=(8, 0))
    monkeypatch.setattr(fused, "on_gpu", lambda: True)
    monkeypatch.setattr(device, "properties", lambda index: chip)
    monkeypatch.setattr(arrays, "describe", lambda x: SimpleNamespace(device=0))
    with pytest.raises(LaunchError, match="'fused' needs .* 9.0 or more.*8.0: take 'two_pass'"):
        fused.room_of(None)


ROOM = {"nothing": 0, "some": 0.4, "dy alone": 1.5, "all": 3}  # parts of an image


@needs_clusters
@pytest.mark.parametrize("room", ROOM)
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
@pytest.mark.parametrize("cluster, shape", [(2, (1, 3, 40, 41)), (4, (2, 7, 11, 13))])
def test_what_is_not_held_is_read_again(layout, cluster, shape, room):
    """Parts larger than shared memory, and matrices for which there is room one after the other."""
    from test_squeeze_excite import FORMATS, PLACE, assert_close, double, inputs, sizes

    N, C, H, W = shape
    for dtype in (torch.float32, torch.bfloat16):
        dy, x, weights = inputs(shape, 3, dtype, layout=layout, seed=7)
        this = problem_of(shape, 3, layout == "channels_last", "silu", "sigmoid", dtype.itemsize)
        nan = [torch.full(s, math.nan, device=PLACE) for s in ((N, C), (N, 3), (N, C))]
        found = [torch.full(s, math.nan, device=PLACE) for s in ((N, C), (N, 3))]
        y, dx = (torch.full_like(x, math.nan) for _ in range(2))
        plans = []
        for n_arrays in (1, 2):
            bare = plan_of(this, dtype.itemsize, n_arrays, H200, cluster, 64)
            tables = bare.place * dtype.itemsize
            spare = int(ROOM[room] * part_bytes(this, cluster))
            small = H200._replace(shared_limit=tables + SHARED_RESERVE + spare)
            plans.append(plan_of(this, dtype.itemsize, n_arrays, small, cluster, 64))
        with simulator.sanitize() as report:
            fused.launch_forward(this, plans[0], x, *weights, y, *nan)
            w1, _, w2, _ = weights
            fused.launch_backward(this, plans[1], dy, x, w1, w2, *nan[1:], dx, *found)
        assert not SIMULATED or not report.findings, report.findings
        wanted = reference.squeeze_excite(double(x), *map(double, weights))
        gradients = reference.squeeze_excite_backward(*map(double, (dy, x, *weights)))
        size = sizes(dy, x, weights)
        assert_close(y, wanted, size[0], "y")
        assert_close(dx, gradients[0], size[1], "dx")
        assert np.allclose(double(found[0]).sum(0), gradients[4], atol=1e-4)
        assert np.allclose(double(found[1]).sum(0), gradients[2], atol=1e-4)
        assert x.stride() == y.stride() and layout in FORMATS
        whole = part_bytes(this, cluster) // dtype.itemsize
        held = [plan.held * (C if layout == "channels_last" else 1) for plan in plans]
        if room == "nothing":
            assert held == [0, 0]
        if layout == "contiguous" and H == 40 and dtype == torch.float32:
            assert plans[0].n_pieces > 1
        if room == "all":
            assert min(held) >= whole and plans[1].other > 0
        if room == "dy alone" and dtype == torch.float32:
            assert plans[1].other == 0 < held[1]


@needs_clusters
@pytest.mark.parametrize("layout", ["contiguous", "channels_last"])
def test_matrices_take_turns_where_there_is_no_room_for_both(monkeypatch, layout):
    from test_squeeze_excite import check, inputs

    from course_lib.kernels.squeeze_excite import fused_plan

    monkeypatch.setattr(fused_plan, "HELD_WEIGHTS", 0)
    plan_of.cache_clear()
    this = problem(2, 8, 4, 8, layout == "channels_last")
    plan = plan_of(this, 4, 1, H200)
    assert plan.first == plan.second
    for shape, R in (((2, 8, 4, 4), 8), ((1, 9, 3, 5), 5)):
        check(*inputs(shape, R, layout=layout), "fused")
    plan_of.cache_clear()


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
