"""What a zoo case is: kernels to launch, and what the arrays must hold afterwards."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Launch:
    """One `kernel[grid, block, 0, shared](*args)`; arrays are told apart by identity."""

    kernel: object
    grid: object
    block: object
    args: tuple
    shared: int = 0


@dataclass
class Plan:
    """The launches of one case and the results expected of them.

    `expected` holds (array, value, relative tolerance, transform): after all launches
    `transform(array)` must be within the tolerance of `value`; exactly equal if it's 0.
    """

    launches: list
    expected: list = field(default_factory=list)

    def expect(self, array, value, rtol=0.0, transform=np.asarray):
        self.expected.append((array, value, rtol, transform))
        return self


CASES = {}


def case(build):
    """Register `build(rng) -> Plan` under its own name."""
    CASES[build.__name__] = build
    return build


def blocks_for(n, block_size):
    """Blocks of `block_size` threads needed for `n` elements."""
    return (n + block_size - 1) // block_size
