"""Code as lines that can be compared, aligned with other code, and patched."""

from __future__ import annotations

import ast
import copy
import difflib
import keyword
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

_NAME = re.compile(r"[A-Za-z_]\w*")
_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+\.?\d*|\*\*|//|<=|>=|==|!=|\S")


@dataclass(frozen=True)
class Line:
    """One line: how deep it is indented, its text, and its number in the file (0: in none)."""

    depth: int
    text: str
    number: int = 0


def lines_of(function: ast.FunctionDef) -> list[Line]:
    """Return the body of a function, a statement or a header in each line."""
    return list(_lines(function.body, 0))


def _lines(body: list[ast.stmt], depth: int) -> Iterator[Line]:
    for node in body:
        if not hasattr(node, "body"):
            yield Line(depth, ast.unparse(node), getattr(node, "lineno", 0))
            continue
        header = copy.copy(node)
        header.body, header.orelse = [ast.Pass()], []
        *texts, _ = ast.unparse(header).splitlines()
        for text in texts:  # a function's decorators come before it
            yield Line(depth, text, getattr(node, "lineno", 0))
        yield from _lines(node.body, depth + 1)
        if getattr(node, "orelse", None):
            yield Line(depth, "else:", getattr(node.orelse[0], "lineno", 0))
            yield from _lines(node.orelse, depth + 1)


def head(function: ast.FunctionDef) -> str:
    """Return the text of a function down to its parameters, decorators included."""
    lines = ast.unparse(function).splitlines()
    return "\n".join(lines[: 1 + next(k for k, s in enumerate(lines) if s.startswith("def "))])


def written(head: str, lines: list[Line]) -> str:
    """Return the text of a function with that head and these lines in its body."""
    return "\n".join([head, *(f"{'    ' * (each.depth + 1)}{each.text}" for each in lines)])


def patched(
    own: list[Line], wrong: list[Line], right: list[Line]
) -> tuple[list[Line], list[int]] | None:
    """Do to `own` what makes `wrong` right; return it, and the numbers of the lines concerned.

    As one merges changes of a text: own lines are aligned with the wrong ones, and take over what
    the right ones have instead, in the names of `own`. None where they can't be aligned.
    """
    home = aligned(wrong, own)
    names = translation(wrong, own, home)
    deeper = [0] * len(own)
    gone: set[int] = set()
    added: dict[int, list[Line]] = {}  # what comes behind which own line; -1: at the top
    concerned: list[int] = []
    texts = [each.text for each in wrong], [each.text for each in right]
    behind = -1
    for tag, i, j, k, m in difflib.SequenceMatcher(None, *texts, autojunk=False).get_opcodes():
        places = [home[n] for n in range(i, j) if n in home]
        if tag == "equal":
            for one, other in zip(range(i, j), range(k, m), strict=True):
                if one in home:
                    # Own lines before it, which the wrong one lacks, move with it.
                    for place in range(behind + 1, home[one] + 1):
                        deeper[place] = right[other].depth - wrong[one].depth
                    behind = home[one]
            continue
        if len(places) < j - i:
            return None
        shift = _shift(wrong, own, home, i if places else i - 1)
        new = [Line(r.depth + shift, translated(r.text, names)) for r in right[k:m]]
        anchor = min(places) if places else behind
        added.setdefault(anchor, []).extend(new)
        gone.update(places)
        if places:
            concerned += _changed(own, places, new)
            behind = max(places)
        else:
            opens = new[-1].text.endswith(":") and behind + 1 < len(own)
            concerned.append(own[behind + 1 if opens else max(behind, 0)].number)
    merged = list(added.get(-1, []))
    for n, line in enumerate(own):
        if n not in gone:
            merged.append(replace(line, depth=line.depth + deeper[n]))
        merged += added.get(n, [])
    return merged, concerned


def _changed(own: list[Line], places: list[int], new: list[Line]) -> list[int]:
    """Return the numbers of the own lines that become others: some may be what they should be."""
    same = len(places) == len(new)
    return [
        own[place].number
        for k, place in enumerate(places)
        if not same or own[place].text != new[k].text
    ]


def _shift(wrong: list[Line], own: list[Line], home: dict[int, int], place: int) -> int:
    """Return how much deeper own lines are than the wrong ones at this place, or before it."""
    for n in range(place, -1, -1):
        if n in home:
            return own[home[n]].depth - wrong[n].depth
    return 0


def aligned(wrong: list[Line], own: list[Line]) -> dict[int, int]:
    """Return for each wrong line the own line that is most like it, in order: by least cost."""
    a, b = [[_bare(x.text) for x in each] for each in (wrong, own)]
    stored = [[_element(x.text) for x in each] for each in (wrong, own)]
    gains = [
        [_likeness(x, y) + (s == t != "") for y, t in zip(b, stored[1], strict=True)]
        for x, s in zip(a, stored[0], strict=True)
    ]
    best = [[0.0] * (len(b) + 1) for _ in range(len(a) + 1)]
    for i in range(len(a) - 1, -1, -1):
        for j in range(len(b) - 1, -1, -1):
            best[i][j] = max(best[i + 1][j], best[i][j + 1], gains[i][j] + best[i + 1][j + 1])
    found, i, j = {}, 0, 0
    while i < len(a) and j < len(b):
        if gains[i][j] > 0 and best[i][j] == gains[i][j] + best[i + 1][j + 1]:
            found[i] = j
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return found


def _element(text: str) -> str:
    """Return the array that a line sets an element of, "" if it does no such thing."""
    found = re.match(r"(\w+)\[.*?\] [^=]?= ", text)
    return found[1] if found else ""


def _likeness(one: Counter, other: Counter) -> float:
    common = sum((one & other).values())
    share = 2 * common / max(1, sum(one.values()) + sum(other.values()))
    return share if share > 0.4 else 0.0


def _bare(text: str) -> Counter:
    """Count a line's tokens, with names and without, so that other names cost little."""
    tokens = _TOKEN.findall(text)
    bare = ["name" if _NAME.fullmatch(each) else each for each in tokens]
    return Counter(tokens) + Counter(zip(bare, bare[1:], strict=False))


def difference(own: str, right: str) -> tuple:
    """Return what is other in two lines, with all names made equal: twins differ in the same."""
    one, other = (
        ["name" if _is_name(each) else each for each in _TOKEN.findall(text)]
        for text in (own, right)
    )
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    apart = [places for tag, *places in matcher.get_opcodes() if tag != "equal"]
    return tuple((_early(one, i, j, k < m), _early(other, k, m, i < j)) for i, j, k, m in apart)


def _early(tokens: list[str], start: int, stop: int, fixed: bool) -> tuple[str, ...]:
    """Return a piece that is put in, as early as it may: `a *` of `a * b[c]`, and not `* b`."""
    while not fixed and 0 < start < stop and tokens[start - 1] == tokens[stop - 1]:
        start, stop = start - 1, stop - 1
    return tuple(tokens[start:stop])


def translation(wrong: list[Line], own: list[Line], home: dict[int, int]) -> dict[str, str]:
    """Return what own lines call the names of the wrong ones, by the lines that are alike.

    A name that both have is the same one unless several lines, or all, say that it is not.
    """
    votes: dict[str, Counter] = {}
    known = {token for line in own for token in _TOKEN.findall(line.text)}
    for n, at in home.items():
        for x, y in _paired(_TOKEN.findall(wrong[n].text), _TOKEN.findall(own[at].text)):
            if _is_name(x) and _is_name(y):
                votes.setdefault(x, Counter([x] if x in known else []))[y] += 1
    return {name: count.most_common(1)[0][0] for name, count in votes.items()}


def _is_name(token: str) -> bool:
    return bool(_NAME.fullmatch(token)) and not keyword.iskeyword(token)


def _paired(one: list[str], other: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the tokens of two lines that stand for each other: equal ones, then names between."""
    i = j = 0
    matcher = difflib.SequenceMatcher(None, one, other, autojunk=False)
    for k, m, size in matcher.get_matching_blocks():
        between = one[i:k], other[j:m]
        bare = [["name" if _NAME.fullmatch(t) else t for t in each] for each in between]
        inner = difflib.SequenceMatcher(None, *bare, autojunk=False)
        for a, b, length in inner.get_matching_blocks():
            yield from zip(between[0][a : a + length], between[1][b : b + length], strict=True)
        yield from zip(one[k : k + size], other[m : m + size], strict=True)
        i, j = k + size, m + size


def translated(text: str, names: dict[str, str]) -> str:
    return _NAME.sub(lambda found: names.get(found[0], found[0]), text)
