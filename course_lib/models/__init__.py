"""Whole networks that run our kernels; where there is no GPU, PyTorch's operators.

``create_model("efficientnet_b4", num_classes=5)`` is torchvision's network, with our squeeze and
excitation in it; the others named here have no layer but ours, or PyTorch's if they are told so.
"""

from course_lib.models.continuous_integration import ContinuousIntegrationModel
from course_lib.models.creating import create_model
from course_lib.models.fashion_mnist import FashionMNISTCNN
from course_lib.models.resnet import resnet18_small
from course_lib.models.small import SmallSENet
from course_lib.models.tiny_imagenet import TinyImageNetCNN
from course_lib.models.unet import UNet
from course_lib.models.weights import arrays_of, load_arrays

__all__ = [
    "ContinuousIntegrationModel", "FashionMNISTCNN", "SmallSENet", "TinyImageNetCNN", "UNet",
    "arrays_of", "create_model", "load_arrays", "resnet18_small",
]  # fmt: skip
