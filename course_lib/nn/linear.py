"""The linear layer on our kernels."""

from torch import nn

from course_lib import ops


class Linear(nn.Linear):
    """As `torch.nn.Linear`: y = x·weightᵀ + bias."""

    def forward(self, input):
        return ops.linear(input, self.weight, self.bias)
