"""The kernels as PyTorch operators: ``torch.ops.course_lib.*``, and as functions of this module.

How they are registered, and which tensors go where: `registration`. Gradients of gradients are
refused with an error, not approximated. torch.fx records each call as a node (`tracing`), and
`torch.utils.flop_counter` counts what PyTorch's own would take (`flops`). An exported program has
PyTorch's operators instead after ``program.run_decompositions(ops.DECOMPOSITIONS)``.
"""

from course_lib.ops import flops
from course_lib.ops.activation import (
    gelu,
    hardsigmoid,
    hardswish,
    leaky_relu,
    relu,
    relu6,
    sigmoid,
    silu,
)
from course_lib.ops.attention import attention
from course_lib.ops.batch_norm import batch_norm
from course_lib.ops.conv2d import conv2d
from course_lib.ops.conv2d_batch_norm import conv2d_batch_norm
from course_lib.ops.conv_transpose2d import conv_transpose2d
from course_lib.ops.cross_entropy import cross_entropy
from course_lib.ops.dice import dice_loss
from course_lib.ops.dropout import dropout
from course_lib.ops.fused_softmax import bn_relu_softmax, softmax_dropout
from course_lib.ops.global_avg_pool import global_avg_pool
from course_lib.ops.layer_norm import layer_norm
from course_lib.ops.linear import linear
from course_lib.ops.max_pool2d import max_pool2d
from course_lib.ops.registration import DECOMPOSITIONS  # noqa: F401 - for programs
from course_lib.ops.scaled_dot_product_attention import scaled_dot_product_attention
from course_lib.ops.scaled_softmax import scaled_softmax
from course_lib.ops.softmax import log_softmax, softmax
from course_lib.ops.squeeze_excite import squeeze_excite
from course_lib.ops.tracing import traceable
from course_lib.ops.upsample import interpolate

__all__ = [
    "attention",
    "batch_norm",
    "bn_relu_softmax",
    "conv2d",
    "conv2d_batch_norm",
    "conv_transpose2d",
    "cross_entropy",
    "dice_loss",
    "dropout",
    "gelu",
    "global_avg_pool",
    "hardsigmoid",
    "hardswish",
    "interpolate",
    "layer_norm",
    "leaky_relu",
    "linear",
    "log_softmax",
    "max_pool2d",
    "relu",
    "relu6",
    "scaled_dot_product_attention",
    "scaled_softmax",
    "sigmoid",
    "silu",
    "softmax",
    "softmax_dropout",
    "squeeze_excite",
]

flops.register()
for _name in __all__:
    globals()[_name] = traceable(globals()[_name])
