"""PyTorch modules on our kernels, with `torch.nn`'s names and signatures.

``course_lib.nn.ReLU()`` goes wherever ``torch.nn.ReLU()`` does.
"""

import warnings

from torch import nn

from course_lib import ops


class _Activation(nn.Module):
    def __init__(self, inplace=False):
        super().__init__()
        self.inplace = inplace

    def forward(self, x):
        if not self.inplace:
            return self.operator(x)
        # The gradient needs what x held, so this keeps torch.nn's contract but saves no memory.
        return x.copy_(self.operator(x.clone()))

    def extra_repr(self):
        return "inplace=True" if self.inplace else ""


class ReLU(_Activation):
    """As `torch.nn.ReLU`: max(x, 0), elementwise."""

    operator = staticmethod(ops.relu)


class SiLU(_Activation):
    """As `torch.nn.SiLU`, also called swish: x·sigmoid(x), elementwise."""

    operator = staticmethod(ops.swish)


class Sigmoid(_Activation):
    """As `torch.nn.Sigmoid`: 1/(1 + e⁻ˣ), elementwise."""

    operator = staticmethod(ops.sigmoid)

    def __init__(self):
        super().__init__()


class Softmax(nn.Softmax):
    """As `torch.nn.Softmax`: exp(x) / Σ exp(x) along `dim`."""

    def forward(self, input):
        dim = self.dim
        return ops.softmax(input, _implicit_dim("softmax", input) if dim is None else dim)


class LogSoftmax(nn.LogSoftmax):
    """As `torch.nn.LogSoftmax`: x − log Σ exp(x) along `dim`."""

    def forward(self, input):
        dim = self.dim
        return ops.log_softmax(input, _implicit_dim("log_softmax", input) if dim is None else dim)


class CrossEntropyLoss(nn.CrossEntropyLoss):
    """As `torch.nn.CrossEntropyLoss`: softmax and cross-entropy in one."""

    def forward(self, input, target):
        return ops.cross_entropy(
            input, target, weight=self.weight, ignore_index=self.ignore_index,
            reduction=self.reduction, label_smoothing=self.label_smoothing,
        )  # fmt: skip


def _implicit_dim(name, x):
    """The axis torch.nn takes where none is named, with its warning."""
    warnings.warn(
        f"Implicit dimension choice for {name} has been deprecated. Change the call to include "
        "dim=X as an argument.",
        stacklevel=5,  # the line that calls the module
    )
    return 0 if x.dim() in (0, 1, 3) else 1
