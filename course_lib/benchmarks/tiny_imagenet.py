"""`train images --model tiny_cnn` on a GPU: steps in batches of 128, beside PyTorch's, and softmax.

- `tiny_imagenet.training`: a step of the very program, its data path included: the images lie on
  the GPU as bytes, and each batch is chosen, flipped, cropped and normalised there. Ours and
  PyTorch's layers, each captured in a CUDA graph and started kernel by kernel, in both layouts, and
  by torch.compile. What the images show has no bearing on time; they are made up
- `tiny_imagenet.softmax`: which share of the GPU's time softmax takes, by torch.profiler: our
  softmax in inference, our loss in a step of training

Before anything is timed, gradients are held to float64.
"""

import functools
import itertools
import re

import torch
import torch.nn.functional as F

from course_lib import bench, models, nn, ops
from course_lib.benchmarks import gpu, launches, unet_kernels
from course_lib.benchmarks.case import COMPILED, EAGER
from course_lib.data.decoded import DecodedImages
from course_lib.kernels import (
    activation,
    batch_norm,
    conv2d,
    cross_entropy,
    global_avg_pool,
    linear,
    max_pool2d,
    optimizers,
    softmax,
)
from course_lib.train import images as program
from course_lib.train.device import settled
from course_lib.train.image_settings import ImageSettings

NAME, SOFTMAX = "tiny_imagenet.training", "tiny_imagenet.softmax"
BATCH_SIZE, SIDE, N_CLASSES = 128, 64, 200
N_IMAGES = 100 * BATCH_SIZE
PRECISIONS = {"float32": "float32", "tf32": "float32", "bfloat16": "bfloat16"}
OURS, CAPTURED = "ours, captured", "PyTorch captured"
LAST = ", channels-last"
#: label -> settings of the program
WAYS = {
    OURS: {"kernels": "ours", "capture": True},
    "ours": {"kernels": "ours", "capture": False},
    CAPTURED: {"kernels": "torch", "capture": True},
    EAGER: {"kernels": "torch", "capture": False},
}
BAR = 1.5  # times captured PyTorch's rate
ALLOWED = 2  # times PyTorch's own error
STEPS = 3  # that the profiler looks at
SHARES = {"softmax": r"softmax", "loss": r"cross_entropy|softmax|nll"}
DEVICE = "cuda"
COMMAND = "python -m course_lib bench tiny_imagenet --record"


def run(*, rounds=6, progress=lambda cases: cases):
    """Check, then time, a step in each precision. Returns records."""
    found = []
    try:
        for precision in progress(list(PRECISIONS)):
            found.append(measure(precision, rounds))
            gpu.collect()
        found.append(softmax_shares())
    except KeyboardInterrupt:
        raise bench.Stopped(found) from None
    return found


def measure(precision, rounds):
    """The record of steps in one precision."""
    errors = check(precision)
    ways = {
        f"{label}{LAST * last}": options | {"channels_last": last}
        for label, options in WAYS.items()
        for last in (False, True)
    }
    ways[COMPILED] = WAYS[EAGER] | {"compile": True, "channels_last": precision == "bfloat16"}
    with settled(torch.device(DEVICE), precision=arithmetic_of(precision), deterministic=False):
        steps, memory = {}, {}
        for label, options in ways.items():
            steps[label], memory[label] = made(options | {"precision": precision})
        timings = bench.loop_times(steps, calls=N_IMAGES // BATCH_SIZE, rounds=rounds)
    rows = [
        bench.plain_row(label, "ours" if label.startswith("ours") else "peer", timing)
        | {
            "images_per_second": round(BATCH_SIZE / timing.microseconds * 1e6, 1),
            "peak_bytes": memory[label],
        }
        for label, timing in timings.items()
    ]
    ours, captured = (
        min((who, who + LAST), key=lambda label: timings[label].microseconds)
        for who in (OURS, CAPTURED)
    )
    end = ".tf32" if precision == "tf32" else ""
    shape, dtype = (BATCH_SIZE, 3, SIDE, SIDE), PRECISIONS[precision]
    record = bench.host_record(f"{NAME}{end}", shape, dtype, rows, network_hash(), COMMAND)
    return record | {
        "default": ours, "precision": precision, "gradient_errors": errors,
        "ratio": round(timings[captured].microseconds / timings[ours].microseconds, 4),
        "bars": {"ratio": BAR}, "captured_peaks": gpu.CAPTURED_PEAKS,
    }  # fmt: skip


def made(options):
    """(a function that makes the program's next step, bytes at the peak of a step)."""
    gpu.collect()
    before = gpu.allocated()
    task, number = task_of(options), itertools.count()

    def step(i=0):
        task.train_step(next(number))

    return step, gpu.peak_of(step, captured=options.get("capture", False)) - before


def task_of(options):
    """What `train images` trains with, on bytes at random."""
    random = torch.Generator().manual_seed(0)
    size = (N_IMAGES, 3, SIDE, SIDE)
    images = torch.randint(256, size, generator=random, dtype=torch.uint8)
    labels = torch.randint(N_CLASSES, (N_IMAGES,), generator=random)
    names, classes = (tuple(map(str, range(n))) for n in (N_IMAGES, N_CLASSES))
    training = DecodedImages(images, labels, classes, names)
    validation = DecodedImages(images[:1], labels[:1], classes, names[:1])
    settings = ImageSettings(
        model="tiny_cnn", batch_size=BATCH_SIZE, schedule="constant", epochs=1000, **options
    )
    return program.make_task(settings, (torch.device(DEVICE),), training, validation, None)


def check(precision):
    """{who: how far all gradients together are from float64}; AssertionError if ours are too far.

    Ours may be `ALLOWED` times as far as PyTorch's own in the same precision.
    """
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 3, SIDE, SIDE, generator=generator).to(DEVICE)
    target = torch.randint(N_CLASSES, (16,), generator=generator).to(DEVICE)
    true = gradients(torch.nn, F.cross_entropy, x.double(), target, "float32")
    errors = {}
    for who, layers, loss in (("ours", nn, ops.cross_entropy), (EAGER, torch.nn, F.cross_entropy)):
        found = gradients(layers, loss, x, target, precision)
        errors[who] = float(f"{((found - true).norm() / true.norm()).item():.3e}")
    if not errors["ours"] <= ALLOWED * errors[EAGER]:
        raise AssertionError(f"our gradients are wrong, so nothing is timed: {errors}")
    return errors


def gradients(layers, loss, x, target, precision):
    """Of all parameters of a network without dropout, one after another, in float64."""
    model = network(layers).to(DEVICE, x.dtype)
    half = precision == "bfloat16"
    with settled(torch.device(DEVICE), precision=arithmetic_of(precision), deterministic=False):
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            logits = model(x)
        value = loss(logits.float() if half else logits, target)
        found = torch.autograd.grad(value, list(model.parameters()))
    return torch.cat([gradient.double().flatten() for gradient in found])


def network(layers):
    """A network with its first weights, the same for both kinds of layers."""
    torch.manual_seed(0)
    return models.TinyImageNetCNN(N_CLASSES, dropout=0.0, image_size=SIDE, layers=layers)


def arithmetic_of(precision):
    """How products of float32 are rounded."""
    return "tf32" if precision == "tf32" else "float32"


def softmax_shares():
    """The record of what share of the GPU's time softmax takes, in inference and in a step."""
    model, counter = network(nn).to(DEVICE).eval(), itertools.count()
    x = torch.randn(BATCH_SIZE, 3, SIDE, SIDE).to(DEVICE)
    task = task_of(WAYS["ours"] | {"precision": "float32"})

    def infer():
        with torch.no_grad():
            model.probabilities(x)

    rows = []
    for label, call, words in (
        ("softmax in inference", infer, SHARES["softmax"]),
        ("loss in a step of training", lambda: task.train_step(next(counter)), SHARES["loss"]),
    ):
        for _ in range(STEPS):
            call()
        events = unet_kernels.device_events(call, STEPS)
        whole = sum(end - start for _, start, end in events) / STEPS
        part = sum(
            end - start for name, start, end in events if re.search(words, name, re.IGNORECASE)
        ) / STEPS  # fmt: skip
        if not 0 < part < whole:
            raise AssertionError(f"the profiler saw {part} of {whole} µs for {label}")
        rows.append({
            "label": label, "kind": "part", "microseconds": round(part, 3),
            "whole_microseconds": round(whole, 3), "share": round(part / whole, 5),
        })  # fmt: skip
    shape = BATCH_SIZE, 3, SIDE, SIDE
    return bench.host_record(SOFTMAX, shape, "float32", rows, network_hash(), COMMAND)


@functools.cache
def network_hash():
    """Of every kernel that a network for images may launch."""
    modules = (
        conv2d, batch_norm, max_pool2d, global_avg_pool, linear, cross_entropy, softmax, optimizers
    )  # fmt: skip
    return launches.network_hash(modules, (activation.relu,))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return dict.fromkeys([NAME, f"{NAME}.tf32", SOFTMAX], network_hash())
