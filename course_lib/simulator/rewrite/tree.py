"""Small pieces of syntax tree."""

import ast

#: The hidden first parameter of every rewritten function.
THREAD = "_t"


def name(identifier):
    """The expression that reads a name."""
    return ast.Name(identifier, ast.Load())


def chain(text):
    """The expression for dotted names, such as "_t.b.x"."""
    node = None
    for part in text.split("."):
        node = name(part) if node is None else ast.Attribute(node, part, ast.Load())
    return node


def copied(node):
    """A copy of a tree, in a quarter of the time of `copy.deepcopy`; contexts are shared.

    Only what belongs to the grammar is copied. Others leave marks on nodes: IPython's tracebacks
    give each its `parent`, the operators and contexts too, which all trees of a process share.
    """
    kind = node.__class__
    new = kind.__new__(kind)
    found, fields = node.__dict__, new.__dict__
    for field in kind._fields:
        if field not in found:
            continue
        value = found[field]
        if value.__class__ is list:
            value = [copied(each) if isinstance(each, ast.AST) else each for each in value]
        elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
            value = copied(value)
        fields[field] = value
    for attribute in kind._attributes:
        if attribute in found:
            fields[attribute] = found[attribute]
    return new
