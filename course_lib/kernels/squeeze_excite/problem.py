"""What the rungs need to know of a call, as plain numbers: made once for each kind of call."""

import functools
from typing import NamedTuple

from course_lib.kernels.squeeze_excite.formulas import ACTIVATIONS, GATES

DTYPES = ("float32", "float16", "bfloat16")


class Problem(NamedTuple):
    """Sizes of x (N·C·H·W, n_pixels = H·W) and of the hidden layer (R), and how x lies in memory.

    Element (n, c, pixel) lies at n·C·n_pixels + c·channel_step + pixel·pixel_step. `activation` and
    `gate` are the numbers by which kernels know them, `itemsize` the bytes of an element of x.
    """

    N: int
    C: int
    n_pixels: int
    R: int
    channels_last: bool
    activation: int
    gate: int
    itemsize: int

    @property
    def channel_step(self):
        return 1 if self.channels_last else self.n_pixels

    @property
    def pixel_step(self):
        return self.C if self.channels_last else 1


@functools.lru_cache(maxsize=4096)
def problem_of(shape, R, channels_last, activation, gate, itemsize):
    """The `Problem` of a call; ValueError for an unknown activation or gate."""
    for name, what, known in ((activation, "activation", ACTIVATIONS), (gate, "gate", GATES)):
        if name not in known:
            raise ValueError(f"unknown {what} {name!r}; there are {', '.join(known)}")
    N, C, H, W = shape
    return Problem(N, C, H * W, R, channels_last, ACTIVATIONS[activation], GATES[gate], itemsize)
