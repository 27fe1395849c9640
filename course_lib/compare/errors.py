"""How far results lie from the truth: counted chunk by chunk, with the worst element kept."""

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Errors:
    """The largest errors of one result against another, and how many elements are beyond.

    absolute  |actual − expected|
    relative  that, divided by |expected|
    scaled    that, divided by the element's scale: what the tolerance is about; 0 for errors up to
              `resolution`, the smallest step of the dtype, which no kernel can avoid
    """

    tolerance: float
    resolution: float = 0.0
    absolute: float = 0.0
    relative: float = 0.0
    scaled: float = 0.0
    beyond: int = 0

    def add(self, actual, expected, scale):
        """Take in a chunk of float64 numbers. Returns its scaled errors; a NaN is infinitely off.

        Equal infinities are equal; nothing equals a NaN.
        """
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.where(actual == expected, 0.0, np.abs(actual - expected))
            error[np.isnan(error)] = np.inf
            relative = np.where(error > 0, error / np.abs(expected), 0.0)
            scaled = np.where(error > self.resolution, error / scale, 0.0)
        for ratio in (relative, scaled):  # inf ÷ inf, inf ÷ NaN
            ratio[np.isnan(ratio)] = np.inf
        self.absolute = max(self.absolute, float(error.max(initial=0.0)))
        self.relative = max(self.relative, float(relative.max(initial=0.0)))
        self.scaled = max(self.scaled, float(scaled.max(initial=0.0)))
        self.beyond += int(np.count_nonzero(scaled > self.tolerance))
        return scaled


@dataclass(frozen=True)
class Worst:
    """The element of ours furthest from the truth, in units of its scale."""

    index: tuple
    inputs: dict  # {name: number}, of the inputs that have an element at this index
    ours: float
    peer: float | None
    truth: float


@dataclass
class Comparison:
    """What `compare` found: errors of ours and of PyTorch, and how far the two are apart."""

    title: str
    tolerance: float
    scale_in_words: str
    resolution: float = 0.0
    n_elements: int = 0
    alone: bool = False  # PyTorch is not installed
    ours: Errors = field(init=False)
    peer: Errors = field(init=False)
    apart: Errors = field(init=False)
    worst: Worst | None = None
    _worst_error: float = -1.0

    def __post_init__(self):
        both = self.tolerance, self.resolution
        self.ours, self.peer, self.apart = (Errors(*both) for _ in range(3))

    @property
    def right(self):
        """Whether every element of ours is within the tolerance."""
        return self.ours.beyond == 0

    def add(self, first_row, inputs, ours, peer, truth, scale):
        """Take in some rows, from `first_row` on: float64 arrays, and {name: what was passed}.

        peer  None where PyTorch is not installed
        """
        scale = np.broadcast_to(scale, truth.shape)
        errors = self.ours.add(ours, truth, scale)
        if peer is None:
            self.alone = True
        else:
            self.peer.add(peer, truth, scale)
            self.apart.add(ours, peer, scale)
        self.n_elements += errors.size
        if not errors.size or errors.max() <= self._worst_error:
            return
        self._worst_error = errors.max()
        at = np.unravel_index(errors.argmax(), errors.shape)
        of_same_shape = {
            name: float(value[at])
            for name, value in inputs.items()
            if isinstance(value, np.ndarray) and value.shape == truth.shape
        }
        index = tuple(int(i) + (first_row if axis == 0 else 0) for axis, i in enumerate(at))
        theirs = None if peer is None else float(peer[at])
        self.worst = Worst(index, of_same_shape, float(ours[at]), theirs, float(truth[at]))

    def __str__(self):
        columns = {
            "ours to float64": self.ours,
            "PyTorch to float64": self.peer,
            "ours to PyTorch": self.apart,
        }
        if self.alone:
            columns = {"ours to float64": self.ours}
        numbers = {
            "largest absolute error": [f"{errors.absolute:.2e}" for errors in columns.values()],
            "largest relative error": [f"{errors.relative:.2e}" for errors in columns.values()],
            "largest error ÷ scale": [f"{errors.scaled:.2e}" for errors in columns.values()],
            f"beyond {self.tolerance:g} · scale": [f"{e.beyond:,}" for e in columns.values()],
        }
        lines = [self.title, " " * 24 + "".join(f"{name:>20}" for name in columns)]
        lines += [f"{name:24}" + "".join(f"{n:>20}" for n in row) for name, row in numbers.items()]
        lines.append(f"scale: {self.scale_in_words}")
        if self.worst is not None:
            found = self.worst
            named = found.inputs | {"ours": found.ours, "PyTorch": found.peer}
            values = [f"{name} {v:.9g}" for name, v in named.items() if v is not None]
            values.append(f"float64 {found.truth:.13g}")
            place = ", ".join(map(str, found.index))
            lines.append(f"worst element [{place}]: {', '.join(values)}")
        if self.right:
            lines.append(f"✓ All {self.n_elements:,} elements of ours are within the tolerance.")
        else:
            lines.append(
                f"✗ {self.ours.beyond:,} of {self.n_elements:,} elements of ours are beyond it."
            )
        return "\n".join(lines)
