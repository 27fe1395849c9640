"""A convolution and its batch norm as one operator: what the two give, bit for bit."""

import contextlib

import pytest
import torch
from contract.operators import quick
from tensors import PLACE, randn
from torch.utils.flop_counter import FlopCounterMode

from course_lib import SIMULATED, nn, ops
from course_lib.models.steps import Steps, normalised
from course_lib.runtime.host.launch import recorded

SHAPE = (2, 3, 7, 6)
OPTIONS = {
    "plain": {},
    "all options": dict(stride=(2, 1), padding=(1, 0), dilation=(1, 2)),
    "relu": dict(padding=1, relu=True),
    "numbers": dict(momentum=0.3, eps=0.1, relu=True),
}
KINDS = {
    "bfloat16, channels-last": (torch.bfloat16, torch.channels_last),
    "float32": (torch.float32, torch.contiguous_format),
}
QUICK = KINDS["bfloat16, channels-last"]  # whose kernels take the simulator a quarter of the time


@pytest.fixture(autouse=True)
def _quick(request):
    """What is tested is the operator, but where a test asks what it launches on its own."""
    with contextlib.nullcontext() if "launches" in request.node.name else quick():
        yield


def given(dtype=torch.float32, layout=torch.contiguous_format):
    """(x, weight, scale, shift, running mean, running variance); the first four are leaves."""
    torch.manual_seed(4)
    x = randn(*SHAPE, dtype=dtype).contiguous(memory_format=layout)
    weight = randn(4, 3, 3, 3, dtype=dtype) / 3
    leaves = [x, weight, randn(4), randn(4)]
    for each in leaves:
        each.requires_grad_()
    return *leaves, randn(4), randn(4).abs()


def apart(x, weight, scale, shift, mean, var, *, relu=False, momentum=0.1, eps=1e-5, **options):
    images = ops.conv2d(x, weight, None, **options)
    return ops.batch_norm(images, mean, var, scale, shift, True, momentum, eps, relu=relu)


def results(function, inputs, options):
    y = function(*inputs, **options)
    dy = torch.linspace(-1, 2, y.numel(), device=y.device).view(y.shape).to(y.dtype)
    leaves = [x for x in inputs[:4] if x is not None]
    gradients = torch.autograd.grad(y, leaves, dy.contiguous(memory_format=torch.channels_last)
                                    if not y.is_contiguous() else dy)  # fmt: skip
    return [y, *gradients, *inputs[4:]]


@pytest.mark.parametrize("label, kind", [
    *((label, "bfloat16, channels-last") for label in OPTIONS),
    *((label, "float32") for label in (["plain"] if SIMULATED else OPTIONS)),
])  # fmt: skip
def test_both_at_once_are_the_two(label, kind):
    found = results(ops.conv2d_batch_norm, given(*KINDS[kind]), OPTIONS[label])
    expected = results(apart, given(*KINDS[kind]), OPTIONS[label])
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other) and one.stride() == other.stride()


def test_without_weights_and_statistics():
    x, weight, *_ = given(*QUICK)
    inputs = x, weight, None, None, None, None
    found = results(ops.conv2d_batch_norm, inputs, {})
    expected = results(apart, inputs, {})
    assert all(map(torch.equal, found[:3], expected[:3]))


@pytest.mark.parametrize("needed", [0, 1, 2])
def test_gradients_that_nobody_asks_for_are_not_made(needed):
    inputs = [x.detach() for x in given(*QUICK)]
    inputs[needed].requires_grad_()
    (found,) = torch.autograd.grad(ops.conv2d_batch_norm(*inputs).sum(), inputs[needed])
    inputs[4:] = given(*QUICK)[4:]
    (expected,) = torch.autograd.grad(apart(*inputs).sum(), inputs[needed])
    assert torch.equal(found, expected)


def test_autocast_and_no_gradients():
    inputs = given()
    with torch.autocast(PLACE, torch.bfloat16):
        y = ops.conv2d_batch_norm(*inputs, relu=True)
        expected = apart(*given(), relu=True)
    assert y.dtype is torch.bfloat16 and torch.equal(y, expected)
    assert type(y.grad_fn).__name__ == "Conv2dBatchNormBackward"
    with torch.no_grad():
        assert ops.conv2d_batch_norm(*inputs).grad_fn is None


def test_torch_compile_and_flops():
    inputs = given(*QUICK)
    with FlopCounterMode(display=False) as ours:
        ops.conv2d_batch_norm(*inputs).sum().backward()
    with FlopCounterMode(display=False) as theirs:
        apart(*given(*QUICK)).sum().backward()
    assert ours.get_total_flops() == theirs.get_total_flops() > 0
    torch.library.opcheck(
        torch.ops.course_lib.conv2d_batch_norm.default,
        (*[x.detach() for x in inputs], [1, 1], [0, 0], [1, 1], 1, 0.1, 1e-5, True),
        test_utils=("test_schema", "test_faketensor"),
    )


@pytest.mark.parametrize("change, error, says", [
    (dict(weight=torch.ones(4, 2, 3, 3)), RuntimeError, "channels"),
    (dict(weight=torch.ones(4, 3, 9, 9)), RuntimeError, "Kernel size"),
    (dict(weight=torch.ones(4, 3, 3, 3).half()), RuntimeError, "weight type"),
    (dict(scale=torch.ones(3)), RuntimeError, "weight should contain 4"),
    (dict(shift=torch.ones(5)), RuntimeError, "bias should contain 4"),
    (dict(mean=torch.ones(8)), RuntimeError, "running_mean should contain 4"),
    (dict(mean=None), ValueError, "both be None"),
    (dict(x=torch.ones(3, 7, 6)), RuntimeError, "4D"),
    (dict(x=torch.ones(1, 3, 3, 3)), ValueError, "more than 1 value"),
    (dict(x=None), TypeError, "input must be Tensor"),
    (dict(stride=0), RuntimeError, "stride"),
    (dict(padding="same"), TypeError, "padding must be int"),
    (dict(eps=0.0), ValueError, "eps must be positive"),
    (dict(momentum="a"), TypeError, "momentum"),
])  # fmt: skip
def test_what_is_refused(change, error, says):
    names = "x", "weight", "scale", "shift", "mean", "variance"
    inputs = dict(zip(names, (x.detach() for x in given()), strict=True))
    before = [inputs[name].clone() for name in ("mean", "variance")]
    kept = inputs["mean"], inputs["variance"]
    inputs |= {k: v.to(PLACE) if torch.is_tensor(v) else v for k, v in change.items() if k in names}
    options = {k: v for k, v in change.items() if k not in names}
    with pytest.raises(error, match=says):
        ops.conv2d_batch_norm(*inputs.values(), **options)
    assert all(map(torch.equal, kept, before))


# ── where networks use it ────────────────────────────────────────────────────────────────────────


def titles(y):
    """The nodes of autograd's graph that are ours, from the last to the first."""
    found, node = [], y.grad_fn
    while node is not None:
        found.append(type(node).__name__.removesuffix("Backward"))
        node = node.next_functions[0][0] if node.next_functions else None
    theirs = "AccumulateGrad", "ViewBackward0"
    return [name for name in found if name not in theirs]


def layers(**options):
    torch.manual_seed(0)
    return [nn.Conv2d(3, 4, 3, padding=1, bias=False, **options), nn.BatchNorm2d(4), nn.ReLU()]


def ours(found):
    return Steps(*found).to(PLACE)


def test_steps_are_one_node_where_that_is_the_same():
    x = randn(2, 3, 5, 5)
    assert titles(ours([*layers(), nn.Conv2d(4, 2, 1)])(x)) == ["Conv2d", "Conv2dBatchNorm"]
    assert titles(ours(layers()[:2])(x)) == ["Conv2dBatchNorm"]
    biased = nn.Conv2d(3, 4, 3)
    assert titles(ours([biased, *layers()[1:]])(x)) == ["BatchNorm", "Conv2d"]
    mirrored = layers(padding_mode="reflect")
    assert titles(ours(mirrored)(x))[0] == "BatchNorm"
    assert titles(ours(layers())(x[0][None])) == ["Conv2dBatchNorm"]
    hooked = layers()
    hooked[1].register_forward_hook(lambda *_: None)
    assert titles(ours(hooked)(x)) == ["Relu", "BatchNorm", "Conv2d"]
    watched = layers()
    watched[0].register_forward_hook(lambda *_: None)
    assert titles(ours(watched)(x)) == ["BatchNorm", "Conv2d"]
    evaluated = ours(layers()).eval()
    evaluated(x)
    assert evaluated[1].num_batches_tracked == 0


def test_pooling_and_linear_layers_take_their_relu_along():
    x = randn(2, 3, 4, 4)
    found = ours([nn.MaxPool2d(2), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3), nn.ReLU()])
    y = found(x.requires_grad_())
    assert titles(y) == ["Linear", "MaxPool2d"]
    expected = torch.nn.Sequential(*found)(x)
    assert torch.equal(y, expected) and titles(expected)[0] == "Relu"
    pairs = torch.autograd.grad(y.sum(), x) + torch.autograd.grad(expected.sum(), x)
    assert torch.equal(*pairs)
    found[1].register_forward_hook(lambda *_: None)
    assert titles(found(x)) == ["Linear", "Relu", "MaxPool2d"]


@pytest.mark.parametrize("relu", [False, True])
def test_steps_give_what_the_layers_give(relu):
    x, found = randn(2, 3, 5, 5), []
    for together in (True, False):
        model = ours(layers()[: 2 + relu])
        y = model(x) if together else torch.nn.Sequential(*model)(x)
        y.square().sum().backward()
        found.append([y, *(p.grad for p in model.parameters()), *model.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other)
    assert found[0][-1] == 1


@pytest.mark.parametrize("momentum", [0.1, None])
def test_a_batch_that_is_refused_is_not_counted(momentum):
    model = ours(layers())
    model[1].momentum = momentum
    for wrong in (randn(2, 4, 5, 5), randn(2, 3, 5, 5).double(), randn(1, 3, 5, 5)[:, :, :0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            model(wrong)
    with pytest.raises(ValueError, match="more than 1 value"):
        model[1](randn(1, 4, 1, 1))
    assert model[1].num_batches_tracked == 0 and (model[1].running_mean == 0).all()
    other = torch.nn.BatchNorm2d(4, momentum=momentum).to(PLACE)
    for _ in range(3):
        x = randn(2, 3, 5, 5)
        model(x)
        other(model[0](x))
    assert model[1].num_batches_tracked == 3
    torch.testing.assert_close(model[1].running_mean, other.running_mean)
    torch.testing.assert_close(model[1].running_var, other.running_var)


def test_named_layers_are_as_steps_are():
    convolution, norm, relu = (layer.to(PLACE) for layer in layers())
    x = randn(2, 3, 5, 5)
    assert titles(normalised(x, convolution, norm, relu)) == ["Conv2dBatchNorm"]
    assert titles(normalised(x, convolution, norm)) == ["Conv2dBatchNorm"]
    assert titles(normalised(x, None, nn.BatchNorm2d(3).to(PLACE), relu)) == ["BatchNorm"]


@pytest.mark.skipif(not SIMULATED, reason="asks what the simulator was given")
def test_the_launches_are_those_of_the_two():
    launched, found = [], []
    for function in (ops.conv2d_batch_norm, apart):
        with recorded() as launches:
            found.append(results(function, given(*QUICK), dict(relu=True)))
        launched.append([kernel for kernel, *_ in launches])
    assert launched[0] == launched[1] and launched[0] and all(map(torch.equal, *found))
