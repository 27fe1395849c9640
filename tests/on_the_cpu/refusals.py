import refusals
from contract import operator_calls
from contract.operators import SUBJECTS, Held

assert list(refusals.faults()) == []
for subject in SUBJECTS:
    for operator, args in Held(subject).calls.items():
        for device in ("cpu", "meta"):
            assert list(operator_calls.faults(operator, args, device)) == []
