"""Losses on our kernels."""

from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer


class CrossEntropyLoss(Layer, nn.CrossEntropyLoss):
    """As `torch.nn.CrossEntropyLoss`: softmax and cross-entropy in one."""

    def forward(self, input, target):
        return ops.cross_entropy(
            input, target, weight=self.weight, ignore_index=self.ignore_index,
            reduction=self.reduction, label_smoothing=self.label_smoothing,
        )  # fmt: skip
