"""What numba will make of a kernel: float64 where float32 was meant, wide integers, spills.

    for finding in simulator.lint(kernel, x, y):
        print(finding)

The kernel is typed and compiled by the real numba.cuda, for which no GPU is needed. That happens
in a process of its own, because in this one `numba.cuda` may be the simulator. The process starts
with the first call (or `prepare`), waits for further ones, and ends with this one.
"""

import atexit
import contextlib
import dis
import importlib.util
import marshal
import os
import pickle
import struct
import sys
import threading
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from course_lib.simulator.cuda_api.modules import submodule
from course_lib.simulator.cuda_api.primitives import LaneId
from course_lib.simulator.engine.kernel import Kernel, as_kernel
from course_lib.simulator.errors import SimulatorError
from course_lib.simulator.places import PACKAGE
from course_lib.simulator.rewrite import resolve

#: What the compiling process sees: modules that choose between the simulator and the real
#: numba.cuda are to choose the latter.
ENVIRONMENT = {"COURSE_LIB_SIMULATOR": "0", "NUMBA_ENABLE_CUDASIM": "0"}
_WORKER = Path(__file__).with_name("worker.py")
# By its path: on the module search path, its folder would hide modules of Python's.
_START = "import runpy, sys; runpy.run_path(sys.argv[1], run_name='__main__')"
_OPTIONS = ("fastmath", "max_registers")
#: numba.cuda, and modules below it whose functions a kernel may import by name.
_NUMBAS = ("numba.cuda", *(f"numba.cuda.{part}" for part in (
    "random", "libdevice", "cg", "fp16", "bf16")))


class LintError(SimulatorError):
    """The kernel could not be compiled; the message is numba's, if `refused` is true."""

    refused = False


class LintUnavailable(SimulatorError):
    """numba-cuda, which does the typing and compiling, is not installed."""


@dataclass(frozen=True)
class Finding:
    """One thing to know about a compiled kernel.

    Attributes
    ----------
    kind : "float64-promotion", "integer-width" or "spill"
        A spill is found in the kernel as a whole: its line is that of the kernel.
    line, filename, source : where, and that line of source
    message : str
        What is computed how, and what would mend it.
    """

    kind: str
    line: int
    source: str
    message: str
    filename: str

    def __str__(self):
        return f"line {self.line}: {self.kind}: {self.message}"


def lint(kernel, *args):
    """Findings about `kernel`, compiled for arguments like `args`, in the order of the source.

    float64-promotion   float32 (or float16, bfloat16) meets a Python constant, an integer or a
                        float64, and the machine code computes in float64: on most GPUs 32 to 64
                        times slower. float64 that comes from a float64 array is meant, and not told
    integer-width       integers of 32 bits or fewer from arrays, arguments or conversions that
                        numba widens to 64 bits where NumPy wraps; for your information
    spill               values that did not fit in registers (not looked for in kernels that link
                        further code, as some functions of float16 do)

    Parameters
    ----------
    kernel : a simulated kernel, a real numba CUDADispatcher, or a plain function
        With all it refers to: device functions, constants, intrinsics.
    args : as for a launch; arrays are only looked at for their type

    Raises
    ------
    LintUnavailable where numba-cuda is not installed (macOS), LintError with numba's message for
    a kernel that it cannot compile.
    """
    request = _Shipment().request(as_kernel(kernel), args)
    kind, answer = _process.ask(request)
    if kind == "error":
        error = LintError(answer)
        error.refused = not answer.startswith("Traceback ")
        raise error
    return sorted((Finding(kind, line, _source(filename, line), message, filename)
                   for kind, filename, line, message in answer),
                  key=lambda finding: (finding.filename, finding.line))


def prepare():
    """Start the compiling process in the background, so that the first `lint` needn't wait."""
    if _process.lock.acquire(blocking=False):  # else it is at work already
        try:
            _process.start()
        finally:
            _process.lock.release()


def _source(filename, line):
    import linecache

    return linecache.getline(filename, line).strip()


# -- describing a kernel to another process ------------------------------------------------------


class _Shipment:
    """A kernel with all it refers to, as data."""

    def __init__(self):
        self.functions, self.numbers = [], {}

    def request(self, kernel, args):
        """What `worker.lint` takes."""
        self.function(kernel.py_func, kernel, "kernel")
        return {"functions": self.functions, "arguments": [_argument(value) for value in args],
                "path": [os.path.abspath(folder) for folder in sys.path]}

    def function(self, function, wrapper, kind):
        """The number under which a function is sent."""
        if function in self.numbers:
            return self.numbers[function]
        number = self.numbers[function] = len(self.functions)
        options = getattr(wrapper, "targetoptions", {})
        spec = {"code": marshal.dumps(function.__code__), "name": function.__name__,
                "qualname": function.__qualname__, "module": function.__module__ or "__main__",
                "kind": kind, "globals": {}, "closure": [],
                "options": {name: options[name] for name in _OPTIONS if options.get(name)}}
        self.functions.append(spec)
        spec["defaults"] = [self.value(value) for value in function.__defaults__ or ()]
        for name in sorted(global_names(function.__code__)):
            if name in function.__globals__:
                spec["globals"][name] = self.value(function.__globals__[name])
        spec["closure"] = [self.value(cell.cell_contents) for cell in function.__closure__ or ()]
        return number

    def value(self, value):
        """A description of what a name stands for; see `worker.Builder.value`."""
        if isinstance(value, types.ModuleType):
            return "module", next((name for name in _NUMBAS if submodule(name) is value),
                                  value.__name__)
        if place := _intrinsic_place(value):
            return "attribute", *place
        if place := _numba_place(value):
            return "attribute", *place
        function = getattr(value, "py_func", None)
        if isinstance(function, types.FunctionType):
            return "function", self.function(function, value, "device")
        if isinstance(value, types.FunctionType) and not resolve.is_foreign(value):
            kind = "device" if resolve.is_jitable(value) else None
            return "function", self.function(value, value, kind)
        try:
            return "pickle", pickle.dumps(value)
        except Exception as error:
            raise LintError(f"{value!r}, which the kernel uses, cannot be sent to the process "
                            f"that compiles: {error}") from None


def global_names(code):
    """The names that a function looks up outside itself."""
    names = {instruction.argval for instruction in dis.get_instructions(code)
             if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= global_names(constant)
    return names


def _intrinsic_place(value):
    """(module, name) of an intrinsic, or of what stands for it in the simulator; else None."""
    twin = resolve._twins.get(id(value))
    definition = getattr(value, "_defn", None)
    if twin is None and not isinstance(definition, types.FunctionType):
        return None
    for function in (twin and twin[1], definition):
        module = sys.modules.get(getattr(function, "__module__", None))
        for name, found in vars(module).items() if module else ():
            if found is value and name != "__builtins__":
                return module.__name__, name
    return None


def _numba_place(value):
    """(module, name) of what stands for a part of numba.cuda, or is one; None for other values."""
    function = getattr(value, "py_func", value)
    module, name = getattr(function, "__module__", None) or "", getattr(function, "__name__", "")
    if module.startswith("numba.") and hasattr(sys.modules.get(module), name):
        return module, name
    ours = module if isinstance(value, (Kernel, types.FunctionType)) else type(value).__module__
    if not ours.startswith(PACKAGE):
        return None
    for name in _NUMBAS:
        for attribute, found in vars(submodule(name)).items():
            if found is value:
                return name, attribute
    if isinstance(value, LaneId):
        return "numba.cuda", "laneid"
    name = getattr(value, "name", None) or getattr(value, "__name__", "")
    return "numba.cuda", name.removeprefix("cuda.")


def _argument(value):
    """A description of an argument's type; see `worker.argument_type`."""
    if isinstance(value, tuple):
        return "tuple", [_argument(part) for part in value]
    if value is None:
        return "scalar", "none"
    if isinstance(value, np.generic):
        return "scalar", "boolean" if value.dtype.kind == "b" else value.dtype.name
    for kind, name in ((bool, "boolean"), (int, "int64"), (float, "float64"),
                       (complex, "complex128")):
        if isinstance(value, kind):
            return "scalar", name
    shape, strides, dtype = value.shape, None, value.dtype
    if hasattr(value, "detach"):  # a torch tensor, on whatever device
        size = value.element_size()
        strides, dtype = [size * stride for stride in value.stride()], str(dtype).split(".")[1]
        read_only = False
    else:
        strides, size = value.strides, dtype.itemsize
        read_only = isinstance(value, np.ndarray) and not value.flags.writeable
        dtype = dtype if dtype.names or dtype.subdtype else dtype.name
    dtype = "boolean" if dtype == "bool" else dtype
    return "array", dtype, len(shape), _layout(shape, strides, size), read_only


def _layout(shape, strides, size):
    """ "C", "F" or "A": how numba types an array's layout."""
    for name, axes in (("C", range(len(shape) - 1, -1, -1)), ("F", range(len(shape)))):
        expected = size
        for axis in axes:
            if shape[axis] != 1 and strides[axis] != expected:
                break
            expected *= shape[axis]
        else:
            return name
    return "A"


# -- the other process ---------------------------------------------------------------------------


class _Process:
    """The compiling process: started once, asked one thing at a time."""

    def __init__(self):
        self.lock = threading.Lock()
        self.running = self.owner = None

    def start(self):
        """Start it unless it runs. Returns at once; it gets ready by itself."""
        if importlib.util.find_spec("numba_cuda") is None:
            raise LintUnavailable("lint types and compiles kernels with numba-cuda, which is not "
                                  "installed here (it cannot be on macOS); nothing was checked")
        if self.owner != os.getpid():  # a fork has inherited the pipes: they are its parent's
            self.running, self.owner = None, os.getpid()
        import subprocess

        if self.running is None or self.running.poll() is not None:
            self.running = subprocess.Popen(
                [sys.executable, "-c", _START, str(_WORKER)], env=os.environ | ENVIRONMENT,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
            atexit.register(self.stop)

    def ask(self, request):
        """The answer to a request; LintError if the process dies over it."""
        data = pickle.dumps(request)
        with self.lock:
            self.start()
            try:
                pipe = self.running
                pipe.stdin.write(struct.pack("<Q", len(data)) + data)
                pipe.stdin.flush()
                head = pipe.stdout.read(8)
                if len(head) == 8:
                    return pickle.loads(pipe.stdout.read(*struct.unpack("<Q", head)))
            except BrokenPipeError:
                pass
            except BaseException:
                self.stop()  # half an answer would be taken for the next one
                raise
            self.stop()
        raise LintError("the process that compiles kernels has ended; the next lint starts it anew")

    def stop(self):
        """End it, if it runs."""
        running, self.running = self.running, None
        if running is not None:
            atexit.unregister(self.stop)
            running.kill()
            for stream in (running.stdin, running.stdout):
                with contextlib.suppress(OSError):
                    stream.close()
            running.wait()


_process = _Process()
