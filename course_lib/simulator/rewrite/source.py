"""Find the syntax tree of a function, or say that there is none.

A function's file, or cell, is compiled again. The function's tree is used only if that gives the
function's own instructions at its own lines and columns: what is read later than it was compiled
may have been edited since, and several lambdas may stand on one line.
"""

import __future__

import ast
import copy
import functools
import inspect
import linecache
import operator
import types
import warnings

from course_lib.simulator.rewrite.tree import children

#: The flags of code under a `from __future__ import`.
_FUTURE = functools.reduce(operator.or_, (
    getattr(__future__, name).compiler_flag for name in __future__.all_feature_names
    if name != "nested_scopes"))


@functools.lru_cache(maxsize=512)
def _tree(code, filename):  # code objects are equal whatever their files are
    """What `function_tree` gives of the function compiled to `code`."""
    text = "".join(_lines(code))
    flags = code.co_flags & _FUTURE
    module, compiled = _parsed(text, flags)
    # IPython compiles the statements of a cell apart, and a call of a module's function then is
    # another instruction where the same cell imports the module.
    if not _holds(compiled, code) and not _holds(_parsed(text, flags, True)[1], code):
        return None
    nodes = [node for node in ast.walk(module) if _begin(node) == _begin(code)]
    node = nodes[0] if len(nodes) == 1 else _at_columns(nodes, code)
    if node is None:
        return None
    tree = _as_function(node) if isinstance(node, ast.Lambda) else copy.copy(node)
    tree.args = _bare(tree.args)
    tree.decorator_list, tree.returns = [], None
    return tree


def _holds(compiled, code):
    return any(_same(code, other) for other in compiled.get(_begin(code), ()))


def _lines(code):
    """The lines of the file, cell or prompt that `code` was compiled in; none if they are lost."""
    known = linecache.cache.get(code.co_filename, ())
    if len(known) == 4 and known[1] is None:  # of no file: to look for its module takes long
        return known[2]
    try:
        return inspect.findsource(code)[0]
    except (OSError, TypeError, IndexError, SyntaxError):
        # From 3.13 on, Python keeps what was typed at its prompt, by code object.
        return getattr(linecache, "_getlines_from_code", lambda code: ())(code)


@functools.lru_cache(maxsize=64)
def _parsed(text, flags, apart=False):
    """(syntax tree of a text, {where it begins: code objects in it}).

    apart  compile each statement of the text by itself
    """
    compiled = {}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python has given them when the text was imported
            module = ast.parse(text)
            parts = [ast.Module([node], []) for node in module.body] if apart else [text]
            # A notebook's cell may await something beside its kernels.
            flags |= ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
            pending = [compile(part, "", "exec", flags, dont_inherit=True) for part in parts]
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], []), compiled
    while pending:
        code = pending.pop()
        compiled.setdefault(_begin(code), []).append(code)
        pending += (part for part in code.co_consts if isinstance(part, types.CodeType))
    return module, compiled


def _begin(what):
    """(name, first line, decorators included) of a code object or of a function's node."""
    if isinstance(what, types.CodeType):
        return what.co_name, what.co_firstlineno
    if isinstance(what, ast.Lambda):
        return "<lambda>", what.lineno
    if isinstance(what, ast.FunctionDef):
        return what.name, min(node.lineno for node in (what, *what.decorator_list))
    return None


def _same(one, other):
    """True if two code objects have the same instructions at the same lines and columns."""
    return one == other and list(one.co_positions()) == list(other.co_positions())


def _at_columns(nodes, code):
    """The innermost of `nodes` in whose body most instructions of `code` stand; None if none."""
    places = [(line, column) for line, _, column, _ in code.co_positions() if column is not None]

    def fit(node):
        first, last = (node.body, node.body) if isinstance(node, ast.Lambda) else (
            node.body[0], node.body[-1])
        start = first.lineno, first.col_offset
        end = last.end_lineno, last.end_col_offset
        return sum(start <= place < end for place in places), start

    best = max(nodes, key=fit, default=None)
    return best if best is not None and fit(best)[0] else None


def _as_function(node):
    extra = {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}
    body = ast.copy_location(ast.Return(node.body), node.body)
    return ast.copy_location(
        ast.FunctionDef("<lambda>", node.args, [body], [], None, None, **extra), node)


def _bare(arguments):
    """The same parameters without defaults and annotations."""
    def strip(argument):
        return None if argument is None else ast.copy_location(ast.arg(argument.arg), argument)

    return ast.arguments(
        [strip(a) for a in arguments.posonlyargs], [strip(a) for a in arguments.args],
        strip(arguments.vararg), [strip(a) for a in arguments.kwonlyargs],
        [None] * len(arguments.kwonlyargs), strip(arguments.kwarg), [])


def function_tree(function):
    """An ast.FunctionDef of `function` without decorators, defaults and annotations; or None.

    None means that the source is missing, or no longer what the function was compiled from. The
    tree is shared by all who ask: who changes it works on a copy (`tree.copied`).
    """
    return _tree(function.__code__, function.__code__.co_filename)


def returns_value(tree):
    """True if a function itself (not one inside it) has a `return` with a value."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return) and node.value is not None and not (
                isinstance(node.value, ast.Constant) and node.value.value is None):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            pending += children(node)
    return False


def returned_values(tree):
    """The expressions that a function returns; None if it may return nothing, or is a generator."""
    found, pending = [], list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, (ast.Yield, ast.YieldFrom)):
            return None
        if isinstance(node, ast.Return):
            if node.value is None:
                return None
            found.append(node.value)
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            pending += children(node)
    return found if _ends_with_return(tree.body) else None


def _ends_with_return(body):
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _ends_with_return(last.body) and _ends_with_return(last.orelse)
    return isinstance(last, ast.Return)
