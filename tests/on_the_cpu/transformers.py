"""Whole vision transformers of torchvision and timm, by our layers and by PyTorch's."""

import timm
import torch
import torchvision
from drop_in import apart, passes
from torch.utils.flop_counter import FlopCounterMode

from course_lib import nn

NETWORKS = {  # of images of 32 × 32, which are 5 tokens
    "vit_b_16": lambda: torchvision.models.vit_b_16(image_size=32),
    "vit_tiny_patch16_224": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32),
}

for name, make in NETWORKS.items():
    torch.manual_seed(3)
    model = make().double()
    for parameter in model.parameters():
        if not parameter.any():  # as torchvision's last layer: no gradient would pass it
            torch.nn.init.normal_(parameter, std=0.1)
    x, dy = torch.randn(2, 3, 32, 32).double(), torch.randn(2, 1000).double()
    with FlopCounterMode(display=False) as theirs:
        y, gradients = passes(model, x, dy)
    assert nn.replace_layers(model).left == []
    with FlopCounterMode(display=False) as ours:
        found, found_gradients = passes(model, x, dy)
    assert y.any() and apart(found, y) <= 1e-9, name
    for each, gradient in gradients.items():
        assert gradient.any() and apart(found_gradients[each], gradient) <= 1e-9, (name, each)
    assert theirs.get_total_flops() == ours.get_total_flops() > 0, name
    counted = map(str, ours.get_flop_counts()["Global"])
    assert all(operator.startswith("course_lib.") for operator in counted), name
