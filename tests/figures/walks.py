"""The way from a call to its kernel: which functions of course_lib run before the kernel starts.

Each walk is traced with `sys.setprofile` in a process of its own, in the simulator. Calls are
counted by Python's own events: Python 3.12 and later inline comprehensions and count fewer.
"""

import contextlib
import importlib
import io
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "course_lib"


#: The version of Python whose calls are counted, and the figures of others.
COUNTED_IN, ELSEWHERE = (3, 11), "3.11 only"


class Walk:
    """The Python calls that `call()` makes inside course_lib until the first kernel starts.

    frames   [(file, function)] of the calls, in order
    modules  modules outside course_lib and Python's own library that this thread imported
    """

    def __init__(self, call):
        from course_lib import simulator
        from course_lib.simulator.engine.kernel import Kernel

        starts = simulator.run.__wrapped__.__code__, Kernel.launch.__code__
        root = f"{PACKAGE}{os.sep}"
        self.frames, self.modules = [], []

        def profile(frame, event, _):
            code = frame.f_code
            if event == "call" and code.co_filename.startswith(root):
                self.frames.append((code.co_filename[len(root) :], code.co_qualname))
                if code in starts:
                    stop()

        def stop():
            sys.setprofile(None)
            if noted in sys.meta_path:
                sys.meta_path.remove(noted)

        noted = _Noted(self.modules)
        sys.meta_path.insert(0, noted)
        sys.setprofile(profile)
        try:
            call()
        finally:
            stop()


class _Noted:
    """A finder that finds nothing and notes what this thread imports from outside."""

    def __init__(self, names):
        self.names, self.thread = names, threading.get_ident()

    def find_spec(self, name, path=None, target=None):
        inside = name.partition(".")[0] in sys.stdlib_module_names | {"course_lib"}
        if not inside and threading.get_ident() == self.thread:
            self.names.append(name)


def softmax_forward():
    import numpy as np

    from course_lib.kernels import softmax

    x = np.ones((4, 50), np.float32)
    return lambda: softmax.forward(x)


def softmax_layer():
    import torch

    from course_lib import nn

    layer, x = nn.Softmax(-1), torch.ones(4, 50)
    return lambda: layer(x)


def linear_layer():
    import torch

    from course_lib import nn

    layer, x = nn.Linear(64, 32), torch.ones(8, 64)
    return lambda: layer(x)


def convolution_layer():
    import torch

    from course_lib import nn

    layer, x = nn.Conv2d(16, 32, 3, padding=1), torch.ones(2, 16, 12, 12)
    return lambda: layer(x)


def first_check():
    from course_lib import teach

    check, relu = teach.check, relu_of_a_learner()
    return lambda: check("relu", relu)


def later_check():
    call = first_check()
    call()
    return call


def relu_of_a_learner():
    from course_lib import cuda

    @cuda.jit
    def relu(x, y):
        i = cuda.grid(1)
        if i < x.size:
            y[i] = max(x[i], 0.0)

    return relu


#: What each walk is made of, and the module of the project that is there before it starts. Checks
#: come first, so that what layers import is not there yet.
WALKS = {
    "first check": (first_check, "teach"),
    "later check": (later_check, "teach"),
    "nn.Softmax": (softmax_layer, "nn"),
    "kernels.softmax.forward": (softmax_forward, "nn"),
    "nn.Linear": (linear_layer, "nn"),
    "nn.Conv2d": (convolution_layer, "nn"),
}


def _walk(name):
    with contextlib.redirect_stdout(io.StringIO()):  # what a check prints
        walk = Walk(WALKS[name][0]())
    return {"frames": walk.frames, "modules": walk.modules}


def main():
    """Print what each walk met, as JSON."""
    found = {}
    for name, (_, module) in WALKS.items():
        importlib.import_module(f"course_lib.{module}")
        with multiprocessing.get_context("fork").Pool(1) as pool:
            found[name] = pool.apply(_walk, (name,))
    json.dump(found, sys.stdout)


def figures(found):
    """{name: (value, what was counted)} of what `main` printed."""
    frames = {name: walk["frames"] for name, walk in found.items()}
    values = {}
    for name in ("nn.Softmax", "kernels.softmax.forward", "nn.Linear", "nn.Conv2d"):
        values[f"files from {name} to the kernel"] = files(outside_simulator(frames[name]))
    for name in ("first check", "later check"):
        values[f"files of a {name}"] = files(frames[name])
    calls = outside_simulator(frames["nn.Conv2d"])
    values["calls of a first nn.Conv2d"] = calls
    values["modules that a first check loads for nothing"] = found["first check"]["modules"]
    if sys.version_info[:2] != COUNTED_IN:
        return dict.fromkeys(values, (ELSEWHERE, []))
    return {name: (len(counted), counted) for name, counted in values.items()}


def outside_simulator(frames):
    return [frame for frame in frames if not frame[0].startswith("simulator/")]


def files(frames):
    """The files of the calls, in the order in which they are entered."""
    return list(dict.fromkeys(file for file, _ in frames))


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    os.environ["COURSE_LIB_SIMULATOR"] = "1"
    with tempfile.TemporaryDirectory() as folder:  # nobody's progress is touched
        os.environ["COURSE_LIB_PROGRESS"] = os.path.join(folder, "progress.json")
        main()
