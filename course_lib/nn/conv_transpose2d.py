"""Transposed convolution on our kernels."""

from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer


class ConvTranspose2d(Layer, nn.ConvTranspose2d):
    """As `torch.nn.ConvTranspose2d`: parameters, options and state_dicts."""

    def forward(self, input, output_size=None):
        if self.padding_mode != "zeros":
            raise ValueError("Only `zeros` padding mode is supported for ConvTranspose2d")
        output_padding = self._output_padding(
            input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation
        )
        return ops.conv_transpose2d(
            input, self.weight, self.bias, self.stride, self.padding, output_padding, self.groups,
            self.dilation,
        )  # fmt: skip
