"""The learner's own automatic differentiation, layers, losses and U-Net, on any backend's arrays.

`tape` is the core, to be read in one sitting; `functions` computes with tensors, `layers` with
images. The same lines run on NumPy, and on a GPU with the kernels of the course (`backend`).
"""

from . import functions
from .functions import cast, concat, exp, log, mean, relu
from .layers import BatchNorm2D, Conv2D, MaxPool2D, Module, ReLU, TransposeConv2D, replacing
from .losses import combined_loss, dice_loss, focal_loss, weighted_cross_entropy
from .metrics import calculate_class_weights, confusion_matrix, dice_coefficient, iou_score
from .optim import SGD, Adam
from .scaling import LossScaler
from .tape import Function, Tensor, no_grad, tensor
from .unet import UNet

__all__ = [
    "SGD",
    "Adam",
    "BatchNorm2D",
    "Conv2D",
    "Function",
    "LossScaler",
    "MaxPool2D",
    "Module",
    "ReLU",
    "Tensor",
    "TransposeConv2D",
    "UNet",
    "calculate_class_weights",
    "cast",
    "combined_loss",
    "concat",
    "confusion_matrix",
    "dice_coefficient",
    "dice_loss",
    "exp",
    "focal_loss",
    "functions",
    "iou_score",
    "log",
    "mean",
    "no_grad",
    "relu",
    "replacing",
    "tensor",
    "weighted_cross_entropy",
]
