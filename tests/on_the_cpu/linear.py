import torch
from test_ops_linear import F, case, near, ops, passes

from course_lib.kernels import linear


def refuse(*args, **options):
    raise SystemExit("our kernel was launched")


linear.forward = linear.backward = refuse

for shape in ((3, 4), (4,), (2, 3, 4), (0, 4), (3, 0)):
    for bias in (True, False):
        operands = case(*shape, bias=bias)
        near(passes(ops.linear, *operands), passes(F.linear, *operands))
exact = [x.double().requires_grad_() for x in case(2, 3)]
torch.autograd.gradcheck(ops.linear, exact)
