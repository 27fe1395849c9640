"""PyTorch modules on our kernels, with PyTorch's names and signatures.

``course_lib.nn.ReLU()`` goes wherever ``torch.nn.ReLU()`` does, and `SqueezeExcitation` wherever
torchvision's does. `replace_squeeze_excitation` takes a network that is there already.
"""

from course_lib.nn.activation import ReLU, Sigmoid, SiLU
from course_lib.nn.batch_norm import BatchNorm2d
from course_lib.nn.conv2d import Conv2d
from course_lib.nn.dropout import Dropout
from course_lib.nn.flatten import Flatten
from course_lib.nn.linear import Linear
from course_lib.nn.loss import CrossEntropyLoss
from course_lib.nn.pooling import MaxPool2d
from course_lib.nn.replacing import replace_squeeze_excitation, restore_squeeze_excitation
from course_lib.nn.softmax import LogSoftmax, Softmax
from course_lib.nn.squeeze_excitation import SqueezeExcitation

__all__ = [
    "BatchNorm2d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Flatten",
    "Linear",
    "LogSoftmax",
    "MaxPool2d",
    "ReLU",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "SqueezeExcitation",
    "replace_squeeze_excitation",
    "restore_squeeze_excitation",
]
