"""What a call must leave alone: its arguments with all that they hold, and earlier results.

A `Snapshot` remembers values as they are, and tells later which of them has changed. `Watched` is
the learner's function with its arguments remembered before each call and looked at after it.
"""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator

import numpy as np

_PLAIN = (bool, int, float, complex, str, bytes, np.generic, types.NoneType)


class Changed(Exception):
    """A call has changed what it was given; the message says what."""


class Snapshot:
    """Values with their names, as they are now: arrays, tensors, lists, dicts, sets and objects.

    Functions and classes are left out, unless `own` names the module whose classes count too.
    """

    def __init__(self, values: Iterable[tuple[str, object]], own: str = ""):
        self._own, self._seen = own, {}
        waiting = deque(values)
        while waiting:
            place, value = waiting.popleft()  # so that names are as short as can be
            if id(value) not in self._seen and not isinstance(value, _PLAIN):
                state = self._state(value)
                self._seen[id(value)] = place, value, state
                waiting.extend(_parts(place, value, state))

    def changed(self) -> str:
        """Return the name of what is no longer what it was; "" if all is."""
        for place, value, state in self._seen.values():
            now = self._state(value)
            if isinstance(state, dict):
                changed = [k for k in state.keys() | now.keys() if not _held(k, state, now)]
                if changed:
                    return place + (changed[0] if len(changed) == 1 else "")
            elif len(state) != len(now) or not all(map(_is, state, now)):
                return place
        return ""

    def _state(self, value: object) -> tuple | dict:
        """Return what `value` consists of: bytes of numbers, or parts compared by identity."""
        if isinstance(value, np.ndarray):
            return () if value.dtype.hasobject else (value.shape, value.dtype.str, value.tobytes())
        if hasattr(value, "requires_grad") and hasattr(value, "untyped_storage"):
            return _state_of_tensor(value)
        if isinstance(value, tuple | list):
            return tuple(value)
        if isinstance(value, dict):
            return {f"[{key!r}]": each for key, each in value.items()}
        if isinstance(value, set):
            return tuple(sorted(value, key=id))
        if isinstance(value, types.MethodType | types.BuiltinMethodType) and self._own:
            return {"": value.__self__}
        if isinstance(value, type):
            return _attributes(value) if self._own and value.__module__ == self._own else {}
        if self._own and type(value).__module__ == self._own:
            return {"class": type(value), **_attributes(value)}
        return {} if callable(value) or isinstance(value, types.ModuleType) else _attributes(value)


def _attributes(value: object) -> dict[str, object]:
    slots = [name for each in type(value).__mro__ for name in getattr(each, "__slots__", ())]
    found = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    found |= getattr(value, "__dict__", {})
    return {f".{name}": each for name, each in found.items() if not name.startswith("_")}


def _state_of_tensor(tensor) -> tuple:
    """Return a tensor's numbers as bytes, if it has any, and what the tape knows of it."""
    torch, numbers = sys.modules["torch"], b""
    if tensor.device.type == "cpu":
        flat = tensor.detach().contiguous().reshape(-1)
        numbers = flat.view(torch.uint8).numpy().tobytes()
    grad = tensor.grad if tensor.is_leaf else None
    return tuple(tensor.shape), numbers, tensor.requires_grad, grad


def _parts(place: str, value: object, state: tuple | dict) -> Iterator[tuple[str, object]]:
    """Yield what is inside of `value`, each with its name."""
    if isinstance(state, dict):
        yield from ((f"{place}{name}", each) for name, each in state.items())
    elif isinstance(value, tuple | list):
        yield from ((f"{place}[{k}]", each) for k, each in enumerate(value))


def _held(key: str, one: dict, other: dict) -> bool:
    return key in one and key in other and _is(one[key], other[key])


def _is(one: object, other: object) -> bool:
    if one is other:
        return True
    plain = isinstance(one, (*_PLAIN, tuple)) and type(one) is type(other)
    return plain and (one == other or one != one)


class Watched:
    """A function whose arguments are looked at after each call. `returned` is what came of them.

    `changed` names the first argument, or part of one, that a call has changed. The arrays
    `beside` are somebody else's to watch.
    """

    def __init__(self, function: Callable, beside: list):
        functools.update_wrapper(self, function)
        self._function, self._beside = function, {id(each) for each in beside}
        self.returned, self.changed = [], ""

    def __call__(self, *arguments, **named):
        names = _names(self._function, len(arguments))
        given = [*zip(names, arguments, strict=True), *named.items()]
        before = Snapshot((name, x) for name, x in given if id(x) not in self._beside)
        found = self._function(*arguments, **named)
        self.returned.append(found)
        self.changed = self.changed or before.changed()
        return found

    def results(self, names: tuple[str, ...]) -> Snapshot:
        """Return the results of all calls as they are now."""
        found = []
        for each in self.returned:
            several = isinstance(each, tuple) and len(each) == len(names)
            found += zip(names, each, strict=True) if several else [(" and ".join(names), each)]
        return Snapshot(found, own=self._function.__module__)


def _names(function: Callable, count: int) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    names = [p.name for p in parameters if p.kind != p.VAR_POSITIONAL]
    return [names[k] if k < len(names) else f"argument {k + 1}" for k in range(count)]
