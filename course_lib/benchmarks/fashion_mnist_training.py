"""Fashion-MNIST trained to the end: our captured graph, our modules, and PyTorch's, side by side.

Five epochs in batches of 32 by one recipe, for each of several seeds; of a seed, all start from the
same first weights. The record keeps each run's history, its losses, how long it took (with the
other seeds beside it: each has a process of its own), and for the first seed which class was taken
for which. Needs the real images: ``--data FOLDER``.
"""

import multiprocessing
import time
from concurrent.futures import ProcessPoolExecutor

import torch
import torch.nn.functional as F

from course_lib import bench, data, ops, optim
from course_lib.benchmarks.fashion_mnist import network_hash
from course_lib.train import FashionMNISTPass, fashion_mnist, fit, predict
from course_lib.train.classifier import Classifier
from course_lib.train.randomness import repeatable

NAME = "fashion_mnist.runs"
SEEDS = (0, 1, 2)
EPOCHS, BATCH_SIZE = 5, 32
CAPTURED, MODULES, PEER = "ours, captured", "ours, modules", "PyTorch"
POINTS = 250  # of a curve of losses: each is the mean of some steps
WARM_UP = 2 * BATCH_SIZE  # images on which each way is tried once: kernels are compiled there
DEVICE = "cuda"
COMMAND = "python -m course_lib bench fashion_mnist_training --data FOLDER --record"


def run(*, data_folder, seeds=SEEDS, epochs=EPOCHS, progress=lambda cases: cases):
    """Train each way from each seed on the images in `data_folder`. Returns one record.

    None for the folder: the drawn clothes, to try this. Raises DataError for one without the set.
    """
    shape = data.fashion_mnist(data_folder, train=True)[0].shape  # or raises, before all training
    arguments = [(data_folder, seed, epochs, seed == seeds[0]) for seed in seeds]
    if DEVICE == "cuda" and len(seeds) > 1:
        with ProcessPoolExecutor(len(seeds), multiprocessing.get_context("spawn")) as pool:
            futures = [pool.submit(runs_of, *each) for each in arguments]
            found = [future.result() for future in progress(futures)]
    else:
        found = [runs_of(*each) for each in progress(arguments)]
    rows = [row for rows in found for row in rows]
    record = bench.host_record(NAME, shape, "float32", rows, kernel_hashes()[NAME], COMMAND)
    return [
        record
        | {
            "default": CAPTURED, "epochs": epochs, "batch_size": BATCH_SIZE,
            "drawn": data_folder is None, "accuracy": means(rows),
        }
    ]  # fmt: skip


def runs_of(data_folder, seed, epochs, with_confusion):
    """The rows of one seed."""
    train, test = (data.fashion_mnist(data_folder, train=part) for part in (True, False))
    for way in WAYS.values():
        way([part[:WARM_UP] for part in train], [part[:WARM_UP] for part in test], 1, seed)
    rows = []
    for label, way in WAYS.items():
        start = time.perf_counter()
        model, history, losses = way(train, test, epochs, seed)
        rows.append(_row(label, seed, history, losses, time.perf_counter() - start))
        if with_confusion:
            rows[-1]["confusion"] = confusion(model, *test)
    return rows


def captured(train, test, epochs, seed):
    """(model, history, losses of all steps) by `FashionMNISTPass`."""
    settings = {"seed": seed, "use_cuda_kernels": True}
    model = fashion_mnist.create(settings).to(DEVICE)
    task = Watched(
        model, *train, test, epochs=epochs, batch_size=BATCH_SIZE, seed=seed, nesterov=True,
        learning_rate=fashion_mnist.LEARNING_RATE, momentum=fashion_mnist.MOMENTUM,
        weight_decay=fashion_mnist.WEIGHT_DECAY,
    )  # fmt: skip
    history = fit(task, settings)
    return model.eval(), history, task.found


class Watched(FashionMNISTPass):
    """A trainer that keeps the losses of all its steps."""

    def end_epoch(self):
        self.found = [*getattr(self, "found", ()), *self.losses.tolist()]
        return super().end_epoch()


def by_autograd(ours):
    """A way to train through autograd: with our layers, loss and optimiser, or with PyTorch's."""

    def optimizer(groups, lr):
        options = dict(lr=lr, momentum=fashion_mnist.MOMENTUM, nesterov=True)
        return (
            optim.SGD(groups, **options) if ours else torch.optim.SGD(groups, fused=True, **options)
        )

    def way(train, test, epochs, seed):
        losses = []

        def loss(*inputs, **options):
            found = (ops.cross_entropy if ours else F.cross_entropy)(*inputs, **options)
            losses.append(found.detach())
            return found

        settings = {"seed": seed, "use_cuda_kernels": ours}
        with repeatable(torch.device(DEVICE)):
            model = fashion_mnist.create(settings).to(DEVICE)
            task = Classifier(
                model, *train, test, epochs=epochs, batch_size=BATCH_SIZE, seed=seed,
                learning_rate=fashion_mnist.LEARNING_RATE, optimizer=optimizer, loss=loss,
                weight_decay=fashion_mnist.WEIGHT_DECAY, label_smoothing=0.0,
            )  # fmt: skip
            history = fit(task, settings)
        return model.eval(), history, torch.stack(losses).tolist()

    return way


WAYS = {CAPTURED: captured, MODULES: by_autograd(True), PEER: by_autograd(False)}


def confusion(model, images, labels):
    """How many images there are of each true class (row) and answer (column)."""
    found, n = predict(model, images).argmax(1).cpu(), len(data.FASHION_CLASSES)
    return torch.bincount(labels.cpu() * n + found, minlength=n * n).view(n, n).tolist()


def means(rows):
    """{label: share of the test images known after the last epoch, the mean over the seeds}."""
    found = {}
    for row in rows:
        found.setdefault(row["label"], []).append(row["history"][-1]["validation_accuracy"])
    return {label: round(sum(each) / len(each), 5) for label, each in found.items()}


def _row(label, seed, history, losses, seconds):
    length = -(-len(losses) // POINTS)  # steps to a point
    parts = [losses[i : i + length] for i in range(0, len(losses), length)]
    return {
        "label": label,
        "kind": "peer" if label == PEER else "ours",
        "seed": seed,
        "microseconds": round(seconds * 1e6, 1),
        "history": history,
        "steps": len(losses),
        "steps_to_a_point": length,
        "losses": [round(sum(part) / len(part), 4) for part in parts],
    }


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {NAME: network_hash()}
