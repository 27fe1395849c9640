"""Max pooling with ReLU in the same pass."""

import pytest
import torch
import torch.nn.functional as F
from tensors import PLACE, randn

from course_lib import ops

OPTIONS = [
    dict(kernel_size=2),
    dict(kernel_size=3, stride=2, padding=1),
    dict(kernel_size=(2, 3), stride=(1, 2), padding=(0, 1), dilation=(2, 1), ceil_mode=True),
    dict(kernel_size=[2], stride=[]),
]
every_option = pytest.mark.parametrize("options", OPTIONS, ids=str)


@every_option
def test_relu_in_the_same_pass(options):
    x = randn(2, 3, 7, 8)
    x[0, 0, :3, :3] = 0.0
    x[1, 2, 4:, 4:] = torch.nan
    x.requires_grad_()
    found = []
    for pooled in (
        ops.max_pool2d(x, **options, relu=True), F.max_pool2d(x, **options).relu(),
        ops.max_pool2d(x, **options, relu=True, return_indices=True)[0],
    ):  # fmt: skip
        dy = torch.linspace(-1, 2, pooled.numel(), device=PLACE).reshape(pooled.shape)
        found.append((pooled, *torch.autograd.grad(pooled, x, dy)))
    for ours in (found[0], found[2]):
        torch.testing.assert_close(ours, found[1], rtol=0, atol=1e-6, equal_nan=True)
    y, indices = ops.max_pool2d(x, **options, relu=True, return_indices=True)
    assert torch.equal(indices == -1, y == 0)
