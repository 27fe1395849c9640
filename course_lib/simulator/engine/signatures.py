"""Signatures of `cuda.jit`: which arguments a kernel takes, and what scalars are converted to."""

import numbers

import numpy as np
from numpy.lib.stride_tricks import as_strided

from course_lib.simulator.rewrite.number_types import CLASSES, context
from course_lib.simulator.rewrite.resolve import cast

#: What `cuda.jit` takes besides `func_or_sig` and `device`.
OPTIONS = frozenset([
    "inline", "forceinline", "link", "debug", "opt", "lineinfo", "cache", "launch_bounds", "lto",
    "shared_memory_carveout", "fastmath", "extensions", "max_registers"])


def check_options(options):
    """Raise TypeError for an option that `cuda.jit` does not have."""
    if options.get("boundscheck"):
        raise NotImplementedError("bounds checking is not supported for CUDA")
    unknown = sorted(set(options) - OPTIONS)
    if unknown:
        raise TypeError(f"cuda.jit got an unexpected keyword argument {unknown[0]!r}; there are "
                        f"{', '.join(sorted(OPTIONS))}")


def launch_bound(bounds):
    """The most threads a block may have by `launch_bounds=`, or None.

    Raises
    ------
    ValueError for more than three bounds, TypeError for what is no number.
    """
    if bounds is None:
        return None
    bounds = (bounds,) if isinstance(bounds, numbers.Integral) else tuple(bounds)
    if len(bounds) > 3:
        raise ValueError(f"Got {len(bounds)} launch bounds: {bounds}. A maximum of three are "
                         f"supported: (max_threads_per_block, min_blocks_per_sm, "
                         f"max_blocks_per_cluster)")
    return int(bounds[0]) if bounds else None


def argument_types(signature, device=False):
    """The numba types of a signature's arguments.

    Raises
    ------
    TypeError for a kernel's signature that returns something.
    """
    from numba.core import sigutils, types

    arguments, result = sigutils.normalize_signature(signature)
    if not device and result not in (None, types.void):
        raise TypeError("CUDA kernel must have void return type.")
    return arguments


def type_of(value):
    """The numba type of an argument; its class, or an array's dtype, where numba has none."""
    from numba.core.errors import NumbaError
    from numba.core.typing.typeof import Purpose, typeof

    try:
        return typeof(value, Purpose.argument)
    except (NumbaError, TypeError, ValueError):
        return getattr(value, "dtype", value.__class__)


def stand_in(value):
    """An argument of the same numba type that keeps no array's memory: nobody may read in it."""
    if isinstance(value, np.ndarray):
        return as_strided(np.empty(1, value.dtype), value.shape, value.strides,
                          writeable=value.flags.writeable)
    if isinstance(value, tuple):
        parts = map(stand_in, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


def fingerprint(value):
    """What decides the numba type of an argument, found in far less time."""
    if isinstance(value, np.ndarray):
        flags = value.flags
        return value.dtype, value.ndim, flags.c_contiguous, flags.f_contiguous, flags.writeable
    if value.__class__ is tuple:
        return tuple(map(fingerprint, value))
    return value.__class__


def chosen(signatures, values, name):
    """(the signature that takes `values`, the values converted to it).

    Parameters
    ----------
    signatures : list of tuples of numba types
    values : what a launch was given, arrays as NumPy's

    Raises
    ------
    TypeError if no signature takes the arguments, or several do equally well. With a single
    signature a GPU would not look, and read an array's bytes as another type.
    """
    from numba.core import types

    given = tuple(map(type_of, values))
    if not all(isinstance(kind, types.Type) for kind in given):
        return signatures[0], values
    if given in signatures:
        return given, values
    alike = [types.void(*signature) for signature in signatures if len(signature) == len(given)]
    found = alike and context().resolve_overload(name, alike, given, {}, allow_ambiguous=False)
    if not found and len(signatures) == 1:
        read = _read_as(signatures[0], values)
        if read is not None:
            return signatures[0], read
    if not found:
        wanted = " or ".join(f"({', '.join(map(str, signature))})" for signature in signatures)
        raise TypeError(f"No matching definition for argument type(s) "
                        f"{', '.join(map(str, given))}: {name} takes {wanted}")
    return found.args, [_converted(value, kind, place) for place, (value, kind) in enumerate(
        zip(values, found.args, strict=True), start=1)]


def _read_as(signature, values):
    """`values`, integer arrays read as the integers of equal size that a signature names, as a GPU
    does; None where that is not all that differs.
    """
    from numba.core import types

    if len(signature) != len(values):
        return None
    read = []
    for value, kind in zip(values, signature, strict=True):
        if not isinstance(kind, types.Array) or not isinstance(value, np.ndarray):
            return None
        dtype = np.dtype(str(kind.dtype)) if isinstance(kind.dtype, types.Integer) else None
        if dtype is None or value.dtype.kind not in "iu" or (
                value.ndim != kind.ndim or value.dtype.itemsize != dtype.itemsize):
            return None
        read.append(value.view(dtype))
    return read


def _converted(value, kind, place):
    """A scalar as the type of the signature; other arguments as they are."""
    if not isinstance(value, (bool, int, float, complex, np.generic)) or isinstance(value, np.void):
        return value
    name = "boolean" if str(kind) == "bool" else str(kind)
    if name not in CLASSES:
        return value
    if isinstance(value, (complex, np.complexfloating)) and "complex" not in name or (
            isinstance(value, (float, np.floating)) and "int" in name):
        raise TypeError(f"argument {place} is {value!r}, which is not converted to {name}: the "
                        f"signature's type")
    return cast({int: np.int64}.get(CLASSES[name], CLASSES[name]))(value)
