"""Every operator with every operand in eleven layouts: values, gradients and strides.

The same table holds where operators run PyTorch (a script in `on_the_cpu`), our kernels in the
simulator, and our kernels on a GPU.
"""

import itertools
import warnings

import peers
import torch
from contract.memory import strange
from tensors import PLACE
from torch._subclasses.fake_tensor import FakeTensorMode

from course_lib import SIMULATED, ops
from course_lib.ops.registration import simulate_on_cpu


def _wide(x, axis):
    """Three times as many along `axis`, full of NaN but for `x` at every place from the second."""
    if not x.ndim:
        return x
    before, after = (x.new_full(x.shape, strange(x)) for _ in range(2))
    return torch.cat((before, x, after), axis).narrow(axis, x.shape[axis], x.shape[axis])


def _every_second(x):
    if not x.ndim:
        return x
    wide = x.new_full((*x.shape[:-1], 2 * x.shape[-1]), strange(x))
    wide[..., ::2] = x
    return wide[..., ::2]


def _shifted(x):
    return torch.cat((x.new_full((1,), strange(x)), x.flatten()))[1:].view(x.shape)


def _channels_last(x):
    return x.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else x


def _slice_of_channels_last(x):
    if x.ndim != 4:
        return _wide(x, 0)
    N, C, H, W = x.shape
    wide = _channels_last(x.new_full((N, 2 * C, H, W), strange(x)))
    wide[:, :C] = x
    return wide[:, :C]


def _reversed(x):
    return x.permute(tuple(reversed(range(x.ndim))))


def _swapped(x, a, b):
    return x.transpose(a, b).contiguous().transpose(a, b) if x.ndim > 1 else x


LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels-last": _channels_last,
    "a slice of channels": _slice_of_channels_last,
    "the first two axes swapped": lambda x: _swapped(x, 0, 1),
    "the last two axes swapped": lambda x: _swapped(x, -2, -1),
    "all axes reversed": lambda x: _reversed(_reversed(x).contiguous()),
    "a part of the first axis": lambda x: _wide(x, 0),
    "padded rows": lambda x: _wide(x, -1),
    "every second element": _every_second,
    "off a boundary": _shifted,
    "expanded": lambda x: x[:1].expand(x.shape) if x.ndim else x,
}


def _bn_relu_softmax(f, x, mean, var, weight, bias):
    return f.bn_relu_softmax(x, mean.detach(), (var * var).detach(), weight, bias, 1.0)


def _attention(f, q, *others):
    k, v = (x.expand(q.shape[0], -1, -1, -1) for x in others)
    return f.attention(q, k, v, causal=True, lower_right=True)


def _dice_loss(f, x):
    target = torch.arange(x[:, 0].numel(), device=x.device).view(x[:, 0].shape) % x.shape[1]
    return f.dice_loss(x, target)


def _inference(f, x, mean, var, weight, bias):
    return f.batch_norm(x, mean.detach(), (var * var).detach(), weight, bias, eps=1.0)


IMAGE, ROWS = (2, 8, 4, 6), (4, 16)
ACTIVATIONS = (
    "relu", "relu6", "leaky_relu", "sigmoid", "silu", "hardsigmoid", "hardswish", "gelu",
)  # fmt: skip
IN_PLACE = tuple(name for name in ACTIVATIONS if name not in ("sigmoid", "gelu"))
#: label -> (call(library, *operands), shapes of the operands); labels begin with the operator.
CASES = {
    **{name: (lambda f, x, name=name: getattr(f, name)(x), (IMAGE,)) for name in ACTIVATIONS},
    "softmax": (lambda f, x: f.softmax(x, -1), (IMAGE,)),
    "softmax of channels": (lambda f, x: f.softmax(x, 1), (IMAGE,)),
    "log_softmax": (lambda f, x: f.log_softmax(x, -1), (IMAGE,)),
    "log_softmax of channels": (lambda f, x: f.log_softmax(x, 1), (IMAGE,)),
    "scaled_softmax": (
        lambda f, x, mask: f.scaled_softmax(x, mask.detach(), scale=0.5, causal=True),
        ((2, 2, 3, 5), (2, 1, 5)),
    ),
    "softmax_dropout": (lambda f, x: f.softmax_dropout(x, 0.25), (ROWS,)),
    "dropout": (lambda f, x: f.dropout(x, 0.25), (IMAGE,)),
    "bn_relu_softmax": (_bn_relu_softmax, (ROWS, *[(16,)] * 4)),
    "batch_norm": (
        lambda f, x, *affine: f.batch_norm(x, None, None, *affine, True), (IMAGE, (8,), (8,))
    ),
    "batch_norm in inference": (_inference, (IMAGE, *[(8,)] * 4)),
    "layer_norm": (lambda f, x, *affine: f.layer_norm(x, (4, 6), *affine), (IMAGE, *[(4, 6)] * 2)),
    "global_avg_pool": (lambda f, x: f.global_avg_pool(x), (IMAGE,)),
    "squeeze_excite": (
        lambda f, *operands: f.squeeze_excite(*operands), (IMAGE, (4, 8), (4,), (8, 4), (8,))
    ),
    "max_pool2d": (lambda f, x: f.max_pool2d(x, 3, 2, 1), (IMAGE,)),
    "max_pool2d of one pixel": (lambda f, x: f.max_pool2d(x, 3, 1, 1), ((2, 8, 1, 1),)),
    "interpolate": (lambda f, x: f.interpolate(x, scale_factor=2), (IMAGE,)),
    "interpolate of one pixel": (
        lambda f, x: f.interpolate(x, size=(2, 3), mode="bilinear"), ((2, 8, 1, 1),)
    ),
    "linear": (lambda f, *operands: f.linear(*operands), ((2, 3, 16), (8, 16), (8,))),
    "attention": (_attention, ((2, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4))),
    "scaled_dot_product_attention": (
        lambda f, *qkv: f.scaled_dot_product_attention(*qkv),
        ((2, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 6)),
    ),
    "cross_entropy": (
        lambda f, x: f.cross_entropy(x, torch.arange(x.shape[0], device=x.device) % 5), ((4, 5),)
    ),
    "cross_entropy of images": (
        lambda f, x: f.cross_entropy(
            x, torch.arange(x[:, 0].numel(), device=x.device).view(x[:, 0].shape) % 8
        ),
        (IMAGE,),
    ),
    "cross_entropy of probabilities": (
        lambda f, x, target: f.cross_entropy(x, target.detach().softmax(1)), ((4, 5), (4, 5))
    ),
    "dice_loss": (_dice_loss, (IMAGE,)),
    "conv2d": (
        lambda f, *operands: f.conv2d(*operands, padding=1), (IMAGE, (16, 8, 3, 3), (16,))
    ),
    "conv2d of one pixel": (
        lambda f, *operands: f.conv2d(*operands, padding=1), ((2, 8, 1, 1), (16, 8, 3, 3), (16,))
    ),
    "conv2d of one channel": (
        lambda f, *operands: f.conv2d(*operands, padding=1), ((2, 1, 4, 6), (8, 1, 3, 3), (8,))
    ),
    "conv2d with 1 x 1 filters": (
        lambda f, *operands: f.conv2d(*operands, stride=2), (IMAGE, (16, 8, 1, 1), (16,))
    ),
    "conv2d by depth": (
        lambda f, *operands: f.conv2d(*operands, padding=1, groups=8),
        (IMAGE, (8, 1, 3, 3), (8,)),
    ),
    "conv2d_batch_norm": (
        lambda f, *operands: f.conv2d_batch_norm(*operands, None, None, padding=1),
        (IMAGE, (16, 8, 3, 3), (16,), (16,)),
    ),
    "conv_transpose2d": (
        lambda f, *operands: f.conv_transpose2d(*operands, stride=2),
        (IMAGE, (8, 4, 2, 2), (4,)),
    ),
    "conv_transpose2d of one pixel": (
        lambda f, *operands: f.conv_transpose2d(*operands), ((2, 8, 1, 1), (8, 4, 3, 3), (4,))
    ),
}
#: Contiguous, or of squeeze_excite contiguous or channels-last, of attention by heads or by rows,
#: as the docstrings say: PyTorch's may lie as x does.
LAID_OUT = (
    "softmax", "log_softmax", "softmax_dropout", "layer_norm", "bn_relu_softmax", "squeeze_excite",
    "attention", "scaled_dot_product_attention", "scaled_softmax",
)  # fmt: skip
#: What the simulator takes long for moves in few of the draws there. `launches` looks at all.
SLOW = {"conv2d": 2, "conv2d of one pixel": 3, "conv2d of one channel": 3, "batch_norm": 3,
        "conv2d_batch_norm": 1, "squeeze_excite": 4, "conv_transpose2d": 4,
        "conv_transpose2d of one pixel": 4}  # fmt: skip


def draws(n):
    """Which layout each of `n` operands has, run by run: each has each.

    On a GPU one operand after the other is moved, too. The simulator takes longer: all move at
    once.
    """
    names = list(LAYOUTS)
    for start in (4 * n % len(names) for n in range(len(names))):  # the first differ most
        yield [names[(start + 3 * place) % len(names)] for place in range(n)]
    for place in range(n) if not SIMULATED else ():
        for name in names:
            yield [name if each == place else names[0] for each in range(n)]


def faults(*labels):
    """Every difference, as a sentence, in the cases of these labels, or in all."""
    for label in labels or CASES:
        call, shapes = CASES[label]
        n_draws = SLOW.get(label, len(LAYOUTS)) if simulate_on_cpu else None
        for names in itertools.islice(draws(len(shapes) + 1), n_draws):
            for fault in _differences(label, call, shapes, names):
                yield f"{label}, {', '.join(names)}: {fault}"


def _differences(label, call, shapes, names):
    generator = torch.Generator().manual_seed(len(label))
    numbers = [torch.randn(shape, generator=generator).to(PLACE) for shape in shapes]
    placed = [LAYOUTS[name](x) for name, x in zip(names, numbers, strict=False)]
    ours, theirs = (run(call, library, placed, names[-1]) for library in (ops, peers))
    for what, found, expected in zip(ours[0], ours[1], theirs[1], strict=True):
        try:
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=2e-2)
        except AssertionError as error:
            yield f"{what}: {error}"
    y, peer = ours[1][0], theirs[1][0]
    if not label.startswith(LAID_OUT) and strides(y) != strides(peer):
        yield f"y has strides {y.stride()}, PyTorch's {peer.stride()}"
    with FakeTensorMode() as mode, warnings.catch_warnings():
        fakes = run(call, ops, [mode.from_tensor(x) for x in placed], names[-1])
    for what, found, fake in zip(*ours, fakes[1], strict=True):
        if strides(found) != strides(fake):
            yield f"{what} has strides {found.stride()}, and {fake.stride()} when it is traced"


def run(call, library, operands, layout_of_dy="contiguous"):
    """(names of the results, y and the gradient of each operand that has one).

    Further results have no gradient. What is drawn at random is drawn the same each time.
    """
    torch.manual_seed(3)
    leaves = [x.detach().requires_grad_(x.is_floating_point()) for x in operands]
    y, *others = several(call(library, *leaves))
    dy = torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    dy = LAYOUTS[layout_of_dy](dy) if y.ndim else dy
    wanted = [x for x in leaves if x.requires_grad]
    gradients = torch.autograd.grad(y, wanted, dy, allow_unused=True) if wanted else ()
    given = {f"gradient {n}": dx for n, dx in enumerate(gradients) if dx is not None}
    names = ["y", *(f"result {n}" for n in range(1, 1 + len(others))), *given]
    return names, [y.detach(), *others, *given.values()]


def several(results):
    return results if isinstance(results, tuple) else (results,)


def strides(x):
    return tuple(
        stride for stride, extent in zip(x.stride(), x.shape, strict=True) if extent != 1
    )  # fmt: skip


def missing():
    """Operators without a case."""
    there = {label.split()[0] for label in CASES}
    return sorted(set(ops.__all__) - there)
