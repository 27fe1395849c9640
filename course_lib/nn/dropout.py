"""Dropout on our kernels."""

from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer


class Dropout(Layer, nn.Dropout):
    """As `torch.nn.Dropout`, with masks of our own generator."""

    def forward(self, input):
        return ops.dropout(input, self.p, self.training, self.inplace)
