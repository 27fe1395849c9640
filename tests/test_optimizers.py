"""The optimisers' kernels: every rung and option against float64 and against `torch.optim`."""

import math

import numpy as np
import pytest
import torch
from tensors import PLACE, double

from course_lib import SIMULATED, reference, simulator
from course_lib.kernels import optimizers
from course_lib.kernels.optimizers import table as tables
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import recorded

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(3, 5), (1,), (270,), (2, 3, 4), (0,), (33,)]

every_variant = pytest.mark.parametrize("variant", optimizers.SGD)


def tensors(dtype=torch.float32, shapes=SHAPES):
    return [torch.randn(shape).to(PLACE, dtype) for shape in shapes]


def zeros(likes):
    return [torch.zeros_like(like) for like in likes]


def counts(n):
    return list(torch.zeros(n, device=PLACE))


def close(found, expected, *involved, ulps=2):
    """Within `ulps` units in the last place of the largest number involved; 16 bits rounded."""
    size = np.max(np.abs([expected, *np.broadcast_arrays(expected, *involved)[1:]]), axis=0)
    half, info = found.dtype != torch.float32, torch.finfo(found.dtype)
    tolerance = (0.51 if half else ulps) * info.eps * size + info.tiny
    assert (np.abs(double(found) - expected) <= tolerance).all()


SGD_OPTIONS = [
    dict(momentum=0),
    dict(momentum=0, weight_decay=0.01, maximize=True),
    dict(momentum=0.9),
    dict(momentum=0.9, dampening=0.3, weight_decay=0.01),
    dict(momentum=0.9, nesterov=True),
    dict(momentum=0.5, nesterov=True, weight_decay=0.1, maximize=True),
]
ADAM_OPTIONS = [
    dict(amsgrad=False),
    dict(amsgrad=True, maximize=True),
    dict(amsgrad=False, weight_decay=0.1, betas=(0.0, 0.3)),
    dict(amsgrad=True, weight_decay=0.1, decoupled_weight_decay=True),
    dict(amsgrad=False, weight_decay=0.01, decoupled_weight_decay=True, maximize=True, eps=0.1),
]


def typed(options):
    """Each of the options twice, so that every dtype meets most of them."""
    return [(some, DTYPES[(i + shift) % 3]) for shift in (0, 1) for i, some in enumerate(options)]


@every_variant
@pytest.mark.parametrize(("options", "dtype"), typed(SGD_OPTIONS), ids=str)
def test_sgd_against_float64(variant, options, dtype):
    parameters, buffers = tensors(dtype), [torch.full_like(p, math.nan) for p in tensors(dtype)]
    for step in range(2):
        gradients = tensors(dtype)
        before = [p.clone() for p in parameters]
        old = [b.clone() for b in buffers]
        optimizers.sgd(
            parameters, gradients, buffers if options["momentum"] else None, lr=0.1, **options,
            first_step=step == 0, variant=variant,
        )  # fmt: skip
        for p, q, g, b, o in zip(parameters, before, gradients, buffers, old, strict=True):
            expected, buffer = reference.sgd(
                double(q), double(g), None if step == 0 else double(o), lr=0.1, **options
            )
            close(p, expected, double(q), expected - double(q), double(g))
            if options["momentum"]:
                close(b, buffer, double(o.nan_to_num()), double(g))


@every_variant
@pytest.mark.parametrize(("options", "dtype"), typed(ADAM_OPTIONS), ids=str)
def test_adam_against_float64(variant, options, dtype):
    options = options.copy()
    parameters = tensors(dtype)
    states = [zeros(parameters) for _ in range(2 + options.pop("amsgrad"))]
    steps = counts(len(parameters))
    for step in range(2):
        gradients = tensors(dtype)
        before, old = [p.clone() for p in parameters], [[s.clone() for s in ss] for ss in states]
        optimizers.adam(
            parameters, gradients, *states[:2], steps, lr=0.1, **options, variant=variant,
            max_exp_avg_sqs=states[2] if len(states) > 2 else None,
        )  # fmt: skip
        for i, (p, q, g) in enumerate(zip(parameters, before, gradients, strict=True)):
            peak = double(old[2][i]) if len(states) > 2 else None
            expected = reference.adam(
                double(q), double(g), double(old[0][i]), double(old[1][i]), step, lr=0.1,
                max_exp_avg_sq=peak, **options,
            )  # fmt: skip
            close(p, expected[0], double(q), 0.1, ulps=4)
            for state, was, value in zip(states, old, expected[1:], strict=False):
                close(state[i], value, double(was[i]), double(g))
            assert steps[i].item() == step + 1


def by_torch(make, parameters, gradients):
    """What an optimiser of `torch.optim` makes of the parameters, step after step."""
    parameters = [torch.nn.Parameter(p.clone()) for p in parameters]
    optimiser = make(parameters)
    for some in gradients:
        for p, g in zip(parameters, some, strict=True):
            p.grad = g.clone()
        optimiser.step()
        yield [p.detach() for p in parameters]


@every_variant
@pytest.mark.parametrize("options", SGD_OPTIONS[1::2], ids=str)
def test_sgd_step_for_step_as_pytorch(variant, options):
    parameters, gradients = tensors(), [tensors() for _ in range(5)]
    buffers, table = zeros(parameters), optimizers.Table()
    theirs = by_torch(lambda ps: torch.optim.SGD(ps, lr=0.05, **options), parameters, gradients)
    for step, expected in enumerate(theirs):
        optimizers.sgd(
            parameters, gradients[step], buffers, lr=0.05, **options, first_step=step == 0,
            variant=variant, table=table,
        )  # fmt: skip
        for p, q in zip(parameters, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@every_variant
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adam_step_for_step_as_pytorch(variant, decoupled, amsgrad):
    parameters, gradients = tensors(), [tensors() for _ in range(5)]
    states, steps = [zeros(parameters) for _ in range(3)], counts(1) * len(SHAPES)
    make = torch.optim.AdamW if decoupled else torch.optim.Adam
    options = dict(lr=0.02, weight_decay=0.1, betas=(0.8, 0.99))
    table = optimizers.Table()
    theirs = by_torch(lambda ps: make(ps, amsgrad=amsgrad, **options), parameters, gradients)
    for step, expected in enumerate(theirs):
        optimizers.adam(
            parameters, gradients[step], *states[:2], steps, **options, variant=variant,
            decoupled_weight_decay=decoupled, max_exp_avg_sqs=states[2] if amsgrad else None,
            table=table,
        )  # fmt: skip
        assert steps[0].item() == step + 1
        for p, q in zip(parameters, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


def filled(monkeypatch):
    """A list that grows by one for each launch that writes to a table."""
    launches, launch = [], tables.launch
    monkeypatch.setattr(tables, "launch", lambda *a, **k: (launches.append(a[0]), launch(*a, **k)))
    return launches


def test_the_table_is_filled_once_and_again_where_an_address_changes(monkeypatch):
    launches = filled(monkeypatch)
    parameters, gradients, table = tensors(), tensors(), optimizers.Table()
    wanted = [p.clone() for p in parameters]
    for step in range(4):
        optimizers.sgd(parameters, gradients, lr=0.5, table=table)
        for p, g in zip(wanted, gradients, strict=True):
            p -= 0.5 * g
        assert len(launches) == (7, 0, 1, 0)[step]
        launches.clear()
        if step == 1:
            gradients = tensors()
    assert all(torch.equal(p, q) for p, q in zip(parameters, wanted, strict=True))


def test_many_tensors_of_several_dtypes_and_one_count():
    shapes = [(n % 23,) for n in range(1, 40)]
    parameters = [tensors(DTYPES[i % 3], [shape])[0] for i, shape in enumerate(shapes)]
    gradients = [torch.ones_like(p) for p in parameters]
    states, steps = [zeros(parameters) for _ in range(2)], counts(1) * len(shapes)
    before = [p.clone() for p in parameters]
    for _ in range(2):
        optimizers.adam(parameters, gradients, *states, steps, lr=0.25)
    assert steps[0].item() == 2
    for p, q in zip(parameters, before, strict=True):
        torch.testing.assert_close(p, q - 0.5, rtol=0.01, atol=0.01)


@every_variant
def test_tensors_that_start_anywhere_or_are_transposed(variant):
    memory = [torch.randn(400, device=PLACE) for _ in range(6)]
    before = [m.clone() for m in memory]
    for start, at in ((slice(1, 380), 0), (slice(4, 380), 1)):
        p, g, b = (m[start] for m in memory[at::2])
        optimizers.sgd([p], [g], [b], lr=0.1, momentum=0.5, variant=variant)
        old_p, old_g, old_b = (m[start] for m in before[at::2])
        buffer = 0.5 * old_b + old_g
        torch.testing.assert_close(b, buffer)
        torch.testing.assert_close(p, old_p - 0.1 * buffer)
        for m, was in zip(memory[at::2], before[at::2], strict=True):
            assert torch.equal(m[: start.start], was[: start.start])
            assert torch.equal(m[380:], was[380:])
    p, g = (torch.randn(2, 3, 4, 5, device=PLACE).to(memory_format=torch.channels_last)
            for _ in range(2))  # fmt: skip
    expected = p - 0.5 * g
    optimizers.sgd([p], [g], lr=0.5, variant=variant)
    torch.testing.assert_close(p, expected)


@every_variant
def test_the_learning_rate_in_memory(variant):
    parameters, gradients, lr = tensors(), tensors(), torch.tensor([0.5], device=PLACE)
    table = optimizers.Table()
    for rate in (0.5, 0.125):
        lr.fill_(rate)
        expected = [p - rate * g for p, g in zip(parameters, gradients, strict=True)]
        optimizers.sgd(parameters, gradients, lr=lr, variant=variant, table=table)
        for p, q in zip(parameters, expected, strict=True):
            torch.testing.assert_close(p, q)
    states, steps = [zeros(parameters) for _ in range(2)], counts(len(parameters))
    clones = [p.clone() for p in parameters]
    more, own = [zeros(parameters) for _ in range(2)], counts(len(parameters))
    optimizers.adam(parameters, gradients, *states, steps, lr=lr, variant=variant)
    optimizers.adam(clones, gradients, *more, own, lr=0.125, variant=variant)
    assert all(torch.equal(p, q) for p, q in zip(parameters, clones, strict=True))


@every_variant
def test_special_values(variant):
    bad = torch.tensor([math.nan, math.inf, -math.inf, 1.0], device=PLACE)
    p, g = torch.ones(4, device=PLACE), bad.clone()
    optimizers.sgd([p], [g], lr=0.5, variant=variant)
    torch.testing.assert_close(p, 1 - 0.5 * bad, equal_nan=True)
    p, g = bad.clone(), torch.ones(4, device=PLACE)
    optimizers.sgd([p], [g], lr=0.5, variant=variant)  # no weight decay: 0·inf is not added
    torch.testing.assert_close(p, bad - 0.5, equal_nan=True)
    p, m, v, peak = (torch.zeros(4, device=PLACE) for _ in range(4))
    q = torch.nn.Parameter(p.clone())
    q.grad = bad.clone()
    optimizers.adam([p], [bad], [m], [v], counts(1), max_exp_avg_sqs=[peak], lr=0.5,
                    variant=variant)  # fmt: skip
    torch.optim.Adam([q], lr=0.5, amsgrad=True).step()
    torch.testing.assert_close(p, q.detach(), equal_nan=True)


@every_variant
def test_nothing_to_do(variant):
    optimizers.sgd([], [], lr=0.1, variant=variant)
    optimizers.adam([], [], [], [], [], lr=0.1, variant=variant)
    empty, steps = tensors(shapes=[(0,), (3, 0)]), counts(2)
    optimizers.adam(empty, empty, empty, empty, steps, lr=0.1, variant=variant)
    assert [s.item() for s in steps] == [1, 1]


def test_errors_name_what_was_expected():
    p, g = tensors(shapes=[(3, 4)]), tensors(shapes=[(3, 4)])
    with pytest.raises(ValueError, match="unknown variant 'quick'; there are naive, fused"):
        optimizers.sgd(p, g, lr=0.1, variant="quick")
    with pytest.raises(ValueError, match="1 parameters need as many gradients, not 0"):
        optimizers.sgd(p, [], lr=0.1)
    with pytest.raises(ValueError, match="1 parameters need as many momentum_buffers, not none"):
        optimizers.sgd(p, g, lr=0.1, momentum=0.9)
    with pytest.raises(ArrayError, match=r"gradients\[0\] must have shape \(3, 4\), not \(4, 3\)"):
        optimizers.sgd(p, [g[0].t()], lr=0.1)
    with pytest.raises(ArrayError, match=r"gradients\[0\] must be float32, not float16"):
        optimizers.sgd(p, [g[0].half()], lr=0.1)
    with pytest.raises(ArrayError, match=r"gradients\[0\] must lie in memory as parameters\[0\]"):
        optimizers.sgd(p, [g[0].t().contiguous().t()], lr=0.1)
    with pytest.raises(ArrayError, match=r"parameters\[0\] must fill one stretch of memory"):
        optimizers.sgd([p[0][:, :2]], [g[0][:, :2]], lr=0.1)
    with pytest.raises(ArrayError, match="must be float32 or float16 or bfloat16, not float64"):
        optimizers.sgd([p[0].double()], [g[0].double()], lr=0.1)
    with pytest.raises(ArrayError, match="lr must be float32, not float64"):
        optimizers.sgd(p, g, lr=torch.ones(1, dtype=torch.float64, device=PLACE))
    with pytest.raises(ArrayError, match=r"lr must have one element, not shape \(2,\)"):
        optimizers.sgd(p, g, lr=torch.ones(2, device=PLACE))
    with pytest.raises(ValueError, match="1 parameters need as many steps, not 2"):
        optimizers.adam(p, g, g, g, counts(2), lr=0.1)
    with pytest.raises(ArrayError, match=r"steps\[0\] must be float32, not int64"):
        optimizers.adam(p, g, g, g, [counts(1)[0].long()], lr=0.1)


@pytest.mark.skipif(not SIMULATED, reason="the sanitizer watches the simulator")
@every_variant
def test_the_sanitizer_finds_nothing(variant, monkeypatch):
    monkeypatch.setattr(tables, "plan", lambda *_: 1024)
    parameters, gradients = tensors(shapes=[(2500,), (3,)]), tensors(shapes=[(2500,), (3,)])
    states = [zeros(parameters) for _ in range(3)]
    with simulator.sanitize() as report:
        optimizers.sgd(parameters, gradients, states[0], lr=0.1, momentum=0.9, variant=variant)
        optimizers.adam(parameters, gradients, *states[:2], counts(2), lr=0.1, variant=variant,
                        max_exp_avg_sqs=states[2])  # fmt: skip
    assert not report.findings, report


@pytest.mark.gpu
def test_a_captured_graph_goes_on_counting():
    parameters, gradients = tensors(), tensors()
    states, steps = [zeros(parameters) for _ in range(2)], counts(len(SHAPES))
    twins = [torch.nn.Parameter(p.clone()) for p in parameters]
    theirs = torch.optim.Adam(twins, lr=0.1)
    lr, table = torch.tensor([0.1], device="cuda"), optimizers.Table()
    optimizers.adam(parameters, gradients, *states, steps, lr=lr, table=table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        optimizers.adam(parameters, gradients, *states, steps, lr=lr, table=table)
    for step, rate in enumerate((0.1, 0.1, 0.1, 0.02, 0.02)):
        lr.fill_(rate)
        theirs.param_groups[0]["lr"] = rate
        if step:
            graph.replay()
        for p, g in zip(twins, gradients, strict=True):
            p.grad = g.clone()
        theirs.step()
    assert all(s.item() == 5 for s in steps)
    for p, q in zip(parameters, twins, strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_large_parameters_as_pytorch():
    shapes = [(5000, 4001), (1,), (1 << 24,), (3, 1000, 77)]
    parameters, gradients = tensors(shapes=shapes), tensors(shapes=shapes)
    twins = [torch.nn.Parameter(p.clone()) for p in parameters]
    for p, g in zip(twins, gradients, strict=True):
        p.grad = g
    theirs = torch.optim.AdamW(twins, lr=0.01, fused=True)
    states, steps = [zeros(parameters) for _ in range(2)], counts(1) * len(shapes)
    for _ in range(3):
        optimizers.adam(
            parameters, gradients, *states, steps, lr=0.01, weight_decay=0.01,
            decoupled_weight_decay=True,
        )  # fmt: skip
        theirs.step()
    for p, q in zip(parameters, twins, strict=True):
        torch.testing.assert_close(p, q.detach(), rtol=1e-5, atol=1e-6)


def test_a_table_is_filled_after_a_graph_has_been_captured():
    (p, g), table = [tensors() for _ in range(2)], optimizers.Table()
    expected = [a - 0.5 * b for a, b in zip(p, g, strict=True)]
    with recorded() as launches, tables.filled_later(p) as memory:
        free = memory["int64"]
        table.prepare(p, g, (p,), None)
        assert not launches
        # The graph's own kernels may write into what is allocated meanwhile.
        assert table.parts[0].table.data_ptr() == free.data_ptr()
        with pytest.raises(RuntimeError, match="one update of the parameters"):
            for _ in range(9):
                optimizers.Table().prepare(p, g, (p,), None)
    assert launches
    optimizers.sgd(p, g, lr=0.5, table=table, again=True)
    for found, value in zip(p, expected, strict=True):
        torch.testing.assert_close(found, value)
    with recorded() as launches, pytest.raises(MemoryError), tables.filled_later(p):
        optimizers.Table().prepare(p, g, (p,), None)
        raise MemoryError
    assert not launches
