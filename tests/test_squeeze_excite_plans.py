"""Squeeze and excitation: what each rung's plan cuts and holds, and which rung AUTO takes.

Of `fused` also the order of its tasks, and launches beside others. That results are right on all
kinds of inputs: `test_squeeze_excite`, `test_squeeze_excite_held`.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_squeeze_excite import NETWORK, check, inputs, problem

from course_lib import SIMULATED, simulator
from course_lib.kernels import operation
from course_lib.kernels import squeeze_excite as se
from course_lib.kernels.squeeze_excite import batched, fused, resident, resident_plan
from course_lib.kernels.squeeze_excite.plan import Cut
from course_lib.runtime.host import counters
from course_lib.runtime.host import launch as launching
from course_lib.runtime.host.launch import Chip

H200 = 132, 227 << 10
NO_ROOM = 1, 0  # for `resident`


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 30))
def test_each_part_is_summed_and_scaled_once_and_nothing_waits_for_what_comes_later(
    N, n_slots, lead
):
    n_parts = N * n_slots
    lead = min(n_parts, n_slots + lead)
    tasks = [fused.task_of.py_func(ticket, 2 * n_parts, lead) for ticket in range(2 * n_parts)]
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
        for N in (1, 8, 32) for shape in NETWORK
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
            check(*inputs((3, 5, 7, 9), 3, seed=seed), "fused")
    assert len(seen) >= 6 and not any(np.asarray(each).any() for each in seen)


def block(N, C, H, R, dtype=torch.float32, seed=0):
    generator = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device="cuda").to(dtype)

    return normal(N, C, H, H), normal(R, C), normal(R), normal(C, R), normal(C)


@pytest.mark.gpu
def test_several_streams_at_once_do_not_disturb_each_other():
    calls = [block(9, C, H, R, seed=C) for C, H, R in NETWORK[:6]]
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
    for seed, (C, H, R) in enumerate(NETWORK[4:6]):
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
        for C, H, R in NETWORK:
            call = block(N, C, H, R, dtype, seed=C)
            found = se.forward(*call, variant="fused")
            again = se.forward(*call, variant="fused")
            wanted = se.forward(*call, variant="two_pass")
            for a, b, c in zip(found, again, wanted, strict=True):
                assert torch.equal(a, b)
                tolerance = 1e-4 if a.dtype == torch.float32 else 2e-2
                torch.testing.assert_close(a, c, rtol=tolerance, atol=tolerance)


# ---- rungs that hold images in shared memory


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


def test_an_h200_holds_most_of_the_last_blocks():
    for itemsize, least in ((4, 0.5), (2, 1.0)):
        for shape in NETWORK[-2:]:
            plan = batched.plan_of(problem(32, *shape, itemsize=itemsize), *H200)
            assert plan.n_held >= least * plan.group * batched.SAMPLES


@pytest.mark.parametrize("rung", ["resident", "batched"])
def test_old_chips_are_refused(monkeypatch, rung):
    chip = Chip((8, 6), 99 << 10, 72, 6 << 20, "A10")
    for module in (launching, operation):
        monkeypatch.setattr(module, "chip_of", lambda x: chip)
    _, x, weights = inputs((1, 8, 3, 3), 2)
    with pytest.raises(ValueError, match=f"'{rung}' needs compute capability 9.0.* has 8.6"):
        se.forward(x, *weights, variant=rung)
    room = resident_plan.room_of(x)
    assert se.default_for(problem(1, *NETWORK[0]), "forward", room) == "two_pass"


def test_what_does_not_fit_is_refused():
    assert resident_plan.plan_of(problem(1, 24, 190, 6, channels_last=True), *H200) is None
    assert resident_plan.plan_of(problem(1, 64, 16, 2000), *H200) is None
    assert resident_plan.plan_of(problem(1, 512, 256, 16), *H200) is None  # 134 MB
    for rung, shape, R, layout in (
        ("resident", (1, 8, 3, 3), 2, "channels_last"),
        ("batched", (2, 8, 3, 3), 2, "channels_last"),
        ("batched", (2, 3, 2, 2), 300, "contiguous"),
        ("batched", (1200, 1, 1, 1), 1, "contiguous"),
    ):
        dy, x, weights = inputs(shape, R, layout=layout)
        with pytest.raises(ValueError, match=f"{rung} takes contiguous images"):
            se.forward(x, *weights, variant=rung)
        _, *saved = se.forward(x, *weights, variant="separate")
        words = {"resident": "resident takes contiguous images", "batched": "unknown variant 'ba"}
        with pytest.raises(ValueError, match=words[rung]):
            se.backward(dy, x, weights[0], weights[2], *saved, variant=rung)


def test_auto_takes_resident_where_it_fits_and_the_small_layers_are_small():
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


def test_auto_takes_batched_for_many_samples_and_large_layers():
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
