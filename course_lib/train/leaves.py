"""Training on leaves: a network told by name, or one's own, from scratch.

model, history = train_leaves(epochs=12)
"""

import contextlib

import torch

from course_lib import data, models
from course_lib.data import decoded, streamed

from . import checkpoint, device, faster, feeding, loop, memory, ranks
from .classifier import PRECISIONS, Classifier, scale
from .randomness import seed_of
from .sync_batch_norm import synchronised

#: What each network is trained with where nothing else is asked for.
DEFAULTS = {
    "small_se_net": {
        "image_size": 64, "epochs": 15, "batch_size": 16, "learning_rate": 4e-3,
        "augmentation": "flips",
    },
    "efficientnet_b4": {
        "image_size": 224, "epochs": 60, "batch_size": 32, "learning_rate": 1e-3,
        "augmentation": "strong",
    },
}  # fmt: skip
OTHERWISE = DEFAULTS["efficientnet_b4"]
AUGMENTATIONS = "flips", "strong"


def train_leaves(
    model=None, root=None, *, image_size=None, epochs=None, batch_size=None, learning_rate=None,
    seed=0, validation_fraction=0.2, precision="float32", use_cuda_kernels=True, device_name=None,
    sync_batch_norm=False, memory_limit=None, output=None, resume=False, checkpoint_steps=None,
    progress=None, report=None, say=None,
):  # fmt: skip
    """Train on a leaf-disease set; (model, history).

    model             a name that `models.create_model` knows, or a module of one's own with as many
                      outputs as the set has classes; None: efficientnet_b4 on a GPU, else
                      small_se_net
    root              the set, as `data.leaves` takes it; None: the drawn one
    image_size, epochs, batch_size, learning_rate
                      None: what `DEFAULTS` says of the network
    seed              of the split, the first weights, the order and the augmentation
    precision         "float32", or "bfloat16": autocast
    use_cuda_kernels  as in `models.create_model`; "faster": layers that are faster by ours on this
                      GPU run our kernels
    device_name       such as "cuda:0", "mps" or "cpu"; None: a GPU if there is one
    sync_batch_norm   of several ranks, batch norms take the joint batch's statistics
    memory_limit      memory for decoded images, such as "8GB"; a larger set is streamed. None:
                      three quarters of what is free
    output, resume, checkpoint_steps, progress, report, say
                      as in `loop.fit`; `say` is also told the network, and each class's images

    The history is a list of one dict for each epoch: epoch, loss, accuracy, validation_loss,
    validation_accuracy. The model comes back on its device, in evaluation mode. Raises ValueError
    for options that cannot be used, `data.DataError` for such a set, and what `loop.fit` raises.
    """
    place = device.choose(device_name, precision, PRECISIONS)
    if model is None:
        model = "efficientnet_b4" if place.type == "cuda" else "small_se_net"
    name = model if isinstance(model, str) else type(model).__name__
    given = {
        "image_size": image_size, "epochs": epochs, "batch_size": batch_size,
        "learning_rate": learning_rate,
    }  # fmt: skip
    settings = {"task": "leaves", "model": name} | DEFAULTS.get(name, OTHERWISE)
    settings |= {key: value for key, value in given.items() if value is not None}
    settings |= {
        "seed": seed, "validation_fraction": validation_fraction, "precision": precision,
        "use_cuda_kernels": use_cuda_kernels, "sync_batch_norm": sync_batch_norm,
    }  # fmt: skip
    _require_sensible(settings)
    faster.require_known(use_cuda_kernels)
    limit, source = ranks.first(lambda: streamed.limit_of(memory_limit))
    allowed = limit // ranks.on_host(), source
    if output is not None:
        loop.require_room(output, resume)  # before the images are read
    say = ranks.aloud(say)
    with ranks.in_turn():
        training, validation = read_parts(root, settings, progress, allowed[0])
    if say is not None:
        say(f"{name} on {place}, images of {settings['image_size']} pixels.")
        say(counts(training, validation))
    if isinstance(training.images, data.Streamed):
        told = feeding.streaming(training, validation, settings["batch_size"], allowed)
        if say is not None:
            say(told)
    before = faster.earlier(output, resume, (faster.LAYERS, "images"))
    settings |= {
        "classes": list(training.classes),
        "images": decoded.digests(training, validation, before.pop("images", None)),
    }
    with contextlib.ExitStack() as stack:
        stack.enter_context(device.settled(place))
        stack.enter_context(memory.explained(settings))
        if isinstance(model, str):
            model = create(settings, place)
        model.to(place)
        if use_cuda_kernels == faster.FASTER:
            settings |= before
            n = settings["batch_size"]
            example = next(iter(training.images[:n].split(n))).to(place)
            faster.settle(model, settings, scale(example), precision, say=say)
        if sync_batch_norm and ranks.count() > 1:
            model = synchronised(model)
        task = Classifier(
            model, training.images, training.labels,
            (validation.images, validation.labels),
            augment=augmentation(settings["augmentation"]),
            **{key: settings[key] for key in TASK},
        )  # fmt: skip
        stack.callback(task.close)
        history = loop.fit(
            task, settings, output=output, resume=resume, checkpoint_steps=checkpoint_steps,
            progress=progress, report=report, say=say, earlier=EARLIER,
        )  # fmt: skip
    return model.eval(), history


def augmentation(name):
    """The transform of that name, one of `AUGMENTATIONS`, that changes an image at random.

    A small network has enough to do with the images as they are; a large one learns them by heart.
    """
    from torchvision.transforms import v2  # which takes long to import

    transforms = [v2.RandomHorizontalFlip(), v2.RandomVerticalFlip()]
    if name == "strong":
        transforms += [
            v2.RandomAffine(
                degrees=30, translate=(0.08, 0.08), scale=(0.85, 1.25), shear=8,
                interpolation=v2.InterpolationMode.BILINEAR,
            ),
            v2.ColorJitter(brightness=0.2, contrast=0.2, saturation=0.2),
        ]  # fmt: skip
    return v2.Compose(transforms)


EARLIER = {"sync_batch_norm": False}  # what checkpoints were made by that do not say it
#: What a checkpoint must say for its network and images to be had again.
SETTINGS = {
    "model": str, "image_size": int, "seed": int, "validation_fraction": float, "precision": str,
    "use_cuda_kernels": bool | str, "classes": list, "images": str,
}  # fmt: skip
TASK = ("epochs", "batch_size", "learning_rate", "seed", "precision")


def load_leaves(path, root=None, *, device_name=None, progress=None, memory_limit=None):
    """(model, validation images, settings) of the checkpoint at `path` of a run on leaves.

    root          where the set lies now; its images must be those that the run was made with
    memory_limit  as in `train_leaves`
    """
    kept = checkpoint.load_of("leaves", path, SETTINGS)
    settings = kept["settings"]
    place = device.choose(device_name, settings["precision"], PRECISIONS)
    limit, _ = streamed.limit_of(memory_limit)
    validation = data.leaves(
        root, train=False, **_split(settings), progress=progress, memory=limit
    )
    pixels = not settings["images"].startswith(decoded.NAMES)
    if validation.digest(pixels) not in settings["images"]:
        raise checkpoint.CheckpointError(
            f"{path} was trained with other images than those of {root or 'the drawn set'}: name "
            "the set that it was made with."
        )
    with device.settled(place):
        model = create(settings, place)
    if settings["use_cuda_kernels"] == faster.FASTER:
        faster.settle(model, settings)
    checkpoint.load_weights(path, model, kept)
    return model.eval(), validation, settings


def read_parts(root, settings, progress=None, allowed=None):
    """The training part and the validation part of the set at `root`.

    allowed  bytes that decoded images may take; None: any
    """
    return [
        data.leaves(root, train=train, **_split(settings), progress=progress, memory=allowed)
        for train in (True, False)
    ]


def counts(training, validation):
    """How many images of each class there are to train on and to validate with, as a sentence."""
    pairs = [
        f"{name} {(training.labels == label).sum()} + {(validation.labels == label).sum()}"
        for label, name in enumerate(training.classes)
    ]
    return (
        f"{len(pairs)} classes, {len(training)} images to train on + {len(validation)} to validate "
        f"with: {', '.join(pairs)}."
    )


def create(settings, place):
    """The network of `settings` with its first weights, the same on every device."""
    torch.manual_seed(seed_of(settings["seed"], "weights"))
    ours = settings["use_cuda_kernels"] is True
    model = models.create_model(settings["model"], len(settings["classes"]), ours)
    # The last layer begins near 0, so that all classes are equally likely. torchvision's
    # EfficientNet takes numbers up to 1/√classes: fit for 1,000, but with 5, its first answers are
    # wrong with such confidence (a loss of 5) that the first epochs go into unlearning them.
    for layer in [m for m in model.modules() if isinstance(m, torch.nn.Linear)][-1:]:
        torch.nn.init.normal_(layer.weight, std=0.01)
        torch.nn.init.zeros_(layer.bias)
    return model.to(place)


def _split(settings):
    return {key: settings[key] for key in ("image_size", "validation_fraction", "seed")}


def _require_sensible(settings):
    for key in ("epochs", "batch_size", "image_size"):
        if not isinstance(settings[key], int) or settings[key] < 1:
            raise ValueError(f"{key} must be a whole number, 1 or more; not {settings[key]!r}")
    if not 0 < settings["learning_rate"] < float("inf"):
        raise ValueError(f"learning_rate must be above 0, not {settings['learning_rate']!r}")
