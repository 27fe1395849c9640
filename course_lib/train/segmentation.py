"""Training the U-Net of `course_lib.autograd`, on any backend: a task for `loop.fit`."""

import math

import numpy as np
import torch

from course_lib import autograd as ag
from course_lib.backend import get_array_module, get_backend

from . import ranks, schedules
from .randomness import permutation

LOSSES = {
    "dice": lambda logits, target, weight: ag.dice_loss(logits, target),
    "cross_entropy": ag.weighted_cross_entropy,
    "combined": ag.combined_loss,
    "focal": lambda logits, target, weight: ag.focal_loss(logits, target, weight=weight),
}


class Segmentation:
    """A network on the tape, its optimiser and its images.

    images, labels  NumPy: float32 (n, C, H, W), int64 (n, H, W) with −1 for no data
    validation      (images, labels) to validate with after each epoch
    loss_function   one of `LOSSES`; classes are weighted so that each has the same say
    precision       what layers compute in: float32, float16 or bfloat16. Weights, statistics and
                    the loss stay float32; the others need a GPU or the simulator
    augment         augment(image, label, seed, index) returns both, changed at random, as seed and
                    index alone say; or None

    Batches cross over to the backend's device while the one before them is computed with. Ranks
    share each batch; its loss is that of all their logits together.
    """

    def __init__(
        self, model, images, labels, validation, *, epochs, batch_size, learning_rate, seed,
        loss_function="combined", precision="float32", augment=None,
    ):  # fmt: skip
        if not len(images) or not len(validation[0]):
            raise ValueError(
                f"training and validation need images: there are {len(images)} and "
                f"{len(validation[0])}"
            )
        self.model, self.images, self.labels, self.validation = model, images, labels, validation
        self.epochs, self.seed, self.augment = epochs, seed, augment
        self.batch_size = min(batch_size, len(images))
        self.steps_per_epoch = len(images) // self.batch_size
        ranks.require_enough(self.batch_size)
        self.learning_rate, self.loss = learning_rate, LOSSES[loss_function]
        self.optimizer = ag.Adam(model.parameters(), lr=learning_rate)
        weight = ag.calculate_class_weights(labels, model.num_classes)
        self.backend = get_backend()
        if precision != "float32" and not self.backend.kernels:
            raise ValueError(f"precision {precision} needs a GPU: NumPy computes in float32 here")
        self.dtype = self.backend.dtype(precision)
        self.scaler = ag.LossScaler(enabled=precision == "float16")
        self.weight = self.backend.to_device(weight)
        self.total = 0.0
        self._coming = None, None  # the next step, and the batches from there on
        model.train()

    def train_step(self, step):
        """Train on batch number `step`, counted from the start of the run."""
        if self._coming[0] != step:
            self._coming = step, self.backend.prefetch(self.batches(step))
        images, labels = next(self._coming[1])
        self._coming = step + 1, self._coming[1]
        self.optimizer.lr = self.rate(step)
        self.optimizer.zero_grad()
        joint = _Joint(self.batch_size)
        loss = self.loss(joint(self._logits(images)), joint.forward(labels), self.weight)
        self.scaler.scale(loss).backward()
        ranks.summed([p.grad for p in self.optimizer.parameters if p.grad is not None])
        self.scaler.step(self.optimizer)
        self.total = self.total + loss.data  # on the device: nobody waits for it

    def end_epoch(self):
        """The mean loss of the epoch's batches, and `validate`'s findings."""
        loss, self.total = float(self.total) / self.steps_per_epoch, 0.0
        return {"loss": loss} | self.validate()

    def train_epoch(self, epoch=0):
        """All steps of an epoch, counted from 0; what `end_epoch` found."""
        for step in range(epoch * self.steps_per_epoch, (epoch + 1) * self.steps_per_epoch):
            self.train_step(step)
        return self.end_epoch()

    def validate(self):
        """Loss, accuracy, mean Dice and each class's IoU over all pixels of the validation set."""
        matrix, total, n_classes = 0, 0.0, self.model.num_classes
        images, labels = self.validation
        parts = [slice(i, i + self.batch_size) for i in range(0, len(images), self.batch_size)]
        parts = parts[ranks.number() :: ranks.count()]
        self._share_statistics()
        self.model.eval()
        try:
            with ag.no_grad():
                batches = self.backend.prefetch((images[part], labels[part]) for part in parts)
                for x, target in batches:
                    logits = self._logits(x)
                    total += self.loss(logits, target, self.weight).item() * len(x)
                    found = self.backend.xp.argmax(logits.data, axis=1)
                    matrix = matrix + ag.confusion_matrix(found, target, n_classes)
        finally:
            self.model.train()
        if ranks.count() > 1:
            matrix = np.zeros((n_classes, n_classes), np.int64) + matrix  # a rank may have no part
            total, matrix = (ranks.total(torch.tensor(a)).numpy() for a in (total, matrix))
        known = max(1, int(matrix.sum()))
        iou = ag.iou_score(matrix)
        # A class that is nowhere, in truth and prediction, says nothing.
        return {
            "validation_loss": float(total) / len(images),
            "validation_accuracy": float(np.trace(matrix)) / known,
            "validation_dice": _mean(ag.dice_coefficient(matrix)),
            "validation_iou": _mean(iou),
        } | {f"iou_{c}": float(value) for c, value in enumerate(iou) if not math.isnan(value)}

    def _share_statistics(self):
        """Running statistics are rank 0's."""
        if ranks.count() > 1:
            learned = dict(self.model.named_parameters())
            mine = self.model.state_dict()
            theirs = ranks.first(lambda: {k: v for k, v in mine.items() if k not in learned})
            self.model.load_state_dict(mine | theirs)

    def predict(self, images):
        """The most probable class of each pixel, NumPy int64 (n, H, W)."""
        self.model.eval()
        try:
            with ag.no_grad():
                return np.concatenate([
                    self.backend.to_cpu(self.backend.xp.argmax(self._logits(x).data, axis=1))
                    for (x,) in self.backend.prefetch(
                        (images[i : i + self.batch_size],)
                        for i in range(0, len(images), self.batch_size)
                    )
                ])  # fmt: skip
        finally:
            self.model.train()

    def state_dict(self):
        """Everything that the next steps depend on, beside their numbers; in PyTorch's tensors."""
        optimizer = self.optimizer.state_dict()
        averages = {name: [torch.from_numpy(a) for a in optimizer[name]]
                    for name in self.optimizer.averages}  # fmt: skip
        return {
            "model": {k: torch.from_numpy(v) for k, v in self.model.state_dict().items()},
            "optimizer": {"steps": optimizer["steps"]} | averages,
            "scaler": self.scaler.state_dict(),
            "total": float(self.total),
        }

    def load_state_dict(self, state):
        """Go on where `state` was taken."""
        self.model.load_state_dict({k: v.numpy() for k, v in state["model"].items()})
        averages = {name: [a.numpy() for a in state["optimizer"][name]]
                    for name in self.optimizer.averages}  # fmt: skip
        self.optimizer.load_state_dict({"steps": state["optimizer"]["steps"]} | averages)
        self.scaler.load_state_dict(state["scaler"])
        self.total = state["total"]

    def _logits(self, images):
        """float32 logits of images, computed in the run's precision."""
        x = ag.tensor(self.backend.xp.astype(images, self.dtype, copy=False))
        return ag.cast(self.model(x), self.backend.dtype("float32"))

    def batches(self, step=0):
        """Yield (images, labels) of batch number `step`, and of all that follow, in NumPy."""
        order = None, None
        for number in range(step, self.epochs * self.steps_per_epoch):
            epoch, batch = divmod(number, self.steps_per_epoch)
            if order[0] != epoch:
                order = epoch, permutation(len(self.images), self.seed, "order", epoch).numpy()
            rows = order[1][batch * self.batch_size :][: self.batch_size]
            rows = rows[ranks.rows(len(rows)).numpy()]
            images, labels = self.images[rows], self.labels[rows]
            if self.augment is not None:
                pairs = [
                    self.augment(image, label, self.seed, epoch * len(self.images) + int(row))
                    for image, label, row in zip(images, labels, rows, strict=True)
                ]
                images, labels = (np.stack(each) for each in zip(*pairs, strict=True))
            yield images, labels

    def rate(self, step):
        """The learning rate of a step: it falls from its highest to 0 along a cosine."""
        total = max(1, self.epochs * self.steps_per_epoch)
        return self.learning_rate * schedules.cosine(total)(step)


class _Joint(ag.Function):
    """All ranks' rows of a batch of `n`, of which each passes the gradient of its own on."""

    def __init__(self, n):
        self.n, self.mine = n, slice(*ranks.rows(n)[[0, -1]].add(torch.tensor([0, 1])).tolist())

    def forward(self, mine):
        if not ranks.are_joined():
            return mine
        xp = get_array_module(mine)
        return xp.from_dlpack(ranks.gathered(torch.as_tensor(mine), self.n))

    def backward(self, dy):
        return dy[self.mine]


def _mean(values):
    return float(np.nanmean(values)) if not np.isnan(values).all() else 0.0
