"""Find the syntax tree of a function, or say that there is none."""

import ast
import copy
import functools
import inspect
import linecache
import types


@functools.lru_cache(maxsize=512)
def _tree(code, filename):  # code objects are equal whatever their files are
    """The tree of the function compiled to `code`, or None. Line and column numbers are real."""
    lines, first = _lines(code)
    if lines is None:
        return None
    text = "".join(lines)
    indented = text[:1] in " \t"
    try:
        # An indented function parses as it stands inside a block, which keeps its columns.
        module = ast.parse("if True:\n" + text if indented else text)
    except (SyntaxError, ValueError):
        return None
    ast.increment_lineno(module, first - (2 if indented else 1))
    for node in ast.walk(module):
        found = None
        if isinstance(node, ast.FunctionDef) and node.name == code.co_name:
            found = node
        elif isinstance(node, ast.Lambda) and code.co_name == "<lambda>":
            found = _as_function(node)
        if found is not None and _matches(found, code):
            return found
    return None


def _lines(code):
    """(lines of the function compiled to `code`, number of the first), or (None, 0)."""
    try:
        return inspect.getsourcelines(code)
    except (OSError, TypeError, IndexError, SyntaxError):
        pass
    # From 3.13 on, Python keeps what was typed at its prompt, by code object.
    kept = getattr(linecache, "_getlines_from_code", lambda code: ())(code)
    first = code.co_firstlineno
    return (inspect.getblock(kept[first - 1:]), first) if kept else (None, 0)


def _as_function(node):
    body = ast.copy_location(ast.Return(node.body), node.body)
    return ast.copy_location(
        ast.FunctionDef("<lambda>", node.args, [body], [], None, None, **_type_params()), node)


def _type_params():
    return {"type_params": []} if "type_params" in ast.FunctionDef._fields else {}


def _matches(node, code):
    """True if `node` compiles to what `code` does: the file may have changed since."""
    name = node.name if node.name.isidentifier() else "_lambda"
    bare = ast.FunctionDef(name, _bare(node.args), node.body, [], None, None, **_type_params())
    module = ast.fix_missing_locations(ast.Module([ast.copy_location(bare, node)], []))
    try:
        compiled = next(constant for constant in compile(module, "", "exec").co_consts
                        if isinstance(constant, types.CodeType))
    except (SyntaxError, ValueError, StopIteration):
        return False
    return _signature(compiled) == _signature(code)


def _signature(code):
    constants = [constant for constant in code.co_consts
                 if not isinstance(constant, (types.CodeType, str))]
    names = {*code.co_names, *code.co_freevars}
    return code.co_varnames, code.co_cellvars, names, repr(constants)


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
    body is shared by all who ask: who changes it works on a copy (`tree.copied`).
    """
    tree = _tree(function.__code__, function.__code__.co_filename)
    if tree is None:
        return None
    tree = copy.copy(tree)
    tree.args = _bare(tree.args)
    tree.decorator_list, tree.returns = [], None
    return tree


def returns_value(tree):
    """True if a function itself (not one inside it) has a `return` with a value."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Return) and node.value is not None and not (
                isinstance(node.value, ast.Constant) and node.value.value is None):
            return True
        if not isinstance(node, (ast.FunctionDef, ast.Lambda, ast.ClassDef)):
            pending += ast.iter_child_nodes(node)
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
            pending += ast.iter_child_nodes(node)
    return found if _ends_with_return(tree.body) else None


def _ends_with_return(body):
    last = body[-1] if body else None
    if isinstance(last, ast.If):
        return _ends_with_return(last.body) and _ends_with_return(last.orelse)
    return isinstance(last, ast.Return)
