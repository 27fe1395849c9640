"""Write GPU kernels in Python, and run them on a GPU or, unchanged, in a simulator.

``from course_lib import cuda`` is `numba.cuda` on a machine with an NVIDIA GPU, and the
course's simulator everywhere else. Once this package is imported, ``from numba import cuda``
names the same thing, so a kernel never has to know where it runs.

The choice is made once, here, before `numba.cuda` is imported:

======================== ==========================================================
``COURSE_LIB_SIMULATOR`` effect
======================== ==========================================================
unset                    real `numba.cuda` if the CUDA driver reports a GPU and numba-cuda is
                         installed, else the simulator
``1``                    always the simulator
``0``                    always the real `numba.cuda`; without a GPU it can compile
                         kernels but not launch them
======================== ==========================================================
"""

import os
import sys

from course_lib.runtime.host import device

__all__ = ["SIMULATED", "cuda", "device", "simulate"]
__version__ = "0.1.0"

#: True when kernels run in the simulator, False when they run on a GPU.
SIMULATED = None
#: What kept the choice from being made. Only ``python -m course_lib`` goes on after it: it is
#: what tells how to mend the installation.
start_error = None



def simulate():
    """Run kernels in the simulator from now on, here and in processes that start here.

    For programs that want it beside a GPU; to be called before `numba.cuda` is imported.

    Raises
    ------
    SimulatorError if the real `numba.cuda` has been imported.
    """
    global SIMULATED
    from course_lib import simulator

    simulator.install()
    os.environ[device.SIMULATOR_VARIABLE] = "1"
    SIMULATED = True


try:
    SIMULATED = device.use_simulator()
    if SIMULATED:
        from course_lib import simulator

        simulator.install()
except Exception as error:
    if sys.argv[:1] != ["-m"]:
        raise
    start_error = error


def __getattr__(name):
    # Importing the real numba.cuda takes about a second, so it waits for the first use.
    if name == "cuda":
        globals()["cuda"] = module = device.numba_cuda()
        return module
    raise AttributeError(f"module 'course_lib' has no attribute {name!r}")
