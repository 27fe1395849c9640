"""Activations on our kernels, elementwise. With `inplace` they write over their input."""

from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer


class ReLU(Layer, nn.ReLU):
    """As `torch.nn.ReLU`: max(x, 0)."""

    def forward(self, input):
        return ops.relu(input, self.inplace)


class ReLU6(Layer, nn.ReLU6):
    """As `torch.nn.ReLU6`: min(max(x, 0), 6)."""

    def forward(self, input):
        return ops.relu6(input, self.inplace)


class LeakyReLU(Layer, nn.LeakyReLU):
    """As `torch.nn.LeakyReLU`: x where x > 0, else negative_slope·x."""

    def forward(self, input):
        return ops.leaky_relu(input, self.negative_slope, self.inplace)


class Sigmoid(Layer, nn.Sigmoid):
    """As `torch.nn.Sigmoid`: 1/(1 + e⁻ˣ)."""

    def forward(self, input):
        return ops.sigmoid(input)


class SiLU(Layer, nn.SiLU):
    """As `torch.nn.SiLU`, also called swish: x·sigmoid(x)."""

    def forward(self, input):
        return ops.silu(input, self.inplace)


class Hardsigmoid(Layer, nn.Hardsigmoid):
    """As `torch.nn.Hardsigmoid`: min(max(x + 3, 0), 6)/6."""

    def forward(self, input):
        return ops.hardsigmoid(input, self.inplace)


class Hardswish(Layer, nn.Hardswish):
    """As `torch.nn.Hardswish`: x·hardsigmoid(x)."""

    def forward(self, input):
        return ops.hardswish(input, self.inplace)


class GELU(Layer, nn.GELU):
    """As `torch.nn.GELU`: x·Φ(x) with the normal distribution Φ, or near it by tanh."""

    def forward(self, input):
        return ops.gelu(input, approximate=self.approximate)
