"""Softmax and log-softmax on our kernels."""

import warnings

from torch import nn
from torch.compiler import is_dynamo_compiling

from course_lib import ops
from course_lib.nn.layer import Layer


class Softmax(Layer, nn.Softmax):
    """As `torch.nn.Softmax`: exp(x) / Σ exp(x) along `dim`."""

    def forward(self, input):
        dim = self.dim
        return ops.softmax(input, _implicit_dim("softmax", input) if dim is None else dim)


class LogSoftmax(Layer, nn.LogSoftmax):
    """As `torch.nn.LogSoftmax`: x − log Σ exp(x) along `dim`."""

    def forward(self, input):
        dim = self.dim
        return ops.log_softmax(input, _implicit_dim("log_softmax", input) if dim is None else dim)


def _implicit_dim(name, x):
    """The axis torch.nn takes where none is named, with its warning."""
    if not is_dynamo_compiling():  # which can't trace a warning
        warnings.warn(
            f"Implicit dimension choice for {name} has been deprecated. Change the call to include "
            "dim=X as an argument.",
            stacklevel=6,  # the line that calls the module
        )
    return 0 if x.dim() in (0, 1, 3) else 1
