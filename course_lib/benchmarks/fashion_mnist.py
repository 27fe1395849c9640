"""Images per second of the Fashion-MNIST network: ours, and PyTorch at its best.

Training steps and inference, in batches from 1 to 1024, in float32 and with TF32 allowed. Ours:
plain modules through autograd; the same, captured by the trainer of any network
(`train.GraphTrainer`, which copies the batch to where it reads); and captured graphs of our kernels
alone (`train.FashionMNISTPass`, which also picks the batch and normalises it;
`train.GraphInference`). PyTorch's: the same network and recipe, eager and captured in a CUDA graph,
with cuDNN's best algorithms, a fused optimiser, gradients set to None, and in both memory formats.
Times are what Python sees of a loop of calls, whichever takes longer, the host or the GPU;
candidates take turns. Memory is what a candidate's first step or call has allocated at its peak,
its weights included and the images not. With batches of 32, `train fashion-mnist` itself is timed
too (`fashion_mnist_command`).

Before anything is timed, one step of each must end with the same parameters, and inference with the
same logits.
"""

import functools
import time

import torch
import torch.nn.functional as F

from course_lib import bench, models, nn, ops, optim
from course_lib.benchmarks import fashion_mnist_command as whole_command
from course_lib.benchmarks import fashion_mnist_parts as parts
from course_lib.benchmarks import gpu
from course_lib.kernels import (
    activation,
    batches,
    conv2d,
    cross_entropy,
    gemm,
    linear,
    max_pool2d,
    optimizers,
)
from course_lib.train import FashionMNISTPass, GraphInference, GraphTrainer

BATCHES = (1, 8, 32, 64, 256, 1024)
PRECISIONS = {"float32": "", "tf32": ".tf32"}  # end of the record's name
TRAINING, INFERENCE = "fashion_mnist.training", "fashion_mnist.inference"
MODULES, CAPTURED = "ours, modules", "ours, captured"
ANY = "ours, any network captured"  # by `train.GraphTrainer`, from the modules
EAGER, CAPTURED_EAGER = "PyTorch eager", "PyTorch captured"
LAST = ", channels-last"
RECIPE = dict(momentum=0.9, nesterov=True)
WEIGHT_DECAY, LEARNING_RATE = 5e-4, 0.01
N_IMAGES = 4096  # of the made-up set that lies on the GPU; what they show has no bearing on time
WIDTHS = (64, 128, 256)
DEVICE = "cuda"
COMMAND = "python -m course_lib bench fashion_mnist --record"
ROUNDS_OF_THE_COMMAND = 5  # each takes the seconds that PyTorch needs to be imported
LOOP = 20_000  # µs that a loop of calls may take
#: Errors allowed before anything is timed, float64 being true: of logits, ‖found − true‖ ÷ ‖true‖,
#: and of what one step changes in a parameter. TF32 decides some close races between the four
#: elements of a pooling window otherwise, and their gradient then goes elsewhere.
OF_LOGITS = {"float32": 1e-4, "tf32": 1e-2}
OF_A_STEP = {"float32": 2e-3, "tf32": 0.2}
ROUNDING = 2e-7  # of a parameter, which holds the change


def run(*, batches=BATCHES, precisions=tuple(PRECISIONS), rounds=10, progress=lambda cases: cases):
    """Check, then time, each batch size and precision. Returns records."""
    cases = [(precision, batch) for precision in precisions for batch in batches]
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    cudnn.benchmark = True
    try:
        return bench.collected(_records(cases, batches, precisions, rounds, progress))
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def _records(cases, batches, precisions, rounds, progress):
    for case in progress(cases):
        yield from _measure(*case, rounds)
    if whole_command.BATCH_SIZE in batches:
        rounds = min(rounds, ROUNDS_OF_THE_COMMAND)
        for precision in precisions:
            yield whole_command.measure(precision, rounds, network_hash(), COMMAND)


def _measure(precision, batch, rounds):
    gpu.allow_tf32(precision == "tf32")
    for name, steps in ((TRAINING, training), (INFERENCE, inference)):
        candidates, memory = steps(precision, batch)
        functions = {label: lambda i, each=each: each() for label, each in candidates.items()}
        calls = {
            label: max(5, min(200, int(LOOP / _once(each)))) for label, each in functions.items()
        }
        timings = bench.loop_times(functions, calls=calls, rounds=rounds)
        rows = [_row(label, timing, batch, memory[label]) for label, timing in timings.items()]
        name += PRECISIONS[precision]
        shape = batch, 1, 28, 28
        record = bench.host_record(name, shape, "float32", rows, kernel_hashes()[name], COMMAND)
        yield record | {"default": CAPTURED, "precision": precision}
        del candidates, functions
        gpu.collect()
    if batch in parts.BATCHES:
        yield parts.measure(precision, batch, WIDTHS, rounds, kernel_hashes(), COMMAND)
        gpu.collect()


def _row(label, timing, batch, memory):
    return {
        "label": label,
        "kind": "ours" if label.startswith("ours") else "peer",
        "microseconds": round(timing.microseconds, 3),
        "quartiles": [round(quartile, 3) for quartile in timing.quartiles],
        "images_per_second": round(batch / timing.microseconds * 1e6, 1),
        "peak_bytes": memory,
    }


# ------------------------------------------------------------------------------ training


def training(precision, batch):
    """({label: function that makes a step}, {label: bytes at a step's peak}), checked."""
    torch.manual_seed(0)
    images = torch.randint(0, 256, (max(N_IMAGES, batch), 28, 28), dtype=torch.uint8)
    labels = torch.randint(0, 10, (len(images),))
    images, labels = images.to(DEVICE), labels.to(DEVICE)
    state = {name: value.clone() for name, value in _network(nn).state_dict().items()}
    expected, x, y = None, None, None
    candidates, memory = {}, {}

    def add(label, make):
        make = functools.partial(make, precision=precision, state=state)
        candidates[label], step, memory[label] = _made(make, images, labels, x, y, batch)
        return step

    trainer = add(CAPTURED, _ours_captured)
    x, y = trainer.x.clone(), trainer.y.clone()
    rate = trainer.rate.item()
    expected = _one_step(x, y, state, rate)
    _same(CAPTURED, _parameters(trainer.model), expected, precision)
    for last in (False, True):
        add(
            ANY + LAST * last,
            functools.partial(_any_captured, rate=rate, expected=expected, last=last),
        )
    for label, layers, captured, last in (
        (MODULES, nn, False, False),
        (EAGER, torch.nn, False, False),
        (EAGER + LAST, torch.nn, False, True),
        (CAPTURED_EAGER, torch.nn, True, False),
        (CAPTURED_EAGER + LAST, torch.nn, True, True),
    ):
        make = functools.partial(
            _autograd, layers=layers, captured=captured, last=last, rate=rate, label=label,
            expected=expected,
        )  # fmt: skip
        add(label, make)
    return candidates, memory


def _made(make, images, labels, x, y, batch):
    """(a step, what `make` made beside it, bytes at the peak of a step)."""
    gpu.collect()
    before = gpu.allocated()
    step, made = make(images, labels, x, y, batch)
    step()
    gpu.synchronize()
    return step, made, gpu.peak() - before


def _ours_captured(images, labels, _x, _y, batch, *, precision, state):
    model = _network(nn, state)
    trainer = FashionMNISTPass(
        model, images, labels, (images[:1], labels[:1]), epochs=1, batch_size=batch,
        learning_rate=LEARNING_RATE, seed=0, weight_decay=WEIGHT_DECAY, precision=precision,
        warm_up=0.0, **RECIPE,
    )  # fmt: skip
    gpu.reset_peak()
    return lambda: trainer.train_step(0), trainer


def _any_captured(_images, _labels, x, y, _batch, *, precision, state, rate, expected, last):
    form = torch.channels_last if last else torch.contiguous_format
    model, x = _network(nn, state).to(memory_format=form), x.to(memory_format=form)
    trainer = GraphTrainer(
        model, _optimizer(model, True, rate), ops.cross_entropy, precision=precision
    )
    trainer(x, y)
    _same(ANY + LAST * last, _parameters(model), expected, precision)
    gpu.collect()
    gpu.reset_peak()
    trainer(x, y)  # is captured
    return lambda: trainer(x, y), None


def _autograd(_images, _labels, x, y, _batch, *, precision, state, layers, captured, last, rate,
              label, expected):  # fmt: skip
    form = torch.channels_last if last else torch.contiguous_format
    model = _network(layers, state).to(memory_format=form)
    x, ours = x.contiguous(memory_format=form), layers is nn
    optimizer = _optimizer(model, ours, rate)
    loss_of = ops.cross_entropy if ours else F.cross_entropy

    def step():
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(x), y).backward()
        optimizer.step()

    if captured:
        step = _captured_step(step, model, optimizer, state, label, expected, precision)
    else:
        step()
        _same(label, _parameters(model), expected, precision)
        for _ in range(3):  # cuDNN tries its algorithms, which takes memory
            step()
        gpu.synchronize()
        gpu.reset_peak()
    return step, None


def _captured_step(step, model, optimizer, state, label, expected, precision):
    """A function that replays `step`, captured as PyTorch's manual has it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # makes the optimiser's states
        _same(label, _parameters(model), expected, precision)
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    optimizer.zero_grad(set_to_none=True)
    gpu.collect()
    gpu.reset_peak()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def replay(kept=step):  # what the graph reads and writes must not be freed
        graph.replay()

    return replay


def _optimizer(model, ours, rate):
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    if ours:
        return optim.SGD(groups, lr=rate, **RECIPE)
    return torch.optim.SGD(groups, lr=rate, fused=True, **RECIPE)


def _network(layers, state=None):
    model = models.FashionMNISTCNN(layers=layers, widths=WIDTHS).to(DEVICE)
    if state is not None:
        model.load_state_dict(state)
    return model


def _parameters(model):
    return [p.detach() for p in model.parameters()]


def _one_step(x, y, state, rate):
    """[(parameter after one step on x and y by PyTorch in float64, before it)]."""
    model = _network(torch.nn, state).double()
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = _optimizer(model, False, rate)
    F.cross_entropy(model(x.double()), y).backward()
    optimizer.step()
    return list(zip(_parameters(model), before, strict=True))


def _same(label, found, expected, precision):
    for p, (q, before) in zip(found, expected, strict=True):
        error, change = (p.double() - q).norm().item(), (q - before).norm().item()
        if not error <= OF_A_STEP[precision] * change + ROUNDING * q.norm().item():
            raise AssertionError(
                f"{label} is wrong, so nothing is timed: one step changes a parameter of shape "
                f"{tuple(p.shape)} by {change:.2e}, and it is off by {error:.2e}"
            )


# ----------------------------------------------------------------------------- inference


def inference(precision, batch):
    """({label: function that gives logits}, {label: bytes at its peak}), checked."""
    torch.manual_seed(0)
    x = torch.randn(batch, 1, 28, 28, device=DEVICE)
    state = {name: value.clone() for name, value in _network(nn).state_dict().items()}
    with torch.no_grad():
        expected = _network(torch.nn, state).double()(x.double())
    found = {
        MODULES: (nn, False, False),
        CAPTURED: (nn, True, False),
        EAGER: (torch.nn, False, False),
        EAGER + LAST: (torch.nn, False, True),
        CAPTURED_EAGER: (torch.nn, True, False),
        CAPTURED_EAGER + LAST: (torch.nn, True, True),
    }
    candidates, memory = {}, {}
    for label, (layers, captured, last) in found.items():
        gpu.collect()
        before = gpu.allocated()
        infer = _inference(x, state, layers, captured, last, precision)
        logits = infer()
        gpu.synchronize()
        memory[label] = max(gpu.peak() - before, 0)
        error = ((logits.double() - expected).norm() / expected.norm()).item()
        if not error <= OF_LOGITS[precision]:
            raise AssertionError(
                f"{label} is wrong, so nothing is timed: its logits are off by {error:.2e}"
            )
        candidates[label] = infer
    return candidates, memory


def _inference(x, state, layers, captured, last, precision):
    """A function that gives the logits of x."""
    form = torch.channels_last if last else torch.contiguous_format
    model, x = _network(layers, state).to(memory_format=form).eval(), x.clone()
    x = x.contiguous(memory_format=form)
    if captured and layers is nn:
        infer = GraphInference(model, precision=precision)
        gpu.reset_peak()
        infer(x)  # what is captured has memory of its own
        return lambda: infer(x)

    @torch.inference_mode()
    def eager():
        return model(x)

    if captured:
        return _captured_eager(model, x)
    for _ in range(3):  # cuDNN tries its algorithms, which takes memory
        eager()
    gpu.reset_peak()
    return eager


def _captured_eager(model, x):
    """The model in a CUDA graph: a copy to where it reads, and a replay, as ours does."""
    gpu.synchronize()
    images = x.clone()
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                model(images)
        torch.cuda.current_stream().wait_stream(stream)
        gpu.collect()
        gpu.reset_peak()
        with torch.cuda.graph(graph):
            logits = model(images)

    def infer(kept=model):  # what the graph reads must not be freed
        images.copy_(x)
        graph.replay()
        return logits

    return infer


# ------------------------------------------------------------------------- what all share


def _once(function):
    """µs that one call takes, roughly."""
    gpu.synchronize()
    start = time.perf_counter()
    function(0)
    gpu.synchronize()
    return max(1.0, (time.perf_counter() - start) * 1e6)


#: How labels begin of activations that other networks have, and of steps with a GradScaler.
ELSEWHERE = (
    "relu6.", "leaky_relu.", "gelu.", "gelu_tanh.", "hard_sigmoid.", "hard_swish.",
    optimizers.STOPPABLE,
)  # fmt: skip


@functools.cache
def network_hash():
    """Of every kernel that the network may launch."""
    modules = activation, batches, conv2d, cross_entropy, linear, max_pool2d, optimizers
    found = {
        id(kernel): kernel
        for module in modules
        for label, kernel, _ in module.specialisations()
        if not (label.startswith(ELSEWHERE) or " strided" in label)
    }
    return bench.kernel_hash((*found.values(), gemm.plan.best.__wrapped__))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    names = TRAINING, INFERENCE, parts.NAME, whole_command.NAME
    return {f"{name}{end}": network_hash() for name in names for end in PRECISIONS.values()}
