"""Small edits that make a right kernel wrong, each with the words for what it does.

An operator is given a node and the `Frame` around it, and yields what may stand in the node's
place, with words that end the sentence "your kernel behaves exactly like the right one …". None of
them knows any exercise. The words name parameters and numbers only, never what a solution calls its
own. These edits change one place; those of `edits_apart.py` several, or the order of things.
"""

from __future__ import annotations

import ast
import itertools

from course_lib.simulator.rewrite.tree import copied
from course_lib.teach.explaining.mutation.trees import (
    called,
    indices,
    is_atomic,
    is_barrier,
    is_range,
    is_shape,
    plus,
    range_of,
    range_parts,
    with_fields,
)

#: What a launch decides. A kernel that takes them for constants is right for one launch only.
LAUNCH = {
    "cuda.blockDim.x": ("32", "256"),
    "cuda.gridDim.x": ("1",),
    "cuda.threadIdx.x": ("cuda.grid(1)", "0"),
    "cuda.blockIdx.x": ("0",),
    "cuda.grid(1)": ("cuda.threadIdx.x", "cuda.blockIdx.x"),
    "cuda.grid(2)": ("(cuda.threadIdx.x, cuda.threadIdx.y)",),
    "cuda.gridsize(1)": ("cuda.blockDim.x", "64"),
}
RELAXED = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
OPPOSITE = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod, ast.Mod: ast.FloorDiv,
}  # fmt: skip
SIGNS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%",
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
}  # fmt: skip


def drop_barrier(node, frame):
    if is_barrier(node):
        yield [], f"without one of its cuda.{called(node.value)}()"


def drop_guard(node, frame):
    if isinstance(node, ast.If):
        yield node.body, "without the condition of an `if`"
        if node.orelse:
            yield node.orelse, "with only the `else` of an `if`"
    if isinstance(node, ast.IfExp):
        yield node.body, "with one side of a choice taken always"
        yield node.orelse, "with one side of a choice taken always"


def negate(node, frame):
    if isinstance(node, ast.If | ast.IfExp):
        changed = copied(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed, "with a condition turned into its opposite"


def relax(node, frame):
    if isinstance(node, ast.Compare) and type(node.ops[0]) in RELAXED:
        other = RELAXED[type(node.ops[0])]
        signs = SIGNS[other], SIGNS[type(node.ops[0])]
        yield with_fields(node, ops=[other()]), "with `{}` in place of `{}`".format(*signs)


def shift_index(node, frame):
    for changed, part in indices(node):
        array = frame.array(node.args[0] if is_atomic(node) else node.value)
        for amount, how in ((1, "large"), (-1, "small")):
            yield changed(plus(part, amount)), f"with an index of {array} that is one too {how}"


def swap_indices(node, frame):
    if isinstance(node, ast.Subscript | ast.Assign):
        pair = node.slice if isinstance(node, ast.Subscript) else node.targets[0]
        if isinstance(pair, ast.Tuple) and not is_shape(getattr(node, "value", None)):
            for a, b in itertools.combinations(range(len(pair.elts)), 2):
                parts = list(pair.elts)
                parts[a], parts[b] = parts[b], parts[a]
                swapped = with_fields(pair, elts=parts)
                if isinstance(node, ast.Subscript):
                    words = f"with two indices of {frame.array(node.value)} swapped"
                    yield with_fields(node, slice=swapped), words
                else:
                    words = "with two names swapped where several are set at once"
                    yield with_fields(node, targets=[swapped]), words


def swap_dimension(node, frame):
    # x.shape[1] for x.shape[0]: the rows' number for the columns'
    if isinstance(node, ast.Subscript) and is_shape(node.value):
        if isinstance(node.slice, ast.Constant):
            other = with_fields(node, slice=ast.Constant(1 - node.slice.value))
            yield other, "with one size in place of another"


def drop_operand(node, frame):
    if isinstance(node, ast.BinOp):
        for kept, gone in ((node.left, node.right), (node.right, node.left)):
            yield kept, _without(type(node.op), gone, gone is node.right)
    if isinstance(node, ast.Call) and called(node) in {"max", "min", "abs", "exp", "sqrt"}:
        for argument in node.args:
            yield argument, f"without {called(node)}"


def _without(operator, gone, right):
    """Say what is left out of a formula: a number by its value, anything else by its part."""
    which = f" {ast.unparse(gone)}" if _is_number(gone) else ""
    if operator is ast.Mult:
        return f"without the factor{which}" if which else "without one of its factors"
    if operator is ast.Div and right:
        return f"without the division by{which}" if which else "without one of its divisions"
    if operator is ast.Add:
        return f"without the{which} that is added" if which else "without one part of a sum"
    if operator is ast.Sub:
        what = f"the{which} that is" if which else "what is"
        return f"without {what} taken away" if right else "without what something is taken from"
    if operator in (ast.FloorDiv, ast.Mod) and right:
        return f"without one of its `{SIGNS[operator]}`"
    return "without one part of a formula"


def _is_number(node):
    if isinstance(node, ast.Call) and called(node).startswith(("float", "int")):
        return all(map(_is_number, node.args))
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def change_operator(node, frame):
    if isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE:
        other = OPPOSITE[type(node.op)]
        yield with_fields(node, op=other()), _sign_for(node, other)
    if isinstance(node, ast.AugAssign):
        if type(node.op) in OPPOSITE:
            other = OPPOSITE[type(node.op)]
            words = f"with `{SIGNS[other]}=` in place of `{SIGNS[type(node.op)]}=`"
            yield with_fields(node, op=other()), words
        sign = SIGNS.get(type(node.op), "")
        yield ast.Assign([node.target], node.value), f"with `=` in place of `{sign}=`"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand, "without a minus sign"
    if isinstance(node, ast.Call) and called(node) in {"max", "min"}:
        other = "min" if called(node) == "max" else "max"
        yield with_fields(node, func=ast.Name(other)), f"with {other} in place of {called(node)}"


def _sign_for(node, other):
    return f"with `{SIGNS[other]}` in place of `{SIGNS[type(node.op)]}`"


def change_range(node, frame):
    if not is_range(node):
        return
    begin, stop, step = range_parts(node)
    zero, one = ast.Constant(0), ast.Constant(1)
    yield range_of(begin, plus(stop, -1), step), "with a loop that ends one too early"
    yield range_of(begin, plus(stop, 1), step), "with a loop that ends one too late"
    yield range_of(plus(begin, 1), stop, step), "with a loop that begins one too late"
    yield range_of(begin, stop, plus(step, 1)), "with a loop whose step is one too large"
    if ast.dump(step) != ast.dump(one):
        yield range_of(begin, stop, one), "with 1 for the step of a loop"
    if ast.dump(begin) != ast.dump(zero):
        yield range_of(zero, stop, step), "with a loop that begins at 0"


def loop_once(node, frame):
    if isinstance(node, ast.While):
        yield ast.If(node.test, node.body, []), "with one round of a loop only"
        yield [], "without one of its loops"
    if isinstance(node, ast.For):
        yield [], "without one of its loops"


def plain_atomic(node, frame):
    if isinstance(node, ast.Expr) and is_atomic(node.value) and len(node.value.args) == 3:
        array, index, value = node.value.args
        target = ast.Subscript(array, index, ast.Store())
        yield ast.AugAssign(target, ast.Add(), value), "without the atomic operation"
        yield ast.Assign([target], value), "that sets where it should add"


def change_shuffle(node, frame):
    name = called(node)
    if name.startswith("shfl_") and len(node.args) == 3:
        for other in ("shfl_down_sync", "shfl_up_sync", "shfl_xor_sync", "shfl_sync"):
            yield with_fields(node, func=with_fields(node.func, attr=other)), f"with cuda.{other}"
        mask, value, offset = node.args
        for amount in (1, -1):
            changed = with_fields(node, args=[mask, value, plus(offset, amount)])
            yield changed, "with a shuffle whose distance is off by one"
        changed = with_fields(node, args=[ast.Constant(0xFFFF), value, offset])
        yield changed, "with a mask that names half the lanes"


def change_constant(node, frame):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1), "with a number that is one too large"
        yield ast.Constant(node.value - 1), "with a number that is one too small"


def assume_launch(node, frame):
    if isinstance(node, ast.Attribute | ast.Call) and (text := ast.unparse(node)) in LAUNCH:
        for other in LAUNCH[text]:
            yield ast.parse(other, mode="eval").body, f"with {other} in place of {text}"


def drop_statement(node, frame):
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and not is_barrier(node):
        yield [], "without one of its statements"


#: In the order in which they name what several of them make.
OPERATORS = (
    drop_barrier, drop_guard, negate, relax, shift_index, swap_indices, swap_dimension,
    drop_operand, change_operator, change_range, loop_once, plain_atomic, change_shuffle,
    change_constant, assume_launch, drop_statement,
)  # fmt: skip
