"""What each function of `ops` is called with beside the forms of the contract: options and shapes.

A row is (operands, options). An operand is the shape of random numbers, None, or a function that
makes it. Where an operand is an image, the row is tried channels-last as well.
"""

import itertools
import math

import peers
import torch
from contract.held import Broken
from contract.operators import near
from operands import ACTIVATIONS, LAID_OUT, run, strides
from tensors import PLACE

from course_lib import ops


def indices(n, *shape, ignored=None):
    """Class indices below `n`; every third is `ignored`, if that is given."""

    def make():
        target = torch.randint(n, shape, device=PLACE)
        return target if ignored is None else target.flatten().index_fill(
            0, torch.arange(0, target.numel(), 3, device=PLACE), ignored
        ).view(shape)  # fmt: skip

    return make


def positive(*shape):
    return lambda: torch.rand(shape, device=PLACE) + 0.2


def shares(*shape):
    """Probabilities of classes, in the second axis or the only one."""
    return lambda: torch.softmax(torch.randn(shape, device=PLACE), min(1, len(shape) - 1))


def flags(*shape):
    return lambda: torch.rand(shape, device=PLACE) > 0.5


def half(*shape):
    return lambda: torch.randn(shape, device=PLACE).half().requires_grad_()


def whole(*shape):
    return lambda: torch.arange(torch.Size(shape).numel(), device=PLACE).view(shape)


def pairs(names, *choices, every=True):
    """[options] for every combination of choices, or for half: of two of them still every one."""
    found = itertools.product(*(enumerate(each) for each in choices))
    return [
        dict(zip(names, [choice for _, choice in each], strict=True)) for each in found
        if every or sum(n for n, _ in each) % 2 == 0
    ]  # fmt: skip


def _softmax():
    for shape, dim in (
        ((5,), 0), ((3, 7), 1), ((3, 7), -2), ((2, 3, 4, 5), 1), ((2, 3, 4, 5), -1),
        ((2, 3, 4, 5), 0), ((1, 4), 0), ((4, 1), -1), ((), 0), ((), -1), ((0, 4), 0),
        ((2, 0, 3), -1), ((3, 0), -1), ((0, 3), 1),
    ):  # fmt: skip
        yield [shape], dict(dim=dim)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        yield [half(3, 40)], dict(dim=-1, dtype=dtype)
    yield [whole(5)], dict(dim=0, dtype=torch.float32)


def _conv2d():
    every = (
        {}, dict(stride=2, padding=1), dict(stride=(1, 2), padding=(0, 2), dilation=(2, 1)),
        dict(padding="valid"), dict(padding="same"), dict(padding="same", dilation=(1, 2)),
        dict(stride=[2], padding=[1]),
    )  # fmt: skip
    for options, bias in zip(every, itertools.cycle(((4,), None))):
        yield [(2, 3, 5, 6), (4, 3, 2, 3), bias], options
    for groups, K in ((1, 4), (2, 6), (4, 8)):
        yield [(2, 4, 5, 5), (K, 4 // groups, 3, 3), (K,)], dict(groups=groups, padding=1)
    for shape in ((3, 5, 4), (0, 3, 5, 4)):
        yield [shape, (2, 3, 3, 3), (2,)], {}


def _conv_transpose2d():
    every = (
        {}, dict(stride=2, padding=1, output_padding=1),
        dict(stride=(1, 2), padding=(0, 2), output_padding=(1, 0), dilation=(2, 1)),
        dict(stride=[2], padding=[1]),
    )  # fmt: skip
    for options, bias in zip(every, itertools.cycle(((4,), None))):
        yield [(2, 3, 4, 5), (3, 4, 2, 3), bias], options
    for groups, K in ((1, 4), (2, 6), (4, 4)):
        yield [(2, 4, 3, 3), (4, K // groups, 3, 3), (K,)], dict(groups=groups, padding=1)
    for shape in ((3, 4, 3), (0, 3, 4, 3)):
        yield [shape, (3, 2, 3, 3), (2,)], {}


def _linear():
    for shape in ((3, 4), (4,), (2, 3, 4), (0, 4), (2, 0, 4), (3, 0)):
        for bias, relu in itertools.product(((5,), None), (False, True)):
            if shape != (3, 0) or not relu:
                yield [shape, (5, shape[-1]), bias], dict(relu=relu) if relu else {}


def _max_pool2d():
    for options in (
        dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1),
        dict(kernel_size=(2, 3), stride=(1, 2), padding=(0, 1), dilation=(2, 1), ceil_mode=True),
        dict(kernel_size=[2], stride=[]),
    ):  # fmt: skip
        for more in ({}, dict(return_indices=True), dict(relu=True)):
            yield [(2, 3, 7, 8)], options | more
    yield [(3, 6, 8)], dict(kernel_size=2, return_indices=True)


def _batch_norm():
    numbers = dict(momentum=0.3, eps=1e-3)
    for shape in ((4, 3, 5, 6), (2, 8, 3, 3), (6, 5), (3, 4, 7)):
        C = (shape[1],)
        moved = [C, positive(*C)]
        for training in (True, False):
            yield [shape, *moved, C, C], dict(training=training, **numbers)
            yield [shape, *moved, None, None], dict(training=training)
            yield [shape, *moved, C, C], dict(training=training, relu=True)
        yield [shape, None, None, C, C], dict(training=True)


def _layer_norm():
    for weight, bias in itertools.product(((4, 6), None), repeat=2):
        yield [(3, 5, 4, 6)], dict(normalized_shape=(4, 6), weight=weight, bias=bias, eps=1e-3)


def _bn_relu_softmax():
    for rows, C in ((6, 5), (1, 33), (7, 1), (40, 8), (0, 6)):
        yield [(rows, C), (C,), positive(C), (C,), (C,)], dict(eps=1e-3)


def _cross_entropy():
    names = "reduction", "label_smoothing", "weight"
    more = (2, 5, 3, 4), (2, 3, 0), (0, 3)
    for shape in ((5,), (4, 7), (2, 5, 3), (2, 3, 2, 4), (3, 1), *more):
        C, pixels = shape[min(1, len(shape) - 1)], (shape[:1] + shape[2:])[: len(shape) - 1]
        weights, smoothings = (None, positive(C)), (0.0, 0.2, 1) if shape == (4, 7) else (0.0, 0.2)
        if shape in more:
            weights, smoothings = weights[1:], smoothings[1:]
        for target in (indices(C, *pixels), shares(*shape)):
            every = shape == (4, 7) or shape in more
            choices = ("mean", "sum", "none"), smoothings, weights
            for options in pairs(names, *choices, every=every):
                yield [shape, target], options
    for ignored, reduction in itertools.product((-100, 2, -1), ("mean", "sum", "none")):
        options = dict(ignore_index=ignored, reduction=reduction)
        yield [(5, 4), indices(4, 5, ignored=ignored)], options | dict(weight=positive(4))
        if (ignored, reduction) in ((-100, "none"), (2, "sum"), (-1, "mean")):
            yield [(2, 5, 3, 4), indices(5, 2, 3, 4, ignored=ignored)], options
    yield [(8, 12), lambda: indices(12, 8)().to(torch.uint8)], {}


def _dice_loss():
    both = dict(dice_weight=0.4, cross_entropy_weight=0.6)
    for options in ({}, dict(smooth=0.5), both, both | dict(weight=positive(5))):
        target = indices(5, 2, 3, 4, ignored=-1)
        yield [(2, 5, 3, 4), target], options | dict(ignore_index=-1)


def _attention():
    q, k, v = (2, 2, 3, 4), (2, 1, 5, 4), (2, 1, 5, 6)
    for options in ({}, dict(scale=0.3), dict(causal=True), dict(causal=True, lower_right=True)):
        yield [q, k, v], options


def _scaled_dot_product_attention():
    q, k, v = (2, 2, 3, 4), (2, 2, 5, 4), (2, 2, 5, 6)
    for mask in ((3, 5), (2, 1, 1, 5), (2, 3, 1), lambda: torch.rand(3, 5, device=PLACE) > 0.6):
        yield [q, k, v, mask], {}
    yield [q, k, v], dict(is_causal=True, scale=2)
    shared = dict(enable_gqa=True)
    yield [(1, 4, 3, 4), (2, 2, 5, 4), (2, 1, 5, 6)], shared
    yield [(4, 3, 4), (2, 5, 4), (2, 5, 4)], shared
    for lead in ((), (3,), (2, 1, 2)):
        yield [(*lead, 3, 4), (*lead, 5, 4), (5, 6)], {}
    yield [(2, 3, 4), (2, 2, 5, 4), (1, 1, 5, 6), (2, 3, 5)], {}
    yield [(2, 2, 2, 3, 4), k, v, (2, 1, 2, 3, 5)], {}
    for empty in ([q, (2, 2, 0, 4), (2, 2, 0, 6)], [(0, 2, 3, 4), *[(0, 2, 5, 4)] * 2],
                  [(2, 2, 0, 4), k, v], [(2, 0, 3, 4), *[(2, 0, 5, 4)] * 2]):  # fmt: skip
        yield empty, {}


def _squeeze_excite():
    named = [("silu", "sigmoid"), ("relu", "hard_sigmoid"), ("silu", "hard_sigmoid")]
    for (*images, C, H, W), R in (((2, 10, 5, 3), 4), ((1, 1, 1, 1), 1), ((2, 40, 3, 3), 9)):
        for activation, gate in named:
            weights = (R, C), (R,), (C, R), (C,)
            yield [(*images, C, H, W), *weights], dict(activation=activation, gate=gate)
    tail = (1, 1)
    yield [(2, 6, 4, 4), (3, 6, *tail), (3,), (6, 3, *tail), (6,)], {}
    yield [(6, 4, 5), (3, 6), (3,), (6, 3), (6,)], {}
    for shape in ((0, 4, 3, 3), (2, 4, 0, 3)):
        yield [shape, (2, 4), (2,), (4, 2), (4,)], {}


def _interpolate():
    for mode, corners in (("nearest", None), ("bilinear", None), ("bilinear", True)):
        for shape, options in (
            ((2, 3, 4, 5), dict(size=(8, 10))), ((1, 8, 3, 5), dict(size=(7, 3))),
            ((2, 4, 5, 3), dict(scale_factor=2.5)), ((1, 2, 6, 6), dict(scale_factor=(0.7, 2))),
            ((1, 8, 1, 1), dict(size=3)), ((1, 2, 7, 9), dict(size=1)),
            ((1, 2, 5, 5), dict(scale_factor=1.5, recompute_scale_factor=True)),
            ((0, 2, 3, 3), dict(scale_factor=2)),
        ):  # fmt: skip
            yield [shape], dict(mode=mode, align_corners=corners, **options)


def _softmax_dropout():
    for shape, dim in (((4, 40), -1), ((6, 5, 4), 1), ((30,), 0), ((), -1), ((0, 4), -1),
                       ((4, 0), -1)):  # fmt: skip
        for p in (0.0, 0.3, 1.0):
            yield [shape], dict(p=p, dim=dim)
    yield [(3, 9)], dict(p=0.5, training=False, dim=0)


def _scaled_softmax():
    x, empty = (2, 3, 4, 5), [[(0, 2, 3, 4), None], [(2, 2, 3, 0), None], [(2, 3, 0, 4), flags(1)]]
    masks = [x, None], [x, (2, 1, 1, 5)], [x, flags(4, 5)], [x[1:], (5,)], [x[2:], flags(4, 1)]
    for operands in (*masks, [(2, 3, 6, 70), flags(2, 3, 6, 1)], *empty):
        for causal in (False, True):
            yield operands, dict(scale=0.5, causal=causal)


def _activation():
    return [([shape], {}) for shape in ((6, 7), (2, 3, 4), (0, 3), ())]


#: {function: rows}
OPTIONS = {
    "softmax": _softmax,
    "log_softmax": _softmax,
    **{
        name.removeprefix("_"): rows for name, rows in list(globals().items())
        if name.startswith("_") and name[1:] in ops.__all__ and name != "_softmax"
    },
    **dict.fromkeys(ACTIVATIONS, _activation),
    "global_avg_pool": lambda: [
        ([shape], {}) for shape in
        ((2, 8, 5, 7), (1, 3, 1, 1), (0, 3, 4, 4), (2, 0, 4, 4), (3, 4, 5), (2, 3, 0, 4))
    ],
    "leaky_relu": lambda: [*_activation(), ([(6, 7)], dict(negative_slope=0.1))],
    "gelu": lambda: [*_activation(), ([(6, 7)], dict(approximate="tanh"))],
}  # fmt: skip
#: Rounded less than others by far: {function: how many times four roundings an element may be off}.
SCALES = {
    "softmax": 8, "log_softmax": 8, "max_pool2d": 2, "cross_entropy": 8, "global_avg_pool": 4,
    "softmax_dropout": 16, "scaled_softmax": 16, "dice_loss": 4, "bn_relu_softmax": 32,
}  # fmt: skip

#: Where errors are held to the norm of each result as well.
NORMS = {"linear": 1e-5, "squeeze_excite": 1e-5}


def made(operand):
    """The tensor that an operand of a row stands for."""
    if callable(operand):
        return operand()
    if isinstance(operand, tuple) and all(type(n) is int for n in operand):
        return torch.randn(operand, device=PLACE) * 2 + 0.5
    return operand


def faults(name):
    """Every difference from PyTorch's in the rows of this function, as a sentence."""
    for operands, options in OPTIONS.get(name, list)():
        torch.manual_seed(5)
        given = [made(each) for each in operands]
        chosen = {k: made(v) if k in ("weight", "bias") else v for k, v in options.items()}
        last = [
            x.contiguous(memory_format=torch.channels_last) if x is not None and x.dim() == 4 else x
            for x in given
        ]
        images = any(x is not None and x.dim() == 4 for x in given)
        for tensors in (given, last) if images else (given,):
            fault = _difference(name, tensors, chosen)
            if fault:
                shapes = [x if x is None else tuple(x.shape) for x in given]
                yield f"{name} of {shapes}, {options}: {fault}"


def _difference(name, tensors, options):
    there = [n for n, x in enumerate(tensors) if x is not None]
    moments = (1, 2)  # statistics; of cross_entropy the target, of scaled_softmax the mask
    constant = dict(batch_norm=moments, bn_relu_softmax=moments).get(name, ())
    constant = (1,) if name in ("cross_entropy", "scaled_softmax") else constant

    def call(library, *leaves):
        every = dict(zip(there, leaves, strict=True))
        inputs = [every.get(n) for n in range(len(tensors))]
        for n in constant:
            inputs[n] = None if inputs[n] is None else inputs[n].detach().clone()
        named = {k: v.clone() if torch.is_tensor(v) else v for k, v in options.items()}
        y = getattr(library, name)(*inputs, **named)
        return (y, *inputs[1:3]) if name == "batch_norm" and inputs[1] is not None else y

    given = [tensors[n] for n in there]
    (names, ours), (_, theirs) = (run(call, library, given) for library in (ops, peers))
    if name == "max_pool2d" and not torch.equal(ours[0].nan_to_num(), theirs[0].nan_to_num()):
        return "another maximum"
    try:
        near("options", ours, theirs, scale=SCALES.get(name, 64), norm=NORMS.get(name, math.inf))
    except Broken as error:
        return str(error)
    if not ours[0].numel() or name.startswith(LAID_OUT) and not given[0].is_contiguous():
        return None
    if strides(ours[0]) != strides(theirs[0]):
        return f"y has strides {ours[0].stride()}, PyTorch's {theirs[0].stride()}"
    if "gradient 0" in names and given[0].dim() == 4 and name != "cross_entropy":
        dx, peer = (found[names.index("gradient 0")] for found in (ours, theirs))
        if strides(dx) not in (strides(given[0]), strides(peer)):
            return f"dx has strides {dx.stride()}, x {given[0].stride()}"
    return None
