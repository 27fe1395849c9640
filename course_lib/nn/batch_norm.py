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
        y = ops.batch_norm(
            input, *self._running(), self.weight, self.bias, self._is_of_the_batch(),
            self._momentum(), self.eps, relu=relu,
        )  # fmt: skip
        self._count()
        return y

    def normalised_convolution(self, convolution, input, relu=False):
        """normalised(convolution(input), relu), of our `Conv2d`; in training one operator."""
        if not (self._is_of_the_batch() and convolution.is_alone(input)):
            return self.normalised(convolution(input), relu)
        y = ops.conv2d_batch_norm(
            input, convolution.weight, self.weight, self.bias, *self._running(),
            convolution.stride, convolution.padding, convolution.dilation, convolution.groups,
            self._momentum(), self.eps, relu=relu,
        )  # fmt: skip
        self._count()
        return y

    def _is_of_the_batch(self):
        """Whether the batch's own statistics count."""
        return self.training or self.running_mean is None and self.running_var is None

    def _running(self):
        """The running mean and variance that a call reads or moves; None, None if neither."""
        if self.training and not self.track_running_stats:
            return None, None
        return self.running_mean, self.running_var

    def _momentum(self):
        if self.momentum is not None:
            return self.momentum
        if not self._is_counted():
            return 0.0
        return 1.0 / (float(self.num_batches_tracked) + 1)  # each batch counts alike

    def _is_counted(self):
        return (
            self.training and self.track_running_stats and self.num_batches_tracked is not None
        )

    def _count(self):
        """A batch that was refused is not counted."""
        if self._is_counted():
            self.num_batches_tracked.add_(1)
