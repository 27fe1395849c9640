"""U-Net (Ronneberger, Fischer and Brox, 2015) for PyTorch, on our layers or on PyTorch's own.

The twin of `autograd.UNet`, where what it computes is told: their parameters have the same names
and shapes, so that weights move from any one to any other (`train.save_weights`).
"""

import numpy as np
import torch
import torch.nn.functional as F

from course_lib import nn
from course_lib.models.steps import Steps, require_images
from course_lib.models.weights import load_arrays

torch.fx.wrap("require_images")


class DoubleConv(torch.nn.Module):
    """Twice: 3×3 convolution, batch norm, ReLU. A bias before batch norm would be subtracted."""

    def __init__(self, in_channels, out_channels, use_batchnorm, layers):
        super().__init__()
        steps = []
        for c in (in_channels, out_channels):
            steps.append(layers.Conv2d(c, out_channels, 3, padding=1, bias=not use_batchnorm))
            steps += [layers.BatchNorm2d(out_channels)] if use_batchnorm else []
            steps.append(layers.ReLU())
        self.steps = Steps(*steps)

    def forward(self, x):
        return self.steps(x)


class UNet(torch.nn.Module):
    """Logits (N, num_classes, H, W) of images (N, in_channels, H, W).

    depth             how often height and width are halved, 2 to 5; odd lengths are rounded down,
                      and the way up is padded with zeros to the length it had
    initial_channels  of the first step; the bottom has 2^depth times as many
    use_batchnorm     normalise after each 3×3 convolution
    layers            whose layers: `course_lib.nn`, or `torch.nn` for PyTorch's own. Both kinds of
                      network have the same state_dict, and the same first weights from one seed

    Raises ValueError for another depth, and for images of other channels or smaller than 2^depth
    pixels. Takes channels-last images, and autocast, as any network of PyTorch's.
    """

    def __init__(
        self, in_channels=2, num_classes=2, depth=4, initial_channels=64, use_batchnorm=True,
        layers=nn,
    ):  # fmt: skip
        if not 2 <= depth <= 5:
            raise ValueError(f"depth must be from 2 to 5, not {depth}")
        super().__init__()
        channels = [initial_channels * 2**i for i in range(depth + 1)]
        self.depth, self.in_channels, self.num_classes = depth, in_channels, num_classes
        self.pool = layers.MaxPool2d(2)
        self.down = torch.nn.ModuleList(
            DoubleConv(c_in, c, use_batchnorm, layers)
            for c_in, c in zip([in_channels, *channels], channels, strict=False)
        )
        self.up = torch.nn.ModuleList(
            layers.ConvTranspose2d(2 * c, c, 2, stride=2) for c in reversed(channels[:-1])
        )
        self.merge = torch.nn.ModuleList(
            DoubleConv(2 * c, c, use_batchnorm, layers) for c in reversed(channels[:-1])
        )
        self.head = layers.Conv2d(initial_channels, num_classes, 1)

    @classmethod
    def of_weights(cls, state, layers=nn):
        """The network that `state`, a state_dict of any of the three kinds, is of, with it in it.

        Raises ValueError where `state` is of no U-Net.
        """
        try:
            first, head = state["down.0.steps.0.weight"], state["head.weight"]
            sizes = dict(
                in_channels=first.shape[1], num_classes=head.shape[0],
                depth=len({name.split(".")[1] for name in state if name.startswith("up.")}),
                initial_channels=head.shape[1],
                use_batchnorm="down.0.steps.1.running_mean" in state,
            )  # fmt: skip
            model = cls(**sizes, layers=layers)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(f"these are not the weights of a U-Net: {error}") from None
        load_arrays(model, state)
        return model

    def load_state_dict(self, state_dict, strict=True, assign=False):
        """As PyTorch's; takes NumPy's arrays too, as the state_dict of `autograd.UNet` has them."""
        if any(isinstance(value, np.ndarray) for value in state_dict.values()):
            state_dict = {name: torch.as_tensor(value) for name, value in state_dict.items()}
        return super().load_state_dict(state_dict, strict, assign)

    def forward(self, x):
        require_images(x, f"UNet of depth {self.depth}", self.in_channels, 2**self.depth)
        skips = []
        for down in self.down[:-1]:
            skips.append(down(x))
            x = self.pool(skips[-1])
        x = self.down[-1](x)
        for up, merge in zip(self.up, self.merge, strict=True):
            x = merge(_beside(skips.pop(), up(x)))
        return self.head(x)


@torch.fx.wrap
def _beside(skip, x):
    """Both in one tensor, `x` behind; it is padded with zeros to the height and width of `skip`.

    A node of its own in a graph of torch.fx, because what it does depends on shapes.
    """
    more = [n - m for n, m in zip(skip.shape[2:], x.shape[2:], strict=True)]
    if any(more):
        x = F.pad(x, (0, more[1], 0, more[0]))
    return torch.cat([skip, x], 1)
