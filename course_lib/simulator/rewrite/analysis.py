"""What the rewriter can prove about a function: indices that are never negative, loops that end.

Everything here errs on the safe side: an index not proven is checked at run time, a loop not
proven to count is treated as one that may wait for another thread.
"""

import ast

from course_lib.simulator.rewrite.tree import nodes_of, walk

_NONE_NEGATIVE_ATTRIBUTES = {"size", "ndim", "itemsize", "nbytes"}
_NONE_NEGATIVE_CALLS = {"len", "abs"}
_PRIVATE_CALLS = {"abs", "int", "len", "max", "min"}
_KEEPS_SIGN = (ast.Add, ast.Mult, ast.FloorDiv, ast.RShift, ast.LShift, ast.BitOr, ast.BitXor,
               ast.Pow)
_NEVER_TUPLE = (ast.Sub, ast.FloorDiv, ast.RShift, ast.LShift, ast.BitAnd, ast.BitOr, ast.BitXor,
                ast.Pow, ast.Mod)
_COUNTING = (ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.RShift, ast.LShift)

UNKNOWN = object()
NATURAL = object()
INTEGER = object()


class Facts:
    """Facts about the local names of one function.

    Parameters
    ----------
    function : ast.FunctionDef
    resolve : callable
        Maps a Name or Attribute node to what it means, or None: "natural" for a thread index or
        a size, an int for a global constant, "grid" for a call target that returns indices,
        "cas" for an atomic exchange.
    """

    def __init__(self, function, resolve):
        self.resolve = resolve
        self.bindings = {}
        arguments = function.args
        for argument in [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs,
                         arguments.vararg, arguments.kwarg]:
            if argument is not None:
                self._bind(argument.arg, UNKNOWN)
        for node in nodes_of(function):
            if node is not function:
                self._collect(node)
        self.natural = self._fixpoint(self._is_natural)
        self.integer = self._fixpoint(self._is_integer)

    def _bind(self, name, value):
        self.bindings.setdefault(name, []).append(value)

    def _collect(self, node):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value)
        elif isinstance(node, ast.AnnAssign):
            self._bind_target(node.target, node.value or UNKNOWN)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                left = ast.Name(node.target.id, ast.Load())
                self._bind(node.target.id, ast.BinOp(left, node.op, node.value))
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target.id, node.value)
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._bind_target(node.target, self._element(node.iter))
        elif isinstance(node, ast.arg):
            self._bind(node.arg, UNKNOWN)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            self._bind(node.name, UNKNOWN)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind_target(node.optional_vars, UNKNOWN)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            self._bind(node.name, UNKNOWN)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            self._bind(node.name, UNKNOWN)
        elif isinstance(node, ast.alias):
            self._bind((node.asname or node.name).split(".")[0], UNKNOWN)

    def _bind_target(self, target, value):
        if isinstance(target, ast.Name):
            self._bind(target.id, value)
        elif isinstance(target, (ast.Tuple, ast.List)):
            values = [UNKNOWN] * len(target.elts)
            if isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts):
                values = value.elts
            elif value is NATURAL or self._is_indices(value):
                values = [NATURAL] * len(target.elts)
            for element, part in zip(target.elts, values, strict=True):
                self._bind_target(element, part)
        elif isinstance(target, ast.Starred):
            self._bind_target(target.value, UNKNOWN)

    def _is_indices(self, value):
        """True for `grid(2)` and `x.shape`: tuples of natural numbers."""
        if isinstance(value, ast.Attribute) and value.attr == "shape":
            return True
        return isinstance(value, ast.Call) and self.resolve(value.func) == "grid"

    def _element(self, iterable):
        """What a loop over `iterable` assigns."""
        if not (isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name)
                and iterable.func.id == "range" and "range" not in self.bindings
                and not iterable.keywords):
            return UNKNOWN
        parts = iterable.args
        if len(parts) == 1:
            return NATURAL
        if len(parts) == 3:
            step = literal(parts[2])
            if step is not None and step < 0:
                stop = literal(parts[1])
                return NATURAL if stop is not None and stop >= -1 else INTEGER
        return parts[0] if len(parts) == 2 or self._step_is_natural(parts[2]) else INTEGER

    def _step_is_natural(self, step):
        # Decided before any fact about locals is known, so only by what needs none. A negative
        # step from a variable would go below the start.
        value = literal(step)
        if value is not None:
            return value >= 0
        known = self.resolve(step) if isinstance(step, (ast.Name, ast.Attribute)) else None
        if known == "natural" or isinstance(known, int) and known >= 0:
            return True
        if isinstance(step, ast.Call):
            return self.resolve(step.func) == "grid"
        if isinstance(step, ast.BinOp) and isinstance(step.op, (ast.Mult, ast.Add)):
            return self._step_is_natural(step.left) and self._step_is_natural(step.right)
        return False

    def _fixpoint(self, test):
        names = {name for name, values in self.bindings.items() if UNKNOWN not in values}
        changed = True
        while changed:
            changed = False
            for name in list(names):
                if not all(test(value, names) for value in self.bindings[name]):
                    names.discard(name)
                    changed = True
        return names

    def is_natural(self, node):
        """True if the expression is certainly an integer >= 0."""
        return self._is_natural(node, self.natural)

    def is_integer(self, node):
        """True if the expression is certainly no tuple (so it may be compared with 0)."""
        return self._is_integer(node, self.integer)

    def _is_natural(self, node, names):
        if node is NATURAL:
            return True
        if not isinstance(node, ast.AST):
            return False

        def test(part):
            return self._is_natural(part, names)

        match node:
            case ast.Constant():
                return type(node.value) is int and node.value >= 0
            case ast.Name():
                if node.id in self.bindings:
                    return node.id in names
                value = self.resolve(node)
                return value == "natural" or type(value) is int and value >= 0
            case ast.Attribute():
                if node.attr in _NONE_NEGATIVE_ATTRIBUTES:
                    return True
                value = self.resolve(node)
                return value == "natural" or type(value) is int and value >= 0
            case ast.Subscript(value=ast.Attribute(attr="shape"), slice=ast.Constant()):
                return True
            case ast.BinOp(op=ast.Mod()):
                return test(node.right)
            case ast.BinOp(op=ast.BitAnd()):
                return test(node.left) or test(node.right)
            case ast.BinOp():
                return isinstance(node.op, _KEEPS_SIGN) and test(node.left) and test(node.right)
            case ast.IfExp():
                return test(node.body) and test(node.orelse)
            case ast.NamedExpr():
                return test(node.value)
            case ast.Call(func=ast.Name(id="min"), keywords=[]) if "min" not in self.bindings:
                return len(node.args) > 1 and all(test(part) for part in node.args)
            case ast.Call():
                if isinstance(node.func, ast.Name) and node.func.id in _NONE_NEGATIVE_CALLS:
                    return node.func.id == "len"
                return (self.resolve(node.func) == "grid" and len(node.args) == 1
                        and literal(node.args[0]) == 1)
        return False

    def _is_integer(self, node, names):
        if node is INTEGER or node is NATURAL:
            return True
        if not isinstance(node, ast.AST):
            return False

        def test(part):
            return self._is_integer(part, names)

        match node:
            case ast.Constant():
                return isinstance(node.value, (int, float))
            case ast.Name() if node.id in self.bindings:
                return node.id in names
            case ast.BinOp(op=ast.Add()):
                return test(node.left) or test(node.right)
            case ast.BinOp(op=ast.Mult()):
                return test(node.left) and test(node.right)
            case ast.BinOp():
                return isinstance(node.op, _NEVER_TUPLE)
            case ast.UnaryOp():
                return True
            case ast.IfExp():
                return test(node.body) and test(node.orelse)
            case ast.NamedExpr():
                return test(node.value)
            case ast.Subscript():
                return not isinstance(node.slice, (ast.Slice, ast.Tuple))
            case ast.Call(func=ast.Name(id="int")):
                return True
        return self._is_natural(node, self.natural)

    def counts(self, loop):
        """True if a `while` loop is stepped by arithmetic on a local name of its condition."""
        if _continues(loop.body):
            return False  # the step may be jumped over
        test = loop.test
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(
            test.op, ast.And) else [test]
        stepped = {name for name in map(self._stepped, loop.body) if name}
        return any(self._is_private(part) and stepped & _names(part) for part in parts)

    def _stepped(self, statement):
        match statement:
            case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
                pass
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.BinOp(op=op) as value):
                if name not in _names(value):
                    return None
            case _:
                return None
        return name if isinstance(op, _COUNTING) and self._is_private(value) else None

    def _is_private(self, node):
        """True if no other thread can change the value of an expression."""
        for part in walk(node):
            if isinstance(part, ast.NamedExpr):
                return False
            if isinstance(part, ast.Subscript) and not (
                    isinstance(part.value, ast.Attribute) and part.value.attr == "shape"):
                return False
            if isinstance(part, ast.Call) and self.resolve(part.func) != "grid" and not (
                    isinstance(part.func, ast.Name) and part.func.id in _PRIVATE_CALLS):
                return False
        return True


def _continues(statements):
    """True if a `continue` belongs to the loop whose body this is."""
    for statement in statements:
        if isinstance(statement, ast.Continue):
            return True
        if not isinstance(statement, (ast.For, ast.While, ast.FunctionDef)) and _continues(
                [part for part in ast.iter_child_nodes(statement)
                 if isinstance(part, (ast.stmt, ast.ExceptHandler, ast.match_case))]):
            return True
    return False


def _names(node):
    return {part.id for part in walk(node) if isinstance(part, ast.Name)}


def literal(node):
    """The integer that a literal stands for, or None."""
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        inner = literal(node.operand)
        return None if inner is None else -inner
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    return None
