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
