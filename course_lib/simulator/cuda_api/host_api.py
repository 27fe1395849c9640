"""The host side of `numba.cuda`: arrays, streams, events, devices. Nothing here is asynchronous."""

import contextlib
import time
from types import SimpleNamespace

import numpy as np

from course_lib.simulator.cuda_api.arrays import (
    DeviceArray,
    device_array,
    host_array,
    like,
    torch_array,
)


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
