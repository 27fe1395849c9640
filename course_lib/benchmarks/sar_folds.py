"""Water in real radar images, whole chips left out: the learner's own U-Net beside PyTorch's.

Sen1Floods11's tiles of 11 chips are parted into four folds. For each of three seeds each fold is
left out once: one network is trained on the tape, with our kernels, and its twin by PyTorch's own
layers, autograd and optimiser, from the same first weights, in the same order, with the same turns
and mirrors. The water that the last epoch's networks find in the tiles they never saw is pooled
over all folds: its intersection over union stands beside a threshold's, and beside what others
published. Tiles of one chip are neighbours, so that none may be on both sides.

    python -m course_lib bench sar_folds --data FOLDER --record
    python -m course_lib.benchmarks.sar_folds --data FOLDER --device cpu --keep runs.json

The second takes a CPU, too, and with `--keep` goes on where it was stopped: each network that was
trained to its end is kept.
"""

import argparse
import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from course_lib import autograd as ag
from course_lib import bench, data, models
from course_lib.backend import BackendError, is_cuda_available, set_backend
from course_lib.benchmarks.unet import network_hash
from course_lib.train.segmentation import Segmentation

NAME = "unet.folds"
COMMAND = "python -m course_lib bench sar_folds --data FOLDER --record"
#: The chips that are left out together. Each fold has water and land.
FOLDS = (
    ("Ghana_53713", "India_900498", "Mekong_333434"),
    ("Ghana_97059", "Nigeria_812045", "USA_905409"),
    ("Pakistan_849790", "Somalia_699062", "Spain_6860600"),
    ("Spain_7370579", "Sri-Lanka_534068"),
)
#: IoU of water from Sentinel-1 alone on Sen1Floods11's test chips, of which these 11 are no part.
PUBLISHED = {
    "threshold": 0.35, "DeepLabV3+": 0.59, "U-Net, hand labels": 0.64, "U-Net, weak labels": 0.67,
}  # fmt: skip
SOURCE = "Bonafilia and others (2020), Katiyar and others (2021) and those who followed them"
CLOSE = 0.02  # how far the mean may be from PyTorch's
SEEDS = (0, 1, 2)
IMAGE_SIZE, DEPTH, CHANNELS = 128, 3, 32
EPOCHS, BATCH_SIZE, LEARNING_RATE = 40, 16, 1e-3
OURS, PEER = "ours, on the tape", "PyTorch"
LAND, WATER = 0, 1
LIBRARIES = {"gpu": "torch", "cpu": "numpy"}  # of `backend`


def run(
    *, data_folder, seeds=SEEDS, epochs=EPOCHS, device=None, keep=None, progress=lambda cases: cases
):
    """Train both networks from each seed, each fold left out once. Returns one record.

    data_folder  the folder with the tiles of the 11 chips; None: drawn scenes, to try this
    device       "gpu" or "cpu"; None: a GPU if there is one
    keep         a file that keeps what each trained network found, and where it is looked up

    Raises DataError for a folder without these tiles, and for a file of other runs. Stopped by
    Ctrl-C, it raises `bench.Stopped` with a record of the seeds so far.
    """
    device = device or ("gpu" if is_cuda_available() else "cpu")
    set_backend(library=LIBRARIES[device])
    scenes, folds = _scenes(data_folder)
    study = Study(scenes, folds, epochs, device)
    study.kept = Kept(keep, study.settings())
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False  # as our kernels: float32 throughout
    rows, threshold = [], _threshold(scenes, folds)

    def record():
        found = _record(rows, study)
        return found | {"threshold": threshold, "drawn": data_folder is None}

    try:
        for seed in progress(seeds):
            rows += study.rows_of(seed)
    except KeyboardInterrupt:
        if not rows:
            raise
        raise bench.Stopped([record()]) from None
    finally:
        torch.backends.cudnn.allow_tf32 = before
    return [record()]


def _scenes(folder):
    if folder is None:
        scenes = data.sar.load(n_scenes=8, image_size=IMAGE_SIZE)
        return scenes, data.sar.folds(scenes, 2)
    scenes = data.sar.load(folder, image_size=IMAGE_SIZE)
    if (found := set(scenes.scenes)) != (chips := {name for fold in FOLDS for name in fold}):
        raise data.DataError(
            f"{folder} has other chips than the folds: {', '.join(sorted(found ^ chips))}. "
            "Expected the tiles of sen1floods11's tiles128.npz."
        )
    return scenes, FOLDS


class Kept:
    """What trained networks found, by name of the run, in a JSON file or in memory alone."""

    def __init__(self, path, settings):
        self.path, self.held = path and Path(path), {"settings": settings, "runs": {}}
        if self.path is None or not self.path.exists():
            return
        try:
            held = json.loads(self.path.read_text())
            of_others = {k for k in settings if held["settings"].get(k) != settings[k]}
            held["runs"].items()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise data.DataError(
                f"{self.path} is no file of kept runs ({error!r}): name another, or delete it."
            ) from None
        if of_others:
            raise data.DataError(
                f"{self.path} keeps other runs: of another {', another '.join(sorted(of_others))}. "
                "Name another file, or delete it."
            )
        self.held = held

    def get(self, name):
        return self.held["runs"].get(name)

    def add(self, name, found):
        self.held["runs"][name] = found
        if self.path is not None:
            temporary = self.path.with_name(self.path.name + ".tmp")
            temporary.write_text(json.dumps(self.held))
            os.replace(temporary, self.path)


@dataclasses.dataclass
class Study:
    """What is trained on what, and what has been found so far."""

    scenes: data.sar.SarScenes
    folds: tuple
    epochs: int
    device: str  # "gpu" or "cpu"
    kept: Kept = None
    is_warm: bool = False

    def settings(self):
        """All that a run's result depends on but its seed, fold and way; in plain values."""
        return {
            "images": self.scenes.digest(), "folds": [list(names) for names in self.folds],
            "epochs": self.epochs, "device": self.device, "depth": DEPTH, "channels": CHANNELS,
            "batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE, "kernels": network_hash(),
        }  # fmt: skip

    def rows_of(self, seed):
        """The rows of one seed: ours, and PyTorch's."""
        found = {OURS: [], PEER: []}
        for fold in range(len(self.folds)):
            for label, way in ((OURS, on_the_tape), (PEER, by_pytorch)):
                name = f"seed {seed}, fold {fold}, {label}"
                if self.kept.get(name) is None:
                    self.kept.add(name, self._trained(way, seed, fold))
                found[label].append(self.kept.get(name))
        return [_row(label, seed, results) for label, results in found.items()]

    def _trained(self, way, seed, fold):
        if not self.is_warm:
            self._warm_up()
        task, held = self.task(seed, fold)
        start = time.perf_counter()
        prediction, losses = way(task, held.images, self.device)
        seconds = time.perf_counter() - start
        return {"water": _water(prediction, held.labels), "losses": losses, "seconds": seconds}

    def _warm_up(self):
        """An epoch of one batch by each way: kernels are compiled there, and no row is slower."""
        for way in (on_the_tape, by_pytorch):
            task, held = self.task(0, 0, epochs=1, n_images=BATCH_SIZE)
            way(task, held.images, self.device)
        self.is_warm = True

    def task(self, seed, fold, epochs=None, n_images=None):
        """(a network with its first weights, its images and their order; the tiles held out)."""
        train, held = data.sar.leave_out(self.scenes, self.folds[fold])
        images, labels = train.images[:n_images], train.labels[:n_images]
        set_backend(library=LIBRARIES[self.device])
        random = np.random.default_rng([seed, fold])
        return Segmentation(
            ag.UNet(images.shape[1], len(train.classes), DEPTH, CHANNELS, random=random), images,
            labels, (held.images, held.labels), epochs=epochs or self.epochs,
            batch_size=BATCH_SIZE, learning_rate=LEARNING_RATE, seed=seed,
            augment=data.sar.augmented,
        ), held  # fmt: skip


def on_the_tape(task, images, device):
    """(classes that are found in `images`, the mean loss of each epoch), by our kernels."""
    losses = []
    for step in range(task.epochs * task.steps_per_epoch):
        task.train_step(step)
        if (step + 1) % task.steps_per_epoch == 0:
            losses.append(float(task.total) / task.steps_per_epoch)
            task.total = 0.0
    return task.predict(images), losses


def by_pytorch(task, images, device):
    """As `on_the_tape`, by PyTorch's layers, autograd and optimiser."""
    device = {"gpu": "cuda", "cpu": "cpu"}[device]
    model = models.UNet.of_weights(task.model.state_dict(), layers=torch.nn).to(device)
    optimizer = torch.optim.Adam(model.parameters(), fused=device == "cuda")
    weight = torch.from_numpy(ag.calculate_class_weights(task.labels, model.num_classes)).to(device)
    losses, total = [], 0.0
    for step, batch in enumerate(task.batches()):
        x, target = (torch.from_numpy(array).to(device) for array in batch)
        optimizer.param_groups[0]["lr"] = task.rate(step)
        optimizer.zero_grad()
        loss = combined_loss(model(x), target, weight)
        loss.backward()
        optimizer.step()
        total = total + loss.detach()
        if (step + 1) % task.steps_per_epoch == 0:
            losses.append(float(total) / task.steps_per_epoch)
            total = 0.0
    model.eval()
    with torch.no_grad():
        found = [
            model(torch.from_numpy(images[i : i + BATCH_SIZE]).to(device)).argmax(1).cpu().numpy()
            for i in range(0, len(images), BATCH_SIZE)
        ]
    return np.concatenate(found), losses


def combined_loss(logits, target, weight):
    """`autograd.combined_loss` in PyTorch's operators, for its autograd."""
    known = target != ag.losses.NO_DATA
    total = (weight[target.clamp(min=0)] * known).sum().clamp(min=torch.finfo(weight.dtype).tiny)
    cross_entropy = F.cross_entropy(
        logits, target, weight, ignore_index=ag.losses.NO_DATA, reduction="sum"
    ) / total  # fmt: skip
    p = logits.softmax(1) * known[:, None]
    truth = F.one_hot(target.clamp(min=0), logits.shape[1]).movedim(3, 1) * known[:, None]
    both, sizes = (p * truth).sum((0, 2, 3)), (p + truth).sum((0, 2, 3))
    dice = (1 - ((2 * both + 1) / (sizes + 1)).mean()) * known.any()
    return cross_entropy / 2 + dice / 2


def _water(found, labels):
    """(pixels of water that were found, pixels of water that are, or were taken for it)."""
    known = labels != data.sar.NO_DATA
    found, true = (found == WATER) & known, labels == WATER
    return [int((found & true).sum()), int((found | true).sum())]


def _threshold(scenes, folds):
    """The pooled IoU of the threshold that was best on the other folds."""
    counts = []
    for names in folds:
        train, held = data.sar.leave_out(scenes, names)
        threshold, _ = data.sar.best_threshold(train)
        counts.append(_water(np.where(held.images[:, 0] < threshold, WATER, LAND), held.labels))
    return _iou(counts)


def _iou(counts):
    """Of pairs of `_water`, pooled; None where there is no water in truth and prediction."""
    both, either = (sum(each) for each in zip(*counts, strict=True))
    return round(both / either, 4) if either else None


def _row(label, seed, results):
    counts = [each["water"] for each in results]
    return {
        "label": label,
        "kind": "ours" if label == OURS else "peer",
        "seed": seed,
        "microseconds": round(sum(each["seconds"] for each in results) * 1e6, 1),
        "iou": _iou(counts),
        "iou_by_fold": [_iou([each]) for each in counts],
        "losses_by_fold": [[round(loss, 4) for loss in each["losses"]] for each in results],
    }


def _record(rows, study):
    record = bench.host_record(
        NAME, study.scenes.images.shape, "float32", rows, kernel_hashes()[NAME], COMMAND
    )
    iou, by_fold = {}, {}
    for label in (OURS, PEER):
        own = [row for row in rows if row["label"] == label]
        iou[label] = round(float(np.mean([row["iou"] for row in own])), 4)
        parts = np.mean([row["iou_by_fold"] for row in own], axis=0)
        by_fold[label] = [round(float(part), 4) for part in parts]
    differences = [ours - peer for ours, peer in zip(*by_fold.values(), strict=True)]
    return record | {
        "default": OURS, "device": study.device, "folds": [list(names) for names in study.folds],
        "depth": DEPTH, "channels": CHANNELS, "epochs": study.epochs, "batch_size": BATCH_SIZE,
        "iou": iou, "iou_by_fold": by_fold, "difference": round(iou[OURS] - iou[PEER], 4),
        "difference_by_fold": [round(each, 4) for each in differences],
        "bars": {"difference": CLOSE}, "published": PUBLISHED, "source": SOURCE,
    }  # fmt: skip


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {NAME: network_hash()}


def main(arguments=None):
    """The second command above; exit status 2 for what cannot be used, 130 where it was stopped."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with tiles128.npz")
    parser.add_argument("--device", choices=LIBRARIES, help="(default: a GPU, if there is one)")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="JSON: what was found so far")
    parser.add_argument("--seeds", type=int, nargs="+", default=SEEDS, help="(default: 0 1 2)")
    parser.add_argument("--epochs", type=int, default=EPOCHS, help=f"(default: {EPOCHS})")
    parser.add_argument("--record", action="store_true", help="keep the result in data/results")
    options = parser.parse_args(arguments)
    if options.record and not is_cuda_available():
        parser.error("--record keeps what was measured on a GPU, and there is none here")
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a time limit is as good as Ctrl-C
    status = 0
    try:
        found = run(
            data_folder=options.data, seeds=options.seeds, epochs=options.epochs,
            device=options.device, keep=options.keep, progress=_told,
        )  # fmt: skip
    except bench.Stopped as stopped:
        found, status = stopped.records, 130
    except (data.DataError, BackendError, OSError) as error:
        print(f"sar_folds: {error}", file=sys.stderr)
        return 2
    (record,) = found
    for row in record["rows"]:
        print(f"seed {row['seed']}, {row['label']}: IoU {row['iou']:.4f}, {row['iou_by_fold']}")
    print(f"mean {record['iou']}, difference {record['difference']:+.4f}, by fold "
          f"{record['difference_by_fold']}; threshold {record['threshold']}; published, on other "
          f"chips: {record['published']}")  # fmt: skip
    if options.record:
        from course_lib.benchmarks import launches

        print(f"Recorded in {launches.save(found)}")
    return status


def _told(seeds):
    for seed in seeds:
        print(f"seed {seed} …", file=sys.stderr, flush=True)
        yield seed


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:  # before a seed was done
        sys.exit(130)
