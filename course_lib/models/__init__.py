"""Whole networks whose squeeze and excitation runs our kernels; elsewhere, PyTorch's operators.

``create_model("efficientnet_b4", num_classes=5)`` is torchvision's network, with our kernels in it.
"""

from course_lib.models.creating import create_model
from course_lib.models.small import SmallSENet

__all__ = ["SmallSENet", "create_model"]
