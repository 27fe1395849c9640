"""Errors that end a script: what of them is a finding, and what the simulator lacks."""

import linecache
import os
import re
import sysconfig
import traceback

from course_lib.scripts.finding import Found, shown_path
from course_lib.simulator import errors
from course_lib.simulator.places import FOLDER

_KINDS = {errors.OutOfBounds: "out-of-bounds", errors.NotCompilable: "not-compilable",
          errors.Deadlock: "deadlock", errors.LaunchError: "launch-error"}
_OWN_FOLDER = os.path.dirname(__file__) + os.sep
_NO_GPU = re.compile(r"NVIDIA driver|CUDA enabled|No CUDA GPUs|cudaErrorNoDevice|"
                     r"cudaErrorInsufficientDriver|libcuda")


def as_finding(error):
    """The Found for an error of a kernel or of its launch; None for other errors."""
    kind = next((kind for each, kind in _KINDS.items() if isinstance(error, each)), None)
    if kind is None:
        return None
    filename, line = getattr(error, "filename", None), getattr(error, "lineno", None)
    if filename is None:
        filename, line = _last_line(error)
    return Found(kind, "error", str(error), filename, line,
                 linecache.getline(filename, line).strip())


def as_lacking(error):
    """A sentence about an error that shows what cannot run without a GPU; None for others."""
    filename, line = _last_line(error)
    place = f"{shown_path(filename)}:{line}"
    text = str(error).partition("\n")[0]
    if _is_lacking(error):
        return f"{place} needs what the simulator lacks: {text}"
    if isinstance(error, (RuntimeError, AssertionError, OSError, ImportError)) and (
            _NO_GPU.search(str(error))):
        return f"{place} needs a GPU for something else than kernels: {text}"
    return None


def _is_lacking(error):
    if isinstance(error, errors.SimulatorError):
        return True
    if isinstance(error, ImportError):
        return (error.name or "").startswith("numba.cuda")
    if isinstance(error, AttributeError):
        return getattr(error.obj, "__name__", "").startswith("numba.cuda")
    last = traceback.extract_tb(error.__traceback__)[-1]
    return isinstance(error, NotImplementedError) and last.filename.startswith(FOLDER)


def _last_line(error):
    """(file, line) of the innermost frame that is the user's: no installed package's, no ours."""
    installed = (FOLDER, _OWN_FOLDER, "<frozen",
                 *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")))
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if not frame.filename.startswith(installed)]
    return (frames[-1].filename, frames[-1].lineno) if frames else ("<script>", 1)
