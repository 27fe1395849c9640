"""Pooling on our kernels."""

from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer


class MaxPool2d(Layer, nn.MaxPool2d):
    """As `torch.nn.MaxPool2d`: the largest element of each window."""

    def forward(self, input):
        return self.rectified(input, relu=False)

    def rectified(self, input, relu=True):
        """What `forward` returns, and its max(y, 0) in the same pass."""
        return ops.max_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode,
            self.return_indices, relu=relu,
        )  # fmt: skip


class AdaptiveAvgPool2d(Layer, nn.AdaptiveAvgPool2d):
    """As `torch.nn.AdaptiveAvgPool2d(1)`: the mean of each plane. ValueError for other sizes."""

    def __init__(self, output_size):
        super().__init__(output_size)
        self._require_kernel()

    def forward(self, input):
        if self.output_size != 1:
            self._require_kernel()
        return ops.global_avg_pool(input)

    def _require_kernel(self):
        if fault := self.fault(self):
            raise ValueError(f"{fault}; torch.nn.AdaptiveAvgPool2d takes any")

    @staticmethod
    def fault(layer):
        if layer.output_size not in (1, (1, 1), [1, 1]):
            return f"there are kernels for an output_size of 1 alone, not {layer.output_size}"
        return None
