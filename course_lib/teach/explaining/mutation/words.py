"""What the learner's code does otherwise than the right code made of it, in words.

An edit of the right code that makes the learner's has its words. Where none does, the smallest
expressions that differ are shown. Names that only the right code has are not.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from course_lib.teach.explaining.mutation.changes import changes, changes_alike
from course_lib.teach.explaining.mutation.frame import KINDS, Frame
from course_lib.teach.explaining.mutation.trees import called, names_in

#: The longest expression that a sentence quotes.
MOST_QUOTED = 30

#: What an operator adds to a formula.
PARTS = {
    ast.Add: "one part of a sum",
    ast.Sub: "one part of a difference",
    ast.Mult: "one factor",
    ast.Div: "one division",
}


def words_for(
    repaired: str,
    learners: ast.Module,
    original: Callable,
    operators: Iterable,
) -> str:
    """Return what is otherwise in the learner's code than in the repaired; "" if that is much."""
    tree = ast.parse(repaired)
    text = ast.unparse(learners)
    lines = Counter(map(str.strip, text.splitlines()))
    gone = Counter(map(str.strip, ast.unparse(tree).splitlines())) - lines
    about = original, operators, tree
    for change in (*changes(*about), *changes_alike(*about)):
        if gone and not any(line.strip() in gone for line in change.removed()):
            continue  # a line that the learner lacks is not changed
        after = [line.strip() for _, piece in change.pieces() for line in piece.splitlines()]
        # The whole text is made only where the piece that is changed stands in the learner's.
        if all(line in lines for line in after if line != "pass") and change.text == text:
            return change.words
    both = zip(tree.body, learners.body, strict=True)
    right, own = next(
        (pair for pair in both if ast.dump(pair[0]) != ast.dump(pair[1])),
        (tree.body[0], learners.body[0]),
    )
    frame, known = Frame(own), names_in(own) | {"abs", "max", "min"}
    if _without_brackets(right) == _without_brackets(own):
        return "with its brackets elsewhere"
    pairs = list(_apart(right, own))
    for k, pair in enumerate(pairs):
        inside = any(isinstance(own, ast.Subscript) for _, own in pairs[k + 1 : k + 3])
        if inside and isinstance(pair[1], ast.Constant | ast.Tuple):
            continue  # alone it says nothing: the whole access does
        if words := _told(*pair, known) or _told_of_many(*pair, learners, frame):
            around = [own for _, own in pairs[k + 1 :] if isinstance(own, ast.Subscript)]
            if around and words.endswith(tuple(PARTS.values())):
                words += f" in an index of {ast.unparse(around[0].value)}"
            return words
    return ""


def _without_brackets(function: ast.AST) -> str:
    return ast.unparse(function).replace("(", "").replace(")", "")


def _apart(right: ast.AST, own: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """Yield the expressions and statements around all that differs, from the inside out.

    What differs in several places in the same way, up to names, is told of the first.
    """
    if type(right) is type(own):
        pairs = []
        for field, value in ast.iter_fields(right):
            other = getattr(own, field)
            several = isinstance(value, list) and len(value) == len(other)
            pairs += zip(value, other, strict=True) if several else [(value, other)]
        apart = [pair for pair in pairs if _dumped(pair[0]) != _dumped(pair[1])]
        if len(apart) == 1 and isinstance(apart[0][0], ast.AST):
            yield from _apart(*apart[0])
        elif all(isinstance(each, ast.AST) for each, _ in apart):
            chains = [list(_apart(*pair)) for pair in apart]
            if all(chains) and len({_without_names(chain[0]) for chain in chains}) == 1:
                yield from chains[0]
                return
    if all(isinstance(each, ast.expr | ast.stmt) for each in (right, own)):
        yield right, own


def _without_names(pair: tuple[ast.AST, ast.AST]) -> tuple[str, ...]:
    return tuple(re.sub("id='[^']*'", "", ast.dump(each)) for each in pair)


def _dumped(value) -> str:
    if isinstance(value, list):
        return repr([_dumped(each) for each in value])
    return ast.dump(value) if isinstance(value, ast.AST) else repr(value)


def _told(right: ast.AST, own: ast.AST, known: set[str]) -> str:
    """Return the words for one expression or statement in the place of another.

    Both are shown as they are written, the right one if the learner knows its names.
    """
    if isinstance(own, ast.Expr) and isinstance(right, ast.Assign | ast.AugAssign | ast.Return):
        return "with a result that is thrown away" if _holds([right.value], own.value) else ""
    if isinstance(right, ast.Call) and _holds(right.args, own):
        return f"without {_public(right)}"
    if isinstance(own, ast.Call) and _holds(own.args, right):
        return f"with {_public(own)} too much"
    if isinstance(right, ast.BinOp) and _holds((right.left, right.right), own):
        return f"without {PARTS.get(type(right.op), 'one part of a formula')}"
    if isinstance(own, ast.expr) and isinstance(right, ast.expr):
        mine, its = ast.unparse(own), ast.unparse(right)
        if max(len(mine), len(its)) <= MOST_QUOTED and names_in(right) <= known:
            return f"with `{mine}` in place of `{its}`"
    return ""


def _told_of_many(right: ast.AST, own: ast.AST, learners: ast.Module, frame: Frame) -> str:
    """Return the words for a condition, or for a formula with several other names in it."""
    tests = [n.test for n in ast.walk(learners) if isinstance(n, ast.If | ast.While | ast.IfExp)]
    if own in tests:
        return "with another condition"
    ours, theirs = list(ast.walk(own)), list(ast.walk(right))
    if list(map(type, ours)) == list(map(type, theirs)):
        pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if isinstance(a, ast.Name)]
        kinds = {frame.kinds.get(a.id) for a, b in pairs if a.id != b.id}
        if len(kinds) == 1 and (kind := kinds.pop()) in KINDS:
            return f"with {'indices' if kind == 'index' else kind + 's'} in place of others"
    return ""


def _holds(parts, node: ast.expr) -> bool:
    return any(ast.dump(part) == ast.dump(node) for part in parts)


def _public(call: ast.Call) -> str:
    """Return a function's name if everybody knows it."""
    text = ast.unparse(call.func)
    known = text.partition(".")[0] in ("cuda", "math", "np") or text in ("max", "min", "abs", "int")
    return called(call) if known and not names_in(call.func) - {"cuda", "math", "np", text} else (
        "one of its calls"
    )
