"""The network for Tiny-ImageNet: three convolutions and two linear layers."""

import torch

from course_lib import nn
from course_lib.models.steps import Steps, require_counts, require_images, require_widths

torch.fx.wrap("require_images")


class TinyImageNetCNN(torch.nn.Module):
    """Logits (N, num_classes) for images (N, 3, 64, 64); 4,390,888 parameters as it stands.

    num_classes  of the logits
    widths       channels behind each 3×3 convolution; batch norm, ReLU and a pooling that halves
                 height and width follow each
    hidden       numbers behind the first linear layer
    dropout      their share that is dropped in training, before the last layer
    image_size   height and width of the images, from 8 on
    layers       whose layers: `course_lib.nn`, or `torch.nn` for PyTorch's own. Both kinds of
                 network have the same state_dict, and the same first weights from the same seed

    The network ends in logits, and its loss is cross-entropy, which has a log-softmax in it. A
    softmax before it would be a fault: a loss of numbers from 0 to 1 can't fall below
    log(1 + (num_classes − 1)/e), 4.31 for 200 classes, and its gradients are many times smaller.

    Raises ValueError for images of another shape, for an image_size below 8, and for numbers that
    are no counts.
    """

    def __init__(
        self, num_classes=200, *, widths=(32, 64, 128), hidden=512, dropout=0.5, image_size=64,
        layers=nn,
    ):  # fmt: skip
        require_counts(num_classes=num_classes, hidden=hidden, image_size=image_size)
        require_widths(widths, 3)
        if image_size < 8:
            raise ValueError(f"image_size must be at least 8, which is halved thrice: {image_size}")
        super().__init__()
        self.image_size = image_size
        steps = []
        for c_in, c in zip((3, *widths), widths, strict=False):
            # A bias before batch norm would be subtracted.
            steps += [layers.Conv2d(c_in, c, 3, padding=1, bias=False), layers.BatchNorm2d(c)]
            steps += [layers.ReLU(), layers.MaxPool2d(2)]
        self.features = Steps(*steps)
        self.classifier = Steps(
            layers.Flatten(),
            layers.Linear(widths[-1] * (image_size // 8) ** 2, hidden),
            layers.ReLU(),
            layers.Dropout(dropout),
            layers.Linear(hidden, num_classes),
        )
        self.softmax = layers.Softmax(dim=1)

    def forward(self, x):
        require_images(x, "TinyImageNetCNN", 3, size=self.image_size)
        return self.classifier(self.features(x))

    def probabilities(self, x):
        """What `forward` returns, as probabilities: each row sums to 1."""
        return self.softmax(self(x))
