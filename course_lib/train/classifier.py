"""Training a classifier of images, whichever: a task for `loop.fit`."""

import functools

import torch
from torch.nn.functional import cross_entropy

from course_lib.data import Streamed

from . import feeding, ranks, schedules
from .device import sums_dtype
from .randomness import permutation, seed_of
from .step import autocast

PRECISIONS = "float32", "bfloat16"  # that `step` knows and `Classifier` trains in


class Classifier:
    """A network, its optimiser and its images, all on the network's device. Ranks share each batch.

    images, labels  what to train on: uint8 (N, C, H, W) or (N, H, W), and int64 (N,)
    keep_on_device  the images lie on the network's device; else each batch crosses over, while the
                    network trains on the one before. Images that are `data.Streamed` do
    validation      (images, labels) to validate with after each epoch
    optimizer       optimizer(parameter groups, learning_rate) makes one; None: AdamW, with biases
                    and scales left alone by the weight decay
    loss            of logits and labels, such as `ops.cross_entropy`
    augment         changes one image at random, from torch's own generator, or None
    warm_up         share of the steps in which the learning rate rises; then it falls to 0 along a
                    cosine
    """

    def __init__(
        self, model, images, labels, validation, *, epochs, batch_size, learning_rate, seed,
        optimizer=None, weight_decay=0.05, loss=cross_entropy, label_smoothing=0.1, warm_up=0.1,
        precision="float32", augment=None, keep_on_device=True,
    ):  # fmt: skip
        self.keep_on_device = keep_on_device and not isinstance(images, Streamed)
        self._feed, self._next = None, 0  # batches that cross over, and the step of the next one
        self.model, self.device = model, next(model.parameters()).device
        self.images, self.labels = self._placed(images), labels.to(self.device)
        self.validation = self._placed(validation[0]), validation[1].to(self.device)
        self.epochs, self.seed, self.augment = epochs, seed, augment
        self.learning_rate, self.warm_up = learning_rate, warm_up
        self.loss, self.label_smoothing, self.precision = loss, label_smoothing, precision
        self.batch_size = min(batch_size, len(images))
        # What does not fill a batch waits for the next epoch, which takes another order.
        self.steps_per_epoch = len(images) // self.batch_size
        ranks.require_enough(self.batch_size)
        self.mine = ranks.rows(self.batch_size)  # this rank's places in a batch
        parameters = list(model.parameters())
        groups = [  # biases and scales are not pulled towards 0
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": weight_decay},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
        ]
        make = optimizer or (lambda groups, lr: torch.optim.AdamW(groups, lr=lr, fused=True))
        self.optimizer = make(groups, learning_rate)
        # Sums of the losses and of right answers in this epoch, this rank's part of them. They stay
        # on the device: to read them at every step would make the host wait for it.
        self.totals = torch.zeros(2, dtype=sums_dtype(self.device), device=self.device)
        self._order = None, None
        model.train()

    def train_step(self, step):
        """Train on batch number `step`, counted from the start of the run."""
        images, labels = self._inputs(step)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate(step)
        self._seed(step)
        loss, right = self._learn(images, labels, step)
        self._count(loss.detach(), right)

    def _seed(self, step):
        """Of dropout and stochastic depth, which differ from rank to rank."""
        torch.manual_seed(seed_of(self.seed, "step", step, *ranks.salt()))

    def _count(self, loss, right):
        part = loss if ranks.count() == 1 else loss / ranks.count()
        self.totals += torch.stack([part.to(self.totals.dtype), right])

    def _placed(self, images):
        stays = isinstance(images, Streamed) or not self.keep_on_device
        return images if stays else images.to(self.device)

    def _inputs(self, step):
        """(images as bytes, labels) of a step."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, permutation(len(self.images), self.seed, "order", epoch)
        rows = self._order[1][batch * self.batch_size + self.mine]
        there = rows.to(self.device)
        images = self.images[there] if self.keep_on_device else self._arrived(step)
        return self._augmented(images, rows, epoch), self.labels[there]

    def _arrived(self, step):
        """The images of a step, which come from the host; the next ones follow on their way."""
        if self._feed is None or self._next != step:
            self.close()
            rows = self._rows(step)
            if isinstance(self.images, Streamed):
                on_gpu = self.device.type == "cuda"
                batches = self.images.batches(rows, len(self.mine), pinned=on_gpu)
            else:
                batches = (self.images[each] for each in rows)
            self._feed = feeding.crossing(batches, self.device)
        self._next = step + 1
        return next(self._feed)

    def _rows(self, first):
        """Yield the numbers of each step's images, from step `first` to the end of the run."""
        epoch = None
        for step in range(first, self.epochs * self.steps_per_epoch):
            if step // self.steps_per_epoch != epoch:
                epoch = step // self.steps_per_epoch
                order = permutation(len(self.images), self.seed, "order", epoch)
            start = step % self.steps_per_epoch * self.batch_size
            yield order[start + self.mine]

    def close(self):
        """End the processes that decode images ahead; a step that follows starts others."""
        if self._feed is not None:
            self._feed.close()
            self._feed = None

    def _learn(self, images, labels, step):
        """Change the weights; (the loss, how many answers were right), on the device."""
        self.optimizer.zero_grad(set_to_none=True)
        ranks.rehearse(self.network, lambda: self._backward(images, labels))
        loss, logits = self._backward(images, labels)
        self.optimizer.step()
        return loss, (logits.detach().argmax(1) == labels).sum()

    def _backward(self, images, labels):
        with autocast(self.device, self.precision):
            logits = self.network(scale(images))
        loss = self.loss(logits.float(), labels, label_smoothing=self.label_smoothing)
        loss = ranks.weighted(loss, len(labels), self.batch_size)
        loss.backward()
        return loss, logits

    @functools.cached_property
    def network(self):
        """What is called in training: the model, which ranks have wrapped."""
        return ranks.wrapped(self.model)

    def end_epoch(self):
        """Loss and accuracy of the epoch's training batches and of the validation images."""
        loss, right = ranks.total(self.totals).tolist()
        self.totals.zero_()
        ranks.share_tensors(self.evaluated.buffers())
        logits = ranks.predicted(self._predict_validation, self.validation[0])
        labels = self.validation[1]
        return {
            "loss": loss / self.steps_per_epoch,
            "accuracy": right / (self.steps_per_epoch * self.batch_size),
            "validation_loss": cross_entropy(logits, labels).item(),
            "validation_accuracy": (logits.argmax(1) == labels).sum().item() / len(labels),
        }

    @property
    def evaluated(self):
        """The network that is evaluated."""
        return self.model

    def _predict_validation(self, images):
        return predict(self.model, images, precision=self.precision)

    def state_dict(self):
        """Everything that the next steps depend on, beside their numbers. All ranks ask for it."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "totals": ranks.total(self.totals),
        }

    def load_state_dict(self, state):
        """Go on where `state` was taken."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._load_totals(state)

    def _load_totals(self, state):
        self.totals.copy_(state["totals"] * ranks.is_first())  # which are summed over the ranks

    def _augmented(self, images, rows, epoch):
        if self.augment is None:
            return images
        batch = []
        for image, row in zip(images, rows.tolist(), strict=True):
            # The transforms draw from the CPU's generator, wherever the image is.
            torch.default_generator.manual_seed(seed_of(self.seed, "augment", epoch, row))
            batch.append(self.augment(image))
        return torch.stack(batch)

    def _learning_rate(self, step):
        total = self.epochs * self.steps_per_epoch
        rise = max(1, round(self.warm_up * total))
        return self.learning_rate * schedules.cosine(total, warm_up=rise)(step)


def scale(images):
    """Bytes (N, C, H, W) or (N, H, W) as the numbers from -1 to 1 that networks are trained on."""
    images = images.unsqueeze(1) if images.dim() == 3 else images
    return images.to(torch.float32) / 127.5 - 1 if images.dtype == torch.uint8 else images


@torch.no_grad()
def predict(model, images, *, precision="float32", batch_size=128, prepare=scale):
    """The network's float32 logits (N, classes) for `images`, in evaluation mode.

    prepare  makes of bytes what the network takes
    """
    device, training = next(model.parameters()).device, model.training
    if isinstance(images, Streamed):
        batch_size = images.fitting(batch_size)
    model.eval()
    try:
        with autocast(device, precision):
            return torch.cat(
                [model(prepare(part.to(device))).float() for part in images.split(batch_size)]
            )
    finally:
        model.train(training)


def evaluate_accuracy(model, images, labels=None, *, precision="float32", batch_size=128):
    """The share of images that the network knows rightly.

    images  uint8 (N, C, H, W) or (N, H, W), with `labels`, int64 (N,); or, without them, a data set
            of (image, label) as torchvision's: PIL images, uint8 tensors, or float tensors from 0
            to 1 as `ToTensor` makes them, which are scaled as bytes are

    Raises ValueError for no images, for another number of labels, and for images of a data set that
    are none of these or not all of one shape.
    """
    if labels is None and not isinstance(images, torch.Tensor):
        return _accuracy_on(images, model, precision, batch_size)
    n_labels = 0 if labels is None else len(labels)
    if len(images) != n_labels or len(images) == 0:
        raise ValueError(f"one label for each image, please: {len(images)} and {n_labels} came")
    found = predict(model, images, precision=precision, batch_size=batch_size).argmax(1)
    return (found == labels.to(found.device)).sum().item() / len(labels)


def _accuracy_on(dataset, model, precision, batch_size):
    n, right = len(dataset), 0
    if n == 0:
        raise ValueError("the data set has no images")
    for start in range(0, n, batch_size):
        pairs = [dataset[i] for i in range(start, min(start + batch_size, n))]
        images = [_ready(image) for image, _ in pairs]
        if len(shapes := {tuple(image.shape) for image in images}) > 1:
            raise ValueError(f"images of one shape are needed, and there are {sorted(shapes)}")
        found = predict(model, torch.stack(images), precision=precision).argmax(1).cpu()
        right += (found == torch.tensor([int(label) for _, label in pairs])).sum().item()
    return right / n


def _ready(image):
    """An image of a data set as numbers from -1 to 1, float32 (C, H, W)."""
    if not isinstance(image, torch.Tensor):
        from torchvision.transforms.v2.functional import pil_to_tensor  # which takes long to import

        try:
            image = pil_to_tensor(image)
        except TypeError as error:
            raise ValueError(f"a data set's images must be tensors or PIL's: {error}") from None
    image = image.unsqueeze(0) if image.dim() == 2 else image
    if image.dtype == torch.uint8:
        return scale(image[None])[0]
    if not image.is_floating_point() or image.min() < 0 or image.max() > 1:
        raise ValueError(
            "a data set's images must be bytes, or numbers from 0 to 1 as ToTensor makes them; not "
            f"{image.dtype} from {image.min().item():.3g} to {image.max().item():.3g}"
        )
    return image.float() * 2 - 1


def accuracy_by_class(model, part, *, precision="float32"):
    """{class name: share of its images in `part` that the network knows rightly}.

    part  has `images`, `labels` and `classes`, as `data.LeafImages`
    """
    found = predict(model, part.images, precision=precision).argmax(1).cpu()
    right = found == part.labels
    return {
        name: right[part.labels == label].double().mean().item()
        for label, name in enumerate(part.classes)
    }
