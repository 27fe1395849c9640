"""Convolution on our kernels."""

import torch.nn.functional as F
from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer


class Conv2d(Layer, nn.Conv2d):
    """As `torch.nn.Conv2d`: parameters, padding ("same", "valid", any mode) and state_dicts."""

    def _conv_forward(self, input, weight, bias):
        padding = self.padding
        if self.padding_mode != "zeros":
            input = F.pad(input, self._reversed_padding_repeated_twice, mode=self.padding_mode)
            padding = 0
        return ops.conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)

    def is_alone(self, input):
        """Whether the layer is our kernels' convolution of four-dimensional `input` and no more."""
        return (
            self.bias is None
            and self.padding_mode == "zeros"
            and not isinstance(self.padding, str)
            and input.dim() == 4
        )
