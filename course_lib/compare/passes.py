"""What a comparison needs to know of an operation, and what most of them share."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

DIRECTIONS = ("forward", "backward", "weights")


def largest(x):
    """The largest magnitude of each row, for broadcasting."""
    return np.abs(x).max(axis=-1, keepdims=True, initial=0.0)


@dataclass(frozen=True)
class Pass:
    """One direction of one operation. Works on PyTorch tensors; `truth` and `scale` on float64.

    variants  the rungs, in teaching order
    default   function(shape): the rung that runs when none is named
    inputs    function(x), x random numbers of the shape asked for: {name: what `ours` takes}
    ours      function(*inputs, variant=…); allocates its result
    peer      function(*inputs): PyTorch's result
    truth     function(*inputs): the right result
    scale     function(truth, *inputs): what the error of each element is measured against
    whole     rows are not independent: everything is compared at once
    """

    variants: tuple
    default: Callable
    inputs: Callable
    ours: Callable
    peer: Callable
    truth: Callable
    scale: Callable = lambda truth, *inputs: largest(truth)
    scale_in_words: str = "the row's largest |y|"
    whole: bool = False


@dataclass(frozen=True)
class Operation:
    """Its passes, the dtypes taken, and what the dimensions of the input mean."""

    forward: Pass
    backward: Pass | None  # to x
    dtypes: tuple
    weights: Pass | None = None  # backward, to the weights
    n_dims: int | None = None  # None: any number
    layout: str = "any shape"
    example: tuple = (8, 50)  # the shape where none is named

    @property
    def passes(self):
        """{direction: Pass} of those that there are."""
        found = {name: getattr(self, name) for name in DIRECTIONS}
        return {name: each for name, each in found.items() if each is not None}


def gradient(x):
    """A dy for x: as random, of the same shape and dtype, and not correlated with it."""
    generator = torch.Generator().manual_seed(x.numel() + 1)
    return torch.randn(x.shape, generator=generator).to(x.device, x.dtype)
