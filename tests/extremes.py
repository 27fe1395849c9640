"""Operators where numbers or sizes are extreme, forward and backward: what PyTorch gives.

For each operator of `ops`, the same function of PyTorch's, or of its functions.
"""

import math

import peers
import torch
import torch.nn.functional as F

from course_lib import ops

INF, NAN = math.inf, math.nan
IGNORED = -100
NUMBERS = torch.tensor(
    [0.5, -2.0, 0.0, -0.0, 1e-40, 3.0, -3.0, INF, -INF, NAN, 1e19, -1e19, 3e38, -3e38, 1.0, 2.0]
)


def rows(*, finite=False, shape=(4, 4)):
    """Ordinary rows; unless `finite` also with extremes in places of one row and column each."""
    plain = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    if finite:
        return [plain]
    found = [plain]
    for extremes in (INF, NAN), (-INF, 0.0), (1e19, 1e-40), (-1e19, -0.0), (3e38,), (-3e38,):
        x = plain.clone()
        for i, extreme in enumerate(extremes):
            x[i, i + 1] = extreme
        found.append(x)
    return [*found, plain * 1e19, torch.full_like(plain, -INF)]


def images(**options):
    return rows(shape=(2, 4, 3, 3), **options)


def both(call, *arguments, **options):
    """(ours, PyTorch's) of `call(library, *operands)`, or of a function's name and what it takes.

    Both draw the same masks.
    """

    def of(library):
        def function(*operands):
            torch.manual_seed(3)
            if callable(call):
                return call(library, *operands)
            return getattr(library, call)(*operands, *arguments, **options)

        return function

    return of(ops), of(peers)


def empty(*shapes):
    return [torch.zeros(shape) for shape in shapes]


#: Where PyTorch's own is not to be followed: 6·3e38 overflows in it, its vectors of an erf have NaN
#: for what is as large, and its loops over vectors and over single numbers differ about NaN.
LEFT_OUT = {"hardswish": lambda x: x > 1e38, "gelu": lambda x: x.abs() > 1e38, "relu6": torch.isnan}


def unary(name):
    numbers = NUMBERS[~LEFT_OUT[name](NUMBERS)] if name in LEFT_OUT else NUMBERS
    return [
        (getattr(ops, name), getattr(F, name), [x]) for x in [numbers, *empty((0,), (0, 3))]
    ]


def along(name):
    for x in [*rows(), *empty((0, 3), (3, 0), (0, 0))]:
        for dim in (0, 1):
            yield *both(name, dim), [x]


def attention():
    q, k, _ = _heads()
    for x in rows():  # of q and k: where weights are 1 but for a rounding, gradients are noise
        yield *both("attention"), [q, k, x.reshape(1, 1, 4, 4)]
    for empty_keys in empty((1, 1, 0, 4)):
        yield *both("attention"), [q, empty_keys, empty_keys]


def scaled_dot_product_attention():
    for x in rows():
        yield *both("scaled_dot_product_attention"), [*_heads(), x]


def _heads():
    return torch.randn(3, 1, 1, 4, 4, generator=torch.Generator().manual_seed(2))


def batch_norm():
    weight, bias = torch.tensor([1.0, 0.0, -2.0, 3.0]), torch.tensor([0.0, 1.0, -INF, 3.0])
    for x in [*images(), *empty((0, 4, 3, 3), (2, 4, 0, 3), (0, 4), (2, 4, 0))]:
        # A running mean of inf is NaN by Welford's method, and sums of 3e38 are beyond float32.
        too_large = bool((x.abs() == 3e38).any())
        for training in (True, False):
            if too_large or training and x.isinf().any():
                continue
            for relu in (False, True):
                def call(f, x, weight, bias, training=training, relu=relu):
                    moved = torch.zeros(4), torch.ones(4)
                    return f.batch_norm(x, *moved, weight, bias, training, relu=relu), *moved

                yield *both(call), [x, weight, bias]
    for x in empty((2, 0, 3, 3), (0, 0), (3, 0), (0,)):  # PyTorch takes no weight of no channels
        statistics = torch.zeros(0), torch.ones(0)
        for training in (True, False):
            yield *both("batch_norm", *statistics, training=training), [x]


def bn_relu_softmax():
    mean, var = torch.tensor([0.0, 2.0, 1.0, -1.0]), torch.tensor([1.0, 0.0, 1e-40, 3e38])
    weight, bias = torch.tensor([1.0, 0.5, -2.0, 1.0]), torch.tensor([0.0, 1.0, -INF, 3.0])

    for x in [*rows(), *empty((0, 4))]:
        yield *both(lambda f, x, w, b: f.bn_relu_softmax(x, mean, var, w, b)), [x, weight, bias]


def convolution(name, weights):
    # Of inf, where kernels split numbers in two, comes NaN.
    for x in [*images(finite=True), *empty((0, 4, 3, 3))]:
        for options in ({}, dict(stride=2, padding=1)):
            yield *both(name, **options), [x, weights, torch.ones(4)]


def conv2d():
    yield from convolution("conv2d", torch.linspace(-1, 1, 64).reshape(4, 4, 2, 2))
    # Of no channels PyTorch makes none, whatever the weight says: the sum of nothing is the bias.
    given = [torch.ones(2, 0, 3, 3), torch.ones(3, 0, 2, 2), torch.arange(3.0)]
    yield ops.conv2d, lambda x, w, b: b[:, None, None].expand(2, 3, 2, 2) + 0 * x.sum(), given


def conv2d_batch_norm():
    weight, scale = torch.linspace(-1, 1, 16).reshape(4, 4, 1, 1), torch.tensor([1.0, 0, -2, 3])
    for x in [*images(finite=True), *empty((0, 4, 3, 3))]:
        yield (
            *both(lambda f, x, w, s: f.conv2d_batch_norm(x, w, s, None, None, None)),
            [x, weight, scale],
        )  # fmt: skip


def cross_entropy():
    def case(x, target, **options):
        def theirs(x, target=target):
            if target.is_floating_point():
                return F.cross_entropy(x, target, **options)
            # An ignored row's logits are not read; in PyTorch they may make gradients NaN.
            there = (target != IGNORED).unsqueeze(1)
            return F.cross_entropy(torch.where(there, x, 0), target, **options)

        return lambda x: ops.cross_entropy(x, target, **options), theirs, [x]

    labels = torch.tensor([1, 0, 3, 2]), torch.tensor([0, IGNORED, 3, 1]), torch.full((4,), IGNORED)
    soft = torch.eye(4)[[1, 0, 3, 2]]
    for x in rows():
        if x.abs().max() == 3e38:  # PyTorch's smoothed sum overflows sooner
            continue
        for target in (labels[1], soft):
            for smoothing in (0.0, 0.1):
                yield case(x, target, label_smoothing=smoothing, reduction="none")
    x = rows()[0]
    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            options = dict(reduction=reduction, label_smoothing=smoothing)
            for weight in (None, torch.tensor([0.0, 1, 2, 3]), torch.zeros(4)):
                for target in (*labels[1:], torch.zeros(4).long(), soft):
                    yield case(x, target, weight=weight, **options)
            yield case(x.reshape(1, 4, 4), labels[2][None], **options)  # as pixels
            yield case(torch.zeros(0, 4), torch.zeros(0).long(), **options)
            yield case(torch.zeros(0, 4), torch.zeros(0, 4), **options)
            yield case(torch.zeros(2, 4, 0), torch.zeros(2, 0).long(), **options)
        yield case(torch.zeros(0, 0), torch.zeros(0).long(), reduction=reduction)
        yield case(torch.zeros(0, 0, 2), torch.zeros(0, 2).long(), reduction=reduction)


def dice_loss():
    def case(x, target, **options):
        def theirs(x):
            there = (target != IGNORED).unsqueeze(1)
            x = torch.where(there, x, 0)  # as above
            t = F.one_hot(target.clamp_min(0), x.shape[1]).movedim(-1, 1) * there
            p = x.softmax(1).where(there, 0)
            axes = [0, *range(2, x.dim())]
            found = (2 * (p * t).sum(axes) + 1) / ((p + t).sum(axes) + 1)
            return 1 - found.mean()

        return lambda x: ops.dice_loss(x, target, **options), theirs, [x]

    for target in (torch.tensor([1, 0, 3, 2]), torch.tensor([0, IGNORED, 3, 1]),
                   torch.full((4,), IGNORED)):  # fmt: skip
        for x in rows():
            yield case(x, target)
    yield case(torch.zeros(0, 4), torch.zeros(0).long())
    yield case(torch.zeros(2, 4, 0), torch.zeros(2, 0).long())


def dropout():
    for x in [*rows(), *empty((0,), (3, 0))]:
        for p in (0.0, 0.5, 1.0):
            yield *both("dropout", p), [x]


def softmax_dropout():
    for x in [*rows(), *empty((0, 3), (3, 0))]:
        for p in (0.0, 0.5, 1.0):
            yield *both("softmax_dropout", p), [x]


def global_avg_pool():
    for x in [*images(), *empty((0, 4, 3, 3), (2, 0, 3, 3), (2, 4, 0, 3))]:
        yield ops.global_avg_pool, lambda x: x.mean((2, 3), keepdim=True), [x]


def interpolate():
    for x in [*images(), *empty((0, 4, 3, 3))]:
        for options in (dict(mode="nearest"), dict(mode="bilinear", align_corners=True)):
            yield *both("interpolate", (5, 2), **options), [x]


def layer_norm():
    weight, bias = torch.tensor([1.0, 0.0, -2.0, 3.0]), torch.tensor([0.0, 1.0, -INF, 3.0])
    for x in [*rows(), *empty((0, 4))]:
        for given in ([x], [x, weight, bias], [x, weight]):
            yield *both(lambda f, x, *affine: f.layer_norm(x, (4,), *affine)), given
    for x in empty((3, 0), (0, 0)):
        yield *both("layer_norm", (0,)), [x]


def linear():
    weight, bias = torch.linspace(-1, 1, 12).reshape(3, 4), torch.tensor([0.0, INF, -1.0])
    for x in [*rows(), *empty((0, 4), (2, 0, 4))]:
        yield ops.linear, F.linear, [x, weight, bias]
        yield *both("linear", relu=True), [x, weight]
    yield ops.linear, F.linear, [torch.zeros(3, 0), torch.zeros(2, 0), torch.ones(2)]
    yield ops.linear, F.linear, [torch.ones(3, 2), torch.zeros(0, 2), torch.ones(0)]


def max_pool2d():
    given = [(x, dict(kernel_size=2, stride=1)) for x in [*images(), *empty((0, 4, 3, 3))]]
    beyond = dict(kernel_size=3, stride=3, padding=1, dilation=2, ceil_mode=True)
    for x, options in [*given, (torch.ones(1, 1, 1, 1), beyond)]:
        for relu in (False, True):
            yield *both("max_pool2d", relu=relu, **options), [x]


def scaled_softmax():
    mask = torch.tensor([0.0, -INF, 1.0, 2.0])
    for x in rows():
        yield *both("scaled_softmax", scale=0.5, causal=True), [x]
        yield *both(lambda f, x: f.scaled_softmax(x, mask)), [x]
    yield *both(lambda f, x: f.scaled_softmax(x, mask > 0)), rows(finite=True)


def squeeze_excite():
    first, second = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(-1, 2, 12).reshape(4, 3)
    for x in [*images(), *empty((0, 4, 3, 3))]:
        given = [x, first, torch.zeros(3), second, torch.ones(4)]
        yield ops.squeeze_excite, peers.squeeze_excite, given


OPERATORS = {
    **{name: lambda name=name: unary(name) for name in (
        "relu", "relu6", "leaky_relu", "sigmoid", "silu", "hardsigmoid", "hardswish", "gelu")},
    "softmax": lambda: along("softmax"),
    "log_softmax": lambda: along("log_softmax"),
    "conv_transpose2d": lambda: convolution(
        "conv_transpose2d", torch.linspace(-1, 1, 64).reshape(4, 4, 2, 2)
    ),
    **{each.__name__: each for each in (
        attention, batch_norm, bn_relu_softmax, conv2d, conv2d_batch_norm, cross_entropy,
        dice_loss, dropout, softmax_dropout, global_avg_pool, interpolate, layer_norm, linear,
        max_pool2d, scaled_dot_product_attention, scaled_softmax, squeeze_excite)},
}  # fmt: skip


def passes(function, given):
    """What is returned, and the gradients of all inputs."""
    leaves = [x.detach().clone().requires_grad_() for x in given]
    found = function(*leaves)
    y, *others = found if isinstance(found, tuple) else (found,)
    dy = torch.linspace(-1, 2, y.numel()).reshape(y.shape) if y.dim() else torch.ones(())
    options = dict(allow_unused=True, materialize_grads=True)
    return [y.detach(), *others, *torch.autograd.grad(y, leaves, dy, **options)]


def faults(names=tuple(ops.__all__)):
    """Every difference, as a sentence."""
    for name in names:
        for ours, theirs, given in OPERATORS[name]():
            expected = passes(theirs, given)
            try:
                for a, b in zip(passes(ours, given), expected, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4, equal_nan=True)
            except Exception as error:
                yield f"{name} of {given}: {type(error).__name__}: {error}"
