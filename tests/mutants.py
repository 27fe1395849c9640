"""Wrong versions of a right kernel, made by small changes to its syntax tree.

    for mutant in mutants(kernel):
        print(mutant.name)          # "drop guard: if i < x.size"
        mutant.build()              # the changed kernel, decorated like the original

Every function in `OPERATORS` is given one node and yields what may stand in its place. None of
them knows any exercise. A mutant may be right by chance: `tests/bank/equivalent.py` lists those.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import itertools
import linecache
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass

BARRIERS = {"syncthreads", "syncwarp"}
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

_numbers = itertools.count()


@dataclass(frozen=True)
class Mutant:
    """A changed kernel. `name` says what was changed, and is the same in every run."""

    name: str
    text: str
    original: Callable

    def build(self) -> Callable:
        """Compile it in the original's module, so that it is what a learner could have typed."""
        file = f"<mutant {next(_numbers)}>"
        lines = self.text.splitlines(keepends=True)
        # Where the simulator, like a debugger, finds the text of code that is in no file.
        linecache.cache[file] = (len(self.text), None, lines, file)
        function = _python(self.original)
        space = dict(function.__globals__)
        exec(compile(self.text, file, "exec"), space)
        return space[function.__name__]


def mutants(kernel: Callable) -> list[Mutant]:
    """Return every mutant of a kernel, each text once."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(_python(kernel))))
    seen = {ast.unparse(tree)}
    found, names = [], set()
    for path in list(_paths(tree)):
        node = _at(tree, path)
        for operator in OPERATORS:
            for replacement in operator(node):
                text = _replaced(tree, path, replacement)
                if text in seen:
                    continue
                seen.add(text)
                name = f"{operator.__name__.replace('_', ' ')}: {_label(node, replacement)}"
                while name in names:  # the same expression stands in the kernel twice
                    name += ", again"
                names.add(name)
                found.append(Mutant(name, text, kernel))
    return found


# ---- the operators: each takes a node and yields what may stand in its place -----------------


def drop_barrier(node):
    if isinstance(node, ast.Expr) and _called(node.value) in BARRIERS:
        yield []


def drop_guard(node):
    if isinstance(node, ast.If):
        yield node.body
        if node.orelse:
            yield node.orelse
    if isinstance(node, ast.IfExp):
        yield node.body
        yield node.orelse


def negate(node):
    if isinstance(node, ast.If | ast.IfExp):
        changed = copy.deepcopy(node)
        changed.test = ast.UnaryOp(ast.Not(), changed.test)
        yield changed


def relax(node):
    if isinstance(node, ast.Compare) and type(node.ops[0]) in RELAXED:
        yield _with(node, ops=[RELAXED[type(node.ops[0])]()])


def shift_index(node):
    for changed, part in _indices(node):
        for amount in (1, -1):
            yield changed(part, _plus(part, amount))


def swap_indices(node):
    if isinstance(node, ast.Subscript | ast.Assign):
        pair = node.slice if isinstance(node, ast.Subscript) else node.targets[0]
        if isinstance(pair, ast.Tuple) and not _is_shape(getattr(node, "value", None)):
            for a, b in itertools.combinations(range(len(pair.elts)), 2):
                parts = list(pair.elts)
                parts[a], parts[b] = parts[b], parts[a]
                swapped = _with(pair, elts=parts)
                if isinstance(node, ast.Subscript):
                    yield _with(node, slice=swapped)
                else:
                    yield _with(node, targets=[swapped])


def swap_dimension(node):
    # x.shape[1] for x.shape[0]: the rows' number for the columns'
    if isinstance(node, ast.Subscript) and _is_shape(node.value):
        if isinstance(node.slice, ast.Constant):
            yield _with(node, slice=ast.Constant(1 - node.slice.value))


def drop_operand(node):
    if isinstance(node, ast.BinOp):
        yield node.left
        yield node.right
    if isinstance(node, ast.Call) and _called(node) in {"max", "min", "abs", "exp", "sqrt"}:
        yield from node.args


def change_operator(node):
    if isinstance(node, ast.BinOp) and type(node.op) in OPPOSITE:
        yield _with(node, op=OPPOSITE[type(node.op)]())
    if isinstance(node, ast.AugAssign):
        if type(node.op) in OPPOSITE:
            yield _with(node, op=OPPOSITE[type(node.op)]())
        yield ast.Assign([node.target], node.value)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        yield node.operand
    if isinstance(node, ast.Call) and _called(node) in {"max", "min"}:
        yield _with(node, func=ast.Name("min" if _called(node) == "max" else "max"))


def change_range(node):
    if not (isinstance(node, ast.Call) and _called(node) == "range"):
        return
    begin, stop, step = _range_parts(node)
    zero, one = ast.Constant(0), ast.Constant(1)
    yield _range(begin, _plus(stop, -1), step)
    yield _range(begin, _plus(stop, 1), step)
    yield _range(_plus(begin, 1), stop, step)
    yield _range(begin, stop, _plus(step, 1))
    if ast.dump(step) != ast.dump(one):
        yield _range(begin, stop, one)
    if ast.dump(begin) != ast.dump(zero):
        yield _range(zero, stop, step)


def loop_once(node):
    if isinstance(node, ast.While):
        yield ast.If(node.test, node.body, [])
        yield []
    if isinstance(node, ast.For):
        yield []


def plain_atomic(node):
    if isinstance(node, ast.Expr) and ast.unparse(node).startswith("cuda.atomic."):
        array, index, value = node.value.args
        target = ast.Subscript(array, index, ast.Store())
        yield ast.AugAssign(target, ast.Add(), value)
        yield ast.Assign([target], value)


def change_shuffle(node):
    name = _called(node) if isinstance(node, ast.Call) else ""
    if name.startswith("shfl_"):
        for other in ("shfl_down_sync", "shfl_up_sync", "shfl_xor_sync", "shfl_sync"):
            yield _with(node, func=_with(node.func, attr=other))
        mask, value, offset = node.args
        for amount in (1, -1):
            yield _with(node, args=[mask, value, _plus(offset, amount)])
        yield _with(node, args=[ast.Constant(0xFFFF), value, offset])


def change_constant(node):
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield ast.Constant(node.value + 1)
        yield ast.Constant(node.value - 1)


def assume_launch(node):
    if isinstance(node, ast.Attribute | ast.Call) and (text := ast.unparse(node)) in LAUNCH:
        for constant in LAUNCH[text]:
            yield ast.parse(constant, mode="eval").body


def drop_statement(node):
    if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr) and not _is_barrier(node):
        yield []


OPERATORS = (
    drop_barrier, drop_guard, negate, relax, shift_index, swap_indices, swap_dimension,
    drop_operand, change_operator, change_range, loop_once, plain_atomic, change_shuffle,
    change_constant, assume_launch, drop_statement,
)  # fmt: skip


# ---- trees -----------------------------------------------------------------------------------


def _paths(node: ast.AST, path: tuple = ()) -> Iterator[tuple]:
    """Yield the way to every node of the body: field names, and positions in lists."""
    yield path
    for field, value in ast.iter_fields(node):
        if field in ("decorator_list", "args") and isinstance(node, ast.FunctionDef):
            continue
        if isinstance(value, ast.AST):
            yield from _paths(value, (*path, field))
        elif isinstance(value, list):
            for position, each in enumerate(value):
                if isinstance(each, ast.AST):
                    yield from _paths(each, (*path, field, position))


def _at(tree: ast.AST, path: tuple):
    return functools.reduce(
        lambda node, step: node[step] if isinstance(step, int) else getattr(node, step), path, tree
    )


def _replaced(tree: ast.AST, path: tuple, replacement: ast.AST | list) -> str:
    """Return the text with the node at `path` replaced: statements by none, or by several."""
    holder, last = _at(tree, path[:-1]), path[-1]
    new = replacement if isinstance(replacement, list) else [replacement]
    for node in new:
        ast.fix_missing_locations(node)
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


def _with(node: ast.AST, **fields):
    """Return a copy of `node` with some fields changed."""
    return type(node)(**{**dict(ast.iter_fields(node)), **fields})


def _plus(node: ast.expr, amount: int) -> ast.expr:
    """Return `node + amount`, as one number where it is one."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return ast.Constant(node.value + amount)
    operator = ast.Add() if amount > 0 else ast.Sub()
    return ast.BinOp(node, operator, ast.Constant(abs(amount)))


def _indices(node: ast.AST):
    """Yield each index of an access, with a function that puts another in its place."""
    if isinstance(node, ast.Subscript) and not _is_shape(node.value):
        if isinstance(node.slice, ast.Tuple):
            for position, part in enumerate(node.slice.elts):

                def changed(_, new, position=position):
                    parts = list(node.slice.elts)
                    parts[position] = new
                    return _with(node, slice=_with(node.slice, elts=parts))

                yield changed, part
        else:
            yield lambda _, new: _with(node, slice=new), node.slice
    if isinstance(node, ast.Call) and ast.unparse(node).startswith("cuda.atomic."):
        yield lambda _, new: _with(node, args=[node.args[0], new, *node.args[2:]]), node.args[1]


def _range_parts(call: ast.Call) -> tuple[ast.expr, ast.expr, ast.expr]:
    begin, step = ast.Constant(0), ast.Constant(1)
    if len(call.args) == 1:
        return begin, call.args[0], step
    return call.args[0], call.args[1], call.args[2] if len(call.args) > 2 else step


def _range(begin: ast.expr, stop: ast.expr, step: ast.expr) -> ast.Call:
    return ast.Call(ast.Name("range"), [begin, stop, step], [])


def _is_shape(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == "shape"


def _is_barrier(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and _called(node.value) in BARRIERS


def _called(node: ast.AST) -> str:
    """Return the last part of the name of what is called, "" if nothing is."""
    if not isinstance(node, ast.Call):
        return ""
    return ast.unparse(node.func).rpartition(".")[2]


def _label(node: ast.AST, replacement: ast.AST | list) -> str:
    before = ast.unparse(node).splitlines()[0].rstrip(":")
    if isinstance(replacement, list) or isinstance(node, ast.If):
        return before
    return f"{before} → {ast.unparse(ast.fix_missing_locations(replacement)).splitlines()[0]}"


def _python(kernel: Callable) -> Callable:
    return getattr(kernel, "py_func", kernel)
