"""Our kernels in a network that is there already, and PyTorch's operators back again."""

import sys
from typing import NamedTuple

import torch
from torch import nn

from course_lib.nn.squeeze_excitation import ACTIVATIONS, GATES, Fused, fault_of


class Swapped(NamedTuple):
    """A block that runs our kernels now; `kind` is the class it was made as."""

    name: str
    kind: str
    channels: int
    squeeze_channels: int
    activation: str
    gate: str


class Left(NamedTuple):
    """A squeeze-and-excitation block that stays as it is, and why."""

    name: str
    kind: str
    reason: str


class Replacement(list):
    """The `Swapped` blocks, in the order of `model.named_modules()`; `left` are the others."""

    def __init__(self, pairs, left):
        super().__init__(_described(name, block) for name, block in pairs)
        self.left = left
        self._blocks = [block for _, block in pairs]

    def restore(self):
        """Put back the blocks that were swapped; those that are back already stay so."""
        _turn({block: type(block).original for block in self._blocks if isinstance(block, Fused)})


def replace_squeeze_excitation(model):
    """Let every squeeze-and-excitation block in `model` run our kernels, in place.

    Takes torchvision's blocks (EfficientNet, MobileNetV3, RegNet) and timm's (those, SE-ResNet and
    more); timm need not be installed. The block stays the same object, with the same children,
    parameters, hooks and names, so that optimisers, checkpoints and wrappers go on as before: only
    its class changes, to a subclass of what it was. See `Fused` for what is not called any more.
    What torch.compile has compiled before, this network or others, is compiled again.

    Returns a `Replacement`: a list of (name, kind, channels, squeeze_channels, activation, gate),
    whose `left` lists as (name, kind, reason) the blocks that our kernels can't take the place of,
    and whose `restore()` puts all back, as `restore_squeeze_excitation` does.
    """
    _require_module(model)
    blocks, others = _known_blocks(model)
    pairs, left = [], []
    for name, module in model.named_modules():
        kind = next(
            (kind for kind in type(module).__mro__ if kind in blocks or kind in others), None
        )
        if kind is None:
            continue
        reason = others.get(kind) or _reason(module, kind, blocks[kind])
        if reason is None:
            pairs.append((name, module))
        else:
            left.append(Left(name, _name_of(kind), reason))
    _turn({module: blocks[type(module)] for _, module in pairs})
    return Replacement(pairs, left)


def restore_squeeze_excitation(model):
    """Give every block of `model` that was swapped its own class again. Returns their names."""
    _require_module(model)
    swapped = {
        name: module for name, module in model.named_modules()
        if isinstance(module, Fused) and module.original is not None
    }  # fmt: skip
    _turn({module: module.original for module in swapped.values()})
    return list(swapped)


def _turn(classes):
    """Give each module its new class.

    What torch.compile has compiled is compiled again when it is next called: some versions of
    PyTorch do not look whether a module inside a network is still of the class that it was.
    """
    for module, kind in classes.items():
        module.__class__ = kind
    if classes and "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _require_module(model):
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not a {type(model).__name__}")


def _known_blocks(model):
    """({class: the class that takes its place}, {class: why it is left}) of libraries in use."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    libraries = {kind.__module__.partition(".")[0] for kind in classes}
    blocks, left = {}, {}
    if "torchvision" in libraries:
        from course_lib.nn import torchvision_blocks

        blocks, left = blocks | torchvision_blocks.BLOCKS, left | torchvision_blocks.LEFT
    if "timm" in libraries:
        from course_lib.nn import timm_blocks

        blocks, left = blocks | timm_blocks.BLOCKS, left | timm_blocks.LEFT
    return blocks, left


def _reason(module, kind, fused):
    """Why `module`, a `kind`, can't become a `fused`; or None."""
    if isinstance(module, Fused):
        return "it runs our kernels already"
    if type(module) is not kind:
        return f"it is a {type(module).__name__}, which may compute something else"
    if "forward" in vars(module):
        return "its forward is one of its own"
    for name, child in module.named_children():
        if child._forward_hooks or child._forward_pre_hooks:
            return f"{name} has hooks, which would not be called"
    return fused.fault_beyond_parts(module) or fault_of(module, fused.parts)


def _described(name, block):
    first, activation, _, gate = (getattr(block, part) for part in block.parts)
    return Swapped(
        name, _name_of(block.original), first.in_channels, first.out_channels,
        ACTIVATIONS[type(activation)], GATES[type(gate)],
    )  # fmt: skip


def _name_of(kind):
    return f"{kind.__module__}.{kind.__qualname__}"
