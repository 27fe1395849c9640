"""How the observed flavour tells barriers apart: by the rounds of the loops around them."""

import ast

from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.rewrite.resolve import Device
from course_lib.simulator.rewrite.tree import name as _name
from course_lib.simulator.rewrite.tree import walk


class BarrierRounds:
    """The part of `observed_rewrite.ObservedEmitter` that counts rounds.

    `rounds` holds the names that count those of the loops around, where a barrier is inside.
    """

    def counted(self):
        """The rounds of the loops around, as one more argument; none outside of loops."""
        names = [_name(name) for name in self.rounds]
        return [ast.Tuple(names, ast.Load())] if names else []

    def has_barrier(self, loop):
        """True if the threads of a block may meet inside a loop."""
        for part in walk(loop):
            if not isinstance(part, ast.Call):
                continue
            value = self.static(part.func)
            if isinstance(value, Primitive):
                if value.name.startswith(("cuda.syncthreads", "simulator.cluster.sync")):
                    return True
            elif isinstance(value, Device):
                if self.program.unit(value.function, self.argument_kinds(part)).blocking:
                    return True
            elif isinstance(part.func, ast.Attribute) and part.func.attr == "sync":
                return True
        return False

    def count_rounds(self, loop, visit):
        """A loop rewritten by `visit`, with its rounds counted if a barrier is in it."""
        if self.depth or self.is_twin or not self.has_barrier(loop):
            return visit(loop)
        name = self.temporary().replace("_i", "_r")
        self.rounds.append(name)
        made = visit(loop)
        self.rounds.pop()
        start = ast.Assign([ast.Name(name, ast.Store())], ast.Constant(0))
        count = ast.AugAssign(ast.Name(name, ast.Store()), ast.Add(), ast.Constant(1))
        for statement in (start, count):
            for part in walk(statement):
                ast.copy_location(part, loop)
        loop.body.insert(0, count)
        return [start, *(made if isinstance(made, list) else [made])]

    def visit_For(self, node):
        return self.count_rounds(node, super().visit_For)
