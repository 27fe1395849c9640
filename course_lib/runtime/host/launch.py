"""Launch a kernel on any array: ``launch(kernel, grid, block, *args)``.

`kernel[grid, block](*args)` is numba's own way, and what learners write. It costs the host 20 to
50 µs a launch, because numba looks at every argument afresh. `launch` looks up a `PreparedLaunch`
by all that may matter (kernel, grid, shapes, strides, dtypes, stream …) and fills in the
addresses. It runs on the arguments' own device and on PyTorch's current stream; it never
synchronises and never copies.

In the simulator the same call runs the kernel on NumPy arrays and PyTorch CPU tensors.
"""

import contextlib
import functools
import math
import sys
from threading import get_ident
from typing import NamedTuple

import numpy as np

from course_lib import simulator
from course_lib.runtime.host import arrays, device
from course_lib.runtime.host.arrays import ArrayError
from course_lib.runtime.host.specialisation import (
    LaunchError,
    PreparedLaunch,
    Specialisation,
    most_blocks_in_cluster,
)

__all__ = [
    "ArrayError", "Chip", "LaunchError", "chip_of", "in_simulator", "launch",
    "most_blocks_in_cluster", "planning", "prepare", "recorded",
]  # fmt: skip


class Chip(NamedTuple):
    """What plans know of a GPU; a block may have `shared_bytes`, as the driver says it."""

    capability: tuple
    shared_bytes: int
    multiprocessors: int
    l2_bytes: int
    name: str


_simulated = device.use_simulator()
#: An H200 of few multiprocessors, as every block takes the simulator time.
_chip = Chip((9, 0), 227 << 10, 8, 50 << 20, "simulator")
_planning = False  # launches are noted, and none is run
choices = ()  # what ladders were told to choose (`Ladder.choosing`): another, and all decide anew
MOST_BLOCKS_IN_CLUSTER = 16
MOST_PREPARED = 4096  # launches remembered; past it, all are prepared again
_specialisations = {}
_prepared = {}
tensor_types = set()  # of PyTorch, seen on a GPU: Tensor, Parameter
_recorders = {}  # thread -> the list that `recorded` fills
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

_NAMES = {"boolean": "bool", "bfloat16": "__nv_bfloat16"}  # of types that numba calls otherwise


@functools.cache
def _fields(kind):
    """((numba's name, `struct` code), …) of a NamedTuple's fields, by its annotations."""
    return tuple(_SCALARS[annotation] for annotation in kind.__annotations__.values())


def launch(kernel, grid, block, *args, shared_bytes=0, flat=False, overlap=False, cluster=1):
    """Run `kernel` on `grid` blocks of `block` threads, asynchronously.

    kernel        a `@cuda.jit` kernel
    grid, block   an int, or a tuple of up to three ints
    args          arrays (PyTorch CUDA tensors, CuPy, numba device arrays; in the simulator
                  NumPy arrays and PyTorch CPU tensors), NumPy scalars, and Python numbers:
                  bool, int (as int64), float (as float32); or a NamedTuple of such numbers, whose
                  fields a kernel reads by name. Their annotations say how they are passed
    shared_bytes  dynamic shared memory per block
    flat          pass every array as one dimension over its memory, whatever its shape; each
                  must be dense (its elements fill one stretch of memory)
    overlap       let the kernel's blocks get ready while the stream's previous kernel still runs
                  (programmatic dependent launch; from sm_90 on, elsewhere without effect). The
                  kernel must call `intrinsics.wait_for_previous_kernel` before it touches memory
    cluster       how many consecutive blocks in x make a cluster (`intrinsics.cluster`): 1 to 16,
                  and a divisor of the grid's x; more than 1 needs sm_90, and more than 8 a chip
                  for which `most_blocks_in_cluster` says so

    The first launch with new dtypes compiles (or loads from disk), also while a CUDA graph is
    being captured. Raises `ArrayError` for an argument of the wrong kind, `LaunchError` for an
    impossible launch, and numba's typing errors for a kernel that can't be compiled.
    """
    if _recorders and (record := _recorders.get(get_ident())) is not None:
        options = dict(shared_bytes=shared_bytes, flat=flat, overlap=overlap, cluster=cluster)
        record.append((kernel, grid, block, args, options))
    if _simulated:
        return _simulate(kernel, grid, block, args, shared_bytes, flat, cluster)
    if simulator.observing():
        return _observe(kernel, grid, block, args, shared_bytes, flat, cluster)
    # Everything that a prepared launch depends on; `values` are what each call brings. Threads
    # don't share one, because a launch writes into its buffer.
    key = [kernel, grid, block, shared_bytes, flat, overlap, cluster, get_ident()]
    values, index = [], -1
    for arg in args:
        kind = type(arg)
        if kind in tensor_types:
            index = arg.get_device()
            key += (arg.dtype, arg.shape, arg.stride(), index)
            values.append(arg.data_ptr())
        elif kind in _SCALARS:
            key.append(kind)
            values.append(arg)
        elif isinstance(arg, tuple):
            key.append(kind)
            values += arg
        else:
            index = _read_other(arg, key, values)
    key.append(_stream_of(index) if index >= 0 else 0)
    key = tuple(key)
    prepared = _prepared.get(key)
    if prepared is None:
        prepared = _prepare(key, args)
    prepared.launch(values)


def _three(size, name):
    sizes = (size,) if isinstance(size, (int, np.integer)) else tuple(size)
    if not 1 <= len(sizes) <= 3 or not all(isinstance(s, (int, np.integer)) for s in sizes):
        raise LaunchError(f"{name} must be an int or a tuple of one to three ints, not {size!r}")
    if min(sizes) < 1:
        raise LaunchError(f"{name} must be at least 1 in each direction, not {size!r}")
    return (*map(int, sizes), 1, 1)[:3]


def _check_cluster(cluster, grid):
    if not isinstance(cluster, int) or not 1 <= cluster <= MOST_BLOCKS_IN_CLUSTER:
        raise LaunchError(
            f"cluster must be an int from 1 to {MOST_BLOCKS_IN_CLUSTER}, not {cluster!r}"
        )
    if grid[0] % cluster:
        raise LaunchError(
            f"grid {grid} has {grid[0]} blocks in x, which clusters of {cluster} do not divide"
        )


def _read_other(arg, key, values):
    """Note a first tensor, a Parameter, or an array of another library. Returns its GPU."""
    found = arrays.describe(arg, "an argument")  # raises, and names the conversion
    if arrays.is_tensor(arg):
        tensor_types.add(type(arg))
        key += (arg.dtype, arg.shape, arg.stride(), found.device)
    else:
        key += (found.dtype, found.shape, found.strides, found.device, found.read_only)
    values.append(found.pointer)
    return found.device


def _stream_of(index):
    """The handle of PyTorch's current stream; without PyTorch, of the default stream."""
    global _stream_of
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return 0
    # The public torch.cuda.current_stream builds an object, which takes ten times as long.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    _stream_of = raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)
    return _stream_of(index)


def prepare(kernel, grid, block, *args, shared_bytes=0, flat=False, overlap=False, cluster=1):
    """The `PreparedLaunch` of what `launch` does with the same tensors and numbers, to be repeated.

    Its `launch` takes the tensors' addresses, in order; numbers stay what they are here. It holds
    for tensors of these shapes, strides, dtypes and device, for the stream that is current now,
    and for this thread. Raises as `launch` does.
    """
    index = next((arg.get_device() for arg in args if arrays.is_tensor(arg)), 0)
    options = shared_bytes, flat, overlap, cluster
    return _build(kernel, grid, block, args, *options, _stream_of(index), fixed_numbers=True)


@contextlib.contextmanager
def recorded():
    """The launches made in this block by this thread: (kernel, grid, block, args, options) each."""
    outer, _recorders[get_ident()] = _recorders.get(get_ident()), (record := [])
    try:
        yield record
    finally:
        del _recorders[get_ident()]
        if outer is not None:
            outer += record
            _recorders[get_ident()] = outer


def on_gpu():
    """Whether launches made here and now run on a GPU."""
    return not (_simulated or simulator.observing())


def chip_of(array):
    """The `Chip` that launches on `array` run on.

    In the simulator, the one that it stands for; while `planning`, the given one.
    """
    if not on_gpu():
        return _chip
    if type(array) in tensor_types and (index := array.get_device()) >= 0:
        return _gpu(index)
    return _gpu(arrays.describe(array).device)  # which refuses what is in no GPU's memory


@functools.cache
def _gpu(index):
    found = device.properties(index)
    return Chip(
        found.compute_capability, found.shared_bytes_per_block_optin, found.multiprocessors,
        found.l2_bytes, found.name,
    )  # fmt: skip


@contextlib.contextmanager
def planning(chip):
    """Launches in this block are those that `chip` would get, and none is run.

    Gives the list of them, as `recorded` does. Arrays are CPU arrays, whose memory nobody touches:
    ``torch.empty`` will do. Holds for all threads, but only this one's launches are listed.
    """
    global _chip, _planning
    before, _chip, _planning = (_chip, _planning), chip, True
    try:
        with in_simulator(), recorded() as launches:
            yield launches
    finally:
        _chip, _planning = before


def _prepare(key, args):
    """Check everything once, compile if need be, and remember the launch under `key`."""
    kernel, grid, block, *options, stream = *key[:7], key[-1]
    prepared = _build(kernel, grid, block, args, *options, stream)
    if len(_prepared) >= MOST_PREPARED:
        _prepared.clear()
    _prepared[key] = prepared
    return prepared


def _build(
    kernel, grid, block, args, shared_bytes, flat, overlap, cluster, stream, fixed_numbers=False
):
    if not hasattr(kernel, "targetoptions"):
        raise LaunchError(f"expected a @cuda.jit kernel, not {kernel!r}")
    grid, block = _three(grid, "grid"), _three(block, "block")
    _check_cluster(cluster, grid)
    if not isinstance(shared_bytes, int) or shared_bytes < 0:
        raise LaunchError(f"shared_bytes must be an int of at least 0, not {shared_bytes!r}")
    argtypes, parameters, index = [], [], None
    for arg in args:
        if type(arg) in _SCALARS:
            name, code = _SCALARS[type(arg)]
            argtypes.append(numba_type(name))
            parameters.append((code, arg if fixed_numbers else None))
            continue
        if isinstance(arg, tuple):
            argtypes.append(argument_type(type(arg)))
            parameters += (
                (code, number if fixed_numbers else None)
                for (_, code), number in zip(_fields(type(arg)), arg, strict=True)
            )
            continue
        found = arrays.describe(arg, "an argument")
        if index not in (None, found.device):
            raise ArrayError(f"arguments on two GPUs, cuda:{index} and cuda:{found.device}")
        index = found.device
        argtype, layout = _array_parameter(arg, found, flat)
        argtypes.append(argtype)
        parameters += layout
    types_key = (kernel, tuple(argtypes), index or 0)
    if types_key not in _specialisations:
        _specialisations[types_key] = Specialisation(kernel, argtypes, index or 0)
    specialisation = _specialisations[types_key]
    return PreparedLaunch(
        specialisation, grid, block, shared_bytes, stream, parameters, overlap, cluster
    )


def _array_parameter(array, found, flat):
    """numba's type of an array, and its parameters as `PreparedLaunch` takes them."""
    n, size = math.prod(found.shape), array.dtype.itemsize
    shape, strides = found.shape, found.strides
    if flat:
        _require_dense(array)
        shape, strides = (n,), (size,)
    contiguous = arrays.is_contiguous(shape, strides, size)
    argtype = array_type(found.dtype, len(shape), contiguous, read_only=found.read_only)
    # numba's array: two unused pointers, size, item size, data, shape, strides
    before = [("Q", 0), ("Q", 0), ("q", n), ("q", size)]
    return argtype, [*before, ("Q", None), *(("q", x) for x in (*shape, *strides))]


def _require_dense(array):
    if not arrays.is_dense(array):
        raise ArrayError(
            f"flat=True needs arrays whose elements fill one stretch of memory; shape "
            f"{tuple(array.shape)} with strides {arrays.strides_of(array)} has gaps"
        )


def type_names(args, flat=False):
    """What numba calls the types of a launch's arguments, found without numba."""
    return [_type_name(arg, flat) for arg in args]


def _type_name(arg, flat):
    if type(arg) in _SCALARS:
        return _NAMES.get(name := _SCALARS[type(arg)][0], name)
    if isinstance(arg, tuple):
        return _tuple_name(type(arg))
    contiguous = flat or arrays.is_contiguous(arg.shape, arrays.strides_of(arg), 1)
    return part_name((arg.dtype, 1 if flat else len(arg.shape), contiguous))


def part_name(part):
    """What numba calls the `argument_type` of a part, found without numba."""
    if isinstance(part, type):
        return _tuple_name(part)
    if isinstance(part, tuple):
        dtype, n_dims, contiguous = (*part, True)[:3]
        return f"array({part_name(dtype)}, {n_dims}d, {'C' if contiguous else 'A'})"
    name = str(part).removeprefix("torch.")
    return _NAMES.get(name, name)


def _tuple_name(kind):
    """What `compiler.source_key` calls numba's type of this NamedTuple."""
    names = [_NAMES.get(name, name) for name, _ in _fields(kind)]
    types = f"{names[0]} x {len(names)}" if len(set(names)) == 1 else ", ".join(names)
    return f"{kind.__name__}({types}) of {', '.join(kind._fields)}"


def argument_type(part):
    """numba's type of an argument: of a dtype name, a NamedTuple, or (dtype, dimensions)."""
    if isinstance(part, type):
        from numba.cuda import types

        fields = [numba_type(name) for name, _ in _fields(part)]
        if len(set(fields)) == 1:
            return types.NamedUniTuple(fields[0], len(fields), part)
        return types.NamedTuple(fields, part)
    return array_type(*part) if isinstance(part, tuple) else numba_type(part)


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


def _simulate(kernel, grid, block, args, shared_bytes, flat, cluster):
    grid, block = _three(grid, "grid"), _three(block, "block")
    _check_cluster(cluster, grid)
    if _planning:
        return
    ready = [_simulator_argument(arg, flat) for arg in args]
    simulator.run(kernel, grid, block, *ready, shared=shared_bytes, cluster=cluster)


def _observe(kernel, grid, block, args, shared_bytes, flat, cluster):
    """Under `simulator.sanitize()` or `.trace()`: simulated, on copies of the GPU's arrays."""
    grid, block = _three(grid, "grid"), _three(block, "block")
    _check_cluster(cluster, grid)
    ready = [_simulator_argument(arg, flat) for arg in args]
    simulator.run_on_copies(kernel, grid, block, ready, shared_bytes, cluster)


@contextlib.contextmanager
def in_simulator():
    """Launches in this block run in the simulator, on CPU arrays, on a GPU machine too.

    For checking a launcher before it is let loose on the GPU. Holds for all threads.
    """
    global _simulated
    before, _simulated = _simulated, True
    try:
        yield
    finally:
        _simulated = before


def _simulator_number(number, annotation):
    return np.float32(number) if annotation is float else annotation(number)


def _simulator_argument(arg, flat):
    if type(arg) is float:
        return np.float32(arg)
    if type(arg) in _SCALARS:
        return arg
    if isinstance(arg, tuple):
        return type(arg)(*map(_simulator_number, arg, type(arg).__annotations__.values()))
    if arrays.is_tensor(arg) and arg.device.type != "cpu" and not simulator.observing():
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
