"""The kernels as PyTorch operators: ``torch.ops.course_lib.*``, and as functions of this module.

How they are registered, and which tensors go where: `registration`. Gradients of gradients are
refused with an error, not approximated.
"""

from course_lib.ops.activation import relu, sigmoid, swish
from course_lib.ops.batch_norm import batch_norm
from course_lib.ops.conv2d import conv2d
from course_lib.ops.cross_entropy import cross_entropy
from course_lib.ops.dropout import dropout
from course_lib.ops.fused_softmax import bn_relu_softmax, softmax_dropout
from course_lib.ops.linear import linear
from course_lib.ops.max_pool2d import max_pool2d
from course_lib.ops.softmax import log_softmax, softmax
from course_lib.ops.squeeze_excite import squeeze_excite

__all__ = [
    "batch_norm",
    "bn_relu_softmax",
    "conv2d",
    "cross_entropy",
    "dropout",
    "linear",
    "log_softmax",
    "max_pool2d",
    "relu",
    "sigmoid",
    "softmax",
    "softmax_dropout",
    "squeeze_excite",
    "swish",
]
