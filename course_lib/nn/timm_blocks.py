"""timm's squeeze-and-excitation blocks on our kernels. Imported where a model has such blocks."""

from timm.layers import activations, activations_me, squeeze_excite
from timm.models import _efficientnet_blocks, senet
from torch import nn

from course_lib.nn.fused import ACTIVATIONS, GATES, Fused

ACTIVATIONS |= {activations.Swish: "silu", activations_me.SwishMe: "silu"}
GATES |= {
    activations.Sigmoid: "sigmoid",
    activations.HardSigmoid: "hard_sigmoid",
    activations_me.HardSigmoidMe: "hard_sigmoid",
}


class FusedSqueezeExcite(Fused, _efficientnet_blocks.SqueezeExcite):
    """Of EfficientNet, MobileNetV3 and their kin."""

    parts = ("conv_reduce", "act1", "conv_expand", "gate")


class FusedSEModule(Fused, squeeze_excite.SEModule):
    """Of SE-ResNet, RegNet and most others; ``timm.layers.SqueezeExcite`` is the same class."""

    parts = ("fc1", "act", "fc2", "gate")

    @staticmethod
    def fault_beyond_parts(block):
        if block.add_maxpool:
            return "it adds the maximum to the mean"
        if not isinstance(block.bn, nn.Identity):
            return f"it has a {type(block.bn).__name__} between its layers"
        return None


class FusedLegacySEModule(Fused, senet.SEModule):
    """Of the networks that timm calls ``legacy_``."""

    parts = ("fc1", "relu", "fc2", "sigmoid")


#: Class of a block -> the class that takes its place.
BLOCKS = {
    _efficientnet_blocks.SqueezeExcite: FusedSqueezeExcite,
    squeeze_excite.SEModule: FusedSEModule,
    senet.SEModule: FusedLegacySEModule,
}
#: Class of a block that is left as it is -> why.
LEFT = {
    squeeze_excite.EffectiveSEModule: "it has another formula, with one dense layer",
    squeeze_excite.SqueezeExciteCl: "it takes images N·H·W·C",
}
