"""What hardware is here, and what it can do.

Everything in this module works without PyTorch and without numba: it asks the CUDA driver
itself, so that it can decide whether the simulator is needed before either is imported.
"""

import ctypes
import functools
import importlib
import importlib.util
import os
import sys
from dataclasses import dataclass

#: Environment variable that chooses between the simulator ("1") and real CUDA ("0").
SIMULATOR_VARIABLE = "COURSE_LIB_SIMULATOR"
DEFAULT_ORDER = ("cuda", "mps", "cpu")

# Values of CUdevice_attribute, from the CUDA driver API reference.
_ATTRIBUTES = {
    "max_threads_per_block": 1,
    "warp_size": 10,
    "multiprocessors": 16,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "memory_bus_bits": 37,
    "l2_bytes": 38,
    "major": 75,
    "minor": 76,
    "registers_per_multiprocessor": 82,
    "shared_bytes_per_multiprocessor": 81,
    "shared_bytes_per_block": 8,
    "shared_bytes_per_block_optin": 97,
}


class DeviceError(RuntimeError):
    """The CUDA driver refused a request, or there is no such device."""


@dataclass(frozen=True)
class Properties:
    """The facts about one GPU that kernels and lessons use. Sizes in bytes, clocks in kHz."""

    index: int
    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    total_bytes: int
    l2_bytes: int
    warp_size: int
    max_threads_per_block: int
    shared_bytes_per_block: int
    shared_bytes_per_block_optin: int
    shared_bytes_per_multiprocessor: int
    registers_per_multiprocessor: int
    clock_khz: int
    memory_clock_khz: int
    memory_bus_bits: int


@functools.cache
def driver():
    """The CUDA driver library as a `ctypes` handle, or None where there is no usable one."""
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            # PyDLL keeps the interpreter lock: giving it up and taking it back costs every launch.
            library = ctypes.PyDLL(name)
        except OSError:
            continue
        return library if library.cuInit(0) == 0 else None
    return None


@functools.cache
def count():
    """How many GPUs the CUDA driver reports; 0 without a driver."""
    if driver() is None:
        return 0
    number = ctypes.c_int()
    return number.value if driver().cuDeviceGetCount(ctypes.byref(number)) == 0 else 0


def use_simulator():
    """Whether kernels run in the simulator (see `course_lib` for the rule).

    Raises ValueError when ``COURSE_LIB_SIMULATOR`` holds something other than 0 or 1.
    """
    value = os.environ.get(SIMULATOR_VARIABLE, "")
    if value not in ("", "0", "1"):
        raise ValueError(f"{SIMULATOR_VARIABLE} must be unset, 0 or 1; it is {value!r}")
    if value == "":
        return count() == 0 or not _can_compile()
    return value == "1"


def _can_compile():
    return importlib.util.find_spec("numba_cuda") is not None


def numba_cuda():
    """`numba.cuda` where kernels run on a GPU, else what the simulator has in its place."""
    # Each takes a while to import, and what asks for hardware alone needs neither.
    if use_simulator():
        return importlib.import_module("course_lib.simulator").cuda
    return importlib.import_module("numba.cuda")


def why_no_gpu():
    """Why kernels can't run on a GPU here, and the cure, as a sentence; None where they can."""
    if count() == 0:
        if os.environ.get(SIMULATOR_VARIABLE) == "0":
            return (
                "there is no NVIDIA GPU here, and "
                f"{SIMULATOR_VARIABLE}=0 keeps kernels from the simulator: unset it"
            )
        return "there is no NVIDIA GPU here"
    if os.environ.get(SIMULATOR_VARIABLE) == "1":
        return f"{SIMULATOR_VARIABLE}=1 asks for the simulator: unset it"
    if not _can_compile():
        return "numba-cuda is not installed: pip install 'course_lib[gpu]'"
    return None


@functools.cache
def properties(index=0):
    """The `Properties` of GPU `index`; DeviceError where there is no such GPU."""
    if not 0 <= index < count():
        if index == 0 and (reason := why_no_gpu()) is not None:
            raise DeviceError(reason)
        raise DeviceError(f"no GPU {index} here: the CUDA driver reports {count()}")
    handle = ctypes.c_int()
    driver().cuDeviceGet(ctypes.byref(handle), index)
    name = ctypes.create_string_buffer(256)
    driver().cuDeviceGetName(name, len(name), handle)
    total = ctypes.c_size_t()
    driver().cuDeviceTotalMem_v2(ctypes.byref(total), handle)
    found = {}
    for key, code in _ATTRIBUTES.items():
        value = ctypes.c_int()
        driver().cuDeviceGetAttribute(ctypes.byref(value), code, handle)
        found[key] = value.value
    capability = (found.pop("major"), found.pop("minor"))
    return Properties(
        index=index,
        name=name.value.decode(),
        compute_capability=capability,
        total_bytes=total.value,
        **found,
    )


def compute_capability(index=0):
    """(major, minor) of GPU `index`, for example (9, 0) for an H200."""
    return properties(index).compute_capability


def driver_version():
    """The CUDA version the installed driver supports, as (major, minor), or None."""
    if driver() is None:
        return None
    version = ctypes.c_int()
    driver().cuDriverGetVersion(ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def _mps_available():
    # Only Apple's machines have MPS, so nobody else pays for importing torch.
    if sys.platform != "darwin" or importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.backends.mps.is_available()


def best(order=DEFAULT_ORDER):
    """The first device of `order` that is here: "cuda", "mps" or "cpu".

    Raises ValueError for an unknown name and DeviceError when none of `order` is here.
    """
    present = {"cuda": lambda: count() > 0, "mps": _mps_available, "cpu": lambda: True}
    for name in order:
        if name not in present:
            raise ValueError(f"unknown device {name!r}; expected some of {DEFAULT_ORDER}")
        if present[name]():
            return name
    raise DeviceError(f"none of the devices {tuple(order)} is here")


def memory(index=0):
    """(free, total) bytes of device memory on GPU `index`."""
    import torch

    properties(index)
    return torch.cuda.mem_get_info(index)


def peak_memory(index=0, *, reset=False):
    """Most bytes PyTorch has held on GPU `index` since the start, or since `reset=True`."""
    import torch

    properties(index)
    peak = torch.cuda.max_memory_allocated(index)
    if reset:
        torch.cuda.reset_peak_memory_stats(index)
    return peak


def copy_bandwidth(n_bytes=1 << 30, index=0, *, repeats=20):
    """GB/s, bytes read plus bytes written, of copying `n_bytes` from one buffer to another.

    This is the practical ceiling for every kernel whose time goes into moving data. It is
    measured now, on GPU `index` (median of `repeats` copies), not looked up.
    """
    import torch

    properties(index)
    source = torch.randint(256, (n_bytes,), dtype=torch.uint8, device=f"cuda:{index}")
    target = torch.empty_like(source)
    milliseconds = []
    with torch.cuda.device(index):
        for _ in range(repeats + 3):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            target.copy_(source)
            end.record()
            end.synchronize()
            milliseconds.append(start.elapsed_time(end))
    median = sorted(milliseconds[3:])[repeats // 2]
    return 2 * n_bytes / median / 1e6
