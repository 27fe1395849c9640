"""Loops that a compiler may turn into a jump to itself: waiting for memory with plain reads.

A compiler reads memory again in each round of a loop only if something in the round may have
changed it, or orders it: a store, an atomic, a fence, a barrier, an operation of a warp, a sleep.
Where there is none, and whether the loop ends depends on nothing else that changes, it reads once,
before the loop. `cuda.ldcv` and its kin are plain reads to it too.
"""

import ast

from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.observe.execution import fence_scope
from course_lib.simulator.rewrite.emitter import bound_names, static_value
from course_lib.simulator.rewrite.resolve import UNRESOLVED, Device, Scope, is_twin
from course_lib.simulator.rewrite.source import function_tree
from course_lib.simulator.rewrite.tree import walk

#: What may end a round, or the loop, in ways that are not followed here.
_UNCLEAR = (ast.For, ast.While, ast.Raise, ast.Assert, ast.Try, ast.With, ast.Yield, ast.YieldFrom,
            ast.FunctionDef, ast.Lambda, ast.Delete, ast.NamedExpr, ast.Match)
_LEAVES = (ast.Break, ast.Return, ast.Continue)


def endless_poll(loop, static):
    """The reads that the `while` loop waits for, if a compiler makes it a jump to itself; else [].

    Parameters
    ----------
    static : callable
        Maps a Name or an Attribute to what it stands for, or UNRESOLVED.
    """
    inside = [part for statement in loop.body for part in walk(statement)]
    if any(isinstance(part, _UNCLEAR) for part in inside) or any(
            _has_effect(part, static, ()) for part in [*inside, *walk(loop.test)]):
        return []
    conditions = _exits(loop.body)
    if conditions is None:
        return []
    conditions = [loop.test, *conditions]
    assigned = _assigned(inside)
    steady = {}
    while True:
        found = {name: values[0] for name, values in assigned.items()
                 if name not in steady and len(values) == 1 and values[0] is not None
                 and not (_names(values[0]) & assigned.keys()) - steady.keys()}
        if not found:
            break
        steady.update(found)
    used = list(conditions)
    for expression in used:  # grows while it is gone through
        for name in _names(expression) & assigned.keys():
            if name not in steady:
                return []
            if steady[name] not in used:
                used.append(steady[name])
    return [part for expression in used for part in walk(expression)
            if _is_read(part, static)]


def _names(node):
    return {part.id for part in walk(node) if isinstance(part, ast.Name)}


def _assigned(nodes):
    """name -> the expressions it gets; None stands for what is not followed."""
    found = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(
                node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
        elif isinstance(node, (ast.Assign, ast.AugAssign, ast.AnnAssign)):
            for part in walk(node):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    found.setdefault(part.id, []).append(None)
    return found


def _exits(statements):
    """The conditions under which a round is left early; None if it is without a condition."""
    conditions = []
    for statement in statements:
        if isinstance(statement, _LEAVES):
            return None
        if isinstance(statement, ast.If) and any(
                isinstance(part, _LEAVES) for part in walk(statement)):
            conditions += [part.test for part in walk(statement) if isinstance(part, ast.If)]
            if all(body and isinstance(body[-1], _LEAVES)
                   for body in (statement.body, statement.orelse)):
                return None
    return conditions


def _has_effect(node, static, above):
    """True if `node` writes memory, orders it, waits or sleeps; or if that cannot be told."""
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        return not isinstance(node.ctx, ast.Load)
    if not isinstance(node, ast.Call):
        return False
    value = static(node.func)
    if isinstance(value, Primitive):
        return (value.kind == "blocking" or fence_scope(value) is not None
                or value.access not in (None, "load"))
    if isinstance(value, Device):
        return _function_has_effect(value.function, above)
    return value is UNRESOLVED or value is print or hasattr(value, "device_call")


def _function_has_effect(function, above):
    if is_twin(function) or function in above or function_tree(function) is None:
        return True
    body, static = _body(function)
    return any(isinstance(part, (ast.For, ast.While))
               or _has_effect(part, static, (*above, function)) for part in body)


def _body(function):
    """(all nodes of a device function, what tells its names)."""
    tree, scope = function_tree(function), Scope(function)
    bound = bound_names(tree)
    nodes = [part for statement in tree.body for part in walk(statement)]
    return nodes, lambda node: static_value(node, scope, bound)


def _is_read(node, static):
    """True for a plain read of memory that others may write."""
    if isinstance(node, ast.Subscript):
        return not (isinstance(node.value, ast.Attribute)
                    and node.value.attr in ("shape", "strides")) and (
            not isinstance(node.value, (ast.Name, ast.Attribute))
            or static(node.value) is UNRESOLVED)
    if not isinstance(node, ast.Call):
        return False
    value = static(node.func)
    if isinstance(value, Primitive):
        return value.access == "load"
    if isinstance(value, Device):
        body, its = _body(value.function)
        return any(_is_read(part, its) for part in body)
    return False
