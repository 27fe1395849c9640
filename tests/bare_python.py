"""Run solved lessons in a Python that lacks what some machines lack.

    python tests/bare_python.py browser|macos NOTEBOOK…

`browser`: no numba, numba-cuda, PyTorch, greenlet or fcntl, no processes, no threads, and the
platform of Pyodide. `macos`: no numba-cuda. Exit status 1 and the traceback where a cell fails.
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
#: A cell that is about what is hidden.
NOT_IN_BROWSER = "import numba\n"


def no_process(*_, **__):
    raise OSError(138, "emscripten does not support processes.")


def no_thread(_):
    raise RuntimeError("can't start new thread")


def strip(machine):
    """Take away what `machine` lacks."""
    sys.modules |= dict.fromkeys(HIDDEN[machine])
    sysconfig.get_config_vars()  # asks a file that is named after the platform
    import matplotlib  # noqa: F401 - which asks for the platform, too

    if machine == "macos":
        import numba  # noqa: F401 - as above
    else:
        subprocess.Popen.__init__ = no_process
        threading.Thread.start = no_thread
    sys.platform = {"browser": "emscripten", "macos": "darwin"}[machine]


def run(notebook, machine):
    """Run the code cells of a solved notebook, one after another."""
    names = {"__name__": "__main__"}
    for number, cell in enumerate(json.loads(notebook.read_text(encoding="utf-8"))["cells"]):
        text = "".join(cell["source"])
        if cell["cell_type"] != "code" or machine == "browser" and text.startswith(NOT_IN_BROWSER):
            continue
        file = f"<{notebook.name}, cell {number}>"
        linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
        exec(compile(text, file, "exec"), names)


if __name__ == "__main__":
    machine, *notebooks = sys.argv[1:]
    strip(machine)
    for notebook in map(Path, notebooks):
        run(notebook, machine)
    loaded = [name for name in HIDDEN[machine] if sys.modules.get(name) is not None]
    sys.exit(f"loaded all the same: {loaded}" if loaded else 0)
