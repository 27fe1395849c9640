"""The kinds (see `kinds`) of the expressions of a function, followed from its arguments."""

import ast
import functools

import numpy as np

from course_lib.simulator.cuda_api.primitives import Index, LaneId, Primitive
from course_lib.simulator.rewrite.analysis import literal
from course_lib.simulator.rewrite.kinds import (
    SYMBOLS,
    Cells,
    Whole,
    folded,
    general,
    is_number,
    kind_of_class,
    kind_of_name,
    kind_of_value,
    name_of,
    whole_bits,
    whole_operation,
)
from course_lib.simulator.rewrite.number_types import (
    COMPARISONS,
    NAMES,
    OPERATORS,
    signature,
    unified,
)
from course_lib.simulator.rewrite.resolve import UNRESOLVED, Device, as_dtype, scalar_type
from course_lib.simulator.rewrite.tree import nodes_of

_ROUNDED = {"exp", "exp2", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sin", "cos", "tan",
            "tanh", "sinh", "cosh", "asin", "acos", "atan", "fabs", "erf", "erfc", "cbrt"}
_SHUFFLES = {f"cuda.{name}" for name in ("shfl_sync", "shfl_up_sync", "shfl_down_sync",
                                         "shfl_xor_sync")}
_DECLARATIONS = ("cuda.shared.array", "cuda.local.array")

#: not yet known, while names are being followed round
_NOTHING = object()
#: a place in a grid; the length of an array
_PLACE, _LENGTH = Whole(42), Whole(48)


def _joined(first, second):
    if first is _NOTHING or first == second:
        return second
    if second is _NOTHING:
        return first
    if first.__class__ is second.__class__ is Whole:
        return max(first, second)
    if first.__class__ is second.__class__ is tuple and len(first) == len(second):
        return tuple(map(_joined, first, second))
    return None


class Kinds:
    """The kinds of the expressions of one function.

    Parameters
    ----------
    function : ast.FunctionDef
    static : callable
        Maps a Name or an Attribute to what it stands for, or UNRESOLVED.
    parameters : dict
        name -> kind, of the arguments that are known
    result_kind : callable
        Maps a device function and the kinds of its arguments to the kind of what it returns.
    """

    def __init__(self, function, static, parameters, result_kind):
        self.static, self.result_kind = static, result_kind
        self.bindings = {}
        own = {id(argument) for argument in ast.iter_child_nodes(function.args)}
        for node in nodes_of(function):
            if id(node) in own and isinstance(node, ast.arg):
                self._bind(node.arg, lambda name=node.arg: parameters.get(name))
            elif node is not function:
                self._collect(node)
        self.names = dict.fromkeys(self.bindings, _NOTHING)
        self._known = None
        self._settle()
        self._known = {}
        for node in nodes_of(function):  # now: rewriting changes the nodes
            if isinstance(node, ast.expr):
                self._of(node)

    def __call__(self, node):
        """The kind of an expression of the function as it was written."""
        kind = self._of(node)
        return None if kind is _NOTHING else kind

    def of_results(self, values):
        """The kind of what a function returns, given the expressions behind its `return`s."""
        kind = _NOTHING
        for value in values:
            kind = _joined(kind, self._of(value))
        return None if kind is _NOTHING else kind

    # -- names -----------------------------------------------------------------------------------

    def _bind(self, name, source):
        self.bindings.setdefault(name, []).append(source)

    def _settle(self):
        """Follow the names round until nothing changes; integers that keep growing are of 63 bits.
        """
        for step in range(64):
            changed = False
            for name, sources in self.bindings.items():
                kind = self.names[name]
                for source in sources:
                    kind = _joined(kind, source())
                if step > 3 and kind.__class__ is Whole and kind != self.names[name]:
                    kind = Whole(63)
                if step > 60:
                    kind = None
                if kind != self.names[name]:
                    self.names[name], changed = kind, True
            if not changed:
                return

    def _collect(self, node):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._bind_target(target, node.value, lambda node=node: self._of(node.value))
        elif isinstance(node, ast.AnnAssign):
            self._bind_target(node.target, node.value, lambda: None)
        elif isinstance(node, ast.AugAssign):
            if isinstance(node.target, ast.Name):
                self._bind(node.target.id, lambda: self.operation(
                    node.op, self.names[node.target.id], self._of(node.value), node.value))
        elif isinstance(node, ast.NamedExpr):
            self._bind(node.target.id, lambda: self._of(node.value))
        elif isinstance(node, (ast.For, ast.comprehension)):
            self._bind_target(node.target, None, lambda: self._element(node.iter))
        elif isinstance(node, ast.arg):
            self._bind(node.arg, lambda: None)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.ExceptHandler)) and node.name:
            self._bind(node.name, lambda: None)
        elif isinstance(node, ast.withitem) and node.optional_vars is not None:
            self._bind_target(node.optional_vars, None, lambda: None)
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            self._bind(node.name, lambda: None)
        elif isinstance(node, ast.alias):
            self._bind((node.asname or node.name).split(".")[0], lambda: None)

    def _bind_target(self, target, value, source):
        if isinstance(target, ast.Name):
            self._bind(target.id, source)
        elif isinstance(target, ast.Starred):
            self._bind_target(target.value, None, lambda: None)
        elif isinstance(target, (ast.Tuple, ast.List)):
            same = isinstance(value, (ast.Tuple, ast.List)) and len(value.elts) == len(target.elts)
            for place, part in enumerate(target.elts):
                if same and not any(isinstance(each, ast.Starred)
                                    for each in (*value.elts, *target.elts)):
                    each = value.elts[place]
                    self._bind_target(part, each, lambda each=each: self._of(each))
                else:
                    self._bind_target(part, None, lambda place=place: self._part(
                        source(), place, len(target.elts)))

    @staticmethod
    def _part(kinds, place, count):
        if kinds is _NOTHING:
            return _NOTHING
        return kinds[place] if kinds.__class__ is tuple and len(kinds) == count else None

    def _element(self, iterable):
        """The kind of what a loop over `iterable` gives."""
        if isinstance(iterable, ast.Call) and isinstance(iterable.func, ast.Name) and (
                iterable.func.id == "range" and "range" not in self.bindings):
            kinds = [self._of(part) for part in iterable.args]
            if any(kind is not _NOTHING and kind.__class__ is not Whole for kind in kinds):
                return Whole(63)
            kinds = [kind for kind in kinds[:2] if kind is not _NOTHING]
            return max(kinds, default=_NOTHING)
        return None

    # -- expressions -----------------------------------------------------------------------------

    def _of(self, node):
        if self._known is not None and id(node) in self._known:
            return self._known[id(node)][0]
        method = _method(node.__class__)
        kind = None if method is None else method(self, node)
        if self._known is not None:
            self._known[id(node)] = kind, node
        return kind

    def _of_Constant(self, node):
        if node.value.__class__ is int and -(2**63) <= node.value < 2**63:
            return Whole(abs(node.value).bit_length())
        return kind_of_value(node.value)

    def _of_Name(self, node):
        if node.id in self.bindings:
            return self.names[node.id]
        value = self.static(node)
        return None if value is UNRESOLVED else self._of_static(value)

    def _of_static(self, value):
        if isinstance(value, LaneId):
            return Whole(6)
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Index):
            return Whole(31)
        if value.__class__ is int and -(2**63) <= value < 2**63:
            return Whole(abs(value).bit_length())
        return kind_of_value(value)

    def _of_Attribute(self, node):
        value = self.static(node)
        if value is not UNRESOLVED:
            return self._of_static(value)
        base = self._of(node.value)
        if base is _NOTHING:
            return _NOTHING
        if base.__class__ is Cells:
            if node.attr in ("shape", "strides"):
                return (_LENGTH,) * base.ndim
            if node.attr in ("size", "ndim", "itemsize", "nbytes"):
                return _LENGTH
            if node.attr == "T":
                return base
        return None

    def _of_Subscript(self, node):
        base = self._of(node.value)
        if base is _NOTHING:
            return _NOTHING
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        if base.__class__ is tuple:
            place = literal(node.slice)
            if place is not None and -len(base) <= place < len(base):
                return base[place]
            return base[0] if base and len(set(base)) == 1 and (
                base[0].__class__ is Whole) and not isinstance(node.slice, ast.Slice) else None
        if base.__class__ is not Cells or len(parts) > base.ndim:
            return None
        kept = base.ndim - len(parts)
        for part in parts:
            if isinstance(part, ast.Slice):
                kept += 1
            elif isinstance(part, (ast.Starred, ast.Tuple)) or isinstance(part, ast.Constant) and (
                    part.value.__class__ is not int):
                return None
            else:
                kind = self._of(part)
                if kind.__class__ in (tuple, Cells):
                    return None
        return Cells(base.kind, kept) if kept else kind_of_class(base.kind)

    def _of_BinOp(self, node):
        value = folded(node)
        if value is not UNRESOLVED:
            return self._of_Constant(ast.Constant(value))
        return self.operation(node.op, self._of(node.left), self._of(node.right), node.right)

    def operation(self, operator, left, right, right_node=None):
        """The kind of `left operator right`."""
        if left is _NOTHING or right is _NOTHING:
            return _NOTHING
        symbol = SYMBOLS.get(operator.__class__)
        if symbol is None or not is_number(left) or not is_number(right):
            return None
        found = signature(symbol, name_of(left), name_of(right))
        if found is None or "complex" in "".join(found[0]):
            return None
        if found[1] == "int64" and symbol != "**":
            bits = whole_bits(left), whole_bits(right)
            if None not in bits:
                return whole_operation(symbol, *bits, literal(right_node))
        return kind_of_name(found[1])

    def _of_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            return bool
        value = folded(node)
        if value is not UNRESOLVED:
            return self._of_Constant(ast.Constant(value))
        kind = self._of(node.operand)
        if kind is _NOTHING or not is_number(kind):
            return kind if kind is _NOTHING else None
        if kind.__class__ is Whole:
            return Whole(min(63, kind.bits + isinstance(node.op, ast.USub)))
        found = signature(SYMBOLS[node.op.__class__], name_of(kind))
        return None if found is None else kind_of_name(found[1])

    def _of_Compare(self, node):
        if len(node.ops) > 1 or SYMBOLS.get(node.ops[0].__class__) not in COMPARISONS:
            return None
        kinds = self._of(node.left), self._of(node.comparators[0])
        return bool if all(kind is _NOTHING or is_number(kind) for kind in kinds) else None

    def _of_BoolOp(self, node):
        kind = _NOTHING
        for value in node.values:
            kind = _joined(kind, self._of(value))
        return kind

    def _of_IfExp(self, node):
        decided = self.decided(node.test)
        if decided is not None:
            return self._of(node.body if decided else node.orelse)
        return self.common([node.body, node.orelse])

    def decided(self, test):
        """True or False where numba knows how a condition of constants ends; else None."""
        if isinstance(test, ast.Compare) and len(test.ops) == 1:
            values = [self._constant(part) for part in (test.left, test.comparators[0])]
            symbol = SYMBOLS.get(test.ops[0].__class__)
            if UNRESOLVED in values or symbol not in COMPARISONS:
                return None
            return bool(OPERATORS[symbol](*values))
        value = self._constant(test)
        return None if value is UNRESOLVED else bool(value)

    def _constant(self, node):
        """The number that a literal or a global name stands for, or UNRESOLVED."""
        value = folded(node)
        if value is UNRESOLVED and isinstance(node, (ast.Name, ast.Attribute)):
            value = self.static(node)
        return value if type(value) in (bool, int, float) else UNRESOLVED

    def common(self, nodes):
        """The kind of a value that is one of several, converted to their common type."""
        kinds = [self._of(node) for node in nodes]
        known = [kind for kind in kinds if kind is not _NOTHING]
        kind = _NOTHING
        for each in known:
            kind = _joined(kind, each)
        if kind is not None:
            return kind
        if not all(map(is_number, known)):
            return None
        found = unified(*map(name_of, known))
        if found is None or found == "int64" and np.int64 in known:
            return None
        return kind_of_name(found)

    def _of_NamedExpr(self, node):
        return self._of(node.value)

    def _of_Tuple(self, node):
        if any(isinstance(part, ast.Starred) for part in node.elts):
            return None
        kinds = tuple(map(self._of, node.elts))
        return _NOTHING if _NOTHING in kinds else kinds

    # -- calls -----------------------------------------------------------------------------------

    def _of_Call(self, node):
        if any(isinstance(part, ast.Starred) for part in node.args):
            return None
        value = self.static(node.func)
        if isinstance(value, Primitive):
            return self._of_primitive(node, value)
        if isinstance(value, Device):
            kinds = () if node.keywords else tuple(map(self._of, node.args))
            if _NOTHING in kinds:
                return _NOTHING
            return self.result_kind(value.function, tuple(map(general, kinds)))
        if value is UNRESOLVED:
            return None
        if value in (min, max) and len(node.args) > 1 and not node.keywords:
            return self.common(node.args)
        if value is len:
            return _LENGTH
        if len(node.args) == 1 and not node.keywords:
            argument = self._of(node.args[0])
            if value in (int, float, abs, round):
                if argument is _NOTHING or not is_number(argument):
                    return argument if argument is _NOTHING else None
                if value is not round and argument.__class__ is Whole and value is not float:
                    return Whole(min(63, argument.bits + (value is abs)))
                found = signature(value.__name__, name_of(argument))
                return None if found is None else kind_of_name(found[1])
            if getattr(value, "__name__", "") in _ROUNDED and "mathlib" in (
                    getattr(value, "__module__", None) or ""):
                if argument is _NOTHING or argument is np.float32:
                    return argument
                return float if argument is float or argument.__class__ is Whole else None
            kind = scalar_type(value) if isinstance(value, type) else None
            if kind is not None and value is not bool:
                return kind_of_class(kind) if value is not np.float64 else float
        return None

    def _of_primitive(self, node, primitive):
        name = primitive.name
        if name in ("cuda.grid", "cuda.gridsize"):
            count = literal(node.args[0]) if len(node.args) == 1 else None
            return {1: _PLACE, 2: (_PLACE,) * 2, 3: (_PLACE,) * 3}.get(count)
        if name in _DECLARATIONS:
            return self._declaration(node)
        if name in _SHUFFLES and len(node.args) == 3:
            kind = self._of(node.args[1])
            return kind if kind is _NOTHING or kind is np.float32 else None
        return None

    def _declaration(self, node):
        from course_lib.simulator.rewrite.lists import constant

        arguments = dict(zip(("shape", "dtype"), node.args, strict=False))
        arguments.update({keyword.arg: keyword.value for keyword in node.keywords})
        if "shape" not in arguments or "dtype" not in arguments:
            return None
        shape, dtype = (constant(arguments[name], self.static) for name in ("shape", "dtype"))
        if shape is UNRESOLVED or dtype is UNRESOLVED:
            return None
        try:
            element = as_dtype(dtype).type
        except Exception:
            return None  # the launch will say what is wrong
        ndim = len(shape) if isinstance(shape, tuple) else 1
        return Cells(element, ndim) if element in NAMES and ndim else None


@functools.cache
def _method(kind):
    """What tells the kind of such a node; None if nothing is known of it."""
    return getattr(Kinds, f"_of_{kind.__name__}", None)
