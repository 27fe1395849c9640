"""A scene cut into square tiles.

Tiles lie side by side from the scene's upper left corner, so that each pixel counts once. Where
the last ones reach beyond the scene, they are filled up: the image by 0, the label by no data.
"""

import numpy as np

from .scenes import NO_DATA


def tiles(image, label, size, place=(0, 0)):
    """(images (n, C, size, size), labels (n, size, size), places int64 (n, 2)) of a scene.

    image (C, H, W), label (H, W); `place` is the scene's first pixel, to which places are added.
    """
    height, width = label.shape
    rows, columns = -(-height // size), -(-width // size)
    beyond = (0, rows * size - height), (0, columns * size - width)
    image = np.pad(image, ((0, 0), *beyond))
    label = np.pad(label, beyond, constant_values=NO_DATA)
    images = image.reshape(len(image), rows, size, columns, size).transpose(1, 3, 0, 2, 4)
    labels = label.reshape(rows, size, columns, size).transpose(0, 2, 1, 3)
    places = np.stack(np.mgrid[:rows, :columns], axis=-1) * size + place
    return (
        images.reshape(-1, len(image), size, size),
        labels.reshape(-1, size, size),
        places.reshape(-1, 2).astype(np.int64),
    )
