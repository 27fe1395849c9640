"""Batches of images changed at random, on the device they lie on.

What is random is drawn on the CPU from the place in the run alone: every device draws the same, and
a run that goes on after a stop draws what it would have drawn.
"""

import random

import torch
from torch.nn.functional import pad

from .randomness import seed_of

#: Of ImageNet's images, from 0 to 1: what networks for photographs are trained with.
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class Normalise:
    """Bytes (N, 3, H, W) as float32 numbers with mean 0 and deviation 1, channel by channel.

    mean, std     of the images' channels, where white is 1
    memory_format of what comes out
    """

    def __init__(self, place, mean=MEAN, std=STD, memory_format=torch.contiguous_format):
        mean, std = (torch.tensor(each).view(-1, 1, 1).to(place) for each in (mean, std))
        self.factor, self.shift = 1 / (255 * std), -mean / std
        self.memory_format = memory_format

    def __call__(self, images):
        x = images.to(torch.float32, memory_format=self.memory_format, copy=True)
        return x.mul_(self.factor).add_(self.shift)


def drawn(n, padding, *place):
    """Where each of `n` images is cropped, and whether it is flipped: int64 (n, 3).

    The first two numbers, rows and columns, lie from 0 to 2 · padding, the last is 0 or 1.
    """
    generator = torch.Generator().manual_seed(seed_of(*place))
    crops = torch.randint(2 * padding + 1, (n, 2), generator=generator)
    return torch.cat([crops, torch.randint(2, (n, 1), generator=generator)], 1)


def cropped_and_flipped(images, draws, padding):
    """uint8 (N, C, H, W) with `padding` black pixels around, cut out as `draws` say; same shape."""
    n, _, height, width = images.shape
    if padding:
        images = pad(images, [padding] * 4)
    down, right, flip = draws[:, :, None].unbind(1)
    rows = down + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device)
    columns = right + torch.where(flip == 1, width - 1 - columns, columns)
    which = torch.arange(n, device=images.device)[:, None, None]
    # The indices come first in what is found: (N, H, W, C), channels-last.
    return images[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def mixing(mixup, cutmix, size, *place):
    """How a batch of images of `size` is mixed: six numbers, as `mixed` takes them.

    mixup, cutmix  the alpha of each one's beta distribution; 0: it is not used. With both, a batch
                   takes one or the other, as often

    Zhang et al., "mixup: Beyond Empirical Risk Minimization" (2017); Yun et al., "CutMix" (2019).
    """
    chance = random.Random(seed_of(*place))
    kind = chance.choice([name for name, alpha in (("mixup", mixup), ("cutmix", cutmix)) if alpha])
    alpha = mixup if kind == "mixup" else cutmix
    share, corner = chance.betavariate(alpha, alpha), (chance.random(), chance.random())
    if kind == "mixup":
        return [share, share, 0, 0, 0, 0]
    side = (1 - share) ** 0.5  # a box of 1 − share of the area, its middle anywhere
    top, bottom = _edges(corner[0], side, size[0])
    left, right = _edges(corner[1], side, size[1])
    own = 1 - (bottom - top) * (right - left) / (size[0] * size[1])
    return [own, 1.0, top, bottom, left, right]


def _edges(middle, side, length):
    middle, half = int(middle * length), int(side * length) // 2
    return max(0, middle - half), min(length, middle + half)


def mixed(x, mix):
    """x (N, C, H, W) with a part of each image from the one before it.

    mix  float32 (N, 6): the share of an image's own label (its partner's is ``labels.roll(1)``),
         the weight of its own pixels, and, in pixels, the top, bottom, left and right of a box in
         which all are the other's
    """
    weight, top, bottom, left, right = mix[:, 1:, None].unbind(1)
    rows, columns = (torch.arange(length, device=x.device) for length in x.shape[2:])
    down, across = (rows >= top) & (rows < bottom), (columns >= left) & (columns < right)
    inside = down[:, :, None] & across[:, None, :]
    weight = weight[:, :, None] * ~inside
    return torch.lerp(x.roll(1, 0), x, weight[:, None])


class FromBytes(torch.nn.Module):
    """A network that takes bytes, and what is drawn for them: they are cropped, flipped, normalised
    and mixed on the device, and in the CUDA graph where a step is captured."""

    def __init__(self, network, prepare, padding):
        super().__init__()
        self.network, self.prepare, self.padding = network, prepare, padding

    def forward(self, images, draws, mix=None):
        x = self.prepare(cropped_and_flipped(images, draws, self.padding))
        return self.network(x if mix is None else mixed(x, mix))
