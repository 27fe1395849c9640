"""Run solved lessons in a Python that lacks what some machines lack.

    python tests/bare_python.py browser|macos NOTEBOOK…

`browser`: no numba, numba-cuda, PyTorch, greenlet or fcntl, no processes, no threads, and the
platform of Pyodide. `macos`: no numba-cuda. Ends with the traceback of a cell that fails.
"""

import json
import linecache
import subprocess
import sys
import sysconfig
import threading
from pathlib import Path

HIDDEN = {
    "browser": ("numba", "numba_cuda", "torch", "torchvision", "greenlet", "fcntl"),
    "macos": ("numba_cuda",),
}


def refuse(*_, **__):
    raise OSError("there is one process here, and one thread")


def strip(machine):
    """Take away what `machine` lacks."""
    sys.modules |= dict.fromkeys(HIDDEN[machine])
    # These ask for the platform as they are imported, and for files that are named after it.
    sysconfig.get_config_vars()
    __import__("matplotlib.font_manager")  # its first list of fonts is made by a thread
    if machine == "browser":
        subprocess.Popen.__init__ = threading.Thread.start = refuse
    else:
        __import__("numba")
    sys.platform = {"browser": "emscripten", "macos": "darwin"}[machine]


def run(notebook, machine):
    """Run the code cells of a solved notebook, but for one in a browser that is about numba."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] == "code" and not (machine == "browser" and "import numba\n" in text):
            file = f"<{notebook.name}, cell {number}>"
            linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
            exec(compile(text, file, "exec"), names)


if __name__ == "__main__":
    strip(sys.argv[1])
    for path in sys.argv[2:]:
        run(Path(path), sys.argv[1])
