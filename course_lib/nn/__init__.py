"""PyTorch modules on our kernels, with PyTorch's names and signatures.

``course_lib.nn.ReLU()`` goes wherever ``torch.nn.ReLU()`` does, and is one to `isinstance`;
`SqueezeExcitation` goes wherever torchvision's does. `replace_layers` takes a network that is there
already.
"""

from course_lib.nn.activation import (
    GELU,
    Hardsigmoid,
    Hardswish,
    LeakyReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
)
from course_lib.nn.attention import (
    MultiheadAttention,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from course_lib.nn.batch_norm import BatchNorm2d
from course_lib.nn.conv2d import Conv2d
from course_lib.nn.conv_transpose2d import ConvTranspose2d
from course_lib.nn.dice import DiceLoss
from course_lib.nn.dropout import Dropout
from course_lib.nn.flatten import Flatten
from course_lib.nn.layer_norm import LayerNorm
from course_lib.nn.linear import Linear
from course_lib.nn.loss import CrossEntropyLoss
from course_lib.nn.pooling import AdaptiveAvgPool2d, MaxPool2d
from course_lib.nn.replacing import Replacement, replace_layers
from course_lib.nn.softmax import LogSoftmax, Softmax
from course_lib.nn.upsample import Upsample

__all__ = [
    "AdaptiveAvgPool2d",
    "BatchNorm2d",
    "Conv2d",
    "ConvTranspose2d",
    "CrossEntropyLoss",
    "DiceLoss",
    "Dropout",
    "Flatten",
    "GELU",
    "Hardsigmoid",
    "Hardswish",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "MultiheadAttention",
    "ReLU",
    "ReLU6",
    "Replacement",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SqueezeExcitation",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "Upsample",
    "replace_layers",
]


def __getattr__(name):
    if name == "SqueezeExcitation":  # a subclass of torchvision's, which takes long to import
        from course_lib.nn.squeeze_excitation import SqueezeExcitation

        return SqueezeExcitation
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
