"""Problems whose shapes nobody chose: drawn for every operation, the same for the same seed.

Extents are log-uniform; some are rounded to multiples of 8, some made odd, some prime. The number
of a problem decides its dtype, its precision and its layout, so that all take turns.
"""

import functools
import math
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from course_lib import ops
from course_lib.benchmarks import segmentation_loss
from course_lib.kernels import (
    activation,
    attention,
    batch_norm,
    bn_relu_softmax,
    conv2d,
    conv_transpose2d,
    cross_entropy,
    dice,
    global_avg_pool,
    layer_norm,
    linear,
    max_pool2d,
    scaled_softmax,
    softmax,
    squeeze_excite,
    upsample,
)

MOST_ELEMENTS = 1 << 25  # of all inputs
LEAST_ELEMENTS = 0, 1 << 14, 1 << 18, 1 << 21  # of which one is drawn, or few would be large
MOST_FLOPS = 40e9
BACKWARD = {"forward": (), "backward": ("x", "weight", "bias")}
CONVOLUTION = {"forward": (), "dx": ("x",), "dweight": ("weight",)}
SLICED = "sliced"  # x is a slice, [..., 1:-1]: its rows begin on no boundary of 16 bytes


class Kind(NamedTuple):
    """What numbers a problem has, how products of them are rounded, and where they lie."""

    dtype: str
    layout: str = "contiguous"
    tf32: bool = False


class Input(NamedTuple):
    """One tensor: random numbers times `scale`, plus `shift`; or integers below `below`."""

    shape: tuple
    scale: float = 1
    shift: float = 0
    below: int = None
    dtype: str = None  # None: the problem's


class Problem(NamedTuple):
    """One call. `ours` and `theirs` take the inputs in their order; `passes` says for each pass
    which inputs' gradients it computes."""

    label: str
    inputs: dict
    ours: Callable
    theirs: Callable
    passes: dict
    flops: int = 0

    @property
    def n_elements(self):
        """How many numbers the inputs have."""
        return sum(math.prod(one.shape) for one in self.inputs.values())


class Draw:
    """Random extents and options; no extent is above `most`."""

    def __init__(self, key, most=math.inf):
        self._random, self._most = random.Random(key), most

    def one_of(self, *choices):
        """Return one of `choices`."""
        return self._random.choice(choices)

    def size(self, least, most):
        """Return an extent from `least` to `most`."""
        most = max(least, min(most, self._most))
        found = round(least * (most / least) ** self._random.random())
        kind = self.one_of("eights", "eights", "any", "odd", "prime")
        if kind == "eights":
            found = round(found / 8) * 8 or found
        elif kind == "odd":
            found |= 1
        elif kind == "prime":
            while any(found % i == 0 for i in range(2, math.isqrt(found) + 1)):
                found += 1
        return found if least <= found <= most else most

    def images(self, channels=1024):
        """Return (N, C, H, W)."""
        C = self.one_of(3, *[self.size(1, channels)] * 7)
        H = self.size(4, 224)
        return self.size(1, 64), C, H, self.one_of(H, self.size(4, 224))


def kind_of(name, number):
    """Return the `Kind` of the problem with that number."""
    kinds = OPERATIONS[name][0]
    return kinds[number % len(kinds)]


def problem(name, number, seed, most=math.inf):
    """Return the `Problem` of the operation `name` with that number."""
    draw_one, draw = OPERATIONS[name][1], Draw(f"{seed} {name} {number}", most)
    least = draw.one_of(*LEAST_ELEMENTS) if most == math.inf else 0
    while True:
        found = draw_one(draw)
        if least <= found.n_elements <= MOST_ELEMENTS and found.flops <= MOST_FLOPS:
            return found


def _label(shape, *words):
    return ", ".join(["×".join(map(str, shape)), *filter(None, words)])


# ---- rows ---------------------------------------------------------------------------------------


def _activation(name, draw, **options):
    shape = draw.one_of((draw.size(1, 65536), draw.size(1, 65536)), draw.images())
    ours = functools.partial(getattr(ops, name), **options)
    theirs = functools.partial(getattr(F, name), **options)
    return Problem(_label(shape), {"x": Input(shape, 3)}, ours, theirs, BACKWARD)


def _rows(name, draw):
    shape = draw.size(1, 65536), draw.size(2, 65536)
    ours, theirs = (functools.partial(getattr(of, name), dim=-1) for of in (ops, F))
    return Problem(_label(shape), {"x": Input(shape, 3)}, ours, theirs, BACKWARD)


def _cross_entropy(draw):
    rows, classes = draw.size(1, 65536), draw.size(2, 65536)
    inputs = {"x": Input((rows, classes), 3), "target": Input((rows,), below=classes)}
    shape = rows, classes
    return Problem(_label(shape), inputs, ops.cross_entropy, F.cross_entropy, BACKWARD)


def _layer_norm(draw):
    shape = draw.size(1, 65536), draw.size(2, 16384)
    inputs = {"x": Input(shape, 2, 1)} | {n: Input(shape[1:]) for n in ("weight", "bias")}
    ours, theirs = (
        lambda x, weight, bias, of=of: of.layer_norm(x, weight.shape, weight, bias)
        for of in (ops, F)
    )
    return Problem(_label(shape), inputs, ours, theirs, BACKWARD)


def _bn_relu_softmax(draw):
    shape = draw.size(1, 65536), draw.size(2, 8192)
    inputs = {"x": Input(shape, 2), **_of_channels(shape[1])}

    def theirs(x, *parameters):
        return F.batch_norm(x, *parameters).relu().softmax(-1)

    return Problem(_label(shape), inputs, ops.bn_relu_softmax, theirs, BACKWARD)


def _of_channels(C):
    """Statistics, weight and bias of batch norm."""
    numbers = {"mean": (0.1, 0), "var": (0, 2), "weight": (1, 0), "bias": (1, 0)}
    return {name: Input((C,), *of, dtype="float32") for name, of in numbers.items()}


def _scaled_softmax(draw):
    T = draw.size(1, 2048)
    shape = draw.size(1, 16), draw.size(1, 16), T, draw.one_of(T, draw.size(2, 2048))

    def theirs(x):
        return torch.softmax(x * 0.125, -1)

    ours = functools.partial(ops.scaled_softmax, scale=0.125)
    return Problem(_label(shape), {"x": Input(shape, 8)}, ours, theirs, BACKWARD)


def _attention(draw):
    B, H, T, D = draw.size(1, 8), draw.size(1, 8), draw.size(1, 2048), draw.size(16, 256)
    S, causal = draw.one_of(T, T, draw.size(1, 2048)), draw.one_of(False, True)
    inputs = {"q": Input((B, H, T, D))} | {n: Input((B, H, S, D)) for n in "kv"}
    label = _label((B, H, T, D), f"{S} keys" * (S != T), "causal" * causal)
    ours, theirs = (
        functools.partial(of.scaled_dot_product_attention, is_causal=causal) for of in (ops, F)
    )
    passes = {"forward": (), "backward": ("q", "k", "v")}
    return Problem(label, inputs, ours, theirs, passes, 4 * B * H * T * S * D)


def _linear(draw):
    M, n_in, n_out = draw.size(1, 16384), draw.size(4, 8192), draw.size(1, 8192)
    inputs = {
        "x": Input((M, n_in)), "weight": Input((n_out, n_in), n_in**-0.5), "bias": Input((n_out,)),
    }  # fmt: skip
    label = _label((M, n_in, n_out))
    return Problem(label, inputs, ops.linear, F.linear, BACKWARD, 2 * M * n_in * n_out)


# ---- images -------------------------------------------------------------------------------------


def _convolution(form, draw):
    """A dense one, "grouped" with several channels a group, or "depthwise"."""
    N, C, H, W = draw.images(512)
    groups, K = 1, draw.size(1, 512)
    if form == "depthwise":
        groups, K = C, C * draw.one_of(1, 1, 1, 2)
    elif form == "grouped":
        groups, each = draw.size(2, 64), draw.one_of(2, 3, 4, 8, 16, 32)
        C, K = groups * each, groups * draw.one_of(each, each, draw.size(1, 32))
    square = draw.one_of(*((3, 5, 7) if form == "depthwise" else (1, 1, 3, 3, 3, 5, 7)))
    R, S = draw.one_of(*[(square, square)] * 7, (3, 5))
    stride, dilation = draw.one_of(1, 1, 2), draw.one_of(1, 1, 1, 2)
    reaches = [(dilation * (n - 1) + 1, extent) for n, extent in ((R, H), (S, W))]
    padding = tuple(draw.one_of(n // 2, *[0] * (n <= extent)) for n, extent in reaches)
    options = dict(stride=stride, padding=padding, dilation=dilation, groups=groups)
    y = [(extent + 2 * p - n) // stride + 1
         for (n, extent), p in zip(reaches, padding, strict=True)]  # fmt: skip
    terms = C // groups * R * S
    inputs = {"x": Input((N, C, H, W)), "weight": Input((K, C // groups, R, S), terms**-0.5)}
    label = _label(
        (N, C, H, W), f"{K} filters of {R}×{S}", f"stride {stride}" * (stride > 1),
        f"dilation {dilation}" * (dilation > 1), f"padding {padding[0]}×{padding[1]}",
        f"{groups} groups" * (groups > 1),
    )  # fmt: skip
    ours, theirs = (functools.partial(of.conv2d, bias=None, **options) for of in (ops, F))
    return Problem(label, inputs, ours, theirs, CONVOLUTION, 2 * N * K * math.prod(y) * terms)


def _conv_transpose2d(draw):
    (N, C, H, W), K = draw.images(512), draw.size(1, 512)
    R, stride, padding = draw.one_of((2, 2, 0), (4, 2, 1), (3, 2, 1), (3, 1, 1))
    inputs = {"x": Input((N, C, H, W)), "weight": Input((C, K, R, R), (C * R * R) ** -0.5)}
    label = _label((N, C, H, W), f"{K} filters of {R}×{R}", f"stride {stride}")
    options = dict(bias=None, stride=stride, padding=padding)
    ours, theirs = (functools.partial(of.conv_transpose2d, **options) for of in (ops, F))
    flops = 2 * N * C * H * W * K * R * R
    return Problem(label, inputs, ours, theirs, CONVOLUTION, flops)


def _batch_norm(training, draw):
    shape = draw.images()
    inputs = {"x": Input(shape, 2, 1), **_of_channels(shape[1])}
    ours, theirs = (functools.partial(of.batch_norm, training=training) for of in (ops, F))
    passes = BACKWARD if training else {"forward": ()}
    return Problem(_label(shape), inputs, ours, theirs, passes)


def _max_pool2d(draw):
    shape, size = draw.images(), draw.one_of(2, 2, 3, 3, 5)
    size = min(size, *shape[2:])
    options = dict(stride=draw.one_of(1, 2, size), padding=draw.one_of(0, size // 2))
    label = _label(shape, f"window {size}", *(f"{name} {n}" for name, n in options.items()))
    ours, theirs = (functools.partial(of.max_pool2d, kernel_size=size, **options)
                    for of in (ops, F))  # fmt: skip
    return Problem(label, {"x": Input(shape)}, ours, theirs, BACKWARD)


def _global_avg_pool(draw):
    shape = draw.images()
    theirs = functools.partial(F.adaptive_avg_pool2d, output_size=1)
    return Problem(_label(shape), {"x": Input(shape)}, ops.global_avg_pool, theirs, BACKWARD)


def _upsample(draw):
    shape, mode = draw.images(), draw.one_of("nearest", "bilinear")
    options = dict(scale_factor=2.0, mode=mode)
    ours, theirs = (functools.partial(of.interpolate, **options) for of in (ops, F))
    return Problem(_label(shape, mode), {"x": Input(shape)}, ours, theirs, BACKWARD)


def _squeeze_excite(draw):
    N, C, H, W = draw.images(2048)
    R = max(1, C // draw.one_of(4, 16))
    shapes = {"weight1": (R, C), "bias1": (R,), "weight2": (C, R), "bias2": (C,)}
    inputs = {"x": Input((N, C, H, W))} | {
        name: Input(shape, shape[-1] ** -0.5, dtype="float32") for name, shape in shapes.items()
    }

    def theirs(x, weight1, bias1, weight2, bias2):
        hidden = F.silu(F.linear(x.mean((2, 3)).to(weight1.dtype), weight1, bias1))
        gate = torch.sigmoid(F.linear(hidden, weight2, bias2))
        return x * gate.to(x.dtype)[:, :, None, None]

    label = _label((N, C, H, W), f"{R} hidden")
    passes = {"forward": (), "backward": tuple(inputs)}
    return Problem(label, inputs, ops.squeeze_excite, theirs, passes)


def _dice_loss(draw):
    N, C, H, W = draw.size(1, 16), draw.size(2, 32), draw.size(4, 512), draw.size(4, 512)
    inputs = {"x": Input((N, C, H, W), 3), "target": Input((N, H, W), below=C)}
    weights = segmentation_loss.WEIGHTS
    ours = functools.partial(ops.dice_loss, **weights, ignore_index=segmentation_loss.IGNORED)
    theirs = functools.partial(segmentation_loss.peer_loss, "dice")
    return Problem(_label((N, C, H, W)), inputs, ours, theirs, BACKWARD)


# ---- which there are ----------------------------------------------------------------------------

_PLAIN = Kind("float32"), Kind("bfloat16")
_ROWS = *_PLAIN, *_PLAIN, Kind("float32", SLICED), Kind("bfloat16", SLICED)
_LAST = Kind("float32", "channels-last"), Kind("bfloat16", "channels-last")
_IMAGES = *_PLAIN, *_LAST
_OF_PRODUCTS = Kind("bfloat16"), Kind("float32", tf32=True), Kind("float32")
_OF_CONVOLUTIONS = tuple(
    kind._replace(layout=layout)
    for kind in _OF_PRODUCTS
    for layout in ("channels-last", "contiguous")
)


def _activations():
    names = "relu", "relu6", "leaky_relu", "sigmoid", "silu", "hardsigmoid", "hardswish", "gelu"
    found = {name: functools.partial(_activation, name) for name in names}
    found["gelu_tanh"] = functools.partial(_activation, "gelu", approximate="tanh")
    return {name: (_ROWS, draw, activation) for name, draw in found.items()}


#: {operation: (the kinds that take turns, function(draw) -> `Problem`, the package of its kernels)}
OPERATIONS = {
    **{form + "conv2d": (_OF_CONVOLUTIONS, functools.partial(_convolution, form[:-1]),
                         conv2d)
       for form in ("", "grouped_", "depthwise_")},
    "conv_transpose2d": (_OF_CONVOLUTIONS, _conv_transpose2d, conv_transpose2d),
    "linear": (_OF_PRODUCTS, _linear, linear),
    "attention": (_PLAIN, _attention, attention),
    "batch_norm": (_IMAGES, functools.partial(_batch_norm, True), batch_norm),
    "batch_norm_inference": (_IMAGES, functools.partial(_batch_norm, False), batch_norm),
    "layer_norm": (_ROWS, _layer_norm, layer_norm),
    "max_pool2d": (_IMAGES, _max_pool2d, max_pool2d),
    "global_avg_pool": (_IMAGES, _global_avg_pool, global_avg_pool),
    "upsample": (_IMAGES, _upsample, upsample),
    "squeeze_excite": (_IMAGES, _squeeze_excite, squeeze_excite),
    "softmax": (_ROWS, functools.partial(_rows, "softmax"), softmax),
    "log_softmax": (_ROWS, functools.partial(_rows, "log_softmax"), softmax),
    "scaled_softmax": (_PLAIN, _scaled_softmax, scaled_softmax),
    "bn_relu_softmax": (_ROWS, _bn_relu_softmax, bn_relu_softmax),
    "cross_entropy": (_ROWS, _cross_entropy, cross_entropy),
    "dice_loss": (_IMAGES, _dice_loss, dice),
    **_activations(),
}  # fmt: skip
