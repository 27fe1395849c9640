import itertools

import numpy as np
import torch
import torch.nn.functional as F
from counted_norms import counted_norms
from no_launches import refuse_launches

from course_lib import autograd as ag
from course_lib import backend, models, nn
from course_lib.kernels import batch_norm, conv2d, max_pool2d

refuse_launches(max_pool2d.launching, batch_norm.ladder, batch_norm.vectorised, conv2d.launching)

backend.set_backend(False, library="numpy")
random = np.random.default_rng(0)
N_CLASSES = 3


def apart(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


def flat(gradients):
    return np.concatenate([np.asarray(g, np.float64).ravel() for g in gradients])


def passes(model, x, target):
    """Logits, loss and all gradients of one of PyTorch's."""
    x = torch.from_numpy(x).to(next(model.parameters()).dtype)
    logits = model(x)
    loss = F.cross_entropy(logits, torch.from_numpy(target), ignore_index=-1)
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    return logits.detach().double().numpy(), loss.item(), flat(gradients)


def passes_on_the_tape(model, x, target):
    logits = model(ag.tensor(x))
    loss = ag.weighted_cross_entropy(logits, target)
    loss.backward()
    return logits.data, loss.item(), flat(p.grad for p in model.parameters())


# The three of them from the same weights, beside float64.
for depth, size, use_batchnorm, training in (
    (2, (16, 16), True, True), (2, (13, 10), True, True), (2, (7, 5), True, False),
    (3, (13, 19), False, True), (2, (5, 12), False, False),
):  # fmt: skip
    tape = ag.UNet(2, N_CLASSES, depth, 4, use_batchnorm, random=random)
    ours = models.UNet.of_weights(tape.state_dict())
    twin = models.UNet.of_weights(tape.state_dict(), layers=torch.nn)
    truth = models.UNet.of_weights(tape.state_dict(), layers=torch.nn).double()
    x = random.standard_normal((2, 2, *size)).astype(np.float32)
    target = random.integers(-1, N_CLASSES, (2, *size))
    for model in (tape, ours, twin, truth):
        model.train(training)
    expected = passes(truth, x, target)
    for found in (passes_on_the_tape(tape, x, target), passes(ours, x, target),
                  passes(twin, x, target)):  # fmt: skip
        for what, true in zip(found, expected, strict=True):
            assert apart(what, true) <= 1e-5, (depth, size, use_batchnorm, training)
    own = models.arrays_of(ours)
    for name, value in tape.state_dict().items():
        np.testing.assert_allclose(value, own[name], rtol=1e-4, atol=1e-6)

# Batch norm and ReLU are one operator, unless somebody would miss it.
model = models.UNet(depth=2, initial_channels=4)
x = torch.randn(2, 2, 16, 12)


def fused(*arguments):
    with counted_norms() as calls:
        model(*arguments)
    return calls.count(True)


assert fused(x) == 10
seen = []
step = model.down[0].steps
handles = [step[1].register_forward_hook(lambda *_: seen.append(1)),
           step[5].register_forward_pre_hook(lambda *_: seen.append(2))]  # fmt: skip
assert fused(x) == 8 and seen == [1, 2]
for handle in handles:
    handle.remove()
handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
assert fused(x) == 0
handle.remove()
step[2] = torch.nn.SiLU()
assert fused(x) == 9
step[2] = nn.ReLU()
assert fused(x) == 10

# Compiled, traced, exported, copied into channels-last, and under autocast.
model = models.UNet(3, 4, depth=2, initial_channels=4)
twin = models.UNet(3, 4, depth=2, initial_channels=4, layers=torch.nn)
for training, (h, w) in itertools.product((True, False), ((16, 16), (11, 9))):
    model.train(training), twin.train(training)
    twin.load_state_dict(model.state_dict())  # statistics, too
    x = torch.randn(2, 3, h, w)
    expected = twin(x)
    torch.testing.assert_close(model(x), expected)
    traced = torch.fx.symbolic_trace(model)
    torch.testing.assert_close(traced(x), expected)
    kinds = [type(model.get_submodule(n.target)) for n in traced.graph.nodes
             if n.op == "call_module"]  # fmt: skip
    assert kinds.count(nn.BatchNorm2d) == 10 and kinds.count(nn.ReLU) == 10
    if training == (h == 16):  # compiling takes long: once in each mode, in each size
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)
    y = model(x.contiguous(memory_format=torch.channels_last))
    torch.testing.assert_close(y, expected)
    assert y.is_contiguous(memory_format=torch.channels_last)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model(x)
        assert y.dtype is torch.bfloat16 and torch.allclose(y.float(), expected, atol=0.1)
program = torch.export.export(model, (x,))
assert sum("batch_norm" in str(node.target) for node in program.graph.nodes) == 10
torch.testing.assert_close(program.module()(x), expected)
models.load_arrays(twin, models.arrays_of(compiled))
assert "_orig_mod" not in "".join(models.arrays_of(compiled))
