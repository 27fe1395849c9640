"""One view of every kind of array a launcher takes: PyTorch, CuPy, numba and NumPy.

What goes in comes out: `empty_like` makes an array of the same library on the same device.
"""

import math
import numbers
import sys
from dataclasses import dataclass

import numpy as np

from course_lib.runtime.host import device


class ArrayError(TypeError):
    """An array is of a kind, dtype, shape or device the launcher can't take."""


@dataclass(frozen=True)
class Description:
    """What a kernel needs to know of an array. Strides are in bytes; `dtype` is a name."""

    dtype: str
    pointer: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    read_only: bool
    device: int


def is_tensor(array):
    """Whether `array` is a PyTorch tensor; doesn't import PyTorch to find out."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(array, torch.Tensor)


def dtype_name(array):
    """The dtype of `array` as NumPy spells it: "float32", "bfloat16", "int64"."""
    return str(array.dtype).removeprefix("torch.")


def describe(array, name="array"):
    """The `Description` of a GPU array. ArrayError says what to do with a CPU one."""
    if is_tensor(array):
        if array.device.type != "cuda":
            _require_gpu()
            raise ArrayError(
                f"{name} is a PyTorch tensor on {array.device}, but the kernel runs on the GPU: "
                f'pass {name}.to("cuda")'
            )
        size = array.element_size()
        return Description(
            dtype=dtype_name(array),
            pointer=array.data_ptr(),
            shape=tuple(array.shape),
            strides=tuple(s * size for s in array.stride()),
            read_only=False,
            device=array.get_device(),
        )
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is None:
        _require_gpu()
        hint = "pass cuda.to_device(array)" if isinstance(array, np.ndarray) else "pass an array"
        raise ArrayError(
            f"{name} is a {type(array).__module__}.{type(array).__name__}, which is not in the "
            f"GPU's memory: {hint}"
        )
    dtype = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    pointer, read_only = interface["data"]
    return Description(
        dtype=dtype.name,
        pointer=pointer or 0,
        shape=shape,
        strides=tuple(strides) if strides else _row_major(shape, dtype.itemsize),
        read_only=read_only,
        device=_device_of(array),
    )


def _require_gpu():
    """Before somebody is told to move an array to a GPU: is there one?"""
    if device.count() == 0:
        raise ArrayError(device.why_no_gpu())


def _row_major(shape, itemsize):
    strides = [itemsize] * len(shape)
    for axis in range(len(shape) - 2, -1, -1):
        strides[axis] = strides[axis + 1] * shape[axis + 1]
    return tuple(strides)


def _device_of(array):
    found = getattr(array, "device", None)  # CuPy
    return getattr(found, "id", 0)


def is_contiguous(shape, strides, itemsize):
    """Whether the elements lie in memory one after another, last axis fastest."""
    expected = itemsize
    for extent, stride in zip(reversed(shape), reversed(strides), strict=True):
        if extent == 0:
            return True
        if extent != 1 and stride != expected:
            return False
        expected *= extent
    return True


def empty_like(array):
    """An array like `array` (library, device, shape, dtype, memory format), not initialised."""
    if is_tensor(array):
        return sys.modules["torch"].empty_like(array, requires_grad=False)
    if isinstance(array, np.ndarray):
        return np.empty_like(array, subok=False)
    if hasattr(array, "copy_to_host"):
        return device.numba_cuda().device_array_like(array)
    return sys.modules[type(array).__module__.partition(".")[0]].empty_like(array)


def empty(shape, *, like, dtype=None, channels_last=False):
    """An array of `shape`, of the library and device of `like`, not initialised.

    dtype          a name such as "float32"; that of `like` by default
    channels_last  lay out an N·C·H·W shape as N·H·W·C in memory. A tensor is then made so, as
                   PyTorch makes it: no view, which autograd wouldn't let anyone write to
    """
    if is_tensor(like):
        torch = sys.modules["torch"]
        dtype = getattr(torch, dtype) if dtype else like.dtype
        if not channels_last:
            return like.new_empty(shape, dtype=dtype)
        return torch.empty(
            shape, dtype=dtype, device=like.device, memory_format=torch.channels_last
        )
    if channels_last:
        N, C, H, W = shape
        return empty((N, H, W, C), like=like, dtype=dtype).transpose((0, 3, 1, 2))
    if isinstance(like, np.ndarray):
        return np.empty(shape, dtype or like.dtype)
    if hasattr(like, "copy_to_host"):
        return device.numba_cuda().device_array(shape, dtype or like.dtype)
    return sys.modules[type(like).__module__.partition(".")[0]].empty(shape, dtype or like.dtype)


def strides_of(array):
    """Strides of `array` in elements."""
    if is_tensor(array):
        return tuple(array.stride())
    return tuple(stride // array.dtype.itemsize for stride in array.strides)


def is_dense(array):
    """Whether the elements fill one stretch of memory without gaps or overlaps, in any order.

    True for contiguous arrays and for transposed or channels-last ones.
    """
    expected = 1
    shape = tuple(array.shape)
    if 0 in shape:
        return True
    for stride, extent in sorted(zip(strides_of(array), shape, strict=True)):
        if extent == 1:
            continue
        if stride != expected:
            return False
        expected *= extent
    return True


def is_contiguous_array(array):
    """Whether the last axis of `array` lies fastest in memory, without gaps."""
    if is_tensor(array):
        return array.is_contiguous()
    return is_contiguous(tuple(array.shape), strides_of(array), 1)


def is_channels_last(array):
    """Whether an N·C·H·W array lies in memory as N·H·W·C."""
    N, C, H, W = array.shape
    n, c, h, w = strides_of(array)
    return is_contiguous((N, H, W, C), (n, h, w, c), 1)


def reads_channels_last(array):
    """Whether PyTorch takes an N·C·H·W array for channels-last, by its strides.

    A slice of a channels-last array is channels-last, too. An array of one channel, or of 1 × 1
    pixels, may be contiguous and channels-last at once; then the strides say which is meant, as
    in c10's `is_channels_last_strides_2d`.
    """
    N, C, H, W = array.shape
    n, c, h, w = strides_of(array)
    if c == 0 or 0 in (N, C, H, W):
        return False
    return c * C <= w and w * W <= h and h * H <= n and h * H != c


def contiguous(array):
    """`array` itself if it is contiguous, else a copy that is."""
    if is_contiguous_array(array):
        return array
    if is_tensor(array):
        return array.contiguous()
    return np.ascontiguousarray(array) if isinstance(array, np.ndarray) else array.copy()


def as_images(x):
    """(images as kernels take them, whether they are channels-last): `x`, or a dense copy."""
    if not reads_channels_last(x):
        return contiguous(x), False
    if is_channels_last(x):
        return x, True
    return laid_out_like(x, empty(tuple(x.shape), like=x, channels_last=True)), True


def same_layout(a, b):
    """Whether `a` and `b` store element (i, j, …) at the same place of their memory."""
    shape = tuple(a.shape)
    if shape != tuple(b.shape):
        return False
    if is_tensor(a) and is_tensor(b) and a.is_contiguous() and b.is_contiguous():
        return True
    pairs = zip(shape, strides_of(a), strides_of(b), strict=True)
    return 0 in shape or all(extent == 1 or sa == sb for extent, sa, sb in pairs)


def require(array, name, *, shape=None, dtypes=None, n_dims=None, writable=False):
    """Check one argument of a launcher; ArrayError names what was expected and what came."""
    if not hasattr(array, "dtype") or not hasattr(array, "shape"):
        raise ArrayError(f"{name} must be an array, not a {type(array).__name__}")
    if dtypes is not None and dtype_name(array) not in dtypes:
        raise ArrayError(f"{name} must be {' or '.join(dtypes)}, not {dtype_name(array)}")
    if n_dims is not None and len(array.shape) != n_dims:
        raise ArrayError(f"{name} must have {n_dims} dimensions, not shape {tuple(array.shape)}")
    if shape is not None and tuple(array.shape) != tuple(shape):
        raise ArrayError(f"{name} must have shape {tuple(shape)}, not {tuple(array.shape)}")
    if writable and isinstance(array, np.ndarray) and not array.flags.writeable:
        raise ArrayError(f"{name} is read-only, but the kernel writes to it: pass a copy")


def size_of(array):
    """Number of elements."""
    return array.numel() if is_tensor(array) else math.prod(array.shape)


def address_of(array):
    """Address of the first element in its device's memory (0 where there is none)."""
    if is_tensor(array):
        return array.data_ptr()
    if isinstance(array, np.ndarray):
        return array.__array_interface__["data"][0]
    interface = getattr(array, "__cuda_array_interface__", None)
    return interface["data"][0] or 0 if interface else 0


def begins_on(n_bytes, array, length):
    """Whether each row of `length` elements begins on a boundary of `n_bytes`."""
    return not (address_of(array) | length * array.dtype.itemsize) % n_bytes


def dense(array):
    """`array` itself if its elements fill one stretch of memory, else a copy that does.

    The copy is made because the elementwise kernels walk memory in one dimension. Its axes keep
    their order in memory, as those of `empty_like` do.
    """
    if is_dense(array):
        return array
    return laid_out_like(array, empty_like(array))


def laid_out_like(array, model):
    """`array` itself if it lies in memory as `model` does, else a copy that does."""
    if same_layout(array, model):
        return array
    return fill(empty_like(model), array)


def fill(array, values):
    """`array`, with `values` of its shape copied to it, or with one number everywhere."""
    if hasattr(array, "copy_"):
        # To PyTorch a number that is copied is an array on the host, for which a GPU would wait.
        return array.fill_(values) if isinstance(values, numbers.Number) else array.copy_(values)
    array[...] = values
    return array


def with_axis_last(array, axis):
    """A view of `array`, with this axis behind the others."""
    axes = list(range(len(array.shape)))
    axes.append(axes.pop(axis))
    return array.permute(axes) if is_tensor(array) else array.transpose(axes)
