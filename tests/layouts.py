"""How results lie in memory, and whether autograd lets others write to them: as PyTorch's do."""

import torch
import torch.nn.functional as F

from course_lib import nn, ops


def _channels_last(x):
    return x.contiguous(memory_format=torch.channels_last)


LAYOUTS = {
    "contiguous": lambda x: x,
    "channels-last": _channels_last,
    "transposed": lambda x: x.transpose(2, 3).contiguous().transpose(2, 3),
    "with gaps": lambda x: torch.stack((x, x), -1)[..., 0],
    "expanded": lambda x: x[:1].expand(x.shape),
}
SIMPLE = [*LAYOUTS.items()][:2]
SHAPES = (2, 3, 4, 5), (1, 3, 4, 5), (2, 1, 4, 5), (2, 3, 1, 1)
#: name -> call(library, x): ops or torch.nn.functional
CALLS = {
    "relu": lambda f, x: f.relu(x),
    "sigmoid": lambda f, x: f.sigmoid(x),
    "softmax": lambda f, x: f.softmax(x, -1),
    "softmax over channels": lambda f, x: f.softmax(x, 1),
    "conv2d": lambda f, x: f.conv2d(
        x, torch.linspace(-1, 1, 5 * x.shape[1]).reshape(5, -1, 1, 1), torch.ones(5)
    ),
    "conv2d of images": lambda f, x: f.conv2d(
        x[0], torch.linspace(-1, 1, 5 * x.shape[1]).reshape(5, -1, 1, 1)
    ),
    "max_pool2d": lambda f, x: f.max_pool2d(x, (2, 1) if x.shape[2] > 1 else 1),
    "batch_norm": lambda f, x: f.batch_norm(
        x, torch.zeros(x.shape[1]), torch.ones(x.shape[1]), torch.ones(x.shape[1]), None, True
    ),
    "batch_norm of rows": lambda f, x: f.batch_norm(
        x.flatten(2), torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    ),
    "layer_norm": lambda f, x: f.layer_norm(x, x.shape[3:], torch.ones(x.shape[3:])),
    "layer_norm of planes": lambda f, x: f.layer_norm(x, x.shape[2:]),
    "linear": lambda f, x: f.linear(x, torch.linspace(-1, 1, 3 * x.shape[3]).reshape(3, -1)),
    "cross_entropy": lambda f, x: f.cross_entropy(
        x, torch.zeros((x.shape[0], *x.shape[2:]), dtype=torch.int64), reduction="none"
    ),
}
#: What our functions give another shape after the operator: in-place operations take that.
RESHAPED = "batch_norm of rows", "layer_norm of planes", "cross_entropy"
#: Of three dimensions, results that lie as the argument does; PyTorch's are contiguous.
LAID_OUT_LIKE_X = "batch_norm of rows", "conv2d of images"


def faults():
    """Every difference, as a sentence."""
    for shape in SHAPES:
        numbers = torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))
        for name, call in CALLS.items():
            for layout, laid_out in LAYOUTS.items() if shape == SHAPES[0] else SIMPLE:
                found = []
                for library in (ops, F):
                    x = numbers.clone().requires_grad_()
                    y = call(library, laid_out(x))
                    strides, is_view = _strides(y), y._is_view()
                    y.add_(1).mul_(y.detach().clone())
                    found.append((strides, is_view, y.detach(), _gradient(y, x)))
                ours, theirs = found
                label = f"{name} of {layout} {shape}"
                if ours[0] != theirs[0] and name not in LAID_OUT_LIKE_X:
                    yield f"{label}: strides {ours[0]}, PyTorch's {theirs[0]}"
                if ours[1] and not theirs[1] and name not in RESHAPED:
                    yield f"{label}: a view"
                for what, a, b in zip(("y", "dx"), ours[2:], theirs[2:], strict=True):
                    try:
                        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, equal_nan=True)
                    except AssertionError as error:
                        yield f"{label}: {what}: {error}"
    yield from _network()


def _gradient(y, x):
    """NaN where autograd needs what was written over, as it does of PyTorch's ReLU and softmax."""
    try:
        return torch.autograd.grad(y.sum(), x)[0]
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error), error
        return torch.tensor(torch.nan)


def _strides(x):
    return tuple(
        stride for stride, extent in zip(x.stride(), x.shape, strict=True) if extent != 1
    )  # fmt: skip


def _network():
    """Conv2d, BatchNorm2d and an in-place ReLU, channels-last, in training."""
    found = []
    for library in (nn, torch.nn):
        torch.manual_seed(0)
        network = torch.nn.Sequential(
            library.Conv2d(3, 4, 3, padding=1), library.BatchNorm2d(4),
            torch.nn.ReLU(inplace=True), library.MaxPool2d(2), torch.nn.ReLU(inplace=True),
        ).to(memory_format=torch.channels_last)  # fmt: skip
        x = _channels_last(torch.randn(2, 3, 6, 8, requires_grad=True))
        y = network(x)
        gradients = torch.autograd.grad(y.square().sum(), list(network.parameters()))
        found.append((y.detach(), *gradients))
        if not y.is_contiguous(memory_format=torch.channels_last):
            yield f"a network's result has strides {y.stride()}"
    for ours, theirs in zip(*found, strict=True):
        if not torch.allclose(ours, theirs, rtol=1e-3, atol=1e-4):
            yield f"a network: {ours} for {theirs}"
