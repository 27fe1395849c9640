"""Parts to train on and to validate with, which share no scene, or stand apart in one scene.

Neighbouring pixels are alike: a network that has seen those beside a pixel knows the pixel. So
tiles of one scene are all on one side; and where there is but one scene, the sides are separate
blocks of it, with a gap between them.
"""

import hashlib
from dataclasses import replace

import numpy as np

from ..layouts import DataError
from .scenes import NO_DATA

#: How many pixels lie unused between the two blocks of a single scene.
GAP = 32
#: How far a block's share of the labelled pixels may be from the nearest that there is.
SHARE_SLACK = 0.1


def split(scenes, train_ratio=0.8, seed=0, gap=GAP):
    """(training part, validation part) of `SarScenes`.

    Of several scenes, `train_ratio` of the scenes are for training: which, a hash of each name and
    the seed says alone. Of a single one, whole rows or columns of tiles are for validation, those
    of `blocks`; training tiles lose the pixels that are within `gap` of them.

    Raises DataError where there is too little to split, ValueError for a senseless argument.
    """
    if not 0 < train_ratio < 1:
        raise ValueError(f"train_ratio must be between 0 and 1, such as 0.8; not {train_ratio!r}")
    names = sorted(set(scenes.scenes), key=lambda name: _drawn(seed, name))
    if len(names) == 1:
        return _in_blocks(scenes, 1 - train_ratio, seed, gap)
    n = min(max(round((1 - train_ratio) * len(names)), 1), len(names) - 1)
    parts = leave_out(scenes, names[:n])
    for part, purpose in zip(parts, ("training", "validation"), strict=True):
        if not part.class_counts().any():
            raise DataError(
                f"No scene for {purpose} has a labelled pixel, of {', '.join(sorted(names))}: take "
                "another seed, or more scenes."
            )
    return parts


def folds(scenes, k=None):
    """k tuples of scene names, each to be left out once; together they are all scenes.

    The names in their order are cut into k runs, whose lengths differ by 1 at most: names that
    begin alike, as of one flood or one country, mostly stay together. None: each scene alone.
    """
    names = sorted(set(scenes.scenes))
    k = len(names) if k is None else k
    if not isinstance(k, int) or not 2 <= k <= len(names):
        raise ValueError(f"k must be 2 to {len(names)}, the number of scenes; not {k!r}")
    borders = [len(names) * i // k for i in range(k + 1)]
    return tuple(tuple(names[i:j]) for i, j in zip(borders, borders[1:], strict=False))


def leave_out(scenes, names):
    """(the other tiles, the tiles of the scenes named), as the parts of one fold."""
    unknown = set(names) - set(scenes.scenes)
    if unknown:
        raise ValueError(f"there is no scene {min(unknown)!r} to leave out")
    out = np.array([name in set(names) for name in scenes.scenes])
    if out.all() or not out.any():
        raise ValueError("one scene at least must be left out, and one must stay")
    return scenes.take(~out), scenes.take(out)


def _drawn(seed, what):
    return hashlib.sha256(f"{seed}/{what}".encode()).digest()


def _in_blocks(scenes, share, seed, gap):
    """The parts of a single scene; the block for validation runs from one edge to another.

    Of all such blocks those are taken that leave most classes on both sides, and of these the ones
    whose share of the labelled pixels is nearest to `share`; the seed draws one of them.
    """
    if not isinstance(gap, int) or isinstance(gap, bool) or gap < 0:
        raise ValueError(f"gap must be a number of pixels, 0 or more; not {gap!r}")
    counts = [_counts_by_line(scenes, axis) for axis in (0, 1)]
    candidates = []
    for axis, first, last in _blocks(scenes, share):
        lines = counts[axis]
        validation = lines[first:last].sum(axis=0)
        training = lines.sum(axis=0) - lines[max(first - gap, 0) : last + gap].sum(axis=0)
        if training.any() and validation.any():
            both = int(((training > 0) & (validation > 0)).sum())
            held = validation.sum() / (training.sum() + validation.sum())
            candidates.append((both, abs(held - share), (axis, first, last)))
    if not candidates:
        raise DataError(
            f"{scenes.scenes[0]} is one scene of {len(scenes)} tiles, which cannot be parted into "
            f"two labelled blocks {gap} pixels apart: take smaller tiles, or more scenes."
        )
    most = max(both for both, _, _ in candidates)
    nearest = min(off for both, off, _ in candidates if both == most)
    left = [
        block for both, off, block in candidates if both == most and off <= nearest + SHARE_SLACK
    ]
    return _sides(scenes, *min(left, key=lambda block: _drawn(seed, block)), gap)


def _blocks(scenes, share):
    """(axis, first row or column, last + 1) of every block that could be for validation."""
    size = scenes.labels.shape[1]
    for axis in (0, 1):
        starts = np.unique(scenes.places[:, axis]).tolist()
        n = min(max(round(share * len(starts)), 1), len(starts) - 1)
        for i in range(len(starts) - n + 1 if n else 0):
            yield axis, starts[i], starts[i + n - 1] + size


def _counts_by_line(scenes, axis):
    """int64 (rows or columns of the scene, classes): how many pixels of each class each has."""
    n_classes = len(scenes.classes)
    lines = scenes.places[:, axis, None] + np.arange(scenes.labels.shape[1])
    lines = lines[:, :, None] if axis == 0 else lines[:, None, :]
    labelled = scenes.labels != NO_DATA
    keys = (lines * n_classes + scenes.labels)[labelled]
    n_lines = lines.max() + 1
    return np.bincount(keys, minlength=n_lines * n_classes).reshape(n_lines, n_classes)


def _sides(scenes, axis, first, last, gap):
    """(training, validation) for one block; training tiles without a pixel left are dropped."""
    size = scenes.labels.shape[1]
    starts = scenes.places[:, axis]
    inside = (starts >= first) & (starts < last)
    training = scenes.take(~inside)
    along = training.places[:, axis, None] + np.arange(size)
    near = (along >= first - gap) & (along < last + gap)  # (n, size): rows or columns to blank
    near = np.broadcast_to(
        near[:, :, None] if axis == 0 else near[:, None, :], training.labels.shape
    )
    training = replace(
        training,
        images=np.where(near[:, None], np.float32(0), training.images),
        labels=np.where(near, NO_DATA, training.labels),
    )
    return training.take(~near.all(axis=(1, 2))), scenes.take(inside)
