"""timm's blocks and layers on our kernels: imported where a model has them."""

from timm.layers import activations, activations_me, norm, squeeze_excite
from timm.models import _efficientnet_blocks, senet, vision_transformer
from torch import nn

from course_lib import ops
from course_lib.nn.attention import fault_of_heads
from course_lib.nn.fused import ACTIVATIONS, GATES, Fused
from course_lib.nn.layer import Layer
from course_lib.nn.layer_norm import LayerNorm as _LayerNorm

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


class Attention(Layer, vision_transformer.Attention):
    """Of vision transformers; whether timm would take a fused function of PyTorch's or not."""

    holds_layers = True

    def forward(self, x, attn_mask=None, is_causal=False):
        heads = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind(0)
        p = self.attn_drop.p if self.training else 0.0
        o = ops.scaled_dot_product_attention(
            self.q_norm(q), self.k_norm(k), v, attn_mask, p, is_causal
        )
        o = o.transpose(1, 2).flatten(2)
        if (norm := getattr(self, "norm", None)) is not None:  # older ones have neither
            o = norm(o)
        if (gate := getattr(self, "gate", None)) is not None:
            o = o * gate(x).sigmoid()
        return self.proj_drop(self.proj(o))

    @staticmethod
    def fault(layer):
        return fault_of_heads(layer)


class LayerNorm(_LayerNorm, norm.LayerNorm):
    """Of vision transformers: as PyTorch's, but for an option of timm's."""

    @staticmethod
    def fault(layer):
        if getattr(layer, "_fast_norm", False):
            return "timm's fast_norm is on, which autocast lets compute in half precision"
        return None


#: Class of a block -> the class that takes its place.
BLOCKS = {
    vision_transformer.Attention: Attention,
    norm.LayerNorm: LayerNorm,
    _efficientnet_blocks.SqueezeExcite: FusedSqueezeExcite,
    squeeze_excite.SEModule: FusedSEModule,
    senet.SEModule: FusedLegacySEModule,
}
#: Class of a block that is left as it is -> why.
LEFT = {
    squeeze_excite.EffectiveSEModule: "it has another formula, with one dense layer",
    squeeze_excite.SqueezeExciteCl: "it takes images N·H·W·C",
}
