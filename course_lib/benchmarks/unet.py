"""The U-Net on a GPU: the learner's own beside NumPy on the CPU, our module beside PyTorch's.

Images of 128 × 128 with two bands, 64 channels in the first step; a step is forward, loss, backward
and Adam. Five questions, a record for each case:

- `unet.training`: our module (`models.UNet`) beside the same class on PyTorch's layers, eager, by
  torch.compile and in a CUDA graph, in float32, with TF32 allowed, and in bfloat16 by autocast,
  channels-last; images per second as Python sees them, and the peak of memory
- `unet.kernels`: which kernels such a step's time goes to (`unet_kernels`)
- `unet.tape`: the learner's own autograd on the GPU beside the same lines on NumPy (`unet_tape`)
- `unet.prefetch`: how much of the copies to the GPU is hidden behind steps
- `unet.shares`: which operations a step's time goes to

Candidates take turns. Before anything is timed, gradients are held to float64, and losses of both
kinds of array to each other. Each case is kept as it ends: one that fails is told, and the others
go on.
"""

import functools
import statistics
import sys
import time
import traceback

import torch
import torch.nn.functional as F

from course_lib import bench, models, nn, ops, optim
from course_lib.benchmarks import gpu, launches
from course_lib.benchmarks import unet_kernels as kernels_of
from course_lib.benchmarks import unet_tape as tape
from course_lib.benchmarks.case import COMPILED, EAGER, FORMATS
from course_lib.kernels import (
    activation,
    batch_norm,
    conv2d,
    conv_transpose2d,
    cross_entropy,
    max_pool2d,
    optimizers,
)

NAME = "unet.training"
N_DIMS = 4
SHAPES = ((16, 2, 128, 128), (4, 2, 128, 128))
TAPE_SHAPE = (8, 2, 128, 128)
DEPTH, CHANNELS, N_CLASSES = 4, 64, 2
BOTH = "contiguous", "channels-last"
#: precision -> (dtype of the record, end of its name, layouts, what our rate must be in eager's)
PRECISIONS = {
    "float32": ("float32", "", BOTH, 1.0),
    "tf32": ("float32", ".tf32", BOTH, 1.0),
    "bfloat16": ("bfloat16", "", BOTH[1:], 0.8),
}
MOST_MEMORY = 1.1  # times eager's peak
OURS, OURS_CAPTURED, CAPTURED = "ours", "ours, captured", "PyTorch captured"
CHECKED = 2  # images of a batch that the check takes: float64 needs memory
BATCHES = 8  # that the check takes
ALLOWED = 2  # times PyTorch's own error
LOOP = 100_000  # µs that a loop of steps may take
DEVICE = "cuda"
COMMAND = "python -m course_lib bench unet --record"


class Failed(bench.Stopped):
    """Some cases failed, as was told when they did; `records` are those of the others."""

    def __init__(self, names, records):
        super().__init__(records)
        self.args = (f"after {len(records)} records; {', '.join(names)} failed",)


def run(*, names=None, shapes=None, dtypes=None, rounds=6, progress=lambda cases: cases):
    """Check, then time, each case. Returns records.

    names           only these, such as ["unet.tape"]
    shapes, dtypes  only steps of our module and PyTorch's, in these shapes or dtypes
    """
    cases = listed(shapes, dtypes)
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    found, failed = [], []
    try:
        for name, case in progress([each for each in cases if names is None or each[0] in names]):
            cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = True, False, False
            try:
                found.append(case(rounds, COMMAND, network_hash()))
            except Exception:
                traceback.print_exc(file=sys.stderr)
                failed.append(name)
            gpu.collect()
    except KeyboardInterrupt:
        raise bench.Stopped(found) from None
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before
    if failed:
        raise Failed(failed, found)
    return found


def listed(shapes=None, dtypes=None):
    """[(record name, function(rounds, command, kernel_hash) -> record)]."""
    checked = functools.cache(check)  # once for each precision
    found = [
        (f"{NAME}{end}", functools.partial(measure, precision, shape, checked))
        for precision, (dtype, end, *_) in PRECISIONS.items()
        for shape in shapes or SHAPES
        if dtypes is None or dtype in dtypes
    ]
    if shapes is None and dtypes is None:
        found += [
            (kernels_of.NAME, functools.partial(taken_apart, precision))
            for precision in ("float32", "bfloat16")
        ]
        found += tape.cases(TAPE_SHAPE, DEPTH, CHANNELS, N_CLASSES)
    return found


def measure(precision, shape, checked, rounds, command, kernel_hash):
    """The record of training steps of one shape in one precision."""
    dtype, end, layouts, bar = PRECISIONS[precision]
    errors = checked(precision)
    gpu.allow_tf32(precision == "tf32")
    state = first_weights()
    steps, memory, left_out = {}, {}, {}

    def add(label, needed=False, **options):
        try:
            steps[label], memory[label] = _made(Training, state, precision, shape, **options)
        except Exception as error:
            if needed:
                raise
            left_out[label] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        gpu.collect()

    for layout in layouts:
        add(_label(OURS, layout), needed=True, layers=nn, layout=layout)
        add(_label(EAGER, layout), needed=True, layers=torch.nn, layout=layout)
    once = {label: _once(step) for label, step in steps.items()}
    best = {who: min(layouts, key=lambda layout: once[_label(who, layout)])
            for who in (OURS, EAGER)}  # fmt: skip
    add(OURS_CAPTURED, layers=nn, layout=best[OURS], captured=True)
    add(CAPTURED, layers=torch.nn, layout=best[EAGER], captured=True)
    add(COMPILED, layers=torch.nn, layout=best[EAGER], compiled=True)
    calls = {label: max(2, min(50, int(LOOP / _once(step)))) for label, step in steps.items()}
    functions = {label: lambda i, step=step: step() for label, step in steps.items()}
    timings = bench.loop_times(functions, calls=calls, rounds=rounds)
    ours, eager = (
        min((_label(who, layout) for layout in layouts), key=lambda at: timings[at].microseconds)
        for who in (OURS, EAGER)
    )
    rows = [_row(label, timing, memory[label], shape) for label, timing in timings.items()]
    record = bench.host_record(f"{NAME}{end}", shape, dtype, rows, kernel_hash, command)
    return record | {
        "default": ours, "precision": precision, "depth": DEPTH, "channels": CHANNELS,
        "ratio": round(timings[eager].microseconds / timings[ours].microseconds, 4),
        "memory_ratio": round(memory[ours] / max(memory[eager], 1), 4),
        "bars": {"ratio": bar, "memory_ratio": MOST_MEMORY}, "gradient_errors": errors,
        "left_out": left_out,
    }  # fmt: skip


def taken_apart(precision, rounds, command, kernel_hash):
    """The record of what kernels a step of each side launches, and how long they take."""
    dtype, _, layouts, _ = PRECISIONS[precision]
    gpu.allow_tf32(precision == "tf32")
    state = first_weights()
    steps = {
        who: Training(state, precision, SHAPES[0], layers=layers, layout=layouts[-1])
        for who, layers in ((OURS, nn), (EAGER, torch.nn))
    }
    record = kernels_of.measure(steps, SHAPES[0], dtype, command, kernel_hash)
    return record | {"precision": precision, "depth": DEPTH, "channels": CHANNELS}


def _label(who, layout):
    return who if layout == "contiguous" else f"{who}, {layout}"


def check(precision):
    """{who: how far all gradients together are from float64}; AssertionError if ours are too far.

    Ours may be `ALLOWED` times as far as PyTorch's own in the same precision and layout. Counted is
    the best of several batches: where rounding moves an activation across the kink of ReLU, the
    gradients of that batch jump, whoever rounds; a wrong kernel is wrong in all of them.
    """
    gpu.allow_tf32(precision == "tf32")
    batches = [_errors(precision, seed) for seed in range(BATCHES)]
    errors = {who: min(each[who] for each in batches) for who in (OURS, EAGER)}
    if not errors[OURS] <= ALLOWED * errors[EAGER]:
        raise AssertionError(f"our gradients are wrong, so nothing is timed: {errors}")
    return errors


def _errors(precision, seed):
    """{who: ‖gradients − true‖ ÷ ‖true‖} for the batch of this seed."""
    shape, (*_, layouts, _) = (CHECKED, *SHAPES[0][1:]), PRECISIONS[precision]
    state, found = first_weights(), {}
    for who, layers in ((OURS, nn), (EAGER, torch.nn)):
        step = Training(state, precision, shape, layers=layers, layout=layouts[-1], seed=seed)
        found[who] = step.gradients()
    step = Training(state, "float32", shape, layers=torch.nn, layout="contiguous", seed=seed)
    step.model.double()
    step.x = step.x.double()
    true = step.gradients()
    return {
        who: float(f"{((mine - true).norm() / true.norm()).item():.3e}")
        for who, mine in found.items()
    }


def first_weights():
    """What every network here starts from."""
    torch.manual_seed(0)
    return models.UNet(SHAPES[0][1], N_CLASSES, DEPTH, CHANNELS, layers=torch.nn).state_dict()


class Training:
    """A network, its optimiser and a batch, always the same one: a call makes one step."""

    def __init__(
        self, state, precision, shape, *, layers, layout, captured=False, compiled=False, seed=1
    ):
        self.is_half, self.is_captured = precision == "bfloat16", captured
        ours, form = layers is nn, FORMATS[layout]
        model = models.UNet.of_weights(state, layers=layers).to(DEVICE, memory_format=form)
        self.model = _compiled(model) if compiled else model
        self.loss = ops.cross_entropy if ours else F.cross_entropy
        on_gpu = DEVICE == "cuda"
        options = {} if ours else {"fused": on_gpu, "capturable": captured and on_gpu}
        optimizer = optim.Adam if ours else torch.optim.Adam
        self.optimizer = optimizer(model.parameters(), lr=1e-3, **options)
        torch.manual_seed(seed)
        x, target = torch.randn(shape), torch.randint(-1, N_CLASSES, (shape[0], *shape[2:]))
        self.x, self.target = x.to(DEVICE, memory_format=form), target.to(DEVICE)

    def __call__(self):
        self.optimizer.zero_grad(set_to_none=True)
        self.forward_and_on()

    def forward_and_on(self):
        self.forward().backward()
        self.optimizer.step()

    def forward(self):
        """The loss."""
        # What autocast has converted must not outlive a capture.
        with torch.autocast(
            DEVICE, torch.bfloat16, enabled=self.is_half, cache_enabled=not self.is_captured
        ):
            logits = self.model(self.x)
        if logits.dtype is torch.bfloat16:
            logits = logits.float()
        return self.loss(logits, self.target, ignore_index=-1)

    def gradients(self):
        """Of all parameters, one after another, in float64."""
        found = torch.autograd.grad(self.forward(), list(self.model.parameters()))
        return torch.cat([gradient.double().flatten() for gradient in found])


def _made(make, *arguments, **options):
    """(a function that makes a step, bytes at the peak of a step, its weights included)."""
    gpu.collect()
    before = gpu.allocated()
    step = make(*arguments, **options)
    if step.is_captured:
        return _captured(step), gpu.peak() - before
    for _ in range(3):  # kernels are compiled, and cuDNN tries its algorithms, which takes memory
        step()
    gpu.synchronize()
    gpu.reset_peak()
    step()
    gpu.synchronize()
    return step, gpu.peak() - before


def _captured(step):
    """A function that replays `step`, captured as PyTorch's manual has it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    step.optimizer.zero_grad(set_to_none=True)  # captured so, each replay writes gradients anew
    gpu.collect()
    gpu.reset_peak()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.forward_and_on()
    graph.replay()
    return lambda kept=step: graph.replay()  # what the graph reads must not be freed


def _compiled(model):
    torch.compiler.reset()  # or it gives up after a few networks, and runs them eagerly
    return torch.compile(model)


def _row(label, timing, memory, shape):
    return bench.plain_row(label, "ours" if label.startswith(OURS) else "peer", timing) | {
        "images_per_second": round(shape[0] / timing.microseconds * 1e6, 1),
        "peak_bytes": memory,
    }


def _once(step):
    """µs that a step takes, roughly: the median of three."""
    samples = []
    for _ in range(3):
        gpu.synchronize()
        start = time.perf_counter()
        step()
        gpu.synchronize()
        samples.append((time.perf_counter() - start) * 1e6)
    return max(1.0, statistics.median(samples))


@functools.cache
def network_hash():
    """Of every kernel that either network may launch."""
    modules = conv2d, conv_transpose2d, batch_norm, max_pool2d, cross_entropy, optimizers
    return launches.network_hash(modules, (activation.relu,))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    names = [f"{NAME}{end}" for _, end, *_ in PRECISIONS.values()]
    return dict.fromkeys([*names, kernels_of.NAME, *tape.NAMES], network_hash())
