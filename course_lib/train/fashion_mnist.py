"""Training on Fashion-MNIST with our kernels: in one captured graph, or by modules and autograd.

model, history = train_fashion_mnist(*data.fashion_mnist(), *data.fashion_mnist(train=False))
"""

import contextlib
import hashlib
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from course_lib import SIMULATED, models, nn, ops, optim
from course_lib.ops.registration import simulate_on_cpu

from . import checkpoint, device, faster, loop, memory, ranks
from .classifier import PRECISIONS, Classifier, scale
from .fashion_mnist_graph import FashionMNISTPass
from .randomness import seed_of

CAPTURED, MODULES = "captured", "modules"
#: In what each trainer computes. For modules, PyTorch's own switches allow TF32.
TRAINERS = {CAPTURED: ("float32", "tf32"), MODULES: PRECISIONS}
KNOWN = tuple(dict.fromkeys(sum(TRAINERS.values(), ())))
EARLIER = {"trainer": MODULES}  # what checkpoints were made by that do not say it
#: What a checkpoint must say for its network to be had again.
SETTINGS = {"seed": int, "precision": str, "use_cuda_kernels": bool | str}
LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 0.05, 0.9, 5e-4


def train_fashion_mnist(
    train_images, train_labels, test_images, test_labels, epochs=5, batch_size=32, *,
    learning_rate=LEARNING_RATE, seed=0, precision="float32", use_cuda_kernels=True,
    trainer=None, device_name=None, output=None, resume=False, checkpoint_steps=None, progress=None,
    report=None, say=None,
):  # fmt: skip
    """Train `models.FashionMNISTCNN`; (model, history).

    train_images, test_images  uint8 (N, 28, 28), as torchvision's `FashionMNIST.data`
    train_labels, test_labels  int64 (N,), as its `targets`
    learning_rate     the highest: it rises in the first tenth of the steps, then falls to 0
    seed              of the first weights and of the order
    precision         "float32", "tf32" or "bfloat16" (autocast)
    use_cuda_kernels  False: PyTorch's layers, loss and optimiser, from the same first weights and
                      with the same batches. "faster": these, but for layers that are faster by
                      ours on this GPU
    trainer           "captured": our kernels alone, a step in one CUDA graph
                      (`FashionMNISTPass`), in float32 or tf32; "modules": our layers through
                      autograd, in float32 or bfloat16. None: captured, on a GPU and where it has
                      the precision; a resumed run goes on as it was begun
    device_name       such as "cuda:0" or "cpu"; None: a GPU if there is one. Without a GPU, our
                      layers run PyTorch's CPU operators
    output, resume, checkpoint_steps, progress, report, say
                      as in `loop.fit`; `say` is also told what trains

    The optimiser is SGD with Nesterov's momentum. The history is a list of one dict for each epoch:
    epoch, loss, accuracy, validation_loss, validation_accuracy; validation is on the test images.
    The model comes back on its device, in evaluation mode. Raises ValueError for images, labels or
    options that cannot be used, TypeError for images or labels that are no tensors, and what
    `loop.fit` raises.
    """
    place = device.choose(device_name, precision, KNOWN)
    parts = (train_images, train_labels, "train"), (test_images, test_labels, "test")
    for images, labels, name in parts:
        _require(images, labels, name)
    settings = {
        "task": "fashion-mnist", "epochs": epochs, "batch_size": batch_size,
        "learning_rate": learning_rate, "seed": seed, "precision": precision,
        "use_cuda_kernels": use_cuda_kernels,
    }  # fmt: skip
    _require_sensible(settings)
    faster.require_known(use_cuda_kernels)
    if output is not None:
        loop.require_room(output, resume)
        trainer = ranks.first(lambda: trainer or _begun_with(Path(output) / loop.CHECKPOINT))
    say = ranks.aloud(say)
    settings["trainer"] = trainer = choose_trainer(trainer, place, precision, use_cuda_kernels)
    if say is not None:
        say(f"{len(train_images):,} images, {_said_of(trainer, settings)}, on {place}.")
    settings["images"] = " ".join(digest(images, labels) for images, labels, _ in parts)
    with _context(trainer, place), memory.explained(settings):
        model = create(settings).to(place)
        if use_cuda_kernels == faster.FASTER:
            settings |= faster.earlier(output, resume)
            example = scale(train_images[:batch_size].to(place))
            faster.settle(model, settings, example, precision, say=say)
        make = TASKS[trainer]
        task = make(model, train_images, train_labels, (test_images, test_labels), settings)
        history = loop.fit(
            task, settings, output=output, resume=resume, checkpoint_steps=checkpoint_steps,
            progress=progress, report=report, say=say, earlier=EARLIER,
        )  # fmt: skip
    return model.eval(), history


def choose_trainer(asked, place, precision, use_cuda_kernels):
    """The trainer that is `asked` for, or for None the fastest that can do it; or ValueError."""
    kernels = use_cuda_kernels is True and (place.type == "cuda" and not SIMULATED)
    if asked is None:
        return CAPTURED if kernels and precision in TRAINERS[CAPTURED] else _of_modules(precision)
    if asked not in TRAINERS:
        raise ValueError(f"trainer must be {' or '.join(TRAINERS)}, not {asked!r}")
    if asked == MODULES:
        return _of_modules(precision)
    if use_cuda_kernels is not True:
        raise ValueError("the captured trainer is made of our kernels: choose trainer='modules'")
    if not kernels and not (simulate_on_cpu and place.type == "cpu"):
        raise ValueError(f"the captured trainer needs a GPU, and this run is on {place}")
    if precision not in TRAINERS[CAPTURED]:
        raise ValueError(
            f"the captured trainer computes in {' or '.join(TRAINERS[CAPTURED])}, not {precision}: "
            "choose one of them, or trainer='modules'"
        )
    return CAPTURED


def _of_modules(precision):
    if precision not in TRAINERS[MODULES]:
        raise ValueError(
            f"{precision} is for the captured trainer on a GPU; modules compute in "
            f"{' or '.join(TRAINERS[MODULES])}"
        )
    return MODULES


def _begun_with(path):
    """The trainer of the checkpoint at `path`; None where there is none."""
    return (EARLIER | checkpoint.load(path)["settings"])["trainer"] if path.exists() else None


def _said_of(trainer, settings):
    if trainer == CAPTURED:
        return f"a step of our kernels in one captured graph, {settings['precision']}"
    layers = {True: "our", False: "PyTorch's"}.get(settings["use_cuda_kernels"], "the faster")
    told = f"{layers} modules through autograd, {settings['precision']}"
    if settings["precision"] not in TRAINERS[CAPTURED]:
        told += f", which the captured graph has not ({' and '.join(TRAINERS[CAPTURED])} it has)"
    return told


@contextlib.contextmanager
def _context(trainer, place):
    """What a trainer works in: our kernels are repeatable by themselves, PyTorch's are told to."""
    with contextlib.ExitStack() as stack:
        if trainer == MODULES:
            stack.enter_context(device.settled(place))
        elif place.type == "cuda":  # a graph is captured on the current device's streams
            stack.enter_context(torch.cuda.device(place))
        yield


def _by_graph(model, images, labels, validation, settings):
    return FashionMNISTPass(
        model, images, labels, validation, momentum=MOMENTUM, nesterov=True,
        weight_decay=WEIGHT_DECAY, **{key: settings[key] for key in OPTIONS},
    )  # fmt: skip


def _by_modules(model, images, labels, validation, settings):
    ours = settings["use_cuda_kernels"] is True
    return Classifier(
        model, images, labels, validation, optimizer=sgd_of(ours), weight_decay=WEIGHT_DECAY,
        loss=ops.cross_entropy if ours else cross_entropy, label_smoothing=0.0,
        **{key: settings[key] for key in OPTIONS},
    )  # fmt: skip


OPTIONS = ("epochs", "batch_size", "learning_rate", "seed", "precision")
TASKS = {CAPTURED: _by_graph, MODULES: _by_modules}


def load_fashion_mnist(path, *, device_name=None):
    """(model, settings) of the checkpoint at `path` of a run on Fashion-MNIST."""
    kept = checkpoint.load_of("fashion-mnist", path, SETTINGS)
    settings = kept["settings"]
    model = create(settings).to(device.choose(device_name, settings["precision"], KNOWN))
    if settings["use_cuda_kernels"] == faster.FASTER:
        faster.settle(model, settings)
    checkpoint.load_weights(path, model, kept)
    return model.eval(), settings


def create(settings):
    """The network with its first weights, the same for our layers and for PyTorch's."""
    with torch.random.fork_rng([]):
        torch.manual_seed(seed_of(settings["seed"], "weights"))
        layers = nn if settings["use_cuda_kernels"] is True else torch.nn
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
    for given, kind in ((images, "images"), (labels, "labels")):
        if not isinstance(given, torch.Tensor):
            found = f"{type(given).__module__}.{type(given).__qualname__}"
            raise TypeError(
                f"{name}_{kind} must be a torch.Tensor, not a {found}: torch.as_tensor makes one"
            )
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
