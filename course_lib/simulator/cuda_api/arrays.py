"""Device arrays, and how host values become kernel arguments."""

import enum
import sys

import ml_dtypes
import numpy as np

from course_lib.simulator import errors
from course_lib.simulator.cuda_api import unwritten
from course_lib.simulator.engine.guards import poison, records


class DeviceArray:
    """Memory of the simulated GPU. Like `numba.cuda`'s, it offers copies, views and elements.

    `copy_to_host()` gives a NumPy array; arithmetic on the device needs a kernel.
    """

    __cuda_ndarray__ = True
    __cuda_memory__ = True

    def __init__(self, array):
        self._array = array
        self.stream = 0

    shape = property(lambda self: self._array.shape)
    strides = property(lambda self: self._array.strides)
    dtype = property(lambda self: self._array.dtype)
    ndim = property(lambda self: self._array.ndim)
    size = property(lambda self: self._array.size)
    nbytes = alloc_size = property(lambda self: self._array.nbytes)
    itemsize = property(lambda self: self._array.itemsize)
    flags = property(lambda self: {"C_CONTIGUOUS": self._array.flags.c_contiguous,
                                   "F_CONTIGUOUS": self._array.flags.f_contiguous})
    T = property(lambda self: self.transpose())

    @property
    def __cuda_array_interface__(self):
        """What libraries tell each other about device memory. The address is one of the host's."""
        unwritten.forget([self._array])
        interface = dict(self._array.__array_interface__)
        contiguous = self._array.flags.c_contiguous
        return interface | {"version": 3, "strides": None if contiguous else self._array.strides}

    def copy_to_host(self, ary=None, stream=0):
        """A host copy, written into `ary` if given (same shape and dtype)."""
        if ary is None:
            return np.array(self._array, order="K", copy=True)
        _check_same(self._array, ary)
        np.copyto(ary, self._array)
        return ary

    def copy_to_device(self, ary, stream=0):
        """Copy a host or device array of the same shape and dtype into this one."""
        source = ary._array if isinstance(ary, DeviceArray) else np.asarray(ary)
        _check_contiguous(self._array)
        if isinstance(ary, DeviceArray):
            _check_contiguous(source)
        _check_same(self._array, source)
        if isinstance(ary, DeviceArray) and self.shape == ary.shape and (
                self.strides != ary.strides and self.size > 1):
            raise ValueError(f"incompatible strides: {self.strides} vs. {ary.strides}")
        np.copyto(self._array, source)
        unwritten.written(self._array)

    def __getitem__(self, index):
        result = self._array[index]
        return DeviceArray(result) if isinstance(result, np.ndarray) else result

    def __setitem__(self, index, value):
        self._array[index] = value._array if isinstance(value, DeviceArray) else value
        unwritten.forget([self._array])

    getitem = __getitem__

    def setitem(self, index, value, stream=0):
        """`self[index] = value`."""
        self[index] = value

    def __len__(self):
        return len(self._array)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype=None, copy=None):
        return np.array(self._array, dtype=dtype)

    def __repr__(self):
        return f"<DeviceArray shape={self.shape} dtype={self.dtype}>"

    def __reduce__(self):
        return DeviceArray, (self._array,)

    def reshape(self, *shape, order="C"):
        """A view with another shape."""
        return DeviceArray(self._array.reshape(*shape, order=order))

    def ravel(self, order="C", stream=0):
        """A flat view or copy."""
        return DeviceArray(self._array.ravel(order))

    def transpose(self, axes=None):
        """A view with its axes permuted."""
        return DeviceArray(self._array.transpose(axes))

    def view(self, dtype):
        """A view of the same bytes as `dtype`."""
        return DeviceArray(self._array.view(dtype))

    def squeeze(self, axis=None, stream=0):
        """A view without axes of length one."""
        return DeviceArray(self._array.squeeze(axis))

    def split(self, section, stream=0):
        """Yield consecutive pieces of `section` elements."""
        for first in range(0, self.size, section):
            yield DeviceArray(self._array[first:first + section])

    def bind(self, stream=0):
        """A view of this array that remembers `stream`; it means nothing here."""
        clone = DeviceArray(self._array)
        clone.stream = stream
        return clone

    def is_c_contiguous(self):
        """True if rows follow each other in memory."""
        return self._array.flags.c_contiguous

    def is_f_contiguous(self):
        """True if columns follow each other in memory."""
        return self._array.flags.f_contiguous


def _check_same(target, source):
    if target.dtype != source.dtype:
        raise TypeError(f"incompatible dtype: {target.dtype} vs. {source.dtype}")
    if target.squeeze().shape != source.squeeze().shape:
        raise ValueError(f"incompatible shape: {target.shape} vs. {source.shape}")


def _check_contiguous(array):
    core = array[tuple(0 if stride == 0 else slice(None) for stride in array.strides)] if (
        array.size and array.ndim) else array
    # Axes may lie in any order; only gaps between the elements count.
    packed = core.transpose(np.argsort([-abs(stride) for stride in core.strides], kind="stable"))
    if not (packed.flags.c_contiguous or core.flags.f_contiguous):
        raise ValueError("Array contains non-contiguous buffer and cannot be transferred as a "
                         "single memory region. Please ensure contiguous buffer with numpy "
                         ".ascontiguousarray()")


def to_device(obj, stream=0, copy=True, to=None):
    """A device copy of a host array; into the device array `to` if given."""
    source = obj._array if isinstance(obj, DeviceArray) else _host(obj)
    _check_contiguous(source)
    if to is not None:
        to.copy_to_device(source, stream)
        return to
    return DeviceArray(np.array(source, order="K", copy=True))


def _host(obj):
    if type(obj).__module__.partition(".")[0] == "torch":
        return torch_array(obj)
    return np.asarray(obj)


def device_array(shape, dtype=np.float64, strides=None, order="C", stream=0):
    """An uninitialised device array: NaN for floats, garbage for integers."""
    array = host_array(shape, dtype, strides, order)
    if strides is None:
        poison(array)
        unwritten.begin(array)
    return DeviceArray(array).bind(stream)


def host_array(shape, dtype=np.float64, strides=None, order="C"):
    """An uninitialised NumPy array with the layout asked for."""
    dtype = np.dtype(dtype)
    if strides is None:
        return np.empty(shape, dtype, order=order)
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    strides = (strides,) if isinstance(strides, int) else tuple(strides)
    extent = sum((n - 1) * abs(s) for n, s in zip(shape, strides, strict=True)) + dtype.itemsize
    return np.ndarray(shape, dtype, np.zeros(extent, np.uint8), strides=strides)


def like(array):
    """Shape, dtype and strides for a new packed array whose axes lie in the order of `array`'s."""
    if array.ndim and array.size and 0 in array.strides or not (
            array.flags["C_CONTIGUOUS"] or array.flags["F_CONTIGUOUS"]):
        order = np.argsort([-abs(s) for s in array.strides], kind="stable")
        shape = [array.shape[axis] for axis in order]
        base = np.empty(shape, array.dtype)
        strides = [0] * array.ndim
        for axis, stride in zip(order, base.strides, strict=True):
            strides[axis] = stride
        return array.shape, array.dtype, tuple(strides)
    return array.shape, array.dtype, tuple(array.strides)


def torch_array(tensor):
    """A NumPy view of a torch CPU tensor; bfloat16 becomes ml_dtypes.bfloat16."""
    if tensor.device.type != "cpu":
        raise TypeError(f"the simulator takes tensors on the CPU; this one is on {tensor.device}. "
                        f"Use tensor.cpu()")
    tensor = tensor.detach()
    if str(tensor.dtype) == "torch.bfloat16":
        torch = sys.modules["torch"]
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


_SCALARS = (int, float, complex, bool, np.generic)


def kernel_argument(value, position, kernel):
    """`value` as a kernel sees it; arrays share memory.

    Raises
    ------
    TypeError for what a GPU kernel cannot take: lists, dictionaries, strings and so on.
    """
    kind = type(value)
    if kind is np.ndarray and not value.dtype.hasobject:
        return records(value)
    if kind is DeviceArray:
        return kernel_argument(value._array, position, kernel)
    if value is None or isinstance(value, enum.Enum):
        return value
    if isinstance(value, np.void):
        # A record that gives its fields as attributes too, in the same memory.
        return value.view(np.dtype((np.record, value.dtype)))
    if isinstance(value, _SCALARS):
        return value
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"argument {position} of {kernel} is an array of Python objects "
                            f"(dtype {value.dtype}), which a kernel cannot take. Give it an array "
                            "of numbers, for example of dtype np.float32")
        return records(value) if value.dtype.names else value.view(np.ndarray)
    if isinstance(value, tuple):
        parts = [kernel_argument(part, position, kernel) for part in value]
        return kind(*parts) if hasattr(value, "_fields") else tuple(parts)
    if kind.__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return torch_array(value)
    if callable(value) or hasattr(value, "kernel_value"):
        return getattr(value, "kernel_value", value)
    raise TypeError(f"argument {position} of {kernel} is a {kind.__name__}, which a kernel cannot "
                    f"take. Give it a NumPy array, a device array, a number or a tuple of those")


def check_launchable(value):
    """Raise LaunchError if `value` is no device array."""
    if not isinstance(value, DeviceArray):
        raise errors.LaunchError(f"{type(value).__name__} is no device array")
