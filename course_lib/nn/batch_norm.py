"""Batch normalisation on our kernels."""

from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer


class BatchNorm2d(Layer, nn.BatchNorm2d):
    """As `torch.nn.BatchNorm2d`, running statistics and state_dict included."""

    def forward(self, input):
        return self.normalised(input)

    def normalised(self, input, relu=False):
        """What `forward` returns; with `relu` its max(y, 0), in the same pass."""
        self._check_input_dim(input)
        tracked = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # each batch counts alike
                momentum = 1.0 / float(self.num_batches_tracked)
        has_statistics = self.running_mean is not None or self.running_var is not None
        keeps = tracked or not self.training
        return ops.batch_norm(
            input, self.running_mean if keeps else None, self.running_var if keeps else None,
            self.weight, self.bias, self.training or not has_statistics, momentum, self.eps,
            relu=relu,
        )  # fmt: skip
