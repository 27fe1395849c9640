"""Syntax trees: where a node is, what stands there, and the text with another in its place."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator

BARRIERS = {"syncthreads", "syncwarp"}


def paths(node: ast.AST, path: tuple = ()) -> Iterator[tuple]:
    """Yield the way to every node of the body: field names, and positions in lists."""
    yield path
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "args") and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(value, ast.AST):
            yield from paths(value, (*path, field))
        elif isinstance(value, list):
            for position, each in enumerate(value):
                if isinstance(each, ast.AST):
                    yield from paths(each, (*path, field, position))


def at(tree: ast.AST, path: tuple):
    """Return the node that `path` leads to."""
    return functools.reduce(
        lambda node, step: node[step] if isinstance(step, int) else getattr(node, step), path, tree
    )


def replaced(tree: ast.AST, path: tuple, replacement: ast.AST | list) -> str:
    """Return the text with the node at `path` replaced: statements by none, or by several."""
    new = replacement if isinstance(replacement, list) else [replacement]
    for node in new:
        ast.fix_missing_locations(node)
    if not path:
        return ast.unparse(replacement)
    holder, last = at(tree, path[:-1]), path[-1]
    # Put there and taken away again: a copy of the tree would take most of the time.
    if isinstance(last, int):
        before = holder[:]
        holder[last : last + 1] = new
        holder[:] = holder or [ast.Pass()]
        text = ast.unparse(tree)
        holder[:] = before
    else:
        before = getattr(holder, last)
        setattr(holder, last, replacement)
        text = ast.unparse(tree)
        setattr(holder, last, before)
    return text


def with_fields(node: ast.AST, **fields):
    """Return a copy of `node` with some fields changed."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def plus(node: ast.expr, amount: int) -> ast.expr:
    """Return `node + amount`, as one number where it is one."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + amount)
    operator = ast.Add() if amount > 0 else ast.Sub()
    return ast.BinOp(node, operator, ast.Constant(abs(amount)))


def indices(node: ast.AST):
    """Yield each index of an access, with a function that puts another in its place."""
    if isinstance(node, ast.Subscript) and not is_shape(node.value):
        if isinstance(node.slice, ast.Tuple):
            for position, part in enumerate(node.slice.elts):

                def changed(new, position=position):
                    parts = list(node.slice.elts)
                    parts[position] = new
                    return with_fields(node, slice=with_fields(node.slice, elts=parts))

                yield changed, part
        else:
            yield lambda new: with_fields(node, slice=new), node.slice
    if is_atomic(node):
        yield lambda new: with_fields(node, args=[node.args[0], new, *node.args[2:]]), node.args[1]


def range_parts(call: ast.Call) -> tuple[ast.expr, ast.expr, ast.expr]:
    """Return begin, stop and step of a call of `range`."""
    begin, step = ast.Constant(0), ast.Constant(1)
    if len(call.args) == 1:
        return begin, call.args[0], step
    return call.args[0], call.args[1], call.args[2] if len(call.args) > 2 else step


def range_of(begin: ast.expr, stop: ast.expr, step: ast.expr) -> ast.Call:
    """Return `range(begin, stop, step)`."""
    return ast.Call(ast.Name("range"), [begin, stop, step], [])


def is_shape(node: ast.AST | None) -> bool:
    """Tell whether it is the shape of something."""
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def is_store(name: ast.Name) -> bool:
    """Tell whether a name is set where it stands."""
    return isinstance(name.ctx, ast.Store)


def is_atomic(node: ast.AST) -> bool:
    """Tell whether it is a call of an atomic operation, with an array and an index."""
    return (
        isinstance(node, ast.Call)
        and ast.unparse(node.func).startswith("cuda.atomic.")
        and len(node.args) > 1
    )


def is_range(node: ast.AST) -> bool:
    """Tell whether it is a call of `range` with one to three numbers."""
    return called(node) == "range" and 1 <= len(node.args) <= 3


def is_barrier(node: ast.AST) -> bool:
    """Tell whether it is a statement that waits for other threads."""
    return isinstance(node, ast.Expr) and called(node.value) in BARRIERS


def called(node: ast.AST) -> str:
    """Return the last part of the name of what is called, "" if nothing is."""
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func).rpartition(".")[2]


def names_in(node: ast.AST) -> set[str]:
    """Return all names that occur in it."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
