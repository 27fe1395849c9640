"""ReLU, SiLU and sigmoid on our kernels."""

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
