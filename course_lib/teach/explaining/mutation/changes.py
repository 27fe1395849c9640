"""Every change that the operators make in a function. Its text is made only where it is asked for.

A `Change` puts something else at one place, or the same edit at all places that are alike.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import inspect
import itertools
import linecache
import textwrap
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

import course_lib
from course_lib.teach.exercise import python_function
from course_lib.teach.explaining.mutation import edits, edits_apart
from course_lib.teach.explaining.mutation.frame import Frame
from course_lib.teach.explaining.mutation.trees import at, paths, replaced
from course_lib.teach.todo import own_functions

#: All that is known of how a kernel goes wrong. The bank's mutants are those of `edits` alone.
EVERY = (*edits.OPERATORS, *edits_apart.OPERATORS)

_numbers = itertools.count()

#: How far apart the numbers of two functions' lines are: two cells may both have a line 12.
_APART = 1_000_000


@dataclass(frozen=True)
class Change:
    """What stands at `places`, as (path, what it becomes), in the tree of `original`.

    `operator` is the name of what made it; `words` end the sentence "your kernel behaves exactly
    like the right one …".
    """

    original: Callable
    tree: ast.Module
    places: tuple[tuple[tuple, ast.AST | list], ...]
    operator: str
    words: str

    @cached_property
    def text(self) -> str:
        """The whole source, changed."""
        if len(self.places) == 1:
            return replaced(self.tree, *self.places[0])
        tree = copy.deepcopy(self.tree)
        for path, new in self.places:
            holder, last = at(tree, path[:-1]), path[-1]
            if isinstance(last, int):
                holder[last] = new
            else:
                setattr(holder, last, new)
        return ast.unparse(ast.fix_missing_locations(tree))

    def build(self) -> Callable:
        """Compile it in the original's module, so that it is what a learner could have typed."""
        return built(self.text, self.original)

    def pieces(self) -> Iterator[tuple[str, str]]:
        """Yield the texts of what is changed, before and after, statement by statement."""
        for path, new in self.places:
            start, bare = self._changed(path)
            if start == path:
                after = new if isinstance(new, list) else [new]
                fixed = map(ast.fix_missing_locations, after)
                yield unparsed(bare), "\n".join(map(ast.unparse, fixed))
            else:
                holder = ast.Module([bare], [])
                inner = ("body", 0, *path[len(start) :])
                yield unparsed(bare), replaced(holder, inner, new)

    def removed(self) -> Iterator[str]:
        """Yield the lines of the statements that are changed."""
        for path, _ in self.places:
            yield from unparsed(self._changed(path)[1]).splitlines()

    def _changed(self, path: tuple) -> tuple[tuple, ast.stmt]:
        """Return the path of the statement around a place, and it, or its header if that changes.

        The body of a loop or an `if` stays what it is then.
        """
        start = _statement(self.tree, path)
        node = at(self.tree, start)
        whole = start == path or path[len(start)] in ("body", "orelse")
        return start, node if whole else _header(node)


def changes(
    kernel: Callable, operators: Iterable[Callable], tree: ast.Module | None = None
) -> list[Change]:
    """Return all changes at one place. Several of them may have the same text.

    They are made in `tree`, or in the kernel alone where that is left out.
    """
    tree = parsed(kernel) if tree is None else tree
    return [
        Change(kernel, tree, ((path, new),), operator, words)
        for path, operator, new, words, _ in _edits(tree, operators)
    ]


def changes_alike(
    kernel: Callable, operators: Iterable[Callable], tree: ast.Module | None = None
) -> list[Change]:
    """Return the changes that make one edit at all places that are alike, such as h and w.

    Places are alike whose texts differ only in names of one kind.
    """
    tree = parsed(kernel) if tree is None else tree
    groups: dict[tuple, list] = {}
    for path, operator, new, words, frame in _edits(tree, operators):
        if isinstance(new, ast.expr):
            before, after = _by_kinds(at(tree, path), frame), _by_kinds(new, frame)
            groups.setdefault((operator, frame, before, after), []).append((path, new, words))
    found = []
    for (operator, *_), group in groups.items():
        apart = list(_apart(group))
        if len(apart) > 1:
            words = f"{apart[0][2]}, at all {len(apart)} places that are alike"
            places = tuple((path, new) for path, new, _ in apart)
            found.append(Change(kernel, tree, places, operator, words))
    return found


def parsed(kernel: Callable) -> ast.Module:
    """Return the syntax tree of a kernel's source, of decorators only what makes it a kernel.

    Its line numbers are those of the file. Raises OSError or SyntaxError where there is no source.
    """
    lines, first = inspect.getsourcelines(python_function(kernel))
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    function = tree.body[0]
    if not isinstance(function, ast.FunctionDef):
        raise SyntaxError("a lambda's text is no function by itself")
    if function.name != python_function(kernel).__name__:
        raise OSError("the file has changed since, and another function is there")
    function.decorator_list = [d for d in function.decorator_list if "jit" in ast.unparse(d)]
    return tree


def program(kernel: Callable) -> ast.Module:
    """Return the syntax tree of a kernel, and behind it those of its author's functions it calls.

    `located` tells what a line's number in it stands for.
    """
    tree = parsed(kernel)
    for k, function in enumerate(own_functions(python_function(kernel))[1:], start=1):
        with contextlib.suppress(OSError, SyntaxError):
            (helper,) = parsed(function).body
            ast.increment_lineno(helper, k * _APART)
            tree.body.append(helper)
    return tree


def located(kernel: Callable, number: int) -> tuple[Callable, int]:
    """Return the function that a line of `program(kernel)` is in, and its number in the file."""
    k, line = divmod(number, _APART)
    return own_functions(python_function(kernel))[k], line


def in_place(tree: ast.Module, k: int, text: str) -> str:
    """Return the text of a program with another one for its function number k."""
    return "\n".join(text if n == k else ast.unparse(each) for n, each in enumerate(tree.body))


def built(text: str, original: Callable, beside: Callable | None = None) -> Callable:
    """Return the function or kernel that `text` defines first, with all that `original` knows.

    What it doesn't know, such as a module, is what `beside` knows by that name. Raises SyntaxError
    for a text that holds anything but functions.
    """
    tree = ast.parse(text)
    if not all(isinstance(each, ast.FunctionDef) for each in tree.body):
        raise SyntaxError("a line of the function is outside of it")
    file = f"<mutant {next(_numbers)}>"
    # Where the simulator, like a debugger, finds the text of code that is in no file.
    linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    function = python_function(original)
    around = inspect.getclosurevars(function).nonlocals
    space = {"cuda": course_lib.cuda, **function.__globals__, **around}
    if beside is not None:
        space = {**python_function(beside).__globals__, **space}
    with warnings.catch_warnings(action="ignore"):  # nobody asked for what is tried
        exec(compile(tree, file, "exec"), space)
    return space[function.__name__]


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget the text of all that is built inside, which would only fill the memory."""
    before = set(linecache.cache)
    try:
        yield
    finally:
        for file in set(linecache.cache) - before:
            if file.startswith("<mutant "):
                del linecache.cache[file]


def _edits(tree, operators):
    for k, function in enumerate(tree.body):
        frame = Frame(function, called=k > 0)
        for path in list(paths(function, ("body", k))):
            node = at(tree, path)
            for operator in operators:
                for new, words in operator(node, frame):
                    yield path, operator.__name__, new, words, frame


def _statement(tree: ast.Module, path: tuple) -> tuple:
    """Return the path of the innermost statement around what `path` leads to."""
    for end in range(len(path), 0, -1):
        if isinstance(at(tree, path[:end]), ast.stmt):
            return path[:end]
    return path


@lru_cache(maxsize=4096)
def unparsed(node: ast.AST) -> str:
    """Return the text of a node, which must not change after that."""
    return ast.unparse(node)


@lru_cache(maxsize=4096)
def _header(node: ast.stmt) -> ast.stmt:
    """Return a statement without the statements inside it."""
    if not hasattr(node, "body"):
        return node
    bare = copy.copy(node)
    bare.body = [ast.Pass()]
    if hasattr(bare, "orelse"):
        bare.orelse = []
    return bare


def _by_kinds(node: ast.expr, frame: Frame) -> str:
    """Return the structure of an expression with names of one kind made equal."""
    text = ast.dump(node)
    for name, kind in frame.kinds.items():
        text = text.replace(f"id='{name}'", f"id='<{kind}>'")
    return text


def _apart(group) -> Iterator[tuple]:
    """Yield the edits of which none lies within another, nor at the same place."""
    taken: list[tuple] = []
    for path, new, words in group:
        if not any(path[: len(p)] == p or p[: len(path)] == path for p in taken):
            taken.append(path)
            yield path, new, words
