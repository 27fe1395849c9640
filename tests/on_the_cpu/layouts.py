import layouts

assert list(layouts.faults()) == []
