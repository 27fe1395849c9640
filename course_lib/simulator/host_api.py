"""The host side of `numba.cuda`: arrays, streams, events, devices. Nothing here is asynchronous."""

import contextlib
import time
from types import SimpleNamespace

import numpy as np

from .arrays import DeviceArray, device_array, host_array, like, torch_array


def device_array_like(ary, stream=0):
    """An uninitialised device array with the shape, dtype and layout of `ary`."""
    shape, dtype, strides = like(_plain(ary))
    array = device_array(shape, dtype)
    if array.strides != strides and array.size:
        array = device_array(shape, dtype, strides)
    return array


def _plain(ary):
    if isinstance(ary, DeviceArray):
        return ary._array
    return torch_array(ary) if type(ary).__module__.partition(".")[0] == "torch" else (
        np.asarray(ary))


def pinned_array(shape, dtype=np.float64, strides=None, order="C"):
    """A NumPy array; memory is not page-locked."""
    return host_array(shape, dtype, strides, order)


def pinned_array_like(ary):
    """A NumPy array like `ary`."""
    shape, dtype, strides = like(_plain(ary))
    return host_array(shape, dtype, strides)


def mapped_array(shape, dtype=np.float64, strides=None, order="C", stream=0, portable=False,
                 wc=False):
    """A NumPy array that kernels use in place."""
    return host_array(shape, dtype, strides, order)


def mapped_array_like(ary, stream=0, portable=False, wc=False):
    """A mapped array like `ary`."""
    return pinned_array_like(ary)


def managed_array(shape, dtype=np.float64, strides=None, order="C", stream=0, attach_global=True):
    """A NumPy array that kernels use in place."""
    return host_array(shape, dtype, strides, order)


@contextlib.contextmanager
def pinned(*arrays):
    """Does nothing: memory is not page-locked."""
    yield


@contextlib.contextmanager
def mapped(*arrays, **options):
    """Kernels use host arrays in place: gives device arrays over the same memory."""
    views = [DeviceArray(np.asarray(array)) for array in arrays]
    yield views[0] if len(views) == 1 else views


def as_cuda_array(obj, sync=True):
    """A device array over the memory of `obj`: a device array, or a torch tensor on the CPU.

    Raises
    ------
    TypeError for anything else, NumPy arrays included: on a GPU they would need a copy.
    """
    if isinstance(obj, DeviceArray):
        return obj
    if type(obj).__module__.partition(".")[0] == "torch" and hasattr(obj, "detach"):
        return DeviceArray(torch_array(obj))
    raise TypeError("*obj* doesn't implement the cuda array interface. Use cuda.to_device(obj)")


def is_cuda_array(obj):
    """True for what `as_cuda_array` accepts as device memory."""
    return isinstance(obj, DeviceArray)


class Stream:
    """A stream. Launches run when they are made, so waiting for one takes no time."""

    handle = SimpleNamespace(value=0)
    external = False

    def synchronize(self):
        """Nothing to wait for."""

    @contextlib.contextmanager
    def auto_synchronize(self):
        """Gives this stream."""
        yield self

    def add_callback(self, callback, arg=None):
        """Call `callback(stream, status, arg)` now."""
        callback(self, 0, arg)

    async def async_done(self):
        """Gives this stream: all its work is done."""
        return self

    def __int__(self):
        return 0

    def __repr__(self):
        return "<simulated CUDA stream>"


def stream():
    """A new stream."""
    return Stream()


default_stream = legacy_default_stream = per_thread_default_stream = stream


def external_stream(ptr):
    """A stream for a foreign handle; the handle is not used."""
    result = Stream()
    result.external = True
    return result


class Event:
    """An event. It notes the wall clock, which says nothing about how long a GPU would take."""

    def __init__(self, timing=True):
        self.timing = timing
        self.seconds = None

    def record(self, stream=0):
        """Note the time."""
        self.seconds = time.perf_counter()

    def synchronize(self):
        """Nothing to wait for."""

    def wait(self, stream=0):
        """Nothing to wait for."""

    def query(self):
        """True: whatever was launched has finished."""
        return True

    def elapsed_time(self, other):
        """Milliseconds of wall clock between two records, simulation included. Not GPU time."""
        if self.seconds is None or other.seconds is None:
            raise RuntimeError("elapsed_time needs two recorded events")
        return (other.seconds - self.seconds) * 1e3


def event(timing=True):
    """A new event."""
    return Event(timing)


def event_elapsed_time(start, end):
    """`start.elapsed_time(end)`: wall clock, not GPU time."""
    return start.elapsed_time(end)


def synchronize():
    """Nothing to wait for: every launch has finished when it returns."""


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
        import os

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


@contextlib.contextmanager
def defer_cleanup():
    """Does nothing: Python frees memory."""
    yield


@contextlib.contextmanager
def profiling():
    """Does nothing: there is no GPU to profile."""
    yield


def profile_start():
    """Does nothing."""


def profile_stop():
    """Does nothing."""


def declare_device(name, sig, link=None, use_cooperative=False, abi="numba"):
    """Raise NotImplementedError: foreign device code cannot run here."""
    raise NotImplementedError(
        f"{name} is compiled device code, which the simulator cannot run. Write it in Python, or "
        f"give the simulator a twin with simulator.register_twin")


def compile_ptx(*args, **kwargs):
    """Raise NotImplementedError: the simulator does not compile."""
    raise NotImplementedError("the simulator does not compile; use the real numba.cuda for PTX")


compile = compile_all = compile_for_current_device = compile_ptx_for_current_device = compile_ptx


class ArgHint:
    """An argument with a direction."""

    def __init__(self, value):
        self.value = value

    @property
    def kernel_value(self):
        """The array the kernel uses: the caller's own, in place."""
        value = self.value
        return value._array if isinstance(value, DeviceArray) else value


class In(ArgHint):
    """An array that the kernel only reads: it gets a copy."""

    @property
    def kernel_value(self):
        """A copy, so that what the kernel writes is not seen."""
        return np.array(super().kernel_value)


class Out(ArgHint):
    """An array that the kernel fills."""


class InOut(ArgHint):
    """An array that the kernel reads and writes."""


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
