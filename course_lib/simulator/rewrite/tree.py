"""Small pieces of syntax tree, and ways through it that skip what `ast`'s own go through."""

import ast
import functools

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


@functools.cache
def _parts(kind):
    """The fields of a class of nodes that may hold other nodes: not contexts, not operators."""
    return tuple(field for field in kind._fields if field not in ("ctx", "op", "ops"))


def children(node):
    """The nodes right below a node: as `ast.iter_child_nodes`, without contexts and operators."""
    found, below = node.__dict__, []
    for field in _parts(node.__class__):
        value = found.get(field)
        if value.__class__ is list:
            below += [each for each in value if isinstance(each, ast.AST)]
        elif isinstance(value, ast.AST):
            below.append(value)
    return below


def walk(node):
    """As `ast.walk`, without contexts and operators, in a third of the time."""
    pending = [node]
    for node in pending:  # grows while it is gone through
        pending += children(node)
        yield node


@functools.lru_cache(maxsize=128)
def nodes_of(tree):
    """What `walk` goes through, kept: of a function's tree before it is rewritten."""
    return tuple(walk(tree))


def located(node, everywhere=False):
    """As `ast.fix_missing_locations`, for a node that has its place, or is a module.

    Unless `everywhere`, it does not look below what has a place.
    """
    pending = [(node, node)]
    while pending:
        above, place = pending.pop()
        for part in children(above):
            new = "lineno" not in part.__dict__
            if "lineno" not in part._attributes:
                pending.append((part, place))
                continue
            if new:
                ast.copy_location(part, place)
            if new or everywhere:
                pending.append((part, part))
    return node


class Transformer:
    """As `ast.NodeTransformer`, without visits to contexts and operators."""

    def visit(self, node):
        return _visitor(self.__class__, node.__class__)(self, node)

    def generic_visit(self, node):
        found = node.__dict__
        for field in _parts(node.__class__):
            value = found.get(field)
            if value.__class__ is list:
                made = []
                for each in value:
                    each = self.visit(each) if isinstance(each, ast.AST) else each
                    if each.__class__ is list:
                        made += each
                    else:
                        made.append(each)
                value[:] = made
            elif isinstance(value, ast.AST):
                found[field] = self.visit(value)
        return node


@functools.cache
def _visitor(of, kind):
    return getattr(of, f"visit_{kind.__name__}", of.generic_visit)


def copied(node):
    """A copy of a tree, far faster than `copy.deepcopy`'s; contexts and operators are shared.

    Only what belongs to the grammar is copied. Others leave marks on nodes: IPython's tracebacks
    give each its `parent`, the operators and contexts too, which all trees of a process share.
    """
    kind = node.__class__
    new = kind.__new__(kind)
    found, fields = node.__dict__, new.__dict__
    for field in _grammar(kind):
        if field in found:
            value = found[field]
            if value.__class__ is list:
                value = [copied(each) if isinstance(each, ast.AST) else each for each in value]
            elif isinstance(value, ast.AST) and not isinstance(value, _SHARED):
                value = copied(value)
            fields[field] = value
    return new


#: nodes of which Python's parser makes one for all trees
_SHARED = (ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop)


@functools.cache
def _grammar(kind):
    return (*kind._fields, *kind._attributes)
