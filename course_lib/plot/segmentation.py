"""Pictures of segmented images: what was seen, what is true, what was found."""

import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from .picture import Picture

#: One for each class, all of another lightness; then what is unknown.
CLASS_COLOURS = ("#e9e2cf", "#1f5f99", "#12705a", "#c4621a", "#8a4a7d", "#d8b03c", "#4d4d4d")
UNKNOWN = "#ffffff"
MOST_IMAGES = 8


def segmentation(images, labels, predictions, classes, *, titles=None, title="", alt=None):
    """Draw images, their labels, and a network's answers, a column for each image.

    Args:
        images: float (n, H, W), one band each; drawn from dark to bright.
        labels: int (n, H, W), places in `classes`, −1 where nothing is known.
        predictions: the same of the network.
        classes: names, 7 at most.
        titles: a name for each image.
        title: heading of the whole.
        alt: alternative text; by default how many known pixels of each image are right.

    Raises:
        ValueError: shapes that differ, no image or more than 8, too many classes.
    """
    images, labels, predictions = map(np.asarray, (images, labels, predictions))
    if not images.shape == labels.shape == predictions.shape or images.ndim != 3:
        raise ValueError(
            f"images, labels and predictions must be (n, H, W) of one shape, not {images.shape}, "
            f"{labels.shape} and {predictions.shape}"
        )
    n = len(images)
    if not 1 <= n <= MOST_IMAGES or len(classes) > len(CLASS_COLOURS):
        raise ValueError(
            f"1 to {MOST_IMAGES} images and at most {len(CLASS_COLOURS)} classes are drawn, not "
            f"{n} and {len(classes)}"
        )
    known = labels != -1
    shares = [
        (p[k] == t[k]).mean() if k.any() else float("nan")
        for p, t, k in zip(predictions, labels, known, strict=True)
    ]
    names = titles or [f"image {i}" for i in range(n)]
    alt = alt or "Right pixels: " + ", ".join(
        f"{name} {share:.0%}" for name, share in zip(names, shares, strict=True)
    )
    rows = ("image", "labels", "found")
    figure = Picture(1.0 + 6.3 / n * len(rows) if n > 2 else 9.0, alt)
    panels = figure.subplots(len(rows), n, squeeze=False)
    colours = ListedColormap([UNKNOWN, *CLASS_COLOURS[: len(classes)]])
    options = {"cmap": colours, "vmin": -1.5, "vmax": len(classes) - 0.5, "interpolation": "none"}
    for i in range(n):
        panels[0][i].imshow(images[i], cmap="gray", interpolation="none")
        panels[1][i].imshow(labels[i], **options)
        panels[2][i].imshow(predictions[i], **options)
        panels[0][i].set_title(names[i], fontsize=9)
        panels[2][i].set_xlabel(f"{shares[i]:.0%} of pixels right", fontsize=9)
    for row, name in zip(panels, rows, strict=True):
        row[0].set_ylabel(name)
        for axes in row:
            axes.set(xticks=[], yticks=[])
    patches = [
        Patch(facecolor=c, edgecolor="0.4", label=label)
        for c, label in zip(CLASS_COLOURS, classes, strict=False)
    ]
    patches.append(Patch(facecolor=UNKNOWN, edgecolor="0.4", label="no data"))
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
    if title:
        figure.suptitle(title)
    return figure
