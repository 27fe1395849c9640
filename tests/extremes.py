"""Operators where numbers or sizes are extreme, forward and backward: what PyTorch gives.

For each operator of `ops`, the same function of PyTorch's, or of its functions.
"""

import math

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
            yield (
                lambda x, dim=dim: getattr(ops, name)(x, dim),
                lambda x, dim=dim: getattr(F, name)(x, dim), [x],
            )  # fmt: skip


def batch_norm():
    weight, bias = torch.tensor([1.0, 0.0, -2.0, 3.0]), torch.tensor([0.0, 1.0, -INF, 3.0])
    for x in [*images(), *empty((0, 4, 3, 3), (2, 4, 0, 3), (0, 4), (2, 4, 0))]:
        # A running mean of inf is NaN by Welford's method, and sums of 3e38 are beyond float32.
        too_large = bool((x.abs() == 3e38).any())
        for training in (True, False):
            if too_large or training and x.isinf().any():
                continue
            for relu in (False, True):
                def ours(x, weight, bias, training=training, relu=relu):
                    moved = torch.zeros(4), torch.ones(4)
                    y = ops.batch_norm(x, *moved, weight, bias, training, relu=relu)
                    return y, *moved

                def theirs(x, weight, bias, training=training, relu=relu):
                    moved = torch.zeros(4), torch.ones(4)
                    y = F.batch_norm(x, *moved, weight, bias, training)
                    return y.relu() if relu else y, *moved

                yield ours, theirs, [x, weight, bias]
    for x in empty((2, 0, 3, 3), (0, 0), (3, 0), (0,)):  # PyTorch takes no weight of no channels
        statistics = torch.zeros(0), torch.ones(0)
        for training in (True, False):
            yield (
                lambda x, s=statistics, training=training: ops.batch_norm(x, *s, training=training),
                lambda x, s=statistics, training=training: F.batch_norm(x, *s, training=training),
                [x],
            )  # fmt: skip


def bn_relu_softmax():
    mean, var = torch.tensor([0.0, 2.0, 1.0, -1.0]), torch.tensor([1.0, 0.0, 1e-40, 3e38])
    weight, bias = torch.tensor([1.0, 0.5, -2.0, 1.0]), torch.tensor([0.0, 1.0, -INF, 3.0])

    def theirs(x, weight, bias):
        return F.softmax(F.relu(F.batch_norm(x, mean, var, weight, bias)), -1)

    for x in [*rows(), *empty((0, 4))]:
        yield (
            lambda x, w, b: ops.bn_relu_softmax(x, mean, var, w, b), theirs, [x, weight, bias]
        )  # fmt: skip


def convolution(name, weights):
    # Of inf, where kernels split numbers in two, comes NaN.
    for x in [*images(finite=True), *empty((0, 4, 3, 3))]:
        for options in ({}, dict(stride=2, padding=1)):
            yield (
                lambda *given, options=options: getattr(ops, name)(*given, **options),
                lambda *given, options=options: getattr(F, name)(*given, **options),
                [x, weights, torch.ones(4)],
            )  # fmt: skip


def conv2d():
    yield from convolution("conv2d", torch.linspace(-1, 1, 64).reshape(4, 4, 2, 2))
    # Of no channels PyTorch makes none, whatever the weight says: the sum of nothing is the bias.
    given = [torch.ones(2, 0, 3, 3), torch.ones(3, 0, 2, 2), torch.arange(3.0)]
    yield ops.conv2d, lambda x, w, b: b[:, None, None].expand(2, 3, 2, 2) + 0 * x.sum(), given


def conv2d_batch_norm():
    weight = torch.linspace(-1, 1, 16).reshape(4, 4, 1, 1)

    def theirs(x, weight, scale):
        return F.batch_norm(F.conv2d(x, weight), None, None, scale, None, True)

    def ours(x, weight, scale):
        return ops.conv2d_batch_norm(x, weight, scale, None, None, None)

    for x in [*images(finite=True), *empty((0, 4, 3, 3))]:
        yield ours, theirs, [x, weight, torch.tensor([1.0, 0.0, -2.0, 3.0])]


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
            def ours(x, p=p):
                torch.manual_seed(3)
                return ops.dropout(x, p)

            def theirs(x, p=p):
                return x * ours(torch.ones_like(x), p) if p else x

            yield ours, theirs, [x]


def softmax_dropout():
    for x in [*rows(), *empty((0, 3), (3, 0))]:
        for p in (0.0, 0.5, 1.0):
            def ours(x, p=p):
                torch.manual_seed(3)
                return ops.softmax_dropout(x, p)

            def theirs(x, p=p):
                kept = ours(torch.zeros_like(x), p) * x.shape[1]
                return x.softmax(-1) * kept

            yield ours, theirs, [x]


def global_avg_pool():
    for x in [*images(), *empty((0, 4, 3, 3), (2, 0, 3, 3), (2, 4, 0, 3))]:
        yield ops.global_avg_pool, lambda x: x.mean((2, 3), keepdim=True), [x]


def interpolate():
    for x in [*images(), *empty((0, 4, 3, 3))]:
        for options in (dict(mode="nearest"), dict(mode="bilinear", align_corners=True)):
            yield (
                lambda x, options=options: ops.interpolate(x, (5, 2), **options),
                lambda x, options=options: F.interpolate(x, (5, 2), **options), [x],
            )  # fmt: skip


def layer_norm():
    weight, bias = torch.tensor([1.0, 0.0, -2.0, 3.0]), torch.tensor([0.0, 1.0, -INF, 3.0])
    for x in [*rows(), *empty((0, 4))]:
        for given in ([x], [x, weight, bias], [x, weight]):
            yield (
                lambda x, *affine: ops.layer_norm(x, (4,), *affine),
                lambda x, *affine: F.layer_norm(x, (4,), *affine), given,
            )  # fmt: skip
    for x in empty((3, 0), (0, 0)):
        yield lambda x: ops.layer_norm(x, (0,)), lambda x: F.layer_norm(x, (0,)), [x]


def linear():
    weight, bias = torch.linspace(-1, 1, 12).reshape(3, 4), torch.tensor([0.0, INF, -1.0])
    for x in [*rows(), *empty((0, 4), (2, 0, 4))]:
        yield ops.linear, F.linear, [x, weight, bias]
        yield (
            lambda *given: ops.linear(*given, relu=True),
            lambda *given: F.linear(*given).relu(), [x, weight],
        )  # fmt: skip
    yield ops.linear, F.linear, [torch.zeros(3, 0), torch.zeros(2, 0), torch.ones(2)]
    yield ops.linear, F.linear, [torch.ones(3, 2), torch.zeros(0, 2), torch.ones(0)]


def max_pool2d():
    given = [(x, dict(kernel_size=2, stride=1)) for x in [*images(), *empty((0, 4, 3, 3))]]
    beyond = dict(kernel_size=3, stride=3, padding=1, dilation=2, ceil_mode=True)
    for x, options in [*given, (torch.ones(1, 1, 1, 1), beyond)]:
        yield (
            lambda x, options=options: ops.max_pool2d(x, **options),
            lambda x, options=options: F.max_pool2d(x, **options), [x],
        )  # fmt: skip
        yield (
            lambda x, options=options: ops.max_pool2d(x, relu=True, **options),
            lambda x, options=options: F.max_pool2d(x, **options).relu(), [x],
        )  # fmt: skip


def squeeze_excite():
    first, second = torch.linspace(-1, 1, 12).reshape(3, 4), torch.linspace(-1, 2, 12).reshape(4, 3)

    def theirs(x, first, b1, second, b2):
        hidden = F.silu(F.linear(x.mean((2, 3)), first, b1))
        return x * torch.sigmoid(F.linear(hidden, second, b2))[:, :, None, None]

    for x in [*images(), *empty((0, 4, 3, 3))]:
        yield ops.squeeze_excite, theirs, [x, first, torch.zeros(3), second, torch.ones(4)]


OPERATORS = {
    **{name: lambda name=name: unary(name) for name in (
        "relu", "relu6", "leaky_relu", "sigmoid", "silu", "hardsigmoid", "hardswish", "gelu")},
    "softmax": lambda: along("softmax"),
    "log_softmax": lambda: along("log_softmax"),
    "conv_transpose2d": lambda: convolution(
        "conv_transpose2d", torch.linspace(-1, 1, 64).reshape(4, 4, 2, 2)
    ),
    **{each.__name__: each for each in (
        batch_norm, bn_relu_softmax, conv2d, conv2d_batch_norm, cross_entropy, dice_loss, dropout,
        softmax_dropout, global_avg_pool, interpolate, layer_norm, linear, max_pool2d,
        squeeze_excite)},
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
