"""GPUs that read and write each other's memory.

All GPUs of one process share one space of addresses. Once a GPU may access another one, a kernel on
it takes an address there as it takes its own; what it reads and writes goes over NVLink or PCIe.
(CUDA C++ Programming Guide, "Peer-to-Peer Memory Access".)
"""

import ctypes
import functools

from course_lib.runtime.host import device
from course_lib.runtime.host.specialisation import (
    LaunchError,
    _check,
    _primary_context,
    current_device,
)

_ALREADY = 704  # CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED


@functools.cache
def let_access(devices):
    """Let each of these GPUs, a tuple of numbers, access the memory of all others.

    Holds for memory that cudaMalloc gives, as PyTorch's allocator takes it by default. Raises
    LaunchError where two of them can't access each other.
    """
    for one in devices:
        for other in devices:
            if one != other:
                _let_access(one, other)


def _let_access(one, other):
    driver, possible = device.driver(), ctypes.c_int()
    _check(driver.cuDeviceCanAccessPeer(ctypes.byref(possible), one, other))
    if not possible.value:
        raise LaunchError(f"cuda:{one} can't access the memory of cuda:{other}")
    with current_device(one):
        error = driver.cuCtxEnablePeerAccess(_primary_context(other), 0)
    if error != _ALREADY:
        _check(error)
