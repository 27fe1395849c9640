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
    from .kernel import run

    copies = _Copies()
    ready = [copies.on_host(argument) for argument in args]
    try:
        run(kernel, grid, block, *ready, shared=shared, cluster=cluster)
    finally:
        copies.write_back()


class _Copies:
    """Host copies of device arrays, made once for each piece of device memory."""

    def __init__(self):
        self.made = {}  # what tells device memory apart -> (device object, host object)

    def on_host(self, argument):
        """The argument as the simulator takes it."""
        if isinstance(argument, tuple):
            parts = [self.on_host(part) for part in argument]
            return type(argument)(*parts) if hasattr(argument, "_fields") else tuple(parts)
        if isinstance(argument, (np.ndarray, np.generic)) or not hasattr(argument, "shape"):
            return argument
        if hasattr(argument, "detach"):
            return argument if argument.device.type == "cpu" else self.tensor(argument.detach())
        if not hasattr(argument, "__cuda_array_interface__"):
            return argument
        interface = argument.__cuda_array_interface__
        key = interface["data"][0], tuple(interface["shape"]), interface.get("strides"), (
            interface["typestr"])
        if key not in self.made:
            device = argument if hasattr(argument, "copy_to_host") else (
                sys.modules["numba.cuda"].as_cuda_array(argument))
            self.made[key] = device, device.copy_to_host()
        return self.made[key][1]

    def tensor(self, tensor):
        """A CPU tensor of the same layout; tensors over one storage share the copy of it."""
        storage = tensor.untyped_storage()
        key = storage.data_ptr()
        if key not in self.made:
            self.made[key] = storage, storage.cpu().clone()
        host = tensor.new_empty(0, device="cpu")
        return host.set_(self.made[key][1], tensor.storage_offset(), tensor.shape,
                         tensor.stride())

    def write_back(self):
        """Copy everything back to the device."""
        for device, host in self.made.values():
            if isinstance(host, np.ndarray):
                device.copy_to_device(host)
            else:
                device.copy_(host)
