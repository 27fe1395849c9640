"""What the course knows of an operation beside its kernels: how to call it, and what is right.

An `Operation` names the kernel package with its ladders, and for each pass makes inputs, calls ours
and PyTorch's, and computes the truth in float64. Whoever compares, measures or tests kernels reads
`OPERATIONS`; a new operation is entered there and nowhere else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType

import numpy as np

from course_lib.kernels.operation import AUTO, Ladder

DIRECTIONS = ("forward", "inference", "backward", "weights")


def largest(x):
    """The largest magnitude of each row, for broadcasting."""
    return np.abs(x).max(axis=-1, keepdims=True, initial=0.0)


@dataclass(frozen=True)
class Pass:
    """One direction of one operation. Works on PyTorch tensors, or where that is
    missing on NumPy arrays, but for `peer`; `truth` and `scale` on float64.

    ladder   its rungs
    inputs   function(x), x random numbers of the shape asked for: {name: what `ours` takes}
    ours     function(*inputs, variant=…); allocates its result
    peer     function(*inputs): PyTorch's result
    truth    function(*inputs): the right result
    scale    function(truth, *inputs): what the error of each element is measured against
    whole    rows are not independent: everything is compared at once
    chosen   function(*inputs): the rung that AUTO takes, where the ladder alone does not tell
    rungs    what `variant` may be for such inputs, in teaching order; None: all rungs and ways
    out      `ours` takes `out` too, which receives the result
    in_place names of the inputs that `out` may be
    unread   names of the inputs whose elements `ours` doesn't take: for peer and truth alone
    """

    ladder: Ladder
    inputs: Callable
    ours: Callable
    peer: Callable
    truth: Callable
    scale: Callable = lambda truth, *inputs: largest(truth)
    scale_in_words: str = "the row's largest |y|"
    whole: bool = False
    chosen: Callable | None = None
    rungs: tuple | None = None
    out: bool = False
    in_place: tuple = ()
    unread: tuple = ()

    @property
    def variants(self):
        """What `variant` may be, in teaching order."""
        return self.ladder.variants if self.rungs is None else self.rungs

    def default(self, inputs):
        """The rung that AUTO takes for these, as `inputs` gives them; AUTO where only the launcher
        knows."""
        if self.chosen is not None:
            return self.chosen(*inputs.values())
        return self.ladder.auto[0] if self.ladder.auto else AUTO


@dataclass(frozen=True)
class Operation:
    """Its kernels, its passes, the dtypes taken, and what the dimensions of the input mean.

    module   of `course_lib.kernels`: what has `specialisations`
    example  the shape where none is named
    """

    module: ModuleType
    forward: Pass
    backward: Pass | None  # to x
    weights: Pass | None = None  # backward, to the weights
    inference: Pass | None = None  # forward, where that is another pass than in training
    dtypes: tuple = ("float32", "float16", "bfloat16")
    n_dims: int | None = None  # None: any number
    layout: str = "any shape"
    example: tuple = (8, 50)

    @property
    def passes(self):
        """{direction: Pass} of those that there are."""
        found = {name: getattr(self, name) for name in DIRECTIONS}
        return {name: each for name, each in found.items() if each is not None}
