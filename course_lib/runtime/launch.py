"""Launch a kernel on any array: ``launch(kernel, grid, block, *args)``.

`kernel[grid, block](*args)` is numba's own way, and what learners write. It costs the host 20 to
50 µs a launch, because numba looks at every argument afresh. `launch` finds a compiled
`Specialisation` by the arguments' dtypes and layouts and hands it pointers and shapes. It runs on
the arguments' own device and on PyTorch's current stream; it never synchronises, never copies.

In the simulator the same call runs the kernel on NumPy arrays and PyTorch CPU tensors.
"""

import math

import numpy as np

from course_lib.runtime import arrays, device
from course_lib.runtime.arrays import ArrayError
from course_lib.runtime.specialisation import LaunchError, Specialisation

__all__ = ["ArrayError", "LaunchError", "launch"]

_simulated = device.use_simulator()
MOST_LAYOUTS = 4096  # of tensors, remembered between launches
_specialisations = {}
_layouts = {}
_tensor_types = set()
# How a Python or NumPy number is passed: numba's name of its type, and its `struct` code. A
# Python float goes as float32, so that no float64 sneaks into a kernel.
_SCALARS = {
    bool: ("boolean", "?"),
    int: ("int64", "q"),
    float: ("float32", "f"),
    np.bool_: ("boolean", "?"),
    np.int8: ("int8", "b"),
    np.uint8: ("uint8", "B"),
    np.int16: ("int16", "h"),
    np.uint16: ("uint16", "H"),
    np.int32: ("int32", "i"),
    np.uint32: ("uint32", "I"),
    np.int64: ("int64", "q"),
    np.uint64: ("uint64", "Q"),
    np.float16: ("float16", "e"),
    np.float32: ("float32", "f"),
    np.float64: ("float64", "d"),
}


def launch(kernel, grid, block, *args, shared_bytes=0, flat=False):
    """Run `kernel` on `grid` blocks of `block` threads, asynchronously.

    kernel        a `@cuda.jit` kernel
    grid, block   an int, or a tuple of up to three
    args          arrays (PyTorch CUDA tensors, CuPy, numba device arrays; in the simulator
                  NumPy arrays and PyTorch CPU tensors), NumPy scalars, and Python numbers:
                  bool, int (as int64), float (as float32)
    shared_bytes  dynamic shared memory per block
    flat          pass every array as one dimension over its memory, whatever its shape; each
                  must be dense (its elements fill one stretch of memory)

    The first launch with new dtypes compiles (or loads from disk), also while a CUDA graph is
    being captured. Raises `ArrayError` for an argument of the wrong kind, `LaunchError` for an
    impossible launch, and numba's typing errors for a kernel that can't be compiled.
    """
    if type(grid) is not tuple or len(grid) != 3:
        grid = _three(grid, "grid")
    if type(block) is not tuple or len(block) != 3:
        block = _three(block, "block")
    if _simulated:
        return _simulate(kernel, grid, block, args, shared_bytes, flat)
    key, values, index = [kernel, flat], [], -1
    for arg in args:
        kind = type(arg)
        if kind in _tensor_types:
            here = _read_tensor(arg, flat, key, values)
        elif kind in _SCALARS:
            key.append(kind)
            values.append(arg)
            continue
        else:
            here = _read_other(arg, flat, key, values)
        if here != index:
            if index >= 0:
                raise ArrayError(f"arguments on two GPUs, cuda:{index} and cuda:{here}")
            index = here
    key.append(index)
    key = tuple(key)
    specialised = _specialisations.get(key)
    if specialised is None:
        specialised = _specialise(key)
    specialised.launch(grid, block, shared_bytes, values)


def _three(size, name):
    sizes = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    if not 1 <= len(sizes) <= 3 or not all(isinstance(s, (int, np.integer)) for s in sizes):
        raise LaunchError(f"{name} must be an int or a tuple of one to three ints, not {size!r}")
    if min(sizes) < 1:
        raise LaunchError(f"{name} must be at least 1 in each direction, not {size!r}")
    return (*map(int, sizes), 1, 1)[:3]


def _read_tensor(tensor, flat, key, values):
    index = tensor.get_device()
    if index < 0:
        arrays.describe(tensor, "an argument")  # raises, and names the conversion
    layout = (flat, tensor.dtype, tensor.shape, tensor.stride())
    known = _layouts.get(layout)
    if known is None:
        known = _learn_layout(tensor, layout)
    part, before, after = known
    key.append(part)
    values += before
    values.append(tensor.data_ptr())
    values += after
    return index


def _learn_layout(tensor, layout):
    """(part of the key, numbers before the pointer, numbers behind it), remembered."""
    flat, dtype, shape, stride = layout
    size, n = tensor.itemsize, tensor.numel()
    if flat:
        _require_dense(tensor)
        known = (dtype, (n, size), (n, size))
    else:
        after = (*shape, *(step * size for step in stride))
        known = ((dtype, len(shape), tensor.is_contiguous()), (n, size), after)
    if len(_layouts) >= MOST_LAYOUTS:
        _layouts.clear()
    _layouts[layout] = known
    return known


def _read_other(arg, flat, key, values):
    if arrays.is_tensor(arg):  # the first tensor, a Parameter, a subclass
        _tensor_types.add(type(arg))
        return _read_tensor(arg, flat, key, values)
    found = arrays.describe(arg, "an argument")
    n, size = math.prod(found.shape), np.dtype(arg.dtype).itemsize
    contiguous = arrays.is_contiguous(found.shape, found.strides, size)
    if flat:
        if not contiguous:
            _require_dense(arg)
        key.append((found.dtype, 1, True, found.read_only))
        values += (n, size, found.pointer, n, size)
    else:
        key.append((found.dtype, len(found.shape), contiguous, found.read_only))
        values += (n, size, found.pointer, *found.shape, *found.strides)
    return found.device


def _require_dense(array):
    if not arrays.is_dense(array):
        raise ArrayError(
            f"flat=True needs arrays whose elements fill one stretch of memory; shape "
            f"{tuple(array.shape)} with strides {arrays.strides_of(array)} has gaps"
        )


def _specialise(key):
    kernel, flat, *parts, index = key
    if not hasattr(kernel, "targetoptions"):
        raise LaunchError(f"expected a @cuda.jit kernel, not {kernel!r}")
    argtypes, layout = [], ""
    for part in parts:
        if part in _SCALARS:
            argtypes.append(numba_type(_SCALARS[part][0]))
            layout += _SCALARS[part][1]
            continue
        dtype, n_dims, contiguous, *read_only = part if isinstance(part, tuple) else (part, 1, True)
        argtypes.append(array_type(dtype, n_dims, contiguous, read_only=any(read_only)))
        # numba's array: two unused pointers, size, item size, data, shape, strides
        layout += "16xqqQ" + 2 * n_dims * "q"
    _specialisations[key] = Specialisation(kernel, argtypes, layout, max(index, 0))
    return _specialisations[key]


def numba_type(name):
    """numba's type for a dtype name such as "float32" or "bfloat16" (or a torch dtype)."""
    from numba.cuda import types

    name = str(name).removeprefix("torch.")
    found = getattr(types, {"bool": "boolean"}.get(name, name), None)
    if not isinstance(found, types.Type):
        raise ArrayError(f"kernels can't take arrays of {name}")
    return found


def array_type(dtype, n_dims=1, contiguous=True, *, read_only=False):
    """numba's type of an array argument."""
    from numba.cuda import types

    layout = "C" if contiguous else "A"
    return types.Array(numba_type(dtype), n_dims, layout, readonly=read_only)


def _simulate(kernel, grid, block, args, shared_bytes, flat):
    ready = [_simulator_argument(arg, flat) for arg in args]
    kernel[grid, block, 0, shared_bytes](*ready)


def _simulator_argument(arg, flat):
    if type(arg) is float:
        return np.float32(arg)
    if type(arg) in _SCALARS:
        return arg
    if arrays.is_tensor(arg) and arg.device.type != "cpu":
        raise ArrayError(
            f"a PyTorch tensor on {arg.device}, but kernels run in the simulator here: "
            "pass tensor.cpu()"
        )
    if not flat or not hasattr(arg, "shape"):
        return arg
    _require_dense(arg)
    axes = sorted(range(len(arg.shape)), key=lambda axis: -arrays.strides_of(arg)[axis])
    if arrays.is_tensor(arg):
        return arg.detach().permute(axes).reshape(-1)
    return arg.transpose(axes).reshape(-1)
