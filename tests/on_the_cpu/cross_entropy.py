import itertools

import torch
import torch.nn.functional as F

from course_lib import ops
from course_lib.kernels import cross_entropy as kernels


def refuse(*args, **options):
    raise SystemExit("our kernel was launched")


kernels.launch = refuse
x = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
indices = torch.tensor([1, 2, -100, 0, 4, 3])
for target, weight, reduction, smoothing in itertools.product(
    (indices, torch.rand(6, 5).double()),
    (None, torch.rand(5).double()),
    ("mean", "sum", "none"),
    (0.0, 0.3),
):
    found = []
    for f in (ops.cross_entropy, F.cross_entropy):
        loss = f(x, target, weight=weight, reduction=reduction, label_smoothing=smoothing)
        found.append((loss, torch.autograd.grad(loss, x, torch.full_like(loss, 1.5))[0]))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
try:
    ops.cross_entropy(x, indices + 3)
except IndexError:
    pass
else:
    raise SystemExit("no error")
