"""The one simulated GPU: `cuda.gpus`, its context, and what the driver says about it."""

import os


class Device:
    """The simulated GPU. Limits are those of an H100-class device (compute capability 9.0)."""

    id = 0
    name = b"course_lib simulator"
    compute_capability = (9, 0)
    uuid = "GPU-00000000-0000-0000-0000-000000000000"
    supports_float16 = True
    supports_bfloat16 = True
    supports_fp8 = True
    MAX_THREADS_PER_BLOCK = 1024
    MAX_BLOCK_DIM_X, MAX_BLOCK_DIM_Y, MAX_BLOCK_DIM_Z = 1024, 1024, 64
    MAX_GRID_DIM_X, MAX_GRID_DIM_Y, MAX_GRID_DIM_Z = 2**31 - 1, 65535, 65535
    MAX_SHARED_MEMORY_PER_BLOCK = 48 * 1024
    MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = 227 * 1024
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR = 228 * 1024
    MULTIPROCESSOR_COUNT = 132
    MAX_THREADS_PER_MULTI_PROCESSOR = 2048
    MAX_REGISTERS_PER_BLOCK = 65536
    WARP_SIZE = 32
    COOPERATIVE_LAUNCH = 1

    def get_primary_context(self):
        """The one context."""
        return context

    def release_primary_context(self):
        """Does nothing."""

    def reset(self):
        """Does nothing."""

    def __repr__(self):
        return "<simulated CUDA device 0>"


class Context:
    """The one context of the simulated GPU."""

    def __init__(self, device):
        self.device = device
        self.id = self.device_id = device.id

    def synchronize(self):
        """Nothing to wait for."""

    def reset(self):
        """Does nothing."""

    def push(self):
        """Does nothing."""

    def pop(self):
        """Does nothing."""

    def get_memory_info(self):
        """(free, total) bytes of the host: device memory is host memory here."""
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        free = page * os.sysconf("SC_AVPHYS_PAGES") if "SC_AVPHYS_PAGES" in os.sysconf_names else (
            total)
        return MemoryInfo(free, total)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None


class MemoryInfo(tuple):
    """(free, total) in bytes."""

    def __new__(cls, free, total):
        return super().__new__(cls, (free, total))

    free = property(lambda self: self[0])
    total = property(lambda self: self[1])


device = Device()
context = Context(device)


class _Devices:
    """`cuda.gpus`: a list of one."""

    lst = [device]
    current = device

    def __getitem__(self, index):
        if index not in (0, -1):
            raise IndexError("the simulator has one device, number 0")
        return _Managed()

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([_Managed()])

    def __str__(self):
        return "<Managed Device 0>"


class _Managed:
    """A device that can be used in a `with` block."""

    def __getattr__(self, name):
        return getattr(device, name)

    def __enter__(self):
        return context

    def __exit__(self, *error):
        return None

    def __eq__(self, other):
        return isinstance(other, _Managed) or other is device

    def __hash__(self):
        return 0


gpus = _Devices()


def list_devices():
    """`gpus`."""
    return gpus


def get_current_device():
    """The simulated device."""
    return device


def current_context(devnum=None):
    """The one context."""
    return context


def select_device(device_id=0):
    """Select device 0, the only one; ValueError for another."""
    if device_id != 0:
        raise ValueError(f"the simulator has one device, number 0; got {device_id}")
    return device


def require_context(function):
    """The function itself: the context always exists."""
    return function


def close():
    """Does nothing."""


def detect():
    """Print what is there; True."""
    print("Found 1 CUDA devices")
    print("id 0    course_lib simulator (runs on this CPU)                       [SUPPORTED]")
    print("                      Compute Capability: 9.0")
    return True


def is_available():
    """True: kernels can be launched, as with numba's own simulator. None runs on a GPU."""
    return True


def is_supported_version():
    """True."""
    return True


def cuda_error():
    """None: there is no driver that could have failed."""


def is_float16_supported():
    """True."""
    return True


def is_bfloat16_supported():
    """True."""
    return True


def is_fp8_supported():
    """False: fp8 arithmetic is not simulated."""
    return False


class CudaSupportError(RuntimeError):
    """What the real numba.cuda raises without a driver. Never raised here."""


class CudaAPIError(RuntimeError):
    """What the real numba.cuda raises when a driver call fails. Never raised here."""


class Driver:
    """The driver, as far as a simulator has one."""

    is_available = True
    initialization_error = None

    def get_device_count(self):
        """One."""
        return 1

    def get_version(self):
        """The CUDA version whose API is simulated."""
        return 13, 0
