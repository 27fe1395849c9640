"""Our kernels in a network that is there already, and PyTorch's operators back again."""

import re
import sys
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from course_lib.nn import activation, pooling, softmax
from course_lib.nn.attention import (
    MultiheadAttention,
    TransformerEncoder,
    TransformerEncoderLayer,
)
from course_lib.nn.batch_norm import BatchNorm2d
from course_lib.nn.conv2d import Conv2d
from course_lib.nn.conv_transpose2d import ConvTranspose2d
from course_lib.nn.dropout import Dropout
from course_lib.nn.flatten import Flatten
from course_lib.nn.fused import Fused
from course_lib.nn.layer import Layer
from course_lib.nn.layer_norm import LayerNorm
from course_lib.nn.linear import Linear
from course_lib.nn.loss import CrossEntropyLoss
from course_lib.nn.upsample import Upsample

#: PyTorch's class of a layer -> the class that takes its place.
LAYERS = {
    getattr(nn, kind.__name__): kind
    for kind in (
        Conv2d, ConvTranspose2d, Upsample, BatchNorm2d, LayerNorm, Linear, Dropout, Flatten,
        CrossEntropyLoss, pooling.MaxPool2d, pooling.AdaptiveAvgPool2d, softmax.Softmax,
        softmax.LogSoftmax, activation.ReLU, activation.ReLU6, activation.LeakyReLU,
        activation.Sigmoid, activation.SiLU, activation.Hardsigmoid, activation.Hardswish,
        activation.GELU, MultiheadAttention, TransformerEncoderLayer, TransformerEncoder,
    )
}  # fmt: skip
#: They compute nothing, or nothing but what is inside of them.
_NO_LAYERS = (nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList,
              nn.ParameterDict)  # fmt: skip
_CALLED_SO = re.compile(r"squeeze|excit|^SE(?![a-z])|SE(Block|Layer|Module|Net)?$", re.IGNORECASE)


class Replaced(NamedTuple):
    """A layer that runs our kernels now; `kind` is the class it was of."""

    name: str
    module: nn.Module
    kind: type


class Left(NamedTuple):
    """A layer that stays as it is, and why."""

    name: str
    module: nn.Module
    reason: str


class Replacement:
    """What `replace_layers` did.

    replaced  [(name, module, kind)]: the layers that run our kernels, and the classes they were of
    left      [(name, module, reason)]: the layers that stay as they are
    timed     with keep="faster", what was measured of each layer: [(name, module, looks of its
              input, calls, times)]
    note      with keep="faster", what came of the whole, in a sentence

    The first two in the order of `model.named_modules()`, a module of two names under each of them.
    """

    def __init__(self, replaced, left, timed=(), note=None):
        self.replaced, self.left, self.timed, self.note = replaced, left, list(timed), note
        self._classes = [type(each.module) for each in replaced]

    def __repr__(self):
        return f"<Replacement: {len(self.replaced)} layers replaced, {len(self.left)} left>"

    def table(self):
        """What was measured of each layer, in µs, what runs now, and why others stay; a text."""
        why = {each.module: each.reason for each in self.left}
        ways, rows = max((each.times for each in self.timed), key=len, default={}), []
        for name, module, looks, _, times in self.timed:
            timings = [timing for both in times.values() for timing in both.values()]
            found = [f"{timing.microseconds:.1f}" for timing in timings]
            found = ["–"] * (2 * len(ways) - len(found)) + found
            runs = "PyTorch's" if why.pop(module, None) else "ours"
            rows.append([name, type(module).__name__, looks, *found, runs])
        lines = []
        if rows:
            columns = [f"{who}, {way} µs" for way in ways for who in ways[way]]
            rows.insert(0, ["layer", "class", "input", *columns, "runs"])
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        note = self.note or ""
        others = [each for each in self.left if each.module in why and each.reason not in note]
        lines += [f"{each.name}: {each.reason}" for each in others]
        return "\n".join([*lines, note])

    def restore(self):
        """Give each layer its own class again; those that have it already stay so.

        RuntimeError, and nothing is changed, if somebody has given one a third class since.
        """
        swapped = [
            (each, ours) for each, ours in zip(self.replaced, self._classes, strict=True)
            if type(each.module) is not each.kind
        ]  # fmt: skip
        for each, ours in swapped:
            if type(each.module) is not ours:
                raise RuntimeError(
                    f"{each.name!r} was made a {ours.__name__} of course_lib, but is a "
                    f"{type(each.module).__name__} now: take back what changed it, then restore"
                )
        _turn([(each.module, each.kind) for each, _ in swapped])


def replace_layers(model, types=None, *, keep=None, example_inputs=None, captured=False):
    """Let the layers of `model` run our kernels, in place. Returns a `Replacement`.

    model  any `torch.nn.Module`, or a single layer
    types  a list of classes, PyTorch's or ours: only layers of these, as [torch.nn.Conv2d].
           None: every layer that there is a class for in `course_lib.nn`
    keep   "faster": only layers that gain on this GPU; None: all that there are kernels for
    example_inputs
           with keep="faster", what the model is called with: a tensor, a tuple of arguments, or a
           dict of them by name
    captured
           with keep="faster", whether a step is one CUDA graph, where Python's time does not count

    Each layer stays the same object, with the same parameters, buffers, hooks, mode and names, so
    that optimisers, checkpoints and wrappers go on as before: only its class changes, to ours,
    which is a subclass of it. Squeeze-and-excitation blocks of torchvision and timm (which need not
    be installed) are layers too: one operator takes the place of all their parts, see `Fused`. So
    are timm's `LayerNorm` and `Attention`, and PyTorch's encoders, whose own layers are replaced as
    well; encoders come along with `MultiheadAttention`, which they would pass by in inference. What
    torch.compile has compiled before, this network or others, is compiled again.

    The `Replacement` says which were `replaced`, and which were `left` and why: subclasses, which
    may compute something else; layers that are parametrised, not initialised yet, or whose options
    or weights our kernels don't take; and without `types` all modules without children that
    `course_lib.nn` has nothing for. What a `forward` computes by functions, as `F.relu(x)` or
    `x + y`, is no layer: it stays PyTorch's, and is not listed. `restore()` puts all back.

    With keep="faster" the model computes the example, and each layer is then timed as the example
    called it, in its shapes, dtypes and memory formats, backward too where something needs a
    gradient, beside PyTorch's own. So call it as you will call the model: in the same mode, under
    the same autocast and no_grad, on one GPU, before torch.compile. A layer that gains over 2 %
    runs our kernels; one that holds others is timed with them, as a whole. Then the whole pass is
    timed with these layers and without, and all stay PyTorch's if it is slower. `table()` and
    `note` tell what was found, `left` why a layer stays. Times are kept in the folder of compiled
    kernels, for such a layer under such settings. The model's tensors, gradients, modes and random
    numbers stay as they were; hooks are called as in any pass. On a CPU the model stays as it is.

    Dropout draws other masks than PyTorch would. On a GPU our layers take float32, float16 and
    bfloat16: float64 raises an error when they are called. Raises TypeError if `model` is no
    module or `types` no list of classes, ValueError for a class that we have no layer for, and for
    an example that the model does not take.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not a {type(model).__name__}")
    if types is not None:
        _require_classes(types)
    if keep not in (None, "faster"):
        raise ValueError(f'keep must be "faster" or None, not {keep!r}')
    if keep is None and (captured or example_inputs is not None):
        raise ValueError('example_inputs and captured are for keep="faster"')
    blocks, refused = _blocks_of_libraries(model, types or ())
    ours = LAYERS | blocks
    wanted = {*ours, *refused, Fused} if types is None else _wanted(types, ours, refused)
    replaced, left, parts = [], [], set()
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Layer):
            parts.update(getattr(module, part) for part in module.inner)
        if isinstance(module, Layer) or module in parts:
            continue
        kinds = type(module).__mro__
        kind = next((kind for kind in kinds if kind in ours or kind in refused), None)
        if kind is None:
            reason = _reason_of_others(module, types is None, Fused in wanted)
        elif kind not in wanted:
            continue
        else:
            reason = refused.get(kind) or _reason(module, kind, ours[kind])
            if reason is None:
                replaced.append(Replaced(name, module, kind))
                parts.update(getattr(module, part) for part in ours[kind].inner)
        if reason is not None:
            left.append(Left(name, module, reason))
            if kind in LAYERS and not LAYERS[kind].holds_layers or _is_quantised(module):
                parts.update(module.modules())  # what it keeps in there is no layer of the network
    timed, note = (), None
    if keep is not None:
        replaced, left, timed, note = _faster(model, replaced, left, ours, example_inputs, captured)
    _turn([(each.module, ours[each.kind]) for each in replaced])
    return Replacement(replaced, left, timed, note)


def _faster(model, replaced, left, ours, example, captured):
    """(replaced, left, what was measured, a sentence): of `replaced`, only what gains."""
    from course_lib.nn import choosing  # which measures, and is seldom asked to

    classes = [(*each, ours[each.kind]) for each in replaced]
    choice = choosing.choose(model, classes, example, captured)
    kept = []
    for name, module, kind in replaced:
        if (reason := choice.stay.get(module)) is None:
            kept.append(Replaced(name, module, kind))
        else:
            left.append(Left(name, module, reason))
    order = [name for name, _ in model.named_modules(remove_duplicate=False)]
    left.sort(key=lambda each: order.index(each.name))
    return kept, left, choice.timed, choice.note


def _turn(classes):
    """Give each module, of [(module, class)], its new class: all of them, or none.

    What torch.compile has compiled is compiled again when it is next called: some versions of
    PyTorch do not look whether a module inside a network is still of the class that it was.
    """
    before = [(module, type(module)) for module, _ in classes]
    try:
        for module, kind in classes:
            module.__class__ = kind
    except BaseException:
        for module, kind in before:
            module.__class__ = kind
        raise
    if classes and "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def _blocks_of_libraries(model, types):
    """({class: the class that takes its place}, {class: why it is left}) of libraries in use."""
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    libraries = {kind.__module__.partition(".")[0] for kind in classes.union(types)}
    blocks, left = {}, {}
    if "torchvision" in libraries:
        from course_lib.nn import squeeze_excitation

        blocks |= squeeze_excitation.BLOCKS
    if "timm" in libraries:
        from course_lib.nn import timm_blocks

        blocks, left = blocks | timm_blocks.BLOCKS, timm_blocks.LEFT
    return blocks, left


def _require_classes(types):
    if isinstance(types, type) or not all(isinstance(kind, type) for kind in types):
        raise TypeError(f"types must be a list of classes, as [torch.nn.Conv2d], not {types!r}")


def _wanted(types, ours, refused):
    """The classes to look for; `Fused` among them if squeeze and excitation is."""
    found = set()
    for kind in types:
        mine = {each for each in ours if issubclass(each, kind) or issubclass(ours[each], kind)}
        mine |= {kind} & refused.keys()
        if nn.MultiheadAttention in mine:  # PyTorch's encoders would pass it by
            mine |= {nn.TransformerEncoderLayer, nn.TransformerEncoder}
        if issubclass(kind, Fused) or any(issubclass(ours.get(k, Fused), Fused) for k in mine):
            mine |= {Fused, *refused}
        if not mine:
            names = ", ".join(each.__name__ for each in LAYERS)
            raise ValueError(
                f"course_lib.nn has no layer for a {kind.__module__}.{kind.__qualname__}; it has "
                f"SqueezeExcitation, {names}"
            )
        found |= mine
    return found


def _reason(module, kind, ours):
    """Why `module`, a `kind`, can't become one of `ours`; or None."""
    if isinstance(module, LazyModuleMixin):
        return "it is not initialised yet: give the network a batch first"
    if parametrize.is_parametrized(module):
        return "it is parametrised: replace layers first, and parametrise them then"
    if type(module) is not kind:
        return f"it is a {type(module).__name__}, which may compute something else"
    if "forward" in vars(module):
        return "its forward is one of its own"
    for name, tensor in module.named_parameters(recurse=False):
        if type(tensor) is not nn.Parameter:
            return f"its {name} is a {type(tensor).__name__}, which our kernels can't read"
    return ours.fault(module)


def _reason_of_others(module, every, blocks):
    """What to say of a module that is of no class we know: why it is left; None for nothing."""
    if isinstance(module, _NO_LAYERS):
        return None
    if blocks and _squeezes_and_excites(module):
        return (
            "it looks like squeeze and excitation, but course_lib.nn has nothing for "
            f"{type(module).__name__} as a whole: its layers are replaced one by one"
        )
    if every and (next(module.children(), None) is None or _is_quantised(module)):
        kind = type(module)
        if not _is_quantised(module) and kind.__name__ in {each.__name__ for each in LAYERS}:
            return f"it is a {kind.__name__} of {kind.__module__}, which may compute something else"
        return f"course_lib.nn has nothing for {kind.__name__}"
    return None


def _is_quantised(module):
    return type(module).__module__.startswith("torch.ao.")


def _squeezes_and_excites(module):
    """Whether somebody's own class seems to be squeeze and excitation: C channels to R to C."""
    dense = [layer for layer in module.modules() if isinstance(layer, nn.Linear | nn.Conv2d)]
    if len(dense) != 2:
        return False
    (c, r), (r_again, c_again) = (tuple(layer.weight.shape[1::-1]) for layer in dense)
    pools = any(isinstance(part, nn.AdaptiveAvgPool2d) for part in module.modules())
    return (c, r) == (c_again, r_again) and (
        pools or _CALLED_SO.search(type(module).__name__) is not None
    )
