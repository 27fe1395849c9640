"""One program, two kinds of array: NumPy's on a CPU, a GPU's on a GPU.

A program asks `get_backend()` once and then writes what it computes with `backend.xp`, a namespace
of the array API standard, whichever library is behind it::

    backend = set_backend(use_cuda=None)      # None: a GPU if there is one
    x = backend.to_device(images)             # the one place where data moves
    loss = backend.xp.mean((x - y) ** 2)
    print(float(loss))

============ ================ ================== ===============================================
backend      arrays           `xp`               layers compute with
============ ================ ================== ===============================================
`numpy`      NumPy's          array-api-compat   NumPy and BLAS
`simulator`  NumPy's          array-api-compat   the kernels of the course, in the simulator
`torch`      PyTorch's, CUDA  array-api-compat   the kernels of the course, on the GPU
`cupy`       CuPy's           array-api-compat   the kernels of the course, on the GPU
============ ================ ================== ===============================================

Nothing is moved from one device to the other unless `to_device` or `to_cpu` is called: mixing the
two kinds is an error, as in CuPy. Every array is made with a dtype that is named, because NumPy's
default is float64, which a GPU computes with at a small part of its speed.
"""

import importlib
import importlib.util
import os

import ml_dtypes
import numpy as np
from array_api_compat import array_namespace
from array_api_compat import numpy as numpy_namespace

import course_lib
from course_lib import device
from course_lib.runtime.host.device import SIMULATOR_VARIABLE

LIBRARIES = ("numpy", "simulator", "torch", "cupy")
_chosen = None


class BackendError(RuntimeError):
    """The backend that was asked for is not to be had here, and what is missing."""


class Backend:
    """A library of arrays and where they lie. Made by `set_backend`.

    name         one of `LIBRARIES`
    xp           the library's namespace, as the array API standard names its functions
    on_gpu       whether its arrays lie in a GPU's memory
    kernels      whether layers compute with the kernels of the course
    description  "CUDA (GPU acceleration enabled)" or "CPU", for a program's first line
    """

    on_gpu = False
    description = "CPU"

    def __init__(self, name, xp, kernels):
        self.name, self.xp, self.kernels = name, xp, kernels

    def owns(self, a):
        """Whether `a` is an array of this backend, on its device."""
        return isinstance(a, np.ndarray | np.generic)

    def to_device(self, a):
        """`a`, an array of NumPy or of this backend, as an array of this backend."""
        return _numpy_of(a)

    def to_cpu(self, a):
        """`a`, an array of this backend or of NumPy, as an array of NumPy."""
        return _numpy_of(a)

    def dtype(self, name):
        """The library's dtype "float32", "float16" or "bfloat16"; BackendError if it has none."""
        return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)

    def synchronize(self):
        """Wait until the device has done all it was given. A CPU has, always."""

    def prefetch(self, batches):
        """Yield each batch, a tuple of NumPy arrays, as a tuple of this backend's arrays.

        On a GPU the next batch crosses over on a stream of its own, from pinned memory, while the
        caller computes with this one. PyTorch's arrays are copied by a thread of their own.
        """
        for batch in batches:
            yield tuple(map(self.to_device, batch))

    def require(self, a, name):
        """`a` itself; TypeError where it is not an array of this backend."""
        if not self.owns(a):
            raise TypeError(
                f"{name} is {_kind(a)}, but the backend is {self.name!r}: "
                f"pass backend.to_device({name})"
            )
        return a

    def get_array_module(self, a):
        """The namespace of the library that `a` is of, whichever it is; as CuPy's function."""
        return get_array_module(a)

    def __repr__(self):
        return f"<backend {self.name}: {self.description}>"


class _OnGpu(Backend):
    on_gpu = True
    description = "CUDA (GPU acceleration enabled)"

    def __init__(self, name, xp):
        super().__init__(name, xp, kernels=True)


class _Torch(_OnGpu):
    def __init__(self):
        self.torch = importlib.import_module("torch")
        super().__init__("torch", importlib.import_module("array_api_compat.torch"))

    def owns(self, a):
        return isinstance(a, self.torch.Tensor) and a.is_cuda

    def to_device(self, a):
        if isinstance(a, self.torch.Tensor):
            return a.detach().cuda()
        return self.torch.from_numpy(np.ascontiguousarray(_numpy_of(a))).cuda()

    def to_cpu(self, a):
        return a.detach().cpu().numpy() if isinstance(a, self.torch.Tensor) else _numpy_of(a)

    def dtype(self, name):
        return getattr(self.torch, name)

    def synchronize(self):
        self.torch.cuda.synchronize()

    def prefetch(self, batches):
        crossing = importlib.import_module("course_lib.runtime.host.crossing").crossing
        place = self.torch.device("cuda", self.torch.cuda.current_device())
        tensor = self.torch.from_numpy
        on_host = ([tensor(np.ascontiguousarray(a)) for a in batch] for batch in batches)
        for batch in crossing(on_host, place):
            yield tuple(batch)


class _Cupy(_OnGpu):
    def __init__(self):
        self.cupy = importlib.import_module("cupy")
        super().__init__("cupy", importlib.import_module("array_api_compat.cupy"))

    def owns(self, a):
        return isinstance(a, self.cupy.ndarray)

    def to_device(self, a):
        return self.cupy.asarray(a)

    def to_cpu(self, a):
        return self.cupy.asnumpy(a)

    def dtype(self, name):
        if name == "bfloat16":
            raise BackendError("CuPy has no bfloat16: take float16, or library='torch'")
        return self.cupy.dtype(name)

    def synchronize(self):
        self.cupy.cuda.get_current_stream().synchronize()

    def prefetch(self, batches):
        cuda = self.cupy.cuda
        copies, here = cuda.Stream(non_blocking=True), None
        for batch in batches:
            pinned = [self._pinned(a) for a in batch]
            with copies:
                coming = [self.cupy.empty(a.shape, a.dtype) for a in pinned]
                for on_gpu, a in zip(coming, pinned, strict=True):
                    on_gpu.set(a, stream=copies)
                arrived = copies.record()
            if here is not None:
                yield self._received(*here)
            here = coming, arrived, pinned
        if here is not None:
            yield self._received(*here)

    def _pinned(self, a):
        memory = self.cupy.cuda.alloc_pinned_memory(a.nbytes)
        copy = np.frombuffer(memory, a.dtype, a.size).reshape(a.shape)
        copy[...] = a
        return copy

    def _received(self, arrays, arrived, pinned):
        # CuPy frees in the order of streams that it does not know of, so the host waits here, for
        # a copy that has had the time of a whole step.
        arrived.synchronize()
        return tuple(arrays)


def is_cuda_available():
    """Whether there is a GPU here and the kernels of the course run on it."""
    return not _missing()


def get_backend():
    """The `Backend` chosen last, or where none was chosen, a GPU if there is one."""
    return set_backend() if _chosen is None else _chosen


def set_backend(use_cuda=None, library=None):
    """Choose the `Backend` for all that follows, and return it.

    use_cuda  True: a GPU, or BackendError, which says what is missing; False: the CPU; None: a GPU
              if there is one
    library   "torch" (default) or "cupy" on a GPU; "numpy" (default) or "simulator" on the CPU. The
              simulator is the default where the environment variable COURSE_LIB_SIMULATOR is 1.

    Raises ValueError for an unknown library, and for one that contradicts `use_cuda`.
    """
    global _chosen
    if use_cuda not in (None, True, False):
        raise ValueError(f"use_cuda must be True, False or None (null), not {use_cuda!r}")
    if library is not None and library not in LIBRARIES:
        raise ValueError(f"unknown library {library!r}; there are {', '.join(LIBRARIES)}")
    if library is not None:
        wants_gpu = library in ("torch", "cupy")
        if use_cuda is not None and use_cuda != wants_gpu:
            where = "a GPU" if wants_gpu else "the CPU"
            raise ValueError(f"library={library!r} computes on {where}, but use_cuda={use_cuda}")
        use_cuda = wants_gpu
    missing = _missing() if use_cuda or use_cuda is None else None
    if use_cuda and missing and library is not None:
        raise BackendError(f"library={library!r} needs a GPU, but {missing}. 'numpy' needs none.")
    if use_cuda and missing:
        raise BackendError(f"use_cuda is True, but {missing}. use_cuda=False takes the CPU.")
    if use_cuda is None:
        use_cuda = not missing
    _chosen = _on_gpu(library or "torch") if use_cuda else _on_cpu(library)
    return _chosen


def get_array_module(a):
    """The array API namespace of the library that `a` is of. TypeError if it is no array."""
    return array_namespace(a)


def _on_cpu(library):
    if library is None:
        library = "simulator" if os.environ.get(SIMULATOR_VARIABLE) == "1" else "numpy"
    if library == "simulator" and not course_lib.SIMULATED:
        raise BackendError(
            f"kernels run on the GPU in this process; for the simulator start it with "
            f"{SIMULATOR_VARIABLE}=1 in the environment"
        )
    return Backend(library, numpy_namespace, kernels=library == "simulator")


def _on_gpu(library):
    if library == "torch":
        return _Torch()
    if importlib.util.find_spec("cupy") is None:
        raise BackendError("CuPy is not installed: pip install cupy-cuda13x")
    return _Cupy()


def _missing():
    """What keeps a GPU from being used, in words; None where nothing does."""
    if device.driver() is None:
        return "there is no NVIDIA driver here (libcuda was not found, or does not start)"
    if device.count() == 0:
        return "the NVIDIA driver reports no GPU"
    if importlib.util.find_spec("numba_cuda") is None:
        return "the package numba-cuda is not installed: pip install 'numba-cuda[cu13]'"
    if course_lib.SIMULATED:
        return f"kernels run in the simulator, because {SIMULATOR_VARIABLE}=1 is set"
    torch = importlib.import_module("torch")
    if not torch.cuda.is_available():
        return f"PyTorch {torch.__version__} finds no GPU: was it built without CUDA?"
    return None


def _numpy_of(a):
    """`a` itself, which must be an array of NumPy: of a list nobody knows the dtype."""
    if isinstance(a, np.ndarray | np.generic):
        return a
    raise TypeError(f"expected a NumPy array, not {_kind(a)}")


def _kind(a):
    where = f" on {a.device}" if hasattr(a, "device") else ""
    return f"a {type(a).__module__}.{type(a).__name__}{where}"
