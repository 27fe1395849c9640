"""Small functions that rewritten kernels call: index checks, shared arrays, loop budgets."""

import sys

import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.engine import arithmetic
from course_lib.simulator.engine.checked import check_index
from course_lib.simulator.places import FOLDER
from course_lib.simulator.rewrite.resolve import as_dtype

#: Static shared memory a block may declare, and all it may have with the dynamic part (sm_90).
STATIC_SHARED_LIMIT = 48 * 1024
SHARED_LIMIT = 227 * 1024

_POISON_BYTE = 0xCD
_templates = {}


def refuse_index(array, index, axis):
    """`index` into a list if it is not negative after all, else IndexError."""
    if index < 0:
        raise IndexError("negative index")
    return index


def gpu_extremum(function):
    """`max` or `min` for functions without source: two values as on a GPU, else as in Python."""
    two = arithmetic.extrema[function]

    def call(*values, **options):
        return two(*values) if len(values) == 2 and not options else function(*values, **options)

    return call


def tick(thread, iterations):
    """Called now and then by a counting loop: end the launch if it has gone round too often."""
    launch = thread.b.launch
    launch.steps += 1024
    if (iterations if launch.program.plain else launch.steps) > launch.max_steps:
        frame = sys._getframe(1)
        raise errors.Deadlock(
            f"endless loop in {launch.name}: thread {thread.index} of block {thread.b.index} is "
            f"still going round at {frame.f_code.co_filename}:{frame.f_lineno} after "
            f"{iterations:,} iterations (the budget is max_steps={launch.max_steps:,})")


def poisoned(shape, dtype):
    """A fresh array of uninitialised memory: NaN for floats, a garbage pattern for the rest."""
    key = shape if type(shape) is tuple else (shape,), dtype
    template = _templates.get(key)
    if template is None:
        template = records(np.empty(key[0], key[1]))
        poison(template)
        if template.nbytes <= 1 << 16 and len(_templates) < 512:
            _templates[key] = template
    return template.copy()


def records(array):
    """`array`; if it is one of records, they also give their fields as attributes."""
    if array.dtype.names is None:
        return array
    return array.view(np.dtype((np.record, array.dtype)), np.recarray)


def poison(array):
    """Fill `array` in place with what uninitialised memory holds here."""
    kind = array.dtype
    if kind.names is None and (kind.kind in "fc" or kind.name == "bfloat16"
                               or kind.name.startswith("float8")):
        array[...] = np.nan
    elif kind.kind == "b":
        array[...] = True
    elif array.size:
        array.view(np.ndarray)[...] = np.full(kind.itemsize, _POISON_BYTE, np.uint8).view(kind)[0]


def static_shape(shape, what):
    """`shape` as a tuple of non-negative ints; LaunchError if it is not one."""
    parts = shape if isinstance(shape, (tuple, list)) else (shape,)
    for part in parts:
        if not isinstance(part, (int, np.integer)) or isinstance(part, bool) or part < 0:
            raise errors.LaunchError(
                f"{what} needs a shape of constant integers; got {shape!r}")
    return tuple(int(part) for part in parts)


def shared_array(thread, key, shape, dtype, alignment=None):
    """The block's shared array declared at `key`. Shape 0 is a view of the launch's dynamic bytes.

    Raises
    ------
    LaunchError past 48 KB of static shared memory, or past 227 KB with the dynamic part.
    """
    block = thread.b
    array = block.arrays.get(key)
    if array is None:
        array = block.arrays[key] = _make_shared(block, shape, dtype)
    return array


def shared_list(thread, key, declared):
    """`shared_array` for an array kept as nested lists (see `lists`)."""
    block = thread.b
    array = block.arrays.get(key)
    if array is None:
        array = block.arrays[key] = declared.make()
        count = 1
        for part in declared.shape:
            count *= part
        _charge(block, count * np.dtype(declared.scalar).itemsize)
    return array


def _make_shared(block, shape, dtype):
    shape, dtype = static_shape(shape, "cuda.shared.array"), as_dtype(dtype)
    dynamic_bytes = block.launch.shared_bytes
    if shape in ((0,), ()):
        if block.dynamic is None:
            block.dynamic = np.full(dynamic_bytes, _POISON_BYTE, np.uint8)
            poison(block.dynamic[: dynamic_bytes // dtype.itemsize * dtype.itemsize].view(dtype))
        whole = dynamic_bytes // dtype.itemsize * dtype.itemsize
        return records(block.dynamic[:whole].view(dtype))
    array = poisoned(shape, dtype)
    _charge(block, array.nbytes)
    return array


def _charge(block, count):
    """Note `count` bytes of static shared memory; LaunchError past the limits."""
    block.static_bytes += count
    dynamic_bytes = block.launch.shared_bytes
    if block.static_bytes > STATIC_SHARED_LIMIT:
        raise errors.LaunchError(
            f"a block may declare {STATIC_SHARED_LIMIT:,} bytes of static shared memory; "
            f"{block.launch.name} declares {block.static_bytes:,}. Larger tiles need dynamic "
            f"shared memory: shape 0 and kernel[grid, block, stream, shared_bytes]")
    if block.static_bytes + dynamic_bytes > SHARED_LIMIT:
        raise errors.LaunchError(
            f"a block may have {SHARED_LIMIT:,} bytes of shared memory; {block.launch.name} wants "
            f"{block.static_bytes:,} static and {dynamic_bytes:,} dynamic")


def shared_array_here(thread, shape, dtype, alignment=None):
    """`shared_array` for a function without source: named by the instruction that calls it."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename.startswith(FOLDER):
        frame = frame.f_back
    return shared_array(thread, (id(frame.f_code), frame.f_lasti), shape, dtype, alignment)


def local_array(shape, dtype, alignment=None):
    """A thread's own array, uninitialised."""
    if shape.__class__ is int and dtype.__class__ is type and shape >= 0:  # as most often
        return poisoned(shape, np.dtype(dtype))
    return poisoned(static_shape(shape, "cuda.local.array"), as_dtype(dtype))


def read_elements(array, index, count):
    """`count` elements from `index` on, as a list. On a GPU this is one wide load."""
    check_index(array, index)
    return [array[index + k] for k in range(count)]


def write_elements(array, index, values):
    """Store `values` from `index` on. On a GPU this is one wide store."""
    check_index(array, index)
    for k, value in enumerate(values):
        arithmetic.store(array, index + k, value)


def group_sync(thread, group):
    """The operation that `group.sync()` waits for."""
    operation = getattr(group, "sync_operation", None)
    if operation is None:
        raise AttributeError(f"{type(group).__name__!r} object has no attribute 'sync'")
    return operation
