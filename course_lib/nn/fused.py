"""Squeeze-and-excitation blocks on our kernels: one operator in the place of their layers."""

from torch import nn

from course_lib import ops
from course_lib.nn import activation as ours
from course_lib.nn.conv2d import Conv2d
from course_lib.nn.layer import Layer

#: Class of a module -> what `ops.squeeze_excite` calls it. `timm_blocks` adds timm's classes.
ACTIVATIONS = {nn.ReLU: "relu", nn.SiLU: "silu", ours.ReLU: "relu", ours.SiLU: "silu"}
GATES = {
    nn.Sigmoid: "sigmoid", nn.Hardsigmoid: "hard_sigmoid",
    ours.Sigmoid: "sigmoid", ours.Hardsigmoid: "hard_sigmoid",
}  # fmt: skip


class Fused(Layer, nn.Module):
    """A block whose children are held and named as ever, and whose `forward` is our operator.

    The children say what to compute: 1×1 convolutions with weight and bias, an activation, a gate.
    They are not called themselves, and so neither are hooks on them.
    """

    #: The names of the children: first convolution, activation, second convolution, gate.
    parts = ("fc1", "activation", "fc2", "scale_activation")

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

    @classmethod
    def fault(cls, block):
        for name, child in block.named_children():
            if child._forward_hooks or child._forward_pre_hooks:
                return f"{name} has hooks, which would not be called"
        return cls.fault_beyond_parts(block) or fault_of(block, cls.parts)

    @staticmethod
    def fault_beyond_parts(block):
        """What of `block`, beside its parts, our kernels can't compute; or None."""


def _weights(layer):
    own = layer._parameters
    if type(layer) in (nn.Conv2d, Conv2d) and "weight" in own and "bias" in own:
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
