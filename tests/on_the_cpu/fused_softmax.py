import torch
import torch.nn.functional as F

from course_lib import ops
from course_lib.kernels import bn_relu_softmax, softmax_dropout


def refuse(*args, **options):
    raise SystemExit("our kernel was launched")


bn_relu_softmax.launch = softmax_dropout.launch = refuse
x = torch.randn(6, 8, requires_grad=True)
dz = torch.randn(6, 8)
z = ops.softmax_dropout(x, 0.4)
expected = torch.softmax(x, -1) * (z != 0) / 0.6
torch.testing.assert_close(z, expected)
torch.testing.assert_close(*(torch.autograd.grad(each, x, dz)[0] for each in (z, expected)))
torch.manual_seed(1)
first = ops.softmax_dropout(x)
torch.manual_seed(1)
assert torch.equal(first, ops.softmax_dropout(x)) and not ops.softmax_dropout(x, 1).any()
mean, var, weight, bias = torch.randn(8), torch.rand(8) + 0.5, torch.rand(8), torch.randn(8)
leaves = (x, weight.requires_grad_(), bias.requires_grad_())
y = ops.bn_relu_softmax(x, mean, var, weight, bias)
expected = torch.softmax(F.relu(F.batch_norm(x, mean, var, weight, bias)), -1)
torch.testing.assert_close(y, expected)
found = [torch.autograd.grad(each, leaves, dz) for each in (y, expected)]
for ours, theirs in zip(*found, strict=True):
    torch.testing.assert_close(ours, theirs)
