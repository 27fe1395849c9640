"""The Dice loss on our kernels."""

from torch import nn

from course_lib import ops
from course_lib.nn.layer import Layer


class DiceLoss(Layer, nn.Module):
    """Soft Dice loss of logits (N, C, …) and class indices (N, …), with cross-entropy if wanted.

    weight                (C,): what each class counts in the cross-entropy; a buffer
    ignore_index          pixels with this index count nothing
    smooth                added to numerator and denominator of each class's dice
    dice_weight           what the Dice loss is multiplied by
    cross_entropy_weight  and what the mean cross-entropy is

    See `course_lib.ops.dice_loss`.
    """

    def __init__(
        self, weight=None, ignore_index=-100, smooth=1.0, dice_weight=1.0, cross_entropy_weight=0.0
    ):
        super().__init__()
        self.register_buffer("weight", weight)
        self.ignore_index, self.smooth = ignore_index, smooth
        self.dice_weight, self.cross_entropy_weight = dice_weight, cross_entropy_weight

    def forward(self, input, target):
        return ops.dice_loss(
            input, target, self.weight, self.ignore_index, self.smooth, self.dice_weight,
            self.cross_entropy_weight,
        )  # fmt: skip

    def extra_repr(self):
        return (
            f"ignore_index={self.ignore_index}, smooth={self.smooth}, "
            f"dice_weight={self.dice_weight}, cross_entropy_weight={self.cross_entropy_weight}"
        )
