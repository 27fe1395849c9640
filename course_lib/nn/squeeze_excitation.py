"""Squeeze and excitation on our kernels: one operator in the place of a block's modules."""

from torch import nn

from course_lib import ops
from course_lib.nn import activation as ours

#: Class of a module -> what `ops.squeeze_excite` calls it. `timm_blocks` adds timm's classes.
ACTIVATIONS = {nn.ReLU: "relu", nn.SiLU: "silu", ours.ReLU: "relu", ours.SiLU: "silu"}
GATES = {nn.Sigmoid: "sigmoid", nn.Hardsigmoid: "hard_sigmoid", ours.Sigmoid: "sigmoid"}


class Fused(nn.Module):
    """A block whose children are held and named as ever, and whose `forward` is our operator.

    The children say what to compute: 1×1 convolutions with weight and bias, an activation, a gate.
    They are not called themselves, and so neither are hooks on them.
    """

    #: The names of the children: first convolution, activation, second convolution, gate.
    parts = ("fc1", "activation", "fc2", "scale_activation")
    #: The class whose place this one has taken, if it has.
    original = None

    def forward(self, input):
        # Through the dictionaries: nn.Module's attributes would cost more than the launch.
        children = self._modules
        first, activation, second, gate = self.parts
        activation, gate = type(children[activation]), type(children[gate])
        if activation not in ACTIVATIONS or gate not in GATES:
            raise ValueError(fault_of(self, self.parts))
        return ops.squeeze_excite(
            input, *_weights(children[first]), *_weights(children[second]),
            ACTIVATIONS[activation], GATES[gate],
        )  # fmt: skip

    @staticmethod
    def fault_beyond_parts(block):
        """What else keeps our kernels from taking the place of `block`; or None."""


def _weights(layer):
    own = layer._parameters
    if type(layer) is nn.Conv2d and "weight" in own and "bias" in own:
        return own["weight"], own["bias"]
    # Parametrised, or a replica of DataParallel's. Others would not do what they are there for.
    if type(layer).forward is not nn.Conv2d.forward or layer._forward_pre_hooks:
        raise ValueError(
            f"our kernels read a Conv2d's weights and do not call it, but this is {layer}, "
            f"with {len(layer._forward_pre_hooks)} hooks: restore the block before you change it"
        )
    return layer.weight, layer.bias


def fault_of(block, parts):
    """Why our kernels can't take the place of `block`, whose children `parts` names; or None."""
    first, activation, second, gate = (getattr(block, name) for name in parts)
    for what, module, table in (("activation", activation, ACTIVATIONS), ("gate", gate, GATES)):
        if type(module) not in table:
            known = " and ".join(dict.fromkeys(kind.__name__ for kind in table))
            return f"there are kernels for {known} as {what}, not for {type(module).__name__}"
    for name, layer in zip((parts[0], parts[2]), (first, second), strict=True):
        if not isinstance(layer, nn.Conv2d) or type(layer).forward is not nn.Conv2d.forward:
            return f"{name} must be a Conv2d, not a {type(layer).__name__}"
        sizes = layer.kernel_size, layer.stride, layer.groups, layer.bias is not None
        if sizes != ((1, 1), (1, 1), 1, True) or layer.padding not in ((0, 0), "valid", "same"):
            return f"{name} must be a 1×1 convolution with a bias, not {layer}"
    return None


class SqueezeExcitation(Fused):
    """As `torchvision.ops.SqueezeExcitation`: each channel scaled by a number found from all.

    input_channels    C, of the images (N, C, H, W), or (C, H, W), that it is given and returns
    squeeze_channels  R, of the hidden layer
    activation        of the hidden layer: torch.nn.ReLU or SiLU
    scale_activation  the gate: torch.nn.Sigmoid or Hardsigmoid

    float32, float16 or bfloat16; on a CPU PyTorch's own operators, and float64 too. The weights are
    those of the convolutions `fc1` and `fc2`, so that state_dicts go to and fro. They and all other
    children are not called themselves, so hooks on them aren't either. Raises ValueError for other
    activations and gates, when it is made and when they have been exchanged; all else as
    `ops.squeeze_excite`. Hu, Shen and Sun, "Squeeze-and-Excitation Networks" (2018). Notebook 06.
    """

    def __init__(
        self, input_channels, squeeze_channels, activation=nn.ReLU, scale_activation=nn.Sigmoid
    ):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(input_channels, squeeze_channels, 1)
        self.fc2 = nn.Conv2d(squeeze_channels, input_channels, 1)
        self.activation = activation()
        self.scale_activation = scale_activation()
        if fault := fault_of(self, self.parts):
            raise ValueError(f"{fault}; torchvision.ops.SqueezeExcitation takes any")
