import torch
from no_launches import refuse_launches

from course_lib import optim
from course_lib.kernels import optimizers

refuse_launches(optimizers, optimizers.table)

for name, options in (("SGD", dict(momentum=0.9)), ("Adam", {}), ("AdamW", dict(amsgrad=True))):
    found = []
    for module in (torch.optim, optim, torch.optim):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 9, dtype=torch.float64))
        optimiser = getattr(module, name)([p], lr=0.1, **options)
        calls = []
        optimiser.register_step_post_hook(lambda *_, calls=calls: calls.append(1))
        for _ in range(3):
            optimiser.zero_grad()
            optimiser.step(lambda p=p: (p * p).sum().backward())
        assert len(calls) == 3
        found.append(p.detach())
    assert torch.equal(*found[:2]) and torch.equal(*found[1:])
