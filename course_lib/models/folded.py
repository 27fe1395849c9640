"""What a trained module computes from its weights alone: once, and again after each change of them.

A batch norm that no longer trains multiplies each channel by one number and adds another; both fit
into the weights and the bias of the convolution before it.
"""

import torch

from course_lib import nn
from course_lib.models.steps import is_changed

_CONVOLUTIONS = nn.Conv2d, torch.nn.Conv2d
_NORMS = nn.BatchNorm2d, torch.nn.BatchNorm2d
_OTHERS = nn.ReLU, torch.nn.ReLU


class Constants:
    """Numbers and functions that were computed from a module's weights.

    value  what `of` was told to compute, then each of `parts` as a function without batch norms
    """

    def __init__(self, layers, watched, value):
        self._layers, self._watched, self.value = layers, watched, value

    @classmethod
    def of(cls, module, parts, compute):
        """The constants of `module`, or None if one of its layers is of another kind, or hooked.

        parts    its children that are `Steps` of convolutions, batch norms and ReLUs
        compute  a function without arguments of its own parameters
        """
        layers = [layer for part in parts for layer in part]
        if not all(_is_as_made(layer) for layer in layers):
            return None
        if any(_stands_alone(part) for part in parts):
            return None
        watched = [_Watched(owner, name) for owner, name in _held(module, parts, layers)]
        if not all(each.is_told_of() for each in watched):
            return None
        with torch.no_grad():
            return cls(layers, watched, (compute(), *(_Folded(part) for part in parts)))

    def hold(self):
        """Whether all that they depend on is as it was."""
        return all(_is_as_made(layer) for layer in self._layers) and all(
            each.is_unchanged() for each in self._watched
        )


def _is_as_made(layer):
    kind = type(layer)
    if kind in _NORMS:
        own = (*layer._parameters.values(), *layer._buffers.values())
        if layer.training or any(each is None for each in own):
            return False
    return kind in (*_CONVOLUTIONS, *_NORMS, *_OTHERS) and not is_changed(layer)


def _stands_alone(steps):
    """Whether there is a batch norm without a convolution before it, into which it could go."""
    kinds = [type(layer) for layer in steps]
    pairs = zip([None, *kinds], kinds, strict=False)
    return any(kind in _NORMS and before not in _CONVOLUTIONS for before, kind in pairs)


def _held(module, parts, layers):
    """(dictionary, name) of all that the constants depend on, and of the modules on the way."""
    for owner in (module, *parts):
        yield from ((owner._modules, name) for name in owner._modules)
    for owner in (module, *layers):
        for held in (owner._parameters, owner._buffers):
            yield from ((held, name) for name in held)


class _Watched:
    """A tensor or a module that a dictionary holds by name, as it is now."""

    def __init__(self, owner, name):
        self._owner, self._name, self._value = owner, name, owner[name]
        self._state = _state(self._value)

    def is_told_of(self):
        """Whether a change would be seen: PyTorch counts those of tensors of its own kinds, but for
        those made in inference mode."""
        if not isinstance(self._value, torch.Tensor):
            return True
        kinds = torch.Tensor, torch.nn.Parameter
        return type(self._value) in kinds and not self._value.is_inference()

    def is_unchanged(self):
        value = self._owner.get(self._name)
        return value is self._value and _state(value) == self._state


def _state(value):
    if not isinstance(value, torch.Tensor) or value.is_inference():
        return None
    return value._version, value.data_ptr()


class _Folded:
    """`Steps` of convolutions, batch norms and ReLUs, each batch norm within its convolution."""

    def __init__(self, steps):
        layers = list(steps)
        self._steps = [
            (layer, *_weight_and_bias(layer, behind)) if type(layer) in _CONVOLUTIONS else (layer,)
            for layer, behind in zip(layers, [*layers[1:], None], strict=False)
            if type(layer) not in _NORMS
        ]

    def __call__(self, x):
        for layer, *constants in self._steps:
            x = layer._conv_forward(x, *constants) if constants else layer(x)
        return x


def _weight_and_bias(convolution, behind):
    """Those of one convolution that computes what `convolution` and a batch norm behind it do."""
    weight, bias = convolution.weight, convolution.bias
    if type(behind) not in _NORMS:
        return weight, bias
    exact = torch.promote_types(weight.dtype, torch.float32)
    scale = behind.weight.to(exact) * torch.rsqrt(behind.running_var.to(exact) + behind.eps)
    before = 0 if bias is None else bias.to(exact)
    shift = behind.bias.to(exact) + (before - behind.running_mean.to(exact)) * scale
    return (weight.to(exact) * scale[:, None, None, None]).to(weight.dtype), shift.to(weight.dtype)
