"""Layers, losses, the U-Net and optimisers of the learner's autograd, beside PyTorch in float64."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import autograd as ag
from course_lib import backend
from course_lib.autograd import on_numpy
from course_lib.autograd.layers import cropped
from course_lib.autograd.tape import Tensor

F = torch.nn.functional


@pytest.fixture(autouse=True)
def on_cpu():
    backend.set_backend(False, library="numpy")


def double(module):
    """`module` with float64 parameters and statistics."""
    for _, parameter in module.named_parameters():
        parameter.data = parameter.data.astype(np.float64)
    for each in [module, *walk(module)]:
        for key, value in vars(each).items():
            if key.startswith("running_"):
                setattr(each, key, value.astype(np.float64))
    return module


def walk(module):
    for value in vars(module).values():
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, ag.Module):
                yield each
                yield from walk(each)


def torch_of(a, requires_grad=False):
    return torch.from_numpy(np.array(a)).requires_grad_(requires_grad)


def close(found, expected, tolerance=1e-10):
    expected = expected.detach().numpy()
    assert found.shape == expected.shape
    scale = max(1.0, float(abs(expected).max(initial=0)))
    assert abs(found - expected).max(initial=0) <= tolerance * scale


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_convolutions(data):
    draw = data.draw
    N, C, K = draw(st.integers(0, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    size, stride = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    padding = draw(st.integers(0, size - 1))
    H, W = (draw(st.integers(size, 9)) for _ in range(2))
    transposed, bias = draw(st.booleans()), draw(st.booleans())
    random = np.random.default_rng(draw(st.integers(0, 99)))
    kind = ag.TransposeConv2D if transposed else ag.Conv2D
    layer = double(kind(C, K, size, stride, padding, bias=bias, random=random))
    x = ag.tensor(random.standard_normal((N, C, H, W)), requires_grad=True)

    inputs = [x, layer.weight] + ([layer.bias] if bias else [])
    theirs = [torch_of(t.data, True) for t in inputs]
    run = F.conv_transpose2d if transposed else F.conv2d
    expected = run(*theirs, stride=stride, padding=padding)
    if 0 in expected.shape[2:]:
        return
    y = layer(x)
    close(y.data, expected)
    dy = random.standard_normal(y.shape)
    y.backward(dy)
    expected.backward(torch_of(dy))
    for ours, their in zip(inputs, theirs, strict=True):
        close(ours.grad, their.grad)


def test_by_hand_a_layer_needs_no_tape():
    random = np.random.default_rng(0)
    conv, x = double(ag.Conv2D(2, 3, 3, padding=1)), random.standard_normal((2, 2, 5, 6))
    y = conv.forward(x)
    dx, dweight, dbias = conv.backward(np.ones_like(y))
    on_tape = ag.tensor(x, requires_grad=True)
    conv(on_tape).sum().backward()
    on_the_tape = on_tape, conv.weight, conv.bias
    for found, expected in zip((dx, dweight, dbias), on_the_tape, strict=True):
        np.testing.assert_allclose(found, expected.grad, rtol=1e-12, atol=1e-12)


def test_one_layer_used_twice_keeps_its_calls_apart():
    random = np.random.default_rng(0)
    conv = double(ag.Conv2D(2, 2, 3, padding=1, random=random))
    x, weight, bias = (torch_of(a, True) for a in (
        random.standard_normal((1, 2, 4, 4)), conv.weight.data, conv.bias.data))  # fmt: skip
    ours = ag.tensor(x.detach().numpy(), requires_grad=True)
    (conv(conv(ours).relu()) ** 2).sum().backward()
    twice = F.conv2d(F.conv2d(x, weight, bias, padding=1).relu(), weight, bias, padding=1)
    twice.square().sum().backward()
    for found, expected in ((ours, x), (conv.weight, weight), (conv.bias, bias)):
        close(found.grad, expected.grad)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training):
    random = np.random.default_rng(0)
    ours = double(ag.BatchNorm2D(3))
    theirs = torch.nn.BatchNorm2d(3).double()
    with torch.no_grad():
        theirs.weight.copy_(torch_of([0.5, 1, 2])), theirs.bias.copy_(torch_of([1.0, 2, 3]))
    ours.load_state_dict({k: v.numpy() for k, v in theirs.state_dict().items()})
    ours.train(training), theirs.train(training)
    for _ in range(2):
        x = random.standard_normal((4, 3, 5, 2)) * 3 + 7
        dy = random.standard_normal(x.shape)
        mine, its = ag.tensor(x, requires_grad=True), torch_of(x, True)
        y, expected = ours(mine), theirs(its)
        close(y.data, expected)
        theirs.zero_grad(), setattr(ours.weight, "grad", None), setattr(ours.bias, "grad", None)
        y.backward(dy), expected.backward(torch_of(dy))
        for found, wanted in ((mine, its), (ours.weight, theirs.weight), (ours.bias, theirs.bias)):
            close(found.grad, wanted.grad)
        for name in ("running_mean", "running_var"):
            close(getattr(ours, name), getattr(theirs, name))


@settings(max_examples=30, deadline=None)
@given(*[st.integers(1, 3)] * 2, *[st.integers(3, 8)] * 2, st.integers(0, 9))
def test_max_pooling(size, stride, H, W, seed):
    random = np.random.default_rng(seed)
    x = random.permutation(2 * 3 * H * W).reshape(2, 3, H, W).astype(np.float64)
    ours, theirs = ag.tensor(x, requires_grad=True), torch_of(x, True)
    y, expected = ag.MaxPool2D(size, stride)(ours), F.max_pool2d(theirs, size, stride)
    close(y.data, expected)
    dy = random.standard_normal(y.shape)
    y.backward(dy), expected.backward(torch_of(dy))
    close(ours.grad, theirs.grad)


def test_max_pooling_of_equal_numbers_and_nan():
    x = np.array([[1, 1, np.nan, 2], [1, 1, 5, 2]]).reshape(1, 1, 2, 4)
    ours, theirs = ag.tensor(x, requires_grad=True), torch_of(x, True)
    y, expected = ag.MaxPool2D(2)(ours), F.max_pool2d(theirs, 2)
    assert np.array_equal(y.data, expected.detach().numpy(), equal_nan=True)
    y.backward(np.ones((1, 1, 1, 2))), expected.sum().backward()
    close(ours.grad, theirs.grad)


@settings(max_examples=30, deadline=None)
@given(st.tuples(*[st.integers(1, 6)] * 4), st.integers(0, 9))
def test_cropping_and_padding(sizes, seed):
    H, W, P, Q = sizes
    x = np.random.default_rng(seed).standard_normal((1, 2, H, W))
    ours, theirs = ag.tensor(x, requires_grad=True), torch_of(x, True)
    y = cropped(ours, (P, Q))
    assert y.shape == (1, 2, P, Q)
    top, left = (
        (new - old) // 2 if new > old else -((old - new) // 2) for old, new in ((H, P), (W, Q))
    )
    expected = F.pad(theirs, (left, Q - W - left, top, P - H - top))
    close(y.data, expected)
    (y**2).sum().backward(), expected.square().sum().backward()
    close(x * 0 if ours.grad is None else ours.grad, theirs.grad)


def their_losses(logits, target, weight):
    """The four losses, spelled out in PyTorch's float64."""
    valid = target != -1
    safe = target.clamp(min=0)
    log_p = logits.log_softmax(1)
    p, one_hot = log_p.exp(), F.one_hot(safe, logits.shape[1]).movedim(3, 1) * valid[:, None]
    w = weight[safe] * valid
    right = -log_p.gather(1, safe[:, None])[:, 0]
    cross_entropy = (w * right).sum() / w.sum()
    focal = (w * (1 - (-right).exp()) ** 2 * right).sum() / w.sum()
    sums = ((a * valid[:, None]).sum((0, 2, 3)) for a in (p * one_hot, p, one_hot))
    common, of_p, of_t = sums
    dice = 1 - ((2 * common + 1) / (of_p + of_t + 1)).mean()
    return {"cross_entropy": cross_entropy, "focal": focal, "dice": dice,
            "combined": 0.5 * cross_entropy + 0.5 * dice}  # fmt: skip


LOSSES = {
    "cross_entropy": ag.weighted_cross_entropy,
    "focal": lambda x, t, w: ag.focal_loss(x, t, weight=w),
    "dice": lambda x, t, w: ag.dice_loss(x, t),
    "combined": ag.combined_loss,
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("C, scale", [(2, 1), (5, 1), (3, 300), (1, 1)])
def test_losses(name, C, scale):
    random = np.random.default_rng(C)
    x = random.standard_normal((2, C, 4, 5)) * scale
    target = random.integers(-1, C, (2, 4, 5))
    weight = random.uniform(0.5, 2, C)
    ours, theirs = ag.tensor(x, requires_grad=True), torch_of(x, True)
    loss = LOSSES[name](ours, target, weight)
    expected = their_losses(theirs, torch_of(target), torch_of(weight))[name]
    assert loss.shape == ()
    close(loss.data, expected)
    (loss * 3.0).backward(), (expected * 3).backward()
    close(ours.grad, theirs.grad)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_where_nothing_is_known_or_a_class_is_missing(name):
    x = ag.tensor(np.random.default_rng(0).standard_normal((1, 3, 2, 2)), requires_grad=True)
    unknown = LOSSES[name](x, np.full((1, 2, 2), -1), np.ones(3))
    unknown.backward()
    assert unknown.item() == 0 and not x.grad.any()
    x.grad = None
    loss = LOSSES[name](x, np.zeros((1, 2, 2), int), np.ones(3))
    loss.backward()
    assert 0 < loss.item() < 10 and np.isfinite(x.grad).all()


@pytest.mark.parametrize("name", LOSSES)
def test_a_class_that_there_is_not_makes_the_loss_nan(name):
    for wrong in (3, -2, 99):
        x = ag.tensor(np.zeros((1, 3, 1, 2)), requires_grad=True)
        loss = LOSSES[name](x, np.array([[[0, wrong]]]), np.ones(3))
        loss.backward()
        assert np.isnan(loss.item()) and np.isnan(x.grad).all()


@pytest.mark.parametrize("target, words", [
    (np.zeros((1, 2, 3), int), "target"),
    (np.zeros((1, 3, 2, 2), int), "target"),
    (np.zeros((1, 2, 2)), "integers"),
])
def test_targets_that_do_not_fit(target, words):
    with pytest.raises(ValueError, match=words):
        ag.dice_loss(ag.tensor(np.zeros((1, 3, 2, 2))), target)


def test_metrics():
    target = np.array([[0, 0, 1, -1], [2, 2, 1, 0]])
    prediction = np.array([[0, 1, 1, 2], [2, 0, 1, 0]])
    matrix = ag.confusion_matrix(prediction, target, 4)
    assert matrix.tolist() == [[2, 1, 0, 0], [0, 2, 0, 0], [1, 0, 1, 0], [0] * 4]
    np.testing.assert_allclose(ag.iou_score(matrix), [2 / 4, 2 / 3, 1 / 2, np.nan])
    np.testing.assert_allclose(ag.dice_coefficient(matrix), [4 / 6, 4 / 5, 2 / 3, np.nan])
    weights = ag.calculate_class_weights(target, 4)
    np.testing.assert_allclose(weights, [7 / 9, 7 / 6, 7 / 6, 0], rtol=1e-6)
    with pytest.raises(ValueError, match="0 to 1, not 0 to 2"):
        ag.confusion_matrix(prediction, target, 2)
    with pytest.raises(ValueError, match="one shape"):
        ag.confusion_matrix(prediction[:1], target, 4)


class TorchUNet(torch.nn.Module):
    """The same network in plain PyTorch, with the same names."""

    def __init__(self, in_channels, num_classes, depth, initial_channels, use_batchnorm=True):
        super().__init__()
        nn = torch.nn

        def double_conv(c_in, c):
            steps = []
            for i in (c_in, c):
                steps.append(nn.Conv2d(i, c, 3, padding=1, bias=not use_batchnorm))
                steps += [nn.BatchNorm2d(c)] if use_batchnorm else []
                steps.append(nn.ReLU())
            block = nn.Module()
            block.steps = nn.ModuleList(steps)
            return block

        c = [initial_channels * 2**i for i in range(depth + 1)]
        self.down = nn.ModuleList(map(double_conv, [in_channels, *c[:-1]], c))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * k, k, 2, 2) for k in reversed(c[:-1]))
        self.merge = nn.ModuleList(double_conv(2 * k, k) for k in reversed(c[:-1]))
        self.head = nn.Conv2d(initial_channels, num_classes, 1)

    def forward(self, x):
        def run(block, x):
            for step in block.steps:
                x = step(x)
            return x

        skips = []
        for down in self.down[:-1]:
            skips.append(run(down, x))
            x = F.max_pool2d(skips[-1], 2)
        x = run(self.down[-1], x)
        for up, merge in zip(self.up, self.merge, strict=True):
            skip, x = skips.pop(), up(x)
            h, w = (n - m for n, m in zip(skip.shape[2:], x.shape[2:], strict=True))
            x = F.pad(x, (w // 2, w - w // 2, h // 2, h - h // 2))
            x = run(merge, torch.cat([skip, x], 1))
        return self.head(x)


@pytest.mark.parametrize("depth, size, use_batchnorm", [(2, (16, 16), True), (3, (13, 19), True),
                                                        (2, (7, 5), False)])  # fmt: skip
def test_unet_and_its_twin(depth, size, use_batchnorm):
    random = np.random.default_rng(0)
    ours = ag.UNet(2, 3, depth, 4, use_batchnorm, random=random)
    theirs = TorchUNet(2, 3, depth, 4, use_batchnorm).double()
    theirs.load_state_dict(
        {k: torch_of(v) for k, v in ours.state_dict().items()},
        strict=not use_batchnorm,  # PyTorch counts batches as well
    )
    double(ours)
    x, target = random.standard_normal((2, 2, *size)), random.integers(-1, 3, (2, *size))
    mine, its = ag.tensor(x), torch_of(x)
    logits, expected = ours(mine), theirs(its)
    close(logits.data, expected)
    ag.combined_loss(logits, target, np.ones(3)).backward()
    their_losses(expected, torch_of(target), torch.ones(3).double())["combined"].backward()
    names = dict(theirs.named_parameters())
    assert [name for name, _ in ours.named_parameters()] == list(names)
    for name, parameter in ours.named_parameters():
        close(parameter.grad, names[name].grad, 1e-8)
    ours.eval(), theirs.eval()
    with ag.no_grad():
        close(ours(mine).data, theirs(its))


def test_state_that_does_not_fit_changes_nothing():
    net, other = ag.UNet(initial_channels=2, depth=2), ag.UNet(initial_channels=3, depth=2)
    before = net.state_dict()
    wrong = dict(list(before.items())[:-1])
    for state, words in ((other.state_dict(), "shape"), (wrong, "head.bias"),
                         (before | {"more": np.ones(1)}, "more")):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            net.load_state_dict(state)
    assert all(np.array_equal(before[k], v) for k, v in net.state_dict().items())


@pytest.mark.parametrize("make, their, options", [
    (ag.SGD, torch.optim.SGD, {"lr": 0.1}),
    (ag.SGD, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    (ag.Adam, torch.optim.Adam, {"lr": 0.01}),
    (ag.Adam, torch.optim.Adam, {"lr": 0.01, "weight_decay": 0.1, "betas": (0.5, 0.9)}),
])  # fmt: skip
def test_optimisers(make, their, options):
    random = np.random.default_rng(0)
    first = [random.standard_normal(shape).astype(np.float32) for shape in ((3, 2), (5,), ())]
    ours = [ag.tensor(a.copy(), requires_grad=True) for a in first]
    theirs = [torch_of(a, True) for a in first]
    mine, its = make(ours, **options), their(theirs, **options)
    for _ in range(5):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = np.asarray(random.standard_normal(p.shape), np.float32)
            q.grad = torch_of(p.grad)
        kept, before = mine.state_dict(), [p.data.copy() for p in ours]
        mine.step(), its.step()
    for p, q in zip(ours, theirs, strict=True):
        close(p.data, q, 1e-6)
    # Going on from what was kept gives the same bits.
    again = [ag.tensor(a, requires_grad=True) for a in before]
    for p, q in zip(again, ours, strict=True):
        p.grad = q.grad
    resumed = make(again, **options)
    resumed.load_state_dict(kept)
    resumed.step()
    assert all(np.array_equal(p.data, q.data) for p, q in zip(again, ours, strict=True))


@pytest.mark.parametrize("call, words", [
    (lambda x: ag.Conv2D(3, 4, 3)(x), r"\(N, 3, H, W\), not \(1, 2, 4, 4\)"),
    (lambda x: ag.TransposeConv2D(3, 4)(x), r"TransposeConv2D expects \(N, 3"),
    (lambda x: ag.BatchNorm2D(3)(x), r"BatchNorm2D expects \(N, 3"),
    (lambda x: ag.BatchNorm2D(2)(x[:, :, :1, :1]), "two values a channel"),
    (lambda x: ag.MaxPool2D(5)(x), "≥ 5"),
    (lambda x: ag.UNet(2, depth=3)(x), "at least 8"),
    (lambda x: ag.UNet(2, depth=1), "2 to 5"),
    (lambda x: ag.Conv2D(2, 4, 3)(x[0]), "not"),
    (lambda x: ag.focal_loss(x, np.zeros((1, 4, 4), int), gamma=-1), "gamma"),
])
def test_wrong_calls(call, words):
    with pytest.raises(ValueError, match=words):
        call(ag.tensor(np.ones((1, 2, 4, 4), np.float32)))


def test_float32_stays_float32():
    net = ag.UNet(2, 3, depth=2, initial_channels=2)
    x = Tensor(np.random.default_rng(0).standard_normal((2, 2, 8, 8)).astype(np.float32), True)
    loss = ag.combined_loss(net(x), np.zeros((2, 8, 8), np.int64), np.ones(3, np.float32))
    loss.backward()
    assert loss.dtype == np.float32
    assert all(p.grad.dtype == np.float32 for p in [x, *net.parameters()])
    assert all(a.dtype == np.float32 for a in net.state_dict().values())


def test_the_cpu_has_what_the_kernels_have():
    names = {name for name in vars(on_numpy) if isinstance(getattr(on_numpy, name), type)}
    assert names == {"conv2d", "conv_transpose2d", "batch_norm", "max_pool2d", "relu"}
