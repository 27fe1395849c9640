"""The network for Fashion-MNIST: two convolutions and two linear layers."""

import torch
from torch.nn.modules.module import _has_any_global_hook

from course_lib import nn
from course_lib.models import fashion_mnist_pass
from course_lib.models.steps import rectified
from course_lib.ops import precision
from course_lib.ops.registration import on_gpu_and_plain


class FashionMNISTCNN(torch.nn.Module):
    """Logits (N, num_classes) for images (N, 1, 28, 28); 896,522 parameters as it stands.

    num_classes  of the logits
    widths       channels behind each convolution, and numbers behind the first linear layer
    layers       whose layers: `course_lib.nn`, or `torch.nn` for PyTorch's own. Both kinds of
                 network have the same state_dict, and the same first weights from the same seed

    Each pooling comes before its ReLU: the result is the same, and ReLU has a quarter of the work.
    On a GPU and without gradients, our layers are not called one by one, but their kernels together
    (`fashion_mnist_pass`), unless somebody has changed or hooked one of them.
    """

    def __init__(self, num_classes=10, *, widths=(64, 128, 256), layers=nn):
        super().__init__()
        first, second, hidden = widths
        self.conv1 = layers.Conv2d(1, first, 3)
        self.conv2 = layers.Conv2d(first, second, 3)
        self.pool = layers.MaxPool2d(2)
        self.relu = layers.ReLU()
        self.flatten = layers.Flatten()
        self.fc1 = layers.Linear(second * 5 * 5, hidden)
        self.fc2 = layers.Linear(hidden, num_classes)

    def forward(self, x):
        if not torch.is_grad_enabled() and (parameters := self._together(x)) is not None:
            precisions = precision.of_convolutions(), precision.of_products()
            return fashion_mnist_pass.logits(x, *parameters, *precisions)
        x = rectified(self.conv1(x), self.pool, self.relu)
        x = rectified(self.conv2(x), self.pool, self.relu)
        return self.fc2(rectified(self.flatten(x), self.fc1, self.relu))

    def _together(self, x):
        """The parameters for `fashion_mnist_pass.logits`; None where layers are to be called."""
        layers = self._modules
        if _has_any_global_hook():
            return None
        for name, kind, options in _LAYERS:
            layer = layers.get(name)
            if type(layer) is not kind or layer._forward_hooks or layer._forward_pre_hooks:
                return None
            own = vars(layer)
            if any(own[option] != value for option, value in options):
                return None
        found = [
            layers[name]._parameters.get(which)  # None in a replica of DataParallel's
            for name in fashion_mnist_pass.NAMES for which in ("weight", "bias")
        ]  # fmt: skip
        if any(each is None for each in found) or not on_gpu_and_plain(x, *found):
            return None
        if any(each.dtype != x.dtype for each in found):
            return None
        fits = x.dtype is torch.float32 and x.dim() == 4 and x.shape[1:] == (1, 28, 28)
        return found if fits and x.is_contiguous() else None


_CONVOLUTION = (
    ("stride", (1, 1)), ("padding", (0, 0)), ("dilation", (1, 1)), ("groups", 1),
    ("kernel_size", (3, 3)),
)  # fmt: skip
_POOLING = ("kernel_size", 2), ("stride", 2), ("padding", 0), ("dilation", 1), ("ceil_mode", False)
#: Our layers, as this network has them: name, class, options.
_LAYERS = (
    ("conv1", nn.Conv2d, _CONVOLUTION), ("pool", nn.MaxPool2d, _POOLING),
    ("conv2", nn.Conv2d, _CONVOLUTION), ("relu", nn.ReLU, (("inplace", False),)),
    ("flatten", nn.Flatten, ()), ("fc1", nn.Linear, ()), ("fc2", nn.Linear, ()),
)  # fmt: skip
