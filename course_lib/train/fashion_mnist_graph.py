"""Fashion-MNIST trained by our kernels alone: no autograd, no arithmetic of PyTorch's.

The kernels call each other, and the set lies on the GPU, where a kernel picks each batch. A step is
captured in one CUDA graph: the host starts it for each step, and looks at the results once an
epoch. Where the gradients lie turns out as the graph is captured, and is told the optimiser then,
once for all steps. What no other layer waits for, the gradients of weights and biases, stands on a
branch of its own and runs beside the rest. PyTorch only holds the memory, and sums gradients over
ranks.
"""

import contextlib

import torch

from course_lib.kernels import batches, cross_entropy
from course_lib.kernels.optimizers import Table, sgd
from course_lib.models.fashion_mnist_pass import NAMES, backward, forward, weights_of
from course_lib.runtime.host import device

from . import ranks
from .capturing import Branch, capture
from .randomness import seed_of

BATCH_OF_PREDICTIONS = 500


class FashionMNISTPass:
    """A task for `loop.fit` that trains the weights of a `models.FashionMNISTCNN`.

    model           where the first weights come from and the trained ones go to; on a GPU, or, to
                    see it work without one, on the CPU under ``COURSE_LIB_SIMULATOR=1``. Its
                    `conv2.weight` is laid out channels-last in memory
    images, labels  what to train on: uint8 (N, 28, 28), and int64 (N,)
    validation      (images, labels) to validate with after each epoch
    learning_rate   the highest: it rises in the first tenth of the steps, then falls to 0
    precision       "float32", or "tf32" for matrix products
    """

    def __init__(
        self, model, images, labels, validation, *, epochs, batch_size, learning_rate, seed,
        momentum=0.9, nesterov=True, weight_decay=5e-4, warm_up=0.1, precision="float32",
    ):  # fmt: skip
        self.model, self.device = model, next(model.parameters()).device
        self.images, self.labels = (t.to(self.device).contiguous() for t in (images, labels))
        self.validation = tuple(t.to(self.device).contiguous() for t in validation)
        self.epochs, self.batch_size = epochs, min(batch_size, len(images))
        ranks.require_enough(self.batch_size)
        mine = ranks.rows(self.batch_size)
        self.share = ranks.share(len(mine), self.batch_size)
        self.steps_per_epoch = len(images) // self.batch_size
        total = epochs * self.steps_per_epoch
        self.schedule = dict(
            seed=seed_of(seed, "order"), highest=learning_rate,
            rise=max(1, round(warm_up * total)), total=total, batch=self.batch_size,
            first=mine[0].item(),
        )  # fmt: skip
        self.options = dict(momentum=momentum, nesterov=nesterov), weight_decay
        self.precision = precision
        self.layers = weights_of(model)
        ranks.wrapped(model, flat=True)
        self.buffers = {
            name: tuple(torch.zeros_like(p) for p in pair) for name, pair in self.layers.items()
        }
        self.tables = Table(), Table()
        self._make_room(len(mine))
        self.graph = None

    def _make_room(self, batch_size):
        def room(*shape, dtype=torch.float32):
            return torch.zeros(shape, dtype=dtype, device=self.device)

        self.x = room(batch_size, 1, 28, 28)
        self.y = room(batch_size, dtype=torch.int64)
        self.step, self.rate = room(1, dtype=torch.int64), room(1)
        self.losses = room(self.steps_per_epoch)
        self.right = room(self.steps_per_epoch, dtype=torch.int32)
        self.dloss = torch.full((), float(self.share), device=self.device)

    def train_step(self, step):
        """Train on the batch that belongs to `step`, which must be the next one."""
        if self.device.type != "cuda":
            self._step()
            return
        if self.graph is None:
            self._capture()
        self.graph.replay()

    def _capture(self):
        """Note a step's launches in a graph. Nothing runs, so that no step is made twice."""
        if not device.count():
            raise RuntimeError("a CUDA graph needs a GPU")
        # The graph's launches read the tables where they lie. What is in them can come later.
        self._fill_tables(self.layers)
        graph, beside = torch.cuda.CUDAGraph(), Branch()
        # NCCL's own thread looks at other streams meanwhile.
        options = {"capture_error_mode": "thread_local"} if ranks.are_joined() else {}
        with capture(graph, **options):
            gradients = self._gradients(beside)
            beside.join()
            _average(gradients)
            self._update(gradients, beside, filled=True)
            beside.join()
        self._fill_tables(gradients)
        self.graph, self.captured = graph, gradients  # whose memory the graph reads

    def _fill_tables(self, gradients):
        for kind, table in enumerate(self.tables):
            parameters, of_these, buffers = self._lists(gradients, kind)
            states = buffers if self.options[0]["momentum"] else parameters
            table.prepare(parameters, of_these, [states], None)

    def _step(self):
        gradients = self._gradients()
        _average(gradients)
        self._update(gradients)

    def _gradients(self, beside=contextlib.nullcontext):
        """{layer: (gradient of its weight, of its bias)} of the next batch."""
        batches.next_batch(
            self.images, self.labels, self.step, self.rate, self.x, self.y, **self.schedule
        )
        logits, kept = forward(self.layers, self.x, precision=self.precision)
        loss, stats, normaliser = cross_entropy.forward(logits, self.y)
        with beside(loss):
            batches.tally(loss, logits, self.y, self.step, self.losses, self.right)
        d = cross_entropy.backward(self.dloss, logits, self.y, stats, normaliser)
        return backward(self.layers, d, kept, precision=self.precision, beside=beside)

    def _update(self, gradients, beside=contextlib.nullcontext, filled=False):
        def update(kind, weight_decay):
            sgd(
                *self._lists(gradients, kind), lr=self.rate, weight_decay=weight_decay,
                table=self.tables[kind], again=filled, **options,
            )  # fmt: skip

        # Weights are pulled towards 0, biases are not.
        options, of_weights = self.options
        with beside(self.rate):
            update(1, 0.0)
        update(0, of_weights)

    def _lists(self, gradients, kind):
        """(parameters, gradients, momentum buffers): of the weights (kind 0), of the biases (1)."""
        return [
            [each[name][kind] for name in NAMES] for each in (self.layers, gradients, self.buffers)
        ]

    def predict(self, images):
        """float32 logits (N, 10) for uint8 images (N, 28, 28); our kernels alone, too."""
        n = len(images)
        logits = torch.empty((n, self.layers["fc2"][0].shape[0]), device=self.device)
        for first in range(0, n, BATCH_OF_PREDICTIONS):
            part = images[first : first + BATCH_OF_PREDICTIONS]
            x = torch.empty((len(part), 1, 28, 28), device=self.device)
            batches.normalise(part, x)
            found = logits[first : first + len(part)]
            forward(self.layers, x, precision=self.precision, out=found)
        return logits

    def end_epoch(self):
        """Loss and accuracy of the epoch's training batches and of the validation images."""
        logits = ranks.predicted(self.predict, self.validation[0])
        labels = self.validation[1]
        loss, *_ = cross_entropy.forward(logits, labels)
        losses, right = (t.cpu().numpy().astype("float64") for t in self._tallies())
        found = logits.cpu().numpy().argmax(1) == labels.cpu().numpy()
        return {
            "loss": losses.mean().item(),
            "accuracy": right.sum().item() / (self.steps_per_epoch * self.batch_size),
            "validation_loss": loss.item(),
            "validation_accuracy": found.mean().item(),
        }

    def _tallies(self):
        """The loss of each of the epoch's batches and its right answers, of all ranks."""
        part = self.share / ranks.count()
        losses = self.losses if part == 1 else self.losses * part
        return ranks.total(losses), ranks.total(self.right)

    def state_dict(self):
        """Everything that the next steps depend on, beside their numbers. All ranks ask for it."""
        losses, right = self._tallies()
        return {
            "model": self.model.state_dict(), "buffers": self.buffers, "step": self.step,
            "losses": losses, "right": right,
        }  # fmt: skip

    def load_state_dict(self, state):
        """Go on where `state` was taken."""
        self.model.load_state_dict(state["model"])
        for name in NAMES:
            for buffer, kept in zip(self.buffers[name], state["buffers"][name], strict=True):
                _restore(buffer, kept)
        for name in ("step", "losses", "right"):
            _restore(getattr(self, name), state[name])
        if ranks.count() > 1:  # the tallies are of all ranks, and rank 0's from here on
            part = ranks.count() / self.share if ranks.is_first() else 0
            self.losses.mul_(part)
            self.right.mul_(ranks.is_first())


def _average(gradients):
    ranks.summed([each for pair in gradients.values() for each in pair], ranks.count())


def _restore(tensor, kept):
    if kept.shape != tensor.shape or kept.dtype != tensor.dtype:  # `copy_` would spread it out
        raise ValueError(
            f"{kept.dtype} {tuple(kept.shape)} is kept, where {tensor.dtype} "
            f"{tuple(tensor.shape)} should be"
        )
    tensor.copy_(kept)
