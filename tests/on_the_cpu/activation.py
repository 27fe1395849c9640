import torch

from course_lib import ops
from course_lib.kernels import activation, softmax


def refuse(*args, **options):
    raise SystemExit("our kernel was launched")


activation.launch = softmax._run = refuse
x = torch.randn(5, requires_grad=True)
for ours, theirs in ((ops.relu, torch.relu), (ops.swish, torch.nn.functional.silu)):
    y = ours(x)
    assert torch.equal(y, theirs(x))
    assert torch.equal(*[torch.autograd.grad(f(x).sum(), x)[0] for f in (ours, theirs)])
x = torch.randn(3, 4, 5, dtype=torch.float64, requires_grad=True)
for ours, theirs in ((ops.softmax, torch.softmax), (ops.log_softmax, torch.log_softmax)):
    for dim, dtype in ((0, None), (1, torch.float32), (-1, torch.bfloat16)):
        found = [f(x, dim, dtype) for f in (ours, theirs)]
        assert torch.equal(*found) and found[0].dtype == (dtype or x.dtype)
        assert torch.equal(*[torch.autograd.grad(y, x, y.detach() + 1)[0] for y in found])
