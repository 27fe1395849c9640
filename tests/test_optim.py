"""SGD, Adam and AdamW as PyTorch's: step for step, and their state_dicts in each other's place."""

import copy
import inspect
import itertools
import math
import pickle

import pytest
import torch
from tensors import PLACE

from course_lib import optim
from course_lib.kernels import optimizers
from course_lib.optim import fused

SHAPES = [(4, 3, 2, 2), (33,), (7, 5), (1,), (2, 0)]
OPTIMISERS = {
    "SGD": (optim.SGD, torch.optim.SGD, dict(lr=0.1)),
    "SGD with momentum": (
        optim.SGD, torch.optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.01, dampening=0.2),
    ),
    "SGD with Nesterov": (optim.SGD, torch.optim.SGD, dict(momentum=0.9, nesterov=True)),
    "Adam": (optim.Adam, torch.optim.Adam, dict(lr=0.01, weight_decay=0.1, amsgrad=True)),
    "Adam, maximising": (optim.Adam, torch.optim.Adam, dict(maximize=True, betas=(0.5, 0.9))),
    "AdamW": (optim.AdamW, torch.optim.AdamW, dict(lr=0.01)),
}  # fmt: skip
every_optimiser = pytest.mark.parametrize(
    ("ours", "theirs", "options"), OPTIMISERS.values(), ids=OPTIMISERS
)


def parameters(dtype=torch.float32):
    return [torch.nn.Parameter(torch.randn(shape).to(PLACE, dtype)) for shape in SHAPES]


def twins(found):
    return [torch.nn.Parameter(p.detach().clone()) for p in found]


def give_gradients(*lists, skip=()):
    """The same new gradient to each of the parameters that stand at one place of the lists."""
    for i, together in enumerate(zip(*lists, strict=True)):
        gradient = torch.randn_like(together[0]).to(torch.bfloat16)
        for p in together:
            p.grad = None if i in skip else gradient.to(p.dtype)


def same(ours, theirs):
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.detach(), q.detach(), rtol=2e-6, atol=2e-6)


@every_optimiser
def test_step_for_step(ours, theirs, options):
    mine, yours = (found := parameters()), twins(found)
    pair = ours(mine, **options), theirs(yours, **options)
    for step in range(5):
        # A parameter without a gradient is left alone, and begins when it has one.
        give_gradients(mine, yours, skip=[1] if step < 2 else [2] if step == 3 else [])
        for optimiser in pair:
            optimiser.step()
        same(mine, yours)


@every_optimiser
@pytest.mark.parametrize("start", ["ours", "theirs"])
def test_state_dicts_are_interchangeable(ours, theirs, options, start):
    found = parameters()
    first, second = (ours, theirs) if start == "ours" else (theirs, ours)
    before, going_on = first(found, **options), twins(found)
    reference = twins(found)
    alone = theirs(reference, **options)
    for step in range(4):
        current = found if step < 2 else going_on
        if step == 2:
            # By way of a file's bytes, as a checkpoint does it.
            state = pickle.loads(pickle.dumps(before.state_dict()))
            with torch.no_grad():
                for p, q in zip(going_on, found, strict=True):
                    p.copy_(q)
            before = second(going_on, lr=77.0)
            before.load_state_dict(state)
            assert before.param_groups[0]["lr"] == alone.param_groups[0]["lr"]
        give_gradients(current, reference)
        before.step()
        alone.step()
        same(current, reference)
    keys = [
        (sorted(o.state_dict()["state"].get(0, {})), sorted(o.state_dict()["param_groups"][0]))
        for o in (before, alone)
    ]
    assert keys[0] == keys[1]


@every_optimiser
def test_names_and_signatures(ours, theirs, options):
    assert ours.__name__ == theirs.__name__ and issubclass(ours, theirs)
    assert inspect.signature(ours) == inspect.signature(theirs)
    assert repr(ours(parameters(), **options)) == repr(theirs(parameters(), **options))
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        ours(parameters(), lr=-1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_rounded_once_a_step(dtype):
    mine = parameters(dtype)
    exact = [torch.nn.Parameter(p.detach().float()) for p in mine]
    pair = optim.SGD(mine, momentum=0.5), torch.optim.SGD(exact, momentum=0.5)
    for _ in range(2):
        with torch.no_grad():
            for p, q in zip(mine, exact, strict=True):
                q.copy_(p)
        for p, q in zip(mine, exact, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.float()
        for optimiser in pair:
            optimiser.step()
        for p, q in zip(mine, exact, strict=True):
            # The buffer is rounded as well, and enters the next step.
            size = torch.finfo(dtype).eps * (q.abs() + 1e-3)
            assert ((p.float() - q).abs() <= 0.6 * size).all()


def test_groups_closures_and_schedules():
    found = parameters()
    copies = twins(found)
    losses = []
    for make, ps in ((optim.AdamW, found), (torch.optim.AdamW, copies)):
        groups = [dict(params=ps[:2], lr=0.1), dict(params=ps[2:], weight_decay=0.5, amsgrad=True)]
        optimiser = make(groups, lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimiser, 1, gamma=0.5)
        calls = []
        optimiser.register_step_post_hook(lambda *_, calls=calls: calls.append(1))

        def closure(optimiser=optimiser, ps=ps):
            optimiser.zero_grad()
            loss = sum((p * p).sum() for p in ps)
            loss.backward()
            return loss

        found_losses = []
        for _ in range(3):
            found_losses.append(optimiser.step(closure).item())
            schedule.step()
        losses.append(found_losses)
        assert calls == [1, 1, 1]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    same(found, copies)


def launches(monkeypatch):
    """A list of the kernels that are launched from here on."""
    seen = []
    for module in (optimizers, optimizers.table):
        launch = module.launch
        monkeypatch.setattr(
            module, "launch", lambda *a, launch=launch, **k: (seen.append(a[0]), launch(*a, **k))
        )
    return seen


def test_one_launch_for_all_parameters_and_what_is_remembered(monkeypatch):
    seen = launches(monkeypatch)
    found = parameters()
    optimiser = optim.Adam(found)
    give_gradients(found)
    optimiser.step()
    assert len(seen) > 1 and seen[-1] is optimizers.adam_fused_kernel
    kept = [p.grad for p in found]
    for _ in range(2):
        seen.clear()
        optimiser.step()
        assert seen == [optimizers.adam_fused_kernel]
    give_gradients(found)  # elsewhere, while the old ones are alive: only their column is written
    seen.clear()
    optimiser.param_groups[0]["lr"] *= 2  # else a GPU's launch is repeated, and not seen here
    optimiser.step()
    n_dtypes = len({p.dtype for p in found})
    assert seen == [optimizers.fill_kernel] * n_dtypes + [optimizers.adam_fused_kernel] * n_dtypes
    assert len(optimiser._tables[0]) == 1
    for p, gradient in zip(found, kept, strict=True):
        p.grad = gradient
    copies = twins(found)
    other = torch.optim.Adam(copies)
    other.load_state_dict(copy.deepcopy(optimiser.state_dict()))
    for p, q in zip(found, copies, strict=True):
        q.grad = p.grad.clone()
    optimiser.step()
    other.step()
    same(found, copies)


@every_optimiser
def test_repeated_steps(ours, theirs, options):
    """The tensors stay where they are; what is in them changes, and now and then a number."""
    mine, yours = (found := parameters()), twins(found)
    pair = ours(mine, **options), theirs(yours, **options)
    give_gradients(mine, yours)
    for step in range(12):
        for p, q in zip(mine, yours, strict=True):
            q.grad.copy_(p.grad.normal_())
        for optimiser in pair:
            group = optimiser.param_groups[0]
            if step in (4, 9):
                group["lr"] *= 0.5
            if step == 9:
                group["weight_decay"] += 0.125
                group["maximize"] = True
            optimiser.step()
        same(mine, yours)


def test_tables_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(fused, "MOST_TABLES", 3)
    found = parameters()
    optimiser, kept = optim.SGD(found), []
    for _ in range(10):
        give_gradients(found)
        kept.append([p.grad for p in found])
        optimiser.step()
        assert len(optimiser._tables[0]) <= 3


def test_parameters_that_moved_are_found_again():
    found = parameters()
    copies = twins(found)
    optimiser, other = optim.SGD(found, momentum=0.9), torch.optim.SGD(copies, momentum=0.9)
    for _ in range(3):
        give_gradients(found, copies)
        optimiser.step()
        other.step()
        for p in found:
            p.data = p.data.clone()
        same(found, copies)


def test_copies_go_their_own_way():
    found = parameters()
    optimiser = optim.Adam(found)
    give_gradients(found)
    optimiser.step()
    other = copy.deepcopy(optimiser)
    before = [p.clone() for p in found]
    theirs = other.param_groups[0]["params"]
    give_gradients(theirs)
    other.step()
    assert all(torch.equal(p, q) for p, q in zip(found, before, strict=True))
    assert other.state[theirs[0]]["step"] == 2 and optimiser.state[found[0]]["step"] == 1


def test_layouts():
    p = torch.nn.Parameter(torch.randn(4, 3, 2, 2, device=PLACE))
    q = torch.nn.Parameter(p.detach().clone())
    pair = optim.SGD([p], momentum=0.9), torch.optim.SGD([q], momentum=0.9)
    formats = torch.contiguous_format, torch.channels_last
    for own, other in itertools.product(formats, formats):
        p.data = p.data.contiguous(memory_format=own)
        gradient = torch.randn(4, 3, 2, 2, device=PLACE)
        p.grad, q.grad = gradient.contiguous(memory_format=other), gradient
        for optimiser in pair:
            optimiser.step()
        torch.testing.assert_close(p.detach(), q.detach())
        assert p.is_contiguous(memory_format=own)


def test_autograd_notices_that_parameters_changed():
    p = torch.nn.Parameter(torch.ones(3, device=PLACE))
    loss = (p * p).sum()
    p.grad = torch.ones_like(p)
    optim.SGD([p], lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_learning_rate_that_is_a_tensor():
    for place in {PLACE, "cpu"}:
        found = parameters()
        copies = twins(found)
        lr = torch.tensor(0.25, device=place)
        optimiser, other = optim.Adam(found, lr=lr), torch.optim.Adam(copies, lr=0.25)
        for rate in (0.25, 0.5):
            lr.fill_(rate)
            other.param_groups[0]["lr"] = rate
            give_gradients(found, copies)
            optimiser.step()
            other.step()
        same(found, copies)


def test_errors_name_what_was_expected():
    p = torch.nn.Parameter(torch.randn(5, 3, device=PLACE))
    p.grad = torch.randn(5, 3, device=PLACE).to_sparse()
    for make in (optim.SGD, optim.Adam, optim.AdamW):
        with pytest.raises(RuntimeError, match=f"{make.__name__} takes no sparse gradients"):
            make([p], lr=0.1).step()
    p = torch.nn.Parameter(torch.randn(5, dtype=torch.float64, device=PLACE))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="takes parameters of .* not torch.float64"):
        optim.SGD([p], lr=0.1).step()
    p = torch.nn.Parameter(torch.randn(5, 6, device=PLACE)[:, ::2])
    p.grad = torch.ones(5, 3, device=PLACE)
    with pytest.raises(RuntimeError, match="one stretch of memory; one of shape .* has strides"):
        optim.SGD([p], lr=0.1).step()
    p = torch.nn.Parameter(torch.randn(5, device=PLACE))
    p.grad = torch.ones_like(p)
    with pytest.raises(RuntimeError, match="SGD can't be differentiated"):
        optim.SGD([p], lr=0.1, differentiable=True).step()


def test_a_step_that_fails_leaves_no_half_made_buffer(monkeypatch):
    def fail(*args, **options):
        raise MemoryError

    p = torch.nn.Parameter(torch.ones(3, device=PLACE))
    p.grad = torch.ones_like(p)
    optimiser = optim.SGD([p], lr=0.5, momentum=0.9)
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(optimizers, "sgd", fail)
        optimiser.step()
    optimiser.step()
    assert torch.equal(p.detach(), torch.full_like(p, 0.5))


@pytest.mark.gpu
def test_a_grad_scaler_unscales_itself():
    p = torch.nn.Parameter(torch.ones(4, device="cuda"))
    optimiser, scaler = optim.Adam([p], lr=0.1, fused=True), torch.amp.GradScaler(init_scale=1024.0)
    scaler.scale((p * p).sum()).backward()
    scaler.step(optimiser)
    assert torch.equal(p.grad, torch.full_like(p, 2.0))


@pytest.mark.gpu
@every_optimiser
def test_in_a_captured_graph(ours, theirs, options):
    found = parameters()
    copies = twins(found)
    lr = torch.tensor(0.05, device="cuda")
    optimiser, other = ours(found, **options | {"lr": lr}), theirs(copies, **options | {"lr": 0.05})
    give_gradients(found, copies)
    if ours is not optim.SGD or "momentum" in options:  # plain SGD has no states
        with (
            pytest.raises(RuntimeError, match="must come before a CUDA graph is captured"),
            torch.cuda.graph(torch.cuda.CUDAGraph()),
        ):
            optimiser.step()
    optimiser.step()
    other.step()
    weights = [torch.randn_like(p) for p in found]
    for p in found:
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # its gradients lie in the graph's own memory
        sum((p * w).sum() for p, w in zip(found, weights, strict=True)).backward()
        optimiser.step()
    for rate in (0.05, 0.05, 0.01):
        lr.fill_(rate)
        other.param_groups[0]["lr"] = rate
        graph.replay()
        for q, w in zip(copies, weights, strict=True):
            q.grad = w
        other.step()
        same(found, copies)


# ------------------------------------------------------------------ with a GradScaler


def scaled_steps(optimiser, found, losses, clip=None):
    """One step for each of `losses`, as a user writes it; the scaler."""
    scaler = torch.amp.GradScaler(PLACE, init_scale=64.0, growth_interval=2)
    for factor in losses:
        optimiser.zero_grad()
        loss = sum(((p.float() - 0.3) ** 2).sum() for p in found) * factor
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(optimiser)
            torch.nn.utils.clip_grad_norm_(found, clip)
        scaler.step(optimiser)
        scaler.update()
    return scaler


@every_optimiser
@pytest.mark.parametrize("clip", [None, 0.5])
def test_a_scaler_stops_steps_as_pytorchs(ours, theirs, options, clip):
    mine, yours = (found := parameters()), twins(found)
    pair = ours(mine, **options), theirs(yours, **options)
    # The very first step is stopped too: what it would have made is made by the second.
    losses = [math.inf, 1.0, 2.0, math.inf, math.nan, 0.5]
    ends = [
        scaled_steps(optimiser, p, losses, clip)
        for optimiser, p in zip(pair, (mine, yours), strict=True)
    ]
    same(mine, yours)
    assert ends[0].state_dict() == ends[1].state_dict()
    for p, q in zip(mine, yours, strict=True):
        a, b = pair[0].state[p], pair[1].state[q]
        for name in b:
            torch.testing.assert_close(torch.as_tensor(a[name]).float().cpu(),
                                       torch.as_tensor(b[name]).float().cpu(),
                                       rtol=2e-6, atol=2e-6)  # fmt: skip


@every_optimiser
def test_a_step_that_is_stopped_changes_nothing_and_the_host_does_not_look(
    ours, theirs, options, monkeypatch
):
    found = parameters(torch.bfloat16)
    optimiser = ours(found, **options)
    assert optimiser._step_supports_amp_scaling
    give_gradients(found)
    optimiser.step()
    before = copy.deepcopy((found, optimiser.state_dict()["state"]))
    give_gradients(found)
    optimiser.grad_scale, optimiser.found_inf = torch.tensor(4.0).to(PLACE), torch.ones(1).to(PLACE)
    for name in ("item", "__bool__", "__float__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("the host waits"))
    gradient = found[0].grad.clone()
    optimiser.step()
    monkeypatch.undo()
    for p, q in zip(found, before[0], strict=True):
        assert torch.equal(p, q)
    states = optimiser.state_dict()["state"].values()
    for state, old in zip(states, before[1].values(), strict=True):
        assert all(torch.equal(state[name], old[name]) for name in old if old[name] is not None)
    assert torch.equal(found[0].grad, gradient / 4)  # unscaled, as by PyTorch's
    optimiser.found_inf = torch.zeros(1).to(PLACE)
    optimiser.step()
    assert not torch.equal(found[0], before[0][0])


def test_what_stops_a_step_is_one_float32():
    found = parameters()
    give_gradients(found)
    for wrong in (torch.zeros(2), torch.zeros(1, dtype=torch.float64)):
        with pytest.raises(optimizers.arrays.ArrayError, match="found_inf must"):
            optimizers.sgd(
                [p.detach() for p in found], [p.grad for p in found], lr=0.1,
                found_inf=wrong.to(PLACE),
            )  # fmt: skip
