"""Intrinsics come in pairs: machine code for a GPU, and a twin that does the same in Python.

`runtime.intrinsics` says what that is for. A module of twins hands them to `in_use`, with the name
of the module beside it that holds the machine code.
"""

import importlib
from pathlib import Path

from course_lib import simulator
from course_lib.runtime.host import device

#: What the other modules of machine code build on.
_BASE = f"{__name__.rpartition('.')[0]}.ptx.base"
_known = {}  # module of either half -> (twins by name, files with the machine code)


def in_use(twins, machine_code, results=()):
    """Name -> what kernels of this process are to call, for each of `twins`.

    twins         name -> Python function of that name with an underscore before it
    machine_code  name of the module that holds numba intrinsics of these names; imported only
                  where the real numba.cuda is in use
    results       (name, class of what it returns) of some, see `simulator.register_twin`

    Either way the simulator learns of the twins: it runs kernels of the real numba.cuda too.
    """
    if device.use_simulator():
        here = {name: simulator.cuda.jit(device=True)(twin) for name, twin in twins.items()}
    else:
        module = importlib.import_module(machine_code)
        here = {name: getattr(module, name) for name in twins}
    files = [_file(name) for name in dict.fromkeys((machine_code, _BASE))]
    for name, twin in twins.items():
        simulator.register_twin(here[name], twin, dict(results).get(name))
        _known[twin.__module__] = _known[machine_code] = twins, files
    return here


def _file(module):
    return Path(__file__).parent / "ptx" / f"{module.rpartition('.')[2]}.py"


def find(function):
    """(twin, files with its machine code) of an intrinsic, given the function of either half.

    (None, ()) for other functions.
    """
    twins, files = _known.get(function.__module__, ({}, ()))
    return twins.get(function.__name__.removeprefix("_")), files
