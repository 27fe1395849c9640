"""Tiny-ImageNet trained to the end by `train images`: three networks, and the guide's own recipe.

`guide` is the recipe that guides to this set give: three seeds, on our layers and on PyTorch's.
Each further name in `RECIPES` is one run, on our layers but for resnet18_small. Runs take turns on
the GPU, in a process each; what is trained lies in data/runs, so a command that was stopped goes on
where it was. The record keeps each run's history, and the weights with which two pathways are
integrated.
Needs the real images: ``--data FOLDER``.
"""

import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor

from course_lib import bench, data
from course_lib.benchmarks.tiny_imagenet import network_hash
from course_lib.runtime.host import folders
from course_lib.train.image_settings import ImageSettings
from course_lib.train.images import train_images
from course_lib.train.loop import CHECKPOINT

NAME = "tiny_imagenet.runs"
FOLDER = folders.written("data/runs/tiny_imagenet")
SEEDS = (0, 1, 2)
N_IMAGES = 100_000
TOGETHER = 4  # runs at a time: each has the GPU wait for its host now and then
GUIDE = {
    "model": "tiny_cnn", "epochs": 50, "batch_size": 128, "optimizer": "adam",
    "learning_rate": 1e-3, "schedule": "constant", "precision": "tf32",
}  # fmt: skip
GOOD = {
    "batch_size": 256, "optimizer": "sgd", "weight_decay": 5e-4, "label_smoothing": 0.1,
    "precision": "bfloat16", "channels_last": True, "model_ema": True, "model_ema_decay": 0.9995,
    "warm_up_epochs": 5.0, "kernels": "ours",
}  # fmt: skip
#: name -> the settings of a run
RECIPES = {
    f"guide, {whose}, seed {seed}": GUIDE | {"kernels": kernels, "seed": seed}
    for seed in SEEDS
    for whose, kernels in (("ours", "ours"), ("PyTorch", "torch"))
} | {
    "tiny_cnn": GOOD | {"model": "tiny_cnn", "learning_rate": 0.05, "epochs": 100},
    "tiny_cnn, mixed": GOOD
    | {"model": "tiny_cnn", "learning_rate": 0.05, "epochs": 100, "mixup": 0.2, "cutmix": 1.0},
    "tiny_cnn, AdamW": GOOD
    | {
        "model": "tiny_cnn", "optimizer": "adamw", "learning_rate": 3e-4, "weight_decay": 0.05,
        "epochs": 60,
    },
    "resnet18_small": GOOD
    | {"model": "resnet18_small", "learning_rate": 0.2, "epochs": 50, "kernels": "torch"},
    "continuous_integration": GOOD
    | {
        "model": "continuous_integration", "depth": "medium", "base_channels": 32,
        "learning_rate": 0.1, "epochs": 40,
    },
}  # fmt: skip
BARS = {"tiny_cnn": 0.48, "resnet18_small": 0.60, "continuous_integration": 0.45}
COMMAND = "python -m course_lib bench tiny_imagenet_runs --data FOLDER --record"


def run(*, data_folder, recipes=None, progress=lambda cases: cases):
    """Train by each recipe, `RECIPES` unless others are given. Returns one record."""
    recipes = RECIPES if recipes is None else recipes
    arguments = [(name, recipe, data_folder) for name, recipe in recipes.items()]
    FOLDER.mkdir(parents=True, exist_ok=True)
    data.images(data_folder, cache=FOLDER / "decoded")  # once, for all that follow
    with ProcessPoolExecutor(TOGETHER, multiprocessing.get_context("spawn")) as pool:
        futures = [pool.submit(row_of, *each) for each in arguments]
        rows = [future.result() for future in progress(futures)]
    return [record_of(rows)]


def record_of(rows):
    """The record of runs that are at their end."""
    shape = N_IMAGES, 3, 64, 64
    record = bench.host_record(NAME, shape, "float32", rows, network_hash(), COMMAND)
    accuracy = {
        whose: [row["accuracy"] for row in rows if row["label"].startswith(f"guide, {whose}")]
        for whose in ("ours", "PyTorch")
    }
    return record | {
        "default": "tiny_cnn", "bars": BARS,
        "guide": {
            whose: {
                "accuracy": round(statistics.mean(found), 4),
                "standard_error": round(statistics.stdev(found) / len(found) ** 0.5, 4),
            }
            for whose, found in accuracy.items()
            if len(found) > 1
        },
    }  # fmt: skip


def row_of(name, recipe, data_folder):
    """The row of one run, which goes on where it was stopped.

    Its time is that of all steps, by the median of the epochs, validation aside.
    """
    folder = FOLDER / name.replace(", ", "-").replace(" ", "-")
    settings = ImageSettings(**recipe, data=str(data_folder), cache=FOLDER / "decoded")
    rates = folder / "images_per_second.txt"

    def kept(entry):
        with rates.open("a", encoding="utf-8") as file:
            print(entry["images_per_second"], file=file)

    resume = (folder / CHECKPOINT).exists()
    _, history = train_images(settings, output=folder, resume=resume, report=kept)
    rate = statistics.median(map(float, rates.read_text(encoding="utf-8").split()))
    return {
        "label": name, "kind": "ours" if recipe["kernels"] == "ours" else "peer",
        "recipe": recipe, "microseconds": round(N_IMAGES * settings.epochs / rate * 1e6, 1),
        "accuracy": round(history[-1]["validation_accuracy"], 4), "history": history,
    }  # fmt: skip


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {NAME: network_hash()}
