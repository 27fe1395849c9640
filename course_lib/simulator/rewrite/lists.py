"""Shared and local arrays kept as nested lists of NumPy scalars: several times faster to index.

Used for an array that a function declares with a constant shape and then only indexes in full, so
that nobody can tell. An array that is sliced, passed on or given to an atomic stays an ndarray.
"""

import ast
from dataclasses import dataclass

import numpy as np

from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.rewrite.resolve import UNRESOLVED, as_dtype, cast
from course_lib.simulator.rewrite.tree import nodes_of

#: Larger arrays stay ndarrays: a list takes about ten times the memory.
MOST_ELEMENTS = 16_384


@dataclass
class ListArray:
    """A declaration kept as lists: its shape, its scalar type, and whether threads share it."""

    shape: tuple
    scalar: type
    shared: bool

    @property
    def convert(self):
        """Call target that makes a value an element."""
        return cast(self.scalar)

    def make(self):
        """A fresh nested list of uninitialised elements."""
        from course_lib.simulator.engine.guards import poisoned

        return nested(poisoned((1,), np.dtype(self.scalar))[0], self.shape)


def nested(element, shape):
    """`element` repeated in nested lists."""
    if len(shape) == 1:
        return [element] * shape[0]
    return [nested(element, shape[1:]) for _ in range(shape[0])]


def find_lists(tree, static, facts):
    """name -> ListArray, for the declarations of a function that qualify.

    Parameters
    ----------
    tree : ast.FunctionDef
    static : callable
        Maps a Name or an Attribute to what it stands for, or UNRESOLVED.
    facts : analysis.Facts
    """
    found = {}
    for node in nodes_of(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(
                node.targets[0], ast.Name) and isinstance(node.value, ast.Call):
            name = node.targets[0].id
            if len(facts.bindings.get(name, ())) == 1:
                array = _declaration(node.value, static)
                if array is not None:
                    found[name] = array
    if found:
        for name in _misused(tree, found, facts):
            found.pop(name, None)
    return found


def _declaration(call, static):
    primitive = static(call.func)
    if not isinstance(primitive, Primitive) or primitive.name not in (
            "cuda.shared.array", "cuda.local.array"):
        return None
    arguments = dict(zip(("shape", "dtype", "alignment"), call.args, strict=False))
    arguments.update({keyword.arg: keyword.value for keyword in call.keywords})
    if not {"shape", "dtype"} <= set(arguments) <= {"shape", "dtype", "alignment"}:
        return None
    shape = constant(arguments["shape"], static)
    dtype = constant(arguments["dtype"], static)
    if dtype is UNRESOLVED or shape is UNRESOLVED:
        return None
    shape = shape if isinstance(shape, tuple) else (shape,)
    if not shape or not all(type(part) is int and part > 0 for part in shape):
        return None
    if int(np.prod(shape)) > MOST_ELEMENTS:
        return None
    try:
        dtype = as_dtype(dtype)
    except ValueError:
        return None
    if dtype.names is not None or dtype.subdtype is not None:
        return None
    return ListArray(shape, dtype.type, primitive.name == "cuda.shared.array")


def constant(node, static):
    """The value of a constant expression, or UNRESOLVED."""
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, (ast.Name, ast.Attribute)):
        return static(node)
    if isinstance(node, ast.Tuple):
        parts = tuple(constant(part, static) for part in node.elts)
        return UNRESOLVED if UNRESOLVED in parts else parts
    if isinstance(node, ast.BinOp):
        left, right = constant(node.left, static), constant(node.right, static)
        if type(left) is int and type(right) is int:
            match node.op:
                case ast.Add():
                    return left + right
                case ast.Sub():
                    return left - right
                case ast.Mult():
                    return left * right
                case ast.FloorDiv() if right:
                    return left // right
    return UNRESOLVED


def _misused(tree, found, facts):
    """Names that are used in another way than indexing in full."""
    proper, bad = set(), set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and (
                node.value.id in found):
            name = node.value.id
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if len(parts) == len(found[name].shape) and all(map(facts.is_integer, parts)) and (
                    not isinstance(node.ctx, ast.Del)):
                proper.add(id(node.value))
    stores = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                stores |= _plain_stores(target, node.value)
        elif isinstance(node, ast.AugAssign):
            stores.add(id(node.target))
    for node in nodes_of(tree):
        if isinstance(node, ast.Name) and node.id in found and isinstance(node.ctx, ast.Load) and (
                id(node) not in proper):
            bad.add(node.id)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store) and (
                id(node) not in stores) and isinstance(node.value, ast.Name):
            bad.add(node.value.id)
    return bad


def _plain_stores(target, value):
    """Ids of subscripts whose stored value has an expression of its own."""
    if isinstance(target, ast.Subscript):
        return {id(target)}
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and (
            len(target.elts) == len(value.elts)) and not any(
            isinstance(part, ast.Starred) for part in [*target.elts, *value.elts]):
        found = set()
        for one, its in zip(target.elts, value.elts, strict=True):
            if isinstance(one, ast.Subscript):
                found |= _plain_stores(one, its)
        return found
    return set()
