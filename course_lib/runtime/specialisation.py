"""A compiled kernel, loaded on one GPU and ready to be launched again and again.

Everything a launch needs lies in one buffer: the launch configuration and, behind it, the
kernel's parameters. A launch writes the changing numbers with one `struct` call and hands the
driver two addresses, which is what keeps the host's share of a launch near a microsecond.
"""

import contextlib
import ctypes
import functools
import struct
import sys

from course_lib.runtime import device
from course_lib.runtime.compiler import compile_kernel

_CONFIGURATION = struct.Struct("@7IQQI4x")  # CUlaunchConfig: grid, block, shared, stream, attributes
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_INVALID_CONTEXT = 201
_NO_SPECIAL_REQUEST = 48 << 10  # bytes of dynamic shared memory any kernel may use


class LaunchError(RuntimeError):
    """The driver refused a launch, or the launch asked for something impossible."""


class Specialisation:
    """`kernel` for one list of argument types on GPU `index`.

    `layout` is the `struct` format of its parameters, in native alignment.
    """

    def __init__(self, kernel, argtypes, layout, index):
        self.compiled = compile_kernel(kernel, argtypes, device.compute_capability(index))
        self.title = kernel.py_func.__name__
        self.index = index
        self.stream_of = _stream_function()
        packer = struct.Struct(f"@{_CONFIGURATION.format[1:]}{layout}")
        self.pack = packer.pack_into
        self.buffer = ctypes.create_string_buffer(packer.size)
        self.address = ctypes.c_void_p(ctypes.addressof(self.buffer))
        self.size = ctypes.c_size_t(packer.size - _CONFIGURATION.size)
        self.extra = (ctypes.c_void_p * 5)(
            1,  # CU_LAUNCH_PARAM_BUFFER_POINTER
            ctypes.addressof(self.buffer) + _CONFIGURATION.size,
            2,  # CU_LAUNCH_PARAM_BUFFER_SIZE
            ctypes.addressof(self.size),
            None,  # CU_LAUNCH_PARAM_END
        )
        self.extra_address = ctypes.byref(self.extra)
        # CUlaunchAttribute: id, padding, then 64 bytes of value.
        self.attribute = struct.pack("@I4xI60x", _COOPERATIVE, 1)
        self.attribute_buffer = ctypes.create_string_buffer(self.attribute)
        self.attributes = (
            (ctypes.addressof(self.attribute_buffer), 1) if self.compiled.cooperative else (0, 0)
        )
        self.dynamic_shared = _NO_SPECIAL_REQUEST
        self.function = ctypes.c_void_p(_load(self.compiled, index))
        self.call = device.driver().cuLaunchKernelEx

    def launch(self, grid, block, shared_bytes, values):
        """Launch on the current stream with the parameter `values`, in order of `layout`."""
        if shared_bytes > self.dynamic_shared:
            self._allow_shared(shared_bytes)
        if _several_devices():
            with current_device(self.index):
                error = self._launch(grid, block, shared_bytes, values)
        else:
            error = self._launch(grid, block, shared_bytes, values)
            if error == _INVALID_CONTEXT:  # first use of CUDA in this thread
                _check(device.driver().cuCtxSetCurrent(_primary_context(self.index)))
                error = self._launch(grid, block, shared_bytes, values)
        if error:
            raise LaunchError(
                f"{self.title}: the driver refused grid {grid}, block {block} and {shared_bytes} "
                f"bytes of dynamic shared memory: {_describe(error)}. The kernel uses "
                f"{self.compiled.registers} registers per thread and "
                f"{self.compiled.shared_bytes} bytes of static shared memory."
            )

    def _launch(self, grid, block, shared_bytes, values):
        # The interpreter lock is held from here to the end of the call (`device.driver`), so
        # no other thread can write to the buffer in between.
        stream = self.stream_of(self.index)
        self.pack(self.buffer, 0, *grid, *block, shared_bytes, stream, *self.attributes, *values)
        return self.call(self.address, self.function, None, self.extra_address)

    def _allow_shared(self, shared_bytes):
        limit = device.properties(self.index).shared_bytes_per_block_optin
        available = limit - self.compiled.shared_bytes
        if shared_bytes > available:
            raise LaunchError(
                f"{self.title}: {shared_bytes} bytes of dynamic shared memory asked for; this GPU "
                f"allows {limit} per block, of which {available} are left for it"
            )
        _check(
            device.driver().cuFuncSetAttribute(self.function, _DYNAMIC_SHARED, int(shared_bytes))
        )
        self.dynamic_shared = shared_bytes


@functools.cache
def _several_devices():
    return device.count() > 1


def _stream_function():
    """A function from device index to the handle of PyTorch's current stream."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return lambda index: 0  # the default stream, which numba's device arrays use too
    # The public torch.cuda.current_stream builds an object, which takes ten times as long.
    raw = getattr(torch._C, "_cuda_getCurrentRawStream", None)
    return raw or (lambda index: torch.cuda.current_stream(index).cuda_stream)


@functools.cache
def _primary_context(index):
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _check(device.driver().cuDeviceGet(ctypes.byref(handle), index))
    _check(device.driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), handle))
    return context


@contextlib.contextmanager
def current_device(index):
    """Make GPU `index` the calling thread's current device for a while."""
    _check(device.driver().cuCtxPushCurrent_v2(_primary_context(index)))
    try:
        yield
    finally:
        _check(device.driver().cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p())))


def _load(compiled, index):
    """The driver's handle of the kernel. Safe while a CUDA graph is being captured."""
    driver = device.driver()
    mode = ctypes.c_int(_RELAXED)
    with current_device(index):
        driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            module, function = ctypes.c_void_p(), ctypes.c_void_p()
            _check(driver.cuModuleLoadData(ctypes.byref(module), compiled.cubin))
            name = compiled.name.encode()
            _check(driver.cuModuleGetFunction(ctypes.byref(function), module, name))
        finally:
            driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
    return function.value


def _describe(error):
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    device.driver().cuGetErrorName(error, ctypes.byref(name))
    device.driver().cuGetErrorString(error, ctypes.byref(text))
    return f"{(name.value or b'unknown').decode()}, {(text.value or b'').decode()}"


def _check(error):
    if error:
        raise LaunchError(f"the CUDA driver answered {error}: {_describe(error)}")
