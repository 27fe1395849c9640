"""What the operators' contract is asked of: every function of `ops`, in every form that it has.

The subjects are those of `operands.CASES`, which are tried in all layouts, and of `FORMS`. A new
operator is held to the contract by one line there.
"""

import contextlib
import functools
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
from course_lib.kernels import conv2d, conv_transpose2d, linear


def _with_statistics(f, x, mean, var, weight, bias):
    moved = mean.detach().clone(), var.detach().square()
    return f.batch_norm(x, *moved, weight, bias, True, 0.3), *moved


def _weighted(f, x):
    n_classes = x.shape[1]
    target = torch.arange(x.shape[0], device=x.device) % n_classes
    weight = torch.linspace(0.5, 2, n_classes, device=x.device, dtype=x.dtype)
    return f.cross_entropy(x, target, weight, reduction="none", label_smoothing=0.1)


#: As `operands.CASES`: label -> (call(library, *operands), shapes of the operands).
FORMS = {
    **{
        f"{name} in place": (
            lambda f, x, name=name: getattr(f, name)(x * 1, inplace=True), (IMAGE,)
        )
        for name in IN_PLACE
    },
    "leaky_relu in place of a slope below zero": (
        lambda f, x: f.leaky_relu(x * 1, -0.5, inplace=True), (IMAGE,)
    ),
    "gelu by tanh": (lambda f, x: f.gelu(x, approximate="tanh"), (IMAGE,)),
    "softmax in float32": (lambda f, x: f.softmax(x, -1, dtype=torch.float32), (ROWS,)),
    "batch_norm with statistics": (_with_statistics, (IMAGE, *[(8,)] * 4)),
    "batch_norm with relu": (
        lambda f, x, *affine: f.batch_norm(x, None, None, *affine, True, relu=True),
        (IMAGE, (8,), (8,)),
    ),
    "conv2d_batch_norm with relu": (
        lambda f, *operands: f.conv2d_batch_norm(*operands, None, None, relu=True),
        (IMAGE, (16, 8, 1, 1), (16,), (16,)),
    ),
    "squeeze_excite with hard gates": (
        lambda f, *operands: f.squeeze_excite(*operands, "relu", "hard_sigmoid"),
        (IMAGE, (4, 8, 1, 1), (4,), (8, 4, 1, 1), (8,)),
    ),
    "linear with relu": (lambda f, *operands: f.linear(*operands, relu=True), (ROWS, (8, 16))),
    "linear of a vector": (lambda f, *operands: f.linear(*operands), ((16,), (8, 16), (8,))),
    "max_pool2d with relu": (lambda f, x: f.max_pool2d(x, 2, relu=True), (IMAGE,)),
    "max_pool2d with indices": (
        lambda f, x: f.max_pool2d(x, 3, 2, 1, return_indices=True), (IMAGE,)
    ),
    "interpolate of corners": (
        lambda f, x: f.interpolate(x, (5, 9), mode="bilinear", align_corners=True), (IMAGE,)
    ),
    "cross_entropy with weights": (_weighted, (ROWS,)),
    "dice_loss with cross-entropy": (
        lambda f, x: f.dice_loss(
            x, torch.arange(x.shape[0], device=x.device), None, -100, 0.5, 0.4, 0.6
        ),
        (ROWS,),
    ),
}  # fmt: skip


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


SUBJECTS = [Subject(label, *case) for label, case in (operands.CASES | FORMS).items()]


@contextlib.contextmanager
def quick():
    """The simulator takes the rungs that it runs fastest: these promises are not about kernels."""
    with (
        choosing("direct", conv2d), choosing("gather", conv_transpose2d), choosing("naive", linear)
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
        with quick():
            return operands.run(self.subject.call, library, given)[1]

    def forward(self, *given, library=ops):
        """y alone."""
        with quick():
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


def near(name, found, expected, scale=1.0, norm=None, dtype=None):
    """Each pair within a few roundings of its dtype: of each element, and of the norm.

    scale  how many times four roundings an element may be off, beside its own size or one
    dtype  whose roundings; each result's own, if it is None
    norm   what ‖a − b‖ / ‖b‖ may be; the same, if it is None
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
        gap = (a.double() - b.double()).nan_to_num().norm()
        size = b.double().nan_to_num().norm()
        require(gap <= (most if norm is None else norm) * size + 1e-30, name, f"result {n}: {gap}")


def said(kind, call, *given):
    """The message of the error of this kind that `call` raises; None where it raises none."""
    try:
        call(*given)
    except kind as error:
        return str(error)
    return None
