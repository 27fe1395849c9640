"""Python that no GPU's compiler takes: refused when a kernel is rebuilt, as a compiler would.

What is told here is what numba-cuda refuses whatever the types are. It refuses more: what it makes
of a kernel in all is told by `lint`, where numba-cuda is installed.
"""

import ast
import math
import sys
import types

import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.engine.report import where
from course_lib.simulator.rewrite.kinds import Cells
from course_lib.simulator.rewrite.resolve import UNRESOLVED, Device, is_jitable
from course_lib.simulator.rewrite.tree import nodes_of, walk

#: node -> what it is called, and what to write instead
_PYTHON = {
    ast.Try: ("try and except", "ask first, with a guard"),
    ast.With: ("a `with` block", "do without"),
    ast.Dict: ("a dict", "use several variables"),
    ast.DictComp: ("a dict", "use several variables"),
    ast.Set: ("a set", "compare one by one"),
    ast.SetComp: ("a set", "compare one by one"),
    ast.ListComp: ("a list comprehension", "write a loop, over cuda.local.array if need be"),
    ast.GeneratorExp: ("a generator expression", "write a loop"),
    ast.Import: ("an import", "import outside the kernel"),
    ast.ImportFrom: ("an import", "import outside the kernel"),
    ast.ClassDef: ("a class", "define it outside"),
    ast.Delete: ("`del`", "leave it out"),
    ast.Yield: ("`yield`", "write into an array"),
}
if hasattr(ast, "TryStar"):
    _PYTHON[ast.TryStar] = _PYTHON[ast.Try]
_MAKERS = ("zeros", "ones", "empty", "full", "array", "arange", "zeros_like", "empty_like")
_DECLARATIONS = ("cuda.shared.array", "cuda.local.array")
#: NumPy functions that numba-cuda has, for numbers or for arrays
NUMPY = frozenset("""
acos acosh all angle any arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin
array_equal asarray asin asinh atan atan2 atanh atleast_1d atleast_2d atleast_3d average
bitwise_and bitwise_invert bitwise_left_shift bitwise_not bitwise_or bitwise_right_shift
bitwise_xor broadcast_shapes conj conjugate cos cosh count_nonzero deg2rad degrees divide equal
fmax fmin greater greater_equal hypot imag invert iscomplexobj isnan isrealobj isscalar left_shift
less less_equal log log10 log2 logical_and logical_not logical_or logical_xor maximum mean minimum
nan_to_num nanmean nanprod nanstd nansum nanvar not_equal prod rad2deg radians real right_shift
searchsorted shape sin sinc sinh size std sum tan tanh true_divide var
""".split())
#: and methods of arrays
METHODS = frozenset("""
all any argmax argmin clip conj conjugate fill item mean prod reshape std sum transpose var view
""".split())


def refuse_python(unit, tree, static, kinds, is_kernel):
    """Raise NotCompilable for the first thing in a function that no GPU's compiler takes."""
    for node, what, instead in (*_found(tree, static, kinds, is_kernel),
                                *_plain_functions(unit, tree, static)):
        raise errors.NotCompilable(
            f"{unit.name} cannot be compiled for a GPU: {what} does not work in a kernel "
            f"({where(unit.filename, node.lineno)}); {instead}", unit.filename, node.lineno)


def _found(tree, static, kinds, is_kernel):
    """(node, what it is, what to write instead) of each such thing."""
    allowed = _lists_that_compile(tree)
    bindings = _bindings(tree)
    for node in nodes_of(tree):
        if node.__class__ in _PYTHON:
            yield node, *_PYTHON[node.__class__]
        elif isinstance(node, ast.List) and isinstance(node.ctx, ast.Load) and (
                id(node) not in allowed):
            yield node, "a list", "use a tuple, or cuda.local.array"
        elif isinstance(node, ast.JoinedStr) and any(
                isinstance(part, ast.FormattedValue) for part in node.values):
            yield node, "making text", "give print the numbers themselves"
        elif isinstance(node, ast.Starred) and isinstance(node.ctx, ast.Store):
            yield node, "a starred name", "take the tuple apart by index"
        elif isinstance(node, ast.Global) and any(
                isinstance(part, ast.Name) and part.id in node.names and not isinstance(
                    part.ctx, ast.Load) for part in nodes_of(tree)):
            yield node, "assigning to a global name", "write into an array"
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) and _is_text(node.left):
            yield node, "making text", "give print the numbers themselves"
        elif isinstance(node, ast.Call):
            yield from _calls(node, static, kinds, is_kernel, bindings)
        elif not _allocates_in_kernels() and _copies_an_array(node, kinds):
            yield node, f"copying a whole array, `{ast.unparse(node)}`,", "write a loop"


def _copies_an_array(node, kinds):
    """True for `y[:] = x`."""
    return isinstance(node, ast.Assign) and isinstance(node.value, (ast.Name, ast.Subscript)) and (
        isinstance(node.targets[0], ast.Subscript)) and all(
            isinstance(kinds(array), Cells) for array in (node.targets[0].value, node.value))


def _plain_functions(unit, tree, static):
    """Calls of Python functions without `cuda.jit`."""
    for node in nodes_of(tree):
        if not isinstance(node, ast.Call) or not isinstance(static(node.func), Device):
            continue
        if isinstance(node.func, ast.Name):
            function = unit.scope.raw(node.func.id)
        else:
            function = getattr(static(node.func.value), node.func.attr, None)
        if isinstance(function, types.FunctionType) and not is_jitable(function):
            yield node, f"a call of {function.__name__}, a plain Python function,", (
                "decorate it with cuda.jit(device=True)")


def _calls(node, static, kinds, is_kernel, bindings):
    value = static(node.func)
    if isinstance(value, Primitive) and value.name in _DECLARATIONS:
        shape = next((keyword.value for keyword in node.keywords if keyword.arg == "shape"),
                     node.args[0] if node.args else None)
        if shape is not None and not _is_constant(shape, static, kinds, is_kernel, bindings):
            yield node, f"an array whose shape, `{ast.unparse(shape)}`, is no constant", (
                "give a number, or a name that stands for one outside the kernel; shape 0 is "
                "dynamic shared memory")
    elif any(value is kind for kind in (dict, set, list)):
        yield node, f"a {value.__name__}", "use a tuple, or cuda.local.array"
    elif value is str or isinstance(node.func, ast.Attribute) and _is_text(node.func.value):
        yield node, "making text", "give print the numbers themselves"
    elif _allocates_in_kernels():
        return  # then numba-cuda has nearly all that makes an array
    elif value is not UNRESOLVED and _is_numpys(value) and value.__name__ not in NUMPY:
        name = value.__name__
        yield node, f"np.{name}", (
            "use cuda.local.array, and a loop that fills it" if name in _MAKERS
            else f"write math.{name} of one number" if hasattr(math, name) else "write a loop")
    elif isinstance(node.func, ast.Attribute) and value is UNRESOLVED and (
            node.func.attr not in METHODS and hasattr(np.ndarray, node.func.attr)
            and isinstance(kinds(node.func.value), Cells)):
        yield node, f"the method {node.func.attr} of an array", "write a loop"


def _allocates_in_kernels():
    """Whether numba's runtime, which allocates memory inside of kernels, was asked for."""
    config = sys.modules.get("numba.core.config")
    return bool(getattr(config, "CUDA_ENABLE_NRT", False))


def _is_text(node):
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _is_numpys(value):
    """True for functions of NumPy; its types convert, and its constants are numbers."""
    return isinstance(value, np.ufunc) or not isinstance(value, type) and callable(value) and (
        getattr(value, "__module__", None) or "").partition(".")[0] == "numpy"


def _lists_that_compile(tree):
    """Ids of the lists that Python or numba makes a tuple of, or throws away."""
    found, loaded = set(), {node.id for node in nodes_of(tree) if isinstance(node, ast.Name)
                            and isinstance(node.ctx, ast.Load)}
    for node in nodes_of(tree):
        if isinstance(node, ast.For):
            found.add(id(node.iter))
        elif isinstance(node, ast.Compare):
            found |= {id(part) for part, operator in zip(node.comparators, node.ops, strict=True)
                      if isinstance(operator, (ast.In, ast.NotIn))}
        elif isinstance(node, ast.Assign) and all(
                isinstance(goal, ast.Name) and goal.id not in loaded for goal in node.targets):
            if isinstance(node.value, ast.List) and node.value.elts:
                found.add(id(node.value))
    return found


def _bindings(tree):
    """name -> the values it is given; None for what is no expression of its own."""
    found = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(
                node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
            found.setdefault(id(node.targets[0]), True)
    for node in nodes_of(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load) and (
                id(node) not in found):
            found.setdefault(node.id, []).append(None)
        elif isinstance(node, ast.arg):
            found.setdefault(node.arg, []).append(node)
    return found


def _is_constant(node, static, kinds, is_kernel, bindings):
    """True if numba knows a shape when it compiles."""
    def known(part):
        return _is_constant(part, static, kinds, is_kernel, bindings)

    if isinstance(node, ast.Tuple):
        return all(map(known, node.elts))
    if isinstance(node, ast.Attribute) and node.attr == "warpsize" and (
            getattr(static(node.value), "__name__", "") == "numba.cuda"):
        return False  # the compiler asks the device
    if isinstance(node, ast.IfExp):
        decided = kinds.decided(node.test)
        return decided is not None and known(node.body if decided else node.orelse)
    value = static(node) if isinstance(node, (ast.Name, ast.Attribute)) else UNRESOLVED
    if value is not UNRESOLVED:
        return _is_shape(value)
    if isinstance(node, ast.Name):
        values = bindings.get(node.id)
        if values is None:
            return True  # a name that there is not: Python will say so
        if len(values) > 1 or values[0] is None:
            return False
        if isinstance(values[0], ast.arg):
            return not is_kernel  # a device function may be given a literal
        return known(values[0])
    if isinstance(node, ast.Subscript) and isinstance(node.value, (ast.Name, ast.Attribute)):
        return static(node.value) is not UNRESOLVED
    if isinstance(node, ast.Constant):
        return type(node.value) is int
    return not any(isinstance(part, (ast.Name, ast.Call, ast.List)) for part in walk(node))


def _is_shape(value):
    return type(value) is int or isinstance(value, tuple) and all(
        type(part) is int for part in value)
