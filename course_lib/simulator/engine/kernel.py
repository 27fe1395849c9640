"""Kernel objects: what `cuda.jit` returns, and how a launch is checked and started."""

import functools
import inspect
import numbers
import threading
import types
import warnings
from dataclasses import replace

from course_lib.simulator import errors
from course_lib.simulator.cuda_api import unwritten
from course_lib.simulator.cuda_api.arrays import kernel_argument
from course_lib.simulator.cuda_api.cluster import check_size
from course_lib.simulator.engine.guards import SHARED_LIMIT
from course_lib.simulator.engine.launching import Launch
from course_lib.simulator.engine.options import check_order, current_options
from course_lib.simulator.engine.report import trim
from course_lib.simulator.engine.scheduler import resident_blocks
from course_lib.simulator.engine.signatures import (
    argument_types,
    check_options,
    chosen,
    fingerprint,
    launch_bound,
    stand_in,
    type_of,
)
from course_lib.simulator.engine.tracebacks import shows_user_lines
from course_lib.simulator.observe.observer import current_observers
from course_lib.simulator.places import FOLDER
from course_lib.simulator.rewrite.kinds import kind_of_value
from course_lib.simulator.rewrite.program import build_program

MAX_THREADS = 1024
BLOCK_LIMITS = (1024, 1024, 64)
GRID_LIMITS = (2**31 - 1, 65535, 65535)

_build_lock = threading.RLock()
_user_facing = shows_user_lines(FOLDER)


def dimensions(value, what, limits):
    """An (x, y, z) launch dimension, or LaunchError naming what was given and the limit."""
    parts = list(value) if isinstance(value, (tuple, list)) else [value]
    if not 1 <= len(parts) <= 3:
        raise errors.LaunchError(
            f"{what.lower()} must be a sequence of 1, 2 or 3 integers, got {parts!r}")
    for part in parts:
        if not isinstance(part, numbers.Integral) or isinstance(part, bool):
            raise TypeError(f"{what.lower()} must be a sequence of integers, got {parts!r}")
    parts = [int(part) for part in parts] + [1] * (3 - len(parts))
    for axis, part, limit in zip("xyz", parts, limits, strict=True):
        if part < 1:
            raise errors.LaunchError(f"{what}.{axis} is {part}: a launch needs at least 1")
        if part > limit:
            raise errors.LaunchError(f"{what}.{axis} is {part:,}: the limit is {limit:,}")
    return tuple(parts)


def launch_dimensions(grid, block):
    """Both dimensions of a launch, checked against a GPU's limits."""
    grid = dimensions(grid, "gridDim", GRID_LIMITS)
    block = dimensions(block, "blockDim", BLOCK_LIMITS)
    count = block[0] * block[1] * block[2]
    if count > MAX_THREADS:
        raise errors.LaunchError(f"a block of {block} has {count:,} threads: the limit is "
                                 f"{MAX_THREADS:,}")
    return grid, block


class Kernel:
    """A function decorated with `cuda.jit`.

    Launch it as ``kernel[grid, block](*args)`` or ``kernel[grid, block, stream, shared_bytes]``.
    `py_func` is the undecorated function.
    """

    def __init__(self, function, device=False, signatures=(), options=None):
        self.py_func = function
        self.device = device
        self.signatures = list(signatures)
        self.targetoptions = dict(options or {})
        check_options(self.targetoptions)
        self.extensions = list(self.targetoptions.get("extensions") or ())
        self.launch_bound = launch_bound(self.targetoptions.get("launch_bounds"))
        self._argument_types = [argument_types(each, device) for each in self.signatures]
        self._overloads = {each: _Overload(function) for each in self._argument_types}
        self._launched = {}  # what decides the types of some arguments -> others of those types
        self._programs = {}
        self._told = set()
        functools.update_wrapper(self, function)

    @_user_facing
    def __getitem__(self, configuration):
        if not isinstance(configuration, tuple) or not 2 <= len(configuration) <= 5:
            raise errors.LaunchError(
                "a launch needs kernel[grid, block], kernel[grid, block, stream] or "
                f"kernel[grid, block, stream, shared_bytes]; got {configuration!r}")
        if self.device:
            raise RuntimeError(f"{self.__name__} is a device function: kernels call it, the host "
                               "cannot launch it")
        return Configured(self, *configuration[:4])

    def configure(self, griddim, blockdim, stream=0, sharedmem=0, cluster=0):
        """What `kernel[griddim, blockdim, stream, sharedmem]` gives, in clusters if asked for."""
        configured = self[griddim, blockdim, stream, sharedmem]
        configured.cluster = check_size(cluster or 1, configured.griddim)
        return configured

    @_user_facing
    def __call__(self, *args, **kwargs):
        from course_lib.simulator.cuda_api.primitives import current_thread

        if self.device:
            thread = current_thread(f"device function {self.__name__}")
            return thread.b.launch.program.invoke(thread, self.py_func, args, kwargs)
        raise errors.LaunchError(
            f"{self.__name__}'s launch configuration was not specified: write "
            f"{self.__name__}[grid, block](...)")

    def forall(self, ntasks, tpb=0, stream=0, sharedmem=0):
        """A launcher with one thread for each of `ntasks` tasks, in blocks of `tpb`."""
        if ntasks < 0:
            raise ValueError(f"Can't create ForAll with negative task count: {ntasks}")
        return ForAll(self, ntasks, tpb, stream, sharedmem)

    @property
    def overloads(self):
        """The versions that a compiler would have made: types of the arguments -> version.

        Types are numba's, which is imported when somebody asks.
        """
        for values in self._launched.values():
            self._overloads.setdefault(tuple(map(type_of, values)), _Overload(self.py_func))
        self._launched.clear()
        return self._overloads

    def program(self, flavour=None, kinds=(), interleaved=False):
        """The rebuilt kernel for arguments of these kinds; built again if a global it uses has
        changed.
        """
        key = flavour, kinds, interleaved
        program = self._programs.get(key)
        if program is None or program.is_stale():
            if program is not None:
                self._warn_of_changes(program)
            with _build_lock:
                program = self._programs[key] = build_program(self.py_func, *key)
        return program

    def _warn_of_changes(self, program):
        """Say once of each global that a GPU keeps the value it had at the first launch."""
        for name, old, new in program.changes():
            if name not in self._told:
                self._told.add(name)
                warnings.warn(
                    f"{self.__name__} uses {name}, which was {shown(old)} at its first launch and "
                    f"is {shown(new)} now. A GPU would keep the old value, as it is compiled in; "
                    f"the simulator takes the new one. Decorate the kernel again, or pass the "
                    f"value as an argument", stacklevel=5)

    def _typed(self, values, name):
        """The arguments as a compiled version takes them; `overloads` will have the version."""
        if self._argument_types:
            return chosen(self._argument_types, values, name)[1]
        key = tuple(map(fingerprint, values))
        if key not in self._launched:
            self._launched[key] = tuple(map(stand_in, values))
        return values

    def launch(self, grid, block, args, shared_bytes=0, options=None, cluster=1):
        """Run the kernel on a grid. See `Configured`."""
        grid, block = launch_dimensions(grid, block)
        cluster = check_size(cluster, grid)
        if not isinstance(shared_bytes, numbers.Integral) or shared_bytes < 0:
            raise errors.LaunchError(f"shared_bytes must be >= 0; got {shared_bytes!r}")
        if shared_bytes > SHARED_LIMIT:
            raise errors.LaunchError(f"{shared_bytes:,} bytes of dynamic shared memory: the limit "
                                     f"is {SHARED_LIMIT:,}")
        name = getattr(self.py_func, "__name__", "kernel")
        threads = block[0] * block[1] * block[2]
        if self.launch_bound is not None and threads > self.launch_bound:
            raise errors.LaunchError(f"a block of {block} has {threads:,} threads: launch_bounds "
                                     f"of {name} allows {self.launch_bound:,}")
        check_arguments(self.py_func, args, name)
        args = (*args, *_defaults_after(self.py_func, len(args)))
        afterwards = []
        for extension in self.extensions:
            args = [extension.prepare_args(None, value, stream=0, retr=afterwards)[1]
                    for value in args]
        values = [kernel_argument(value, position, name)
                  for position, value in enumerate(args, start=1)]
        values = self._typed(values, name)
        launch = self.prepared(grid, block, values, int(shared_bytes),
                               options or current_options(), name, cluster)
        try:
            launch.run()
        except Exception as error:
            failure = trim(error)
        else:
            for write_back in afterwards:
                write_back()
            return
        raise failure

    def prepared(self, grid, block, values, shared_bytes, options, name, cluster):
        """The Launch: an observed one inside `sanitize()` and `trace()`, and if interleaved."""
        observers = tuple(observer for observer in current_observers()
                          if observer.wants_launch(self, grid, block, values))
        interleaved = options.order == "interleaved"
        kinds = tuple(map(kind_of_value, values))
        if not observers and not interleaved:
            unwritten.forget(values)
            return Launch(self.program(None, kinds), grid, block, values, shared_bytes, options,
                          name, cluster)
        from course_lib.simulator.observe.observed_engine import ObservedLaunch

        branches = any(observer.wants_branches for observer in observers)
        flavour = "traced" if any(observer.wants_loops for observer in observers) else (
            "branches" if branches else "observed")
        program = self.program(flavour, kinds, interleaved)
        return ObservedLaunch(program, grid, block, values, shared_bytes, options, name,
                              cluster, observers)

    # What numba's dispatcher offers beyond launching. Nothing is compiled here, so there is
    # nothing to specialise or to disable.

    def specialize(self, *args):
        """This kernel: the simulator has one version for all types."""
        return self

    def compile(self, signature):
        """Check that the kernel can be rebuilt; the version is noted in `overloads`."""
        self.program()
        return self.overloads.setdefault(argument_types(signature), _Overload(self.py_func))

    def compile_device(self, args, return_type=None):
        """Check that the function can be rebuilt."""
        self.program()

    def disable_compile(self, value=True):
        """Does nothing: the simulator has one version for all types."""

    def __reduce__(self):
        return Kernel, (self.py_func, self.device, self.signatures, self.targetoptions)

    def __repr__(self):
        kind = "device function" if self.device else "kernel"
        return f"<simulated {kind} {getattr(self, '__qualname__', '')}>"


def _nothing_compiled(name):
    def refuse(self, *args, **kwargs):
        raise NotImplementedError(
            f"{name}: the simulator compiles nothing. Compile the kernel with the real numba.cuda "
            f"to look at its code")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


for _name in ("inspect_asm", "inspect_llvm", "inspect_llvm_cfg", "inspect_lto_ptx", "inspect_sass",
              "inspect_sass_cfg", "inspect_types", "get_regs_per_thread",
              "get_const_mem_size", "get_shared_mem_per_block", "get_max_threads_per_block",
              "get_local_mem_per_thread"):
    setattr(Kernel, _name, _nothing_compiled(_name))


class _Overload:
    def __init__(self, function):
        #: Whether the kernel itself asks for its grid; what device functions do is not looked at.
        code = getattr(function, "__code__", None)
        self.cooperative = code is not None and "this_grid" in code.co_names

    def max_cooperative_grid_blocks(self, blockdim, dynsmemsize=0):
        """Blocks that fit on the simulated GPU at once, for a grid barrier to work."""
        _, block = launch_dimensions(1, blockdim)
        return resident_blocks(block)


class Configured:
    """A kernel with its launch configuration: call it with the kernel's arguments."""

    def __init__(self, kernel, grid, block, stream=0, shared_bytes=0):
        self.kernel = kernel
        self.griddim, self.blockdim = launch_dimensions(grid, block)
        self.stream, self.sharedmem, self.cluster = stream, shared_bytes, 1

    @_user_facing
    def __call__(self, *args):
        self.kernel.launch(self.griddim, self.blockdim, args, self.sharedmem,
                           cluster=self.cluster)


class ForAll:
    """`kernel.forall(n)`: call it with the kernel's arguments; zero tasks launch nothing."""

    def __init__(self, kernel, ntasks, tpb, stream, sharedmem):
        self.kernel, self.ntasks, self.tpb = kernel, ntasks, tpb or 256
        self.stream, self.sharedmem = stream, sharedmem

    @_user_facing
    def __call__(self, *args):
        if self.ntasks:
            grid = -(-self.ntasks // self.tpb)
            self.kernel[grid, self.tpb, self.stream, self.sharedmem](*args)


def shown(value):
    """A value in a warning: a function or a large array is not shown in full."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _defaults_after(function, n_given):
    """The default values of the parameters after the first `n_given`."""
    missing = function.__code__.co_argcount - n_given
    return function.__defaults__[-missing:] if missing > 0 else ()


def check_arguments(function, args, name):
    """Raise TypeError if a kernel does not take so many arguments."""
    code = function.__code__
    most = code.co_argcount
    least = most - len(function.__defaults__ or ())
    if code.co_flags & inspect.CO_VARARGS:
        most = max(most, len(args))
    if not least <= len(args) <= most:
        wanted = str(most) if least == most else f"{least} to {most}"
        given = f"{len(args)} {'was' if len(args) == 1 else 'were'} given"
        raise TypeError(f"{name} takes {wanted} arguments; {given}")


def jit(func_or_sig=None, device=False, **options):
    """`numba.cuda.jit` for the simulator.

    Takes the same arguments: a function, a signature, a list of signatures, or keywords alone.
    Of the compiler's options `launch_bounds` alone does something: a larger block is refused.

    Raises
    ------
    NotImplementedError for `link=` with files: compiled code cannot run here. TypeError for an
    option that there is not, and for a kernel's signature that returns something.
    """
    check_options(options)
    if options.get("link"):
        raise NotImplementedError("the simulator cannot link PTX, CUDA C++ or object files")
    if isinstance(func_or_sig, types.FunctionType):
        return Kernel(func_or_sig, device, options=options)
    if isinstance(func_or_sig, Kernel):
        return func_or_sig
    if hasattr(func_or_sig, "py_func"):
        return Kernel(func_or_sig.py_func, device, options=options)
    signatures = [] if func_or_sig is None else (
        func_or_sig if isinstance(func_or_sig, list) else [func_or_sig])

    def decorate(function):
        if not isinstance(function, types.FunctionType):
            function = getattr(function, "py_func", function)
        return Kernel(function, device, signatures, options)

    return decorate


@_user_facing
def run(kernel, grid, block, *args, shared=0, order=None, cluster=1):
    """Run any kernel object in the simulator, on arrays in place.

    Parameters
    ----------
    kernel : a simulated kernel, a real numba CUDADispatcher, or a plain Python function
        Its own globals are never changed: a rebuilt copy runs.
    grid, block : int or tuple of int
    args : NumPy arrays, torch CPU tensors, device arrays of the simulator, numbers, tuples
    shared : int
        Bytes of dynamic shared memory.
    order : one of `options`' orders, or None
        Overrides `options` for this launch.
    cluster : int
        How many consecutive blocks in x make a cluster: 1 to 8, a divisor of the grid's x.

    Raises
    ------
    LaunchError for a launch that a GPU would refuse, OutOfBounds, Deadlock, or whatever the
    kernel raises.
    """
    settings = current_options()
    if order is not None:
        check_order(order)
        settings = replace(settings, order=order)
    as_kernel(kernel).launch(grid, block, args, shared, settings, cluster)


_wrapped = {}


def as_kernel(kernel):
    """The `Kernel` for any kernel object."""
    if isinstance(kernel, Kernel):
        return kernel
    function = getattr(kernel, "py_func", kernel)
    if not isinstance(function, types.FunctionType):
        raise TypeError(f"{kernel!r} is no kernel: it has no Python function")
    # Functions are kept, so that a rebuilt kernel is built once; a few hundred at most.
    found = _wrapped.get(function)
    if found is None:
        if len(_wrapped) > 500:
            _wrapped.clear()
        found = _wrapped[function] = Kernel(function)
    return found
