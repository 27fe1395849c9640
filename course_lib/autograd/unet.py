"""U-Net (Ronneberger, Fischer and Brox, 2015): down to where a pixel sees much, up to where it was.

Each of `depth` steps down doubles the channels and halves height and width; each step up undoes it,
and puts beside its result what the same height had on the way down (the *skip connection*), so that
fine edges need not pass through the bottom. The bottom has initial_channels·2^depth channels.
"""

import numpy as np

from .functions import concat
from .layers import BatchNorm2D, Conv2D, MaxPool2D, Module, ReLU, TransposeConv2D, cropped


class DoubleConv(Module):
    """Twice: 3×3 convolution, batch norm, ReLU. A bias before batch norm would be subtracted."""

    def __init__(self, in_channels, out_channels, use_batchnorm, random):
        self.steps = []
        for c in (in_channels, out_channels):
            bias = not use_batchnorm
            self.steps.append(Conv2D(c, out_channels, 3, padding=1, bias=bias, random=random))
            self.steps += [BatchNorm2D(out_channels)] if use_batchnorm else []
            self.steps.append(ReLU())

    def forward(self, x):
        for step in self.steps:
            x = step(x)
        return x


class UNet(Module):
    """Logits (N, num_classes, H, W) of images (N, in_channels, H, W), on the tape.

    depth             how often height and width are halved, 2 to 5; odd lengths are rounded down,
                      and the way up is padded with zeros to the length it had
    initial_channels  of the first step
    use_batchnorm     normalise after each 3×3 convolution
    random            a `numpy.random.Generator` for the weights; one of seed 0 by default

    Raises ValueError for another depth, and for images smaller than 2^depth pixels. `models.UNet`
    is the same network for PyTorch; their `state_dict`s fit each other.
    """

    def __init__(
        self, in_channels=2, num_classes=2, depth=4, initial_channels=64, use_batchnorm=True,
        random=None,
    ):  # fmt: skip
        if not 2 <= depth <= 5:
            raise ValueError(f"depth must be from 2 to 5, not {depth}")
        random = random or np.random.default_rng(0)
        channels = [initial_channels * 2**i for i in range(depth + 1)]
        self.depth, self.num_classes = depth, num_classes
        self.pool = MaxPool2D(2)
        self.down = [
            DoubleConv(c_in, c, use_batchnorm, random)
            for c_in, c in zip([in_channels, *channels], channels, strict=False)
        ]
        self.up = [TransposeConv2D(2 * c, c, random=random) for c in reversed(channels[:-1])]
        self.merge = [
            DoubleConv(2 * c, c, use_batchnorm, random) for c in reversed(channels[:-1])
        ]
        self.head = Conv2D(initial_channels, num_classes, 1, random=random)

    def forward(self, x):
        if len(x.shape) != 4 or min(x.shape[2:]) < 2**self.depth:
            raise ValueError(
                f"UNet of depth {self.depth} expects (N, C, H, W) of at least {2**self.depth} "
                f"pixels each way, not {x.shape}"
            )
        skips = []
        for down in self.down[:-1]:
            skips.append(down(x))
            x = self.pool(skips[-1])
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            skip = skips.pop()
            x = merge(concat([skip, cropped(up(x), skip.shape[2:])]))
        return self.head(x)

    def __repr__(self):
        channels = self.head.in_channels
        return f"UNet (depth={self.depth}, channels={channels}, classes={self.num_classes})"
