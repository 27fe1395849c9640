import extremes
import torch

from course_lib import ops

assert extremes.OPERATORS.keys() == set(ops.__all__)
assert list(extremes.faults()) == []

# Half precision adds up in float32: 512² pixels are more than float16 can count.
for dtype in (torch.float16, torch.bfloat16):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(1, 3, 512, 512, generator=generator).to(dtype)
    target = torch.randint(3, (1, 512, 512), generator=generator)
    weight = torch.tensor([1.0, 2.0, 3.0])
    found, expected = (
        ops.dice_loss(each, target, weight.to(each.dtype), cross_entropy_weight=0.5)
        for each in (x, x.float())
    )
    torch.testing.assert_close(found, expected.to(dtype))
