"""How the rewriter emits loads and stores: the one place that knows what an access becomes."""

import ast

from . import guards
from .sites import Site, is_pure, position
from .tree import THREAD
from .tree import name as _name


class Subscripts:
    """The part of `rewrite.Emitter` for subscripts and assignments to them."""

    def visit_Subscript(self, node, kind=None):
        if isinstance(node.value, ast.Name) and node.value.id in self.lists:
            row, index, site = self.list_element(node, kind)
            result = ast.copy_location(ast.Subscript(row, index, node.ctx), node)
            return ast.fix_missing_locations(result)
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
            value = self.visit(part)
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
        return ast.fix_missing_locations(result)

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
            index = self.visit(part)
            if self.needs_guard(part):
                index, shown = self.guard(index, part, node.value, axis, node)
            else:
                shown = index if is_pure(index) else ast.Constant(Ellipsis)
            site.elements.append(shown)
        self.sites[position(node)] = site
        return row, index, site

    def element_value(self, array, value):
        """`value` converted to the element type of an array kept as lists."""
        name = self.temporary()
        store = ast.NamedExpr(ast.Name(name, ast.Store()), value)
        test = ast.Compare(ast.Attribute(store, "__class__", ast.Load()), [ast.Is()],
                           [self.bind(array.scalar, array.scalar.__name__)])
        call = ast.Call(self.bind(array.convert, "convert"), [_name(name)], [])
        return ast.fix_missing_locations(
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
        if not any(self.list_target(part) for goal in node.targets for part in (
                goal.elts if isinstance(goal, ast.Tuple) else [goal])):
            return self.generic_visit(node)
        if len(node.targets) > 1:
            return self.chained_store(node)
        node.value = self.visit(node.value)
        array = self.list_target(target)
        if array is not None:
            node.value = self.element_value(array, node.value)
        else:
            for place, part in enumerate(target.elts):
                array = self.list_target(part)
                if array is not None:
                    node.value.elts[place] = self.element_value(array, node.value.elts[place])
        node.targets = [self.visit(target)]
        return node

    def chained_store(self, node):
        """a = s[i] = value: evaluate once, then store from left to right."""
        name = self.temporary()
        first = ast.Assign([ast.Name(name, ast.Store())], self.visit(node.value))
        statements = [first]
        for target in node.targets:
            statements.append(self.visit_Assign(ast.copy_location(
                ast.Assign([target], ast.copy_location(_name(name), node)), node)))
        return [ast.fix_missing_locations(ast.copy_location(s, node)) for s in statements]

    def list_declaration(self, node, array):
        key = ast.Constant((self.unit.number, node.value.lineno, node.value.col_offset))
        if array.shared:
            call = ast.Call(self.bind(guards.shared_list, "shared_list"),
                            [_name(THREAD), key, self.bind(array, "declared")], [])
        else:
            call = ast.Call(self.bind(array.make, "local_list"), [], [])
        node.value = ast.copy_location(call, node.value)
        return ast.fix_missing_locations(node)

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
        value = ast.copy_location(ast.BinOp(old, node.op, self.visit(node.value)), node)
        target = ast.copy_location(ast.Subscript(row, index, ast.Store()), node.target)
        store = ast.Assign([target], self.element_value(array, value))
        statements.append(store)
        return [ast.fix_missing_locations(ast.copy_location(s, node)) for s in statements]

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
            check = self.bind(guards.check_index, "check_index")
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
        check = self.bind(guards.refuse_index if in_list else guards.check_index, "check_index")
        call = ast.Call(check, [base, _name(name), ast.Constant(axis)], [])
        result = ast.IfExp(test, _name(name), call)
        for part_node in ast.walk(call):
            if not hasattr(part_node, "lineno"):
                ast.copy_location(part_node, node)
        return ast.copy_location(result, node), _name(name)

    def visit_AugAssign(self, node):
        array = self.list_target(node.target)
        if array is not None:
            return self.update_list(node, array)
        if isinstance(node.op, ast.Div) and isinstance(node.target, ast.Name) and (
                may_divide_python_numbers(node.value)):
            old = ast.copy_location(_name(node.target.id), node.target)
            quotient = self.divide(old, self.visit(node.value), node)
            return ast.copy_location(ast.Assign([node.target], quotient), node)
        if isinstance(node.target, ast.Subscript):
            node.target = self.visit_Subscript(node.target, kind="update")
        else:
            node.target = self.visit(node.target)
        node.value = self.visit(node.value)
        return node


def _stored_names(node):
    return {part.target.id for part in ast.walk(node) if isinstance(part, ast.NamedExpr)}


def may_divide_python_numbers(divisor):
    """True unless `divisor` is a constant other than 0, or certainly one of NumPy's numbers."""
    if isinstance(divisor, ast.Constant):
        return not divisor.value
    return not isinstance(divisor, ast.Subscript)
