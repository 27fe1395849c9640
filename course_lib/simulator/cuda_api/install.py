"""Put the simulator in the place of `numba.cuda`, and take it away again."""

import importlib.abc
import importlib.machinery
import sys
import types

from course_lib.simulator import errors
from course_lib.simulator.cuda_api import facade
from course_lib.simulator.cuda_api.modules import submodule

_PREFIX = "numba.cuda"


class _Loader(importlib.abc.Loader):
    def create_module(self, spec):
        return submodule(spec.name)

    def exec_module(self, module):
        """The module is complete as it is."""


class Finder(importlib.abc.MetaPathFinder):
    """Finds `numba.cuda` and everything below it in the simulator, and nowhere else."""

    def find_spec(self, name, path=None, target=None):
        """The spec of a simulated module; None for other names."""
        if name != _PREFIX and not name.startswith(_PREFIX + "."):
            return None
        module = submodule(name)
        if module is None:
            raise ModuleNotFoundError(
                f"the simulator has no {name}; it stands in for numba.cuda while "
                f"COURSE_LIB_SIMULATOR=1 is set or no GPU is found", name=name)
        spec = importlib.machinery.ModuleSpec(name, _Loader(), is_package=hasattr(
            module, "__path__"))
        return spec


_finder = Finder()


def is_installed():
    """True while `import numba.cuda` gives the simulator."""
    return _finder in sys.meta_path


def install():
    """Make `numba.cuda` the simulator, for imports from now on. Twice is as good as once.

    Raises
    ------
    SimulatorError if the real numba.cuda has been imported: names taken from it cannot be
    exchanged any more.
    """
    present = sys.modules.get(_PREFIX)
    if present is not None and present is not facade.cuda:
        raise errors.SimulatorError(
            "the real numba.cuda is already imported" + _by_whom(present) + ", so the simulator "
            "cannot take its place. Restart Python and import course_lib before that")
    if not is_installed():
        sys.meta_path.insert(0, _finder)


def _by_whom(real):
    """", by …": the modules that hold the real numba.cuda, or something of it, by name."""
    def is_of_it(value):
        if isinstance(value, types.ModuleType):
            name = value.__dict__.get("__name__")
        else:
            name = value.__module__ if isinstance(value, (type, types.FunctionType)) else None
        return value is real or isinstance(name, str) and f"{name}.".startswith(f"{_PREFIX}.")

    holders = sorted(
        name for name, module in [*sys.modules.items()]
        if name.partition(".")[0] not in ("numba", "numba_cuda", "course_lib")
        and any(is_of_it(value) for value in [*getattr(module, "__dict__", {}).values()]))
    return f", by {', '.join(holders)}" if holders else ""


def uninstall():
    """Undo `install`: the next import of `numba.cuda` gives the real one."""
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for name in [name for name in sys.modules if name == _PREFIX or name.startswith(
            _PREFIX + ".")]:
        if sys.modules[name] is submodule(name):
            del sys.modules[name]
    numba = sys.modules.get("numba")
    if numba is not None and numba.__dict__.get("cuda") is facade.cuda:
        del numba.cuda
