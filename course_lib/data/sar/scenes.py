"""Labelled radar scenes, cut into tiles of one size."""

import hashlib
from dataclasses import dataclass, replace

import numpy as np

#: The class of a pixel without data, or without a label: it counts in no loss and no score.
NO_DATA = -1


@dataclass(frozen=True, eq=False)
class SarScenes:
    """Tiles and what is known of each; `take` makes a part of them.

    images      float32 (n, C, H, W), prepared as `intensity` tells; 0 where there is no data
    labels      int64 (n, H, W): places in `classes`, −1 where there is no data
    scenes      the name of the scene that each tile was cut from
    places      int64 (n, 2): the row and the column of each tile's first pixel within its scene
    classes     the classes' names
    bands       the bands' names
    not_finite  {scene: its pixels that were NaN or infinite in a band, or 0 dB in all}, if any
    """

    images: np.ndarray
    labels: np.ndarray
    scenes: tuple[str, ...]
    places: np.ndarray
    classes: tuple[str, ...]
    bands: tuple[str, ...]
    not_finite: dict[str, int]

    def __len__(self):
        return len(self.scenes)

    def take(self, which):
        """The tiles at these places, as copies: `which` is an array of places or of truth."""
        which = np.asarray(which)
        chosen = np.flatnonzero(which) if which.dtype == bool else which.astype(np.int64)
        scenes = tuple(self.scenes[i] for i in chosen)
        return replace(
            self,
            images=self.images[chosen],
            labels=self.labels[chosen],
            scenes=scenes,
            places=self.places[chosen],
            not_finite={name: n for name, n in self.not_finite.items() if name in scenes},
        )

    def class_counts(self):
        """How many pixels each class has: int64 (classes,). Those without data are not counted."""
        labelled = self.labels[self.labels != NO_DATA]
        return np.bincount(labelled, minlength=len(self.classes))

    def digest(self):
        """A hash of names, classes, labels and pixels: two sets with the same are the same."""
        names = (self.scenes, self.places.tolist(), self.classes, self.bands, self.images.shape)
        content = hashlib.sha256(repr(names).encode())
        content.update(np.ascontiguousarray(self.labels))
        content.update(np.ascontiguousarray(self.images))
        return content.hexdigest()
