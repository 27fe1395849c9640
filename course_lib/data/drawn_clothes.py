"""A small set of drawn clothes, in the place of Fashion-MNIST where it is not.

Ten shapes made of trapezoids, each a little moved, stretched, brighter or darker, and noisy. As in
`generated`, every pixel is made of operations that IEEE 754 rounds alike everywhere.
"""

import functools

import numpy as np
import torch

CLASSES = (
    "T-shirt", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag",
    "ankle boot",
)  # fmt: skip
PER_CLASS = {True: 100, False: 20}  # in the training part, and in the test part
SIDE = 28
_SEED = 20_251_122


@functools.cache
def _drawn(train):
    random = np.random.default_rng([_SEED, train])
    labels = np.repeat(np.arange(len(CLASSES)), PER_CLASS[train])
    random.shuffle(labels)
    return np.stack([_draw(random, label) for label in labels]), labels


def drawn(train):
    """(images, labels) of one part: uint8 (N, 28, 28) and int64 (N,)."""
    return tuple(torch.from_numpy(part.copy()) for part in _drawn(train))


def _draw(random, label):
    steps = (np.arange(SIDE) + 0.5) / SIDE * 2 - 1
    x, y = np.meshgrid(steps, steps)
    x = (x - _between(random, -0.1, 0.1)) / _between(random, 0.8, 1.1)
    y = (y - _between(random, -0.08, 0.08)) / _between(random, 0.85, 1.05)
    x = x + _between(random, -0.08, 0.08) * y  # slanted
    shape, dark = SHAPES[label](random, x, y)
    fabric = 0.85 + 0.15 * np.repeat(np.repeat(random.random((7, 7)), 4, 0), 4, 1)
    image = shape * (1 - 0.6 * dark) * fabric * _between(random, 0.5, 1.0)
    image = image + _between(random, 0, 0.05, image.shape)
    return (image.clip(0, 1) * 255 + 0.5).astype(np.uint8)


def _between(random, low, high, shape=None):
    return low + (high - low) * random.random(shape)


def _edge(distance):
    """0 outside, 1 inside, and a ramp of a pixel between them."""
    return (distance * (SIDE / 2) + 0.5).clip(0, 1)


def _part(x, y, top, bottom, width_top, width_bottom, middle=0.0):
    """A trapezoid that stands upright; widths are measured from its middle."""
    share = ((y - top) / (bottom - top)).clip(0, 1)
    width = width_top + (width_bottom - width_top) * share
    return _edge(width - abs(x - middle)) * _edge(y - top) * _edge(bottom - y)


def _union(*parts):
    return functools.reduce(np.maximum, parts)


def _body(random, x, y, bottom):
    width = _between(random, 0.36, 0.48)
    return _part(x, y, -0.8, bottom, width, width * _between(random, 0.95, 1.15))


def _arms(random, x, y, bottom):
    spread = _between(random, 0.55, 0.68)
    arms = [_part(x, y, -0.62, bottom, 0.16, 0.11, side * spread) for side in (-1, 1)]
    return _union(_part(x, y, -0.82, -0.45, 0.35, spread + 0.12), *arms)


def _t_shirt(random, x, y):
    sleeves = _part(x, y, -0.8, _between(random, -0.35, -0.15), 0.45, 0.9)
    return _union(_body(random, x, y, 0.8), sleeves), 0 * x


def _trouser(random, x, y):
    gap = _between(random, 0.2, 0.27)
    legs = [_part(x, y, -0.6, 0.92, 0.21, 0.14, side * gap) for side in (-1, 1)]
    return _union(_part(x, y, -0.92, -0.4, 0.36, 0.44), *legs), 0 * x


def _pullover(random, x, y):
    return _union(_body(random, x, y, 0.75), _arms(random, x, y, 0.7)), 0 * x


def _dress(random, x, y):
    flare = _between(random, 0.4, 0.65)
    top = _part(x, y, -0.92, 0.0, 0.24, 0.18)
    return _union(top, _part(x, y, -0.1, 0.92, 0.2, flare)), 0 * x


def _coat(random, x, y):
    shape = _union(_body(random, x, y, 0.92), _arms(random, x, y, 0.75))
    return shape, _edge(0.05 - abs(x)) * _edge(y + 0.6)


def _sandal(random, x, y):
    heel = _between(random, 0.0, 0.25)
    sole = _edge(0.07 - abs(y - 0.4 + heel * (x < -0.2) * (-x - 0.2))) * _edge(0.85 - abs(x))
    lean = _between(random, 0.6, 1.1)
    straps = [
        _edge(0.06 - abs(x - start + lean * (y - 0.4))) * _edge(y + 0.35) * _edge(0.45 - y)
        for start in (-0.45, 0.1, 0.5)
    ]
    return _union(sole, *straps), 0 * x


def _shirt(random, x, y):
    shape = _union(_body(random, x, y, 0.8), _arms(random, x, y, _between(random, 0.0, 0.6)))
    buttons = _edge(0.05 - abs(x)) * _edge(0.05 - abs((y + 0.7) % 0.35 - 0.17))
    collar = _edge(0.12 - abs(abs(x) - 0.12)) * _edge(-0.6 - y)
    return shape, _union(buttons, collar)


def _shoe(random, x, y, top):
    rise = top + (x + 0.85) / 1.7 * (0.25 - top)  # lower towards the toe
    return _edge(y - rise) * _edge(0.5 - y) * _edge(0.88 - abs(x))


def _sneaker(random, x, y):
    sole = _edge(0.05 - abs(y - 0.4))
    return _shoe(random, x, y, _between(random, -0.3, -0.1)), sole


def _bag(random, x, y):
    top, width = _between(random, -0.35, -0.1), _between(random, 0.6, 0.85)
    away = np.sqrt(x * x + (y - top) * (y - top))
    handle = _edge(0.07 - abs(away - _between(random, 0.35, 0.5))) * _edge(top - y)
    return _union(_part(x, y, top, 0.75, width, width * 1.05), handle), 0 * x


def _ankle_boot(random, x, y):
    shaft = _edge(0.38 - abs(x + 0.48)) * _edge(y - _between(random, -0.9, -0.7)) * _edge(0.5 - y)
    heel = _edge(0.06 - abs(y - 0.44))
    return _union(shaft, _shoe(random, x, y, -0.2)), heel


SHAPES = (
    _t_shirt, _trouser, _pullover, _dress, _coat, _sandal, _shirt, _sneaker, _bag, _ankle_boot,
)  # fmt: skip
