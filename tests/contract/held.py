"""One subject held to the contract: its first result, further runs, and how near they must be."""

import functools

import numpy as np
import torch
from contract import exceptions
from contract.cases import double, ordered, truth_of
from contract.memory import same_bits

from course_lib import SIMULATED, simulator
from course_lib.compare import TOLERANCES
from course_lib.compare.errors import Comparison


class Broken(AssertionError):
    """A promise is not kept: `property` is its name, the message says how."""

    def __init__(self, name, how):
        super().__init__(f"{name}: {how}")
        self.property = name


def require(right, name, how):
    if not right:
        raise Broken(name, how)


class Held:
    """One subject held to the contract, and its first result, made once.

    lean  whether runs are few, as for the rungs of `exceptions.LEAN`; None: if it is one of them
    """

    right_of_nan = False  # whether a run has shown that NaN comes out where it should

    def __init__(self, subject, lean=None):
        self.subject, self.of_pass = subject, subject.of_pass
        self.lean = exceptions.lean(subject) if lean is None else lean

    @functools.cached_property
    def first(self):
        """(shapes that the rung takes, inputs of the first of them, their result).

        A rung that refuses small shapes, as one that takes 16 bytes at a time may, has the
        operation's example alone, which it must take.
        """
        shapes = self.subject.shapes
        inputs = self.subject.inputs(shapes[0])
        try:
            return shapes, inputs, self.run(inputs)
        except ValueError:
            shapes = (self.subject.operation.example,)
            inputs = self.subject.inputs(shapes[0])
            return shapes, inputs, self.run(inputs)

    shapes = property(lambda self: self.first[0])
    inputs = property(lambda self: self.first[1])
    result = property(lambda self: self.first[2])

    @property
    def is_watched(self):
        """Whether there is a sanitizer, and time for it."""
        return SIMULATED and not self.lean

    @functools.cached_property
    def watched(self):
        """The result for the first inputs while the sanitizer watches: one run for two promises.

        The inputs are NumPy arrays, if NumPy has the dtype.
        """
        inputs = self.inputs
        if self.subject.has_numpy:
            inputs = {k: v.numpy() if torch.is_tensor(v) else v for k, v in inputs.items()}
        return self.watch(inputs)

    def watch(self, inputs):
        """As `run`, while the sanitizer watches."""
        if not self.is_watched:
            return self.run(inputs)
        with simulator.sanitize() as report:
            found = self.run(inputs)
        require(not report.findings, "sanitizer", str(report))
        return found

    def run(self, inputs, order="forward", changed=(), **options):
        """The result for `inputs`, which stay as they are, but those named in `changed`."""
        tensors = {k: v for k, v in inputs.items() if torch.is_tensor(v) and k not in changed}
        before = {name: tensor.clone() for name, tensor in tensors.items()}
        with ordered(order):
            found = self.subject.call(inputs, **options)
        for name, tensor in tensors.items():
            require(same_bits(tensor, before[name]), "unchanged", f"{name} was written to")
        return found

    def moved(self, how, inputs=None):
        """The inputs that are read, laid out by `how`; the others as they are."""
        inputs = self.inputs if inputs is None else inputs
        read = self.subject.read(inputs)
        return inputs | {name: how(tensor) for name, tensor in read.items()}

    def same(self, found):
        """Whether `found` has the bits of the first result.

        Where atomics add in whatever order, a GPU need not give them twice: there, as near the
        truth.
        """
        if SIMULATED or not exceptions.of(self.subject, "bits"):
            return same_bits(found, self.result)
        self.near_truth("bits", self.inputs, found)
        return found.dtype == self.result.dtype

    def near_truth(self, name, inputs, found):
        self.near(name, double(found), *truth_of(self.subject, inputs), inputs)

    def near(self, name, found, truth, scale, inputs):
        require(found.shape == truth.shape, name, f"{found.shape} for {truth.shape}")
        limits = torch.finfo(self.result.dtype)
        compared = Comparison(
            self.subject.label, TOLERANCES[self.subject.dtype], self.of_pass.scale_in_words,
            resolution=limits.smallest_normal * limits.eps,
        )  # fmt: skip
        with np.errstate(all="ignore"):
            compared.add(0, {k: double(v) for k, v in inputs.items()}, found, truth, truth, scale)
        require(compared.right, name, f"\n{compared}")
