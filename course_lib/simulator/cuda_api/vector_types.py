"""CUDA's vector types: `float32x4`, also called `float4`, with elements x, y, z and w."""

import numpy as np

from course_lib.simulator.rewrite.resolve import cast

_ALIASES = {
    "char": "int8", "short": "int16", "int": "int32", "long": "int64", "longlong": "int64",
    "uchar": "uint8", "ushort": "uint16", "uint": "uint32", "ulong": "uint64",
    "ulonglong": "uint64", "float": "float32", "double": "float64",
}
_SCALARS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "float32",
            "float64")


class Vector:
    """Base of the vector types. Elements are set once, when the vector is made."""

    __slots__ = ()
    scalar = None
    length = 0

    def __init__(self, *parts):
        values = []
        for part in parts:
            values += part.values() if isinstance(part, Vector) else [part]
        if len(values) != self.length:
            raise TypeError(f"{type(self).__name__} has {self.length} elements; "
                            f"{len(values)} were given")
        convert = cast(self.scalar)
        for name, value in zip(self.__slots__, values, strict=True):
            object.__setattr__(self, name, convert(value))

    def __setattr__(self, name, value):
        raise AttributeError(f"{type(self).__name__} cannot be changed: make a new one")

    def values(self):
        """The elements as a list."""
        return [getattr(self, name) for name in self.__slots__]

    def __eq__(self, other):
        return type(other) is type(self) and self.values() == other.values()

    def __hash__(self):
        return hash((type(self), *self.values()))

    def __repr__(self):
        return f"{type(self).__name__}({', '.join(map(str, self.values()))})"


def _make(scalar, length):
    name = f"{scalar}x{length}"
    return type(name, (Vector,), {
        "__slots__": tuple("xyzw"[:length]), "scalar": getattr(np, scalar), "length": length,
        "__module__": __name__, "__doc__": f"{length} elements of {scalar}."})


#: name or alias -> type
vector_types = {f"{scalar}x{length}": _make(scalar, length)
                for scalar in _SCALARS for length in (1, 2, 3, 4)}
vector_types.update({f"{alias}{length}": vector_types[f"{scalar}x{length}"]
                     for alias, scalar in _ALIASES.items() for length in (1, 2, 3, 4)})
