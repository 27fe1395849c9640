"""Real numba.cuda kernels under observation: run in the simulator, on copies of their arguments."""

import contextlib
import importlib
import sys

import numpy as np

from course_lib.simulator.engine.kernel import run
from course_lib.simulator.observe.observer import observers, observing


@contextlib.contextmanager
def observing_with(observer):
    """Let `observer` watch every launch inside the `with` block, those of real kernels too.

    A real numba.cuda kernel launched inside runs in the simulator, on copies of its arguments;
    what it wrote is copied back.
    """
    token = observers.set((*observers.get(), observer))
    try:
        with real_kernels_simulated():
            yield observer
    finally:
        observers.reset(token)


@contextlib.contextmanager
def real_kernels_simulated():
    """Inside, a launch of a real numba kernel by this thread's observers runs in the simulator.

    Without the real numba.cuda there is nothing to do: kernels are simulated anyway.
    """
    module = sys.modules.get("numba.cuda.dispatcher")
    dispatcher = getattr(module, "CUDADispatcher", None)
    if not hasattr(dispatcher, "__getitem__"):  # numba's own simulator has an empty class there
        yield
        return
    saved = {name: getattr(dispatcher, name) for name in ("__getitem__", "forall")}

    def configured(kernel, configuration):
        if not observing():
            return saved["__getitem__"](kernel, configuration)
        grid, block, *rest = configuration
        shared = rest[1] if len(rest) > 1 else 0
        return lambda *args: run_on_copies(kernel, grid, block, args, shared)

    def forall(kernel, ntasks, tpb=0, stream=0, sharedmem=0):
        if not observing():
            return saved["forall"](kernel, ntasks, tpb, stream, sharedmem)
        threads = tpb or 128
        return lambda *args: ntasks and run_on_copies(
            kernel, -(-ntasks // threads), threads, args, sharedmem)

    dispatcher.__getitem__, dispatcher.forall = configured, forall
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(dispatcher, name, function)


def run_on_copies(kernel, grid, block, args, shared=0, cluster=1):
    """Run `kernel` in the simulator; device arrays are copied to the host and back.

    Arrays that share memory on the device share it in the copy, so that kernels that work in
    place are seen as such. NumPy arrays and CPU tensors are used as they are.
    """
    copies = _Copies(args)
    ready = [copies.on_host(argument) for argument in args]
    try:
        run(kernel, grid, block, *ready, shared=shared, cluster=cluster)
    finally:
        copies.write_back()


class _Copies:
    """Host copies of the device memory behind `arguments`, each piece of it copied once."""

    def __init__(self, arguments=()):
        self.storages = {}  # address -> a tensor's storage, its copy
        self.spans = []  # (first address, bytes on the device, their copy)
        for first, end in _merged(_extent(array) for array in _device_arrays(arguments)):
            there = device_bytes(first, end - first)
            self.spans.append((first, there, there.copy_to_host()))

    def on_host(self, argument):
        """The argument as the simulator takes it."""
        if isinstance(argument, tuple):
            parts = [self.on_host(part) for part in argument]
            return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
        if _is_tensor(argument):
            return argument if argument.device.type == "cpu" else self.tensor(argument.detach())
        return self.array(argument) if _is_device_array(argument) else argument

    def array(self, array):
        """A NumPy array of the same layout, over the copy of its span."""
        shape, strides, dtype = _layout(array)
        if 0 in shape:
            return np.empty(shape, dtype)
        address = array.__cuda_array_interface__["data"][0]
        first, _, copy = max((span for span in self.spans if span[0] <= _extent(array)[0]),
                             key=lambda span: span[0])
        return np.ndarray(shape, dtype, copy, address - first, strides)

    def tensor(self, tensor):
        """A CPU tensor of the same layout; tensors over one storage share the copy of it."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.storages:
            self.storages[key] = storage, storage.cpu().clone()
        host = tensor.new_empty(0, device="cpu")
        return host.set_(self.storages[key][1], tensor.storage_offset(), tensor.shape,
                         tensor.stride())

    def write_back(self):
        """Copy everything back to the device."""
        for storage, copy in self.storages.values():
            storage.copy_(copy)
        for _, there, copy in self.spans:
            there.copy_to_device(copy)


def device_bytes(address, size):
    """`size` bytes of device memory, as a numba array that can be copied from and to."""
    numba_cuda = importlib.import_module("numba.cuda")
    numba_cuda.synchronize()  # what wrote there, on whatever stream, has finished
    return numba_cuda.as_cuda_array(_Bytes(address, size))


class _Bytes:
    """Device memory, described as libraries describe it to each other."""

    def __init__(self, address, size):
        self.__cuda_array_interface__ = {
            "data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _is_tensor(argument):
    return hasattr(argument, "shape") and hasattr(argument, "detach")


def _is_device_array(argument):
    return hasattr(argument, "__cuda_array_interface__")


def _device_arrays(arguments):
    """The device arrays among `arguments` and in tuples there, but for tensors and empty ones."""
    for argument in arguments:
        if isinstance(argument, tuple):
            yield from _device_arrays(argument)
        elif not _is_tensor(argument) and _is_device_array(argument):
            if 0 not in argument.__cuda_array_interface__["shape"]:
                yield argument


def _layout(array):
    """(shape, strides in bytes, dtype) of a device array."""
    interface = array.__cuda_array_interface__
    shape, strides = tuple(interface["shape"]), interface.get("strides")
    # The interface's own type has no names for the fields of a record, and none for bfloat16.
    dtype = getattr(array, "dtype", None)
    dtype = dtype if isinstance(dtype, np.dtype) else np.dtype(interface["typestr"])
    if strides is None:  # it says so of rows one after the other
        strides = dtype.itemsize * np.cumprod((1, *shape[:0:-1]))[::-1] if shape else ()
    return shape, tuple(int(stride) for stride in strides), dtype


def _extent(array):
    """(first, end): the bytes of device memory that a device array lies in."""
    shape, strides, dtype = _layout(array)
    address = array.__cuda_array_interface__["data"][0]
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    before, after = sum(min(0, r) for r in reach), sum(max(0, r) for r in reach)
    return address + before, address + after + dtype.itemsize


def _merged(extents):
    """The extents in order, those that overlap made one."""
    merged = []
    for first, end in sorted(extents):
        if merged and first < merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([first, end])
    return merged
