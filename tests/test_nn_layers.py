"""Every layer of `nn` takes the place of PyTorch's: name, state, values and gradients."""

import copy
import pickle

import pytest
import torch
from contract.operators import near, quick
from tensors import PLACE, close, randn

from course_lib import nn

#: (name, arguments, options, shapes of inputs). An input is random numbers, or a tensor.
LAYERS = [
    *((name, arguments, {}, [(11,), (2, 3, 4)]) for name, *arguments in (
        ("ReLU",), ("ReLU", True), ("ReLU6",), ("ReLU6", True), ("LeakyReLU",),
        ("LeakyReLU", 0.2, True), ("LeakyReLU", -0.5), ("SiLU",), ("SiLU", True), ("Sigmoid",),
        ("Hardsigmoid",), ("Hardsigmoid", True), ("Hardswish",), ("Hardswish", True), ("GELU",),
        ("GELU", "tanh"),
    )),
    *(("Conv2d", (4, 6, (3, 2)), options, [(2, 4, 6, 5), (4, 6, 5)]) for options in (
        {}, dict(stride=2, padding=1, bias=False), dict(padding="same", dilation=2),
        dict(padding="valid", groups=2), dict(padding=(1, 2), padding_mode="reflect"),
        dict(padding=1, padding_mode="circular"), dict(padding="same", padding_mode="replicate"),
    )),
    *(("ConvTranspose2d", (4, 6, (3, 2)), options, [(2, 4, 3, 4), (4, 4, 3)]) for options in (
        {}, dict(stride=2, padding=1, bias=False), dict(stride=2, output_padding=1, groups=2),
        dict(dilation=2, padding=(1, 2)),
    )),
    *(("BatchNorm2d", (5,), options, [(3, 5, 4, 4)] * 3) for options in (
        {}, dict(momentum=None), dict(affine=False), dict(track_running_stats=False),
        dict(eps=0.1, momentum=0.5),
    )),
    *(("LayerNorm", ((3, 4),), options | dict(eps=0.1), [(2, 5, 3, 4)]) for options in (
        {}, {"bias": False}, {"elementwise_affine": False},
    )),
    *(("Linear", (4, 5), options, [(3, 4)]) for options in ({}, dict(bias=False))),
    *(("MaxPool2d", (), options, [(2, 3, 7, 8)]) for options in (
        dict(kernel_size=2), dict(kernel_size=3, stride=2, padding=1),
        dict(kernel_size=(2, 3), stride=(1, 2), padding=(0, 1), dilation=(2, 1), ceil_mode=True),
        dict(kernel_size=[2], stride=[]), dict(kernel_size=2, return_indices=True),
    )),
    *(("AdaptiveAvgPool2d", (size,), {}, [(2, 3, 4, 4)]) for size in (1, (1, 1))),
    *(("Upsample", (), options, [(2, 3, 4, 5)]) for options in (
        dict(scale_factor=2), dict(size=(5, 7), mode="bilinear"),
        dict(scale_factor=(2, 1.5), mode="bilinear", align_corners=True),
    )),
    *(("CrossEntropyLoss", (), options, [(4, 3), (2, 3, 5)]) for options in (
        {}, {"weight": torch.tensor([1.0, 2, 3])}, {"ignore_index": 1, "label_smoothing": 0.1},
        {"reduction": "none"}, {"reduction": "sum"},
    )),
    *(("Dropout", (), dict(p=0.0) | options, [(50,)]) for options in ({}, dict(inplace=True))),
    *(("Dropout", (), options, []) for options in ({}, dict(p=0.2), dict(p=0.2, inplace=True))),
    ("Flatten", (), {}, [(2, 3, 4, 5)]), ("Flatten", (0, 1), {}, [(2, 3, 4, 5)]),
]  # fmt: skip


def passes(layer, x):
    """Results, and gradients by x and all parameters."""
    leaf = x.clone().requires_grad_()
    given = [leaf * 1]
    if isinstance(layer, torch.nn.CrossEntropyLoss):
        given.append(torch.arange(x[:, 0].numel(), device=PLACE).view(x[:, 0].shape) % 3)
    found = layer(*given)
    y, *others = found if isinstance(found, tuple) else (found,)
    dy = torch.linspace(-1, 2, y.numel(), device=PLACE).view(y.shape)
    return [y, *others, *torch.autograd.grad(y, [leaf, *layer.parameters()], dy)], y is given[0]


@pytest.mark.parametrize("name, arguments, options, shapes", LAYERS, ids=str)
def test_a_layer_is_drop_in(name, arguments, options, shapes):
    made = []
    for module in (nn, torch.nn):
        torch.manual_seed(3)
        made.append(getattr(module, name)(*arguments, **copy.deepcopy(options)).to(PLACE))
    ours, theirs = made
    assert repr(ours) == repr(theirs) == repr(pickle.loads(pickle.dumps(ours)))
    assert isinstance(ours, type(theirs)) and vars(ours).keys() == vars(theirs).keys()
    for (key, mine), (other, tensor) in zip(
        ours.state_dict().items(), theirs.state_dict().items(), strict=True
    ):
        assert key == other and torch.equal(mine, tensor)  # drawn in the same order
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 2)
    ours.load_state_dict(theirs.state_dict())
    for step, shape in enumerate(shapes):
        for layer in (ours, theirs):
            layer.train(step < 2)
        x = randn(shape) + step
        with quick():
            (found, in_place), (expected, really) = (passes(each, x) for each in (ours, theirs))
        assert in_place == really
        near("values", found, expected, scale=64)
        for mine, other in zip(ours.buffers(), theirs.buffers(), strict=True):
            torch.testing.assert_close(mine, other)


def test_flatten_is_a_view():
    x = randn(2, 3, 4, 5)
    assert nn.Flatten()(x).data_ptr() == x.data_ptr()


def test_a_transposed_convolution_gives_the_size_that_is_asked_for():
    ours, theirs = (m.ConvTranspose2d(2, 3, 3, stride=2, padding=1).to(PLACE)
                    for m in (nn, torch.nn))  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    x = randn(1, 2, 4, 3)
    for size in ((7, 5), (8, 6), (1, 3, 8, 5)):
        close(ours(x, output_size=size), theirs(x, output_size=size), scale=64)
    for module in (ours, theirs):
        with pytest.raises(ValueError, match="requested an output size"):
            module(x, output_size=(9, 6))
    with pytest.raises(ValueError, match='Only "zeros" padding mode'):
        nn.ConvTranspose2d(2, 3, 3, padding_mode="reflect")


def test_batch_norm_takes_images_of_its_channels_alone():
    layer = nn.BatchNorm2d(3).to(PLACE)
    with pytest.raises(RuntimeError, match="running_mean should contain 5 elements not 3"):
        layer(randn(2, 5, 4, 4))
    with pytest.raises(ValueError, match="expected 4D input"):
        layer(randn(3, 4, 4))


def test_only_an_output_of_one_is_taken():
    layer = nn.AdaptiveAvgPool2d(1)
    for other in (7, (1, 2), (None, 1), None):
        with pytest.raises(ValueError, match="an output_size of 1 alone, not .*; torch.nn.Ada"):
            nn.AdaptiveAvgPool2d(other)
        layer.output_size = other
        with pytest.raises(ValueError, match="an output_size of 1 alone"):
            layer(randn(2, 3, 4, 4))


def test_a_loss_takes_what_pytorch_calls_deprecated():
    with pytest.warns(UserWarning, match="will be deprecated"):
        module = nn.CrossEntropyLoss(reduce=False)
    assert module(randn(4, 3), torch.arange(4, device=PLACE) % 3).shape == (4,)
