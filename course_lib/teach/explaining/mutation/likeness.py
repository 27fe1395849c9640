"""Which form of the solution, and which changes of it, are nearest to the learner's code."""

from __future__ import annotations

import ast
import copy
import inspect
import re
from collections import Counter
from collections.abc import Callable, Iterable

from course_lib.teach.exercise import Exercise, python_function
from course_lib.teach.explaining.mutation.changes import Change, built, parsed
from course_lib.teach.explaining.mutation.frame import Frame
from course_lib.teach.explaining.mutation.trees import called, is_range, range_parts

_TOKEN = re.compile(r"[A-Za-z_]\w*|\d+\.?\d*|\*\*|//|<=|>=|==|!=|\S")
_KNOWN = frozenset(
    "cuda np math numpy if else for while in range return and or not max min abs def break "
    "continue pass float32 x y z shape size threadIdx blockIdx blockDim gridDim grid gridsize"
    .split()
)  # fmt: skip


def forms(exercise: Exercise) -> list[Callable]:
    """Return the solution, and it in each of its other forms."""
    source, found = inspect.getsource(python_function(exercise.solution)), [exercise.solution]
    for pieces in exercise.forms:
        text = source
        for old, new in zip(pieces[::2], pieces[1::2], strict=True):
            if old not in text:
                raise ValueError(f"{exercise.name}: its solution has no {old!r}")
            text = text.replace(old, new)
        found.append(built(text, exercise.solution))
    return found


def nearest_form(exercise: Exercise, goal: ast.Module) -> Callable:
    """Return the form of the solution that is most like the goal."""
    if not exercise.forms:
        return exercise.solution
    wanted = _Tokens(goal).count(ast.unparse(goal.body[0]))

    def likeness(form: Callable) -> float:
        tree = parsed(form)
        has = _Tokens(tree).count(ast.unparse(tree))
        return (wanted & has).total() / (wanted | has).total()

    return max(forms(exercise), key=likeness)


def nearest_first(changes: Iterable[Change], goal: ast.Module) -> list[Change]:
    """Return the changes of a program, those first after which it is most like the goal."""
    changes = list(changes)
    if not changes:
        return []
    start = changes[0].tree
    own, others = _Tokens(goal), _Tokens(start)
    lacking = own.count(ast.unparse(goal))
    lacking.subtract(others.count(ast.unparse(start)))

    def gain(change: Change) -> float:
        moved: Counter = Counter()
        for before, after in change.pieces():
            moved.update(others.count(after))
            moved.subtract(others.count(before))
        nearer = sum(abs(lacking[k]) - abs(lacking[k] - by) for k, by in moved.items())
        return nearer - 0.01 * sum(map(abs, moved.values()))

    return sorted(changes, key=gain, reverse=True)


def same_code(text: str, learners: ast.Module) -> bool:
    """Tell whether a text is the learner's code, up to names and what is written in one line."""
    one, other = (list(map(_canonical, tree.body)) for tree in (ast.parse(text), learners))
    return one == other


def _canonical(function: ast.FunctionDef) -> list[str]:
    """Return the tokens of a function's body, its own names numbered where they come first."""
    numbers: dict[str, int] = {}
    arguments = [each.arg for each in function.args.args]
    own = {*arguments, *(n.id for n in ast.walk(function) if _is_set(n))}
    for name in arguments:
        numbers.setdefault(name, len(numbers))
    found = []
    for node in function.body:
        node = _Shortened().visit(copy.deepcopy(node))
        for token in _TOKEN.findall(ast.unparse(node)):
            found.append(f"${numbers.setdefault(token, len(numbers))}" if token in own else token)
    return found


class _Shortened(ast.NodeTransformer):
    """Writes `range(0, n, 1)` as `range(n)`, and `np.float32(1)` as `1`."""

    def visit_Call(self, node):
        self.generic_visit(node)
        if called(node) == "float32" and len(node.args) == 1:
            return node.args[0] if isinstance(node.args[0], ast.Constant) else node
        if is_range(node) and len(node.args) > 1:
            begin, stop, step = map(ast.unparse, range_parts(node))
            if (begin, step) == ("0", "1"):
                node.args = [ast.parse(stop, mode="eval").body]
            elif step == "1":
                node.args = node.args[:2]
        return node


def _is_set(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


class _Tokens:
    """Counts what stands beside what in a text: with parameters by their place, and names bare."""

    def __init__(self, tree: ast.Module):
        parameters = Frame(tree.body[0]).parameters
        self.places = {name: f"${k}" for k, name in enumerate(parameters)}

    def count(self, text: str) -> Counter:
        """Return how often any three tokens follow each other, as they are and without names."""
        found: Counter = Counter()
        for line in text.splitlines():
            raw = [self.places.get(each, each) for each in _TOKEN.findall(line)]
            bare = [each if _is_fixed(each) else "name" for each in raw]
            for tokens in (raw, bare):
                tokens = ["<", *tokens, ">"]
                found.update(zip(tokens, tokens[1:], tokens[2:], strict=False))
        return found


def _is_fixed(token: str) -> bool:
    return token[0] == "$" or token in _KNOWN or not token.isidentifier()
