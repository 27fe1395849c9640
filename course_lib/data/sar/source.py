"""What every source of scenes yields, before anything is made of it."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


class Source(NamedTuple):
    """Scenes that can be read one after another.

    n_scenes  how many there are to read
    read      yields them, each a `Raw`
    classes   the names of labels 0, 1, …; empty where the source does not know them
    bands     the bands' names; empty where it does not know them
    unit      what the pixels are, or None where their type tells; see `intensity`
    """

    n_scenes: int
    read: object
    classes: tuple[str, ...] = ()
    bands: tuple[str, ...] = ()
    unit: str | None = None


@dataclass(frozen=True, eq=False)
class Raw:
    """One scene, or a tile of one, as it was read.

    image, label            arrays as they are stored
    image_name, label_name  what an error calls them: the paths of their files
    place                   the row and the column of its first pixel within the scene
    """

    name: str
    image: np.ndarray
    label: np.ndarray
    image_name: str
    label_name: str
    place: tuple[int, int] = (0, 0)
