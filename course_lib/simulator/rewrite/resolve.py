"""What a global name of a kernel means to the simulator.

A kernel's globals may hold the simulator's objects, the real numba.cuda's (when both are
installed), numba's scalar types, `math`, or other functions. `mapped` turns each into what a
rebuilt copy of the kernel uses instead. Nothing here imports numba: its objects are known by the
module they come from.
"""

import builtins
import enum
import sys
import types

import ml_dtypes
import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.cuda_api import mathlib
from course_lib.simulator.cuda_api.modules import submodule
from course_lib.simulator.cuda_api.primitives import Index, Namespace
from course_lib.simulator.cuda_api.rounding import compiled_integer
from course_lib.simulator.places import PACKAGE

#: Returned when a name or an attribute cannot be told before the kernel runs.
UNRESOLVED = object()

#: classes of floats
FLOATS = frozenset([float, np.float16, np.float32, np.float64, ml_dtypes.bfloat16])

#: numba's names of scalar types that differ from NumPy's
_SCALARS = {
    "bool": np.bool_,
    "boolean": np.bool_,
    "bfloat16": ml_dtypes.bfloat16,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint8": np.uint8,
    "uint16": np.uint16,
    "uint32": np.uint32,
    "uint64": np.uint64,
    "float16": np.float16,
    "float32": np.float32,
    "float64": np.float64,
    "complex64": np.complex64,
    "complex128": np.complex128,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}

_twins = {}
_jitable = {}  # id of a function -> the function
_twin_results = {}  # twin -> the class of what it returns, or None
_casts = {}


def register_twin(real_object, python_function, result=None):
    """Use `python_function` wherever a rebuilt kernel refers to `real_object`.

    Meant for a numba `@intrinsic`, which Python cannot call. The function is treated as a device
    function: it may use `cuda.threadIdx`, barriers and warp operations. If it has an attribute
    `relaxed` that is true, what it accesses is meant to be accessed by others at the same time.
    `result` is the class of what the function always returns, such as int, for kernels that compute
    with it to run faster; None: it is found out each time.

    Raises
    ------
    TypeError if `python_function` is no Python function.
    """
    function = getattr(python_function, "py_func", python_function)
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"a twin must be a Python function; got {type(python_function).__name__}")
    # The object is kept with its id, so that the id cannot be given to another object.
    _twins[id(real_object)] = (real_object, function)
    _twin_results[function] = result


def register_jitable(*args, **kwargs):
    """`numba.cuda.extending.register_jitable`: kernels may call the function as it is."""
    if len(args) == 1 and not kwargs:
        _jitable[id(args[0])] = args[0]
        return args[0]
    return register_jitable


def is_jitable(function):
    """True for a Python function that kernels may call without `cuda.jit`.

    It is a twin's, or was registered: here, or with numba by its register_jitable or overload.
    """
    if id(function) in _twins or id(function) in _jitable:
        return True
    templates = sys.modules.get("numba.core.typing.templates")
    known = templates.builtin_registry.globals if templates is not None else ()
    return any(value is function for value, _ in known)


def is_twin(function):
    """True for a Python function that stands for an intrinsic."""
    return function in _twin_results


def twin_result(function):
    """The class of what a twin returns, or None."""
    return _twin_results[function]


class Device:
    """A function to be run as device code: `function` is the user's Python function."""

    __slots__ = ("function",)

    def __init__(self, function):
        self.function = function


def scalar_type(value):
    """The NumPy scalar type for a numba scalar type or anything NumPy takes; None if it is none."""
    if isinstance(value, np.dtype):
        return value.type if value.names is None and value.subdtype is None else None
    if isinstance(value, type):
        if issubclass(value, np.generic) or value in (ml_dtypes.bfloat16,):
            return value
        return {int: np.int64, float: np.float64, bool: np.bool_, complex: np.complex128}.get(value)
    if type(value).__module__.startswith("numba"):
        return _SCALARS.get(getattr(value, "name", None))
    return None


def as_dtype(value):
    """The dtype for what a kernel gives as `dtype=`: NumPy's, numba's, a name, a record."""
    if isinstance(value, np.dtype):
        return value
    found = scalar_type(value)
    if found is not None:
        return np.dtype(found)
    if isinstance(value, str) and value in _SCALARS:
        return np.dtype(_SCALARS[value])
    record = getattr(value, "dtype", None)
    if type(value).__module__.startswith("numba") and isinstance(record, np.dtype):
        return record
    if type(value).__name__ == "Record":
        from numba.np import numpy_support

        return numpy_support.as_dtype(value)
    try:
        return np.dtype(value)
    except TypeError:
        raise errors.LaunchError(f"{value!r} is no element type") from None


def cast(kind):
    """A call target for `kind(value)` that wraps integers, and clamps floats, as a GPU does.

    NumPy raises where a Python integer does not fit: np.uint32(-1).
    """
    found = _casts.get(kind)
    if found is None:
        found = _casts[kind] = _make_cast(kind)
    return found


def _make_cast(kind):
    if not issubclass(kind, np.integer):
        return kind
    info = np.iinfo(kind)
    mask, top, signed = (1 << info.bits) - 1, info.max, info.min < 0
    lowest, highest = float(info.min), float(top)

    def convert(value=0):
        if value.__class__ in FLOATS and (
                value.__class__ is np.float16 or not lowest <= value < highest):
            return kind(compiled_integer(value, info.bits, signed))
        try:
            return kind(value)
        except OverflowError:
            bits = int(value) & mask
            return kind(bits if bits <= top else bits - mask - 1)

    convert.__name__ = convert.__qualname__ = kind.__name__
    convert.kind = kind
    return convert


def is_foreign_module(name):
    """True for modules of Python and NumPy, which hold no device code."""
    root = name.partition(".")[0]
    return root in ("numpy", "ml_dtypes", "greenlet") or (
        root in sys.stdlib_module_names and root != "__main__"
    )


def is_foreign(function):
    """True for functions that are no device code: Python's, NumPy's and the simulator's own."""
    module = function.__module__ or ""
    return module == PACKAGE or module.startswith(PACKAGE + ".") or is_foreign_module(module)


def mapped(value):
    """What a rebuilt function uses in place of `value`."""
    twin = _twins.get(id(value))
    if twin is not None:
        return Device(twin[1])
    kind = type(value)
    if kind is types.ModuleType or isinstance(value, types.ModuleType):
        return _mapped_module(value)
    if kind is types.BuiltinFunctionType:
        return mathlib.by_builtin.get(id(value), value)
    if kind is types.FunctionType:
        if value.__module__ and value.__module__.startswith("numba.cuda"):
            return _mapped_numba_object(value)
        return value if is_foreign(value) else Device(value)
    if kind.__module__.startswith(PACKAGE):
        return Device(value.py_func) if hasattr(value, "py_func") else value
    if (
        kind.__module__.startswith(("numba", "numba_cuda"))
        or kind is type
        and (value.__module__.startswith("numba"))
    ):
        return _mapped_numba_object(value)
    if kind is np.ndarray and value.ndim:
        # numba freezes a global array into the kernel as a constant.
        frozen = value.view()
        frozen.flags.writeable = False
        return frozen
    return value


def _mapped_module(module):
    name = module.__name__
    if name == "math":
        return mathlib.math
    if name == "numba.cuda" or name.startswith("numba.cuda."):
        return submodule(name) or module
    return module


def _mapped_numba_object(value):
    found = scalar_type(value)
    if found is not None:
        return found
    function = getattr(value, "py_func", None)
    if isinstance(function, types.FunctionType):
        if function.__module__ == "numba.cuda.random":
            return getattr(submodule("numba.cuda.random"), function.__name__)
        return Device(function)
    definition = getattr(value, "_defn", value)
    module = getattr(definition, "__module__", None) or ""
    name = getattr(definition, "__qualname__", None) or getattr(definition, "__name__", "")
    if module.startswith("numba.cuda"):
        for place in (submodule(module), submodule("numba.cuda")):
            if place is not None:
                found = place
                for part in name.split("."):
                    found = getattr(found, part, UNRESOLVED)
                if found is not UNRESOLVED:
                    return found
    if definition is not value:
        raise errors.SimulatorError(
            f"{name} is a numba intrinsic, which Python cannot run. Give the simulator a Python "
            f"function for it: simulator.register_twin({name}, function)"
        )
    return value


def foldable(value):
    """True if attributes of `value` are looked up once, when a kernel is rewritten."""
    return isinstance(value, (types.ModuleType, Namespace, Index)) or (
        isinstance(value, type)
        and not issubclass(value, (enum.Enum, np.generic))
        and value.__module__.startswith("numba")
    )


class Scope:
    """The global and closure names of one function, with what was found there."""

    def __init__(self, function):
        code = function.__code__
        self.globals = function.__globals__
        self.cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        #: (container, key) -> object found; compared again before each launch
        self.seen = {}

    def raw(self, name):
        """The object that `name` stands for, or UNRESOLVED."""
        value = self._peek(name)
        self.seen[name] = value
        return value

    def _peek(self, name):
        if name in self.cells:
            try:
                return self.cells[name].cell_contents
            except ValueError:
                return UNRESOLVED
        if name in self.globals:
            return self.globals[name]
        return getattr(builtins, name, UNRESOLVED)

    def attribute(self, base, name):
        """`base.name`, remembered if `base` is a module of the user's."""
        value = getattr(base, name, UNRESOLVED)
        if type(base) is types.ModuleType and not base.__name__.startswith(("numpy", "math")):
            self.seen[base, name] = value
        return value

    def changes(self):
        """(name, value it had, value it has) of what stands for another object than before."""
        for key, old in self.seen.items():
            name = key if type(key) is str else f"{key[0].__name__}.{key[1]}"
            new = self._peek(key) if type(key) is str else getattr(*key, UNRESOLVED)
            if new is not old and UNRESOLVED not in (new, old):
                yield name, old, new

    def is_stale(self):
        """True if a name now stands for another object than when it was looked up."""
        for key, value in self.seen.items():
            if type(key) is str:
                if self._peek(key) is not value:
                    return True
            elif getattr(key[0], key[1], UNRESOLVED) is not value:
                return True
        return False
