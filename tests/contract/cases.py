"""What the contract is asked of: every rung of every pass, in every dtype, and its inputs.

All of it follows from `OPERATIONS`: a new operation is held to the contract without another line.
"""

import contextlib
import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from tensors import PLACE

from course_lib import SIMULATED, simulator
from course_lib.operations import OPERATIONS
from course_lib.operations.passes import Operation, Pass

#: Shapes by the number of dimensions, small because each thread takes the simulator time: the first
#: is that of all properties; then more columns than a warp has lanes, and one column; images of one
#: channel, and of several.
SHAPES = {2: ((3, 5), (2, 70), (7, 1)), 4: ((2, 2, 3, 4), (3, 1, 5, 9), (1, 5, 4, 3))}
#: How each draw lies: (spread, shift).
SPREADS = ((3.0, 0.5), (0.02, 0.0), (30.0, -1.0))


@dataclass(frozen=True)
class Subject:
    """One rung of one pass of one operation, in one dtype."""

    name: str
    direction: str
    rung: str
    dtype: str
    operation: Operation
    of_pass: Pass

    @property
    def label(self):
        return "-".join((self.name, self.direction, self.rung, self.dtype))

    def inputs(self, shape, draw=0):
        """{name: what the pass takes} of random numbers of `shape`."""
        spread, shift = SPREADS[draw]
        seed = zlib.crc32(f"{self.name} {shape} {draw}".encode())
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        x = (spread * numbers + shift).to(PLACE, getattr(torch, self.dtype))
        return self.of_pass.inputs(x)

    def call(self, inputs, **options):
        return self.of_pass.ours(*inputs.values(), variant=self.rung, **options)

    def with_ours(self, ours):
        """The same promises, of another function: what `planted` puts behind the rung."""
        return replace(self, of_pass=replace(self.of_pass, ours=ours))

    def read(self, inputs):
        """The tensors among the inputs that the pass reads: {name: tensor}."""
        return {
            name: value for name, value in inputs.items()
            if torch.is_tensor(value) and name not in self.of_pass.unread
        }  # fmt: skip


def subjects():
    """Every `Subject` there is."""
    for name, operation in OPERATIONS.items():
        for direction, of_pass in operation.passes.items():
            for rung in of_pass.variants:
                for dtype in operation.dtypes:
                    yield Subject(name, direction, rung, dtype, operation, of_pass)


@contextlib.contextmanager
def ordered(order):
    """Launches run their threads in this order, in the simulator; a GPU chooses its own."""
    if SIMULATED:
        with simulator.options(order=order, seed=7):
            yield
    else:
        yield


def double(value):
    """A tensor as a float64 array; anything else as it is."""
    return value.detach().double().cpu().numpy() if torch.is_tensor(value) else value


def truth_of(subject, inputs):
    """(the right result, the scale of its errors), in float64."""
    doubles = [double(value) for value in inputs.values()]
    with np.errstate(all="ignore"):
        truth = np.asarray(subject.of_pass.truth(*doubles))
        return truth, np.broadcast_to(subject.of_pass.scale(truth, *doubles), truth.shape)
