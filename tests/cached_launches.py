"""Launches that are cached where there is no GPU: all but the driver's call is the real thing."""

import ctypes
import math
from types import SimpleNamespace

import torch

from course_lib import SIMULATED, cuda
from course_lib.runtime.host import launch as launching
from course_lib.runtime.host.launch import launch
from course_lib.runtime.host.launch_cache import cached_launch

PLACE = "cpu" if SIMULATED else "cuda"


@cuda.jit
def scale_kernel(x, y, factor):
    i = cuda.grid(1)
    if i < x.shape[0]:
        y[i] = x[i] * factor


@cuda.jit
def difference_kernel(x, y, z):
    i = cuda.grid(1)
    if i < x.shape[0]:
        z[i] = x[i] - y[i]


def run(kernel, *args):
    n = args[0].numel()
    if n:
        launch(kernel, -(-n // 64), 64, *args, flat=True)


def made(body, n_arrays=2):
    """`body` as a cached launcher, that counts how often it had to think."""

    @cached_launch(n_arrays)
    def launcher(*inputs):
        launcher.thought += 1
        return body(*inputs)

    launcher.thought = 0
    return launcher


def tensor(*shape):
    return torch.randn(*shape, device=PLACE)


def stand_in(monkeypatch):
    """CPU tensors count as a GPU's, and prepared launches run in the simulator.

    Returns `prepared`, the kernels of the launches that were prepared, and `stream`, which is
    anybody's to change.
    """
    state = SimpleNamespace(prepared=[], stream=0)

    def prepare(kernel, grid, block, *args, **options):
        state.prepared.append(kernel)
        looks = [(a.shape, a.stride(), a.dtype) if torch.is_tensor(a) else a for a in args]

        def run(addresses):
            addresses = iter(addresses)
            arguments = [
                _at_address(next(addresses), *look) if isinstance(look, tuple) else look
                for look in looks
            ]
            launching.launch(kernel, grid, block, *arguments, **options)

        return SimpleNamespace(launch=run)

    if SIMULATED:
        chip = launching.chip_of(None)
        monkeypatch.setattr(torch.Tensor, "get_device", lambda self: 0)
        for name, stub in {
            "on_gpu": lambda: True, "chip_of": lambda array: chip, "prepare": prepare,
            "tensor_types": {torch.Tensor, torch.nn.Parameter},
            "_stream_of": lambda index: state.stream,
        }.items():  # fmt: skip
            monkeypatch.setattr(launching, name, stub)
    else:
        launching.tensor_types.add(torch.Tensor)  # as after a process's first launch
    return state


def _at_address(address, shape, stride, dtype):
    n_bytes = math.prod(shape) * dtype.itemsize
    memory = torch.frombuffer((ctypes.c_char * n_bytes).from_address(address), dtype=dtype)
    return memory.as_strided(shape, stride)
