"""The captured trainer of any network: what a plain loop makes, bit by bit, captured or not."""

import copy
import math
import re

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE

from course_lib import nn, ops, optim, train
from course_lib.train import GraphTrainer, memory, schedules
from course_lib.train.randomness import repeatable
from course_lib.train.rates import takes_tensors
from course_lib.train.step import Step, why_not_captured

OURS, TORCHS = (nn, ops.cross_entropy, optim), (torch.nn, F.cross_entropy, torch.optim)
sides = pytest.mark.parametrize("side", [OURS, TORCHS], ids=["ours", "torch"])


class Residual(torch.nn.Module):
    """A convolution, batch normalisation, a shortcut, dropout."""

    def __init__(self, layers):
        super().__init__()
        self.conv, self.norm = layers.Conv2d(2, 2, 3, padding=1), layers.BatchNorm2d(2)
        self.relu, self.drop = layers.ReLU(), layers.Dropout(0.4)

    def forward(self, x):
        return self.drop(self.relu(x + self.norm(self.conv(x))))


def three_layers(layers):
    return torch.nn.Sequential(layers.Linear(6, 8), layers.ReLU(), layers.Linear(8, 3))


def convolutions(layers):
    return torch.nn.Sequential(
        layers.Conv2d(1, 2, 3), Residual(layers), layers.MaxPool2d(2), layers.Flatten(),
        layers.Linear(8, 3),
    )  # fmt: skip


pytestmark = pytest.mark.usefixtures("first_rungs")
NETWORKS = {three_layers: (6,), convolutions: (1, 6, 6)}
networks = pytest.mark.parametrize("make", NETWORKS)


def made(make, layers):
    torch.manual_seed(1)
    return make(layers).to(PLACE)


def batches(shape, n=4, size=4, sizes=None):
    torch.manual_seed(2)
    return [
        (torch.randn(size, *shape).to(PLACE), torch.randint(0, 3, (size,)).to(PLACE))
        for size in (sizes or [size] * n)
    ]


def same(model, other):
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b), name


def run(trainer, given, seed=3):
    torch.manual_seed(seed)
    return [trainer(x, y).clone() for x, y in given]


# ------------------------------------------------------------------ without a GPU: a plain loop


@pytest.mark.skipif(PLACE == "cuda", reason="there, seeds of dropout are drawn otherwise")
@sides
@networks
def test_the_steps_are_a_plain_loops(make, side):
    layers, loss_of, optimisers = side
    model, plain = (made(make, layers) for _ in range(2))
    given = batches(NETWORKS[make], sizes=[4, 4, 3])
    options = dict(lr=0.1, momentum=0.9, weight_decay=0.01)
    schedule = schedules.cosine(6, warm_up=2)
    trainer = GraphTrainer(
        model, optimisers.SGD(model.parameters(), **options), loss_of, schedule=schedule,
        max_norm=0.5, accumulate=2,
    )  # fmt: skip
    losses = run(trainer, given)
    optimizer = optimisers.SGD(plain.parameters(), **options)
    torch.manual_seed(3)
    for step, ((x, y), found) in enumerate(zip(given, losses, strict=True)):
        optimizer.param_groups[0]["lr"] = 0.1 * schedule(step)
        optimizer.zero_grad()
        whole = 0
        for part, labels in zip(x.split(2), y.split(2), strict=True):
            loss = loss_of(plain(part), labels) * (len(part) / len(x))
            loss.backward()
            whole += loss.detach()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        assert torch.equal(found, whole)
    same(model, plain)
    assert trainer.steps == 3


@pytest.mark.skipif(PLACE == "cuda", reason="a GPU's plain loop waits, and adds up otherwise")
@pytest.mark.parametrize("optimisers", [optim, torch.optim])
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_steps_with_infinite_gradients_are_left_out(kind, optimisers):
    model, plain = (made(three_layers, torch.nn) for _ in range(2))
    options = dict(lr=0.1, momentum=0.9) if kind == "SGD" else dict(lr=0.1)
    given = batches((6,), n=5)
    given[0][0].mul_(math.inf)  # the very first
    given[3][0].mul_(1e38)  # and one in between
    mine, other = (
        getattr(optimisers, kind)(net.parameters(), **options) for net in (model, plain)
    )
    scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) for _ in range(2)]
    trainer = GraphTrainer(
        model, mine, F.cross_entropy, precision="float16", scaler=scalers[0], max_norm=1.0
    )
    for x, y in given:
        before = copy.deepcopy((model.state_dict(), mine.state_dict()["state"]))
        trainer(x, y)
        other.zero_grad()
        with torch.autocast("cpu", torch.float16):
            logits = plain(x)
        scalers[1].scale(F.cross_entropy(logits.float(), y)).backward()
        scalers[1].unscale_(other)
        finite = all(p.grad.isfinite().all() for p in plain.parameters())
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        scalers[1].step(other)
        scalers[1].update()
        same(model, plain)
        assert scalers[0].state_dict() == scalers[1].state_dict()
        assert finite != all(map(torch.equal, model.state_dict().values(), before[0].values()))
        if not finite and before[1]:
            assert str(mine.state_dict()["state"]) == str(before[1])


def trained_whole_and_in_parts(tmp_path, layers, optimisers, loss_of):
    def begun():
        model = made(convolutions, layers)
        options = {} if optimisers is optim else dict(fused=True, capturable=PLACE == "cuda")
        optimizer = optimisers.AdamW(model.parameters(), lr=0.01, **options)
        scaler = torch.amp.GradScaler(PLACE, init_scale=4.0, growth_interval=2)
        return GraphTrainer(
            model, optimizer, loss_of, schedule=schedules.one_cycle(8), scaler=scaler
        )

    given = batches((1, 6, 6), n=5)
    whole, stopped, resumed = begun(), begun(), begun()
    losses = run(whole, given)
    run(stopped, given[:2])
    torch.save(stopped.state_dict(), tmp_path / "state.pt")
    run(resumed, given[:3], seed=9)  # a run of another kind came before
    resumed.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert resumed.steps == 2
    found = [resumed(x, y).clone() for x, y in given[2:]]
    assert all(map(torch.equal, found, losses[2:]))
    same(whole.model, resumed.model)
    for a, b in zip(
        whole.optimizer.state_dict()["state"].values(),
        resumed.optimizer.state_dict()["state"].values(), strict=True,
    ):  # fmt: skip
        assert all(torch.equal(a[name], b[name]) for name in a)
    assert whole.scaler.state_dict() == resumed.scaler.state_dict()


@sides
def test_a_run_is_resumed_to_the_same_bits(side, tmp_path):
    layers, loss_of, optimisers = side
    with repeatable(torch.device(PLACE)):  # PyTorch's convolutions must be told
        trained_whole_and_in_parts(tmp_path, layers, optimisers, loss_of)


def test_a_state_of_another_run_is_refused_and_nothing_is_lost():
    def trainer(width=8, **options):
        model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 3)).to(PLACE)
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        return GraphTrainer(model, optimizer, F.cross_entropy, **options)

    mine = trainer()
    before = copy.deepcopy(mine.model.state_dict())
    state = mine.state_dict()
    scaled = trainer(scaler=torch.amp.GradScaler(PLACE)).state_dict()
    for wrong, told in (
        ({}, "the state lacks model, optimizer"),
        (trainer(9).state_dict(), "of another model: 0.bias, 0.weight, 1.weight differ"),
        (state | {"rates": [0.1, 0.1]}, "of an optimiser of 2 groups, not of 1"),
        (scaled, "the state was of a run with scaled gradients"),
        (state | {"optimizer": {"state": {}, "param_groups": []}}, "parameter group"),
    ):
        with pytest.raises(ValueError, match=told):
            mine.load_state_dict(wrong)
        assert all(map(torch.equal, before.values(), mine.model.state_dict().values()))


def test_rates_follow_schedule_and_hand():
    model = made(three_layers, torch.nn)
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.5}]
    optimizer = optim.SGD(groups, lr=1.0)
    trainer = GraphTrainer(
        model, optimizer, F.cross_entropy, schedule=lambda step: 1 / 2**step, capture=False
    )
    ((x, y),) = batches((6,), n=1)
    for expected in ((1.0, 0.5), (0.5, 0.25)):
        trainer(x, y)
        assert [float(group["lr"]) for group in optimizer.param_groups] == list(expected)
    assert [group["lr"] for group in trainer.state_dict()["optimizer"]["param_groups"]] == [1, 0.5]
    optimizer.param_groups[0]["lr"] = 8.0  # somebody's: the rate from which the schedule goes on
    trainer(x, y)
    assert [float(group["lr"]) for group in optimizer.param_groups] == [2.0, 0.125]
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1, device=PLACE))]})
    with pytest.raises(ValueError, match="has 3 groups of parameters, and had 2"):
        trainer(x, y)


def test_schedules_are_pytorchs():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=2.0)
    for total, rise in ((10, 0.3), (7, 0.5)):
        theirs = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, max_lr=2.0, total_steps=total, pct_start=rise, cycle_momentum=False,
            div_factor=25, final_div_factor=1e4,
        )  # fmt: skip
        mine = schedules.one_cycle(total, rise=rise)
        for step in range(total):
            assert 2.0 * mine(step) == pytest.approx(theirs.get_last_lr()[0], rel=1e-6)
            if step < total - 1:
                optimizer.step()
                theirs.step()
        assert mine(total) == mine(10 * total) == pytest.approx(1e-4 / 25)
    falling = schedules.cosine(12, warm_up=4, least=0.1)
    assert [falling(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert falling(8) == pytest.approx(0.55) and falling(12) == falling(99) == 0.1
    assert schedules.cosine(3, warm_up=3)(3) == 1.0 and schedules.constant()(5) == 1.0
    for wrong in (
        lambda: schedules.cosine(0), lambda: schedules.cosine(2, warm_up=3),
        lambda: schedules.cosine(2.5), lambda: schedules.cosine(2, least=math.nan),
        lambda: schedules.one_cycle(5, rise=1.5),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="must be"):
            wrong()


def test_what_does_not_fit_is_refused():
    model = made(three_layers, torch.nn)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    ((x, y),) = batches((6,), n=1)
    for options, told in (
        (dict(precision="half"), "precision must be float32, tf32, bfloat16, float16, not 'half'"),
        (dict(accumulate=0), "accumulate must be a whole number, 1 or more; not 0"),
        (dict(max_norm=-1), "max_norm must be above 0, not -1"),
    ):
        with pytest.raises(ValueError, match=told):
            GraphTrainer(model, optimizer, F.cross_entropy, **options)
    with pytest.raises(TypeError, match="scaler must be a torch.amp.GradScaler, not a float"):
        GraphTrainer(model, optimizer, F.cross_entropy, scaler=2.0)
    if PLACE == "cpu":
        with pytest.raises(ValueError, match="a CUDA graph needs a GPU, and the model is on cpu"):
            GraphTrainer(model, optimizer, F.cross_entropy, capture=True)
    elsewhere = torch.nn.Linear(6, 3, device="meta")
    with pytest.raises(ValueError, match="the model is on meta, and its optimiser has parameters"):
        GraphTrainer(elsewhere, optimizer, F.cross_entropy)
    with pytest.raises(ValueError, match="must lie on one device, and lies on"):
        GraphTrainer(torch.nn.Sequential(elsewhere, model), optimizer, F.cross_entropy)
    trainer = GraphTrainer(model, optimizer, F.cross_entropy)
    with pytest.raises(RuntimeError):  # PyTorch's; the next batch is still the first
        trainer(x[:, :5], y)
    trainer(x, y)
    before = copy.deepcopy(model.state_dict())
    for wrong, told in (
        ((x[:, :5], y), r"must be float32 \(6,\), int64 \(\), as at first, not float32 \(5,\)"),
        ((x.double(), y), "not float64"),
        ((x[:0], y[:0]), "the batch is empty"),
        ((x, y[:3]), r"x has 4 samples, and y also a tensor of \(3,\)"),
        ((x.to("meta"), y), "x is on meta, and the model on"),
        (((), y), "x must have samples"),
    ):
        with pytest.raises(ValueError, match=told):
            trainer(*wrong)
    with pytest.raises(TypeError, match="y must be a tensor or a tuple of them"):
        trainer(x, 3)
    assert trainer.steps == 1
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_a_first_step_that_fails_leaves_all_as_it_was():
    class Forgetful(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.norm = torch.nn.Linear(6, 3), torch.nn.BatchNorm1d(3)
            self.unused, self.drop = torch.nn.Linear(6, 3), torch.nn.Dropout()

        def forward(self, x):
            return self.norm(self.drop(self.used(x)))

    model = Forgetful().to(PLACE)
    optimizer = optim.AdamW(model.parameters(), lr=0.1)
    trainer = GraphTrainer(model, optimizer, F.cross_entropy)
    ((x, y),) = batches((6,), n=1)
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with pytest.raises(ValueError, match="does not depend on unused.weight, unused.bias: use them"):
        trainer(x, y)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert torch.equal(state, torch.get_rng_state()) and not optimizer.state_dict()["state"]
    assert all(p.grad is None for p in model.parameters()) and trainer.steps == 0
    model.unused.requires_grad_(False)
    trainer(x, y)
    trainer.train_step.loss = lambda output, y: F.cross_entropy(output, y, reduction="none")
    with pytest.raises(ValueError, match=r"the loss must be a tensor of one number, not \(4,\)"):
        trainer(x, y)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_out_of_memory_is_told_and_the_next_batch_is_trained_on(precision, monkeypatch):
    model = made(three_layers, torch.nn)
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = GraphTrainer(model, optimizer, F.cross_entropy, precision=precision, capture=False)
    given = batches((6,), n=2)
    trainer(*given[0])
    before, clip = copy.deepcopy(model.state_dict()), Step._update

    def fail(step):
        step.scaler.unscale_(step.optimizer)
        raise torch.cuda.OutOfMemoryError("Tried to allocate 2.00 GiB")

    with monkeypatch.context() as patch, pytest.raises(memory.TrainingError) as told:
        patch.setattr(Step, "_update", fail)
        trainer(*given[1])
    assert "2.00 GiB more were asked for" in str(told.value)
    assert "choose a smaller batch size (it is 4)" in str(told.value)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    assert Step._update is clip
    trainer(*given[1])
    assert trainer.steps == 2


def test_evaluation_changes_nothing_and_counts_samples():
    model = made(convolutions, torch.nn)
    model[1].norm.eval()  # frozen by hand, and so it stays
    trainer = GraphTrainer(
        model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy,
        measure=train.right_answers, accumulate=2,
    )  # fmt: skip
    given = batches((1, 6, 6), sizes=[4, 3])
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    found = trainer.evaluate(given)
    x, y = (torch.cat(parts) for parts in zip(*given, strict=True))
    modes = [module.training for module in model.modules()]
    assert modes.count(False) == 1 and not model[1].norm.training
    model.eval()
    logits = model(x)
    expected = F.cross_entropy(logits, y).item()
    assert found["loss"] == pytest.approx(expected, rel=1e-5) and found["samples"] == 7
    assert found["measured"].item() == (logits.argmax(1) == y).sum().item()
    assert torch.equal(state, torch.get_rng_state())
    assert all(map(torch.equal, before.values(), model.state_dict().values()))
    with pytest.raises(ValueError, match="there are no samples"):
        trainer.evaluate([])
    model.train()
    trainer(x[:4], y[:4])
    assert trainer.measured.dtype == torch.int64 and 0 <= trainer.measured.item() <= 4


def test_several_inputs_and_targets():
    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = torch.nn.Linear(6, 3), torch.nn.Linear(2, 3)

        def forward(self, x, z):
            return self.a(x) + self.b(z), z

    def mixed(outputs, y, other, share):
        return share * F.cross_entropy(outputs[0], y) + (1 - share) * F.cross_entropy(
            outputs[0], other
        )

    model = Two().to(PLACE)
    trainer = GraphTrainer(
        model, optim.SGD(model.parameters(), lr=0.1), mixed, precision="bfloat16", accumulate=2
    )
    ((x, y),) = batches((6,), n=1)
    share = torch.tensor(0.25, device=PLACE)
    loss = trainer((x, x[:, :2]), (y, y.flip(0), share))
    assert loss.shape == () and loss.dtype == torch.float32 and loss.isfinite()


def test_precisions_are_set_for_the_step_alone(monkeypatch):
    seen = []
    model = made(three_layers, torch.nn)
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    hook = model[0].register_forward_hook(
        lambda layer, inputs, y: seen.append((matmul.fp32_precision, conv.fp32_precision, y.dtype))
    )
    ((x, y),) = batches((6,), n=1)
    for precision in ("float32", "tf32", "bfloat16"):
        trainer = GraphTrainer(
            model, optim.SGD(model.parameters(), lr=0.1), F.cross_entropy, precision=precision
        )
        trainer(x, y)
    hook.remove()
    assert seen == [
        ("ieee", "ieee", torch.float32), ("tf32", "tf32", torch.float32),
        (*before, torch.bfloat16),
    ]  # fmt: skip
    assert (matmul.fp32_precision, conv.fp32_precision) == before


@pytest.mark.parametrize("make, scaled, scheduled, told", [
    (lambda p: optim.SGD(p, lr=0.1), True, True, None),
    (lambda p: optim.AdamW(p), True, True, None),
    (lambda p: torch.optim.SGD(p, lr=0.1), False, False, None),
    (lambda p: torch.optim.SGD(p, lr=0.1), False, True, "learning rates from the host.*fused=True"),
    (lambda p: torch.optim.SGD(p, lr=0.1), True, False, "gradients are finite.*fused=True"),
    (lambda p: torch.optim.SGD(p, lr=0.1, fused=True), True, True, None),
    (lambda p: torch.optim.Adam(p), False, False, "on the host: make it with capturable=True"),
    (lambda p: torch.optim.Adam(p, capturable=True), False, True, None),
    (lambda p: torch.optim.Adam(p, capturable=True), True, True, "gradients are finite"),
    (lambda p: torch.optim.Adam(p, capturable=True, fused=True), True, True, None),
    (lambda p: torch.optim.LBFGS(p), False, False, "torch.optim.lbfgs.LBFGS has no capturable"),
])  # fmt: skip
def test_optimisers_that_cannot_be_captured_say_why(make, scaled, scheduled, told):
    found = why_not_captured(make([torch.nn.Parameter(torch.ones(2))]), scaled, scheduled)
    assert found is told is None or re.search(told, found)


def test_rates_are_numbers_on_several_devices_unless_the_optimiser_is_fused():
    optimizer = torch.optim.Adam([torch.ones(2), torch.ones(2, device="meta")])
    for fused in (False, True):
        optimizer.param_groups[0] |= {"capturable": True, "fused": fused}
        assert takes_tensors(optimizer) is fused
