"""Run a script, a module, a line of code or a notebook as the main program, as Python would."""

import importlib.util
import io
import json
import linecache
import os
import re
import runpy
import sys
import traceback
import types
import zipfile
from pathlib import Path

_OWN_FOLDER = os.path.dirname(__file__) + os.sep


class NoScript(Exception):
    """There is nothing to run; the message says what was looked for."""


class Program:
    """What is to run. `name` is what its user called it; `run()` runs it once."""

    def __init__(self, name, arguments, run):
        self.name, self.arguments, self._run = name, arguments, run

    def run(self):
        """Run it as `__main__`; raises whatever it raises, SystemExit too."""
        sys.argv[:] = self.arguments
        self._run()


def script(path, arguments):
    """The Program that `python path arguments…` runs; a notebook's cells run one after another."""
    file = Path(path)
    if not file.exists():
        raise NoScript(f"there is no file {path}")
    arguments = [path, *arguments]
    if file.is_dir() or zipfile.is_zipfile(file):
        return Program(path, arguments, lambda: runpy.run_path(path, run_name="__main__"))
    full = str(file.resolve())
    try:
        if file.suffix == ".ipynb":
            parts = _cells(path, file.read_text(encoding="utf-8"))
            codes = [_remembered(name, text) for name, text in parts]
        else:
            with io.open_code(full) as source:
                codes = [compile(source.read(), full, "exec", dont_inherit=True)]
    except (OSError, SyntaxError, ValueError) as error:
        raise NoScript(f"{path} cannot be read as a program: {error}") from None

    def run():
        sys.path[0] = os.path.dirname(full)
        _run_as_main(codes, full)

    return Program(path, arguments, run)


def module(name, arguments):
    """The Program that `python -m name arguments…` runs."""
    sys.path[0] = os.getcwd()
    try:
        found = importlib.util.find_spec(name)
        if found is not None and found.submodule_search_locations is not None:
            found = importlib.util.find_spec(f"{name}.__main__")
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise NoScript(f"there is no module {name} that can be run")
    return Program(name, ["-m", *arguments],
                   lambda: runpy.run_module(name, run_name="__main__", alter_sys=True))


def line(code, arguments):
    """The Program that `python -c code arguments…` runs."""
    try:
        compiled = _remembered("<command line>", code)
    except (SyntaxError, ValueError) as error:
        raise NoScript(f"the code cannot be compiled: {error}") from None

    def run():
        sys.path[0] = ""
        _run_as_main([compiled], None)

    return Program("-c", ["-c", *arguments], run)


def _run_as_main(codes, filename):
    main = types.ModuleType("__main__")
    if filename is not None:
        main.__file__ = filename
    main.__builtins__ = __builtins__
    sys.modules["__main__"] = main  # it stays: what runs at exit, or in a child, looks for it
    for code in codes:
        exec(code, main.__dict__)


def _remembered(name, text):
    """The code of a text that is in no file, but whose lines can be found all the same."""
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    return compile(text, name, "exec", dont_inherit=True)


def _cells(path, text):
    """(name, source) of a notebook's cells of Python, the commands of IPython as comments."""
    try:
        cells = json.loads(text)["cells"]
    except (KeyError, TypeError) as error:
        raise ValueError(f"it is no notebook of format 4: {error!r}") from None
    for number, cell in enumerate(cells, start=1):
        source = "".join(cell["source"])
        if cell["cell_type"] != "code" or source.lstrip().startswith("%%"):
            continue
        yield f"<{path}, cell {number}>", re.sub(r"(?m)^(\s*)(?=[%!?])", r"\1pass  # ", source)


def print_traceback(error):
    """The traceback of a script's error as Python prints it, without the frames that ran it."""
    frames = error.__traceback__
    while frames is not None and (
            frames.tb_frame.f_code.co_filename.startswith((_OWN_FOLDER, "<frozen"))
            or frames.tb_frame.f_code.co_filename == runpy.__file__):
        frames = frames.tb_next
    traceback.print_exception(type(error), error, frames or error.__traceback__)
