"""A small set of drawn leaves: healthy, or with one of four diseases.

Colour alone does not tell the classes apart: leaves, soil and light vary more from image to image
than a disease changes their mean, and every image has brown crumbs beside the leaf.

Every pixel is made of additions, multiplications, divisions, square roots and comparisons alone.
IEEE 754 rounds these alike on every processor, so every machine draws the same bytes.
"""

import numpy as np
import torch

CLASSES = ("blight", "healthy", "mosaic", "rust", "spots")
PER_CLASS = 100
_SEED = 20_240_607  # of the drawing; the seed of `leaves` only splits


def items():
    """[(name, label, (label, number))] of every image, as `layouts.find` lists files."""
    return [
        (f"{name}/{number:03d}", label, (label, number))
        for label, name in enumerate(CLASSES)
        for number in range(PER_CLASS)
    ]


def draw(which, size):
    """Image `which` = (label, number) as uint8 (3, size, size)."""
    random = np.random.default_rng([_SEED, *which])
    steps = (np.arange(size) + 0.5) / size * 2 - 1
    x, y = np.broadcast_arrays(steps[None, :], steps[:, None])

    image = _soil(random, x, y)
    along, across, rim = _outline(random, x, y)
    leaf = _leaf(random, along, across)
    leaf = DISEASES[CLASSES[which[0]]](random, leaf, x, y, rim)
    image = image * (1 - 0.5 * _shadow(rim, size))
    image = _blend(image, leaf, _edge(rim, 24))
    light = 1 + _between(random, -0.35, 0.35) * x + _between(random, -0.35, 0.35) * y
    image = image * light * _between(random, 0.75, 1.2) + _between(random, -0.04, 0.04, image.shape)
    return torch.from_numpy((image.clip(0, 1) * 255 + 0.5).astype(np.uint8))


def _soil(random, x, y):
    """The ground: grey, brown or bluish, mottled, with crumbs as brown as any spot."""
    colour = _between(random, 0.25, 0.7) + _between(random, -0.07, 0.07, 3)
    ground = _flat(colour, x) * (0.8 + 0.4 * _noise(random, x, y, 9))
    crumbs = _dots(random, x, y, 8, _between(random, 0, 0.4), 0.02, 0.08)
    return _blend(ground, _flat(_brown(random), x), crumbs)


def _outline(random, x, y):
    """Coordinates along and across the leaf, and `rim`: above 0 within it, most in the middle."""
    # A random direction without sine and cosine.
    dx, dy = _between(random, -1, 1, 2)
    length = np.sqrt(dx * dx + dy * dy)
    dx, dy = dx / length, dy / length
    x, y = x - _between(random, -0.15, 0.15), y - _between(random, -0.15, 0.15)
    scale = _between(random, 0.8, 1.1)
    along, across = (x * dx + y * dy) / scale, (y * dx - x * dy) / scale
    across = across + _between(random, -0.25, 0.25) * (along * along - 0.4)  # bent
    width = _between(random, 0.4, 0.65) * (1 + _between(random, -0.5, 0.5) * along)
    width = width * (1 - along * along)
    teeth = _between(random, 0, 0.06) * _wave(along * _between(random, 5, 9))
    rim = np.where(abs(along) < 1, width - abs(across) - teeth, -1.0)
    return along, across, rim


def _leaf(random, along, across):
    """The leaf's own green with its veins: from dark to yellowish, as leaves differ."""
    green = _between(random, 0.35, 0.7)
    colour = np.array(
        [green * _between(random, 0.35, 0.95), green, green * _between(random, 0.2, 0.6)]
    )
    surface = _flat(colour, along) * (0.8 + 0.4 * _noise(random, along, across, 7))
    slant = _between(random, 0.5, 1.2)
    side = _wave((along - slant * abs(across)) * _between(random, 3.5, 6))
    veins = np.maximum(_edge(0.018 - abs(across), 60), 0.5 * _edge(side - 0.86, 8))
    return _blend(surface, surface * _between(random, 1.15, 1.5), veins)


def _healthy(random, leaf, x, y, rim):
    # Dull patches of dust and light: no leaf is spotless.
    dust = 0.3 * _edge(_noise(random, x, y, 4) - 0.6, 6)
    return _blend(leaf, _flat(_between(random, 0.5, 0.8, 3), x), dust)


def _spots(random, leaf, x, y, rim):
    halo, core = _rings(random, x, y)
    leaf = _blend(leaf, _flat([0.75, 0.7, 0.2], x), 0.8 * halo)
    return _blend(leaf, _flat(_brown(random), x), core)


def _rust(random, leaf, x, y, rim):
    orange = [_between(random, 0.7, 0.9), _between(random, 0.25, 0.4), _between(random, 0.05, 0.15)]
    pustules = _dots(random, x, y, 14, _between(random, 0.5, 0.9), 0.02, 0.045)
    return _blend(leaf, _flat(orange, x), pustules)


def _mosaic(random, leaf, x, y, rim):
    pale = leaf * _between(random, 1.1, 1.3) + np.array([0.18, 0.16, 0.02])[:, None, None]
    return _blend(leaf, pale, _edge(_noise(random, x, y, random.integers(7, 11)) - 0.5, 14))


def _blight(random, leaf, x, y, rim):
    """Dead tissue that eats its way in from the rim, on one side."""
    side = _between(random, -1, 1, 2)
    reach = _between(random, 0.1, 0.25) + 0.35 * (_noise(random, x, y, 5) - 0.5)
    reach = reach + 0.2 * (side[0] * x + side[1] * y)
    dead = _edge(reach - rim, 12)
    return _blend(leaf, _flat(_brown(random), x) * (0.7 + 0.6 * _noise(random, x, y, 13)), dead)


DISEASES = {
    "blight": _blight, "healthy": _healthy, "mosaic": _mosaic, "rust": _rust, "spots": _spots,
}  # fmt: skip


def _between(random, low, high, shape=None):
    """Random numbers; `random.uniform` may round differently on a processor that fuses + and ×."""
    return np.asarray(low) + np.subtract(high, low) * random.random(shape)


def _brown(random):
    shade = _between(random, 0.2, 0.45)
    return np.array(
        [shade, shade * _between(random, 0.55, 0.8), shade * _between(random, 0.3, 0.6)]
    )


def _flat(colour, like):
    """An image of one colour."""
    return np.asarray(colour)[:, None, None] * np.ones_like(like)


def _blend(below, above, amount):
    return below + (above - below) * amount


def _edge(distance, sharpness):
    """0 where `distance` is negative, 1 where it is large, with a ramp between."""
    return (distance * sharpness).clip(0, 1)


def _wave(t):
    """A zigzag of period 1 between 0 and 1."""
    return 2 * abs(t - np.floor(t) - 0.5)


def _noise(random, x, y, cells):
    """Random numbers on a grid of `cells`, and smooth between them; 0 to 1."""
    grid = random.random((cells + 1, cells + 1))
    column, row = ((t.clip(-1, 1) + 1) / 2 * cells for t in (x, y))
    left, top = (np.minimum(t.astype(np.int64), cells - 1) for t in (column, row))
    right, below = (t * t * (3 - 2 * t) for t in (column - left, row - top))
    upper = _blend(grid[top, left], grid[top, left + 1], right)
    lower = _blend(grid[top + 1, left], grid[top + 1, left + 1], right)
    return _blend(upper, lower, below)


def _rings(random, x, y):
    """A few round spots with the halo around each, as two masks."""
    halo, core = np.zeros_like(x), np.zeros_like(x)
    count = random.integers(6, 13)
    for cx, cy, size in _between(random, (-0.8, -0.8, 0.05), (0.8, 0.8, 0.11), (count, 3)):
        distance = np.sqrt((x - cx) * (x - cx) + (y - cy) * (y - cy))
        halo = np.maximum(halo, _edge(size * 1.7 - distance, 20))
        core = np.maximum(core, _edge(size - distance, 30))
    return halo, core


def _dots(random, x, y, cells, share, smallest, largest):
    """Many small dots, as a mask: one in some of the squares of a grid, their `share` of all."""
    cx, cy = random.random((2, cells + 2, cells + 2))
    radius = _between(random, smallest, largest, cx.shape) * cells / 2
    radius = np.where(random.random(cx.shape) < share, radius, -1.0)
    column, row = ((t + 1) / 2 * cells + 1 for t in (x, y))
    left, top = (np.floor(t).astype(np.int64).clip(1, cells) for t in (column, row))
    mask = np.zeros_like(x)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            i, j = top + down, left + right
            dx, dy = column - j - cx[i, j], row - i - cy[i, j]
            distance = np.sqrt(dx * dx + dy * dy)
            mask = np.maximum(mask, _edge(radius[i, j] - distance, 60 / cells))
    return mask


def _shadow(rim, size):
    """The leaf's shape, moved by a twentieth of the image."""
    return np.roll(_edge(rim, 12), max(1, size // 20), axis=(0, 1))
