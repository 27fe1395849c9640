"""A piece of right code in place of the learner's: where one is enough, what it replaces is wrong.

The learner's lines are aligned with those of the solution. Then one difference at a time is done
away with, in the learner's names: an expression or a line is replaced, a line put in, taken out, or
moved. What passes every case after that is right code in the learner's own form, and shows which
line was not.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from course_lib.teach.explaining.mutation.changes import in_place, program
from course_lib.teach.explaining.mutation.inlining import inlined, set_once
from course_lib.teach.explaining.mutation.lines import (
    Line,
    aligned,
    difference,
    head,
    lines_of,
    translated,
    translation,
    written,
)
from course_lib.teach.explaining.mutation.trees import at, is_store, names_in, paths, replaced


@dataclass(frozen=True)
class Graft:
    """The learner's code with one difference less, and the number of the line that it is in.

    It is `sure` that the piece belongs there if the lines around it, or what it replaces, are like
    those in the right code. Where it is `missing` from the learner's, it comes before that line.
    """

    text: str
    line: int
    sure: bool = True
    missing: bool = False


def grafts(learners: ast.Module, solution: Callable) -> Iterator[Graft]:
    """Yield the learner's code with each one of its differences from the solution undone.

    Whole lines come first, then expressions in them.
    """
    seen, functions = set(), program(solution).body
    some = range(1, len(functions))
    pairs = [(k, j) for k in range(1, len(learners.body)) for j in (0, *some)]
    for k, j in [(0, 0), *pairs, *((0, j) for j in some)]:
        for graft in _grafts_of(learners.body[k], functions[j], k == j == 0):
            text = in_place(learners, k, graft.text)
            if text not in seen:
                seen.add(text)
                yield replace(graft, text=text)


def _grafts_of(
    function: ast.FunctionDef, right_function: ast.FunctionDef, same: bool
) -> Iterator[Graft]:
    """Yield those of one function; `same`: its parameters are the right one's."""
    own, known = lines_of(function), _local(function).union(_parameters(function))
    right, home = _beside(right_function, function, own, same)
    forms = [(right, home, True)]
    if values := set_once(right_function, set(range(len(right))) - home.keys(), known):
        without = inlined(right_function, values)
        right, home = _beside(without, function, own, same)
        forms.append((right, home, len(home) == len(own)))
    for right, home, alike in forms:
        for sure, undone in ((True, _with_one_undone), (False, _with_a_piece)):
            for lines, number in undone(own, right, home):
                missing = len(lines) > len(own)
                yield Graft(written(head(function), lines), number, sure and alike, missing)


def _beside(
    right_function: ast.FunctionDef, function: ast.FunctionDef, own: list[Line], same: bool
) -> tuple[list[Line], dict[int, int]]:
    """Return the lines of the right code in the learner's names, and which own line each is like.

    Lines are alike that look alike, or set the same name between lines that look alike.
    """
    right = lines_of(right_function)
    home = aligned(right, own)
    right = [part for n, line in enumerate(right) for part in _apart_if(line, own, home.get(n))]
    home = aligned(right, own)
    names = translation(right, own, home)
    known = _local(function).union(_parameters(function))
    theirs = _local(right_function).union([] if same else _parameters(right_function))
    names = {n: names[n] for n in theirs & names.keys() if names[n] in known}
    if same:
        names |= dict(zip(_parameters(right_function), _parameters(function), strict=False))
    counters = _counters(right, own, home)
    right = [
        replace(line, text=translated(line.text, names | counters.get(n, {})))
        for n, line in enumerate(right)
    ]
    for n in range(len(right)):
        target, sets, _ = right[n].text.partition(" = ")
        if n not in home and sets:
            low = max((home[k] for k in home if k < n), default=-1)
            high = min((home[k] for k in home if k > n), default=len(own))
            same = [k for k in range(low + 1, high) if own[k].text.startswith(f"{target} = ")]
            if len(same) == 1:
                home[n] = same[0]
    return right, dict(sorted(home.items()))


def _apart_if(line: Line, own: list[Line], k: int | None) -> list[Line]:
    """Return a line that sets several names as one for each, where the own line sets but one."""
    tuples = _tuple_set(line.text)
    if k is None or tuples is None or _tuple_set(own[k].text) or " = " not in own[k].text:
        return [line]
    names, values = tuples
    set_before = (set(re.findall(r"\w+", " ".join(names[:n]))) for n in range(len(names)))
    later = any(names_in(value) & known for value, known in zip(values, set_before, strict=False))
    if later or len(names) != len(values):
        return [line]
    each = zip(names, values, strict=True)
    return [replace(line, text=f"{name} = {ast.unparse(value)}") for name, value in each]


def _tuple_set(text: str) -> tuple[list[str], list[ast.expr]] | None:
    """Return what a line sets to the parts of a tuple, and these; None if it does no such thing."""
    tree = _statement(text)
    line = tree.body[0] if isinstance(tree, ast.Module) and tree.body else None
    if isinstance(line, ast.Assign) and isinstance(line.value, ast.Tuple):
        target = line.targets[0]
        parts = target.elts if isinstance(target, ast.Tuple) else [target]
        return [ast.unparse(each) for each in parts], line.value.elts
    return None


def _counters(
    right: list[Line], own: list[Line], home: dict[int, int]
) -> dict[int, dict[str, str]]:
    """Return what the learner calls the counters of loops, for each line inside: k may be two."""
    found: dict[int, dict[str, str]] = {}
    for n, k in home.items():
        theirs, ours = (re.match(r"for (\w+) in ", each.text) for each in (right[n], own[k]))
        if theirs and ours:
            for line in (n, *_block(right, n)):
                found.setdefault(line, {})[theirs[1]] = ours[1]
    return found


def _parameters(function: ast.FunctionDef) -> list[str]:
    return [each.arg for each in function.args.args]


def _local(function: ast.FunctionDef) -> set[str]:
    """Return the names that a function sets itself."""
    return {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and is_store(n)}


def _with_one_undone(
    own: list[Line], right: list[Line], home: dict[int, int]
) -> Iterator[tuple[list[Line], int]]:
    """Yield what is right after a line is replaced, moved, put in or taken out; and which it is."""
    missing, extra = _apart(own, right, home)
    for n, k in home.items():
        if _returns(own[k]) == _returns(right[n]):  # what comes after it would never run
            yield from _put(own, k, right[n].text)
    yield from _with_definitions(own, right, home)
    for n, k in home.items():
        shift = _depth(right, own, home, n) - own[k].depth
        if shift and not _opens(own[k].text):
            moved = replace(own[k], depth=own[k].depth + shift)
            yield [*own[:k], moved, *own[k + 1 :]], own[k].number
    for n in missing:
        if _returns(right[n]) and any(map(_returns, own)):
            continue
        lines, number = _put_in(own, right, home, n)
        for k in extra:
            if own[k].text == right[n].text:  # it stands elsewhere
                yield [each for each in lines if each is not own[k]], own[k].number
        yield lines, number
    for k in extra:
        yield _taken_out(own, k), own[k].number
    yield from _with_twins(own, right, home)
    yield from _like_another(own)
    for n, k in home.items():
        for text in _with_one_piece(own[k].text, right[n].text):
            yield from _put(own, k, text)


def _with_definitions(
    own: list[Line], right: list[Line], home: dict[int, int]
) -> Iterator[tuple[list[Line], int]]:
    """Yield what is right after a name used once is set to what the right code has in its place."""
    places = {use: (name, place) for name, place, use in _used_once(own)}
    for n, k in home.items():
        name, place = places.get(k, ("", 0))
        if name and _opens(own[k].text) == _opens(right[n].text):
            tree = _statement(own[k].text)
            for path, new in _differing(tree, _statement(right[n].text)):
                if ast.unparse(at(tree, path)) == name:
                    yield from _put(own, place, f"{name} = {ast.unparse(new)}")


def _used_once(own: list[Line]) -> Iterator[tuple[str, int, int]]:
    """Yield each name that is set in one line and stands in but one other, and these lines."""
    for place, line in enumerate(own):
        name = line.text.partition(" = ")[0]
        if name.isidentifier() and " = " in line.text:
            word = re.compile(rf"\b{name}\b")
            those = [k for k, each in enumerate(own) for _ in word.findall(each.text)]
            if len(those) == 2 and those[0] == place:
                yield name, place, those[1]


def definitions(function: ast.FunctionDef) -> dict[int, int]:
    """Return for the number of a line that of the one which sets what is used there alone."""
    own = lines_of(function)
    return {own[use].number: own[place].number for _, place, use in _used_once(own)}


def _with_twins(
    own: list[Line], right: list[Line], home: dict[int, int]
) -> Iterator[tuple[list[Line], int]]:
    """Yield what is right after one difference that several lines have, such as r and s."""
    twins: dict[tuple, list[tuple[int, int]]] = {}
    for n, k in home.items():
        if own[k].text != right[n].text:
            twins.setdefault(difference(own[k].text, right[n].text), []).append((n, k))
    for pairs in twins.values():
        if len(pairs) > 1:
            new = {k: right[n].text for n, k in pairs}
            lines = [replace(line, text=new.get(k, line.text)) for k, line in enumerate(own)]
            yield lines, own[pairs[0][1]].number


def _like_another(own: list[Line]) -> Iterator[tuple[list[Line], int]]:
    """Yield the lines with one made like another of them, which has a piece more: h is, w is not.

    Both set a name, to the same up to names and that piece.
    """
    for k, line in enumerate(own):
        for other in own:
            if other is not line and all(_tuple_set(x.text) is None for x in (line, other)):
                pieces = difference(line.text, other.text)
                if len(pieces) == 1 and not pieces[0][0] and "name" in pieces[0][1]:
                    names = translation([other], [line], {0: 0})
                    yield from _put(own, k, translated(other.text, names))


def _with_a_piece(
    own: list[Line], right: list[Line], home: dict[int, int]
) -> Iterator[tuple[list[Line], int]]:
    """Yield the same for lines that are unlike, and for pieces that may belong anywhere."""
    others = [*itertools.product(*_apart(own, right, home))]
    for n, k in others:
        if _opens(own[k].text) == _opens(right[n].text) and _returns(own[k]) == _returns(right[n]):
            yield from _put(own, k, right[n].text)
    for n, k in others:
        for text in _with_one_piece(own[k].text, right[n].text):
            yield from _put(own, k, text)
    for k, line in enumerate(own):
        for text in _wrapped(line.text, own, right):
            yield from _put(own, k, text)


def _apart(own: list[Line], right: list[Line], home: dict[int, int]) -> tuple[list, list]:
    """Return the numbers of the right lines that the learner lacks, and of those that are extra."""
    missing = [n for n in range(len(right)) if n not in home]
    return missing, sorted(set(range(len(own))) - set(home.values()))


def _put(own: list[Line], place: int, text: str) -> Iterator[tuple[list[Line], int]]:
    """Yield the lines with another text for one, and for all like it: some mistakes are copied."""
    old = own[place]
    alike = [n for n, line in enumerate(own) if line.text == old.text]
    for places in ([place], alike):
        lines = [replace(each, text=text) if n in places else each for n, each in enumerate(own)]
        yield lines, old.number


def _with_one_piece(own: str, right: str) -> Iterator[str]:
    """Yield a line with one expression of another line of its kind."""
    if _opens(own) == _opens(right):
        ours, theirs = _statement(own), _statement(right)
        for path, new in _differing(ours, theirs):
            yield replaced(ours, path, new).partition("\n")[0]


def _differing(ours: ast.AST, theirs: ast.AST, path: tuple = ()) -> Iterator[tuple]:
    """Yield where expressions differ, and what stands there instead, from the inside out."""
    if ast.dump(ours) == ast.dump(theirs):
        return
    if type(ours) is type(theirs):
        for field, value in ast.iter_fields(ours):
            other = getattr(theirs, field)
            if isinstance(value, ast.expr) and isinstance(other, ast.expr):
                yield from _differing(value, other, (*path, field))
            elif isinstance(value, list) and len(value) == len(other):
                for k, pair in enumerate(zip(value, other, strict=True)):
                    if all(isinstance(each, ast.AST) for each in pair):
                        yield from _differing(*pair, (*path, field, k))
    if isinstance(ours, ast.expr) and isinstance(theirs, ast.expr):
        yield path, theirs


def _wrapped(text: str, own: list[Line], right: list[Line]) -> Iterator[str]:
    """Yield a line with an expression in it made part of one that only the right code has."""
    tree = _statement(text)
    known = {ast.dump(each) for line in own for each in _expressions(_statement(line.text))}
    for line in right:
        for whole in _expressions(_statement(line.text)):
            if ast.dump(whole) not in known and isinstance(whole, ast.BinOp | ast.Call):
                parts = set(map(ast.dump, _operands(whole)))
                for path in paths(tree):
                    here = at(tree, path)
                    if isinstance(here, ast.expr) and ast.dump(here) in parts:
                        yield replaced(tree, path, whole).partition("\n")[0]


def _operands(whole: ast.BinOp | ast.Call) -> list[ast.expr]:
    return [whole.left, whole.right] if isinstance(whole, ast.BinOp) else whole.args


def _expressions(tree: ast.AST) -> list[ast.expr]:
    return [each for each in ast.walk(tree) if isinstance(each, ast.expr)]


def _statement(text: str) -> ast.AST:
    """Return the tree of a line, which may be the first of a block; an empty one for `else:`."""
    try:
        return ast.parse(text + (" pass" if _opens(text) else ""))
    except SyntaxError:
        return ast.Module([], [])


def _opens(text: str) -> bool:
    return text.endswith(":")


def _returns(line: Line) -> bool:
    return line.text.startswith("return")


def _depth(right: list[Line], own: list[Line], home: dict[int, int], n: int) -> int:
    """Return how deep line `n` of the right code is in the learner's: as its neighbour is there."""
    for k in (*range(n - 1, -1, -1), *range(n + 1, len(right))):
        if k in home:
            return own[home[k]].depth + right[n].depth - right[k].depth
    return right[n].depth


def _put_in(
    own: list[Line], right: list[Line], home: dict[int, int], n: int
) -> tuple[list[Line], int]:
    """Return the learner's lines with line `n` of the right code or its block put in; and where."""
    before = [home[k] for k in range(n) if k in home]
    place = max(before, default=-1) + 1
    depth, block, below = _depth(right, own, home, n), _block(right, n), own[place:]
    new = [Line(depth, right[n].text)]
    if inside := [home[k] for k in block if k in home]:  # becomes deeper in the learner's
        below = [
            replace(each, depth=each.depth + (k <= max(inside)))
            for k, each in enumerate(below, start=place)
        ]
    else:  # what it holds is missing as well
        new += [Line(right[k].depth + depth - right[n].depth, right[k].text) for k in block]
    number = own[min(place, len(own) - 1)].number
    return [*own[:place], *new, *below], number


def _block(lines: list[Line], n: int) -> range:
    """Return the numbers of the lines inside of line `n`."""
    end = n + 1
    while end < len(lines) and lines[end].depth > lines[n].depth:
        end += 1
    return range(n + 1, end)


def _taken_out(own: list[Line], k: int) -> list[Line]:
    inside = _block(own, k)
    return [
        replace(line, depth=line.depth - (n in inside)) for n, line in enumerate(own) if n != k
    ]
