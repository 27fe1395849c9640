"""Edits that learners make with one thought, though they change several places or an order.

Like `edits.py`. They have no names in the bank of mutants, which must all be rejected: many of
these change nothing, as two statements in another order do.
"""

from __future__ import annotations

import ast
import copy

from course_lib.teach.explaining.mutation.edits import LAUNCH, RELAXED, SIGNS
from course_lib.teach.explaining.mutation.trees import (
    called,
    indices,
    is_atomic,
    is_barrier,
    is_shape,
    names_in,
    plus,
    with_fields,
)

_LOOPS = ast.For | ast.While


def index_zero(node, frame):
    for changed, part in indices(node):
        if not isinstance(part, ast.Constant):
            array = frame.array(node.args[0] if is_atomic(node) else node.value)
            yield changed(ast.Constant(0)), f"with 0 for an index of {array}"


def other_name(node, frame):
    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Store):
        for other in frame.alike(node.id):
            both = {node.id, other} <= set(frame.parameters)
            kind = frame.kinds[node.id]
            words = f"{other} in place of {node.id}" if both else f"one {kind} in place of another"
            yield ast.Name(other, node.ctx), f"with {words}"


def shift_limit(node, frame):
    """A limit, or the number of a thread, that is one off."""
    if isinstance(node, ast.Compare) and type(node.ops[0]) in RELAXED:
        for amount, how in ((1, "large"), (-1, "small")):
            limit = plus(node.comparators[0], amount)
            yield with_fields(node, comparators=[limit]), f"with a limit that is one too {how}"
    if isinstance(node, ast.Call | ast.Attribute) and ast.unparse(node) in LAUNCH:
        for amount, how in ((1, "large"), (-1, "small")):
            yield plus(node, amount), f"with a {ast.unparse(node)} that is one too {how}"


def add_for_set(node, frame):
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Name):
        words = "with `+=` in place of `=`"
        yield ast.AugAssign(node.targets[0], ast.Add(), node.value), words


def change_sign(node, frame):
    """The opposite of what is set, or of one side of a product."""
    if isinstance(node, ast.Assign | ast.AugAssign) and _is_value(node, frame):
        minus = ast.UnaryOp(ast.USub(), node.value)
        yield with_fields(node, value=minus), "with a minus sign too much"


def other_function(node, frame):
    if called(node) == "max" and len(node.args) == 2:
        for each in node.args:
            yield ast.Call(ast.Name("abs"), [each], []), "with abs in place of max"


def index_from_the_end(node, frame):
    for changed, part in indices(node):
        if isinstance(node, ast.Subscript) and not isinstance(node.slice, ast.Tuple):
            size = ast.Attribute(node.value, "size")
            last = ast.BinOp(size, ast.Sub(), ast.Constant(1))
            words = f"with {frame.array(node.value)} counted from its end"
            yield changed(ast.BinOp(last, ast.Sub(), part)), words


def drop_condition(node, frame):
    if isinstance(node, ast.BoolOp):
        word = "and" if isinstance(node.op, ast.And) else "or"
        for gone in range(len(node.values)):
            rest = node.values[:gone] + node.values[gone + 1 :]
            kept = rest[0] if len(rest) == 1 else with_fields(node, values=rest)
            yield kept, f"without one part of an `{word}`"
        other = ast.Or() if word == "and" else ast.And()
        yield with_fields(node, op=other), "with `and` and `or` mixed up"


def sum_for_product(node, frame):
    for old, new in ((ast.Mult, ast.Add), (ast.Add, ast.Mult), (ast.FloorDiv, ast.Mult)):
        if isinstance(node, ast.BinOp) and isinstance(node.op, old):
            words = f"with `{SIGNS[new]}` in place of `{SIGNS[old]}`"
            yield with_fields(node, op=new()), words


def reverse_operands(node, frame):
    uneven = ast.Sub | ast.Div | ast.FloorDiv | ast.Mod
    if isinstance(node, ast.BinOp) and isinstance(node.op, uneven):
        sign = SIGNS[type(node.op)]
        yield (
            with_fields(node, left=node.right, right=node.left),
            f"with the two sides of a `{sign}` the other way round",
        )


def regroup(node, frame):
    words = "with its brackets elsewhere"
    if isinstance(node, ast.BinOp):
        if isinstance(node.right, ast.BinOp):  # a - (b / c) -> (a - b) / c
            inner = node.right
            left = ast.BinOp(node.left, node.op, inner.left)
            yield ast.BinOp(left, inner.op, inner.right), words
        if isinstance(node.left, ast.BinOp):  # (a - b) / c -> a - (b / c)
            inner = node.left
            right = ast.BinOp(inner.right, node.op, node.right)
            yield ast.BinOp(inner.left, inner.op, right), words
        if isinstance(node.left, ast.Call):  # f(a - b) / c
            for k, inner in enumerate(node.left.args):
                moved = [ast.BinOp(inner, node.op, node.right)]  # -> f((a - b) / c)
                if isinstance(inner, ast.BinOp):  # -> f(a - b / c)
                    last = ast.BinOp(inner.right, node.op, node.right)
                    moved.append(with_fields(inner, right=last))
                for each in moved:
                    args = [*node.left.args[:k], each, *node.left.args[k + 1 :]]
                    yield with_fields(node.left, args=args), words


def scale_index(node, frame):
    """An index, or a part of one, that is counted twice."""
    if isinstance(node, ast.Subscript) and not is_shape(node.value):
        for changed, part in indices(node):
            for inner in (part, *((part.left, part.right) if isinstance(part, ast.BinOp) else ())):
                if isinstance(inner, ast.Name):
                    twice = ast.BinOp(ast.Constant(2), ast.Mult(), inner)
                    new = twice if inner is part else _with_part(part, inner, twice)
                    words = f"with a factor too much in an index of {frame.array(node.value)}"
                    yield changed(new), words


def _with_part(whole: ast.BinOp, old: ast.expr, new: ast.expr) -> ast.BinOp:
    side = "left" if whole.left is old else "right"
    return with_fields(whole, **{side: new})


def drop_return(node, frame):
    if isinstance(node, ast.Return) and node.value is not None:
        yield [], "without its `return`"


def other_factor(node, frame):
    """A size too much: what is stored is multiplied or divided by one."""
    if isinstance(node, ast.Assign | ast.AugAssign) and _is_value(node, frame):
        for size in frame.sizes():
            more = ast.BinOp(node.value, ast.Mult(), size)
            yield with_fields(node, value=more), "with a size too much as a factor"
            less = ast.BinOp(node.value, ast.Div(), size)
            yield with_fields(node, value=less), "divided once too often by a size"


def _is_value(node, frame):
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    target = targets[0]
    if isinstance(node.value, ast.Name) and frame.kinds.get(node.value.id) == "constant":
        return False  # times a size it is still ZERO, in float64
    if isinstance(target, ast.Subscript):
        return True
    return isinstance(target, ast.Name) and frame.kinds.get(target.id) == "number"


def move_over_loop(node, frame):
    """A statement beside a loop goes into it; the first or last of a loop goes out of it."""
    for field in ("body", "orelse"):
        body = getattr(node, field, None)
        if not isinstance(body, list):
            continue
        for k, each in enumerate(body):
            if not isinstance(each, _LOOPS):
                continue
            for changed, words in _over(body, k, each):
                yield with_fields(node, **{field: changed}), words


def _over(body, k, loop):
    inside = loop.body
    before, after = body[:k], body[k + 1 :]
    if before and _is_simple(before[-1]):
        within = with_fields(loop, body=[before[-1], *inside])
        yield [*before[:-1], within, *after], "with a start set inside the loop, not before it"
    if after and _is_simple(after[0]):
        within = with_fields(loop, body=[*inside, after[0]])
        yield [*before, within, *after[1:]], "with what comes after a loop done in each round"
    if len(inside) > 1 and _is_simple(inside[0]):
        without = with_fields(loop, body=inside[1:])
        words = "with a start set before the loop only, not in each round"
        yield [*before, inside[0], without, *after], words
    if len(inside) > 1 and _is_simple(inside[-1]):
        without = with_fields(loop, body=inside[:-1])
        words = "with what each round does done once, after the loop"
        yield [*before, without, inside[-1], *after], words


def _is_simple(node):
    return isinstance(node, ast.Assign | ast.AugAssign | ast.Expr)


def fuse_loops(node, frame):
    body = getattr(node, "body", None)
    if not isinstance(body, list):
        return
    for k, (one, other) in enumerate(zip(body, body[1:], strict=False)):
        if isinstance(one, ast.For) and isinstance(other, ast.For):
            if ast.dump(one.iter) == ast.dump(other.iter):
                renamed = _renamed(other.body, other.target, one.target)
                fused = with_fields(one, body=[*one.body, *renamed])
                yield with_fields(node, body=[*body[:k], fused, *body[k + 2 :]]), (
                    "with two loops made one"
                )


def _renamed(body, old, new):
    body = copy.deepcopy(body)
    if isinstance(old, ast.Name) and isinstance(new, ast.Name):
        for each in body:
            for inner in ast.walk(each):
                if isinstance(inner, ast.Name) and inner.id == old.id:
                    inner.id = new.id
    return body


def reorder(node, frame):
    for field in ("body", "orelse"):
        body = getattr(node, field, None)
        if not isinstance(body, list):
            continue
        for k in range(len(body) - 1):
            one, other = body[k], body[k + 1]
            if is_barrier(one) or is_barrier(other) or not _depend(one, other):
                continue
            swapped = [*body[:k], other, one, *body[k + 2 :]]
            yield with_fields(node, **{field: swapped}), "with two steps in the other order"


def _depend(one, other):
    """Tell whether the order of two statements can matter."""
    return bool(_set(one) & names_in(other) or _set(other) & names_in(one))


def _set(node):
    """Return the names that a statement sets, arrays included."""
    found = set()
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        if isinstance(each, ast.Subscript) and isinstance(each.ctx, ast.Store):
            found |= names_in(each.value)
    return found


def exchange_names(node, frame):
    """Two names of a kind the other way round, in one statement."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        here = sorted(names_in(node))
        for k, one in enumerate(here):
            for other in here[k + 1 :]:
                kind = frame.kinds.get(one)
                if other in frame.alike(one) and kind in ("index", "size", "array", "number"):
                    words = f"with one {kind} and another the other way round"
                    yield _exchanged(node, one, other), words


def _exchanged(node, one, other):
    node = copy.deepcopy(node)
    for each in ast.walk(node):
        if isinstance(each, ast.Name) and each.id in (one, other):
            each.id = other if each.id == one else one
    return node


def swap_arguments(node, frame):
    if isinstance(node, ast.Call) and called(node) not in ("range", "max", "min"):
        for k in range(len(node.args) - 1):
            args = [*node.args]
            args[k : k + 2] = args[k + 1], args[k]
            yield with_fields(node, args=args), "with two arguments swapped"


#: What is tried beside `edits.OPERATORS`.
OPERATORS = (
    index_zero, other_name, shift_limit, add_for_set, change_sign, other_function,
    index_from_the_end, drop_condition, sum_for_product, reverse_operands, regroup,
    other_factor, move_over_loop, fuse_loops, reorder, exchange_names, swap_arguments,
    scale_index, drop_return,
)  # fmt: skip
