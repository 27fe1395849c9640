"""Real numba.cuda kernels under observation: run in the simulator, on copies of their arguments."""

import contextlib
import sys

import numpy as np

from .observe import observing


@contextlib.contextmanager
def real_kernels_simulated():
    """Inside, a launch of a real numba kernel by this thread's observers runs in the simulator.

    Without the real numba.cuda there is nothing to do: kernels are simulated anyway.
    """
    module = sys.modules.get("numba.cuda.dispatcher")
    dispatcher = getattr(module, "CUDADispatcher", None)
    if dispatcher is None:
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


def run_on_copies(kernel, grid, block, args, shared=0):
    """Run `kernel` in the simulator; device arrays are copied to the host and back.

    Arrays that share memory on the device share it in the copy, so that kernels that work in
    place are seen as such. NumPy arrays and CPU tensors are used as they are.
    """
    from .kernel import run

    copies = []
    ready = [_on_host(argument, copies) for argument in args]
    try:
        run(kernel, grid, block, *ready, shared=shared)
    finally:
        for write_back in copies:
            write_back()


def _on_host(argument, copies):
    if isinstance(argument, tuple):
        parts = [_on_host(part, copies) for part in argument]
        return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
    if isinstance(argument, (np.ndarray, np.generic)) or not hasattr(argument, "shape"):
        return argument
    if hasattr(argument, "detach"):
        if argument.device.type == "cpu":
            return argument
        return _torch_copy(argument.detach(), copies)
    if hasattr(argument, "copy_to_host"):
        host = argument.copy_to_host()
        copies.append(lambda: argument.copy_to_device(host))
        return host
    if hasattr(argument, "__cuda_array_interface__"):
        device = sys.modules["numba.cuda"].as_cuda_array(argument)
        host = device.copy_to_host()
        copies.append(lambda: device.copy_to_device(host))
        return host
    return argument


def _torch_copy(tensor, copies):
    """A CPU copy with the same layout; tensors over one storage share the copy of it."""
    storage = tensor.untyped_storage()
    known = next((copy for key, copy in _storages(copies) if key == storage.data_ptr()), None)
    if known is None:
        known = storage.cpu()
        copies.append(_StorageCopy(storage, known))
    host = tensor.new_empty(0, device="cpu")
    host.set_(known, tensor.storage_offset(), tensor.shape, tensor.stride())
    return host


class _StorageCopy:
    def __init__(self, storage, host):
        self.storage, self.host = storage, host

    def __call__(self):
        self.storage.copy_(self.host)


def _storages(copies):
    return [(copy.storage.data_ptr(), copy.host) for copy in copies
            if isinstance(copy, _StorageCopy)]
