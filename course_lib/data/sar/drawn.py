"""Drawn radar scenes: rivers, lakes, fields, hills with shadows, and speckle.

No threshold finds the water. Smooth fields and the shadows of hills are as dark in VV, wind makes
patches of the water as bright as land, and every scene has a gain of its own. But water is darker
in VH too where wind blows, fields have straight borders, and a shadow lies beside a bright slope.

Where things lie is made of additions, multiplications, divisions, square roots and comparisons
alone, which IEEE 754 rounds alike on every processor: every machine draws the same labels. Speckle
needs a logarithm, whose last bit may differ, so decibels are rounded to hundredths; another
processor's logarithm could change one pixel in some thousand million by a hundredth.
"""

import numpy as np

CLASSES = ("land", "water")
BANDS = ("VV", "VH")
#: How many independent looks a pixel's power is the mean of; 4 to 5 in Sentinel-1's own products.
LOOKS = 4
_SEED = 20_251_203


def draw(number, size, seed=0):
    """Scene `number`: decibels float32 (2, size, size), NaN where there is no data, and labels.

    labels  int8 (size, size): 1 water, 0 land, −1 no data
    """
    random = np.random.default_rng([_SEED, seed, number])
    steps = (np.arange(size) + 0.5) / size * 2 - 1
    x, y = np.broadcast_arrays(steps[None, :], steps[:, None])

    vv, ratio = _fields(random, x, y)
    vv, ratio = _hills(random, x, y, vv, ratio)
    depth = _water(random, x, y)
    water = depth > 0
    vv_water, ratio_water = _surface(random, x, y)
    vv, ratio = np.where(water, vv_water, vv), np.where(water, ratio_water, ratio)
    vv = vv + _between(random, -1, 1)

    decibels = np.stack([vv, vv - ratio]) + _speckle(random, (2, size, size))
    decibels = (np.floor(decibels * 100 + 0.5) / 100).astype(np.float32)
    missing = _missing(random, x, y)
    decibels[:, missing] = np.nan
    return decibels, np.where(missing, -1, water).astype(np.int8)


def _speckle(random, shape):
    """Gamma-distributed factors of mean 1, in decibels: what multiplies power is added here.

    The mean of `LOOKS` exponential variables is gamma-distributed; each is the negative logarithm
    of a uniform one, so that their sum takes one logarithm of a product.
    """
    uniform = 1 - random.random((LOOKS, *shape))  # never 0
    return 10 * np.log10(-np.log(uniform.prod(axis=0)) / LOOKS)


def _fields(random, x, y):
    """VV and VV − VH of the land: parcels between straight lines, woods over some of them."""
    along, across = _turned(random, x, y)
    columns = _parcels(random, along + 0.04 * across)
    rows = _parcels(random, across)
    vv = _between(random, -12.5, -7.5, (16, 16))
    smooth = random.random((16, 16)) < 0.1  # ploughed and rolled, or paved: it reflects away
    vv = np.where(smooth, _between(random, -19.0, -14.5, (16, 16)), vv)
    ratio = _between(random, 5.5, 8.5, (16, 16))
    vv, ratio = vv[rows, columns], ratio[rows, columns]
    woods = _noise(random, x, y, 4) > _between(random, 0.6, 0.8)
    vv, ratio = np.where(woods, -7.5, vv), np.where(woods, 5.5, ratio)
    return vv + 1.5 * (_noise(random, x, y, 7) - 0.5), ratio


def _parcels(random, t):
    """Which of 16 strips of uneven width each place lies in."""
    borders = -1.6 + np.cumsum(_between(random, 0.1, 0.42, 15))
    return (t[..., None] > borders).sum(axis=-1)


def _hills(random, x, y, vv, ratio):
    """Ridges: the slope that faces the radar is bright, and the other lies in its shadow."""
    for _ in range(random.integers(0, 3)):
        cx, cy = _between(random, -0.9, 0.9, 2)
        along, across = _turned(random, x - cx, y - cy)
        across = across + _between(random, -0.3, 0.3) * along * along + 0.05 * (
            _noise(random, x, y, 9) - 0.5
        )
        length, width = _between(random, 0.3, 0.7), _between(random, 0.05, 0.12)
        width = width * (1 - along * along / (length * length))
        slope = (across > -width) & (across <= 0)
        shadow = (across > 0) & (across < 1.2 * width)
        vv = np.where(slope, -4.5, np.where(shadow, _between(random, -21, -17), vv))
        ratio = np.where(slope | shadow, 6.0, ratio)
    return vv, ratio


def _water(random, x, y):
    """Above 0 in water: a winding river in most scenes, and lakes."""
    depth = np.full(x.shape, -1.0)
    if random.random() < 0.75:
        along, across = _turned(random, x, y)
        bend = _between(random, 0.3, 1.0) * (_noise_along(random, along, 5) - 0.5)
        bend = bend + 0.12 * (_noise_along(random, along, 12) - 0.5)
        width = _between(random, 0.06, 0.18) * (0.6 + 0.8 * _noise_along(random, along, 8))
        depth = np.maximum(depth, width - abs(across - _between(random, -0.5, 0.5) - bend))
    for _ in range(random.integers(0, 4)):
        cx, cy = _between(random, -0.9, 0.9, 2)
        along, across = _turned(random, x - cx, y - cy)
        across = across * _between(random, 1.0, 1.8)
        radius = _between(random, 0.15, 0.45) * (0.5 + _noise(random, x, y, 6))
        depth = np.maximum(depth, radius - np.sqrt(along * along + across * across))
    return depth


def _surface(random, x, y):
    """VV and VV − VH of water: dark, but for patches that wind makes rough."""
    calm = _between(random, -22, -18)
    wind = ((_noise(random, x, y, 5) - _between(random, 0.5, 0.75)) * 6).clip(0, 1)
    return calm + (_between(random, -11, -8) - calm) * wind, 5.5 + 7.5 * wind


def _missing(random, x, y):
    """Where there is no data: a few single pixels, and in some scenes beyond the swath's edge."""
    missing = random.random(x.shape) < 0.0005
    if random.random() < 0.15:
        along, _ = _turned(random, x, y)
        missing |= along > _between(random, 0.8, 1.1)
    return missing


def _between(random, low, high, shape=None):
    """Random numbers; `random.uniform` may round differently on a processor that fuses + and ×."""
    return low + (high - low) * random.random(shape)


def _turned(random, x, y):
    """Coordinates along and across a random direction, found without sine and cosine."""
    dx, dy = _between(random, -1, 1, 2)
    length = np.sqrt(dx * dx + dy * dy)
    dx, dy = dx / length, dy / length
    return x * dx + y * dy, y * dx - x * dy


def _noise(random, x, y, cells):
    """Random numbers on a grid of `cells`, and smooth between them; 0 to 1."""
    grid = random.random((cells + 1, cells + 1))
    (left, right), (top, below) = _cell(x, cells), _cell(y, cells)
    upper = grid[top, left] + (grid[top, left + 1] - grid[top, left]) * right
    lower = grid[top + 1, left] + (grid[top + 1, left + 1] - grid[top + 1, left]) * right
    return upper + (lower - upper) * below


def _noise_along(random, t, cells):
    """The same in one dimension, of -1.5 to 1.5."""
    line = random.random(cells + 1)
    left, right = _cell(t / 1.5, cells)
    return line[left] + (line[left + 1] - line[left]) * right


def _cell(t, cells):
    """The cell of −1 to 1 in which t lies, and a smooth step from 0 to 1 across it."""
    place = (t.clip(-1, 1) + 1) / 2 * cells
    first = np.minimum(place.astype(np.int64), cells - 1)
    t = place - first
    return first, t * t * (3 - 2 * t)
