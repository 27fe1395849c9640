"""How the observed flavour emits accesses without brackets (see `implicit`)."""

import ast

from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.observe.implicit import reads_arrays
from course_lib.simulator.rewrite.analysis import literal
from course_lib.simulator.rewrite.resolve import UNRESOLVED, Device
from course_lib.simulator.rewrite.tree import located
from course_lib.simulator.rewrite.tree import name as _name

#: Attributes that every array has and that no record is expected to have as a field.
_SHAPES = ("shape", "strides")


def is_element(target):
    """True for what is stored by an access: `x[i]`, `x[i].field`."""
    return isinstance(target, (ast.Subscript, ast.Attribute)) and isinstance(target.ctx, ast.Store)


class ImplicitAccesses:
    """The part of `observed_rewrite.ObservedEmitter` for accesses without brackets."""

    # -- fields ----------------------------------------------------------------------------------

    def visit_Attribute(self, node):
        if not isinstance(node.ctx, ast.Load) or node.attr in _SHAPES or (
                self.static(node) is not UNRESOLVED):
            return super().visit_Attribute(node)
        number = self.number(node, "load", ast.unparse(node.value))
        return self.act("field", number, self.visit(node.value), ast.Constant(node.attr), at=node)

    def store_field(self, target, value):
        """The statement that stores the expression `value` into `x[i].field`."""
        number = self.number(target, "store", ast.unparse(target.value))
        call = self.act("store_field", number, self.held(value), self.visit(target.value),
                        ast.Constant(target.attr), at=target)
        return ast.copy_location(ast.Expr(call), target)

    def update_field(self, node):
        """`x[i].field += value`."""
        target, statements = node.target, []
        text = ast.unparse(target.value)
        numbers = self.number(target, "load", text), self.number(target, "store", text)
        owner = self.keep(self.visit(target.value), statements)
        name = ast.Constant(target.attr)
        old = self.keep(self.act("field", numbers[0], owner, name, at=target), statements)
        kind = self.kinds(node.value)
        value = self.operation(node.op, old, None, self.visit(node.value), kind, node,
                               literal(node.value), in_place=True)
        value = self.held(ast.copy_location(value, node))
        statements.append(ast.Expr(
            self.act("store_field", numbers[1], value, owner, name, at=target)))
        return [located(ast.copy_location(s, node)) for s in statements]

    # -- unpacking, loops, `in` ------------------------------------------------------------------

    def unpacked_number(self, node):
        """The site of an assignment's value, if some target unpacks it."""
        if not any(isinstance(goal, (ast.Tuple, ast.List)) for goal in node.targets):
            return None
        return self.number(node.value, "load", ast.unparse(node.value))

    def unpack(self, goal, value, statements, number):
        """Assign the expression `value`, of the site `number`, to `goal`."""
        if is_element(goal):
            statements.append(self.store(goal, value))
            return
        if isinstance(goal, ast.Name):
            statements.append(ast.Assign([goal], value))
            return
        later = []
        for place, part in enumerate(goal.elts):
            if not isinstance(part, (ast.Name, ast.Starred)):
                name = self.temporary()
                later.append((part, name))
                goal.elts[place] = ast.copy_location(ast.Name(name, ast.Store()), part)
        if number is not None:
            value = self.act("over", number, value, at=goal)
        statements.append(ast.Assign([goal], value))
        for part, name in later:
            self.unpack(part, _name(name), statements, number)

    def gone_over(self, loop):
        """(the expression that a `for` goes over, statements that its body begins with)."""
        first, iterable = [], loop.iter
        number = self.number(iterable, "load", ast.unparse(iterable))
        call = iterable.func if isinstance(iterable, ast.Call) else None
        if isinstance(call, ast.Name) and self.static(call) is range:
            result = self.visit(iterable)
        else:
            result = self.act("over", number, self.visit(iterable), at=iterable)
        if not isinstance(loop.target, ast.Name):
            name = self.temporary()
            self.unpack(loop.target, _name(name), first, number)
            first = [located(ast.copy_location(s, loop.iter)) for s in first]
            loop.target = ast.copy_location(ast.Name(name, ast.Store()), loop.target)
        return result, first

    def visit_Compare(self, node):
        if not any(isinstance(operator, (ast.In, ast.NotIn)) for operator in node.ops):
            return super().visit_Compare(node)
        for place, (operator, right) in enumerate(zip(node.ops, node.comparators, strict=True)):
            if isinstance(operator, (ast.In, ast.NotIn)):
                number = self.number(right, "load", ast.unparse(right))
                node.comparators[place] = self.act("every", number, self.visit(right), at=right)
            else:
                node.comparators[place] = self.visit(right)
        node.left = self.visit(node.left)
        return node

    # -- calls -----------------------------------------------------------------------------------

    def visit_Call(self, node):
        value = self.static(node.func)
        if value is UNRESOLVED or isinstance(value, (Primitive, Device)) or (
                hasattr(value, "device_call") or not reads_arrays(value)
                or value in (min, max) and len(node.args) != 1):
            return super().visit_Call(node)
        text = ast.unparse(node.args[0]) if node.args else ""
        number = self.number(node, "load", text)
        self.arguments_of(node)
        function = self.bind(value, getattr(value, "__name__", "function"))
        call = self.act("call", number, function, *node.args, at=node)
        call.keywords = node.keywords
        return call

    def method_call(self, node):
        number = self.number(node, "load", ast.unparse(node.func.value))
        owner = self.visit(node.func.value)
        self.arguments_of(node)
        call = self.act("method", number, owner, ast.Constant(node.func.attr), *node.args, at=node)
        call.keywords = node.keywords
        return located(call)
