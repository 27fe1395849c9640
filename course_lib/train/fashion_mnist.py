"""Training on Fashion-MNIST, through autograd, with our layers, loss and optimiser.

model, history = train_fashion_mnist(*data.fashion_mnist(), *data.fashion_mnist(train=False))
"""

import hashlib

import torch
from torch.nn.functional import cross_entropy

from course_lib import models, nn, ops, optim

from . import checkpoint, loop
from .classifier import Classifier
from .leaves import choose_device
from .randomness import repeatable, seed_of

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 5e-4


def train_fashion_mnist(
    train_images, train_labels, test_images, test_labels, epochs=5, batch_size=32, *,
    learning_rate=LEARNING_RATE, seed=0, precision="float32", use_cuda_kernels=True,
    device_name=None, output=None, resume=False, checkpoint_steps=None, progress=None, report=None,
):  # fmt: skip
    """Train `models.FashionMNISTCNN`; (model, history).

    train_images, test_images  uint8 (N, 28, 28), as torchvision's `FashionMNIST.data`
    train_labels, test_labels  int64 (N,), as its `targets`
    learning_rate     the highest: it rises in the first tenth of the steps, then falls to 0
    seed              of the first weights and of the order
    precision         "float32", or "bfloat16": autocast
    use_cuda_kernels  False: PyTorch's layers, loss and optimiser, from the same first weights and
                      with the same batches
    device_name       such as "cuda:0" or "cpu"; None: a GPU if there is one. Without a GPU, our
                      layers run PyTorch's CPU operators
    output, resume, checkpoint_steps, progress, report
                      as in `loop.fit`

    The optimiser is SGD with Nesterov's momentum. The history is a list of one dict for each epoch:
    epoch, loss, accuracy, validation_loss, validation_accuracy; validation is on the test images.
    The model comes back on its device, in evaluation mode. Raises ValueError for images, labels or
    options that cannot be used, CheckpointError, and TrainingError where the loss is not finite.
    """
    place = choose_device(device_name, precision)
    parts = (train_images, train_labels, "train"), (test_images, test_labels, "test")
    for images, labels, name in parts:
        _require(images, labels, name)
    settings = {
        "task": "fashion-mnist", "epochs": epochs, "batch_size": batch_size,
        "learning_rate": learning_rate, "seed": seed, "precision": precision,
        "use_cuda_kernels": use_cuda_kernels,
    }  # fmt: skip
    _require_sensible(settings)
    settings["images"] = " ".join(digest(images, labels) for images, labels, _ in parts)
    with repeatable(place):
        model = create(settings).to(place)
        task = Classifier(
            model, train_images, train_labels, (test_images, test_labels),
            epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, seed=seed,
            precision=precision, optimizer=sgd_of(use_cuda_kernels), weight_decay=WEIGHT_DECAY,
            loss=ops.cross_entropy if use_cuda_kernels else cross_entropy, label_smoothing=0.0,
        )  # fmt: skip
        history = loop.fit(
            task, settings, output=output, resume=resume, checkpoint_steps=checkpoint_steps,
            progress=progress, report=report,
        )  # fmt: skip
    return model.eval(), history


def load_fashion_mnist(path, *, device_name=None):
    """(model, settings) of the checkpoint at `path` of a run on Fashion-MNIST."""
    kept = checkpoint.load(path)
    settings = kept["settings"]
    if settings.get("task") != "fashion-mnist":
        raise checkpoint.CheckpointError(
            f"{path} is of a run on {settings.get('task')}, not on fashion-mnist: name another."
        )
    model = create(settings).to(choose_device(device_name, settings["precision"]))
    model.load_state_dict(kept["state"]["model"])
    return model.eval(), settings


def create(settings):
    """The network with its first weights, the same for our layers and for PyTorch's."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(settings["seed"], "weights"))
        layers = nn if settings["use_cuda_kernels"] else torch.nn
        return models.FashionMNISTCNN(layers=layers)


def digest(images, labels):
    """A hash of all pixels and labels."""
    content = hashlib.sha256(images.cpu().contiguous().numpy())
    content.update(labels.cpu().contiguous().numpy())
    return content.hexdigest()


def sgd_of(ours):
    """What `Classifier` makes its optimiser with: our SGD, or PyTorch's."""
    kind = optim.SGD if ours else torch.optim.SGD
    return lambda groups, lr: kind(groups, lr=lr, momentum=MOMENTUM, nesterov=True)


def _require(images, labels, name):
    if images.dtype != torch.uint8 or images.dim() != 3 or images.shape[1:] != (28, 28):
        raise ValueError(
            f"{name}_images must be uint8 (N, 28, 28), not {images.dtype} {tuple(images.shape)}"
        )
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise ValueError(
            f"{name}_labels must be int64 ({len(images)},), a label for each image, not "
            f"{labels.dtype} {tuple(labels.shape)}"
        )
    if len(labels) == 0 or labels.min() < 0 or labels.max() > 9:
        raise ValueError(f"{name}_labels must be numbers from 0 to 9, and one at least")


def _require_sensible(settings):
    for key in ("epochs", "batch_size"):
        if not isinstance(settings[key], int) or settings[key] < 1:
            raise ValueError(f"{key} must be a whole number, 1 or more; not {settings[key]!r}")
    if not 0 < settings["learning_rate"] < float("inf"):
        raise ValueError(f"learning_rate must be above 0, not {settings['learning_rate']!r}")
