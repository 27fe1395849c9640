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
        running_mean, running_var, momentum = self._statistics()
        return ops.batch_norm(
            input, running_mean, running_var, self.weight, self.bias, self._is_of_the_batch(),
            momentum, self.eps, relu=relu,
        )  # fmt: skip

    def normalised_convolution(self, convolution, input, relu=False):
        """normalised(convolution(input), relu), of our `Conv2d`; in training one operator."""
        if not (self._is_of_the_batch() and convolution.is_alone(input)):
            return self.normalised(convolution(input), relu)
        running_mean, running_var, momentum = self._statistics()
        return ops.conv2d_batch_norm(
            input, convolution.weight, self.weight, self.bias, running_mean, running_var,
            convolution.stride, convolution.padding, convolution.dilation, convolution.groups,
            momentum, self.eps, relu=relu,
        )  # fmt: skip

    def _is_of_the_batch(self):
        """Whether the batch's own statistics count."""
        return self.training or self.running_mean is None and self.running_var is None

    def _statistics(self):
        """(running mean, running variance, momentum) of this call, which is counted."""
        tracked = self.training and self.track_running_stats
        momentum = 0.0 if self.momentum is None else self.momentum
        if tracked and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:  # each batch counts alike
                momentum = 1.0 / float(self.num_batches_tracked)
        keeps = tracked or not self.training
        return *((self.running_mean, self.running_var) if keeps else (None, None)), momentum
