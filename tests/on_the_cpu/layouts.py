import operands

assert list(operands.faults()) == []
