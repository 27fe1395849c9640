"""torchvision's squeeze and excitation on our kernels."""

from torch import nn
from torchvision.ops import misc

from course_lib.nn.fused import Fused, fault_of


class SqueezeExcitation(Fused, misc.SqueezeExcitation):
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
        super().__init__(input_channels, squeeze_channels, activation, scale_activation)
        if fault := fault_of(self, self.parts):
            raise ValueError(f"{fault}; torchvision.ops.SqueezeExcitation takes any")


#: Class of a block -> the class that takes its place.
BLOCKS = {misc.SqueezeExcitation: SqueezeExcitation}
