"""`train fashion-mnist` as a user starts it, beside an eager PyTorch script that does the same.

Epochs in batches of 32 on 60,000 images, each with a learning rate for each step, an evaluation of
10,000 images, a history and a checkpoint that is forced to the disk. Timed are all epochs but the
first, from line to line of what either prints: starting Python, reading the images, compiling and
capturing are left out. Both are processes of their own and take turns. What the images show has no
bearing on time; they are made up, and lie in files as the set's own.

PyTorch's side keeps the set on the GPU, tries cuDNN's algorithms, has a fused optimiser and reads
the losses once an epoch.
"""

import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from course_lib import bench

NAME = "fashion_mnist.command"
OURS, PEER = "ours, the command", "PyTorch eager"
N_TRAIN, N_TEST, EPOCHS, BATCH_SIZE = 60_000, 10_000, 5, 32
OPTIONS = ()  # more of the command's
PLACE = "cuda"  # of the peer


def measure(precision, rounds, kernel_hash, command):
    """The record of one precision, float32 or tf32."""
    with tempfile.TemporaryDirectory() as folder:
        images = _write_set(Path(folder))
        seconds = {OURS: [], PEER: []}
        for i in range(rounds):
            for label, make in ((OURS, _command), (PEER, _script)):
                output = Path(folder, f"{len(label)}-{i}")
                seconds[label].append(_seconds(make(images, output, precision)))
    rows = [_row(label, found) for label, found in seconds.items()]
    name = NAME + (".tf32" if precision == "tf32" else "")
    shape = BATCH_SIZE, 1, 28, 28
    record = bench.host_record(name, shape, "float32", rows, kernel_hash, command)
    ratio = rows[0]["images_per_second"] / rows[1]["images_per_second"]
    return record | {
        "default": OURS, "precision": precision, "epochs": EPOCHS, "speedup": round(ratio, 2),
    }  # fmt: skip


def _row(label, seconds):
    steps = (EPOCHS - 1) * (N_TRAIN // BATCH_SIZE)
    times = [each / steps * 1e6 for each in seconds]
    low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
    return {
        "label": label,
        "kind": "ours" if label == OURS else "peer",
        "microseconds": round(middle, 3),  # of a step, with its share of everything else
        "quartiles": [round(low, 3), round(high, 3)],
        "images_per_second": round(BATCH_SIZE / middle * 1e6, 1),
    }


def _command(images, output, precision):
    words = "train", "fashion-mnist", "--data", images, "--output", output, "--precision", precision
    sizes = "--epochs", EPOCHS, "--batch-size", BATCH_SIZE
    return [sys.executable, "-m", "course_lib", *words, *sizes, *OPTIONS]


def _script(images, output, precision):
    script = Path(__file__).with_name("fashion_mnist_eager.py")
    return [sys.executable, script, images, output, precision, EPOCHS, BATCH_SIZE, PLACE]


def _seconds(command):
    """From the line of the first epoch to that of the last."""
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        list(map(str, command)), text=True, env=os.environ | {"PYTHONPATH": paths},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    with process:
        # Each line comes at once, and little is said besides: the other pipe does not fill.
        times = {}
        for line in process.stdout:
            words = line.split()
            if words[:1] == ["epoch"]:  # the command tells the last one twice
                times.setdefault(words[1], time.perf_counter())
        errors = process.stderr.read()
    if process.returncode != 0 or len(times) != EPOCHS:
        raise RuntimeError(f"{' '.join(map(str, command))} failed:\n{errors}")
    return list(times.values())[-1] - next(iter(times.values()))


def _write_set(folder):
    """The folder with four IDX files of random images."""
    rng = np.random.default_rng(0)
    for part, n in (("train", N_TRAIN), ("t10k", N_TEST)):
        images = rng.integers(0, 256, (n, 28, 28), np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", images[:, 0, 0] % 10)):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (folder / f"{part}-{kind}-ubyte").write_bytes(head + array.tobytes())
    return folder
