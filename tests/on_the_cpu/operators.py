import peers
import torch
from contract.operator_promises import FOR_A_GPU, keep, promises
from contract.operators import SUBJECTS, Held, near

from course_lib import ops
from course_lib.runtime.host.launch import recorded

torch.manual_seed(2)
#: What other scripts hold, what is of our kernels alone, and what takes long.
ELSEWHERE = {
    "layouts", "extreme_numbers", "refused", "worded", "our_kernels", "dispatched", "compiled",
    *FOR_A_GPU,
}  # fmt: skip
with recorded() as launches:
    for subject in SUBJECTS:
        held = Held(subject)
        for promise in promises(subject):
            if promise not in ELSEWHERE:
                keep(held, promise)
        exact = subject.operands(torch.float64)
        found, expected = (held.run(exact, library) for library in (ops, peers))
        near("double", found, expected, scale=64)
    x, *others = (torch.randn(shape).double().requires_grad_() for shape in ((2, 3), (5, 3), (5,)))
    torch.autograd.gradcheck(ops.linear, (x, *others))
    shapes = (2, 6, 3, 2), (3, 6), (3,), (6, 3), (6,)
    exact = [torch.randn(shape).double().requires_grad_() for shape in shapes]
    for names in (("silu", "sigmoid"), ("relu", "hard_sigmoid"), ("silu", "hard_sigmoid")):
        torch.autograd.gradcheck(lambda *a, names=names: ops.squeeze_excite(*a, *names), exact)
assert launches == []
