"""Where two pathways meet: a sum whose weights are learned, and a small network beside it."""

import torch
from torch.compiler import is_compiling
from torch.nn.modules.module import _has_any_global_hook

from course_lib.models.folded import Constants
from course_lib.models.steps import Steps

#: What is weighted, in the order of the three scalars.
NAMES = ("colour", "brightness", "integrated")
FIRST_SCALARS = (0.5, 0.5, 0.0)


class Integration(torch.nn.Module):
    """w₁·colour + w₂·brightness + w₃·carry(integrated) + mlp(colour, brightness).

    w is the softmax of three scalars that are learned; the 1×1 convolutions of `mlp` see both
    pathways at each place. All results are (N, channels, H, W).

    channels   of colour and brightness, (N, channels, H, W)
    c_before   channels of what was integrated before, (N, c_before, H·stride, W·stride), where H
               and W are rounded up; a 1×1 convolution carries it here if shapes differ
    normalise  batch norm behind each convolution of `mlp`. Without it each has a bias: where planes
               have one pixel, a batch of one image has no statistics. `carry` has none: it would
               take away again what the integration before has added to whole channels, whose
               biases would then learn nothing
    layers     whose layers: `course_lib.nn` or `torch.nn`

    In eval mode and without gradients, what depends on weights alone is computed once: the softmax,
    and the convolutions' weights with their batch norms in them. These constants are computed anew
    after any change of a weight or a statistic, of a layer, of device or dtype, after a forward
    pass with gradients, and after `train` or `eval`. What PyTorch does not count (writing through
    `.data`, its fused optimisers, replays of a captured graph) is seen from the latter only. A
    CUDA graph captures the whole computation, and so sees every change by itself.
    """

    def __init__(self, channels, c_before, stride, normalise, layers):
        super().__init__()
        self.scalars = torch.nn.Parameter(torch.tensor(FIRST_SCALARS))

        def convolution(c_in):
            if not normalise:
                return [layers.Conv2d(c_in, channels, 1)]
            norm = layers.BatchNorm2d(channels)
            return [layers.Conv2d(c_in, channels, 1, bias=False), norm]

        differs = stride != 1 or c_before != channels
        self.carry = Steps(*([layers.Conv2d(c_before, channels, 1, stride)] if differs else []))
        self.mlp = Steps(*convolution(2 * channels), layers.ReLU(), *convolution(channels))
        self._constants = None

    def weights(self):
        """The three weights, a tensor (3,) of the scalars' dtype that sums to 1."""
        return self.scalars.softmax(0)

    def forward(self, colour, brightness, integrated):
        constants = self._constants_for(colour)
        if constants is None:
            constants = self.weights(), self.mlp, self.carry
        weights, mlp, carry = constants
        y = mlp(torch.cat((colour, brightness), 1))
        for i, part in enumerate((colour, brightness, carry(integrated))):
            y = torch.addcmul(y, part.to(y.dtype), weights[i].to(y.dtype))
        return y

    def _constants_for(self, x):
        """(weights, mlp, carry) without what depends on weights alone, from now or before.

        None where all is to be computed as it is trained.
        """
        if type(x) is not torch.Tensor or is_compiling():
            return None
        if torch._C._are_functorch_transforms_active():  # whose tensors are those of many networks
            return None
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return None
        if self.training or torch.is_grad_enabled() or _has_any_global_hook():
            self._constants = None
            return None
        constants = self._constants
        if constants is None or not constants.hold():
            constants = Constants.of(self, (self.mlp, self.carry), self.weights)
            if x.is_cuda:  # the next call may be on another stream
                torch.cuda.current_stream(x.device).synchronize()
            self._constants = constants
        return None if constants is None else constants.value

    def train(self, mode=True):
        self._constants = None
        return super().train(mode)

    def _apply(self, fn, recurse=True):
        self._constants = None
        return super()._apply(fn, recurse)

    def _replicate_for_data_parallel(self):
        replica = super()._replicate_for_data_parallel()
        replica._constants = None
        return replica

    def __getstate__(self):  # of copies and pickles
        return self.__dict__ | {"_constants": None}
