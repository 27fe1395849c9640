import refusals

assert list(refusals.faults()) == []
