"""A kernel with all the device functions it calls, rebuilt to run in the simulator."""

import builtins
import functools
import os
import threading
import types
import warnings

from course_lib.simulator import errors
from course_lib.simulator.cuda_api.mathlib import math as gpu_math
from course_lib.simulator.cuda_api.primitives import (
    Index,
    LaneId,
    Namespace,
    Primitive,
    current_thread,
)
from course_lib.simulator.engine import guards, scheduler
from course_lib.simulator.engine.checked import checked
from course_lib.simulator.rewrite.emitter import (
    Emitter,
    NeedsGreenlets,
    bound_names,
    emit,
    static_value,
)
from course_lib.simulator.rewrite.inference import Kinds
from course_lib.simulator.rewrite.kinds import kind_of_class
from course_lib.simulator.rewrite.resolve import (
    UNRESOLVED,
    Device,
    Scope,
    is_foreign_module,
    is_twin,
    mapped,
    twin_result,
)
from course_lib.simulator.rewrite.source import function_tree, returned_values, returns_value


class Unit:
    """One function of a program, for arguments of some kinds, and its rebuilt copy.

    A twin of an intrinsic, and what it calls, is Python: its arithmetic stays as written.
    """

    def __init__(self, function, number, kinds=(), in_twin=False):
        self.function, self.number, self.kinds, self.in_twin = function, number, kinds, in_twin
        self.name = function.__qualname__
        self.filename = function.__code__.co_filename
        self.safe_name = function.__name__ if function.__name__.isidentifier() else "anonymous"
        self.tree = function_tree(function)
        self.scope = Scope(function)
        self.namespace = {"__builtins__": builtins, "__name__": function.__module__,
                          "__unit__": self}
        self.calls = {}
        self.callable = None
        self.sites = {}
        self.blocking = False
        self.needs_thread = False
        self.defaults = function.__defaults__ and tuple(map(_mapped_value, function.__defaults__))
        self.kwdefaults = function.__kwdefaults__ and {
            name: _mapped_value(value) for name, value in function.__kwdefaults__.items()}

    def parameter_kinds(self):
        """name -> kind (see `kinds`) of the parameters that the unit is made for."""
        return _named(self.tree, self.kinds)

    def site_at(self, code, lasti):
        """The `Site` of the instruction at byte `lasti` of `code`, or None."""
        positions = list(code.co_positions())
        line, end_line, col, end_col = positions[lasti // 2]
        return self.sites.get((line, end_line, col, end_col))


def _named(tree, kinds):
    """{parameter: kind} of a function's first parameters."""
    arguments = tree.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return dict(zip(names, kinds, strict=False))


def _mapped_value(value):
    value = mapped(value)
    return value.function if isinstance(value, Device) else value


class Program:
    """A kernel and the device functions it can reach, compiled for one flavour.

    Attributes
    ----------
    plain : bool
        True if no thread ever waits: `function(thread, *args)` runs one thread to its end.
    flavour, interleaved
        See `build_program`.
    greenlets : bool
        True if threads are greenlets: some function has no source, or is only known when called.
    """

    def __init__(self, function, greenlets=False, flavour=None, kinds=(), interleaved=False):
        self.root, self.kinds = function, kinds
        self.greenlets = greenlets
        self.flavour, self.interleaved = flavour, interleaved
        self.branches = flavour in ("branches", "traced")
        #: The `observe.ObservedSite`s by number; 0 stands for none.
        self.observed_sites, self.observed_numbers = [None], {}
        self.units = {}
        #: unit -> the functions that were known to wait when its calls of them were written
        self.emitted = {}
        self.results = {}  # (device function, kinds of its arguments) -> kind
        # Two launches from two Python threads may meet a new function at the same time.
        self.lock = threading.RLock()
        self.build()

    def build(self):
        """Rewrite until it is settled which functions wait."""
        root = self.unit(self.root, self.kinds)
        if root.tree is not None and returns_value(root.tree):
            raise TypeError(f"{root.name}: a kernel returns a value, which a GPU cannot hand "
                            f"back. Write it into an array")
        self.settle()
        if root.tree is None and root.needs_thread and not self.greenlets:
            raise NeedsGreenlets(f"{root.name} has no source")
        self.entry = root
        self.plain = not self.greenlets and not root.blocking
        if root.tree is None:
            self.function = lambda thread, *args: root.callable(*args)
        else:
            self.function = root.callable
        if self.greenlets:
            self.start = scheduler.start_greenlets(self.function)
        elif self.plain:
            self.start = scheduler.start_calls(self.function)
        else:
            self.start = scheduler.start_generators(self.function)

    def settle(self):
        """Emit again who calls itself by way of others, when one of them turns out to wait."""
        while True:
            pending = [unit for unit in self.units.values() if unit not in self.emitted
                       or unit.tree is not None and self.emitted[unit] != self._waiting(unit)]
            if not pending:
                break
            for unit in pending:
                self.compile(unit)
        for unit in self.units.values():
            for name, callee in unit.calls.items():
                unit.namespace[name] = callee.callable

    @staticmethod
    def _waiting(unit):
        return frozenset(callee for callee in unit.calls.values() if callee.blocking)

    def compile(self, unit):
        """Make the rebuilt copy of one function."""
        if unit.tree is None:
            self.emitted[unit] = frozenset()
            self.rebuild(unit)
        else:
            self.emitted[unit] = emit(unit, self, self.emitter())

    def emitter(self):
        """The class that rewrites functions for this flavour."""
        if self.flavour is None:
            return Emitter
        if self.flavour == "traced":
            from course_lib.simulator.rewrite.tracing_rewrite import TracingEmitter

            return TracingEmitter
        from course_lib.simulator.rewrite.observed_rewrite import ObservedEmitter

        return ObservedEmitter

    def unit(self, function, kinds=(), in_twin=False):
        """The unit of `function` for arguments of these kinds, emitted on first use: before its
        caller, which must know whether it waits."""
        in_twin = in_twin or is_twin(function)
        key = function, () if in_twin else kinds, in_twin
        unit = self.units.get(key)
        if unit is None:
            unit = self.units[key] = Unit(function, len(self.units), *key[1:])
            if unit.tree is None:
                if self.flavour is not None:
                    raise errors.SourceMissing(without_source(unit))
                if os.path.exists(unit.filename):
                    warnings.warn(f"{unit.name} runs as it was made: {unit.filename} has changed "
                                  f"since. Import it again, or restart Python", stacklevel=2)
                self.rebuild(unit)
            else:
                self.compile(unit)
        return unit

    def result_kind(self, function, kinds):
        """The kind of what a device function returns for arguments of these kinds, or None."""
        if is_twin(function):
            return kind_of_class(twin_result(function))
        key = function, kinds
        if key not in self.results:
            self.results[key] = None  # while it is looked for: the function may call itself
            tree = function_tree(function)
            values = None if tree is None else returned_values(tree)
            if values is not None:
                scope, bound = Scope(function), bound_names(tree)
                found = Kinds(tree, lambda node: static_value(node, scope, bound),
                              _named(tree, kinds), self.result_kind)
                self.results[key] = found.of_results(values)
        return self.results[key]

    def rebuild(self, unit):
        """A function without source keeps its code; its globals and closure are mapped."""
        function, scope = unit.function, unit.scope
        code = function.__code__
        for name in _global_names(code):
            value = scope.raw(name)
            if value is not UNRESOLVED:
                unit.namespace[name] = self.value_for_sourceless(mapped(value), unit, code)
        cells = []
        for name in code.co_freevars:
            value = scope.raw(name)
            cells.append(types.CellType() if value is UNRESOLVED else types.CellType(
                self.value_for_sourceless(mapped(value), unit, code)))
        copy = types.FunctionType(code, unit.namespace, function.__name__, unit.defaults,
                                  tuple(cells))
        copy.__kwdefaults__ = unit.kwdefaults
        unit.callable = _checking(copy)

    def value_for_sourceless(self, value, unit, code):
        """What a function without source finds under a global name."""
        if isinstance(value, Device):
            callee = self.unit(value.function)
            if callee.tree is None:
                unit.needs_thread = unit.needs_thread or callee.needs_thread
                # By name and not by value: it may be this very function, not yet rebuilt.
                return lambda *args, **kwargs: callee.callable(*args, **kwargs)
            unit.needs_thread = True
            return self.callable_value(value.function)
        if value is max or value is min:
            return guards.gpu_extremum(value)
        if isinstance(value, types.ModuleType):
            # What a module's attributes are cannot be told without source; only NumPy's and
            # Python's own need no thread for certain.
            unit.needs_thread = unit.needs_thread or not is_foreign_module(value.__name__)
        elif isinstance(value, (Namespace, Index, LaneId)):
            unit.needs_thread = unit.needs_thread or value is not gpu_math
        elif isinstance(value, Primitive) and value.kind != "pure":
            unit.needs_thread = True
        return value

    def callable_value(self, function):
        """A device function as a value: it finds its thread when it is called."""
        @functools.wraps(function)
        def call(*args, **kwargs):
            return self.invoke(current_thread(function.__qualname__), function, args, kwargs)

        call.device_function = function
        return call

    def call_dynamic(self, thread, target, *args, **kwargs):
        """Call what a name held at run time. Only in greenlets."""
        if isinstance(target, Primitive) or "__unit__" in getattr(target, "__globals__", ()):
            return target(*args, **kwargs)  # the second: a function inside one that is rebuilt
        target = getattr(target, "device_function", target)
        value = mapped(target)
        if isinstance(value, Device):
            return self.invoke(thread, value.function, args, kwargs)
        return value(*args, **kwargs)

    def invoke(self, thread, function, args, kwargs):
        """Run a device function met while the kernel runs."""
        unit = self.units.get((function, (), is_twin(function)))
        if unit is None or unit.callable is None:
            with self.lock:
                unit = self.unit(function)
                self.settle()
        if unit.tree is None:
            return unit.callable(*args, **kwargs)
        return unit.callable(thread, *args, **kwargs)

    def changes(self):
        """(name, value it had, value it has) of each global and closure variable that changed."""
        return [change for unit in self.units.values() for change in unit.scope.changes()]

    def is_stale(self):
        """True if a global that some function uses has changed since the program was built."""
        return any(unit.scope.is_stale() for unit in self.units.values())


def without_source(unit):
    """Why a function cannot be watched, and what to do about it."""
    if os.path.exists(unit.filename):
        return (f"{unit.name} cannot be watched: {unit.filename} has changed since the function "
                f"was made from it, so its accesses cannot be told. Import it again, or restart "
                f"Python")
    return (f"{unit.name} cannot be watched: Python keeps no source of it (it was made by exec, or "
            f"typed into a plain prompt or standard input), so its accesses cannot be told. Put "
            f"{unit.name} into a file or a notebook cell")


def _global_names(code):
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _global_names(constant)
    return names


def _checking(function):
    @functools.wraps(function)
    def call(*args, **kwargs):
        return function(*map(checked, args), **{k: checked(v) for k, v in kwargs.items()})

    return call


def build_program(function, flavour=None, kinds=(), interleaved=False):
    """The program of kernel `function`: generators where possible, else greenlets.

    `kinds` are those of the arguments (see `kinds`). `flavour` is None, "observed", "branches" to
    have branches observed too, or "traced" to have loops and calls marked as well. If
    `interleaved`, threads hand over before each store and atomic.
    """
    try:
        return Program(function, False, flavour, kinds, interleaved)
    except NeedsGreenlets:
        return Program(function, True, flavour, kinds, interleaved)
