import torch
from test_ops_squeeze_excite import FORMATS, FUNCTIONS, images, near, ops, passes, peer, weights

from course_lib.kernels import squeeze_excite


def refuse(*args, **options):
    raise SystemExit("our kernel was launched")


squeeze_excite.forward = squeeze_excite.backward = refuse

for names in FUNCTIONS:
    for memory_format in FORMATS:
        x, given = images(3, 6, 5, 4, memory_format=memory_format), weights(6, 3)
        dy = torch.randn_like(x)
        found = passes(ops.squeeze_excite, x, given, dy, *names)
        near(found, passes(peer, x, given, dy, *names))
        assert all(each.is_contiguous(memory_format=memory_format) for each in found[:2])
    exact = [each.detach().double().requires_grad_() for each in (x[:2, :, :3, :2], *given)]
    torch.autograd.gradcheck(lambda *a, names=names: ops.squeeze_excite(*a, *names), exact)
half = images(2, 6, 4, 4, dtype=torch.bfloat16)
dy, given = torch.randn_like(half), weights(6, 3, convolutions=True)
plain = passes(ops.squeeze_excite, half, given, dy)
with torch.autocast("cpu", dtype=torch.bfloat16):
    assert all(
        torch.equal(*p)
        for p in zip(passes(ops.squeeze_excite, half, given, dy), plain, strict=True)
    )
near(plain, passes(peer, half.float(), given, dy.float()), 2**-8)
for shape in ((0, 6, 3, 3), (2, 6, 0, 3)):
    x = images(*shape)
    near(*(passes(f, x, given, torch.ones_like(x)) for f in (ops.squeeze_excite, peer)))
for args in ((half, *given, "gelu"), (half[0, 0], *given), (half, *weights(5, 3))):
    try:
        ops.squeeze_excite(*args)
    except (TypeError, ValueError):
        continue
    raise SystemExit("no error")
torch.library.opcheck(
    torch.ops.course_lib.squeeze_excite.default, (half.requires_grad_(), *given, "silu", "sigmoid")
)
