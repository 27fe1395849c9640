"""Inputs that tell right kernels from wrong ones."""

from __future__ import annotations

import numpy as np


def numbers(
    rng: np.random.Generator,
    shape: int | tuple[int, ...],
    scale: float = 1.0,
    offset: float = 0.0,
    dtype: np.dtype = np.float32,
) -> np.ndarray:
    """Return asymmetric random numbers: a long tail above, the mean below `offset`.

    No two elements are equal in practice, so that a value at a wrong place shows.
    """
    values = np.asarray(rng.gamma(2.0, 1.0, shape) - 2.5)  # mean -0.5, long tail above
    return (offset + scale * values).astype(dtype)


def spread(rng: np.random.Generator, shape: int | tuple[int, ...]) -> np.ndarray:
    """Return float32 numbers of both signs and every scale from 1e-6 to 1e4, with two zeros."""
    values = np.asarray(10.0 ** rng.uniform(-6, 4, shape) * rng.choice([-1.0, 1.0], shape))
    return with_zeros(rng, values.astype(np.float32))


def with_zeros(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """Return `values` with a zero of either sign at two random places, if it has more."""
    if values.size > 2:
        values.flat[rng.choice(values.size, 2, replace=False)] = 0.0, -0.0
    return values


def extremes(rng: np.random.Generator, values: np.ndarray) -> np.ndarray:
    """Return `values` with both infinities and numbers near float32's largest, at random places."""
    if values.size >= 8:
        places = rng.choice(values.size, 4, replace=False)
        huge = 3e38 + 3e37 * rng.random()
        values.flat[places] = np.inf, -np.inf, huge, -huge
    return values


def drawn(rng: np.random.Generator, least: int, most: int) -> int:
    """Return a size that nobody can have fixed: from `least` to `most`."""
    return int(rng.integers(least, most + 1))


def guarded(rng: np.random.Generator) -> list[tuple[int, int, int]]:
    """Return launches of a guarded kernel as (n, grid, block), the last one large and drawn."""
    return [*GUARDED, (drawn(rng, 530, 1000), 2, 512)]


#: Launches of a guarded kernel on n elements, as (n, grid, block): nothing to do, one element, one
#: thread per element exactly, and more threads than elements in the last block or in most of them.
GUARDED = (
    (0, 1, 32),
    (1, 1, 1),
    (1, 1, 32),
    (2, 2, 1),
    (5, 1, 8),
    (31, 1, 32),
    (33, 2, 32),
    (64, 2, 32),
    (65, 3, 32),
    (70, 5, 16),
    (97, 1, 128),
    (100, 10, 33),
    (257, 3, 96),
)
