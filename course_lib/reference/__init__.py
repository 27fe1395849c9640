"""The truth, in NumPy and float64: what every kernel is compared with.

Functions take arrays of any dtype and return float64 arrays. They are written for clarity and
follow PyTorch in what -inf, inf and NaN give. Imports NumPy only.
"""

import importlib

#: Module of `functions` -> what is taken from it. A module is imported when it is asked for: who
#: checks one kernel needs one truth.
_MODULES = {
    "attention": "attention attention_backward attention_scores attention_visible",
    "basic": (
        "gelu gelu_backward gelu_tanh gelu_tanh_backward global_avg_pool "
        "global_avg_pool_backward hard_sigmoid hard_sigmoid_backward hard_swish "
        "hard_swish_backward leaky_relu leaky_relu_backward relu relu6 relu6_backward "
        "relu_backward sigmoid sigmoid_backward swish swish_backward"
    ),
    "batch_norm": "batch_norm batch_norm_backward batch_norm_running",
    "conv2d": "conv2d conv2d_backward",
    "conv_transpose2d": "conv_transpose2d conv_transpose2d_backward",
    "cross_entropy": "cross_entropy cross_entropy_backward",
    "dice": "dice_loss dice_loss_backward",
    "fused_softmax": (
        "bn_relu_softmax bn_relu_softmax_backward dropout_mask softmax_dropout "
        "softmax_dropout_backward"
    ),
    "layer_norm": "layer_norm layer_norm_backward",
    "linear": "linear linear_backward",
    "max_pool2d": "max_pool2d max_pool2d_backward",
    "optimizers": "adam sgd",
    "softmax": (
        "log_softmax log_softmax_backward scaled_softmax scaled_softmax_backward softmax "
        "softmax_backward"
    ),
    "squeeze_excite": "squeeze_excite squeeze_excite_backward",
    "upsample": "upsample upsample_backward",
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names.split()}
__all__ = sorted(_HOMES)


def __getattr__(name):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f"{__name__}.functions.{_HOMES[name]}")
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__():
    return __all__
