"""A hash of everything a kernel's source reaches.

A kernel changes when its own text changes, or that of a device function, intrinsic or constant
it uses, however far down. `fingerprint` walks them all, and says so where it meets what it can't
follow: a digest that leaves out something would call a changed kernel the same. What changes
nothing that runs does not count: comments, docstrings, annotations, the layout of the text, and
the module that a name is imported from.
"""

import ast
import dis
import functools
import hashlib
import inspect
import sys
import textwrap
import types
import weakref

from course_lib.runtime.intrinsics import twins
from course_lib.simulator.rewrite import source

# Their versions are part of the cache key, so their sources need not be.
_LIBRARIES = {"numba", "numba_cuda", "llvmlite", "numpy", "math", "builtins", "cuda", "ml_dtypes"}
# Their functions are followed, but not what their classes and tables hold.
_OUTSIDE = _LIBRARIES | sys.stdlib_module_names | {"torch"}
_WITH_DOCSTRING = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
#: Fields of a syntax tree that change nothing that runs, and the prefix u of a text.
_UNREAD = {"annotation", "returns", "type_comment", "type_ignores", "kind", "ctx"}
_CACHE = type(functools.cache(lambda: None))
_known = {}


def fingerprint(function):
    """Hex digest of the syntax tree of `function` and of all it refers to, transitively.

    Takes a Python function or anything that wraps one: a `@cuda.jit` kernel or device function,
    a simulated kernel, a numba `@intrinsic`. Library modules count by name, constants by value,
    dicts, lists and tuples by what they hold, `functools.partial` and `functools.cache` by what
    they wrap, classes by their body and their methods. The digest is the same on a GPU, in the
    simulator and in all versions of Python. Raises TypeError for what a function reaches and this
    can't follow.
    """
    inner, parts = _unwrap(function), []
    if inner is None:
        raise TypeError(f"{function!r} is no function, and none is found in it")
    _visit(inner, parts, {})
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def of_text(function):
    """Hex digest of the syntax tree of `function` alone, whatever it refers to."""
    return hashlib.sha256(_text(function).encode()).hexdigest()


def _unwrap(thing):
    """The Python function inside a kernel, device function, intrinsic or cache, or None."""
    if isinstance(thing, _CACHE) and not _is_outside(thing.__module__):
        return _unwrap(thing.__wrapped__)
    if isinstance(thing, types.ModuleType):
        return None  # a module may import something to answer
    for name in ("py_func", "_defn"):
        inner = getattr(thing, name, None)
        if isinstance(inner, types.FunctionType):
            return inner
    return thing if isinstance(thing, types.FunctionType) else None


def _visit(function, parts, visited):
    if function in visited:
        parts.append(f"see {visited[function]}")
        return
    visited[function] = len(visited)
    text, names, attributes = _facts(function)
    parts.append(text)
    for name in sorted(names & function.__globals__.keys()):
        _note(name, function.__globals__[name], attributes, parts, visited)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    for name, cell in cells:
        _note(name, cell.cell_contents, attributes, parts, visited)


def _note(name, value, attributes, parts, visited):
    inner = _unwrap(value)
    module = getattr(inner, "__module__", None) or ""
    twin, files = (None, ()) if inner is None else twins.find(inner)
    if twin is not None:
        # An intrinsic is machine code on a GPU and its twin in the simulator: take both.
        digests = [_file_digest(file) for file in files]
        parts += [f"{name} = intrinsic", *digests, _facts(twin)[0]]
    elif inner is not None and _is_ours(module):
        parts.append(f"{name} = {inner.__qualname__}")
        _visit(inner, parts, visited)
    elif isinstance(value, types.ModuleType):
        if _is_ours(value.__name__):
            outside = _is_outside(value.__name__)
            for attribute in sorted(attributes & vars(value).keys()):
                if outside and isinstance(vars(value)[attribute], (dict, list, set)):
                    continue  # sys.modules, say: what is in it is not of the source
                _note(f"{name}.{attribute}", vars(value)[attribute], attributes, parts, visited)
    elif isinstance(value, tuple) and _holds_functions(value):
        # Its repr tells where in memory the functions are, and nothing of what they do.
        for place, part in enumerate(value):
            label = f"{name}[{place}]"
            if _holds_functions((part,)):
                parts.append(f"{label} = {getattr(_unwrap(part), '__qualname__', 'tuple')}")
                _note(label, part, attributes, parts, visited)
            else:
                parts.append(f"{label} = {part!r}")
    elif isinstance(value, (int, float, complex, str, bytes, tuple, type(None))):
        parts.append(f"{name} = {value!r}")
    elif isinstance(value, (set, frozenset)):
        parts.append(f"{name} = {sorted(map(repr, value))}")
    elif hasattr(value, "dtype") and hasattr(value, "tobytes"):
        parts.append(f"{name} = {hashlib.sha256(value.tobytes()).hexdigest()}")
    elif isinstance(value, (dict, list)):
        parts.append(f"{name} = {type(value).__name__} of {len(value)}")
        for key, part in value.items() if isinstance(value, dict) else enumerate(value):
            _note(f"{name}[{key!r}]", part, attributes, parts, visited)
    elif isinstance(value, functools.partial):
        parts.append(f"{name} = partial")
        _note(f"{name}.func", value.func, attributes, parts, visited)
        _note(f"{name}.args", list(value.args), attributes, parts, visited)
        _note(f"{name}.keywords", value.keywords, attributes, parts, visited)
    elif isinstance(value, type) and not _is_outside(value.__module__):
        _visit_class(name, value, parts, visited)
    elif not _is_outside(getattr(value, "__module__", None) or type(value).__module__):
        raise TypeError(
            f"a fingerprint can't follow {name}, a {type(value).__module__}."
            f"{type(value).__qualname__}; it follows functions, classes, numbers, text, arrays, "
            "and what dicts, lists, tuples, caches and partials hold of them"
        )


def _visit_class(name, kind, parts, visited):
    parts.append(f"{name} = class {kind.__qualname__}")
    if kind in visited:
        parts.append(f"see {visited[kind]}")
        return
    visited[kind] = len(visited)
    for base in kind.__mro__[1:]:
        if not _is_outside(base.__module__):
            _visit_class(base.__qualname__, base, parts, visited)
    for label, member in vars(kind).items():
        member = getattr(member, "fget", None) or getattr(member, "__func__", member)
        inner = _unwrap(member)
        if inner is None:
            continue
        if inner.__module__ == kind.__module__:  # else made by a decorator or a base
            parts.append(f"{label} = {inner.__qualname__}")
            _visit(inner, parts, visited)
    try:
        parts.append(_syntax(inspect.getsource(kind)))
    except (OSError, TypeError):
        parts.append(repr(getattr(kind, "__annotations__", {})))


def _holds_functions(values):
    return any(
        _holds_functions(value) if isinstance(value, tuple) else _unwrap(value) is not None
        for value in values
    )


def _is_ours(module):
    outside = module.partition(".")[0] in _LIBRARIES
    return bool(module) and not outside and not module.startswith("course_lib.simulator")


def _is_outside(module):
    return module.partition(".")[0] in _OUTSIDE or module.startswith("course_lib.simulator")


def _facts(function):
    """(text, names, attributes) of a function, found once: its file may be edited later.

    Functions that a factory makes share their code, and what is found of it.
    """
    key = function if hasattr(function, "__wrapped__") else function.__code__
    if id(key) not in _known:  # equal codes may have other defaults and decorators
        _known[id(key)] = _text(function), *_names(function.__code__)
        weakref.finalize(key, _known.pop, id(key)).atexit = False
    return _known[id(key)]


def _names(code):
    """Global names a code object loads, and attribute names it uses, nested code included."""
    names, attributes = set(), set()
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            names.add(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            attributes.add(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner_names, inner_attributes = _names(constant)
            names |= inner_names
            attributes |= inner_attributes
    return names, attributes


def _text(function):
    if function.__name__ == "<lambda>" and not function.__defaults__:
        tree = source.function_tree(function)
        if tree is not None:
            return _written(tree)
    try:
        return _syntax(inspect.getsource(function))
    except (OSError, TypeError):  # no source: made by exec
        return repr(_bytecode(function.__code__))


@functools.cache
def _file_digest(file):
    return hashlib.sha256(_syntax(file.read_text(encoding="utf-8")).encode()).hexdigest()


def _syntax(text):
    """The syntax tree of a text, as text; the text itself where it is a part of a statement."""
    try:
        return _written(ast.parse(textwrap.dedent(text)))
    except SyntaxError:  # the lines of a lambda with defaults, say
        return text


def _written(node):
    """What a node says of a program's behaviour, the same in all versions of Python."""
    if isinstance(node, ast.AST):
        fields = {name: part for name, part in ast.iter_fields(node) if name not in _UNREAD}
        if isinstance(node, _WITH_DOCSTRING) and ast.get_docstring(node, clean=False) is not None:
            fields["body"] = fields["body"][1:]
        if isinstance(node, ast.ImportFrom):
            del fields["module"], fields["level"]
        # Fields that later versions added are empty or None where a program does not use them.
        fields = {name: part for name, part in fields.items() if part not in (None, [])}
        said = [f"{name}={_written(part)}" for name, part in fields.items()]
        return f"{type(node).__name__}({', '.join(said)})"
    if isinstance(node, list):
        return f"[{', '.join(map(_written, node))}]"
    return repr(node)


def _bytecode(code):
    constants = [
        _bytecode(value) if isinstance(value, types.CodeType) else repr(value)
        for value in code.co_consts
    ]
    return code.co_code, code.co_names, code.co_varnames, constants
