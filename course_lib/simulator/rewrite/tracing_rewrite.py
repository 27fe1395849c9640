"""The traced flavour of a kernel: the observed one, which also says where loops and calls begin.

Two lanes of a warp take part in the same request if they are at the same place of the source, in
the same iteration of each loop around it, in the same call. So loops and calls are marked.
"""

import ast

from course_lib.simulator.rewrite.emitter import Emitter
from course_lib.simulator.rewrite.observed_rewrite import ObservedEmitter
from course_lib.simulator.rewrite.resolve import is_twin


class TracingEmitter(ObservedEmitter):
    """Rewrites one function for the tracer."""

    def condition(self, node):
        if self.is_twin:
            return self.visit(node.test)
        method = "loop_test" if isinstance(node, ast.While) else "branch"
        number = self.number(node.test, "branch")
        return self.act(method, number, self.visit(node.test), at=node.test)

    def visit_While(self, node):
        number = self.number(node.test, "branch")
        enter, leave = (ast.copy_location(ast.Expr(self.act(method, number, at=node.test)), node)
                        for method in ("enter", "leave"))
        made = super().visit_While(node)
        if self.is_twin:
            return made
        return [enter, *(made if isinstance(made, list) else [made]), leave]

    def device_call(self, node, function):
        if self.is_twin or is_twin(function) or (
                self.program.unit(function, self.argument_kinds(node)).tree is None):
            return super().device_call(node, function)
        number = self.number(node, "call")
        entered = self.act("entered", number, at=node)
        call = Emitter.device_call(self, node, function)
        return self.act("returned", entered, call, at=node)
