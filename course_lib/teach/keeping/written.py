"""A learner's own solution as text that another lesson, in another process, builds again.

`written_out` makes a small Python file of a kernel or function: imports, constants, and the source
of everything of the notebook's that it reaches. `rebuilt` makes the object of it again. Reading the
text runs nothing; only `rebuilt` does, when a lesson asks for the object by `use`.
"""

from __future__ import annotations

import ast
import builtins
import dis
import hashlib
import inspect
import linecache
import math
import re
import sys
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

import course_lib
from course_lib.runtime.compile.fingerprint import fingerprint
from course_lib.simulator.linting.lint import global_names
from course_lib.teach.exercise import Exercise, python_function

#: Elements of the largest array that is written out as a constant.
LARGEST_ARRAY = 4096

#: Where names are looked for that don't say themselves which module they are of.
_PLACES = ("numba", "numpy", "math", "operator", "course_lib")

#: Modules that have another name since solutions were kept that import from them.
_RENAMED = {
    f"course_lib.runtime.{old}": f"course_lib.runtime.{new}"
    for old, new in (
        ("launch", "host.launch"), ("fingerprint", "compile.fingerprint"),
        ("matrix", "intrinsics.matrix"), ("philox", "intrinsics.philox"),
    )
}

_PLAIN = (bool, int, str, bytes, types.NoneType)


class NotKept(Exception):
    """The object can't be written out, or not be built again; the message says why."""


def written_out(obj: Callable) -> str:
    """Return `obj`, a function or kernel, and all that it reaches, as the text of a Python file.

    Raises NotKept, with the reason, for what a file of its own can't hold: variables of a function
    around it, objects that are neither imported nor constants, a function without source.
    """
    page = _Page(python_function(obj).__globals__)
    page.define(obj)
    text = page.text()
    again = _run(text, python_function(obj).__name__)
    for name, each in page.written.items():
        _require_same(name, each, again[name])
    return text


def rebuilt(text: str, name: str) -> Callable:
    """Return what the text calls `name`, built again. This runs the text.

    Its lines are known to tracebacks, the sanitizer and the tracer. Raises NotKept when it can't be
    built.
    """
    for old, new in _RENAMED.items():
        text = re.sub(rf"\b{re.escape(old)}\b", new, text)
    found = _run(text, name).get(name)
    if not inspect.isfunction(python_function(found)):
        raise NotKept(f"its text defines no function called {name}")
    return found


def digest(exercise: Exercise, obj: Callable) -> str:
    """Return a hash of all that `obj` reaches, the course's code too, and of what checks it.

    As long as it is the same, what passed its check would pass again.
    """
    try:
        reached = fingerprint(obj)
    except TypeError:  # it holds something that no hash can follow: its own text will do
        reached = inspect.getsource(python_function(obj))
    module = sys.modules[python_function(exercise.solution).__module__]
    file = getattr(module, "__file__", None)
    exercises = Path(file).read_text(encoding="utf-8") if file else ""
    return hashlib.sha256(f"{reached}\n{exercises}".encode()).hexdigest()


def _run(text: str, name: str) -> dict:
    """Return the namespace that the text leaves."""
    space = {"__name__": f"kept.{name}", "__builtins__": builtins}
    try:
        exec(compile(text, _file(text, name), "exec", dont_inherit=True), space)
    except (Exception, SystemExit) as error:
        raise NotKept(f"{type(error).__name__}: {error}") from None
    return space


def _file(text: str, name: str) -> str:
    """Return the name that the text goes by as a file: the same one for the same text."""
    number, lines = 1, text.splitlines(keepends=True)
    while True:
        file = f"<your {name}>" if number == 1 else f"<your {name}, {number}>"
        found = linecache.cache.get(file)
        if found is None or found[2] == lines:
            # Without a date, it is never looked for on the disk.
            linecache.cache[file] = len(text), None, lines, file
            return file
        number += 1


class _Page:
    """The file while it is written. `space` is the namespace of the notebook."""

    def __init__(self, space: dict):
        self.space = space
        self.imports: dict[str, str] = {}
        self.constants: list[str] = []
        self.definitions: list[str] = []
        self.written: dict[str, Callable] = {}  # the functions, by the names they are defined by
        self.met: set[str] = set()

    def text(self) -> str:
        """Return the whole file."""
        parts = ["\n".join(each) for each in (self.imports.values(), self.constants) if each]
        return "\n\n".join(parts) + "\n" + "".join(self.definitions)

    def define(self, obj: Callable) -> None:
        """Write the source of a function or kernel, after that of all it reaches."""
        function = python_function(obj)
        name = function.__name__
        if name in self.written:
            if self.written[name] is obj:
                return
            raise NotKept(f"two functions that it reaches are called {name}")
        self.met.add(name)
        self.written[name] = obj
        if function.__closure__:
            inside = ", ".join(f"`{each}`" for each in function.__code__.co_freevars)
            raise NotKept(f"{name} uses {inside}, which the function around it defines")
        source, node = _source(function)
        for each in sorted({*global_names(function.__code__), *_names_of_head(node)}):
            if each in self.space and each not in self.met:
                self.add(each, self.space[each])
        self.definitions.append(f"\n\n{source}")

    def add(self, name: str, value: object) -> None:
        """Write what makes `name` mean `value`."""
        self.met.add(name)
        inner = python_function(value)
        if isinstance(value, types.ModuleType):
            self.imports[name] = _import_of(name, value)
        elif isinstance(inner, types.FunctionType) and inner.__globals__ is self.space:
            self.define(value)
            if inner.__name__ != name:
                self.definitions.append(f"\n\n{name} = {inner.__name__}\n")
        elif (literal := self.literal(value)) is not None:
            self.constants.append(f"{name} = {literal}")
        elif place := _place(name, value):
            module, attribute = place
            alias = "" if attribute == name else f" as {name}"
            self.imports[name] = f"from {module} import {attribute}{alias}"
        else:
            kind = type(value).__name__
            raise NotKept(f"it uses `{name}`, a {kind}, which is neither imported nor a constant")

    def literal(self, value: object) -> str | None:
        """Return an expression that gives `value` exactly; None for what is no constant."""
        if type(value) in _PLAIN:
            return repr(value)
        if type(value) is float:
            return repr(value) if math.isfinite(value) else f'float("{value}")'
        if type(value) is complex:
            return f"complex({self.literal(value.real)}, {self.literal(value.imag)})"
        if isinstance(value, np.generic):
            name = type(value).__name__
            if value.dtype.kind not in "biufc" or getattr(np, name, None) is not type(value):
                return None
            return f"{self.numpy()}.{name}({self.literal(value.item())})"
        if isinstance(value, np.dtype):
            return None if value.fields else f"{self.numpy()}.dtype({value.str!r})"
        if type(value) is np.ndarray:
            if value.dtype.kind not in "biufc" or value.size > LARGEST_ARRAY:
                return None
            numbers, dtype = self.literal(value.ravel().tolist()), value.dtype.str
            return f"{self.numpy()}.array({numbers}, {dtype!r}).reshape({value.shape})"
        return self.collection(value)

    def collection(self, value: object) -> str | None:
        """Return `literal` of a tuple, list, set or dict of constants."""
        if type(value) not in (tuple, list, set, dict):
            return None
        keys = [self.literal(each) for each in value]
        values = [self.literal(each) for each in value.values()] if type(value) is dict else []
        if None in keys or None in values:
            return None
        if type(value) is dict:
            return "{" + ", ".join(f"{k}: {v}" for k, v in zip(keys, values, strict=True)) + "}"
        inside = ", ".join(keys)
        if type(value) is tuple:
            return f"({inside},)" if len(keys) == 1 else f"({inside})"
        if type(value) is list:
            return f"[{inside}]"
        return f"{{{inside}}}" if keys else "set()"

    def numpy(self) -> str:
        """Return the name of NumPy in this file, and see to its import."""
        for name in ("np", "numpy"):
            if self.space.get(name, np) is np:
                self.imports[name] = _import_of(name, np)
                self.met.add(name)
                return name
        raise NotKept("it uses NumPy's numbers, and neither `np` nor `numpy` is NumPy")


def _source(function: types.FunctionType) -> tuple[str, ast.FunctionDef]:
    """Return the text of a function, decorators included, and its syntax tree."""
    name = function.__name__
    if name == "<lambda>":
        raise NotKept("it is a lambda, which has no name: write it with def")
    try:
        text = textwrap.dedent("".join(inspect.getsourcelines(function)[0]))
        (node,) = ast.parse(text).body
    except (OSError, TypeError, SyntaxError, ValueError):
        raise NotKept(f"the source of {name} can't be found") from None
    if not isinstance(node, ast.FunctionDef) or node.name != name:
        raise NotKept(f"the source of {name} can't be found")
    return text.rstrip() + "\n", node


def _names_of_head(node: ast.FunctionDef) -> Iterator[str]:
    """Yield the names in a function's decorators, default values and annotations."""
    for part in (*node.decorator_list, node.args, *filter(None, [node.returns])):
        for each in ast.walk(part):
            if isinstance(each, ast.Name):
                yield each.id


def _import_of(name: str, module: types.ModuleType) -> str:
    """Return the line that imports `module` as `name`."""
    if module is course_lib.cuda:
        return "from course_lib import cuda" + ("" if name == "cuda" else f" as {name}")
    path = module.__name__.removeprefix("numba_cuda.")  # where numba-cuda has what it redirects
    if sys.modules.get(path) is not module:
        raise NotKept(f"it uses the module `{name}`, which can't be imported by its name {path}")
    return f"import {path}" + ("" if name == path else f" as {name}")


def _place(name: str, value: object) -> tuple[str, str] | None:
    """Return the module that a value can be imported from and its name there, None if none is."""
    own = [getattr(each, "__module__", None) for each in (value, python_function(value))]
    names = [name, getattr(value, "__name__", None)]
    for module in own:
        if isinstance(module, str) and module != "__main__" and module in sys.modules:
            for each in names:
                if each and vars(sys.modules[module]).get(each) is value:
                    return module, each
    for module in [course_lib.cuda, *_modules()]:
        for each, found in list(vars(module).items()):
            if found is value and each.isidentifier():
                return module.__name__, each
    return None


def _modules() -> Iterator[types.ModuleType]:
    """Yield the loaded modules in which things may be that don't say where they are from."""
    for path, module in sorted(sys.modules.items()):
        part = path.partition(".")[0]
        if part in _PLACES and isinstance(module, types.ModuleType) and module.__name__ == path:
            if not path.startswith(("course_lib.simulator", "course_lib.teach")):
                yield module


def _require_same(name: str, obj: Callable, again: Callable) -> None:
    """Raise NotKept unless `again`, built from text, is `obj`, which was checked."""
    one, other = python_function(obj), python_function(again)
    options = [getattr(each, "targetoptions", None) for each in (obj, again)]
    if (one is obj) != (other is again) or options[0] != options[1]:
        raise NotKept(f"the decorator of {name} does not stand above it in the source")
    if _bare(one.__code__) != _bare(other.__code__):
        raise NotKept(f"the source of {name} has changed since it was defined: run its cell again")
    defaults = [repr((each.__defaults__, each.__kwdefaults__)) for each in (one, other)]
    if defaults[0] != defaults[1]:
        raise NotKept(f"a default value of {name} is no constant")


def _bare(code: types.CodeType) -> list:
    """Return what a function does, whatever its place, and its file's imports, make of it."""
    steps = []
    for step in dis.get_instructions(code):
        if step.opname in ("EXTENDED_ARG", "NOP", "PUSH_NULL"):
            continue
        # Methods of what the same file imports are called in another way than others.
        name = "LOAD_ATTR" if step.opname == "LOAD_METHOD" else step.opname
        value = None if step.opcode in (*dis.hasjrel, *dis.hasjabs) else step.argval
        steps.append((name, _bare(value) if isinstance(value, types.CodeType) else repr(value)))
    return steps
