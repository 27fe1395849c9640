"""Any source of radar scenes, as tiles that a network can train on."""

from pathlib import Path

import numpy as np

from ..layouts import DataError
from . import drawn, intensity, pairs, tile_file
from .labels import LabelCode
from .scenes import NO_DATA, SarScenes
from .source import Raw, Source
from .tiling import tiles


def load(
    source=None, labels=None, *, image_size=64, n_scenes=64, seed=0, num_classes=None,
    ignore_label=None, label_colours=None, unit=None, normalize=True, progress=None,
):  # fmt: skip
    """Radar scenes and what covers each pixel, as `SarScenes`.

    source         None: drawn scenes of land and water, `n_scenes` of them from `seed`, each one
                   tile; see `drawn`.
                   A file .npz, or a folder that holds one: tiles of Sentinel-1 chips; see
                   `tile_file`.
                   A folder: pairs of images and labels as .npy, .png or .tif, Sen1Floods11's chips
                   among them; see `pairs`. An image is (C, H, W), (H, W, C) or (H, W), its label
                   (H, W).
                   An image file: one scene, whose label is the file `labels`
    labels         the file or the folder of the labels, where they do not lie as `pairs` tells
    image_size     the height and width of a tile; see `tiling`
    num_classes    how many classes there are; None: 2, or as many as `label_colours` tells of
    ignore_label   the label that means no data, besides −1; classes are numbered without it
    label_colours  {colour: label} where labels are coloured PNGs: "#rrggbb" or (red, green, blue)
    unit           what an image's numbers are: "decibels", "power" (made decibels of), "grey" (0 to
                   the largest of its type) or "as_is". None: decibels where they are
                   floating-point, grey where they are unsigned integers
    normalize      clip and scale decibels and grey values as `intensity` tells; False: do not
    progress       called as tqdm is, around the scenes being read

    A pixel that is NaN or infinite in any band, or exactly 0 dB in all, as beyond a swath's edge,
    has no data and is counted in `not_finite`. All tiles are kept in memory: 400 scenes of two
    bands and 512 × 512 pixels take 1.7 GB.

    Raises DataError, which names the file and what to do, and ValueError for a senseless argument.
    """
    for name, number in (("image_size", image_size), ("n_scenes", n_scenes)):
        if not isinstance(number, int) or isinstance(number, bool) or number < 1:
            raise ValueError(f"{name} must be a whole number, 1 or more; not {number!r}")
    if unit is not None and unit not in intensity.MEANS:
        raise ValueError(f"unit must be one of {', '.join(intensity.MEANS)}; not {unit!r}")
    code = LabelCode(num_classes, ignore_label, label_colours)
    if source is not None:
        found = _stored(Path(source).expanduser(), labels, code)
    elif labels is None:
        found = _drawn(image_size, n_scenes, seed)
    else:
        raise ValueError(f"labels must be None where scenes are drawn, not {labels!r}")
    if found.unit is not None and unit not in (None, found.unit):
        raise ValueError(f"unit must be {found.unit!r} here, not {unit!r}")
    unit = unit or found.unit

    scenes = found.read()
    if progress is not None:
        scenes = progress(scenes, total=found.n_scenes, unit=" scenes", leave=False)
    parts, names, not_finite, first = [], [], {}, None
    for raw in scenes:
        label = code.read(raw.label, raw.label_name)
        image = intensity.bands_first(raw.image, label, raw.image_name, raw.label_name)
        if found.bands and len(image) != len(found.bands):
            raise DataError(
                f"{raw.image_name} has the shape {image.shape}: expected the bands "
                f"{' and '.join(found.bands)}."
            )
        kind = len(image), unit or intensity.unit_of(image, raw.image_name)
        first = first or (kind, raw.image_name)
        if kind != first[0]:
            raise DataError(
                f"{raw.image_name} has {_described(*kind)}, where {first[1]} has "
                f"{_described(*first[0])}: all scenes must have the same."
            )
        image, missing = intensity.prepared(image, kind[1], normalize, raw.image_name)
        if missing.any():
            not_finite[raw.name] = not_finite.get(raw.name, 0) + int(missing.sum())
        parts.append(tiles(image, np.where(missing, NO_DATA, label), image_size, raw.place))
        names += [raw.name] * len(parts[-1][0])
    images, classes, places = (np.concatenate(part) for part in zip(*parts, strict=True))
    if (classes == NO_DATA).all():
        raise DataError(f"{source} has no labelled pixel: every label means no data.")
    bands = found.bands or tuple(f"band {number}" for number in range(1, images.shape[1] + 1))
    return SarScenes(
        images, classes, tuple(names), places, _class_names(code, found), bands, not_finite
    )


def _stored(path, labels, code):
    if not path.exists():
        raise DataError(f"There is no {path}: name a folder of images and labels, or a file.")
    tiles_in = sorted(path.glob("*.npz")) if path.is_dir() else [path]
    if len(tiles_in) != 1 or tiles_in[0].suffix.lower() != ".npz":
        return pairs.source(path, labels, coloured=code.colours is not None)
    if labels is not None:
        raise ValueError(f"labels must be None where {tiles_in[0]} holds them, not {labels!r}")
    return tile_file.source(tiles_in[0])


def _drawn(image_size, n_scenes, seed):
    def read():
        for number in range(n_scenes):
            name = f"drawn/{number:03d}"
            yield Raw(name, *drawn.draw(number, image_size, seed), name, name)

    return Source(n_scenes, read, drawn.CLASSES, drawn.BANDS, "decibels")


def _class_names(code, found):
    """The names that the source has for its labels; the label itself where it has none."""
    known = dict(enumerate(found.classes))
    return tuple(known.get(label, str(label)) for label in code.labels)


def _described(n_bands, unit):
    return f"{n_bands} band{'s' * (n_bands != 1)} of unit {unit!r}"
