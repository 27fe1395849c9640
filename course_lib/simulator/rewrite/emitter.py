"""Turn the syntax tree of a kernel into one that runs fast for one thread at a time.

The rewritten function takes a hidden first argument, `_t`, the thread. Thread indices become its
attributes; what must wait becomes a `yield` (or, in the greenlet flavour, a switch); each index
that could be negative gets a check. Line and column numbers stay those of the user's source.
"""

import ast
import builtins

from course_lib.simulator.cuda_api.primitives import Index, LaneId, Primitive
from course_lib.simulator.engine import guards, scheduler
from course_lib.simulator.rewrite.analysis import Facts, literal
from course_lib.simulator.rewrite.arithmetic_rewrite import Arithmetic
from course_lib.simulator.rewrite.compilable import refuse_python
from course_lib.simulator.rewrite.inference import Kinds
from course_lib.simulator.rewrite.kinds import general
from course_lib.simulator.rewrite.lists import find_lists
from course_lib.simulator.rewrite.resolve import (
    UNRESOLVED,
    Device,
    cast,
    foldable,
    mapped,
    scalar_type,
)
from course_lib.simulator.rewrite.sites import Site, position
from course_lib.simulator.rewrite.subscripts import Subscripts
from course_lib.simulator.rewrite.tree import (
    THREAD,
    Transformer,
    chain,
    copied,
    located,
    nodes_of,
    walk,
)
from course_lib.simulator.rewrite.tree import name as _name
from course_lib.simulator.rewrite.turns import is_sleep, only_waits

#: what a twin does as Python does it
_COUNTED = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Constant)


class NeedsGreenlets(Exception):
    """The function waits, or calls something unknown, where a generator could not follow."""


class Emitter(Arithmetic, Subscripts, Transformer):
    """Rewrites one function. One instance per function and flavour."""

    def __init__(self, unit, program, tree):
        self.unit, self.program = unit, program
        self.greenlets = program.greenlets
        self.scope = unit.scope
        self.namespace = unit.namespace
        self.locals = bound_names(tree)
        self.facts = Facts(tree, self.meaning)
        self.kinds = Kinds(tree, self.static, unit.parameter_kinds(), program.result_kind)
        self.lists = find_lists(tree, self.static, self.facts)
        self.bound = {id(value): name for name, value in self.namespace.items()
                      if name.startswith("_g")}
        self.sites = {}
        self.blocking = False
        self.waiting = set()  # the functions it calls that wait
        self.depth = 0
        self.walrus = True
        self.counter = 0
        self.parameters = {argument.arg for argument in tree.args.args}

    def visit(self, node):
        if self.unit.in_twin and isinstance(node, _COUNTED):
            return self.generic_visit(node)
        return super().visit(node)

    # -- names ---------------------------------------------------------------------------------

    def static(self, node):
        """What a Name or a chain of attributes stands for, or UNRESOLVED."""
        return static_value(node, self.scope, self.locals)

    def meaning(self, node):
        """For `Facts`: what matters about a name."""
        value = self.static(node)
        if isinstance(value, Primitive):
            return value.inline if value.inline in ("grid", "cas") else None
        if isinstance(value, (tuple, LaneId)):
            return "natural" if isinstance(value, LaneId) or isinstance(value[0], Index) else None
        return value if type(value) is int else None

    def bind(self, value, hint):
        """A name in the new globals that holds `value`."""
        name = self.bound.get(id(value))
        if name is None:
            name = self.bound[id(value)] = f"_g{len(self.namespace)}_{hint}"
            self.namespace[name] = value
        return _name(name)

    def temporary(self):
        """A fresh local name."""
        self.counter += 1
        return f"_i{self.counter}"

    def value_of(self, value, node):
        """The expression that stands for the resolved `value` at `node`."""
        if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Index):
            return chain(f"{THREAD}.{Index.FIELDS[value[0].name]['xyz'.index(value[1])]}")
        if isinstance(value, LaneId):
            return chain(f"{THREAD}.lane")
        if isinstance(value, Index):
            of = self.bind(value, value.name)
            return ast.Call(ast.Attribute(of, "of", ast.Load()), [_name(THREAD)], [])
        if isinstance(value, Device):
            return self.bind(self.program.callable_value(value.function), "function")
        if isinstance(node, ast.Name):
            self.namespace[node.id] = value
            return node
        return self.bind(value, node.attr)

    def visit_Name(self, node):
        if not isinstance(node.ctx, ast.Load):
            return node
        value = self.static(node)
        return node if value is UNRESOLVED else ast.copy_location(self.value_of(value, node), node)

    def visit_Attribute(self, node):
        if isinstance(node.ctx, ast.Load):
            value = self.static(node)
            if value is not UNRESOLVED:
                return ast.copy_location(self.value_of(value, node), node)
        return self.generic_visit(node)

    # -- calls ---------------------------------------------------------------------------------

    def visit_Call(self, node):
        value = self.static(node.func)
        if value is UNRESOLVED:
            return self.dynamic_call(node)
        if isinstance(value, Primitive):
            return self.primitive_call(node, value)
        if isinstance(value, Device):
            return self.device_call(node, value.function)
        if self.unit.in_twin:
            return self.library_call(node, value)
        if (value is min or value is max) and len(node.args) > 1 and not node.keywords and not any(
                isinstance(a, ast.Starred) for a in node.args):
            return self.extremum(node, value)
        if value in (int, float, abs, round, pow):
            converted = self.conversion_call(node, value)
            if converted is not None:
                return converted
        kind = scalar_type(value) if isinstance(value, type) and value not in (
            int, float, bool, complex) else None
        if kind is not None:
            value = cast(kind)
        elif hasattr(value, "device_call"):
            value = value.device_call
        return self.library_call(node, value)

    def library_call(self, node, value):
        """A call of something that is no device code."""
        self.arguments_of(node)
        if value is getattr(builtins, getattr(node.func, "id", ""), None):
            return node
        hint = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        node.func = ast.copy_location(self.bind(value, hint), node.func)
        return node

    def arguments_of(self, node):
        node.args = [self.visit(argument) for argument in node.args]
        for keyword in node.keywords:
            keyword.value = self.visit(keyword.value)

    def dynamic_call(self, node):
        """A call whose target is only known when it happens."""
        function = node.func
        if isinstance(function, ast.Attribute):
            if function.attr == "sync" and not node.args and not node.keywords:
                return self.wait(ast.Call(self.bind(guards.group_sync, "group_sync"),
                                          [_name(THREAD), self.visit(function.value)], []), node)
            return self.method_call(node)
        if isinstance(function, ast.Subscript) and isinstance(
                self.static(function.value), Device):
            name = ast.unparse(function.value)
            raise TypeError(f"{ast.unparse(function)}(...) is launched inside a kernel, and only "
                            f"the host launches kernels. Make {name} a device function, "
                            f"@cuda.jit(device=True), and call it: {name}(...)")
        if isinstance(function, ast.Name) and function.id not in self.locals:
            return self.generic_visit(node)  # an undefined name: Python will say so
        if not self.greenlets:
            raise NeedsGreenlets(f"{ast.unparse(function)} is known only when it is called")
        node = self.generic_visit(node)
        call = ast.Call(self.bind(self.program.call_dynamic, "call"),
                        [_name(THREAD), node.func, *node.args], node.keywords)
        return ast.copy_location(call, node)

    def method_call(self, node):
        """A call of a method of something that is known only when it happens."""
        return self.generic_visit(node)

    def device_call(self, node, function):
        unit = self.program.unit(function, self.argument_kinds(node), self.unit.in_twin)
        self.arguments_of(node)
        if unit.tree is None:
            if unit.needs_thread and not self.greenlets:
                raise NeedsGreenlets(f"{unit.name} has no source")
            node.func = ast.copy_location(self.bind_unit(unit), node.func)
            return node
        call = ast.Call(self.bind_unit(unit), [_name(THREAD), *node.args], node.keywords)
        ast.copy_location(call, node)
        if unit.blocking:
            self.waiting.add(unit)
        if unit.blocking and not self.greenlets:
            self.may_wait(unit.name)
            return ast.copy_location(ast.YieldFrom(call), node)
        return call

    def argument_kinds(self, node):
        """What is known of the arguments of a call, for a copy of the function made for them."""
        if node.keywords or any(isinstance(part, ast.Starred) for part in node.args):
            return ()
        return tuple(general(self.kinds(part)) for part in node.args)

    def bind_unit(self, unit):
        name = f"_f{unit.number}_{unit.safe_name}"
        self.unit.calls[name] = unit
        return _name(name)

    def primitive_call(self, node, primitive):
        inline = getattr(self, f"inline_{primitive.inline}", None)
        if inline is not None:
            short = inline(node, primitive)
            if short is not None:
                return short
        if primitive.kind == "pure":
            if primitive.access:
                self.add_access(node, primitive)
            self.arguments_of(node)
            call = ast.Call(self.bind(primitive.impl, primitive.safe_name), node.args,
                            node.keywords)
            return ast.copy_location(call, node)
        self.arguments_of(node)
        call = ast.Call(self.bind(primitive.impl, primitive.safe_name),
                        [_name(THREAD), *node.args], node.keywords)
        if primitive.kind == "thread":
            return ast.copy_location(call, node)
        return self.wait(call, node)

    def add_access(self, node, primitive):
        """Note an atomic as a memory access."""
        if node.args:
            text = ast.unparse(node)
            array = ast.unparse(node.args[0])
            self.sites[position(node)] = Site(text, array, primitive.access, node.lineno,
                                               node.col_offset)

    def may_wait(self, what):
        if self.depth:
            raise NeedsGreenlets(f"{what} is used inside a nested function or comprehension")
        self.blocking = True

    def wait(self, operation, node):
        """The expression that waits for `operation` and gives its answer."""
        if self.greenlets:
            self.blocking = True
            result = ast.Call(chain(f"{THREAD}.switch"), [operation], [])
        else:
            self.may_wait(ast.unparse(node))
            result = ast.Yield(operation)
        return located(ast.copy_location(result, node))

    def inline_barrier(self, node, primitive):
        if node.args or node.keywords:
            return None
        return self.wait(self.bind(scheduler.BARRIER, "barrier"), node)

    def inline_grid(self, node, primitive):
        dimensions = literal(node.args[0]) if len(node.args) == 1 and not node.keywords else None
        if dimensions not in (1, 2, 3):
            return None
        parts = []
        for axis in "xyz"[:dimensions]:
            if primitive.name.endswith("gridsize"):
                left, right = f"{THREAD}.b.d{axis}", f"{THREAD}.b.g{axis}"
                parts.append(ast.BinOp(chain(left), ast.Mult(), chain(right)))
            else:
                left, right = f"{THREAD}.b.o{axis}", f"{THREAD}.t{axis}"
                parts.append(ast.BinOp(chain(left), ast.Add(), chain(right)))
        result = parts[0] if dimensions == 1 else ast.Tuple(parts, ast.Load())
        return located(ast.copy_location(result, node))

    def inline_shared(self, node, primitive):
        # A declaration is one array per block, whichever thread comes first. Its place in the
        # source, column included, is its name.
        self.arguments_of(node)
        key = ast.Constant((self.unit.number, node.lineno, node.col_offset))
        call = ast.Call(self.bind(guards.shared_array, "shared_array"),
                        [_name(THREAD), key, *node.args], node.keywords)
        return located(ast.copy_location(call, node))

    # -- loops ---------------------------------------------------------------------------------

    def visit_While(self, node):
        if only_waits(node, self.static):
            return self.take_turns(node)
        counts = self.facts.counts(node) and not self.uses_exchange(node)
        return self.count_iterations(node, counts)

    def take_turns(self, node):
        """Let other threads run after each round of a loop that only waits."""
        node.body = [part for part in node.body if not is_sleep(part, self.static)] or [ast.Pass()]
        self.generic_visit(node)
        pause = ast.Expr(self.wait(self.bind(scheduler.POLL, "poll"), node))
        for part in walk(pause):
            ast.copy_location(part, node.test)
        node.body = [pause, *(ast.copy_location(part, node.test) if isinstance(part, ast.Pass)
                              else part for part in node.body)]
        return node

    def visit_For(self, node):
        if self.uses_exchange(node):
            return self.count_iterations(node, False)
        return self.generic_visit(node)

    def uses_exchange(self, loop):
        return any(isinstance(part, ast.Call) and self.meaning(part.func) == "cas"
                   for statement in loop.body for part in walk(statement))

    def count_iterations(self, node, counts):
        """Let other threads run now and then, and end loops that never do."""
        name = self.temporary().replace("_i", "_w")
        self.generic_visit(node)
        stride = 1024 if counts else scheduler.SPIN_STRIDE
        due = ast.UnaryOp(ast.Not(), ast.BinOp(_name(name), ast.BitAnd(),
                                               ast.Constant(stride - 1)))
        if counts:
            pause = ast.Call(self.bind(guards.tick, "tick"), [_name(THREAD), _name(name)], [])
        else:
            pause = self.wait(self.bind(scheduler.SPIN, "spin"), node)
        count = ast.AugAssign(ast.Name(name, ast.Store()), ast.Add(), ast.Constant(1))
        extra = [count, ast.If(due, [ast.Expr(pause)], [])]
        start = ast.Assign([ast.Name(name, ast.Store())], ast.Constant(0))
        for statement in (start, *extra):
            for part in walk(statement):
                ast.copy_location(part, node.test if isinstance(node, ast.While) else node.iter)
        node.body = extra + node.body
        return [start, node]

    # -- nested scopes -------------------------------------------------------------------------

    def nested(self, node, walrus=True):
        self.depth += 1
        outer, self.walrus = self.walrus, walrus and self.walrus
        try:
            return self.generic_visit(node)
        finally:
            self.depth -= 1
            self.walrus = outer

    def visit_FunctionDef(self, node):
        return self.nested(node)

    def visit_Lambda(self, node):
        return self.nested(node)

    def visit_ListComp(self, node):
        return self.nested(node, walrus=False)

    visit_SetComp = visit_DictComp = visit_GeneratorExp = visit_ListComp


def static_value(node, scope, bound):
    """What a Name or a chain of attributes stands for in a function, or UNRESOLVED.

    `scope` is the function's `resolve.Scope`, `bound` its `bound_names`.
    """
    if isinstance(node, ast.Name):
        if node.id in bound:
            return UNRESOLVED
        value = scope.raw(node.id)
        return value if value is UNRESOLVED else mapped(value)
    if isinstance(node, ast.Attribute):
        base = static_value(node.value, scope, bound)
        if base is UNRESOLVED or not foldable(base):
            return UNRESOLVED
        if isinstance(base, Index):
            return (base, node.attr) if node.attr in ("x", "y", "z") else UNRESOLVED
        value = scope.attribute(base, node.attr)
        return value if value is UNRESOLVED else mapped(value)
    return UNRESOLVED


def bound_names(tree):
    """The names that a function binds itself."""
    names = set()
    for node in nodes_of(tree):
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node is not tree:
            names.add(node.name)
        elif isinstance(node, ast.ExceptHandler) and node.name:
            names.add(node.name)
        elif isinstance(node, ast.alias):
            names.add((node.asname or node.name).split(".")[0])
        elif isinstance(node, (ast.MatchAs, ast.MatchStar)) and node.name:
            names.add(node.name)
    return names


def emit(unit, program, kind=Emitter):
    """Rewrite `unit` for `program` with an emitter `kind`; returns which of its callees wait."""
    tree = copied(unit.tree)
    emitter = kind(unit, program, tree)
    if not unit.in_twin:
        refuse_python(unit, tree, emitter.static, emitter.kinds, unit.function is program.root)
    tree.body = [node for statement in tree.body for node in _as_list(emitter.visit(statement))]
    parameter = ast.arg(THREAD)
    target = tree.args.posonlyargs or tree.args.args
    if tree.args.posonlyargs:
        target.insert(0, parameter)
    else:
        tree.args.args.insert(0, parameter)
    tree.name = unit.safe_name
    module = located(ast.Module([tree], []), everywhere=True)
    code = compile(module, unit.filename, "exec", dont_inherit=True)
    namespace = unit.namespace
    before = namespace.get(tree.name, UNRESOLVED)
    exec(code, namespace)
    function = namespace.pop(tree.name)
    if before is not UNRESOLVED:
        namespace[tree.name] = before
    function.__name__, function.__qualname__ = unit.function.__name__, unit.function.__qualname__
    function.__defaults__ = unit.defaults
    function.__kwdefaults__ = unit.kwdefaults
    unit.callable, unit.sites, unit.blocking = function, emitter.sites, emitter.blocking
    return emitter.waiting


def _as_list(result):
    return result if isinstance(result, list) else [result]


