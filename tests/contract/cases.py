"""What the contract is asked of: every rung and way of every pass, in every dtype, and its inputs.

All of it follows from `OPERATIONS`: a new operation is held to the contract without another line.
"""

import contextlib
import zlib
from dataclasses import dataclass, replace

import numpy as np
import torch
from contract import exceptions
from tensors import PLACE

from course_lib import SIMULATED, simulator
from course_lib.operations import OPERATIONS
from course_lib.operations.passes import Operation, Pass
from course_lib.runtime.host.launch import chip_of, planning

CHIP = chip_of(torch.empty(0, device=PLACE))
#: Shapes by the number of dimensions, small because each thread takes the simulator time: the first
#: is that of all properties; then more columns than a warp has lanes, one column, and columns for
#: several warps; images of one channel, and of several.
SHAPES = {2: ((3, 5), (2, 70), (7, 1), (1, 130)), 4: ((2, 2, 3, 4), (3, 1, 5, 9), (1, 5, 4, 3))}
#: How each draw lies: (spread, shift).
SPREADS = ((3.0, 0.5), (0.02, 0.0), (30.0, -1.0), (1.0, 4.0))


@dataclass(frozen=True)
class Subject:
    """One rung, or way of a rung, of one pass of one operation, in one dtype."""

    name: str
    direction: str
    rung: str
    dtype: str
    operation: Operation
    of_pass: Pass

    @property
    def label(self):
        return "-".join((self.name, self.direction, self.rung, self.dtype))

    @property
    def named(self):
        """The rung, and the way if it is one."""
        return self.rung.partition("/")[0], self.rung

    @property
    def is_way(self):
        return "/" in self.rung

    @property
    def shapes(self):
        """Those that it is held to: of a way those that it takes, or else the operation's example.

        The example alone where runs are few: rows begin on boundaries there, k is worth sharing.
        """
        found = SHAPES[self.operation.n_dims or 2]
        if not self.is_way:
            return found
        if exceptions.lean(self) or not self.takes(found[0]):
            return (self.operation.example,)
        return tuple(filter(self.takes, found))

    @property
    def is_there(self):
        """Whether the rung or way takes the dtype at all, and no others are held in its place."""
        if self.rung in exceptions.HELD_BY_WAYS.get(self.name, ()):
            return False
        if self.is_way:
            return all(map(self.takes, self.shapes))
        rung = self.of_pass.ladder[self.rung]
        return rung.ways == (rung,) or self.takes(self.operation.example)

    def takes(self, shape):
        """Whether a launch for inputs of `shape` can be planned."""
        x = torch.zeros(shape, dtype=getattr(torch, self.dtype))
        inputs = self.of_pass.inputs(x).values()
        try:
            with planning(CHIP):
                self.of_pass.ours(*inputs, variant=self.rung)
        except ValueError:
            return False
        return True

    @property
    def has_numpy(self):
        """Whether the rung is asked to take NumPy arrays: all are, of a dtype that NumPy has."""
        return SIMULATED and self.dtype != "bfloat16"

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
    """Every `Subject` there is: rungs and ways, each in the dtypes that it takes."""
    for name, operation in OPERATIONS.items():
        for direction, of_pass in operation.passes.items():
            for rung in of_pass.variants:
                for dtype in operation.dtypes:
                    subject = Subject(name, direction, rung, dtype, operation, of_pass)
                    if subject.is_there:
                        yield subject


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
