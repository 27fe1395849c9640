"""The network for Fashion-MNIST: two convolutions and two linear layers."""

import torch

from course_lib import nn
from course_lib.models.steps import rectified


class FashionMNISTCNN(torch.nn.Module):
    """Logits (N, num_classes) for images (N, 1, 28, 28); 896,522 parameters as it stands.

    num_classes  of the logits
    widths       channels behind each convolution, and numbers behind the first linear layer
    layers       whose layers: `course_lib.nn`, or `torch.nn` for PyTorch's own. Both kinds of
                 network have the same state_dict, and the same first weights from the same seed

    Each pooling comes before its ReLU: the result is the same, and ReLU has a quarter of the work.
    `train.GraphInference` and `train.FashionMNISTPass` call its kernels without its layers
    (`fashion_mnist_pass`).
    """

    def __init__(self, num_classes=10, *, widths=(64, 128, 256), layers=nn):
        super().__init__()
        first, second, hidden = widths
        self.conv1 = layers.Conv2d(1, first, 3)
        self.conv2 = layers.Conv2d(first, second, 3)
        self.pool = layers.MaxPool2d(2)
        self.relu = layers.ReLU()
        self.flatten = layers.Flatten()
        self.fc1 = layers.Linear(second * 5 * 5, hidden)
        self.fc2 = layers.Linear(hidden, num_classes)

    def forward(self, x):
        x = rectified(self.conv1(x), self.pool, self.relu)
        x = rectified(self.conv2(x), self.pool, self.relu)
        return self.fc2(rectified(self.flatten(x), self.fc1, self.relu))
