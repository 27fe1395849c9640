"""Where a training step of the Fashion-MNIST network goes: the GPU's time for each of its launches.

Every part of `train.FashionMNISTPass`'s step is replayed by itself, on its own tensors. The sum may
be more than the step takes as a whole, where the next kernel's blocks start while the last ones of
this one end, and some run beside others; or less, since a part that is replayed by itself finds its
inputs in the L2 cache. The record has both.
"""

import time

import torch

from course_lib import bench, models
from course_lib.benchmarks import gpu
from course_lib.kernels import activation, batches, conv2d, cross_entropy, linear, max_pool2d
from course_lib.models import fashion_mnist_pass
from course_lib.train import FashionMNISTPass

BATCHES = (32, 1024)
NAME = "fashion_mnist.parts"
STEP = "the whole step"
DEVICE = "cuda"
REPLAY, MOST_CALLS = 4_000, 40  # µs of a replay, and calls in it
N_IMAGES = 4096
relu = activation.relu


def measure(precision, batch, widths, rounds, hashes, command):
    """The record of one batch size. Its rows are the parts, and the whole step as the last."""
    trainer = made(precision, batch, widths)
    candidates = parts_of(trainer)
    calls = {
        label: max(1, min(MOST_CALLS, int(REPLAY / _once(candidate))))
        for label, candidate in candidates.items()
    }
    timings = bench.device_times(candidates, calls=calls, rounds=rounds)
    # A graph already, of which a loop starts the next while the last one runs.
    timings |= bench.loop_times({STEP: trainer.train_step}, calls=MOST_CALLS, rounds=rounds)
    rows = [
        {
            "label": label,
            "kind": "ours",
            "microseconds": round(timing.microseconds, 3),
            "quartiles": [round(quartile, 3) for quartile in timing.quartiles],
        }
        for label, timing in timings.items()
    ]
    name = NAME + (".tf32" if precision == "tf32" else "")
    record = bench.host_record(name, (batch, 1, 28, 28), "float32", rows, hashes[name], command)
    return record | {"precision": precision}


def made(precision, batch, widths):
    """A trainer on made-up images, on the GPU."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (max(N_IMAGES, batch), 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(images),))
    model = models.FashionMNISTCNN(widths=widths).to(DEVICE)
    return FashionMNISTPass(
        model, images, labels, (images[:1], labels[:1]), epochs=1, batch_size=batch,
        learning_rate=0.01, seed=0, precision=precision,
    )  # fmt: skip


def parts_of(trainer):
    """{part: function(i) that runs it}, in the order of a step."""
    exact = dict(precision=trainer.precision)
    conv1, conv2, fc1, fc2 = trainer.layers.values()
    batches.next_batch(
        trainer.images, trainer.labels, trainer.step, trainer.rate, trainer.x, trainer.y,
        **trainer.schedule,
    )  # fmt: skip
    logits, kept = fashion_mnist_pass.forward(trainer.layers, trainer.x, **exact)
    x, a_shape, a_at, b, c_shape, c_at, d, e = kept
    a = torch.empty(a_shape, device=DEVICE).to(memory_format=torch.channels_last)
    conv2d.forward(x, *conv1, **exact, out=a)
    c = conv2d.forward(b, *conv2, **exact)
    flat, y, dloss = d.view(len(x), -1), trainer.y, trainer.dloss
    loss, *stats = cross_entropy.forward(logits, y)
    dlogits = cross_entropy.backward(dloss, logits, y, *stats)
    de = linear.backward(dlogits, e, fc2[0], **exact)[0]
    dd = linear.backward(de, flat, fc1[0], **exact)[0].view(d.shape)
    dd = dd.to(memory_format=torch.channels_last)
    dc = max_pool2d.backward(dd, c_at, c_shape, kernel_size=2)
    db = conv2d.backward(dc, b, conv2[0], **exact)[0]
    da = max_pool2d.backward(db, a_at, a_shape, kernel_size=2)
    gradients = fashion_mnist_pass.backward(trainer.layers, dlogits, kept, **exact)

    def batch(i):
        batches.next_batch(
            trainer.images, trainer.labels, trainer.step, trainer.rate, x, y, **trainer.schedule
        )

    def losses(i):
        found, *saved = cross_entropy.forward(logits, y)
        batches.tally(found, logits, y, trainer.step, trainer.losses, trainer.right)
        cross_entropy.backward(dloss, logits, y, *saved)

    def pool(image):
        return max_pool2d.forward(image, 2, index_dtype="uint8", relu=True)

    first = dict(needs=(False, True, True))
    return {
        "batch": batch,
        "conv1": lambda i: conv2d.forward(x, *conv1, **exact, out=a),
        "pool and ReLU 1": lambda i: pool(a),
        "conv2": lambda i: conv2d.forward(b, *conv2, **exact),
        "pool and ReLU 2": lambda i: pool(c),
        "fc1": lambda i: linear.forward(flat, *fc1, activation="relu", **exact),
        "fc2": lambda i: linear.forward(e, *fc2, **exact),
        "loss": losses,
        "fc2 backward": lambda i: linear.backward(dlogits, e, fc2[0], **exact),
        "fc1 backward": lambda i: linear.backward(relu.backward(de, e), flat, fc1[0], **exact),
        "pool and ReLU 2 backward": lambda i: max_pool2d.backward(dd, c_at, c_shape, kernel_size=2),
        "conv2 backward": lambda i: conv2d.backward(dc, b, conv2[0], **exact),
        "pool and ReLU 1 backward": lambda i: max_pool2d.backward(db, a_at, a_shape, kernel_size=2),
        "conv1 backward": lambda i: conv2d.backward(da, x, conv1[0], **first, **exact),
        "update": lambda i: trainer._update(gradients),
    }


def _once(candidate):
    """µs that one call takes, roughly."""
    gpu.synchronize()
    start = time.perf_counter()
    candidate(0)
    gpu.synchronize()
    return max(1.0, (time.perf_counter() - start) * 1e6)
