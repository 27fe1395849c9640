"""Training by kernels alone: the batches they pick, and steps beside PyTorch's."""

import functools

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import SIMULATED, data, models
from course_lib.kernels import batches
from course_lib.kernels.optimizers.sgd_kernels import sgd_fused_kernel
from course_lib.kernels.optimizers.table import fill_kernel
from course_lib.reference.functions.batches import batch_order
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.launch import recorded
from course_lib.train import fashion_mnist_graph
from course_lib.train.classifier import Classifier
from course_lib.train.fashion_mnist import sgd_of
from course_lib.train.fashion_mnist_graph import FashionMNISTPass
from course_lib.train.randomness import seed_of

pytestmark = pytest.mark.usefixtures("first_rungs")
PLACE = "cpu" if SIMULATED else "cuda"
WIDTHS = (2, 3, 8) if SIMULATED else (64, 128, 256)


# ----------------------------------------------------------------------------- batches


@pytest.mark.parametrize("n, batch", [(10, 3), (37, 37), (100, 7), (1, 1), (65, 64)])
def test_batches_come_in_the_order_of_the_reference(n, batch):
    seed, highest, rise = 0xFEDCBA9876543210, 0.1, 3
    rng = np.random.default_rng(n)
    images = torch.from_numpy(rng.integers(0, 256, (n, 3, 5), np.uint8)).to(PLACE)
    labels = torch.from_numpy(rng.integers(0, 10, n)).to(PLACE)
    step, rate = (torch.zeros(1, dtype=t, device=PLACE) for t in (torch.int64, torch.float32))
    x, y = torch.empty(batch, 3, 5, device=PLACE), torch.empty_like(labels[:batch])
    per_epoch, total = n // batch, 2 * (n // batch) + rise
    for k in range(2 * per_epoch):
        x.fill_(float("nan"))
        batches.next_batch(
            images, labels, step, rate, x, y, seed=seed, highest=highest, rise=rise, total=total
        )
        epoch, place = divmod(k, per_epoch)
        rows = batch_order(n, seed, epoch)[place * batch :][:batch]
        assert torch.equal(y, labels[rows]) and step.item() == k + 1
        torch.testing.assert_close(x, images[rows].float() / 127.5 - 1, atol=1e-6, rtol=0)
        falling = highest * (1 + np.cos(np.pi * (k - rise) / (total - rise))) / 2
        assert abs(rate.item() - (highest * (k + 1) / rise if k < rise else falling)) < 1e-6


@pytest.mark.parametrize("n", [1, 2, 3, 5, 16, 17, 1000, 60_000])
def test_orders_are_permutations_and_differ(n):
    orders = [batch_order(n, seed, epoch) for seed, epoch in ((0, 0), (0, 1), (1, 0), (1 << 32, 0))]
    assert all(np.array_equal(np.sort(order), np.arange(n)) for order in orders)
    if n >= 16:
        assert len({order.tobytes() for order in orders}) == 4
    if n == 60_000:  # no pattern: neighbours are as far apart as chance has it
        assert abs(np.abs(np.diff(orders[0])).mean() / (n / 3) - 1) < 0.02
        assert abs(np.corrcoef(orders[0], np.arange(n))[0, 1]) < 0.02


def test_images_are_normalised_and_answers_counted():
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 16, 16).to(PLACE)
    x = torch.empty(1, 16, 16, device=PLACE)
    batches.normalise(images, x)
    assert x.min() == -1 and abs(x.max() - 1) < 2e-7
    logits = torch.tensor([[1.0, 3, 2], [0, 0, 0], [5, 1, 7], [1, 2, float("nan")]]).to(PLACE)
    labels = torch.tensor([1, 0, 0, 1]).to(PLACE)
    losses, right = torch.zeros(4, device=PLACE), torch.zeros(4, dtype=torch.int32, device=PLACE)
    loss, step = torch.tensor(0.5, device=PLACE), torch.tensor([7], device=PLACE)
    batches.tally(loss, logits, labels, step, losses, right)
    assert losses.tolist() == [0, 0, 0.5, 0] and right.tolist() == [0, 0, 3, 0]


def test_what_does_not_fit_is_refused():
    images, labels = torch.zeros(4, 2, 2, dtype=torch.uint8), torch.zeros(4, dtype=torch.int64)
    step, rate = torch.zeros(1, dtype=torch.int64), torch.zeros(1)
    arguments = [images, labels, step, rate, torch.zeros(2, 2, 2), torch.zeros(2, dtype=int)]
    arguments = [t.to(PLACE) for t in arguments]
    for place, wrong in ((0, images.float()), (1, labels[:3]), (2, rate), (4, torch.zeros(2, 3))):
        given = list(arguments)
        given[place] = wrong.to(PLACE)
        with pytest.raises(ArrayError, match="must"):
            batches.next_batch(*given, seed=0, highest=1.0, rise=1, total=2)
    with pytest.raises(ArrayError, match="x must have 16 elements"):
        batches.normalise(arguments[0], arguments[4])


# -------------------------------------------------------------------------------- steps


def trainer(model, n=8, **options):
    images, labels = data.fashion_mnist()
    test = tuple(t[:3] for t in data.fashion_mnist(train=False))
    given = dict(epochs=2, batch_size=2, learning_rate=0.1, seed=5) | options
    return FashionMNISTPass(model, images[:n], labels[:n], test, **given)


def networks():
    torch.manual_seed(1)
    ours = models.FashionMNISTCNN(widths=WIDTHS).to(PLACE)
    theirs = models.FashionMNISTCNN(widths=WIDTHS, layers=torch.nn).to(PLACE)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


class NoArithmetic(TorchDispatchMode):
    """Lets memory be had and looked at in another shape, and nothing be computed."""

    ALLOWED = {
        "empty", "empty_strided", "new_empty", "empty_like", "new_empty_strided",  # memory
        "view", "_unsafe_view", "slice", "detach", "permute", "alias",  # its looks
    }  # fmt: skip

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        assert name in self.ALLOWED, f"PyTorch computed {name}"
        return function(*args, **(kwargs or {}))


def test_steps_are_pytorchs_without_its_arithmetic():
    ours, theirs = networks()
    task = trainer(ours)
    groups = [
        {"params": [p for p in theirs.parameters() if p.dim() > 1], "weight_decay": 5e-4},
        {"params": [p for p in theirs.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True, lr=0.1)
    images, labels = data.fashion_mnist()
    for step in range(3):
        with NoArithmetic():
            task._step()
        rows = batch_order(8, seed_of(5, "order"), 0)[2 * step :][:2]
        optimizer.param_groups[0]["lr"] = optimizer.param_groups[1]["lr"] = task.rate.item()
        x = (images[rows].float() / 127.5 - 1)[:, None].to(PLACE)
        optimizer.zero_grad()
        loss = F.cross_entropy(theirs(x), labels[rows].to(PLACE))
        loss.backward()
        optimizer.step()
        assert task.losses[step].item() == pytest.approx(loss.item(), rel=1e-4)
        for (name, p), q in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            error = torch.linalg.norm(p - q[1]) / torch.linalg.norm(q[1])
            assert error < 1e-4, (step, name, error)
    with NoArithmetic():
        logits = task.predict(task.validation[0])
    expected = theirs((task.validation[0].float() / 127.5 - 1)[:, None])
    torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-4)
    entry = task.end_epoch()
    found = (expected.argmax(1) == task.validation[1]).double().mean().item()
    assert entry["validation_accuracy"] == found
    assert entry["validation_loss"] == pytest.approx(
        F.cross_entropy(expected, task.validation[1]).item(), rel=1e-3
    )


def test_a_trainer_goes_on_where_another_stopped():
    whole, stopped = (trainer(networks()[0], batch_size=1) for _ in range(2))
    for step in range(2):
        whole.train_step(step)
        if step < 1:
            stopped.train_step(step)
    resumed = trainer(models.FashionMNISTCNN(widths=WIDTHS).to(PLACE), batch_size=1)
    resumed.load_state_dict(stopped.state_dict())
    resumed.train_step(1)
    for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(whole.losses, resumed.losses) and resumed.step.item() == 2


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["float32", "tf32"])
@pytest.mark.parametrize("batch", [1, 32, 37])
def test_a_captured_step_is_the_same_step(batch, precision):
    options = dict(batch_size=batch, precision=precision)
    eager, captured, other = (trainer(networks()[0], 1000, **options) for _ in range(3))
    for step in range(20):
        eager._step()
        captured.train_step(step)
        if step % 2:  # another graph in between
            other.train_step(step // 2)
    for a, b in zip(eager.model.parameters(), captured.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(eager.losses, captured.losses) and torch.equal(eager.right, captured.right)
    assert captured.step.item() == 20 and other.step.item() == 10
    assert torch.equal(other.losses[:10], captured.losses[:10])


@pytest.mark.gpu
def test_a_step_is_one_graph(monkeypatch):
    started = []
    replay = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (started.append(graph), replay(graph))
    )
    task = trainer(networks()[0])
    with recorded() as launches:
        for step in range(3):
            task.train_step(step)
    assert len(started) == 3 and set(started) == {task.graph}
    # Of each step, no launch fills the table: it is filled when the graph has been captured.
    first = [kernel for kernel, *_ in launches].index(batches.batch_kernel)
    step = [kernel for kernel, *_ in launches][first:]
    assert step.count(sgd_fused_kernel) == 2
    assert fill_kernel not in step[: len(step) - step[::-1].index(sgd_fused_kernel)]


@pytest.mark.gpu
def test_the_drawn_clothes_are_learnt_as_with_autograd():
    images, labels = data.fashion_mnist()
    test = data.fashion_mnist(train=False)
    options = dict(epochs=2, batch_size=32, learning_rate=0.05, seed=0)
    recipe = functools.partial(Classifier, optimizer=sgd_of(True))
    for kind in (FashionMNISTPass, recipe):
        torch.manual_seed(0)
        task = kind(models.FashionMNISTCNN().cuda(), images, labels, test, **options)
        for epoch in range(2):
            for step in range(task.steps_per_epoch):
                task.train_step(epoch * task.steps_per_epoch + step)
            entry = task.end_epoch()
        assert entry["validation_accuracy"] >= 0.85


def test_without_a_gpu_nothing_is_captured():
    if SIMULATED:
        with pytest.raises(RuntimeError, match="a CUDA graph needs a GPU"):
            fashion_mnist_graph.FashionMNISTPass._capture(None)
