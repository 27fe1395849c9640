"""Run `numba.cuda` kernels on a CPU: fast, with a GPU's limits, and with errors that explain.

    from course_lib import simulator
    simulator.install()                 # `from numba import cuda` now gives the simulator
    simulator.run(kernel, grid, block, x, y)

Kernels are rebuilt, never changed: a copy of each function runs, in which barriers and warp
operations hand over to the next thread, and each index is checked. See `run`, `options`,
`install` and `register_twin`; the errors are `SimulatorError` and its children. `sanitize()` says
what is wrong with the kernels launched inside it, `trace()` what their warps asked of memory, and
`lint` what numba's compiler makes of one. `cluster` has what the blocks of a thread-block cluster
can do together, for which numba.cuda has no names.

Where it differs from a GPU:

- Threads take turns, and switch only where they wait. A race shows in the result only under
  another `order`, a lost update under "interleaved"; memory is sequentially consistent, so a
  missing fence shows nowhere. `sanitize` finds all of them.
- A negative index raises OutOfBounds. On a GPU numba takes a signed one from the array's end.
- Arithmetic has the types and values of the compiled kernel (`arithmetic` lists three exceptions).
  But numba gives a variable one type over all rounds of a loop and both sides of an `if`; here it
  has that of the value it holds. `lint` tells the types it gives. Functions whose source cannot be
  found, and bfloat16, have NumPy's types.
- Python that no GPU's compiler takes raises NotCompilable where it can be told by its text
  (`compilable`): lists, dicts, try and except, made text, NumPy's functions, shapes that are no
  constants, calls of plain functions, copies of whole arrays. What depends on types is told by
  `lint` alone.
- `math` and libdevice round correctly where a GPU is within an ulp or two; the fast forms are as
  exact as the others.
- A shuffle that reads a lane which takes no part gives a NaN or garbage, never a likely value.
- Shared, local and device memory start as NaNs or 0xCD bytes.
- A function whose source cannot be found, or has been edited since (a warning says so), runs as it
  stands, in a greenlet per thread: slower, and an endless loop that touches no array is ended by
  Ctrl-C alone. `sanitize`, `trace` and the order "interleaved" refuse it, because they cannot see
  what it does.
"""

from course_lib.simulator.cuda_api import cluster, postponed
from course_lib.simulator.cuda_api.device_api import read_elements, write_elements
from course_lib.simulator.cuda_api.facade import cuda
from course_lib.simulator.cuda_api.install import install, is_installed, uninstall
from course_lib.simulator.cuda_api.warp_calls import whole_warp
from course_lib.simulator.engine.kernel import run
from course_lib.simulator.engine.options import options
from course_lib.simulator.errors import (
    Deadlock,
    LaunchError,
    NotCompilable,
    OutOfBounds,
    SimulatorError,
)
from course_lib.simulator.linting.lint import LintError, LintUnavailable, lint
from course_lib.simulator.observe.observer import observing
from course_lib.simulator.observe.real import run_on_copies
from course_lib.simulator.rewrite.resolve import register_twin
from course_lib.simulator.sanitizer.sanitizer import sanitize
from course_lib.simulator.tracing.trace import trace

__all__ = ["Deadlock", "LaunchError", "LintError", "LintUnavailable", "NotCompilable",
           "OutOfBounds", "SimulatorError", "cluster", "cuda", "install", "is_installed", "lint",
           "observing", "options", "postponed", "read_elements", "register_twin", "run",
           "run_on_copies", "sanitize", "trace", "uninstall", "whole_warp", "write_elements"]
