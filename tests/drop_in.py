"""How a whole network is compared with itself before the swap: outputs and every gradient."""

import copy

import torch

from course_lib import nn
from course_lib.nn.fused import Fused

OUTPUT, GRADIENT = 1e-5, 1e-4  # what ‖a − b‖ / ‖b‖ may be


def prepared(model, x):
    """`model` in evaluation mode, so that its channels count and rounding stays rounding.

    Biases, which start at zero, are drawn, so that every gate has a value of its own. The
    statistics of batch normalisation are halfway between those of `x` and those that it starts
    with: with the latter, deep activations fade away; with the former alone, each layer magnifies
    the rounding of the one before, until PyTorch itself is as far from float64 as 1e-5.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.5)
        for module in model.modules():
            if hasattr(module, "running_var"):
                module.momentum = 0.5
        model.train()(x)
    return model.eval()


def passes(model, x, dy, autocast=None):
    """The output, and {name: gradient} for every parameter."""
    with torch.autocast(x.device.type, dtype=autocast, enabled=autocast is not None):
        y = model(x)
    names, parameters = zip(*model.named_parameters(), strict=True)
    return y, dict(zip(names, torch.autograd.grad(y, parameters, dy.to(y.dtype)), strict=True))


def apart(found, expected):
    """‖a − b‖ / ‖b‖; 0 where both are zero."""
    gap, size = (found.double() - expected.double()).norm().item(), expected.double().norm().item()
    return gap / size if size else float(gap > 0)


def compare(model, x, n_swapped):
    """Swap a copy's blocks; (difference of the output, the worst of a gradient, its name)."""
    swapped = copy.deepcopy(model)
    replacement = nn.replace_layers(swapped, types=[Fused])
    assert (len(replacement.replaced), replacement.left) == (n_swapped, []), replacement.left
    before, after = model.state_dict(), swapped.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(after[key], before[key]) for key in before)
    with torch.no_grad():
        dy = torch.randn_like(model(x))
    (ours, our_gradients), (theirs, gradients) = (passes(each, x, dy) for each in (swapped, model))
    name = max(gradients, key=lambda name: apart(our_gradients[name], gradients[name]))
    return apart(ours, theirs), apart(our_gradients[name], gradients[name]), name
