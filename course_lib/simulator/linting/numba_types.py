"""What numba's types say about a function: used by `worker`, in the process that compiles."""

import operator

_SYMBOLS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.floordiv: "//", operator.mod: "%", operator.pow: "**", operator.lshift: "<<",
    operator.rshift: ">>", operator.and_: "&", operator.or_: "|", operator.xor: "^",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=",
}
#: How tightly an operator binds; those that are not named bind least.
_BINDS = {"<<": 1, ">>": 1, "+": 2, "-": 2, "*": 3, "/": 3, "//": 3, "%": 3, "**": 5}
_WIDENING = {"+", "-", "*", "<<", "**"}
_CARRIES_UPWARDS = {"+", "-", "*", "&", "|", "^"}
_COMPUTED = "`{}` is computed in float64: {}"
_INTEGER = "{} float64. Write np.float32({})"


class _MeantError(Exception):
    """A value is float64 because the source asks for it."""


class Typed:
    """One typed function: its assignments, and what they mean in words."""

    def __init__(self, annotation, is_kernel=True):
        from numba.cuda import types
        from numba.cuda.core import ir

        self.ir, self.types, self.is_kernel = ir, types, is_kernel
        self.typemap, self.calltypes = annotation.typemap, annotation.calltypes
        self.assignments = [statement for block in annotation.blocks.values()
                            for statement in block.body if isinstance(statement, ir.Assign)]
        self.statements = [statement for block in annotation.blocks.values()
                           for statement in block.body]
        self.definitions = {}
        for statement in self.assignments:
            self.definitions.setdefault(statement.target.name, []).append(statement.value)

    def roots(self, node, seen=()):
        """What a value can come from, through names, merges of branches, and updates."""
        ir = self.ir
        if isinstance(node, ir.Var):
            if node.name in seen:
                return []
            return [root for value in self.definitions.get(node.name, ())
                    for root in self.roots(value, (*seen, node.name))]
        if isinstance(node, ir.Expr) and node.op == "phi":
            return [root for value in node.incoming_values for root in self.roots(value, seen)]
        if isinstance(node, ir.Expr) and node.op == "cast":
            return self.roots(node.value, seen)
        return [node]

    def number(self, root, seen=()):
        """The Python float that the source gives as a literal or as math.inf and the like."""
        ir = self.ir
        if isinstance(root, ir.Const) and isinstance(root.value, float):
            return root.value
        if isinstance(root, ir.Expr) and root.op == "getattr":
            module = self.typemap[root.value.name]
            found = getattr(getattr(module, "pymod", None), root.attr, None)
            return found if isinstance(found, float) else None
        if isinstance(root, ir.Expr) and root.op == "unary" and root not in seen:
            inner = [self.number(inside, (*seen, root)) for inside in self.roots(root.value)]
            return inner[0] if len(inner) == 1 else None
        return None

    def asks_for_float64(self):
        """True if the function converts to float64 by name, or makes an array of it."""
        types = self.types
        return any(found.dtype in (types.float64, types.complex128)
                   for found in self.typemap.values()
                   if isinstance(found, (types.NumberClass, types.Array)))

    def text(self, node, depth=4):
        """About how the source writes a value."""
        ir = self.ir
        if isinstance(node, ir.Var):
            if not node.name.startswith("$"):
                return node.name.split(".")[0]
            values = self.definitions.get(node.name, ())
            return self.text(values[0], depth) if len(values) == 1 else "…"
        if isinstance(node, ir.Const):
            return repr(node.value)
        if isinstance(node, (ir.Global, ir.FreeVar, ir.Arg)):
            return node.name
        if not isinstance(node, ir.Expr) or depth == 0:
            return "…"
        inner = depth - 1
        match node.op:
            case "binop" | "inplace_binop":
                binds = _BINDS.get(self.symbol(node), 0)
                return (f"{self.operand(node.lhs, inner, binds)} {self.symbol(node)} "
                        f"{self.operand(node.rhs, inner, binds + 1)}")
            case "getitem" | "static_getitem" | "typed_getitem":
                index = node.index_var if node.op == "static_getitem" else node.index
                shown = self.text(index, inner) if isinstance(index, ir.Var) else repr(index)
                return f"{self.text(node.value, inner)}[{shown.strip('()')}]"
            case "build_tuple":
                return f"({', '.join(self.text(item, inner) for item in node.items)})"
            case "getattr":
                return f"{self.text(node.value, inner)}.{node.attr}"
            case "call":
                arguments = ", ".join(self.text(argument, inner) for argument in node.args)
                return f"{self.text(node.func, inner)}({arguments})"
            case "cast":
                return self.text(node.value, inner)
            case "unary":
                sign = "-" if node.fn in (operator.neg, "-") else ""
                return f"{sign}{self.text(node.value, inner)}"
        return "…"

    def operand(self, node, depth, binds):
        """A value as part of an operation that binds that much, in brackets where it binds less."""
        shown = self.text(node, depth)
        if isinstance(node, self.ir.Var) and node.name.startswith("$"):
            values = self.definitions.get(node.name, ())
            inner = values[0] if len(values) == 1 else None
            if isinstance(inner, self.ir.Expr) and inner.op in ("binop", "inplace_binop"):
                return f"({shown})" if _BINDS.get(self.symbol(inner), 0) < binds else shown
        return shown

    def symbol(self, expression):
        """The operator of a binop, or ""."""
        in_place = expression.op == "inplace_binop"
        return _SYMBOLS.get(expression.immutable_fn if in_place else expression.fn, "")

    def kind(self, variable):
        """The type of a variable; literals have that of their number."""
        found = self.typemap[variable.name]
        return getattr(found, "literal_type", found)

    # -- float64 ---------------------------------------------------------------------------------

    def promotions(self):
        """(line, line to tell, message) of each expression that goes from small floats or integers
        to float64: the line of the expression, and that of what makes it so.
        """
        for statement in self.assignments:
            expression = statement.value
            if not isinstance(expression, self.ir.Expr) or expression not in self.calltypes:
                continue
            if expression.op in ("binop", "inplace_binop"):
                operands = [expression.lhs, expression.rhs]
            elif expression.op == "call" and self.is_builtin(expression):
                operands = list(expression.args)
            else:
                continue
            signature = self.calltypes[expression]
            if found := self.complex_promotion(expression, operands):
                yield statement.loc.line, statement.loc.line, found
            if self.types.float64 in (*signature.args, signature.return_type):
                found = self.promotion(expression, operands)
                if found:
                    yield statement.loc.line, found[0] or statement.loc.line, found[1]

    def suspects(self):
        """`promotions` where every operand is float64 already, as in a sum that goes round.

        What brings float64 in is then a constant or an integer among them.
        """
        types = self.types
        for statement in self.assignments:
            expression = statement.value
            if not isinstance(expression, self.ir.Expr) or expression.op not in (
                    "binop", "inplace_binop") or expression not in self.calltypes:
                continue
            operands = [expression.lhs, expression.rhs]
            kinds = [self.kind(operand) for operand in operands]
            if types.float64 not in kinds:
                continue
            text = self.text(expression)
            both = list(zip(operands, kinds, strict=True))
            reasons = [self.cause(operand) for operand, kind in both if kind == types.float64]
            reasons += [(0, _INTEGER.format(f"float32 with the integer `{name}` gives", name))
                        for name in (self.text(operand) for operand, kind in both
                                     if isinstance(kind, types.Integer))]
            if reason := next(filter(None, reasons), None):
                line, words = reason
                yield statement.loc.line, line or statement.loc.line, (
                    words if line else _COMPUTED.format(text, words))
        for statement in self.statements:
            if isinstance(statement, (self.ir.SetItem, self.ir.StaticSetItem)):
                element = getattr(self.typemap[statement.target.name], "dtype", None)
                if self.is_small(element) and self.kind(statement.value) == types.float64:
                    for line, words in self.traced(statement.value):
                        if line:  # what gave the value its float64, and not the store
                            yield statement.loc.line, line, words

    def prints(self):
        """The lines that print: there float32 becomes float64, as C's printf wants it."""
        ir = self.ir
        for statement in self.statements:
            value = getattr(statement, "value", None)
            if isinstance(statement, ir.Print) or isinstance(value, ir.Expr) and (
                    value.op == "call" and self.text(value.func) == "print"):
                yield statement.loc.line

    def is_builtin(self, call):
        """False for device functions, and for conversions such as np.float64(x): they are meant."""
        found = self.typemap[call.func.name]
        return not isinstance(found, (self.types.NumberClass, self.types.Dispatcher))

    def promotion(self, expression, operands):
        """(line, what makes an expression float64 and how to mend it); None if its operands were
        before. The line is 0 where it is the expression's own.
        """
        types = self.types
        kinds = [self.kind(operand) for operand in operands]
        small = [kind for kind in kinds if self.is_small(kind)]
        text = self.text(expression)
        integers = [operand for operand, kind in zip(operands, kinds, strict=True)
                    if isinstance(kind, types.Integer)]
        if types.float64 in kinds:
            causes = [self.cause(operand) for operand, kind in zip(operands, kinds, strict=True)
                      if kind == types.float64]
            if not small or None in causes:
                return None
            line, words = causes[0]
            return line, words if line else _COMPUTED.format(text, words)
        if small and integers:
            name, one = self.text(integers[0]), small[0]
            return 0, _COMPUTED.format(text, f"{one} with the integer `{name}` gives float64. "
                                             f"Write np.{one}({name})")
        if len(integers) == len(operands) and operands and self.symbol_or_call(expression):
            return 0, _COMPUTED.format(text, "").removesuffix(": ") + (
                f", because its operands are integers. Convert them first: "
                f"np.float32({self.text(operands[0])})")
        return None

    def complex_promotion(self, expression, operands):
        """What makes an expression of complex64 complex128, and how to mend it; or None."""
        types = self.types
        kinds = [self.kind(operand) for operand in operands]
        if types.complex64 not in kinds or self.calltypes[expression].return_type != (
                types.complex128):
            return None
        for operand, kind in zip(operands, kinds, strict=True):
            text = self.text(operand)
            if isinstance(kind, types.Integer):
                words = _INTEGER.format(f"complex64 with the integer `{text}` gives", text)
            elif kind == types.float64 and (words := self.cause(operand)):
                words = words[1]
            elif kind == types.complex128 and all(
                    isinstance(root, self.ir.Const) for root in self.roots(operand)):
                words = f"numba makes the constant {text} complex128. Write np.complex64({text})"
            else:
                continue
            return _COMPUTED.format(self.text(expression), words)
        return None

    def is_small(self, kind):
        """True for the types of floats that are smaller than float64."""
        return kind in (self.types.float32, self.types.float16, self.types.bfloat16)

    def symbol_or_call(self, expression):
        return expression.op == "call" or self.symbol(expression) in ("/", "**")

    def cause(self, operand):
        """(line, why a float64 operand is one), if the kernel's text says so; None if it is meant.

        The line is 0 where the words are about the expression whose operand it is.
        """
        roots = self.roots(operand)
        numbers = [root for root in roots if self.number(root) is not None]
        shown = self.text(operand)
        if numbers and len(numbers) == len(roots) and not shown.isidentifier():
            return 0, self.constant(numbers[0], shown)
        if numbers and shown.isidentifier():
            return 0, self.float_start(shown, numbers[0])
        if numbers:  # of a conditional expression, which has no name
            return numbers[0].loc.line, self.constant(numbers[0], self.text(numbers[0]))
        return next(iter(self.traced(operand)), None)

    def traced(self, operand):
        """All that `cause` chooses from; nothing where float64 is asked for by name."""
        found = []
        try:
            self.trace(operand, found, set())
        except _MeantError:
            return []
        return found

    def constant(self, root, shown):
        """What to say of a Python float in the source."""
        return (f"numba makes the constant {shown} float64. Write "
                f"np.float32({_plain(self.number(root), shown)})")

    def float_start(self, name, root):
        """What to say of a name that is given a Python float."""
        start = self.text(root)
        return (f"`{name}` is float64, because it starts as a Python float in line "
                f"{root.loc.line}. Write {name} = np.float32("
                f"{_plain(self.number(root), start)}) there")

    def trace(self, variable, found, seen):
        """Add to `found` what makes a float64 variable one, as `cause` tells it.

        A name that one of its assignments makes float64 is float64 in all of them, and so is what
        is computed with it: its start may be a float32 that is not to blame. Raises _MeantError
        where float64 is asked for by name.
        """
        if variable.name in seen:
            return
        seen.add(variable.name)
        shown = self.text(variable)
        for root in self.roots(variable):
            if self.number(root) is not None:
                found.append((root.loc.line, self.float_start(shown, root)
                              if shown.isidentifier() else self.constant(root, self.text(root))))
        for value in self.definitions.get(variable.name, ()):
            self.trace_value(value, found, seen)

    def trace_value(self, value, found, seen):
        """`trace` of one value that a float64 variable is given."""
        ir, types = self.ir, self.types
        if isinstance(value, ir.Var):
            if self.kind(value) == types.float64:
                self.trace(value, found, seen)
            elif isinstance(self.kind(value), types.Integer):
                found += self.whole_start(value)
        elif isinstance(value, (ir.Global, ir.FreeVar)):
            if isinstance(value.value, float):  # np.float32 is none
                found.append((0, f"the global {value.name} = {value.value!r} is float64 to numba. "
                                 f"Write {value.name} = np.float32({float(value.value)!r})"))
        elif isinstance(value, ir.Arg):
            found.append((0, (
                f"the argument `{value.name}` is a Python float, which is float64. Pass "
                f"np.float32({value.name}), or convert it so in the kernel")))
        elif isinstance(value, ir.Expr):
            self.trace_expression(value, found, seen)

    def trace_expression(self, value, found, seen):
        """`trace` of an expression whose value is float64."""
        types = self.types
        if value.op == "phi":
            for each in value.incoming_values:
                self.trace_value(each, found, seen)
        elif value.op in ("cast", "unary"):
            self.trace_value(value.value, found, seen)
        elif value.op in ("binop", "inplace_binop"):
            self.trace_operands(value, [value.lhs, value.rhs], found, seen)
        elif value.op == "call" and self.is_builtin(value):
            self.trace_operands(value, list(value.args), found, seen)
        elif value.op == "call" and isinstance(self.typemap[value.func.name], types.NumberClass):
            raise _MeantError
        elif value.op in ("getitem", "static_getitem", "typed_getitem") and isinstance(
                self.typemap[value.value.name], types.Array):
            raise _MeantError

    def trace_operands(self, expression, operands, found, seen):
        """`trace` of what an operation takes."""
        types, text, line = self.types, self.text(expression), expression.loc.line
        kinds = [self.kind(operand) for operand in operands]
        for operand, kind in zip(operands, kinds, strict=True):
            shown = self.text(operand)
            numbers = [root for root in self.roots(operand) if self.number(root) is not None]
            if numbers and kind == types.float64 and not shown.isidentifier():
                found.append((line, _COMPUTED.format(text, self.constant(numbers[0], shown))))
            elif kind == types.float64:
                self.trace(operand, found, seen)
            elif isinstance(kind, types.Integer) and len(operands) > 1:
                if types.float64 in kinds or any(map(self.is_small, kinds)):
                    found.append((line, _COMPUTED.format(text, _INTEGER.format(
                        f"float32 with the integer `{shown}` gives", shown))))
        if operands and all(isinstance(kind, types.Integer) for kind in kinds):
            found.append((line, f"`{text}` is float64, because its operands are integers. Convert "
                                f"them first: np.float32({self.text(operands[0])})"))

    def whole_start(self, variable):
        """What to say of an integer that a float64 name is given, where the source writes it."""
        name = variable.name.split(".")[0]
        for root in self.roots(variable):
            if isinstance(root, self.ir.Const) and isinstance(root.value, int):
                what = (f"`{name}` is float64, because it is given the integer {root.value} here "
                        f"and a float32 elsewhere" if name.isidentifier() else
                        f"what may be the integer {root.value} or a float32 is float64 to numba")
                yield root.loc.line, f"{what}. Write np.float32({root.value}) here"

    # -- integers --------------------------------------------------------------------------------

    def widenings(self):
        """(line, message) of each integer expression that NumPy and numba give different widths."""
        types = self.types
        for statement in self.assignments:
            expression = statement.value
            if not isinstance(expression, self.ir.Expr) or expression.op not in (
                    "binop", "inplace_binop") or self.symbol(expression) not in _WIDENING:
                continue
            operands = [expression.lhs, expression.rhs]
            kinds = [self.kind(operand) for operand in operands]
            result = self.kind(statement.target)
            if not all(isinstance(kind, types.Integer) for kind in (*kinds, result)):
                continue
            narrow = [kind for operand, kind in zip(operands, kinds, strict=True)
                      if kind.bitwidth < 64 and self.is_numpy(operand)]
            others = [operand for operand, kind in zip(operands, kinds, strict=True)
                      if kind.bitwidth >= 64 and self.is_numpy(operand)]
            if narrow and not others and result.bitwidth == 64 and not self.is_cut(
                    statement.target.name, narrow[0].bitwidth):
                text = self.text(expression)
                yield statement.loc.line, (
                    f"`{text}` is {result} on a GPU: numba widens {narrow[0]} before it computes. "
                    f"NumPy, and so the simulator, stays at {narrow[0]} and wraps. Write "
                    f"np.{narrow[0]}({text}) for {narrow[0].bitwidth} bits in both")

    def is_numpy(self, operand):
        """True for a number that NumPy gives a width: an element, a conversion, an argument."""
        ir = self.ir
        for root in self.roots(operand):
            if isinstance(root, ir.Arg) and self.is_kernel:
                return True
            if isinstance(root, ir.Expr):
                if root.op in ("getitem", "static_getitem", "typed_getitem"):
                    return isinstance(self.typemap[root.value.name], self.types.Array)
                if root.op == "call" and isinstance(self.typemap[root.func.name],
                                                    self.types.NumberClass):
                    return True
        return False

    def is_cut(self, name, width, seen=()):
        """True if every use of an integer keeps its lowest `width` bits alone.

        Then 64 bits give what `width` bits give: sums, products and left shifts carry upwards only.
        """
        ir, types = self.ir, self.types
        if name in seen:
            return True
        seen = (*seen, name)
        for statement in self.statements:
            if isinstance(statement, (ir.SetItem, ir.StaticSetItem)) and statement.value.name == (
                    name):
                element = getattr(self.typemap[statement.target.name], "dtype", None)
                if not isinstance(element, types.Integer) or element.bitwidth > width:
                    return False
            elif isinstance(statement, ir.Assign):
                value = statement.value
                if isinstance(value, ir.Var) and value.name == name:
                    carries = True
                elif not isinstance(value, ir.Expr) or name not in {
                        variable.name for variable in value.list_vars()}:
                    continue
                elif value.op in ("binop", "inplace_binop"):
                    carries = self.symbol(value) in _CARRIES_UPWARDS
                elif value.op == "call":
                    cast = self.typemap[value.func.name]
                    carries = isinstance(cast, types.NumberClass) and isinstance(
                        cast.dtype, types.Integer) and cast.dtype.bitwidth <= width
                    if carries:
                        continue
                else:
                    carries = value.op in ("phi", "cast") and not self.is_returned(statement)
                if not carries or not self.is_cut(statement.target.name, width, seen):
                    return False
            elif not isinstance(statement, ir.Del) and name in {
                    variable.name for variable in statement.list_vars()} and not (
                    isinstance(statement, (ir.SetItem, ir.StaticSetItem))):
                return False
            elif isinstance(statement, ir.SetItem) and statement.index.name == name:
                return False
        return True

    def is_returned(self, statement):
        """True if a `return` hands on what the statement assigns."""
        return any(isinstance(other, self.ir.Return) and other.value.name == statement.target.name
                   for other in self.statements)


def _plain(value, text):
    """2.0 as 2: shorter, and no float64 to read. Other numbers as they are written."""
    return text.removesuffix(".0") if value.is_integer() else text
