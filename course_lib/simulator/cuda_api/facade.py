"""The modules that stand for `numba.cuda` and its submodules."""

import importlib
import types

import ml_dtypes

from course_lib.simulator import errors
from course_lib.simulator.cuda_api import (
    cooperative,
    device_api,
    devices,
    half,
    host_api,
    modules,
    reduction,
    vector_types,
)
from course_lib.simulator.cuda_api.arrays import DeviceArray, device_array, to_device
from course_lib.simulator.cuda_api.primitives import current_thread
from course_lib.simulator.cuda_api.warp import WARP_SIZE
from course_lib.simulator.engine.kernel import jit
from course_lib.simulator.rewrite.resolve import register_jitable


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
        found = modules.submodule(f"{self.__name__}.{name}")
        if found is None:
            found = getattr(modules.submodule("numba.cuda.types"), name, None)
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
    for source in (host_api, devices):
        for name, value in vars(source).items():
            if getattr(value, "__module__", None) == source.__name__ and not name.startswith("_"):
                members[name] = value
    members["gpus"] = devices.gpus
    members.update(vector_types.vector_types)
    members.update(jit=jit, reduce=reduction.Reduce, Reduce=reduction.Reduce,
                   to_device=to_device, device_array=device_array,
                   warpsize=WARP_SIZE, implementation="course_lib simulator")
    for name in ("Device", "Context", "device", "context"):
        members.pop(name, None)
    module.__dict__.update(members)
    return module


def _plain_module(name, **members):
    module = types.ModuleType(f"numba.cuda.{name}")
    module.__dict__.update(members)
    return module


class _Types(types.ModuleType):
    """numba's scalar and array types, and the few that numba.cuda adds."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module("numba.core.types"), name)


def _types():
    module = _Types("numba.cuda.types")
    module.bfloat16 = ml_dtypes.bfloat16
    return module


def _intrinsic(*args, **kwargs):
    raise NotImplementedError(
        "an @intrinsic writes LLVM code, which the simulator cannot run. Define the function in "
        "Python for the simulator, or register a twin with simulator.register_twin")


def _compiled_only(name):
    def refuse(*args, **kwargs):
        raise NotImplementedError(
            f"numba.cuda.extending.{name} extends numba's compiler, which the simulator does not "
            f"use")

    refuse.__name__ = refuse.__qualname__ = name
    return refuse


def _extending():
    names = ("overload", "overload_attribute", "overload_method", "overload_classmethod",
             "lower_builtin", "type_callable", "typeof_impl", "register_model", "lower_cast",
             "make_attribute_wrapper", "models")
    return _plain_module("extending", intrinsic=_intrinsic, register_jitable=register_jitable,
                         **{name: _compiled_only(name) for name in names})


def _vectorizers():
    def refuse(*args, **kwargs):
        raise NotImplementedError(
            "vectorize and guvectorize with target='cuda' are not supported by the simulator: "
            "write a kernel with cuda.jit, or leave target out to run on the CPU")

    return _plain_module("vectorizers", CUDAVectorize=refuse, CUDAGUFuncVectorize=refuse)


def _libdevice():
    from course_lib.simulator.cuda_api import libdevice

    return _plain_module("libdevice", **libdevice.functions)


def _from_package(name):
    return lambda: importlib.import_module(f"{__package__}.{name}")


def _package(name):
    module = _plain_module(name)
    module.__path__ = []
    return module


#: submodules, by their names below numba.cuda; each is made on first use
_makers = {
    "api": lambda: cuda,
    "random": _from_package("random"),
    "libdevice": _libdevice,
    "vectorizers": _vectorizers,
    "cg": lambda: _plain_module("cg", this_grid=cooperative.this_grid,
                                GridGroup=cooperative.GridGroup),
    "fp16": lambda: _plain_module("fp16", **half.fp16_names()),
    "bf16": lambda: _plain_module("bf16", **half.bf16_names()),
    "types": _types,
    "extending": _extending,
    "vector_types": lambda: _plain_module("vector_types", vector_types=vector_types.vector_types),
    "args": lambda: _plain_module("args", In=host_api.In, Out=host_api.Out, InOut=host_api.InOut,
                                  ArgHint=host_api.ArgHint),
    "cudadrv": lambda: _package("cudadrv"),
    "cudadrv.devicearray": lambda: _plain_module(
        "cudadrv.devicearray", DeviceNDArray=DeviceArray, DeviceNDArrayBase=DeviceArray,
        is_cuda_ndarray=host_api.is_cuda_array),
    "cudadrv.driver": lambda: _plain_module(
        "cudadrv.driver", driver=devices.Driver(), CudaAPIError=devices.CudaAPIError),
    "cudadrv.error": lambda: _plain_module("cudadrv.error",
                                           CudaSupportError=devices.CudaSupportError),
    "errors": lambda: _plain_module("errors", KernelRuntimeError=errors.SimulatorError),
}

cuda = _build()
modules.provide("numba.cuda", lambda: cuda)
for _name, _maker in _makers.items():
    modules.provide(f"numba.cuda.{_name}", _maker)
