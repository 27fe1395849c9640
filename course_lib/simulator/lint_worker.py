"""The process in which `lint` compiles: the real numba.cuda, whatever the caller's is.

`lint` runs this file by its path, outside the package, so that nothing here imports the simulator.
Requests and answers are pickles, each after its length in 8 bytes, over the standard streams.
"""

import importlib
import marshal
import operator
import os
import pickle
import re
import struct
import sys
import traceback
import types as python_types

#: Compiled for this chip: any later one has the same types, and spills alike.
CHIP = (9, 0)
_SYMBOLS = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/",
    operator.floordiv: "//", operator.mod: "%", operator.pow: "**", operator.lshift: "<<",
    operator.rshift: ">>", operator.and_: "&", operator.or_: "|", operator.xor: "^",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==",
    operator.ne: "!=",
}
_WIDENING = {"+", "-", "*", "<<", "**"}
_F64 = re.compile(r"\.f64\b")


# -- kernels from what `lint` sent ---------------------------------------------------------------


class Builder:
    """Rebuilds functions and the values they refer to."""

    def __init__(self, functions):
        from numba import cuda

        self.cuda = cuda
        self.functions, self.made, self.dispatchers = functions, {}, []
        self.missing = {}

    def function(self, number):
        """The rebuilt function, wrapped by `cuda.jit` if it was."""
        if number in self.made:
            return self.made[number]
        spec = self.functions[number]
        cells = [python_types.CellType() for _ in spec["closure"]]
        plain = python_types.FunctionType(
            marshal.loads(spec["code"]), {"__name__": spec["module"], "__builtins__": __builtins__},
            spec["name"], None, tuple(cells))
        plain.__module__, plain.__qualname__ = spec["module"], spec["qualname"]
        made = plain
        if spec["kind"] is not None:
            made = self.cuda.jit(device=spec["kind"] == "device", lineinfo=True,
                                 **spec["options"])(plain)
            self.dispatchers.append(made)
        self.made[number] = made  # before its globals: functions may call each other
        plain.__defaults__ = tuple(map(self.value, spec["defaults"])) or None
        for name, value in spec["globals"].items():
            try:
                plain.__globals__[name] = self.value(value)
            except Exception as error:
                self.missing[name] = f"{type(error).__name__}: {error}"
        for cell, value in zip(cells, spec["closure"], strict=True):
            cell.cell_contents = self.value(value)
        return made

    def value(self, spec):
        """The value that `lint` described."""
        kind, *what = spec
        if kind == "function":
            return self.function(*what)
        if kind == "module":
            return importlib.import_module(*what)
        if kind == "attribute":
            found = importlib.import_module(what[0])
            for part in what[1].split("."):
                found = getattr(found, part)
            return found
        return pickle.loads(*what)


def argument_type(spec):
    """The numba type of an argument described by `lint`."""
    from numba import from_dtype
    from numba.cuda import types

    kind, *what = spec
    if kind == "array":
        dtype, ndim, layout, read_only = what
        element = getattr(types, dtype) if isinstance(dtype, str) else from_dtype(dtype)
        return types.Array(element, ndim, layout, readonly=read_only)
    if kind == "tuple":
        return types.Tuple.from_types(tuple(map(argument_type, what[0])))
    return getattr(types, what[0])


# -- compiling -----------------------------------------------------------------------------------


def compile_kernel(kernel, argument_types, options):
    """(typed function, PTX, what the assembler said) of a kernel, without a GPU."""
    from cuda.core import Linker, LinkerOptions, ObjectCode
    from numba.cuda import dispatcher, types
    from numba.cuda.compiler import compile_cuda, kernel_fixup

    # numba-cuda asks the GPU for its chip when a kernel calls a device function.
    dispatcher.get_current_device = lambda: python_types.SimpleNamespace(compute_capability=CHIP)
    registers = options.get("max_registers")
    fastmath = bool(options.get("fastmath"))
    typed = compile_cuda(kernel.py_func, types.void, argument_types, lineinfo=True,
                         fastmath=fastmath, nvvm_options={"fastmath": fastmath, "opt": 3},
                         cc=CHIP, max_registers=registers)
    library = typed.library
    function = library.get_function(typed.fndesc.llvm_func_name)
    library._entry_name = function.name
    kernel_fixup(function, False)
    ptx = library.get_asm_str(cc=CHIP)
    if library.use_cooperative:  # linked with the device runtime, which has no spills of ours
        return typed, ptx, ""
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=LinkerOptions(
        arch="sm_{}{}".format(*CHIP), verbose=True, max_register_count=registers))
    linker.link("cubin")
    return typed, ptx, linker.get_info_log()


def double_lines(ptx):
    """{(filename, line)} of the instructions that work in float64."""
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', ptx))
    place, found = None, set()
    for line in ptx.splitlines():
        if at := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            place = os.path.basename(files.get(at[1], "")), int(at[2])
        elif _F64.search(line) and not re.match(r"\s*(ld\.param|\.param|\.reg|//)", line):
            found.add(place)
    return found - {None}


# -- looking through the typed code --------------------------------------------------------------


class Typed:
    """One typed function: its assignments, and what they mean in words."""

    def __init__(self, annotation):
        from numba.cuda import types
        from numba.cuda.core import ir

        self.ir, self.types = ir, types
        self.typemap, self.calltypes = annotation.typemap, annotation.calltypes
        self.assignments = [statement for block in annotation.blocks.values()
                            for statement in block.body if isinstance(statement, ir.Assign)]
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

    def number(self, root):
        """The Python float that the source gives as a literal or as math.inf and the like."""
        ir = self.ir
        if isinstance(root, ir.Const) and isinstance(root.value, float):
            return root.value
        if isinstance(root, ir.Expr) and root.op == "getattr":
            module = self.typemap[root.value.name]
            found = getattr(getattr(module, "pymod", None), root.attr, None)
            return found if isinstance(found, float) else None
        if isinstance(root, ir.Expr) and root.op == "unary":
            inner = [self.number(inside) for inside in self.roots(root.value)]
            return inner[0] if len(inner) == 1 else None
        return None

    def asks_for_float64(self):
        """True if the function converts to float64 by name, or makes an array of it."""
        types = self.types
        return any(found.dtype == types.float64 for found in self.typemap.values()
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
                return (f"{self.text(node.lhs, inner)} {self.symbol(node)} "
                        f"{self.text(node.rhs, inner)}")
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
        """(line, message) of each expression that goes from small floats or integers to float64."""
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
            if self.types.float64 in (*signature.args, signature.return_type):
                message = self.promotion(expression, operands)
                if message:
                    yield statement.loc.line, message

    def is_builtin(self, call):
        """False for device functions, and for conversions such as np.float64(x): they are meant."""
        found = self.typemap[call.func.name]
        return not isinstance(found, (self.types.NumberClass, self.types.Dispatcher))

    def promotion(self, expression, operands):
        """What makes an expression float64 and how to mend it; None if its operands were before."""
        types = self.types
        kinds = [self.kind(operand) for operand in operands]
        small = [kind for kind in kinds if kind in (types.float32, types.float16, types.bfloat16)]
        text = self.text(expression)
        integers = [operand for operand, kind in zip(operands, kinds, strict=True)
                    if isinstance(kind, types.Integer)]
        if types.float64 in kinds:
            causes = [self.cause(operand) for operand, kind in zip(operands, kinds, strict=True)
                      if kind == types.float64]
            if not small or None in causes:
                return None
            return f"`{text}` is computed in float64: {causes[0]}"
        if small and integers:
            name, one = self.text(integers[0]), small[0]
            return (f"`{text}` is computed in float64: {one} with the integer `{name}` gives "
                    f"float64. Write np.{one}({name})")
        if len(integers) == len(operands) and operands and self.symbol_or_call(expression):
            return (f"`{text}` is computed in float64, because its operands are integers. Convert "
                    f"them first: np.float32({self.text(operands[0])})")
        return None

    def symbol_or_call(self, expression):
        return expression.op == "call" or self.symbol(expression) in ("/", "**")

    def cause(self, operand):
        """Why a float64 operand is one, if the kernel's text says so; None if it is meant."""
        ir, roots = self.ir, self.roots(operand)
        numbers = [root for root in roots if self.number(root) is not None]
        shown = self.text(operand)
        if numbers and len(numbers) == len(roots) and not shown.isidentifier():
            return (f"numba makes the constant {shown} float64. Write "
                    f"np.float32({_plain(self.number(numbers[0]), shown)})")
        if numbers:
            start, line = self.text(numbers[0]), numbers[0].loc.line
            return (f"`{shown}` is float64, because it starts as a Python float in line {line}. "
                    f"Write {shown} = np.float32({_plain(self.number(numbers[0]), start)}) there")
        for root in roots:
            if isinstance(root, (ir.Global, ir.FreeVar)):
                return (f"the global {root.name} = {root.value!r} is float64 to numba. Write "
                        f"{root.name} = np.float32({root.value!r})")
            if isinstance(root, ir.Arg):
                return (f"the argument `{root.name}` is a Python float, which is float64. Pass "
                        f"np.float32({root.name}), or convert it so in the kernel")
        return None

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
            if narrow and not others and result.bitwidth == 64:
                text = self.text(expression)
                yield statement.loc.line, (
                    f"`{text}` is {result} on a GPU: numba widens {narrow[0]} before it computes. "
                    f"NumPy, and so the simulator, stays at {narrow[0]} and wraps. Write "
                    f"np.{narrow[0]}({text}) for {narrow[0].bitwidth} bits in both")

    def is_numpy(self, operand):
        """True for a number that NumPy gives a width: an element, a conversion, an argument."""
        ir = self.ir
        for root in self.roots(operand):
            if isinstance(root, ir.Arg):
                return True
            if isinstance(root, ir.Expr):
                if root.op in ("getitem", "static_getitem", "typed_getitem"):
                    return isinstance(self.typemap[root.value.name], self.types.Array)
                if root.op == "call" and isinstance(self.typemap[root.func.name],
                                                    self.types.NumberClass):
                    return True
        return False


def _plain(value, text):
    """2.0 as 2: shorter, and no float64 to read. Other numbers as they are written."""
    return text.removesuffix(".0") if value.is_integer() else text


# -- findings ------------------------------------------------------------------------------------


def lint(request):
    """The findings of a request: [(kind, filename, line, message)]."""
    builder = Builder(request["functions"])
    kernel = builder.function(0)
    argument_types = tuple(map(argument_type, request["arguments"]))
    options = request["functions"][0]["options"]
    typed, ptx, assembler = compile_kernel(kernel, argument_types, options)
    annotations = [(typed.type_annotation, kernel.py_func)]
    annotations += [(result.type_annotation, device.py_func) for device in builder.dispatchers
                    for result in device.overloads.values() if device is not kernel]
    doubles, promotions, found = double_lines(ptx), [], []
    for annotation, function in annotations:
        filename, looking = function.__code__.co_filename, Typed(annotation)
        promotions += [("float64-promotion", filename, *rest) for rest in looking.promotions()]
        found += [("integer-width", filename, *rest) for rest in looking.widenings()]
    promotions = in_machine_code(promotions, doubles)
    meant = any(Typed(annotation).asks_for_float64() for annotation, _ in annotations)
    if doubles and not promotions and not meant:
        filename = kernel.py_func.__code__.co_filename
        promotions = [("float64-promotion", filename, line, _UNEXPLAINED)
                      for base, line in sorted(doubles) if base == os.path.basename(filename)]
    found += promotions
    code = kernel.py_func.__code__
    spill = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", assembler)
    if spill and (int(spill[1]) or int(spill[2])):
        registers = re.search(r"Used (\d+) registers", assembler)
        found.append(("spill", code.co_filename, code.co_firstlineno, (
            f"{spill[1]} bytes per thread are spilled: {registers[1]} registers are not enough, "
            f"and the rest goes to memory and back. Keep fewer values alive at once")))
    return list(dict.fromkeys(found))


_UNEXPLAINED = ("the machine code of this line computes in float64, and nothing asks for it by "
                "name. Give constants and conversions as np.float32")


def in_machine_code(promotions, doubles):
    """Those of the promotions that cost something.

    What the compiler could do in float32 after all, such as a comparison, left no float64
    instruction at its line. (If it left some, but none at any of the lines, it has merged
    expressions, and all may have a part in it.)
    """
    there = [found for found in promotions
             if (os.path.basename(found[1]), found[2]) in doubles]
    return there if there or not doubles else promotions


def place(error):
    """Where in the kernel, as numba's messages say it: not all of its errors know."""
    trace, found = error.__traceback__, None
    while trace is not None:
        # What numba was typing: a constraint, which knows its place in the source.
        values = trace.tb_frame.f_locals
        try:
            found = getattr(values.get("self"), "loc", None) or found
        except Exception:
            pass  # an object that asks a GPU for its attributes
        trace = trace.tb_next
    line = getattr(found, "line", None)
    return f"\nDuring: typing at {found.filename} ({line})" if line else ""


def answer(request):
    """("findings", …) or ("error", text)."""
    try:
        return "findings", lint(request)
    except Exception as error:
        if type(error).__module__.startswith("numba"):
            text = str(error)
        else:
            text = "".join(traceback.format_exception(error))
        return "error", text.rstrip() + place(error)


def main():
    """Answer requests until the other side closes the pipe."""
    import signal

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the notebook
    incoming, outgoing = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints must not disturb the answers
    try:
        from numba import cuda  # noqa: F401 - a second of work, before the first request
    except Exception:
        pass  # the first answer tells
    while len(head := incoming.read(8)) == 8:
        (length,) = struct.unpack("<Q", head)
        request = pickle.loads(incoming.read(length))
        sys.path[:] = request.pop("path")
        reply = pickle.dumps(answer(request))
        outgoing.write(struct.pack("<Q", len(reply)) + reply)
        outgoing.flush()


if __name__ == "__main__":
    main()
