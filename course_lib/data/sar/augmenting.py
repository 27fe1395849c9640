"""A tile turned and mirrored: a river is a river from every side."""

import numpy as np


def augmented(image, label, seed, index):
    """(image, label) turned by quarter turns and mirrored, the same way both: copies.

    image (C, S, S), label (S, S). `seed` and `index` alone choose one of the eight ways; for
    another one in each epoch, count on: index = epoch · number of tiles + place of the tile.
    """
    turns, mirrored = divmod(int(np.random.default_rng([seed, index]).integers(8)), 2)
    return tuple(
        np.ascontiguousarray(np.rot90(array, turns, (-2, -1))[..., :: -1 if mirrored else 1])
        for array in (image, label)
    )
