import layouts
import operands

assert list(layouts.faults()) == []
assert list(operands.faults()) == []
