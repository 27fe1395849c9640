import attention_options
import torch

from course_lib import ops
from course_lib.runtime.host.launch import recorded

with recorded() as launches:
    assert list(attention_options.truth_faults("cpu")) == []
    assert list(attention_options.packed_faults("cpu")) == []
    assert list(attention_options.torch_faults("cpu", range(20))) == []
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        assert list(attention_options.sample_faults("cpu", dtype)) == []
    q, k, v = (torch.randn(2, 2, n, 300, requires_grad=True) for n in (3, 5, 5))
    v = torch.eye(5).expand(2, 2, 5, 5).clone().requires_grad_()
    o = ops.attention(q, k, v, dropout_p=0.5)  # weights, of which half is dropped
    dv, dq = torch.autograd.grad(o.square().sum() / 2, (v, q))
    torch.testing.assert_close((dv * v).sum(), o.square().sum())
    assert (o == 0).any() and (o.sum(-1) != 1).all() and dq.any()
assert launches == []
