"""How the rewriter emits arithmetic: plainly where the kinds of the operands are known and allow
it, else as a call of `arithmetic.operators` and its kin.
"""

import ast
import math

import numpy as np

from course_lib.simulator.engine import arithmetic
from course_lib.simulator.rewrite.analysis import literal
from course_lib.simulator.rewrite.kinds import (
    SYMBOLS,
    Whole,
    folded,
    is_number,
    name_of,
    whole_bits,
)
from course_lib.simulator.rewrite.number_types import CLASSES, COMPARISONS, signature, unified
from course_lib.simulator.rewrite.resolve import FLOATS, UNRESOLVED
from course_lib.simulator.rewrite.sites import is_pure
from course_lib.simulator.rewrite.tree import copied, located, walk
from course_lib.simulator.rewrite.tree import name as _name

_FLOATS = (float, np.float32)
_RING = ("+", "-", "*")
_SAME_BITS = ("+", "-", "*", "&", "|", "^")


class Arithmetic:
    """The part of `rewrite.Emitter` for operators, comparisons and conversions."""

    # -- operators -------------------------------------------------------------------------------

    def visit_Constant(self, node):
        if node.value.__class__ is int and node.value >= 2**63:
            return ast.copy_location(self.bind(np.uint64(node.value), "uint64"), node)
        return node

    def folded(self, node):
        """The constant that `node` is, or None."""
        value = folded(node)
        if value is UNRESOLVED:
            return None
        return self.visit_Constant(ast.copy_location(ast.Constant(value), node))

    def visit_BinOp(self, node):
        constant = self.folded(node)
        if constant is not None:
            return constant
        symbol = SYMBOLS.get(node.op.__class__)
        if symbol is None:
            return self.generic_visit(node)
        if self.is_ring(node):
            return self.in_range(*self.whole(node), node)
        return self.operation(node.op, self.visit(node.left), self.kinds(node.left),
                              self.visit(node.right), self.kinds(node.right), node,
                              literal(node.right))

    def visit_UnaryOp(self, node):
        constant = self.folded(node)
        if constant is not None:
            return constant
        kind = self.kinds(node.operand)
        if isinstance(node.op, ast.Not) or kind in _FLOATS and not isinstance(
                node.op, ast.Invert) or kind.__class__ is Whole and (
                not isinstance(node.op, ast.USub) or kind.bits < 63):
            return self.generic_visit(node)
        return self.called(arithmetic.unary[SYMBOLS[node.op.__class__]], node,
                           self.visit(node.operand))

    def called(self, function, at, *arguments):
        """The call of one of our functions."""
        name = getattr(function, "__name__", "operation")
        hint = name if name.isidentifier() else "operation"
        call = ast.Call(self.bind(function, f"number_{hint}"), list(arguments), [])
        return located(ast.copy_location(call, at))

    def is_ring(self, node):
        """True for sums, differences and products of integers that Python ints hold."""
        return isinstance(node, ast.BinOp) and SYMBOLS.get(node.op.__class__) in _RING and (
            folded(node) is UNRESOLVED) and self.are_whole(
                SYMBOLS[node.op.__class__], self.kinds(node.left), self.kinds(node.right))

    @staticmethod
    def are_whole(symbol, left, right):
        """True if both are integers that numba takes as int64."""
        if whole_bits(left) is None or whole_bits(right) is None:
            return False
        return left.__class__ is right.__class__ is Whole or signature(
            symbol, name_of(left), name_of(right))[1] in ("int64", "float64", "boolean")

    def whole(self, node):
        """(expression, bits) of an integer, not yet cut to 64 bits.

        Sums and products may be cut when they are complete: the lowest 64 bits are the same.
        """
        if not self.is_ring(node):
            kind = self.kinds(node)
            return self.as_whole(self.visit(node), kind, node), whole_bits(kind)
        left, left_bits = self.whole(node.left)
        right, right_bits = self.whole(node.right)
        bits = left_bits + right_bits + 1 if isinstance(node.op, ast.Mult) else (
            max(left_bits, right_bits) + 1)
        return ast.copy_location(ast.BinOp(left, node.op, right), node), bits

    def as_whole(self, value, kind, at):
        """The expression as a Python int."""
        return value if kind.__class__ is Whole else self.called(int, at, value)

    def in_range(self, value, bits, at):
        """`value` cut to an int64 if it may need more bits."""
        if bits <= 63:
            return value
        if not self.walrus:
            return self.called(arithmetic.wrapped, at, value)
        name = self.temporary()
        store = ast.NamedExpr(ast.Name(name, ast.Store()), value)
        test = ast.Compare(ast.Constant(arithmetic.LOWEST), [ast.LtE(), ast.LtE()],
                           [store, ast.Constant(arithmetic.HIGHEST)])
        result = ast.IfExp(test, _name(name), self.called(arithmetic.wrapped, at, _name(name)))
        return located(ast.copy_location(result, at))

    def index(self, part):
        """An index: not cut to 64 bits, as no array has so many elements."""
        return self.whole(part)[0] if self.is_ring(part) else self.visit(part)

    def operation(self, operator, left, left_kind, right, right_kind, at, value=None,
                  in_place=False):
        """`left operator right` of rewritten operands; `value` is the right one if a literal."""
        symbol = SYMBOLS.get(operator.__class__)
        plain = None
        if symbol and is_number(left_kind) and is_number(right_kind):
            if self.are_whole(symbol, left_kind, right_kind):
                plain = self.whole_operation(
                    operator, symbol, self.as_whole(left, left_kind, at), whole_bits(left_kind),
                    self.as_whole(right, right_kind, at), whole_bits(right_kind), at, value)
            elif symbol in ("+", "-", "*", "/"):
                plain = self.float_operation(operator, left, left_kind, right, right_kind, at,
                                             value)
        if plain is None and symbol is None:
            plain = ast.BinOp(left, operator, right)
        if plain is not None:
            return located(ast.copy_location(plain, at))
        return self.called(arithmetic.operators[symbol + "=" if in_place else symbol], at, left,
                           right)

    def whole_operation(self, operator, symbol, left, left_bits, right, right_bits, at, value):
        """The same of two int64, or None."""
        plain = ast.copy_location(ast.BinOp(left, operator, right), at)
        if symbol in _RING:
            return self.in_range(plain, left_bits + right_bits + 1 if symbol == "*" else (
                max(left_bits, right_bits) + 1), at)
        if symbol in ("&", "|", "^"):
            return plain
        if symbol in ("<<", ">>") and value is not None and 0 <= value < 64:
            return self.in_range(plain, left_bits + value if symbol == "<<" else left_bits, at)
        if symbol in ("//", "%") and value is not None and value > 0:
            return plain
        if symbol == "/" and max(left_bits, right_bits) <= 53:
            return plain if value else self.called(arithmetic.divide, at, left, right)
        return None

    def float_operation(self, operator, left, left_kind, right, right_kind, at, value):
        """The same where a float32 or a float64 takes part, or None."""
        kinds = left_kind, right_kind
        if not all(kind in _FLOATS or kind.__class__ is Whole for kind in kinds):
            return None
        if left_kind != right_kind:
            left, right = (self.called(float, at, part) if kind is np.float32 else part
                           for part, kind in ((left, left_kind), (right, right_kind)))
        if isinstance(operator, ast.Div) and not value and not left_kind is right_kind is (
                np.float32) and not (isinstance(right, ast.Constant) and right.value):
            return self.called(arithmetic.divide, at, left, right)
        return ast.BinOp(left, operator, right)

    # -- comparisons -----------------------------------------------------------------------------

    def visit_Compare(self, node):
        parts = [node.left, *node.comparators]
        symbols = [SYMBOLS.get(operator.__class__) for operator in node.ops]
        if not COMPARISONS.issuperset(symbols) or len(parts) > 2 and not self.walrus or all(
                self.compares_plainly(*pair) for pair in zip(parts, parts[1:], strict=False)):
            return self.generic_visit(node)
        tests, values = [], [self.visit(part) for part in parts]
        for place, symbol in enumerate(symbols):
            left, right = values[place], values[place + 1]
            if place + 1 < len(symbols):
                name = self.temporary()
                right, values[place + 1] = ast.NamedExpr(ast.Name(name, ast.Store()), right), (
                    _name(name))
            tests.append(self.called(arithmetic.operators[symbol], node, left, right))
        if len(tests) > 1:
            tests = [ast.BoolOp(ast.And(), tests)]
        return located(ast.copy_location(tests[0], node))

    def compares_plainly(self, left, right):
        """True if Python and NumPy compare the two as the compiled kernel does."""
        if _is_short(left) or _is_short(right):
            return True
        kinds = self.kinds(left), self.kinds(right)
        if kinds[0] == kinds[1] and is_number(kinds[0]):
            return True
        bits = [whole_bits(kind) for kind in kinds]
        if None not in bits:
            return True
        if bits == [None, None]:
            return False
        known = min(part for part in bits if part is not None)
        return known <= (53 if float in kinds else 24)

    # -- one of several --------------------------------------------------------------------------

    def extremum(self, node, function):
        """min and max: the result has the common type; a NaN loses against a number."""
        if len(node.args) > 2:
            first = ast.copy_location(ast.Call(node.func, node.args[:-1], []), node)
            node = ast.copy_location(ast.Call(node.func, [first, node.args[-1]], []), node)
        kinds = [self.kinds(argument) for argument in node.args]
        values = [self.visit(argument) for argument in node.args]
        if kinds[0] != kinds[1] and all(kind in _FLOATS or kind.__class__ is Whole
                                        for kind in kinds):
            if not kinds[0].__class__ is kinds[1].__class__ is Whole:
                values = [value if kind is float else self.called(float, node, value)
                          for value, kind in zip(values, kinds, strict=True)]
        elif kinds[0] != kinds[1] or not is_number(kinds[0]):
            return self.called(arithmetic.extrema[function], node, *values)
        if not self.walrus:
            return self.called(arithmetic.extrema[function], node, *values)
        first, second = self.temporary(), self.temporary()
        comparison = ast.GtE() if function is max else ast.LtE()
        test = ast.Compare(ast.NamedExpr(ast.Name(first, ast.Store()), values[0]), [comparison],
                           [ast.NamedExpr(ast.Name(second, ast.Store()), values[1])])
        if not all(kind.__class__ is Whole for kind in kinds):
            test = ast.BoolOp(ast.Or(), [
                test, ast.Compare(_name(second), [ast.NotEq()], [_name(second)])])
        result = ast.IfExp(test, _name(first), _name(second))
        return located(ast.copy_location(result, node))

    def visit_IfExp(self, node):
        decided = self.kinds.decided(node.test)
        node.test = self.visit(node.test)
        node.body, node.orelse = self.branches(node, decided)
        return node

    def branches(self, node, decided):
        """The two values of `a if test else b`, converted to their common type where known."""
        nodes = node.body, node.orelse
        kinds = [self.kinds(part) for part in nodes]
        values = [self.visit(part) for part in nodes]
        if decided is not None:
            return values  # numba leaves the other out
        if all(map(is_number, kinds)) and kinds[0] != kinds[1]:
            goal = unified(*map(name_of, kinds))
            for place, kind in enumerate(kinds):
                if goal is not None and name_of(kind) != goal:
                    convert = arithmetic.conversion(
                        CLASSES[name_of(kind)] if kind.__class__ is Whole else kind, goal)
                    values[place] = self.called(convert, nodes[place], values[place])
        elif kinds.count(None) == 1 and is_number(kinds[kinds.index(None) - 1]):
            place = kinds.index(None)
            kind = kinds[place - 1]
            other = self.bind(int if kind.__class__ is Whole else kind, "kind")
            values[place] = self.called(arithmetic.like, nodes[place], values[place], other)
        return values

    # -- conversions -----------------------------------------------------------------------------

    def conversion_call(self, node, function):
        """`int(x)`, `float(x)`, `abs(x)`, `round(x)` and `pow(x, y)` as numba has them, or None."""
        if node.keywords or any(isinstance(part, ast.Starred) for part in node.args):
            return None
        if function is pow and len(node.args) == 2:
            return self.called(arithmetic.operators["**"], node, *map(self.visit, node.args))
        if function not in (int, float, abs, round) or len(node.args) != 1:
            return None
        kind, value = self.kinds(node.args[0]), self.visit(node.args[0])
        if function is float and kind in _FLOATS:
            return value
        # What is loaded is NumPy's integer, and a twin that asks for Python's needs one.
        if function is abs and (kind in _FLOATS or kind.__class__ is Whole and kind.bits < 63) or (
                function in (int, float) and kind.__class__ is Whole):
            return self.called(function, node, value)
        return self.called(arithmetic.unary[function.__name__], node, value)

    # -- stores ----------------------------------------------------------------------------------

    def fits(self, array, value):
        """True if NumPy stores a value of the kind `value` in an array of the kind `array` as a
        GPU does: it refuses integers that do not fit, of which a GPU stores the lowest bits, and
        floats that do not fit become anything.
        """
        element = getattr(array, "kind", None)
        if element is not None and not issubclass(element, np.integer):
            return True
        if value is bool or element is not None and value is element:
            return True
        bits = whole_bits(value)
        if element is None or bits is None:
            return False
        unsigned = issubclass(element, np.unsignedinteger)
        return not unsigned and bits <= whole_bits(element)

    def stored(self, target, value, array, kind, at):
        """Statements that store the expression `value`, of a known `kind` or None, in `target`."""
        assign = ast.copy_location(ast.Assign([target], value), at)
        if self.fits(array, kind) or isinstance(value, ast.Constant) and self.fits(
                array, self.kinds(value)) or any(
                isinstance(part, (ast.Slice, ast.Starred)) for part in walk(target.slice)):
            return [assign]
        statements = []
        value = value if isinstance(value, ast.Name) else self.keep(value, statements)
        if not is_pure(target.value):
            target.value = self.keep(target.value, statements)
        if not is_pure(target.slice):
            target.slice = self.keep(target.slice, statements)
        assign.value = value
        if whole_bits(kind) is None:
            is_float = ast.Compare(ast.Attribute(copied(value), "__class__", ast.Load()),
                                   [ast.In()], [self.bind(FLOATS, "floats")])
            element = self.called(arithmetic.as_element, at, copied(target.value), value)
            assign.value = ast.IfExp(is_float, element, copied(value))
        again = self.called(arithmetic.store, at, copied(target.value), copied(target.slice),
                            value)
        overflow = ast.ExceptHandler(self.bind(OverflowError, "overflow"), None,
                                     [ast.Expr(again)])
        statements.append(ast.Try([assign], [overflow], [], []))
        return [located(ast.copy_location(s, at)) for s in statements]

    def updates_plainly(self, array, operator, value):
        """True if NumPy's `array[i] operator= value` is the compiled kernel's."""
        symbol, element = SYMBOLS.get(operator.__class__), getattr(array, "kind", None)
        if element is np.float32:
            return value is np.float32 and symbol in ("+", "-", "*", "/")
        if element is np.float64:
            return symbol in ("+", "-", "*", "/") and (
                value in _FLOATS or value.__class__ is Whole and value.bits <= 53)
        return element is not None and issubclass(element, np.integer) and (
            symbol in _SAME_BITS) and (value is element or value.__class__ is Whole and self.fits(
                array, value))


def _is_short(node):
    """True for a literal that every type of number holds exactly (or that it can never equal)."""
    value = folded(node)
    if value is UNRESOLVED:
        return False
    if value.__class__ is int:
        return abs(value) <= 2048
    return not math.isfinite(value) or abs(value) < 65504 and value == float(np.float16(value))
