"""Training a classifier of photographs: a `Classifier` whose batches are made on the device."""

import time

import torch
from torch.nn.functional import cross_entropy

from . import augmenting, ranks, schedules
from .average import Average
from .classifier import Classifier, predict
from .graph_trainer import GraphTrainer
from .randomness import permutation

#: The learning rate's way: made from the steps in all, and those in which it rises.
SCHEDULES = {
    "cosine": lambda total, rise: schedules.cosine(total, warm_up=rise),
    "one_cycle": lambda total, rise: schedules.one_cycle(
        total, **({"rise": rise / total} if rise else {})
    ),
    "constant": lambda total, rise: schedules.constant(warm_up=rise),
}


class ImageClassifier(Classifier):
    """A network, its optimiser and its images: as `Classifier`, and with what follows.

    network         what computes the model's logits: the model, or what is compiled of it
    padding         black pixels around an image from which it is cropped at random, after a flip at
                    random; None: images stay as they are
    mixup, cutmix   alpha of each one's beta distribution; 0: neither
    schedule        one of `SCHEDULES`; `warm_up` is the share of the steps in which the rate rises
    accumulate      parts that a batch is computed in, one after the other, for less memory: the
                    gradients are the whole batch's, but batch norms see a part at a time, and
                    images are mixed with others of their part
    clip            the largest norm of all gradients together; None: any
    ema             decay of an `Average` of the weights, which is then what is evaluated
    channels_last   images and weights lie channels-last in memory
    precision       one of `step.PRECISIONS`; in float16, losses are scaled
    capture         a step is one CUDA graph; a step is `GraphTrainer`'s either way
    """

    def __init__(
        self, model, training, validation, *, epochs, batch_size, learning_rate, seed,
        optimizer=None, weight_decay=0.05, loss=cross_entropy, label_smoothing=0.0, warm_up=0.0,
        precision="float32", network=None, keep_on_device=True, padding=8, mixup=0.0, cutmix=0.0,
        schedule="cosine", accumulate=1, clip=None, ema=None, channels_last=False,
        capture=False,
    ):  # fmt: skip
        place = next(model.parameters()).device
        if channels_last:
            model.to(memory_format=torch.channels_last)
        super().__init__(
            model, training.images, training.labels, (validation.images, validation.labels),
            epochs=epochs, batch_size=batch_size, learning_rate=learning_rate, seed=seed,
            optimizer=optimizer, weight_decay=weight_decay, loss=loss,
            label_smoothing=label_smoothing, warm_up=warm_up, precision=precision,
            keep_on_device=keep_on_device,
        )  # fmt: skip
        ranks.require_enough(self.batch_size, accumulate)
        self.network = model if network is None else network
        self.mine = ranks.rows(self.batch_size, accumulate)
        self.augmented, self.padding = padding is not None, padding or 0
        self.mixing = mixup, cutmix
        layout = torch.channels_last if channels_last else torch.contiguous_format
        self.prepare = augmenting.Normalise(place, memory_format=layout)
        total = epochs * self.steps_per_epoch
        self.trainer = GraphTrainer(
            augmenting.FromBytes(self.network, self.prepare, self.padding), self.optimizer,
            self._loss, precision=precision,
            schedule=SCHEDULES[schedule](total, round(warm_up * total)), max_norm=clip,
            accumulate=accumulate, measure=_right, capture=capture,
        )  # fmt: skip
        self.average = None if ema is None else Average(model, ema)
        self._since, self._seen, self.speed = None, 0, None

    def train_step(self, step):
        """Train on batch number `step`, counted from the start of the run."""
        if self._since is None:
            self._since, self._seen = time.perf_counter(), 0
        images, labels = self._inputs(step)
        self._seed(step)
        loss = self.trainer(images, labels)
        self._count(loss, self.trainer.measured)
        if self.average is not None:
            self.average.update()
        self._seen += self.batch_size

    def end_epoch(self):
        """As `Classifier`'s, and the weights of a network that integrates pathways.

        `speed` then is how many images were trained on in a second, validation aside.
        """
        self.totals.tolist()  # which waits for the device
        if self._since is not None:
            self.speed = self._seen / (time.perf_counter() - self._since)
        entry = super().end_epoch()
        if hasattr(self.model, "get_integration_weights"):
            entry["integration_weights"] = self.model.get_integration_weights()
        self._since = None
        return entry

    def state_dict(self):
        """Everything that the next steps depend on, beside their numbers."""
        state = self.trainer.state_dict() | {
            "model": self.model.state_dict(), "totals": ranks.total(self.totals)
        }  # fmt: skip
        return state if self.average is None else state | {"average": self.average.state_dict()}

    def load_state_dict(self, state):
        """Go on where `state` was taken."""
        # The names as in what the trainer calls, which may be compiled.
        before = "network." if self.network is self.model else "network._orig_mod."
        model = {f"{before}{name}": tensor for name, tensor in state["model"].items()}
        self.trainer.load_state_dict(state | {"model": model})
        self._load_totals(state)
        if self.average is not None:
            self.average.load_state_dict(state["average"])

    @property
    def evaluated(self):
        """The network that is evaluated: the average, where there is one."""
        return self.network if self.average is None else self.average.module

    def _predict_validation(self, images):
        return self.predict(images)

    def predict(self, images):
        """The float32 logits of the network that is evaluated, for uint8 (N, 3, H, W)."""
        return predict(
            self.evaluated, images, precision=self.precision, batch_size=len(self.mine),
            prepare=self.prepare,
        )  # fmt: skip

    def _inputs(self, step):
        """(bytes and what is drawn for them, labels and what is drawn for them) of a step."""
        epoch, batch = divmod(step, self.steps_per_epoch)
        if self._order[0] != epoch:
            self._order = epoch, *self._drawn(epoch)
        part = slice(batch * len(self.mine), (batch + 1) * len(self.mine))
        _, rows, draws, mixes = self._order
        images = self.images[rows[part]] if self.keep_on_device else self._arrived(step)
        inputs, targets = (images, draws[part]), (self.labels[rows[part]],)
        if mixes is not None:
            mix = mixes[batch].expand(len(self.mine), -1)
            inputs, targets = (*inputs, mix), (*targets, mix)
        return inputs, targets

    def _drawn(self, epoch):
        """All that is random in this rank's part of an epoch's batches. It crosses over at once:
        the host waits for no step."""
        order = permutation(len(self.images), self.seed, "order", epoch)
        draws = torch.zeros(len(order), 3, dtype=torch.int64)
        if self.augmented:
            draws = augmenting.drawn(len(order), self.padding, self.seed, "augment", epoch)
        if ranks.count() > 1:
            starts = torch.arange(self.steps_per_epoch)[:, None] * self.batch_size
            mine = (starts + self.mine).flatten()
            order, draws = order[mine], draws[mine]
        mixes = None
        if any(self.mixing):
            size, first = self.images.shape[2:], epoch * self.steps_per_epoch
            mixes = torch.tensor([
                augmenting.mixing(*self.mixing, size, self.seed, "mixing", step, *ranks.salt())
                for step in range(first, first + self.steps_per_epoch)
            ], device=self.device)  # fmt: skip
        return order.to(self.device), draws.to(self.device), mixes

    def _loss(self, logits, labels, mix=None):
        loss = self.loss(logits, labels, label_smoothing=self.label_smoothing)
        if mix is not None:
            share = mix[0, 0]
            other = self.loss(logits, labels.roll(1), label_smoothing=self.label_smoothing)
            loss = share * loss + (1 - share) * other
        return ranks.weighted(loss, len(self.mine), self.batch_size)


def _right(logits, labels, *others):
    return (logits.argmax(1) == labels).sum()
