"""Whole networks that run our kernels; where there is no GPU, PyTorch's operators.

``create_model("efficientnet_b4", num_classes=5)`` is torchvision's network, with our squeeze and
excitation in it; `FashionMNISTCNN` has no layer but ours.
"""

from course_lib.models.creating import create_model
from course_lib.models.fashion_mnist import FashionMNISTCNN
from course_lib.models.small import SmallSENet

__all__ = ["FashionMNISTCNN", "SmallSENet", "create_model"]
