"""Short runs of `train images`, whole and stopped."""

import dataclasses

from course_lib import cli
from course_lib.train import image_classifier, images
from course_lib.train.image_settings import ImageSettings

OPTIONS = ["--device", "cpu", "--image-size", "16", "--batch-size", "6", "--padding", "1"]
#: What makes resuming hard: an average, running statistics, dropout, and random mixing.
SMALL = ImageSettings(
    device="cpu", image_size=16, batch_size=6, epochs=4, padding=1, mixup=0.2, cutmix=1.0,
    model_ema=True, model_ema_decay=0.9, checkpoint_steps=1,
)  # fmt: skip


def run(root, output=None, resume=False, **options):
    settings = dataclasses.replace(SMALL, data=str(root), **options)
    return images.train_images(settings, output=output, resume=resume, tell=str)


def command(root, *words):
    return cli.main(["train", "images", *OPTIONS, "--data", str(root), *map(str, words)])


def made(root, **options):
    """The task of a run with these settings."""
    settings = dataclasses.replace(SMALL, data=str(root), **options)
    settings, places = images.decided(settings)
    training, held = images.read(settings)
    return images.make_task(settings, places, training, held, None)


def at_step(monkeypatch, number, act):
    """Let `act()` run within training step `number`, counted from the start of the process."""
    left, step = [number], image_classifier.ImageClassifier.train_step

    def train_step(self, n):
        left[0] -= 1
        if left[0] == -1:
            act()
        step(self, n)

    monkeypatch.setattr(image_classifier.ImageClassifier, "train_step", train_step)
