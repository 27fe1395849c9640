"""Counters in the GPU's memory that every launch finds at zero, and leaves at zero.

Blocks that agree among themselves who does what count in memory that must be zero when they start.
To fill it before each launch would take a launch of its own. So kernels set back what they counted,
and `counters` hands the same memory to one launch after the other:

- to launches on one stream, which run one after another, the same each time;
- to each launch that a CUDA graph captures, memory of its own: graphs may run beside anything.

While a graph is being captured, no memory can be set to zero for good. So launches that are not
captured see to it that there is some left for those that will be.
"""

import sys

import numpy as np

from course_lib.runtime.host import arrays, device
from course_lib.runtime.host import launch as launching

PAGE = 1 << 18  # counters that are set to zero together
SPARE = 1 << 16  # that are left for launches of a graph
ALIGNMENT = 32  # counters in 128 bytes, a line of the L2 cache

_of_streams = {}  # (device, stream) -> counters
_pages = {}  # device -> pages: [counters, how many of them have been given away] each; all are kept


def counters(n, like):
    """`n` int32 zeros on the device of `like`, an array; for one launch, which must restore them.

    Not for launches that run at the same time on one stream (there are none, but for kernels that
    start early and read their counters before `wait_for_previous_kernel`).
    """
    if not arrays.is_tensor(like) or not like.is_cuda:
        return _zeros(n, like)
    torch, index = sys.modules["torch"], like.get_device()
    if torch.cuda.is_current_stream_capturing():
        return _given(n, like, capturing=True)
    key = index, launching._stream_of(index)
    found = _of_streams.get(key)
    if found is None or found.numel() < n:
        found = _of_streams[key] = _given(n, like)
    page, given = _pages[index][-1]
    if page.numel() - given < SPARE:
        _add_page(SPARE, like)
    return found


def _zeros(n, like):
    if arrays.is_tensor(like):
        return like.new_zeros(n, dtype=sys.modules["torch"].int32)
    if isinstance(like, np.ndarray):
        return np.zeros(n, np.int32)
    return device.numba_cuda().to_device(np.zeros(n, np.int32))


def _given(n, like, capturing=False):
    """`n` counters or more that nobody has had, from the newest page or one more."""
    rounded = -(-n // ALIGNMENT) * ALIGNMENT
    pages = _pages.setdefault(like.get_device(), [])
    if not pages or pages[-1][1] + rounded > pages[-1][0].numel():
        if capturing:  # no page can be made now: the graph itself will fill these, each time
            return _zeros(rounded, like)
        _add_page(rounded, like)
    page = pages[-1]
    first, page[1] = page[1], page[1] + rounded
    return page[0][first : page[1]]


def _add_page(n, like):
    """A page of twice `n` counters or more."""
    _pages[like.get_device()].append([_zeros(max(PAGE, 2 * n), like), 0])
    sys.modules["torch"].cuda.synchronize(like.get_device())  # other streams may use them
