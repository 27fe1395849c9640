import torch
import torch.nn.functional as F

from course_lib import ops
from course_lib.kernels import conv2d as kernels


def refuse(*args, **options):
    raise SystemExit("our kernel was launched")


kernels.launch = refuse
for layout in (torch.contiguous_format, torch.channels_last):
    x = torch.randn(2, 3, 6, 5, dtype=torch.float64).contiguous(memory_format=layout)
    weight, bias = torch.randn(4, 3, 3, 3).double(), torch.randn(4).double()
    inputs = [t.requires_grad_() for t in (x, weight, bias)]
    found = []
    for f in (ops.conv2d, F.conv2d):
        y = f(*inputs, stride=2, padding=1)
        found.append((y, *torch.autograd.grad(y.square().sum(), inputs)))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)
    inputs = (*inputs, [1, 2], [0, 1], [1, 1], 1)
    operator = torch.ops.course_lib.conv2d.default
    torch.library.opcheck(operator, inputs, test_utils="test_faketensor")
