"""A small network with squeeze and excitation, which a CPU trains in a minute."""

from torch import nn

from course_lib import nn as ours


class SmallSENet(nn.Module):
    """Residual blocks with squeeze and excitation, as in SE-ResNet; about 80,000 parameters.

    num_classes  of the logits (N, num_classes) that it returns for images (N, 3, H, W); made for
                 64×64 pixels, and takes any number of them
    block        of squeeze and excitation, such as torchvision's; None: `nn.SqueezeExcitation` of
                 the course

    He et al., "Deep Residual Learning for Image Recognition" (2015); Hu, Shen and Sun (2018).
    """

    def __init__(self, num_classes, block=None):
        super().__init__()
        block = block or ours.SqueezeExcitation
        self.stem = _convolution(3, 24, 3, stride=2)
        self.layers = nn.Sequential(Residual(24, 32, block), Residual(32, 64, block))
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(64, num_classes)

    def forward(self, x):
        x = nn.functional.silu(self.stem(x))
        return self.classifier(self.pool(self.layers(x)).flatten(1))


class Residual(nn.Module):
    """Halves height and width. Its channels are weighted before the shortcut is added."""

    def __init__(self, in_channels, channels, block):
        super().__init__()
        self.conv1 = _convolution(in_channels, channels, 3, stride=2)
        self.conv2 = _convolution(channels, channels, 3)
        self.se = block(channels, channels // 4, activation=nn.SiLU)
        self.shortcut = _convolution(in_channels, channels, 1, stride=2)

    def forward(self, x):
        inner = self.conv2(nn.functional.silu(self.conv1(x)))
        return nn.functional.silu(self.se(inner) + self.shortcut(x))


def _convolution(in_channels, channels, kernel_size, stride=1):
    return nn.Sequential(
        nn.Conv2d(in_channels, channels, kernel_size, stride, kernel_size // 2, bias=False),
        nn.BatchNorm2d(channels),
    )
