"""What the operators' contract is asked of: every function of `ops`, in every form that it has.

The subjects are those of `operands.CASES`, which are tried in all layouts, and of `FORMS`. A new
operator is held to the contract by one line there.
"""

import contextlib
import functools
import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import operands
import peers
import torch
from contract.held import require
from operands import IMAGE, IN_PLACE, ROWS
from tensors import PLACE, choosing
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import ops
from course_lib.kernels import attention, conv2d, conv_transpose2d, linear


def _with_statistics(f, x, mean, var, weight, bias):
    moved = mean.detach().clone(), (var * var).detach()
    return f.batch_norm(x, *moved, weight, bias, True, 0.3), *moved


def _labels(x):
    """(a class for each row, a weight for each class)."""
    weight = torch.linspace(0.5, 2, x.shape[1], device=x.device, dtype=x.dtype)
    return torch.arange(x.shape[0], device=x.device) % x.shape[1], weight


def _weighted(f, x):
    return f.cross_entropy(x, *_labels(x), reduction="none", label_smoothing=0.1)


def _both_losses(f, x):
    return f.dice_loss(x, *_labels(x), -100, 0.5, 0.4, 0.6)


#: As `operands.CASES`: label -> (call(library, *operands), shapes of the operands).
FORMS = {
    **{
        f"{name} in place": (
            lambda f, x, name=name: getattr(f, name)(x * 1, inplace=True), (IMAGE,)
        )
        for name in IN_PLACE
    },
    "gelu by tanh": (lambda f, x: f.gelu(x, approximate="tanh"), (IMAGE,)),
    "layer_norm of rows": (
        lambda f, x, *affine: f.layer_norm(x, (16,), *affine), (ROWS, (16,), (16,))
    ),
    "softmax in float32": (lambda f, x: f.softmax(x, -1, dtype=torch.float32), (ROWS,)),
    "batch_norm with statistics": (_with_statistics, ((3, 4, 3, 3), *[(4,)] * 4)),
    "batch_norm with relu": (
        lambda f, x, *affine: f.batch_norm(x, None, None, *affine, True, relu=True),
        ((3, 4, 3, 3), (4,), (4,)),
    ),
    "conv2d_batch_norm with relu": (
        lambda f, *operands: f.conv2d_batch_norm(*operands, None, None, relu=True),
        ((2, 2, 4, 4), (3, 2, 1, 1), (3,), (3,)),
    ),
    "squeeze_excite with hard gates": (
        lambda f, *operands: f.squeeze_excite(*operands, "relu", "hard_sigmoid"),
        ((2, 4, 3, 3), (2, 4, 1, 1), (2,), (4, 2, 1, 1), (4,)),
    ),
    "linear with relu": (lambda f, *operands: f.linear(*operands, relu=True), ((3, 4), (5, 4))),
    "linear of a vector": (lambda f, *operands: f.linear(*operands), ((4,), (5, 4), (5,))),
    "max_pool2d with relu": (lambda f, x: f.max_pool2d(x, 2, relu=True), (IMAGE,)),
    "max_pool2d with indices": (
        lambda f, x: f.max_pool2d(x, 3, 2, 1, return_indices=True), (IMAGE,)
    ),
    "interpolate of corners": (
        lambda f, x: f.interpolate(x, (5, 9), mode="bilinear", align_corners=True), (IMAGE,)
    ),
    "scaled_dot_product_attention that is causal": (
        lambda f, *qkv: f.scaled_dot_product_attention(*qkv, is_causal=True),
        ((1, 2, 3, 4), (1, 2, 5, 4), (1, 2, 5, 4)),
    ),
    "scaled_dot_product_attention with a mask": (
        lambda f, *operands: f.scaled_dot_product_attention(*operands),
        ((2, 1, 3, 4), (2, 1, 4, 4), (2, 1, 4, 4), (3, 4)),
    ),
    "scaled_dot_product_attention of shared keys": (
        lambda f, *qkv: f.scaled_dot_product_attention(*qkv, enable_gqa=True),
        ((2, 2, 3, 4), (2, 1, 4, 4), (2, 1, 4, 4)),
    ),
    "cross_entropy with weights": (_weighted, (ROWS,)),
    "dice_loss with cross-entropy": (_both_losses, (ROWS,)),
}  # fmt: skip

#: Smaller than in all layouts, where the simulator takes long.
SMALL = {
    "conv2d": ((2, 2, 4, 4), (3, 2, 3, 3), (3,)),
    "conv2d_batch_norm": ((2, 2, 4, 4), (3, 2, 3, 3), (3,), (3,)),
    "conv_transpose2d": ((2, 2, 3, 3), (2, 3, 2, 2), (3,)),
    "squeeze_excite": ((2, 4, 3, 3), (2, 4), (2,), (4, 2), (4,)),
    "batch_norm": ((3, 4, 3, 3), (4,), (4,)),
    "batch_norm in inference": ((3, 4, 3, 3), *[(4,)] * 4),
    "linear": ((2, 3, 4), (5, 4), (5,)),
    "conv2d of one pixel": ((2, 2, 1, 1), (3, 2, 3, 3), (3,)),
    "conv2d of one channel": ((2, 1, 4, 4), (3, 1, 3, 3), (3,)),
    "conv2d with 1 x 1 filters": ((2, 2, 4, 4), (3, 2, 1, 1), (3,)),
    "conv_transpose2d of one pixel": ((2, 2, 1, 1), (2, 3, 3, 3), (3,)),
    "layer_norm": ((2, 3, 4, 6), (4, 6), (4, 6)),
    **dict.fromkeys(("interpolate", "interpolate of corners"), ((2, 2, 3, 4),)),
    **{f"max_pool2d{of}": ((2, 2, 4, 5),) for of in ("", " with relu", " with indices")},
}


@dataclass(frozen=True)
class Subject:
    """A function of `ops` in one form.

    label   the function's name, and then what is special
    call    call(library, *operands), of `ops` or of `peers`
    shapes  of the operands
    """

    label: str
    call: Callable
    shapes: tuple

    @property
    def name(self):
        return self.label.partition(" ")[0]

    def operands(self, dtype=torch.float32, more=0):
        """Random numbers of the shapes; `more` is how much longer the first one's first axis is."""
        generator = torch.Generator().manual_seed(zlib.crc32(self.label.encode()))
        shapes = [list(shape) for shape in self.shapes]
        shapes[0][0] += more
        return [torch.randn(shape, generator=generator).to(PLACE, dtype) for shape in shapes]


SUBJECTS = [
    Subject(label, call, SMALL.get(label, shapes))
    for label, (call, shapes) in (operands.CASES | FORMS).items()
]


@contextlib.contextmanager
def quick():
    """The simulator takes the rungs that it runs fastest: these promises are not about kernels."""
    with (
        choosing("direct", conv2d), choosing("gather", conv_transpose2d), choosing("naive", linear),
        choosing("tiled", attention), choosing("streaming", attention),  # backwards, forwards
    ):  # fmt: skip
        yield


class Calls(TorchDispatchMode):
    """Keeps the first call of each operator of ours: {operator: arguments}."""

    def __init__(self):
        super().__init__()
        self.found = {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "course_lib":
            kept = [
                x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x
                for x in args
            ]
            self.found.setdefault(function, kept)
        return function(*args, **(kwargs or {}))


class Held:
    """A subject that is held to the contract, and what its first run gave, made once."""

    def __init__(self, subject):
        self.subject, self.operands = subject, subject.operands()

    def run(self, given=None, library=ops):
        """[y, further results, gradients] for these operands, or for the first ones."""
        given = self.operands if given is None else given
        return operands.run(self.subject.call, library, given)[1]

    def forward(self, *given, library=ops):
        """y alone."""
        return operands.several(self.subject.call(library, *given))[0]

    first = functools.cached_property(run)

    @functools.cached_property
    def expected(self):
        """What PyTorch gives for the first operands."""
        return self.run(library=peers)

    @functools.cached_property
    def calls(self):
        """{operator: arguments} of the first run, the backward pass included."""
        return self.calls_of(torch.float32)

    def calls_of(self, dtype):
        """The same of operands of another type."""
        with Calls() as seen:
            self.run(self.subject.operands(dtype))
        return seen.found

    def leaves(self):
        """The operands, to be differentiated by, each with its number."""
        return [x.clone().requires_grad_() for x in self.operands]


def near(name, found, expected, scale=1.0, norm=math.inf, dtype=None):
    """Each pair within a few roundings of its dtype: of each element, and of the norm.

    scale  how many times four roundings an element may be off, beside its own size or one
    dtype  whose roundings; each result's own, if it is None
    norm   what ‖a − b‖ / ‖b‖ may be
    """
    require(len(found) == len(expected), name, f"{len(found)} results for {len(expected)}")
    for n, (a, b) in enumerate(zip(found, expected, strict=True)):
        kinds = (a.dtype, a.shape), (b.dtype, b.shape)
        require(kinds[0] == kinds[1], name, f"result {n} is {kinds[0]}, PyTorch's {kinds[1]}")
        eps = torch.finfo(dtype or b.dtype).eps if b.is_floating_point() else 0
        most = 4 * scale * eps
        try:
            torch.testing.assert_close(a, b, rtol=most, atol=most, equal_nan=True)
        except AssertionError as error:
            require(False, name, f"result {n}: {error}")
        if norm < math.inf:
            gap, size = ((x.double()).nan_to_num().norm() for x in (a - b, b))
            require(gap <= norm * size + 1e-30, name, f"result {n}: {gap} of {size}")


def said(kind, call, *given):
    """The message of the error of this kind that `call` raises; None where it raises none."""
    try:
        call(*given)
    except kind as error:
        return str(error)
    return None
