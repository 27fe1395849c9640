"""What the benchmarks call of ours: every rung that a record has a row of, on tensors of its size.

The tensors are on the CPU, and nobody touches their memory, so that `launches` can list what a call
launches on any chip, in milliseconds and without a GPU.
"""

import functools
import math

import torch

from course_lib import optim
from course_lib.kernels import (
    activation,
    batch_norm,
    bn_relu_softmax,
    conv2d,
    conv_transpose2d,
    cross_entropy,
    dice,
    global_avg_pool,
    linear,
    max_pool2d,
    softmax,
    softmax_dropout,
    squeeze_excite,
)


def calls(record):
    """{label: function()} of the rows of `record` that are ours; None if no operation's record."""
    operation, *parts = record["name"].split(".")
    prepare = _PREPARE.get(operation)
    if prepare is None or not _WAYS & {*parts}:
        return None
    last = torch.channels_last if "channels-last" in parts else torch.contiguous_format

    def empty(*shape, dtype=record["dtype"]):
        layout = last if len(shape) == 4 else torch.contiguous_format
        return torch.empty(shape, dtype=getattr(torch, dtype), memory_format=layout)

    with torch.no_grad():
        call = prepare(record, parts, empty)
    labels = [row["label"] for row in record["rows"] if row["kind"] == "ours"]
    return {label: functools.partial(call, label) for label in labels}


def _in_place(operation, record, parts, empty):
    x, out = empty(*record["shape"]), empty(*record["shape"])
    if parts[0] == "forward":
        return lambda label: operation.forward(x, variant=label, out=out)
    return lambda label: operation.backward(x, x, variant=label, out=out)


def _cross_entropy(record, parts, empty):
    logits, out, dloss = empty(*record["shape"]), empty(*record["shape"]), empty()
    target = empty(record["shape"][0], dtype="int64")
    _, *saved = cross_entropy.forward(logits, target)

    def call(label):
        if parts[0] != "backward":
            cross_entropy.forward(logits, target, variant=label)
        if parts[0] != "forward":
            cross_entropy.backward(dloss, logits, target, *saved, variant=label, out=out)

    return call


def _softmax_dropout(record, parts, empty):
    from course_lib.benchmarks.fused_softmax import SEED, P

    x, out = empty(*record["shape"]), empty(*record["shape"])
    _, stats = softmax_dropout.forward(x, P, SEED, 0, out=out)

    def call(label):
        if parts[0] != "backward":
            softmax_dropout.forward(x, P, SEED, 0, variant=label, out=out)
        if parts[0] != "forward":
            softmax_dropout.backward(x, x, stats, P, SEED, 0, variant=label, out=out)

    return call


def _bn_relu_softmax(record, parts, empty):
    from course_lib.benchmarks.fused_softmax import EPS

    x, out = empty(*record["shape"]), empty(*record["shape"])
    features = [empty(record["shape"][1], dtype="float32") for _ in range(4)]

    def call(label):
        if parts[0] != "backward":
            bn_relu_softmax.forward(x, *features, eps=EPS, variant=label, out=out)
        if parts[0] != "forward":
            bn_relu_softmax.backward(x, x, x, *features, eps=EPS, variant=label, out=out)

    return call


def _segmentation_loss(record, parts, empty):
    from course_lib.benchmarks.segmentation_loss import IGNORED, WEIGHTS

    loss, direction = parts
    N, C, H, W = record["shape"]
    logits, dloss, target = empty(N, C, H, W), empty(), empty(N, H, W, dtype="int64").contiguous()
    module, options = (dice, WEIGHTS) if loss == "dice" else (cross_entropy, {})

    def call(label):
        _, *saved = module.forward(logits, target, ignore_index=IGNORED, **options)
        if direction == "both":
            module.backward(dloss, logits, target, *saved, ignore_index=IGNORED)

    return call


def _global_avg_pool(record, parts, empty):
    N, C, H, W = record["shape"]
    images, planes = empty(N, C, H, W), empty(N, C)
    if parts[0] == "forward":
        return lambda label: global_avg_pool.forward(images, variant=label, out=planes)
    last = "channels-last" in parts
    return lambda label: global_avg_pool.backward(
        planes, (H, W), channels_last=last, variant=label, out=images
    )


def _squeeze_excite(record, parts, empty):
    C, R = record["shape"][1], record["squeeze_channels"]
    x, out = empty(*record["shape"]), empty(*record["shape"])
    weights = [empty(R, C), empty(R), empty(C, R), empty(C)]

    def call(label):
        options = {"variant": label, "activation": "silu", "gate": "sigmoid", "out": out}
        _, *saved = squeeze_excite.forward(x, *weights, **options)
        if parts[0] == "both":
            squeeze_excite.backward(x, x, weights[0], weights[2], *saved, **options)

    return call


def _linear(record, parts, empty):
    M, n_in, n_out = record["shape"]
    x, weight, bias, dy = empty(M, n_in), empty(n_out, n_in), empty(n_out), empty(M, n_out)

    def call(label):
        options = dict(precision=record["precision"], variant=label)
        if parts[0] == "forward":
            linear.forward(x, weight, bias, **options)
        else:
            linear.backward(dy, x, weight, **options)

    return call


def _convolution(module, record, parts, empty):
    N, C, K, H = record["shape"]
    if module is conv2d:
        from course_lib.benchmarks.conv2d import PADDING, TAPS

        weight, dy, options = empty(K, C, TAPS, TAPS), empty(N, K, H, H), {"padding": PADDING}
    else:
        from course_lib.benchmarks.conv_transpose2d import SIDE

        weight, options = empty(C, K, SIDE, SIDE), {"stride": SIDE}
        dy = empty(N, K, SIDE * H, SIDE * H)
    x, needs = empty(N, C, H, H), (parts[0] == "dx", parts[0] == "dweight", False)

    def call(label):
        variant = module.DEFAULT if label == "ours" else label
        chosen = dict(precision=record["precision"], variant=variant, **options)
        if parts[0] == "forward":
            module.forward(x, weight, **chosen)
        else:
            module.backward(dy, x, weight, with_bias=False, needs=needs, **chosen)

    return call


def _max_pool2d(record, parts, empty):
    kernel_size, stride, padding = (3, 2, 1) if "3x3" in parts else (2, 2, 0)
    options, x = dict(stride=stride, padding=padding), empty(*record["shape"])
    y, at = max_pool2d.forward(x, kernel_size, index_dtype="uint8", **options)

    def call(label):
        if parts[0] == "forward":
            max_pool2d.forward(x, kernel_size, index_dtype="uint8", variant=label, **options)
        else:
            max_pool2d.backward(y, at, tuple(x.shape), kernel_size, variant=label, **options)

    return call


def _batch_norm(record, parts, empty):
    x = empty(*record["shape"])
    weight, bias, mean, var = (empty(x.shape[1], dtype="float32") for _ in range(4))
    functions = {
        "forward": functools.partial(batch_norm.forward, x, weight, bias, mean, var),
        "backward": functools.partial(batch_norm.backward, x, x, weight, mean, var),
        "inference": functools.partial(batch_norm.inference, x, weight, bias, mean, var),
    }
    return lambda label: functions[parts[0]](variant=label)


def _step(record, parts, empty):
    from course_lib.benchmarks.layers import OPTIMISERS, PARAMETERS

    (n_elements,) = record["shape"]
    (shapes,) = (found for found in PARAMETERS if sum(map(math.prod, found)) == n_elements)
    kind, options, _ = OPTIMISERS[record["name"].partition(".")[0]]
    parameters = [torch.nn.Parameter(empty(*shape).contiguous()) for shape in shapes]
    for p in parameters:
        p.grad = empty(*p.shape).contiguous()
    made = getattr(optim, kind)(parameters, **options)
    for p in parameters:  # or PyTorch fills them with zeros
        made.state[p] = {state: torch.empty_like(p) for state in made._names(made.param_groups[0])}
        made.state[p]["step"] = torch.zeros(())

    def step(label=None):
        for group in made.param_groups:  # also where `step` would leave CPU tensors to PyTorch
            made._step_group(group)

    step()  # makes the tables of addresses
    return step


_WAYS = {"forward", "backward", "both", "inference", "dx", "dweight", "step"}
_PREPARE = {
    **{name: functools.partial(_in_place, each) for name, each in activation.OPERATIONS.items()},
    **{name: functools.partial(_in_place, each) for name, each in softmax.OPERATIONS.items()},
    "cross_entropy": _cross_entropy,
    "softmax_dropout": _softmax_dropout,
    "bn_relu_softmax": _bn_relu_softmax,
    "segmentation_loss": _segmentation_loss,
    "global_avg_pool": _global_avg_pool,
    "squeeze_excite": _squeeze_excite,
    "linear": _linear,
    "conv2d": functools.partial(_convolution, conv2d),
    "conv_transpose2d": functools.partial(_convolution, conv_transpose2d),
    "max_pool2d": _max_pool2d,
    "batch_norm": _batch_norm,
    "sgd": _step,
    "adamw": _step,
}
