"""The captured trainer on a GPU: what is captured is the very step that is not."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import torchvision
from tensors import never_waiting
from test_graph_trainer import NETWORKS, batches, convolutions, made, same

from course_lib import models, nn, ops, optim
from course_lib.train import GraphTrainer, memory, schedules
from course_lib.train.randomness import repeatable

pytestmark = pytest.mark.gpu
SIZES = [8, 8, 8, 5, 8, 5, 5, 8]


def clothes(layers):
    return models.FashionMNISTCNN(layers=layers, widths=(8, 16, 32))


def resnet(layers):
    model = torchvision.models.resnet18(num_classes=10)
    if layers is nn:
        nn.replace_layers(model)
    return model


SHAPES = NETWORKS | {clothes: (1, 28, 28), resnet: (3, 64, 64)}


def sgd(parameters):
    return optim.SGD(parameters, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)


def adamw(parameters):
    return optim.AdamW(parameters, lr=0.01)


def trainer_of(make, layers=nn, optimizer=sgd, loss=ops.cross_entropy, **options):
    model = made(make, layers)
    return GraphTrainer(model, optimizer(model.parameters()), loss, **options)


def trained(trainer, given, seed=3):
    torch.manual_seed(seed)
    return torch.stack([trainer(x, y).clone() for x, y in given])


@pytest.mark.parametrize("optimizer", [sgd, adamw])
@pytest.mark.parametrize("precision", ["float32", "tf32", "bfloat16", "float16"])
@pytest.mark.parametrize("make", SHAPES)
def test_captured_and_not_are_the_same_bits(make, precision, optimizer):
    options = dict(
        precision=precision, optimizer=optimizer, max_norm=1.0,
        accumulate=2 if make is convolutions else 1,
    )  # fmt: skip
    captured, plain = (
        trainer_of(make, schedule=schedules.one_cycle(8), capture=on, **options)
        for on in (True, False)
    )
    given = batches(SHAPES[make], sizes=SIZES)
    with repeatable(torch.device("cuda")):  # what is left to PyTorch must be told
        found, expected = trained(captured, given), trained(plain, given)
    assert torch.equal(found, expected) and found.isfinite().all()
    same(captured.model, plain.model)
    assert len(captured.graphs) == 2 and not plain.graphs


@pytest.mark.parametrize("fused", [True, False])
def test_pytorchs_layers_and_optimisers_are_captured_too(fused):
    def theirs(parameters):
        return torch.optim.AdamW(parameters, lr=0.01, capturable=True, fused=fused)

    options = dict(layers=torch.nn, optimizer=theirs, loss=F.cross_entropy)
    options |= dict(schedule=schedules.cosine(6), max_norm=1.0)
    captured, plain = (trainer_of(convolutions, capture=on, **options) for on in (True, False))
    given = batches((1, 6, 6), sizes=[8] * 6)
    with repeatable(torch.device("cuda")):
        assert torch.equal(trained(captured, given), trained(plain, given))
    same(captured.model, plain.model)
    assert len(captured.graphs) == 1


def test_replays_draw_anew_and_wait_for_nothing():
    trainer = trainer_of(convolutions, optimizer=lambda p: optim.SGD(p, lr=0.0))
    given = batches((1, 6, 6), n=1, size=64) * 6
    losses = [trainer(x, y).clone() for x, y in given[:2]]
    with never_waiting():
        losses += [trainer(x, y).clone() for x, y in given[2:]]
    assert len({loss.item() for loss in losses}) == 6
    assert trainer.model[1].norm.num_batches_tracked.item() == 6


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_the_graph_leaves_out_a_step_with_infinite_gradients(optimizer):
    scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
    trainer = trainer_of(
        convolutions, optimizer=optimizer, precision="float16", scaler=scaler,
        schedule=lambda step: 0.5**step,
    )  # fmt: skip
    given = batches((1, 6, 6), n=5)
    for x, y in given[:3]:
        trainer(x, y)
    assert trainer.graphs
    before = copy.deepcopy(list(trainer.model.parameters()))
    states = copy.deepcopy(trainer.optimizer.state_dict()["state"])
    with never_waiting():
        trainer(given[3][0] * math.inf, given[3][1])
    assert all(map(torch.equal, before, trainer.model.parameters()))
    for old, state in zip(
        states.values(), trainer.optimizer.state_dict()["state"].values(), strict=True
    ):
        assert all(torch.equal(old[name], state[name]) for name in old)
    assert scaler.get_scale() == 32.0
    for layer in trainer.model.modules():  # whose statistics the infinite batch has spoilt
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.reset_running_stats()
    trainer(*given[4])
    assert not any(map(torch.equal, before, trainer.model.parameters()))
    assert float(trainer.optimizer.param_groups[0]["lr"]) == pytest.approx(
        (0.05 if optimizer is sgd else 0.01) / 16
    )


def test_what_waits_for_the_gpu_is_told_and_nothing_is_lost():
    trainer = trainer_of(convolutions)
    given = batches((1, 6, 6), n=3)

    def spy(layer, inputs, y):
        return y if y.sum().item() > 0 else y + 0

    hook = trainer.model[0].register_forward_hook(spy)
    trainer(*given[0])
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(RuntimeError, match=r"in spy: `return y if y.sum\(\).item\(\) > 0"):
        trainer(*given[1])
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values()))
    assert trainer.steps == 1
    hook.remove()
    for x, y in given:
        trainer(x, y)
    assert trainer.steps == 4 and trainer.graphs


def test_memory_that_runs_out_while_capturing_is_told_and_nothing_is_lost():
    trainer = trainer_of(convolutions)
    given = batches((1, 6, 6), n=3)
    trainer(*given[0])
    before = copy.deepcopy(trainer.model.state_dict())

    def greedy(layer, inputs, y):
        return y + torch.empty(1 << 50, dtype=torch.uint8, device="cuda")[0]

    hook = trainer.model[0].register_forward_hook(greedy)
    with pytest.raises(memory.TrainingError, match="There is not enough memory"):
        trainer(*given[1])
    assert all(map(torch.equal, before.values(), trainer.model.state_dict().values()))
    hook.remove()
    trainer(*given[1])
    assert trainer.graphs and trainer.steps == 2


def test_rates_set_by_hand_reach_the_graph():
    trainer = trainer_of(convolutions, optimizer=lambda p: optim.SGD(p, lr=0.1))
    given = batches((1, 6, 6), n=4)
    for x, y in given[:3]:
        trainer(x, y)
    before = copy.deepcopy(list(trainer.model.parameters()))
    trainer.optimizer.param_groups[0]["lr"] = 0.0
    trainer(*given[3])
    assert all(map(torch.equal, before, trainer.model.parameters()))
