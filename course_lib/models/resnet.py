"""ResNet-18 (He, Zhang, Ren and Sun, 2015) for small images, on our layers or on PyTorch's own.

Its parameters have the names that torchvision gives them.
"""

import torch

from course_lib import nn
from course_lib.models.steps import (
    Steps,
    normalised,
    require_counts,
    require_images,
    require_widths,
)

torch.fx.wrap("require_images")


class BasicBlock(torch.nn.Module):
    """Two 3×3 convolutions beside a shortcut; channels and size are changed by the first."""

    def __init__(self, in_channels, channels, stride, layers):
        super().__init__()
        self.conv1 = layers.Conv2d(in_channels, channels, 3, stride, padding=1, bias=False)
        self.bn1 = layers.BatchNorm2d(channels)
        self.relu = layers.ReLU(inplace=True)
        self.conv2 = layers.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = layers.BatchNorm2d(channels)
        self.downsample = None
        if stride != 1 or in_channels != channels:
            self.downsample = Steps(
                layers.Conv2d(in_channels, channels, 1, stride, bias=False),
                layers.BatchNorm2d(channels),
            )

    def forward(self, x):
        shortcut = x if self.downsample is None else self.downsample(x)
        x = normalised(x, self.conv1, self.bn1, self.relu)
        return self.relu(normalised(x, self.conv2, self.bn2) + shortcut)


class ResNet18Small(torch.nn.Module):
    """See `resnet18_small`. `widths` are the channels of the four pairs of blocks."""

    def __init__(self, num_classes, widths, layers):
        super().__init__()
        self.conv1 = layers.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = layers.BatchNorm2d(widths[0])
        self.relu = layers.ReLU(inplace=True)
        c_in = widths[0]
        for i, c in enumerate(widths):
            first = BasicBlock(c_in, c, 1 if i == 0 else 2, layers)
            pair = torch.nn.Sequential(first, BasicBlock(c, c, 1, layers))
            self.add_module(f"layer{i + 1}", pair)
            c_in = c
        self.avgpool = layers.AdaptiveAvgPool2d(1)
        self.flatten = layers.Flatten()
        self.fc = layers.Linear(c_in, num_classes)
        start_convolutions(self)

    def forward(self, x):
        require_images(x, "resnet18_small", 3, least=8)
        x = normalised(x, self.conv1, self.bn1, self.relu)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(self.flatten(self.avgpool(x)))


def start_convolutions(model):
    """First weights by He et al. (2015), as torchvision's ResNets have them."""
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            torch.nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18_small(num_classes=200, *, widths=(64, 128, 256, 512), layers=nn):
    """ResNet-18 whose first convolution is 3×3 with stride 1, and without the first pooling.

    num_classes  of the logits (N, num_classes) for images (N, 3, H, W) of at least 8 pixels each
                 way; made for 32 to 64
    widths       channels of each of its four pairs of blocks
    layers       whose layers: `course_lib.nn`, or `torch.nn` for PyTorch's own

    11,271,432 parameters for 200 classes. Its state_dict fits a ``torchvision.models.resnet18``
    whose `conv1` is ``Conv2d(3, 64, 3, padding=1, bias=False)`` and whose `maxpool` is an
    `Identity`; both compute the same. Raises ValueError for images of another shape, and for
    numbers that are no counts.
    """
    require_counts(num_classes=num_classes)
    require_widths(widths, 4)
    return ResNet18Small(num_classes, widths, layers)
