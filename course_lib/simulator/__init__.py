"""Run `numba.cuda` kernels on a CPU: fast, with a GPU's limits, and with errors that explain.

    from course_lib import simulator
    simulator.install()                 # `from numba import cuda` now gives the simulator
    simulator.run(kernel, grid, block, x, y)

Kernels are rebuilt, never changed: a copy of each function runs, in which barriers and warp
operations hand over to the next thread, and each index is checked. See `run`, `options`,
`install` and `register_twin`; the errors are `SimulatorError` and its children.
"""

from .errors import Deadlock, LaunchError, OutOfBounds, SimulatorError
from .facade import cuda
from .install import install, is_installed, uninstall
from .kernel import run
from .options import options
from .resolve import register_twin

__all__ = ["Deadlock", "LaunchError", "OutOfBounds", "SimulatorError", "cuda", "install",
           "is_installed", "options", "register_twin", "run", "uninstall"]
