"""The observed flavour of a kernel: each access, wait and branch goes through `_t.o`.

`_t.o` is the thread's `execution.Execution`; a site's number is its place in `launch.sites`.
"""

import ast
import itertools

from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.engine import scheduler
from course_lib.simulator.observe.execution import fence_scope
from course_lib.simulator.observe.observer import ObservedSite
from course_lib.simulator.rewrite.analysis import literal
from course_lib.simulator.rewrite.barrier_rewrite import BarrierRounds
from course_lib.simulator.rewrite.emitter import Emitter
from course_lib.simulator.rewrite.implicit_rewrite import ImplicitAccesses, is_element
from course_lib.simulator.rewrite.polls import endless_poll
from course_lib.simulator.rewrite.resolve import is_twin
from course_lib.simulator.rewrite.subscripts import loaded
from course_lib.simulator.rewrite.tree import THREAD, chain, located, nodes_of, walk
from course_lib.simulator.rewrite.tree import name as _name
from course_lib.simulator.rewrite.turns import asks


class ObservedEmitter(BarrierRounds, ImplicitAccesses, Emitter):
    """Rewrites one function for observers."""

    def __init__(self, unit, program, tree):
        super().__init__(unit, program, tree)
        self.lists = {}
        self.is_root = unit.function is program.root
        self.is_twin = unit.in_twin
        self.polled = _polled(tree, self.facts, self.changes)
        self.released = self.stores_after_fences(tree)
        self.unused = {id(node.value) for node in nodes_of(tree) if isinstance(node, ast.Expr)}
        self.target_name = ""
        self.rounds = []  # names that count the rounds of the loops around that have a barrier

    # -- sites -----------------------------------------------------------------------------------

    def number(self, node, kind, array="", relaxed=False, polled=False):
        """The expression that gives the number of the site at `node`."""
        if self.is_twin:
            return chain(f"{THREAD}.caller")
        key = (
            self.unit.number,
            kind,
            node.lineno,
            node.col_offset,
            node.end_lineno,
            node.end_col_offset,
        )
        sites = self.program.observed_numbers
        if key not in sites:
            sites[key] = len(self.program.observed_sites)
            self.program.observed_sites.append(
                ObservedSite(
                    sites[key],
                    kind,
                    ast.unparse(node),
                    array,
                    self.unit.filename,
                    self.unit.name,
                    node.lineno,
                    node.col_offset,
                    node.end_lineno,
                    node.end_col_offset,
                    relaxed,
                    polled,
                )
            )
        return ast.Constant(sites[key])

    def act(self, method, number, *arguments, at):
        """The call `_t.o.method(_t, number, *arguments)`."""
        call = ast.Call(chain(f"{THREAD}.o.{method}"), [_name(THREAD), number, *arguments], [])
        return located(ast.copy_location(call, at))

    # -- accesses --------------------------------------------------------------------------------

    def visit_Subscript(self, node, kind=None):
        """A load. Stores are made by the statements that hold them."""
        if not isinstance(node.ctx, ast.Load) or _is_shape(node.value):
            return self.generic_visit(node)
        relaxed = id(node) in self.polled
        number = self.number(node, "load", ast.unparse(node.value), relaxed, polled=relaxed)
        array, index = self.visit(node.value), self.visit_index(node.slice)
        if relaxed:
            return self.act("relaxed_load", number, array, index, at=node)
        suffix, parts = _by_dimension(index)
        return self.act(f"load{suffix}", number, array, *parts, at=node)

    def visit_index(self, index):
        """An index as an expression; slices become `slice` objects."""
        if isinstance(index, ast.Slice):
            parts = [
                ast.Constant(None) if part is None else self.visit(part)
                for part in (index.lower, index.upper, index.step)
            ]
            return ast.copy_location(ast.Call(self.bind(slice, "slice"), parts, []), index)
        if isinstance(index, ast.Tuple):
            parts = [self.visit_index(part) for part in index.elts]
            return ast.copy_location(ast.Tuple(parts, ast.Load()), index)
        return self.index(index)

    def held(self, value):
        """`value`, kept while the other threads have a turn, if the order is "interleaved"."""
        if not self.program.interleaved or self.is_twin:
            return value
        pause = super().wait(self.bind(scheduler.PAUSE, "pause"), value)
        both = ast.Tuple([value, pause], ast.Load())
        kept = ast.Subscript(both, ast.Constant(0), ast.Load())
        return located(ast.copy_location(kept, value))

    def store(self, target, value):
        """The statement that stores the expression `value` into a subscript or a field."""
        if isinstance(target, ast.Attribute):
            return self.store_field(target, value)
        relaxed = id(target) in self.released
        number = self.number(target, "store", ast.unparse(target.value), relaxed)
        value = self.held(value)
        if relaxed:
            index, array = self.visit_index(target.slice), self.visit(target.value)
            return ast.copy_location(
                ast.Expr(self.act("relaxed_store", number, array, index, value, at=target)), target
            )
        suffix, parts = _by_dimension(self.visit_index(target.slice))
        array = self.visit(target.value)
        return ast.copy_location(
            ast.Expr(self.act(f"store{suffix}", number, value, array, *parts, at=target)), target
        )

    def visit_Assign(self, node):
        target = node.targets[0]
        if isinstance(target, ast.Name):
            self.target_name = target.id
        paired = (
            isinstance(target, ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and (len(target.elts) == len(node.value.elts))
        )
        unpacked = None if paired else self.unpacked_number(node)
        if paired:
            for place, part in enumerate(target.elts):
                self.target_name = part.id if isinstance(part, ast.Name) else ""
                node.value.elts[place] = self.visit(node.value.elts[place])
            value = node.value
        else:
            value = self.visit(node.value)
        self.target_name = ""
        if len(node.targets) == 1 and is_element(target):
            return self.store(target, value)
        if all(isinstance(goal, ast.Name) for goal in node.targets):
            node.value = value
            return node
        statements = []
        kept = self.keep(value, statements) if len(node.targets) > 1 else value
        for goal in node.targets:
            self.unpack(goal, kept, statements, unpacked)
        return [located(ast.copy_location(s, node)) for s in statements]

    def visit_AnnAssign(self, node):
        if node.value is not None:
            return self.visit_Assign(ast.copy_location(ast.Assign([node.target], node.value), node))
        return node

    def visit_AugAssign(self, node):
        target = node.target
        if isinstance(target, ast.Attribute):
            return self.update_field(node)
        if not isinstance(target, ast.Subscript):
            return super().visit_AugAssign(node)
        statements = []
        array = self.keep(self.visit(target.value), statements)
        index = self.visit_index(target.slice)
        if isinstance(index, ast.Tuple):
            index.elts = [self.keep(part, statements) for part in index.elts]
        else:
            index = self.keep(index, statements)
        suffix, parts = _by_dimension(index)
        text = ast.unparse(target.value)
        old = self.act(f"load{suffix}", self.number(target, "load", text), array, *parts, at=target)
        # Python finds the old value before it works out the new operand.
        old = self.keep(old, statements)
        kinds = self.kinds(loaded(target)), self.kinds(node.value)
        right = self.visit(node.value)
        value = self.operation(node.op, old, kinds[0], right, kinds[1], node, literal(node.value),
                               in_place=True)
        value = self.held(ast.copy_location(value, node))
        store = self.act(
            f"store{suffix}", self.number(target, "store", text), value, array, *parts, at=target
        )
        statements.append(ast.Expr(store))
        return [located(ast.copy_location(s, node)) for s in statements]

    def changes(self, node):
        """True for a call of an atomic that changes its element whatever is there."""
        primitive = self.static(node.func) if isinstance(node, ast.Call) and node.args else None
        return isinstance(primitive, Primitive) and primitive.access == "atomic" and (
            primitive.inline != "cas")

    def stores_after_fences(self, tree):
        """Ids of the targets that are stored to right after a fence: flags and locks let go."""
        found = set()
        for node in nodes_of(tree):
            for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
                for before, after in itertools.pairwise(body if isinstance(body, list) else ()):
                    if (
                        isinstance(before, ast.Expr)
                        and isinstance(before.value, ast.Call)
                        and (fence_scope(self.static(before.value.func)) is not None)
                    ):
                        if isinstance(after, ast.Assign):
                            found |= {id(target) for target in after.targets}
                        elif isinstance(after, ast.Expr):
                            found.add(id(after.value))  # a store with a cache hint
        return found

    # -- calls -----------------------------------------------------------------------------------

    def primitive_call(self, node, primitive):
        if primitive.name in ("cuda.shared.array", "cuda.local.array"):
            return self.declaration(node, primitive.name.split(".")[1])
        if primitive.access:
            return self.access_call(node, primitive)
        scope = fence_scope(primitive)
        if scope is not None:
            return self.act("fence", self.number(node, "fence"), ast.Constant(scope), at=node)
        return super().primitive_call(node, primitive)

    def declaration(self, node, space):
        number = self.number(node, space, self.target_name)
        extra = [ast.Constant(self.target_name or space)]
        if space == "shared":
            extra.append(ast.Constant((self.unit.number, node.lineno, node.col_offset)))
        self.arguments_of(node)
        call = self.act(space, number, *extra, *node.args, at=node)
        call.keywords = node.keywords
        return located(call)

    def access_call(self, node, primitive):
        """An atomic, a load or store with a hint, or a vector access."""
        array = ast.unparse(node.args[0]) if node.args else ""
        hinted = primitive.access in ("load", "store")
        # To a compiler a hint makes no difference. A twin's are made to be raced, if it says so.
        relaxed = hinted and (self.is_twin or id(node) in self.polled | self.released) or (
            primitive.access == "atomic" and id(node) not in self.unused)
        kind = {"load_many": "load", "load_cluster": "load", "store_many": "store"}.get(
            primitive.access, primitive.access
        )
        polled = id(node) in self.polled and (hinted or asks(node, self.static))
        number = self.number(node, kind, array, relaxed, polled)
        # Keyword arguments of these are rare: the primitive itself sorts them out.
        positional = [*node.args, *(keyword.value for keyword in node.keywords)]
        arguments = [self.visit(argument) for argument in positional]
        if primitive.access == "atomic":
            operation = self.bind(primitive.impl, primitive.safe_name)
            arguments[-1:] = map(self.held, arguments[-1:])
            return self.act("atomic", number, operation, *arguments, at=node)
        if primitive.access == "store":
            array, index, value = arguments[0], arguments[1], self.held(arguments[2])
            arguments = [array, index, value] if relaxed else [value, array, index]
        method = primitive.access if not relaxed else f"relaxed_{primitive.access}"
        return self.act(method, number, *arguments, at=node)

    def device_call(self, node, function):
        if self.is_twin:
            return super().device_call(node, function)
        callee = self.program.unit(function, self.argument_kinds(node))
        if not is_twin(callee.function):
            number = self.number(node, "call")
            call = super().device_call(node, function)
            if not callee.blocking:
                return call
            before = self.act("enter_call", number, *self.counted(), at=node)
            return self.act("leave_call", before, call, at=node)
        relaxed = getattr(callee.function, "relaxed", False)
        number = self.number(node, "call", relaxed=relaxed)
        before = self.act("calling", number, at=node)
        call = super().device_call(node, function)
        return self.act("called", before, call, at=node)

    def wait(self, operation, node):
        turns = scheduler.SPIN, scheduler.POLL
        if isinstance(operation, ast.Name) and self.namespace.get(operation.id) in turns:
            return super().wait(operation, node)
        primitive = self.static(node.func) if isinstance(node, ast.Call) else None
        name = primitive.name if isinstance(primitive, Primitive) else "grid.sync"
        kind = (
            "barrier"
            if name.startswith("cuda.syncthreads")
            else ({"grid.sync": "grid", "simulator.cluster.sync": "cluster"}.get(name, "warp"))
        )
        rounds = () if kind == "warp" else self.counted()
        act = self.act("wait", self.number(node, kind), operation, *rounds, at=node)
        return super().wait(act, node)

    # -- branches --------------------------------------------------------------------------------

    def condition(self, node):
        if self.program.branches and not self.is_twin:
            number = self.number(node.test, "branch")
            return self.act("branch", number, self.visit(node.test), at=node.test)
        return self.visit(node.test)

    def visit_While(self, node):
        reads = [] if self.is_twin else endless_poll(node, self.static)
        if not reads:
            return self.count_rounds(node, super().visit_While)
        array = getattr(reads[0], "value", None)
        text = ast.unparse(array) if array is not None else ""
        polled = id(reads[0]) in self.polled
        number = self.number(reads[0], "load", text, polled, polled)
        array = _name(array.id) if isinstance(array, ast.Name) else ast.Constant(None)
        told = ast.Expr(self.act("endless_poll", number, array, at=reads[0]))
        made = super().visit_While(node)
        return [ast.copy_location(told, node), *(made if isinstance(made, list) else [made])]

    def visit_If(self, node):
        node.test = self.condition(node)
        node.body, node.orelse = self.statements(node.body), self.statements(node.orelse)
        return node

    def visit_IfExp(self, node):
        decided = self.kinds.decided(node.test)
        node.test = self.condition(node)
        node.body, node.orelse = self.branches(node, decided)
        return node

    def statements(self, body):
        """Rewritten statements."""
        result = []
        for statement in body:
            made = self.visit(statement)
            result += made if isinstance(made, list) else [made]
        return result

    def generic_visit(self, node):
        # Every loop, whoever rewrites it, comes through here.
        if isinstance(node, ast.While):
            node.test = self.condition(node)
            node.body, node.orelse = self.statements(node.body), self.statements(node.orelse)
            return node
        if isinstance(node, ast.For):
            iterable, watched = node.iter, self.program.branches and not self.is_twin
            # Before the visit, which may change the expression that the site shows.
            number = self.number(iterable, "branch") if watched else None
            node.iter, first = self.gone_over(node)
            if watched:
                node.iter = self.act("loop", number, node.iter, at=iterable)
            node.body, node.orelse = self.statements(node.body), self.statements(node.orelse)
            node.body[:0] = first
            return node
        return super().generic_visit(node)

    def visit_Return(self, node):
        node = self.generic_visit(node)
        if self.is_root and not self.depth:
            leave = ast.Expr(self.act("returning", self.number(node, "return"), at=node))
            return [ast.copy_location(leave, node), node]
        return node


def _by_dimension(index):
    """(suffix of the method, arguments) for an index expression."""
    if isinstance(index, ast.Tuple):
        if len(index.elts) == 2 and not any(isinstance(part, ast.Starred) for part in index.elts):
            return "2", index.elts
        return "", [index]
    return "1", [index]


def _is_shape(node):
    return isinstance(node, ast.Attribute) and node.attr in ("shape", "strides")


def _polled(tree, facts, changes):
    """Ids of the loads that a loop waits on: they are meant to see another thread's write."""
    found = set()
    for loop in nodes_of(tree):
        if not isinstance(loop, ast.While) or facts.counts(loop):
            continue
        names = {part.id for part in walk(loop.test) if isinstance(part, ast.Name)}
        waited = [loop.test]
        counted = {ast.unparse(node.args[0]) for node in walk(loop) if changes(node)}
        for node in walk(loop):
            if isinstance(node, ast.If) and any(isinstance(s, ast.Break) for s in node.body):
                names |= {part.id for part in walk(node.test) if isinstance(part, ast.Name)}
                waited.append(node.test)
        for node in walk(loop):
            if isinstance(node, ast.Assign) and any(
                isinstance(goal, ast.Name) and goal.id in names for goal in node.targets
            ):
                waited.append(node.value)
        for expression in waited:
            found |= {
                id(part)
                for part in walk(expression)
                if isinstance(part, ast.Call)
                or isinstance(part, ast.Subscript)
                and ast.unparse(part.value) not in counted
            }
    return found
