"""A compiled kernel loaded on one GPU, and a launch of it prepared down to the last byte.

`Specialisation` is a kernel for one list of argument types on one GPU. `PreparedLaunch` adds a
grid, a block, a stream and the arrays' shapes; what may still change from call to call are the
addresses and the numbers. Its buffer holds the launch configuration and, behind it, the kernel's
parameters, so that a launch writes a few numbers and hands the driver two addresses. That is what
keeps the host's share of a launch near a microsecond.
"""

import contextlib
import ctypes
import functools
import struct

from course_lib.runtime.compile.compiler import compile_kernel
from course_lib.runtime.host import device

# CUlaunchConfig: grid, block, dynamic shared bytes, stream, attributes and their number.
_CONFIGURATION = struct.Struct("@7IQQI4x")
# CUlaunchAttribute: its number, and a value of 64 bytes, of which none here needs more than 12.
_ATTRIBUTE = struct.Struct("@I4x3I52x")
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_COOPERATIVE = 2  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
_CLUSTER = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
_OVERLAP = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_LARGE_CLUSTERS = 14  # CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
_HOPPER = (9, 0)  # the first chips with clusters and with overlapping launches
_PORTABLE_CLUSTER = 8  # blocks: what every chip that has clusters can do
_LARGEST_CLUSTERS = {(9, 0): 16, (10, 0): 16}
_INVALID_CONTEXT = 201
_NO_SPECIAL_REQUEST = 48 << 10  # bytes of shared memory that any kernel may use in all


class LaunchError(RuntimeError):
    """The driver refused a launch, or the launch asked for something impossible."""


class Specialisation:
    """`kernel` for `argtypes` (numba types), compiled and loaded on GPU `index`."""

    def __init__(self, kernel, argtypes, index):
        self.compiled = compile_kernel(kernel, argtypes, device.compute_capability(index))
        self.title = kernel.py_func.__name__
        self.index = index
        self.function = ctypes.c_void_p(_load(self.compiled, index))
        self._dynamic_shared = _NO_SPECIAL_REQUEST - self.compiled.shared_bytes
        self._large_clusters = False

    def allow_shared(self, n_bytes):
        """Ask for `n_bytes` of dynamic shared memory; LaunchError where the GPU has less."""
        if n_bytes <= self._dynamic_shared:
            return
        limit = device.properties(self.index).shared_bytes_per_block_optin
        available = limit - self.compiled.shared_bytes
        if n_bytes > available:
            raise LaunchError(
                f"{self.title}: {n_bytes} bytes of dynamic shared memory asked for; this GPU "
                f"allows {limit} per block, of which {available} are left for it"
            )
        with current_device(self.index):
            _check(device.driver().cuFuncSetAttribute(self.function, _DYNAMIC_SHARED, n_bytes))
        self._dynamic_shared = n_bytes


    def allow_clusters(self, n_blocks):
        """Ask for clusters of `n_blocks`; LaunchError where the GPU has none so large."""
        most = most_blocks_in_cluster(self.compiled.compute_capability)
        if n_blocks > most:
            raise LaunchError(
                f"{self.title}: clusters of {n_blocks} blocks, but a GPU of compute capability "
                f"{_dotted(self.compiled.compute_capability)} has "
                + (f"clusters of {most} at most" if most > 1 else "none: it takes 9.0 or more")
            )
        if n_blocks > _PORTABLE_CLUSTER and not self._large_clusters:
            with current_device(self.index):
                _check(device.driver().cuFuncSetAttribute(self.function, _LARGE_CLUSTERS, 1))
            self._large_clusters = True


def most_blocks_in_cluster(capability):
    """Blocks of a cluster, at most, on a GPU of this compute capability; 1: it has none."""
    if capability < _HOPPER:
        return 1
    return _LARGEST_CLUSTERS.get(tuple(capability), _PORTABLE_CLUSTER)


class PreparedLaunch:
    """One launch of a `Specialisation`, to be repeated with other addresses and numbers.

    parameters  a list of (`struct` code, value or None); None marks what each call brings
    overlap     whether the kernel may start before the previous one ends (see `launch`)
    cluster     number of blocks in x that make a cluster; LaunchError where the GPU has none

    Not to be shared between threads: two of them would write into one buffer.
    """

    def __init__(
        self, specialisation, grid, block, shared_bytes, stream, parameters, overlap, cluster
    ):
        specialisation.allow_shared(shared_bytes)
        specialisation.allow_clusters(cluster)
        self.specialisation = specialisation
        self.grid, self.block, self.shared_bytes = grid, block, shared_bytes
        self.cluster = cluster
        codes = "".join(code for code, _ in parameters)
        packer = struct.Struct(f"@{_CONFIGURATION.format[1:]}{codes}")
        self.buffer = ctypes.create_string_buffer(-(-packer.size // 8) * 8)
        constants = [0 if value is None else value for _, value in parameters]
        self.attributes = _attributes(specialisation, overlap, cluster)
        where = ctypes.addressof(self.attributes) if self.attributes else 0
        n_attributes = len(self.attributes) // _ATTRIBUTE.size
        head = (*grid, *block, shared_bytes, stream, where, n_attributes)
        packer.pack_into(self.buffer, 0, *head, *constants)
        self.slots = list(_slots(parameters))
        # Addresses alone can be written as whole words, in half the time.
        self.words = memoryview(self.buffer).cast("B").cast("Q")
        only_addresses = all(code == "Q" for code, value in parameters if value is None)
        self.places = [offset // 8 for _, offset in self.slots] if only_addresses else None
        self.configuration = ctypes.c_void_p(ctypes.addressof(self.buffer))
        self.size = ctypes.c_size_t(packer.size - _CONFIGURATION.size)
        self.extra = (ctypes.c_void_p * 5)(
            1,  # CU_LAUNCH_PARAM_BUFFER_POINTER
            ctypes.addressof(self.buffer) + _CONFIGURATION.size,
            2,  # CU_LAUNCH_PARAM_BUFFER_SIZE
            ctypes.addressof(self.size),
            None,  # CU_LAUNCH_PARAM_END
        )
        self.extra_address = ctypes.byref(self.extra)
        self.function = specialisation.function
        self.call = device.driver().cuLaunchKernelEx
        if specialisation.compiled.cooperative:
            self.call = self._with_each_parameter(self.call, parameters)

    def _with_each_parameter(self, call, parameters):
        """`call`, given the address of each parameter instead of that of the buffer.

        While a graph is being captured the driver refuses cooperative launches with one buffer.
        """
        start = ctypes.addressof(self.buffer)
        places = (ctypes.c_void_p * len(parameters))(*(start + o for o in _offsets(parameters)))
        return lambda configuration, function, *_: call(configuration, function, places, None)

    def launch(self, values):
        """Enqueue the kernel with `values` in the places left open, in order."""
        if self.places is not None:
            words = self.words
            for place, value in zip(self.places, values):  # noqa: B905, it costs time here
                words[place] = value
        else:
            buffer = self.buffer
            for (write, offset), value in zip(self.slots, values):  # noqa: B905
                write(buffer, offset, value)
        if _several_devices():
            with current_device(self.specialisation.index):
                error = self.call(self.configuration, self.function, None, self.extra_address)
        else:
            error = self.call(self.configuration, self.function, None, self.extra_address)
            if error == _INVALID_CONTEXT:  # first use of CUDA in this thread
                context = _primary_context(self.specialisation.index)
                _check(device.driver().cuCtxSetCurrent(context))
                error = self.call(self.configuration, self.function, None, self.extra_address)
        if error:
            compiled = self.specialisation.compiled
            clusters = f" in clusters of {self.cluster}" if self.cluster > 1 else ""
            raise LaunchError(
                f"{self.specialisation.title}: the driver refused grid {self.grid}{clusters}, "
                f"block {self.block} and {self.shared_bytes} bytes of dynamic shared memory: "
                f"{_describe(error)}. The kernel uses {compiled.registers} registers per thread "
                f"and {compiled.shared_bytes} bytes of static shared memory."
            )


def _attributes(specialisation, overlap, cluster):
    capability = specialisation.compiled.compute_capability
    wanted = []
    if specialisation.compiled.cooperative:
        wanted.append((_COOPERATIVE, 1, 0, 0))
    if overlap and capability >= _HOPPER:
        wanted.append((_OVERLAP, 1, 0, 0))
    if cluster > 1:
        wanted.append((_CLUSTER, cluster, 1, 1))
    packed = b"".join(_ATTRIBUTE.pack(*attribute) for attribute in wanted)
    return (ctypes.c_char * len(packed)).from_buffer_copy(packed) if packed else b""


def _dotted(capability):
    return ".".join(map(str, capability))


def _offsets(parameters):
    """Where in the buffer each parameter lies."""
    before = _CONFIGURATION.format
    for code, _ in parameters:
        yield struct.calcsize(before + code) - struct.calcsize(f"@{code}")
        before += code


def _slots(parameters):
    """(function that writes the value, its offset in the buffer) of each parameter left open."""
    before = _CONFIGURATION.format
    for code, value in parameters:
        if value is None:
            plain = struct.Struct(f"@{code}")
            yield plain.pack_into, struct.calcsize(before + code) - plain.size
        before += code


@functools.cache
def _several_devices():
    return device.count() > 1


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
