"""Water from radar: the learner's own U-Net, on NumPy or on a GPU, from a file of settings.

model, history = train_sar(SarSettings(num_epochs=5, depth=2, initial_channels=16))
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from course_lib import data, plot
from course_lib.autograd import UNet
from course_lib.backend import set_backend

from . import checkpoint, loop, memory, ranks
from . import config as config_file
from .config import at_least
from .segmentation import Segmentation

PICTURE, SHOWN = "masks.png", 4
WATER_OR_NOT = ("land", "water")


@dataclass(frozen=True)
class SarSettings:
    """What a run is asked to do: the keys of its YAML file, and what they are without one.

    use_cuda               null: a GPU if there is one; true: an error without one; false: the CPU
    in_channels            the bands of an image: VV and VH
    num_classes            how many classes the labels have
    depth                  how often the U-Net halves the image, 2 to 5
    initial_channels       of its first step; its bottom has 2^depth times as many
    use_batchnorm          normalise after each 3×3 convolution
    num_epochs, batch_size, learning_rate
                           Adam; the rate falls to 0 along a cosine
    loss_function          dice, cross_entropy (classes weighted by how rare they are), combined
                           (the mean of both), or focal
    image_size             height and width of the tiles that scenes are cut into
    train_ratio            share of the scenes to train on; the others validate
    augment                flips and quarter turns, drawn anew in each epoch
    normalize              scale decibels to about −1 … 1; see `data.sar`
    data_dir               a folder or file as `data.sar` reads them; null: drawn scenes
    unit                   of its numbers: decibels, power, grey or as_is; null: as their type tells
    use_synthetic_data     true: drawn scenes, whatever data_dir says
    num_synthetic_samples  how many
    ignore_label           the label in the files that means "unknown"
    label_colours          class of each colour, for labels that are pictures: `"#0000ff": 1`
    precision              what layers compute in: float32, or on a GPU float16 or bfloat16
    checkpoint_dir         where checkpoint, history and pictures are kept; null keeps nothing
    seed                   of weights, order and augmentation
    """

    use_cuda: bool | None = None
    in_channels: int = at_least(1, 2)
    num_classes: int = at_least(2, 2)
    depth: int = at_least(2, 4)
    initial_channels: int = at_least(1, 64)
    use_batchnorm: bool = True
    num_epochs: int = at_least(1, 20)
    batch_size: int = at_least(1, 8)
    learning_rate: float = at_least(0, 1e-3)
    loss_function: Literal["dice", "cross_entropy", "combined", "focal"] = "combined"
    image_size: int = at_least(1, 128)
    train_ratio: float = at_least(0, 0.8)
    augment: bool = True
    normalize: bool = True
    data_dir: Path | None = None
    unit: Literal["decibels", "power", "grey", "as_is"] | None = None
    use_synthetic_data: bool = False
    num_synthetic_samples: int = at_least(2, 64)
    ignore_label: int | None = None
    label_colours: dict | None = None
    precision: Literal["float32", "float16", "bfloat16"] = "float32"
    checkpoint_dir: Path | None = None
    seed: int = at_least(0, 0)


def train_sar(
    settings, *, output=None, resume=False, progress=None, report=None, say=None, tell=print
):
    """Train as `settings`, a `SarSettings`, say; (model, history).

    output            a folder; settings.checkpoint_dir by default
    resume, progress, report, say
                      as in `loop.fit`
    tell              called with each line of the header

    Raises BackendError where the GPU that was asked for is not there, DataError, ValueError,
    CheckpointError, and TrainingError where the loss is not finite.
    """
    output = settings.checkpoint_dir if output is None else Path(output)
    if output is not None:
        loop.require_room(output, resume)
    tell = ranks.aloud(tell)
    backend = set_backend(settings.use_cuda)
    with ranks.in_turn():
        scenes = load(settings)
    require_fitting(settings, scenes)
    train, validation = data.sar.split(scenes, settings.train_ratio, settings.seed)
    tell(f"Device: {backend.description}")
    with memory.explained(kept_settings(settings, scenes)):
        model = create(settings)
        tell(f"Model: {model}")
        tell(facts(train, validation))
        if scenes.classes == WATER_OR_NOT:
            threshold, _ = data.sar.best_threshold(train)
            found = data.sar.threshold_iou(validation, threshold)
            tell(
                f"To beat: the best threshold on {scenes.bands[0]} finds water with IoU {found:.4f}"
            )
        task = Segmentation(
            model, train.images, train.labels, (validation.images, validation.labels),
            epochs=settings.num_epochs, batch_size=settings.batch_size,
            learning_rate=settings.learning_rate, seed=settings.seed,
            loss_function=settings.loss_function, precision=settings.precision,
            augment=data.sar.augmented if settings.augment else None,
        )  # fmt: skip
        history = loop.fit(
            task, kept_settings(settings, scenes), output=output, resume=resume,
            progress=progress, report=report, say=say,
        )  # fmt: skip
        if output is not None and ranks.is_first():
            draw(task, validation, output)
    return model.eval(), history


def load(settings):
    """The scenes that `settings` name, as tiles."""
    if settings.data_dir is None or settings.use_synthetic_data:
        return data.sar.load(
            n_scenes=settings.num_synthetic_samples, image_size=settings.image_size,
            normalize=settings.normalize,
        )  # fmt: skip
    return data.sar.load(
        settings.data_dir, image_size=settings.image_size, normalize=settings.normalize,
        ignore_label=settings.ignore_label, label_colours=settings.label_colours,
        num_classes=settings.num_classes, unit=settings.unit,
    )  # fmt: skip


def require_fitting(settings, scenes):
    """ValueError where the scenes are not what the settings take them for."""
    for key, asked, found in (
        ("in_channels", settings.in_channels, scenes.images.shape[1]),
        ("num_classes", settings.num_classes, len(scenes.classes)),
    ):
        if asked != found:
            raise ValueError(f"{key} is {asked}, but the scenes have {found}: set {key}: {found}")


def create(settings):
    """The U-Net that `settings` describe, with its first weights."""
    return UNet(
        settings.in_channels, settings.num_classes, settings.depth, settings.initial_channels,
        settings.use_batchnorm, random=np.random.default_rng(settings.seed),
    )  # fmt: skip


def facts(train, validation):
    """What is trained on, in one line."""
    counts = train.class_counts() + validation.class_counts()
    shares = ", ".join(
        f"{name} {count / max(1, counts.sum()):.1%}"
        for name, count in zip(train.classes, counts, strict=True)
    )
    bad = sum((train.not_finite | validation.not_finite).values())
    told = f"; {bad} pixels without data (NaN, infinite or 0 dB) count nothing" if bad else ""
    return f"Data: {len(train)} tiles to train on, {len(validation)} to validate; {shares}{told}"


def kept_settings(settings, scenes):
    """What decides the result, in plain values: what a checkpoint is compared by."""
    found = dataclasses.asdict(settings)
    # Where a run is kept, and on what it computes, may change when it goes on.
    for name in ("checkpoint_dir", "use_cuda", "data_dir", "use_synthetic_data", "unit"):
        del found[name]
    return {"task": "sar"} | found | {"images": scenes.digest()}


def draw(task, validation, output):
    """Keep a picture of some validation tiles, their labels and what the network makes of them."""
    shown = validation.take(np.linspace(0, len(validation) - 1, SHOWN).astype(int))
    picture = plot.segmentation(
        shown.images[:, 0], shown.labels, task.predict(shown.images), shown.classes,
        titles=shown.scenes,
    ).png()
    checkpoint.write_whole(output / PICTURE, lambda file: file.write(picture))


def load_sar(path, use_cuda=None):
    """(model, settings) of the checkpoint at `path`, a file, of a run on radar images."""
    kept = checkpoint.load(path)
    settings = kept["settings"]
    if settings.get("task") != "sar":
        raise checkpoint.CheckpointError(
            f"{path} is of a run on {settings.get('task')}, not on sar: name another."
        )
    names = {field.name for field in dataclasses.fields(SarSettings)}
    settings = SarSettings(**{k: v for k, v in settings.items() if k in names})
    set_backend(use_cuda)
    model = create(settings)
    model.load_state_dict({k: v.numpy() for k, v in kept["state"]["model"].items()})
    return model.eval(), settings


def evaluate(path, settings):
    """What the network of the checkpoint at `path` scores on the validation scenes of `settings`.

    A dict of numbers, as a history has them.
    """
    model, trained = load_sar(path, settings.use_cuda)
    # The images that the network was trained on, split as they were then.
    settings = dataclasses.replace(
        trained, data_dir=settings.data_dir, use_synthetic_data=settings.use_synthetic_data
    )
    train, validation = data.sar.split(load(settings), settings.train_ratio, settings.seed)
    task = Segmentation(
        model, train.images, train.labels, (validation.images, validation.labels), epochs=1,
        batch_size=settings.batch_size, learning_rate=0, seed=settings.seed,
        loss_function=settings.loss_function, precision=settings.precision,
    )  # fmt: skip
    return task.validate()


def main(config=None, **options):
    """Train as the YAML file `config` says, and tell each epoch; (model, history)."""
    return train_sar(
        read_settings(config), report=lambda entry: print(loop.sentence(entry)), **options
    )


def read_settings(config):
    """The `SarSettings` of a YAML file, or without one the defaults."""
    return SarSettings() if config is None else config_file.read(config, SarSettings)
