"""The modules that stand for `numba.cuda` and its submodules."""

import importlib
import types

from . import device_api, host_api, mathlib
from .arrays import DeviceArray, device_array, to_device
from .kernel import jit
from .primitives import current_thread
from .warp import WARP_SIZE

math = mathlib.math


class Facade(types.ModuleType):
    """The module `numba.cuda`. Scalar types are numba's own and come in when first asked for."""

    @property
    def laneid(self):
        """The lane of the running thread; a marker on the host."""
        try:
            return current_thread("cuda.laneid").lane
        except RuntimeError:
            return device_api.names["laneid"]

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        found = submodule(f"{self.__name__}.{name}")
        if found is None:
            types_module = importlib.import_module("numba.core.types")
            found = getattr(types_module, name, None)
        if found is None:
            raise AttributeError(f"the simulator's numba.cuda has no attribute {name!r}")
        self.__dict__[name] = found
        return found


def _build():
    module = Facade("numba.cuda")
    module.__doc__ = "numba.cuda, simulated on the CPU."
    module.__path__ = []
    module.__package__ = "numba.cuda"
    members = {name: value for name, value in device_api.names.items() if name != "laneid"}
    for name, value in vars(host_api).items():
        if getattr(value, "__module__", None) == host_api.__name__ and not name.startswith("_"):
            members[name] = value
    for name in ("default_stream", "legacy_default_stream", "per_thread_default_stream", "gpus"):
        members[name] = getattr(host_api, name)
    members.update(jit=jit, to_device=to_device, device_array=device_array,
                   warpsize=WARP_SIZE, implementation="course_lib simulator")
    for name in ("Device", "Context", "device", "context"):
        members.pop(name, None)
    module.__dict__.update(members)
    return module


def _api():
    return cuda


def _random():
    from . import random

    return random


def _devicearray():
    module = types.ModuleType("numba.cuda.cudadrv.devicearray")
    module.DeviceNDArray = module.DeviceNDArrayBase = DeviceArray
    module.is_cuda_ndarray = host_api.is_cuda_array
    return module


#: submodules, by their names below numba.cuda; each is made on first use
_makers = {"api": _api, "random": _random, "cudadrv.devicearray": _devicearray}
_made = {}


def submodule(name):
    """The module that stands for `name`, "numba.cuda" or below; None if there is none."""
    if name == "numba.cuda":
        return cuda
    found = _made.get(name)
    if found is None:
        maker = _makers.get(name.removeprefix("numba.cuda."))
        if maker is None:
            return None
        found = _made[name] = maker()
    return found


cuda = _build()
