"""Compile every kernel of the zoo for a real GPU, on a machine without one.

A script for a process of its own, since `course_lib` decides once between simulator and
numba.cuda: `COURSE_LIB_SIMULATOR=0 python compile_all.py`. It prints one JSON object:
{kernel: error message, or "" where machine code came out}.
"""

import json
import os
import pathlib
import sys
import tempfile

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from numba.cuda.random import xoroshiro128p_dtype  # noqa: E402
from numba.cuda.typing.typeof import Purpose, typeof  # noqa: E402

import zoo  # noqa: E402
from course_lib.runtime.compile import compiler  # noqa: E402

COMPUTE_CAPABILITY = (9, 0)
# numba-cuda links CUDA C to half-precision functions, and NVRTC's wrapper asks the driver for its
# version first. The kernel itself still compiles to PTX anywhere.
PTX_ONLY = {"half_kernel"}


def states_on_the_host(n, seed):
    """Stands in for `create_xoroshiro128p_states`, which needs a device; same type."""
    return np.zeros(n, xoroshiro128p_dtype)


def compile_kernel(launch):
    """The empty string, or what the compiler had to say."""
    signature = tuple(typeof(argument, Purpose.argument) for argument in launch.args)
    name = launch.kernel.py_func.__name__
    try:
        if name in PTX_ONLY:
            text = compiler.ptx(launch.kernel, signature, COMPUTE_CAPABILITY)
            return "" if ".entry" in text else "the PTX has no entry point"
        compiled = compiler.compile_kernel(launch.kernel, signature, COMPUTE_CAPABILITY)
    except Exception as error:  # whatever it is, the test shows it
        return f"{type(error).__name__}: {error}"
    return "" if compiled.registers > 0 else "the machine code names no registers"


def main():
    os.environ[compiler.CACHE_VARIABLE] = tempfile.mkdtemp()
    zoo.numbers_.create_xoroshiro128p_states = states_on_the_host
    messages = {}
    for name, build in zoo.CASES.items():
        for launch in build(np.random.default_rng(0)).launches:
            key = f"{name}: {launch.kernel.py_func.__name__}"
            if key not in messages:
                messages[key] = compile_kernel(launch)
    print(json.dumps(messages))


if __name__ == "__main__":
    main()
