"""Pooling on our kernels."""

from torch import nn

from course_lib import ops


class MaxPool2d(nn.MaxPool2d):
    """As `torch.nn.MaxPool2d`: the largest element of each window."""

    def forward(self, input):
        return ops.max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode,
            self.return_indices,
        )  # fmt: skip
