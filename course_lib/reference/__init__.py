"""The truth, in NumPy and float64: what every kernel is compared with.

Functions take arrays of any dtype and return float64 arrays. They are written for clarity and
follow PyTorch in what -inf, inf and NaN give. Imports NumPy only.
"""

from .attention import (
    attention,
    attention_backward,
    attention_scores,
    attention_visible,
)
from .basic import (
    gelu,
    gelu_backward,
    gelu_tanh,
    gelu_tanh_backward,
    global_avg_pool,
    global_avg_pool_backward,
    hard_sigmoid,
    hard_sigmoid_backward,
    hard_swish,
    hard_swish_backward,
    leaky_relu,
    leaky_relu_backward,
    relu,
    relu6,
    relu6_backward,
    relu_backward,
    sigmoid,
    sigmoid_backward,
    swish,
    swish_backward,
)
from .batch_norm import batch_norm, batch_norm_backward, batch_norm_running
from .conv2d import conv2d, conv2d_backward
from .conv_transpose2d import conv_transpose2d, conv_transpose2d_backward
from .cross_entropy import cross_entropy, cross_entropy_backward
from .dice import dice_loss, dice_loss_backward
from .fused_softmax import (
    bn_relu_softmax,
    bn_relu_softmax_backward,
    dropout_mask,
    softmax_dropout,
    softmax_dropout_backward,
)
from .layer_norm import layer_norm, layer_norm_backward
from .linear import linear, linear_backward
from .max_pool2d import max_pool2d, max_pool2d_backward
from .optimizers import adam, sgd
from .softmax import log_softmax, log_softmax_backward, softmax, softmax_backward
from .squeeze_excite import squeeze_excite, squeeze_excite_backward
from .upsample import upsample, upsample_backward

__all__ = [
    "adam",
    "attention",
    "attention_backward",
    "attention_scores",
    "attention_visible",
    "batch_norm",
    "batch_norm_backward",
    "batch_norm_running",
    "bn_relu_softmax",
    "bn_relu_softmax_backward",
    "conv2d",
    "conv2d_backward",
    "conv_transpose2d",
    "conv_transpose2d_backward",
    "cross_entropy",
    "cross_entropy_backward",
    "dice_loss",
    "dice_loss_backward",
    "dropout_mask",
    "gelu",
    "gelu_backward",
    "gelu_tanh",
    "gelu_tanh_backward",
    "global_avg_pool",
    "global_avg_pool_backward",
    "hard_sigmoid",
    "hard_sigmoid_backward",
    "hard_swish",
    "hard_swish_backward",
    "layer_norm",
    "layer_norm_backward",
    "leaky_relu",
    "leaky_relu_backward",
    "linear",
    "linear_backward",
    "log_softmax",
    "log_softmax_backward",
    "max_pool2d",
    "max_pool2d_backward",
    "relu",
    "relu6",
    "relu6_backward",
    "relu_backward",
    "sgd",
    "sigmoid",
    "sigmoid_backward",
    "softmax",
    "softmax_backward",
    "softmax_dropout",
    "softmax_dropout_backward",
    "squeeze_excite",
    "squeeze_excite_backward",
    "swish",
    "swish_backward",
    "upsample",
    "upsample_backward",
]
