"""Whole vision transformers of torchvision and timm, by our layers and by PyTorch's."""

import timm
import torch
import torchvision
from drop_in import apart, passes
from torch.utils.flop_counter import FlopCounterMode

from course_lib import nn

#: Images of 32 × 32 are 5 tokens.
NETWORKS = {
    "vit_b_16": lambda: torchvision.models.vit_b_16(image_size=32),
    "vit_tiny_patch16_224": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32),
}


def counted(model, x, dy):
    """(the output, {name: gradient of a parameter}, {operator: FLOPs})."""
    with FlopCounterMode(display=False) as counter:
        y, gradients = passes(model, x, dy)
    return y, gradients, {str(k): n for k, n in counter.get_flop_counts()["Global"].items()}


for name, make in NETWORKS.items():
    torch.manual_seed(3)
    model = make().double()
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():  # as torchvision's last layer: no gradient would pass it
                parameter.normal_(std=0.1)
    x, dy = torch.randn(2, 3, 32, 32).double(), torch.randn(2, 1000).double()
    y, gradients, flops = counted(model, x, dy)
    swapped = nn.replace_layers(model)
    assert swapped.left == [], swapped.left
    found, found_gradients, our_flops = counted(model, x, dy)
    assert apart(found, y) <= 1e-9 and y.any(), name
    for each, gradient in gradients.items():
        assert gradient.any() and apart(found_gradients[each], gradient) <= 1e-9, (name, each)
    assert sum(flops.values()) == sum(our_flops.values()) > 0, (name, flops, our_flops)
    assert all(operator.startswith("course_lib.") for operator in our_flops), our_flops
