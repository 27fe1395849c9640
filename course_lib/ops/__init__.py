"""The kernels as PyTorch operators: ``torch.ops.course_lib.*``, and as functions of this module.

How they are registered, and which tensors go where: `registration`. Gradients of gradients are
refused with an error, not approximated.
"""

from course_lib.ops.activation import relu, sigmoid, swish

__all__ = ["relu", "sigmoid", "swish"]
