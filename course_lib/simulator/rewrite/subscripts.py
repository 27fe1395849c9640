"""How the rewriter emits loads and stores: the one place that knows what an access becomes."""

import ast

from course_lib.simulator.engine import arithmetic, guards
from course_lib.simulator.engine.checked import check_index
from course_lib.simulator.rewrite.analysis import literal
from course_lib.simulator.rewrite.sites import Site, is_pure, position
from course_lib.simulator.rewrite.tree import THREAD, located, walk
from course_lib.simulator.rewrite.tree import name as _name


class Subscripts:
    """The part of `rewrite.Emitter` for subscripts and assignments to them."""

    def visit_Subscript(self, node, kind=None):
        if isinstance(node.value, ast.Name) and node.value.id in self.lists:
            row, index, site = self.list_element(node, kind)
            result = ast.copy_location(ast.Subscript(row, index, node.ctx), node)
            return located(result)
        text, array_text = ast.unparse(node), ast.unparse(node.value)
        kind = kind or ("load" if isinstance(node.ctx, ast.Load) else "store")
        base = self.visit(node.value)
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        is_tuple = isinstance(node.slice, ast.Tuple)
        guarded = [self.needs_guard(part) for part in parts]
        again = base
        if any(guarded) and not is_pure(base) or isinstance(base, (ast.Subscript, ast.Call)):
            if self.walrus:
                name = self.temporary()
                base = ast.NamedExpr(ast.Name(name, ast.Store()), base)
                again = _name(name)
            else:
                again = ast.Constant(None)
        site = Site(text, array_text, kind, node.lineno, node.col_offset, base=again,
                    is_tuple=is_tuple)
        emitted = []
        for axis, (part, guard) in enumerate(zip(parts, guarded, strict=True)):
            plain = not guard and not isinstance(part, (ast.Slice, ast.Starred))
            value = self.index(part)
            if guard:
                value, shown = self.guard(value, part, again, axis, node)
            else:
                shown = value if plain and is_pure(value) else ast.Constant(Ellipsis)
                if isinstance(part, ast.Slice):
                    shown = ast.Call(_name("slice"), [ast.Constant(None)], [])
            emitted.append(value)
            site.elements.append(shown)
        self.sites[position(node)] = site
        index = ast.copy_location(ast.Tuple(emitted, ast.Load()), node.slice) if is_tuple else (
            emitted[0])
        result = ast.copy_location(ast.Subscript(base, index, node.ctx), node)
        return located(result)

    def list_element(self, node, kind=None):
        """(innermost list, index, site) of an element of an array kept as lists."""
        array = self.lists[node.value.id]
        kind = kind or ("load" if isinstance(node.ctx, ast.Load) else "store")
        is_tuple = isinstance(node.slice, ast.Tuple)
        parts = node.slice.elts if is_tuple else [node.slice]
        site = Site(ast.unparse(node), node.value.id, kind, node.lineno, node.col_offset,
                    base=node.value, is_tuple=is_tuple, shape=array.shape)
        row, index = node.value, None
        for axis, part in enumerate(parts):
            if axis:
                row = ast.copy_location(ast.Subscript(row, index, ast.Load()), node)
            index = self.index(part)
            if self.needs_guard(part):
                index, shown = self.guard(index, part, node.value, axis, node)
            else:
                shown = index if is_pure(index) else ast.Constant(Ellipsis)
            site.elements.append(shown)
        self.sites[position(node)] = site
        return row, index, site

    def element_value(self, array, value, kind=None):
        """`value`, of a known kind or None, as an element of an array kept as lists."""
        if kind is array.scalar:
            return value
        name = self.temporary()
        store = ast.NamedExpr(ast.Name(name, ast.Store()), value)
        test = ast.Compare(ast.Attribute(store, "__class__", ast.Load()), [ast.Is()],
                           [self.bind(array.scalar, array.scalar.__name__)])
        call = ast.Call(self.bind(array.convert, "convert"), [_name(name)], [])
        return located(
            ast.copy_location(ast.IfExp(test, _name(name), call), value))

    def list_target(self, target):
        """The ListArray that `target` stores into, or None."""
        if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
            return self.lists.get(target.value.id)
        return None

    def visit_Assign(self, node):
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id in self.lists:
            return self.list_declaration(node, self.lists[target.id])
        goals = [part for goal in node.targets for part in (
            goal.elts if isinstance(goal, (ast.Tuple, ast.List)) else [goal])]
        if not any(isinstance(part, (ast.Subscript, ast.Attribute)) for part in goals):
            return self.generic_visit(node)
        if len(node.targets) > 1:
            return self.chained_store(node)
        if isinstance(target, (ast.Subscript, ast.Attribute)):
            return self.store(target, self.visit(node.value), self.kinds(node.value), node)
        return self.unpacked_store(node, target)

    def store(self, target, value, kind, at):
        """The statement, or statements, that store the expression `value` in a subscript or in a
        field of a record.
        """
        if isinstance(target, ast.Attribute):
            call = self.called(arithmetic.store_field, at, self.visit(target.value),
                               ast.Constant(target.attr), value)
            return ast.copy_location(ast.Expr(call), at)
        array = self.list_target(target)
        if array is not None:
            value = self.element_value(array, value, kind)
            return ast.copy_location(ast.Assign([self.visit(target)], value), at)
        into = self.kinds(target.value)
        return self.stored(self.visit(target), value, into, kind, at)

    def unpacked_store(self, node, target):
        """a[i], b[i] = value: all values first, then the stores from left to right."""
        together = isinstance(node.value, (ast.Tuple, ast.List)) and len(node.value.elts) == len(
            target.elts) and not any(isinstance(part, ast.Starred)
                                     for part in (*target.elts, *node.value.elts))
        kinds = [self.kinds(part) for part in node.value.elts] if together else (
            [None] * len(target.elts))
        value, stores, goals = self.visit(node.value), [], []
        for part, kind in zip(target.elts, kinds, strict=True):
            if isinstance(part, (ast.Subscript, ast.Attribute)):
                name = self.temporary()
                stores.append((part, name, kind))
                part = ast.copy_location(ast.Name(name, ast.Store()), part)
            else:
                part = self.visit(part)
            goals.append(part)
        goal = ast.copy_location(ast.Tuple(goals, ast.Store()), target)
        statements = [ast.Assign([goal], value)]
        for part, name, kind in stores:
            made = self.store(part, ast.copy_location(_name(name), part), kind, node)
            statements += made if isinstance(made, list) else [made]
        return [located(ast.copy_location(s, node)) for s in statements]

    def chained_store(self, node):
        """a = s[i] = value: evaluate once, then store from left to right."""
        name, kind = self.temporary(), self.kinds(node.value)
        statements = [ast.Assign([ast.Name(name, ast.Store())], self.visit(node.value))]
        for target in node.targets:
            value = ast.copy_location(_name(name), node)
            element = isinstance(target, (ast.Subscript, ast.Attribute))
            made = self.store(target, value, kind, node) if element else self.visit_Assign(
                ast.copy_location(ast.Assign([target], value), node))
            statements += made if isinstance(made, list) else [made]
        return [located(ast.copy_location(s, node)) for s in statements]

    def list_declaration(self, node, array):
        key = ast.Constant((self.unit.number, node.value.lineno, node.value.col_offset))
        if array.shared:
            call = ast.Call(self.bind(guards.shared_list, "shared_list"),
                            [_name(THREAD), key, self.bind(array, "declared")], [])
        else:
            call = ast.Call(self.bind(array.make, "local_list"), [], [])
        node.value = ast.copy_location(call, node.value)
        return located(node)

    def update_list(self, node, array):
        """s[i] += value, with the result converted to the element type."""
        row, index, _ = self.list_element(node.target, "update")
        statements = []
        if not isinstance(row, ast.Name):
            row = self.keep(row, statements)
        if not isinstance(index, (ast.Constant, ast.Name)) or isinstance(index, ast.Name) and (
                index.id in _stored_names(node.value)):
            index = self.keep(index, statements)
        old = ast.copy_location(ast.Subscript(row, index, ast.Load()), node.target)
        kinds = self.kinds(loaded(node.target)), self.kinds(node.value)
        value = self.operation(node.op, old, kinds[0], self.visit(node.value), kinds[1], node,
                               literal(node.value))
        target = ast.copy_location(ast.Subscript(row, index, ast.Store()), node.target)
        store = ast.Assign([target], self.element_value(
            array, value, self.kinds.operation(node.op, *kinds)))
        statements.append(store)
        return [located(ast.copy_location(s, node)) for s in statements]

    def keep(self, value, statements):
        """Add `name = value` to the statements and give the name."""
        name = self.temporary()
        statements.append(ast.Assign([ast.Name(name, ast.Store())], value))
        return _name(name)

    def needs_guard(self, part):
        if isinstance(part, (ast.Slice, ast.Starred)):
            return False
        if isinstance(part, ast.Constant):
            return type(part.value) is int and part.value < 0
        return not self.facts.is_natural(part)

    def guard(self, value, part, base, axis, node):
        """An index checked for being negative, and the expression that shows it afterwards."""
        if not self.walrus:
            check = self.bind(check_index, "check_index")
            call = ast.Call(check, [base, value, ast.Constant(axis)], [])
            return ast.copy_location(call, node), ast.Constant(Ellipsis)
        name = self.temporary()
        store = ast.NamedExpr(ast.Name(name, ast.Store()), value)
        positive = ast.Compare(_name(name), [ast.GtE()], [ast.Constant(0)])
        if self.facts.is_integer(part):
            test = ast.Compare(store, [ast.GtE()], [ast.Constant(0)])
        else:
            is_int = ast.Compare(ast.Attribute(store, "__class__", ast.Load()), [ast.Is()],
                                 [self.bind(int, "int")])
            test = ast.BoolOp(ast.And(), [is_int, positive])
        in_list = isinstance(base, ast.Name) and base.id in self.lists
        check = self.bind(guards.refuse_index if in_list else check_index, "check_index")
        call = ast.Call(check, [base, _name(name), ast.Constant(axis)], [])
        result = ast.IfExp(test, _name(name), call)
        for part_node in walk(call):
            if not hasattr(part_node, "lineno"):
                ast.copy_location(part_node, node)
        return ast.copy_location(result, node), _name(name)

    def visit_AugAssign(self, node):
        target, array = node.target, self.list_target(node.target)
        if array is not None:
            return self.update_list(node, array)
        value_kind = self.kinds(node.value)
        if isinstance(target, ast.Name):
            if self.unit.in_twin:
                return self.generic_visit(node)
            old = ast.copy_location(_name(target.id), target)
            kinds = self.kinds.names.get(target.id), value_kind
            value = self.operation(node.op, old, kinds[0], self.visit(node.value), kinds[1], node,
                                   literal(node.value), in_place=True)
            return ast.copy_location(ast.Assign([target], value), node)
        if isinstance(target, ast.Attribute):
            statements = []
            owner = self.keep(self.visit(target.value), statements)
            old = ast.copy_location(ast.Attribute(owner, target.attr, ast.Load()), target)
            value = self.operation(node.op, old, None, self.visit(node.value), value_kind, node,
                                   in_place=True)
            statements.append(ast.Expr(self.called(
                arithmetic.store_field, node, owner, ast.Constant(target.attr), value)))
            return [located(ast.copy_location(s, node)) for s in statements]
        return self.update_array(node)

    def update_array(self, node):
        """x[i] += value: the result is converted to the element type, as a store converts it."""
        target, array = node.target, self.kinds(node.target.value)
        kinds = self.kinds(loaded(target)), self.kinds(node.value)
        emitted = self.visit_Subscript(target, kind="update")
        if self.updates_plainly(array, node.op, kinds[1]) or any(
                isinstance(part, ast.Slice) for part in walk(emitted.slice)):
            node.target, node.value = emitted, self.visit(node.value)
            return node
        statements = []
        emitted.value = self.keep(emitted.value, statements)
        emitted.slice = self.keep(emitted.slice, statements)
        old = ast.copy_location(ast.Subscript(emitted.value, emitted.slice, ast.Load()), target)
        value = self.operation(node.op, old, kinds[0], self.visit(node.value), kinds[1], node,
                               literal(node.value), in_place=True)
        statements += self.stored(emitted, value, array, self.kinds.operation(node.op, *kinds),
                                  node)
        return [located(ast.copy_location(s, node)) for s in statements]


def loaded(target):
    """The expression that reads what the statement writes."""
    return ast.copy_location(ast.Subscript(target.value, target.slice, ast.Load()), target)


def _stored_names(node):
    return {part.target.id for part in walk(node) if isinstance(part, ast.NamedExpr)}
