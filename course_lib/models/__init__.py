"""Whole networks that run our kernels; where there is no GPU, PyTorch's operators.

``create_model("efficientnet_b4", num_classes=5)`` is torchvision's network, with our squeeze and
excitation in it; `FashionMNISTCNN` and `UNet` have no layer but ours.
"""

from course_lib.models.creating import create_model
from course_lib.models.fashion_mnist import FashionMNISTCNN
from course_lib.models.small import SmallSENet
from course_lib.models.unet import UNet
from course_lib.models.weights import arrays_of, load_arrays

__all__ = [
    "FashionMNISTCNN", "SmallSENet", "UNet", "arrays_of", "create_model", "load_arrays",
]  # fmt: skip
