import torch
import torch.nn.functional as F
from no_launches import refuse_launches

from course_lib import ops
from course_lib.kernels import conv_transpose2d, cross_entropy, dice, upsample

refuse_launches(
    conv_transpose2d, conv_transpose2d.upsample2x, cross_entropy.strided, dice, upsample
)


def dice_loss(x, target, smooth):
    valid = (target != -1)[:, None]
    p, t = x.softmax(1) * valid, F.one_hot(target.clamp_min(0), x.shape[1]).movedim(-1, 1) * valid
    found = (2 * (p * t).sum((0, 2, 3)) + smooth) / ((p + t).sum((0, 2, 3)) + smooth)
    return 1 - found.mean()


def same(pairs, leaves):
    for ours, theirs in pairs:
        found = [
            (y, *torch.autograd.grad(y.square().sum(), leaves, retain_graph=True))
            for y in (ours, theirs)
        ]
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b)


for layout in (torch.contiguous_format, torch.channels_last):
    x = torch.randn(2, 4, 3, 5).double().contiguous(memory_format=layout).requires_grad_()
    weight, bias = (torch.randn(s).double().requires_grad_() for s in ((4, 3, 2, 2), (6,)))
    options = dict(stride=2, padding=1, output_padding=1, groups=2)
    functions = ops.conv_transpose2d, F.conv_transpose2d
    same([[f(x, weight, bias, **options) for f in functions]], (x, weight, bias))
    target = torch.randint(4, (2, 3, 5))
    target[0, 0] = -1
    class_weights = torch.rand(4).double() + 0.1
    entropy = dict(weight=class_weights, ignore_index=-1)
    loss = F.cross_entropy(x, target, **entropy)
    smoothed = entropy | dict(label_smoothing=0.1, reduction="none")
    same([
        (ops.cross_entropy(x, target, **entropy), loss),
        (ops.cross_entropy(x, target, **smoothed), F.cross_entropy(x, target, **smoothed)),
        (ops.dice_loss(x, target, ignore_index=-1), dice_loss(x, target, 1)),
        (
            ops.dice_loss(x, target, class_weights, -1, 0.5, 0.3, 0.7),
            0.3 * dice_loss(x, target, 0.5) + 0.7 * loss,
        ),
        (ops.softmax(x, 1), x.softmax(1)),
        (ops.interpolate(x, scale_factor=2), F.interpolate(x, scale_factor=2)),
        (
            ops.interpolate(x, (7, 4), mode="bilinear", align_corners=True),
            F.interpolate(x, (7, 4), mode="bilinear", align_corners=True),
        ),
    ], (x,))  # fmt: skip
    nothing = torch.full_like(target, -1)
    loss = ops.dice_loss(x, nothing, ignore_index=-1, cross_entropy_weight=1.0)
    (gradient,) = torch.autograd.grad(loss, x)
    assert loss == 0 and not gradient.any()
try:
    ops.dice_loss(x, target + 4)
except RuntimeError as error:
    assert "smaller than num_classes" in str(error)
else:
    raise AssertionError("a class out of range was taken")
