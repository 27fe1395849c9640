"""The network with two pathways on a GPU, with each switch alone, and with the fastest together.

`models.ContinuousIntegrationModel`, shallow, 32 channels, eight images of 224 × 224 with their
brightness. Beside the naive program (PyTorch's layers in float32, one kernel after the other)
stands each switch by itself, then the fastest combination of PyTorch's own and of ours:

- `two_pathways.forward`: logits without gradients
- `two_pathways.training`: forward, loss, backward, Adam

Where there are two GPUs, a pathway on each is timed too; where there are not, the record says so.
Peaks of memory are recorded, of two GPUs the first's: gradient checkpointing is judged by them.
Before anything is timed, our gradients are held to float64.
"""

import torch
import torch.nn.functional as F

from course_lib import bench, models, nn, ops, optim
from course_lib.benchmarks import gpu
from course_lib.benchmarks.tiny_imagenet import network_hash
from course_lib.runtime.host import device
from course_lib.train import GraphTrainer
from course_lib.train.capturing import capture
from course_lib.train.step import AUTOCAST, arithmetic, autocast

FORWARD, TRAINING = "two_pathways.forward", "two_pathways.training"
SHAPE = (8, 3, 224, 224)
DEPTH, CHANNELS, N_CLASSES = "shallow", 32, 1000
NAIVE = "PyTorch, naive"
FASTEST = {"precision": "bfloat16", "channels_last": True}
#: label -> the switches that are on
WAYS = {
    NAIVE: {},
    "PyTorch, TF32": {"precision": "tf32"},
    "PyTorch, bfloat16": {"precision": "bfloat16"},
    "PyTorch, channels-last": {"channels_last": True},
    "PyTorch, pathways in parallel": {"parallel": True},
    "PyTorch, checkpointing": {"checkpointing": True},
    "PyTorch, torch.compile": {"compiled": True},
    "PyTorch, captured": {"captured": True},
    "PyTorch, bfloat16, channels-last, compiled": FASTEST | {"compiled": True},
    "PyTorch, bfloat16, channels-last, captured": FASTEST | {"captured": True},
    "PyTorch, bfloat16, channels-last, captured, in parallel": (
        FASTEST | {"captured": True, "parallel": True}
    ),
    "ours": {"ours": True},
    "ours, captured": {"ours": True, "captured": True},
    "ours, TF32, captured": {"ours": True, "captured": True, "precision": "tf32"},
    "ours, bfloat16, channels-last": FASTEST | {"ours": True},
    "ours, bfloat16, channels-last, captured": FASTEST | {"ours": True, "captured": True},
    "ours, bfloat16, channels-last, captured, in parallel": (
        FASTEST | {"ours": True, "captured": True, "parallel": True}
    ),
    "PyTorch, two GPUs": {"apart": True},
    "PyTorch, TF32, two GPUs": {"apart": True, "precision": "tf32"},
    "ours, two GPUs": {"apart": True, "ours": True},
    "ours, TF32, two GPUs": {"apart": True, "ours": True, "precision": "tf32"},
}
APART = "two GPUs"  # the kind of a row
BAR = 3.0  # times the naive program's rate
ALLOWED, SMALL = 2, 1e-4  # times PyTorch's own error, and what float32 may be off in any case
LOOP = 60_000  # µs that a loop of steps may take
DEVICE, SECOND = "cuda", "cuda:1"
COMMAND = "python -m course_lib bench two_pathways --record"


def run(*, rounds=6, progress=lambda cases: cases):
    """Check, then time. Returns records."""
    before, found = torch.backends.cudnn.benchmark, []
    torch.backends.cudnn.benchmark = True
    try:
        errors = check()
        for name, make in progress([(TRAINING, Training), (FORWARD, Forward)]):
            found.append(measure(name, make, rounds, errors))
    except KeyboardInterrupt:
        raise bench.Stopped(found) from None
    finally:
        torch.backends.cudnn.benchmark = before
    return found


def measure(name, make, rounds, errors):
    """The record of one kind of step, in each way."""
    steps, memory, left_out = {}, {}, {}
    for label, switches in WAYS.items():
        if switches.get("apart") and device.count() < 2:
            left_out[label] = f"it takes two GPUs, and there is {device.count()}"
            continue
        gpu.collect()
        before = gpu.allocated()
        try:
            steps[label] = step = make(**switches)
            memory[label] = gpu.peak_of(step, captured=step.is_captured) - before
        except Exception as error:
            if label == NAIVE:
                raise
            steps.pop(label, None)
            left_out[label] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    functions = {label: lambda i, step=step: step() for label, step in steps.items()}
    timings = bench.loop_times(functions, calls=20, rounds=rounds)
    rows = [
        bench.plain_row(label, _kind(label), timing)
        | {
            "samples_per_second": round(SHAPE[0] / timing.microseconds * 1e6, 1),
            "peak_bytes": memory[label],
        }
        for label, timing in timings.items()
    ]
    on_one = [label for label in timings if _kind(label) != APART]
    fastest = min(on_one, key=lambda label: timings[label].microseconds)
    ours = min((label for label in on_one if _kind(label) == "ours"),
               key=lambda label: timings[label].microseconds)  # fmt: skip
    record = bench.host_record(name, SHAPE, "float32", rows, network_hash(), COMMAND)
    return record | {
        "default": ours, "depth": DEPTH, "channels": CHANNELS, "gradient_errors": errors,
        "fastest": fastest,
        "ratio": round(timings[NAIVE].microseconds / timings[fastest].microseconds, 4),
        "bars": {"ratio": BAR}, "left_out": left_out, "captured_peaks": gpu.CAPTURED_PEAKS,
    }  # fmt: skip


def _kind(label):
    if WAYS[label].get("apart"):
        return APART
    return "ours" if label.startswith("ours") else "peer"


class Step:
    """A network and a batch, always the same one, with the switches that are on."""

    def __init__(
        self, *, ours=False, precision="float32", channels_last=False, parallel=False,
        checkpointing=False, compiled=False, captured=False, apart=False,
    ):  # fmt: skip
        self.apart = apart
        self.ours, self.precision, self.is_captured = ours, precision, captured
        model = network(nn if ours else torch.nn, checkpointing, parallel)
        form = torch.channels_last if channels_last else torch.contiguous_format
        self.network = model.to(DEVICE, memory_format=form)
        if apart:
            self.network.spread(DEVICE, SECOND)
        self.x, self.target = batch()
        self.x = tuple(x.to(DEVICE, memory_format=form) for x in self.x)
        self.target = self.target.to(DEVICE)
        if compiled:
            torch.compiler.reset()  # or it gives up after a few networks, and runs them eagerly
            model = torch.compile(model)
        self.model = model


class Training(Step):
    """A call makes one step of training."""

    def __init__(self, **switches):
        super().__init__(**switches)
        library, options = (optim, {}) if self.ours else (torch.optim, {"capturable": True})
        parameters = self.network.parameters()
        optimizer = library.Adam(parameters, lr=1e-4, **({} if DEVICE == "cpu" else options))
        self.trainer = GraphTrainer(
            self.model, optimizer, ops.cross_entropy if self.ours else F.cross_entropy,
            precision=self.precision, capture=self.is_captured,
        )  # fmt: skip

    def __call__(self):
        self.trainer(self.x, self.target)
        if self.apart and DEVICE == "cuda":  # who waits for the first GPU waits for both
            torch.cuda.current_stream(DEVICE).wait_stream(torch.cuda.current_stream(SECOND))


class Forward(Step):
    """A call computes logits, in evaluation mode and without gradients."""

    def __init__(self, **switches):
        super().__init__(**switches)
        self.network.eval()
        self.n_calls, self.graph = 0, None

    def __call__(self):
        self.n_calls += 1
        if self.is_captured and self.n_calls == 2:  # as a `GraphTrainer` does
            graph = torch.cuda.CUDAGraph()
            with capture(graph):
                self.kept = self._logits()
            self.graph = graph
        if self.graph is None:
            self._logits()
        else:
            self.graph.replay()

    @torch.no_grad()
    def _logits(self):
        with arithmetic(self.precision), autocast(torch.device(DEVICE), self.precision):
            return self.model(*self.x)


def network(layers, checkpointing=False, parallel=False):
    """The network with its first weights, the same for both kinds of layers."""
    torch.manual_seed(0)
    return models.ContinuousIntegrationModel(
        N_CLASSES, DEPTH, CHANNELS, enable_mixed_precision=False, memory_efficient=checkpointing,
        parallel_pathways=parallel, layers=layers,
    )  # fmt: skip


def batch():
    """((colour, brightness), labels)."""
    generator = torch.Generator().manual_seed(1)
    n, _, *size = SHAPE
    x = torch.randn(SHAPE, generator=generator), torch.randn(n, 1, *size, generator=generator)
    return x, torch.randint(N_CLASSES, (n,), generator=generator)


def check():
    """{precision: {who: how far all gradients together are from float64}} of the networks.

    AssertionError where ours are off by more than `SMALL`, and `ALLOWED` times what PyTorch's are.
    """
    true = gradients(torch.nn, F.cross_entropy, "float32", torch.float64)
    errors = {}
    for precision in ("float32", "tf32", "bfloat16"):
        errors[precision] = found = {}
        for who, layers, loss in (
            ("ours", nn, ops.cross_entropy), ("PyTorch", torch.nn, F.cross_entropy)
        ):  # fmt: skip
            mine = gradients(layers, loss, precision)
            found[who] = float(f"{((mine - true).norm() / true.norm()).item():.3e}")
        if not found["ours"] <= max(ALLOWED * found["PyTorch"], SMALL):
            raise AssertionError(f"our gradients are wrong, so nothing is timed: {errors}")
    return errors


def gradients(layers, loss, precision, dtype=torch.float32):
    """Of all parameters, one after another, in float64, of a network that drops nothing."""
    model = network(layers).to(DEVICE, dtype)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    x, target = batch()
    with arithmetic(precision):
        with autocast(torch.device(DEVICE), precision):
            logits = model(*(each.to(DEVICE, dtype) for each in x))
        if precision in AUTOCAST:
            logits = logits.float()
        found = torch.autograd.grad(loss(logits, target.to(DEVICE)), list(model.parameters()))
    return torch.cat([gradient.double().flatten() for gradient in found])


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return dict.fromkeys([FORWARD, TRAINING], network_hash())
