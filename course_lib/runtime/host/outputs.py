"""Where a launcher writes: a new array, or the caller's `out`, once it is found fit for it."""

from course_lib.runtime.host import arrays
from course_lib.runtime.host.arrays import ArrayError


def output(out, shape, *, like, reads, dtypes=None, channels_last=False):
    """A new array of `shape`, of the kind of `like`; or `out`, checked.

    reads          {name: array or None} that the kernels read, as they read them. They may read
                   what others have written by then, so `out` must not lie in the same memory
    dtypes         names of those that `out` may have; that of `like` by default
    channels_last  whether N·C·H·W lies as N·H·W·C; else contiguous
    """
    if out is None:
        return arrays.empty(tuple(shape), like=like, channels_last=channels_last)
    dtypes = dtypes or (arrays.dtype_name(like),)
    arrays.require(out, "out", shape=shape, dtypes=dtypes, writable=True)
    if not (arrays.is_channels_last(out) if channels_last else arrays.is_contiguous_array(out)):
        wanted = "channels-last" if channels_last else "contiguous"
        raise ArrayError(f"out must be {wanted}; its strides are {arrays.strides_of(out)}")
    require_apart(out, reads)
    return out


def require_apart(out, reads):
    """ArrayError where `out` lies in memory of what is read, or its own elements in one place."""
    if not _each_apart(out):
        raise ArrayError(
            f"out has more elements than places in memory: shape {tuple(out.shape)} with strides "
            f"{arrays.strides_of(out)}"
        )
    for name, array in reads.items():
        if array is not None and share_memory(out, array):
            raise ArrayError(
                f"out and {name} share memory, and the kernel reads {name} while it writes out: "
                "pass an array of its own"
            )


def _each_apart(array):
    shape = tuple(array.shape)
    pairs = zip(map(abs, arrays.strides_of(array)), shape, strict=True)
    reach = 0  # from the first element so far to the last
    for stride, extent in sorted(pair for pair in pairs if pair[1] != 1):
        if stride <= reach:
            return 0 in shape
        reach += (extent - 1) * stride
    return True


def elementwise_output(out, model, reads):
    """The same where thread i reads element i alone, and then writes it: `out` lies as `model`.

    So `out` may be one of `reads` itself; it may not overlap one otherwise.
    """
    if out is None:
        return arrays.empty_like(model)
    dtype = arrays.dtype_name(model)
    arrays.require(out, "out", shape=model.shape, dtypes=(dtype,), writable=True)
    if not arrays.same_layout(out, model):
        raise ArrayError(
            f"out has strides {arrays.strides_of(out)}, but x has {arrays.strides_of(model)}"
        )
    for name, array in reads.items():
        if arrays.address_of(out) != arrays.address_of(array) and share_memory(out, array):
            raise ArrayError(
                f"out and {name} share part of their memory: some elements would be written before "
                f"they are read. Pass {name} itself, or an array of its own"
            )
    return out


def share_memory(a, b):
    """Whether the stretches of memory from first to last element have bytes in common."""
    (start, end), (other_start, other_end) = _stretch(a), _stretch(b)
    return start < other_end and other_start < end


def _stretch(array):
    """(address of the first byte, address behind the last)."""
    shape, strides = tuple(array.shape), arrays.strides_of(array)
    address = arrays.address_of(array)
    if 0 in shape or not address:  # nothing, or a tensor without memory: the launch refuses it
        return address, address
    steps = [(extent - 1) * stride for extent, stride in zip(shape, strides, strict=True)]
    itemsize = array.dtype.itemsize
    before, after = sum(min(0, step) for step in steps), sum(max(0, step) for step in steps)
    return address + before * itemsize, address + (after + 1) * itemsize
