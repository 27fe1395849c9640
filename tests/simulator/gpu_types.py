"""A process of its own, with the real numba.cuda: the types its compiler gives to operations.

Reads [names of types, symbols of `number_types.OPERATORS`] as JSON; writes a list of [symbol,
operands, types they are converted to or null, type of the result or null].
"""

import itertools
import json
import os
import sys

os.environ["NUMBA_ENABLE_CUDASIM"] = os.environ["COURSE_LIB_SIMULATOR"] = "0"

import numba.cuda.compiler  # noqa: E402, F401  (fills the typing context)
from numba.cuda import types  # noqa: E402
from numba.cuda.descriptor import cuda_target  # noqa: E402

from course_lib.simulator.rewrite.number_types import OPERATORS  # noqa: E402

UNARY = ("neg", "pos", "invert", "abs", "int", "float", "round")


def name(kind):
    """numba's name of a type, as `number_types` has it."""
    return "boolean" if str(kind) == "bool" else str(kind)


names, symbols = json.load(sys.stdin)
context = cuda_target.typing_context
context.refresh()
answers = []
for symbol in symbols:
    for operands in itertools.product(names, repeat=1 if symbol in UNARY else 2):
        try:
            found = context.resolve_function_type(
                OPERATORS[symbol], tuple(getattr(types, operand) for operand in operands), {})
        except Exception:  # whatever it is, numba refuses the operation
            found = None
        answers.append([symbol, operands, *(
            (None, None) if found is None else ([name(kind) for kind in found.args],
                                                name(found.return_type)))])
json.dump(answers, sys.stdout)
