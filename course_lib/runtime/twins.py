"""What stands behind an intrinsic's name here: machine code on a GPU, its twin in the simulator."""

import importlib

from course_lib import simulator
from course_lib.runtime import device


def in_use(twins, machine_code):
    """Name -> what kernels of this process are to call, for each of `twins`.

    twins         name -> Python function that does the same in the simulator
    machine_code  name of the module that holds numba intrinsics of these names; imported only
                  where the real numba.cuda is in use

    Either way the simulator learns of the twins: it runs kernels of the real numba.cuda too.
    """
    if device.use_simulator():
        here = {name: simulator.cuda.jit(device=True)(twin) for name, twin in twins.items()}
    else:
        module = importlib.import_module(machine_code)
        here = {name: getattr(module, name) for name in twins}
    for name, twin in twins.items():
        simulator.register_twin(here[name], twin)
    return here
