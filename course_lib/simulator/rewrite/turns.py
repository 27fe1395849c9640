"""Loops that only wait: each round asks memory the same again, changes nothing, and does no more.

How such a loop goes on depends on other threads alone, so that each round is a turn for them.
"""

import ast

from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.rewrite.tree import walk

_STEPS = (ast.Pass, ast.Break, ast.Expr)
#: What adding 0 changes nothing; and what changes nothing the second time, by a constant.
_ADDING = ("add", "sub", "or_", "xor")
_SETTING = ("exch", "max", "min", "and_")


def only_waits(loop, static):
    """True for a `while` loop that does nothing but wait for what other threads do to memory.

    `static` maps a Name or an Attribute to what it stands for, or UNRESOLVED.
    """
    inside = [part for statement in [loop.test, *loop.body] for part in walk(statement)]
    if loop.orelse or not _are_steps(loop.body) or any(
            isinstance(part, (ast.NamedExpr, ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda))
            or isinstance(part, ast.Call) and not _changes_nothing(part, static)
            for part in inside):
        return False
    assigned = {part.id for part in inside
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    asked = [part for part in inside if isinstance(part, (ast.Call, ast.Subscript))]
    new = [part.value for part in inside if isinstance(part, ast.Assign)]
    return any(_asks_memory(part, static) for part in asked) and not any(
        isinstance(part, ast.Name) and part.id in assigned
        for node in [*asked, *new] for part in walk(node))


def asks(call, static):
    """True for an atomic that may be how a thread waits: not for one that draws a ticket."""
    operation = _atomic(call, static)
    return operation is not None and (
        operation not in ("add", "sub", "inc", "dec") or _operand(call, static) == 0)


def is_sleep(statement, static):
    """True for `cuda.nanosleep(…)`."""
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call) and _name_of(
        statement.value, static) == "cuda.nanosleep"


def _are_steps(statements):
    return all(
        isinstance(part, _STEPS)
        or isinstance(part, ast.Assign) and all(isinstance(to, ast.Name) for to in part.targets)
        or isinstance(part, ast.If) and _are_steps(part.body) and _are_steps(part.orelse)
        for part in statements)


def _changes_nothing(call, static):
    """True for a call that leaves memory as it is, in the second round at the latest."""
    operation, name = _atomic(call, static), _name_of(call, static)
    if operation in _ADDING:
        return _operand(call, static) == 0
    if operation in _SETTING:
        return _operand(call, static) is not None
    return (operation in ("cas", "compare_and_swap") or _asks_memory(call, static)
            or name.startswith("cuda.threadfence") or name == "cuda.nanosleep"
            or isinstance(static(call.func), type))


def _asks_memory(node, static):
    """True for a read, with a hint or without, and for an atomic."""
    if isinstance(node, ast.Subscript):
        return not (isinstance(node.value, ast.Attribute) and node.value.attr == "shape")
    return _atomic(node, static) is not None or getattr(
        static(node.func), "access", None) == "load"


def _atomic(call, static):
    """The name of an atomic, such as "add", or None."""
    name = _name_of(call, static)
    return name.removeprefix("cuda.atomic.") if name.startswith("cuda.atomic.") else None


def _name_of(call, static):
    """What a primitive of `cuda` is called, or ""."""
    primitive = static(call.func)
    return primitive.name if isinstance(primitive, Primitive) else ""


def _operand(call, static):
    """The constant that an atomic is given last, through a type or not; None if it is none."""
    node = [*call.args, *(keyword.value for keyword in call.keywords)][-1:]
    node = node[0] if node else None
    if isinstance(node, ast.Call) and len(node.args) == 1 and isinstance(static(node.func), type):
        node = node.args[0]
    value = node.value if isinstance(node, ast.Constant) else static(node)
    return value if isinstance(value, (int, float)) else None
