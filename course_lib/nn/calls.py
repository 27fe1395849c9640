"""How an example calls a model's layers, and the same calls again, on made-up numbers."""

import contextlib
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

ALIGNMENT = 16  # bytes: the widest vectors that kernels read start at such addresses


@dataclass(frozen=True)
class Look:
    """A tensor without its numbers.

    number   tensors of one call that have the same are the same tensor
    offset   elements from a 16-byte boundary to its first
    content  the tensor itself where its numbers are no floats, as labels or masks, or lie in no
             strides
    """

    number: int
    shape: tuple
    stride: tuple
    offset: int
    dtype: torch.dtype
    needs_grad: bool
    content: torch.Tensor | None = field(repr=False, compare=False)

    @classmethod
    def of(cls, x, number):
        needs_grad = x.requires_grad and torch.is_grad_enabled()
        if x.layout != torch.strided or x.is_nested:
            return cls(number, (), (), 0, x.dtype, needs_grad, x.detach())
        offset = x.data_ptr() % ALIGNMENT // x.element_size()
        content = None if x.is_floating_point() else x.detach().clone()
        return cls(number, tuple(x.shape), x.stride(), offset, x.dtype, needs_grad, content)

    def __str__(self):
        formats = {4: torch.channels_last, 5: torch.channels_last_3d}
        lies = formats.get(len(self.shape))
        layout = ""
        if lies and min(self.shape[:2]) > 1:
            like = torch.empty(self.shape, device="meta", memory_format=lies)
            layout = " channels-last" if self.stride == like.stride() else ""
        sizes = "×".join(map(str, self.shape)) or "scalar"
        return f"{sizes} {self.dtype}".replace("torch.", "") + layout

    def made(self, place):
        """Such a tensor."""
        if self.content is not None:
            return self.content
        extent = 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        extent = self.offset + (extent if 0 not in self.shape else 0)
        numbers = torch.randn(extent, device=place, dtype=self.dtype)
        x = numbers.as_strided(self.shape, self.stride, self.offset)
        return x.requires_grad_(self.needs_grad)


class Call(NamedTuple):
    """One call of a layer: its arguments, with a `Look` in the place of each tensor.

    autocast  what it computed in, or None
    """

    args: tuple
    kwargs: dict
    place: torch.device
    grad: bool
    autocast: torch.dtype | None

    @classmethod
    def of(cls, args, kwargs):
        numbers, places = {}, []

        def look(x):
            places.append(x.device)
            return Look.of(x, numbers.setdefault(id(x), len(numbers)))

        args, kwargs = _mapped((args, kwargs), look)
        place = places[0] if places else torch.device("cpu")
        return cls(args, kwargs, place, torch.is_grad_enabled(), autocast_now())

    def __hash__(self):
        return hash(repr(self))

    def __str__(self):
        return str(next(iter(tensors(self)), "no tensor"))

    def made(self):
        """(args, kwargs) as those were."""
        known = {}

        def make(look):
            if look.number not in known:
                known[look.number] = look.made(self.place)
            return known[look.number]

        return _mapped((self.args, self.kwargs), make)


class Step:
    """A pass through a module, and back where it needs gradients: ``step(i)``.

    classes  [(module, class)] that its parts are of from call number 0 on
    grad, autocast
             as `Call`'s

    No gradient is added to any parameter's `grad`.
    """

    def __init__(self, module, classes, args, kwargs, *, grad, autocast):
        self.module, self.classes, self.given = module, classes, (args, kwargs)
        self.grad, self.autocast, self.seeds = grad, autocast, None
        leaves = [*tensors(self.given), *module.parameters()]
        leaves = {id(leaf): leaf for leaf in leaves if leaf.requires_grad}
        self.wanted = list(leaves.values()) if grad else []
        # PyTorch refuses to overwrite what is not computed.
        self.in_place = getattr(module, "inplace", False) is True and grad

    def __call__(self, i=0):
        if i == 0:
            for part, kind in self.classes:
                part.__class__ = kind
        args, kwargs = _mapped(self.given, _computed) if self.in_place else self.given
        with torch.set_grad_enabled(self.grad), self._arithmetic():
            found = tensors(self.module(*args, **kwargs))
        ends = [y for y in found if y.requires_grad]
        if self.wanted and ends:
            if self.seeds is None:
                self.seeds = [torch.randn_like(y) for y in ends]
            torch.autograd.grad(ends, self.wanted, self.seeds, allow_unused=True)

    def _arithmetic(self):
        if self.autocast is None and not torch.is_autocast_enabled("cuda"):
            return contextlib.nullcontext()
        # A weight that it kept would lie in a graph's memory, and the graph goes.
        options = {"enabled": self.autocast is not None, "cache_enabled": False}
        return torch.autocast("cuda", self.autocast, **options)


class _Computed(torch.autograd.Function):
    """The very same numbers, as if an operator had computed them."""

    @staticmethod
    def forward(ctx, x):
        return x.new_empty(0).set_(x.untyped_storage(), x.storage_offset(), x.shape, x.stride())

    @staticmethod
    def backward(ctx, dy):
        return dy


def _computed(x):
    return _Computed.apply(x) if x.requires_grad else x


def arguments(example):
    """(args, kwargs) of an example: a tensor, a tuple of arguments, or a dict of them by name."""
    if example is None:
        raise ValueError("keep='faster' times layers in the shapes of example_inputs: give a batch")
    if isinstance(example, dict):
        return (), example
    return tuple(example) if isinstance(example, tuple | list) else (example,), {}


def place_of(model, *given):
    """Where the model's first tensor lies; without any, the example's."""
    for x in (*model.parameters(), *model.buffers(), *tensors(given)):
        return x.device
    return torch.device("cpu")


def noted(model, layers, args, kwargs):
    """{layer: [each `Call` of it]} as the model computes the example, forward."""
    found = {layer: [] for layer in layers}

    def note(layer, args, kwargs):
        found[layer].append(Call.of(args, kwargs))

    handles = [layer.register_forward_pre_hook(note, with_kwargs=True) for layer in layers]
    try:
        model(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return found


def autocast_now():
    """The dtype of CUDA's autocast, or None where it is off."""
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None


def options_of(module):
    """What decides how long `module` takes beside its inputs, in plain values."""
    found = []
    for part in module.modules():
        options = {
            key: getattr(value, "__qualname__", None) or repr(value)
            for key, value in sorted(vars(part).items())
            if not isinstance(value, dict | torch.Tensor)
        }
        held = {
            name: None if x is None else [str(x.dtype), x.shape, x.stride(), x.requires_grad]
            for name, x in (part._parameters | part._buffers).items()
        }
        found.append([f"{type(part).__module__}.{type(part).__qualname__}", options, held])
    return found


def tensors(found):
    """The tensors (or `Look`s) in nested tuples, lists and dicts."""
    if isinstance(found, torch.Tensor | Look):
        return [found]
    if isinstance(found, dict):
        found = found.values()
    elif not isinstance(found, tuple | list):
        return []
    return [x for each in found for x in tensors(each)]


def _mapped(given, change):
    """`given` with `change(x)` in the place of every tensor or `Look`."""
    if isinstance(given, torch.Tensor | Look):
        return change(given)
    if isinstance(given, dict):
        return {key: _mapped(value, change) for key, value in given.items()}
    if isinstance(given, tuple | list):
        found = [_mapped(value, change) for value in given]
        return tuple(found) if isinstance(given, tuple) else found
    return given
