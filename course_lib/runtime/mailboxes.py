"""Where mailboxes come from: `mailbox(like, n_words)`, for kernels that use `runtime.mailbox`.

A mailbox outlives its launch, because what counts the launches lies in its first words; it must
begin as zeros. Launches that may run at the same time must never share one. So there is one for
each stream of each GPU, kept for good, which grows when a launch needs more.

While a CUDA graph is being captured nothing of this would do: the graph may be replayed on any
stream, and beside others. A graph gets a mailbox of its own for each stream that is captured, from
its own memory, and begins every replay by clearing it.

In the simulator, and for arrays of NumPy, each launch gets a new one.
"""

import ctypes
import sys

import numpy as np

from course_lib.runtime import arrays, device
from course_lib.runtime import launch as launching

LEAST_WORDS = 1 << 16
_kept = {}  # (GPU, stream) -> (capture or 0, mailbox, its words, its address)
_status, _number = ctypes.c_int(), ctypes.c_uint64()


def mailbox(like, n_words):
    """An int64 array of at least `n_words`, for a launch on the device and stream of `like`."""
    if not launching.on_gpu():
        return np.zeros(n_words, np.int64)
    index = _gpu_of(like)
    return _found(index, launching._stream_of(index), n_words)[1]


def address(index, stream, n_words):
    """The address of the mailbox that a launch on this GPU and stream is to use now."""
    return _found(index, stream, n_words)[3]


def is_mailbox(array):
    """Whether `array` comes from here and is in use."""
    return any(array is found[1] for found in _kept.values())


def _gpu_of(array):
    return arrays.describe(array).device


def _found(index, stream, n_words):
    found, capture = _kept.get((index, stream)), capture_of(stream)
    if found is None or found[0] != capture or found[2] < n_words:
        # An outgrown one goes back to the stream that used it, so that nobody gets it too early.
        box = _zeros(max(n_words, LEAST_WORDS), index)
        found = capture, box, box.shape[0], arrays.address_of(box)
        _kept[index, stream] = found
    return found


def capture_of(stream):
    """The number of the capture that `stream` takes part in; 0 if it takes part in none."""
    error = device.driver().cuStreamGetCaptureInfo_v2(
        ctypes.c_void_p(stream), _status_address, _number_address, None, None, None
    )
    # Of the legacy default stream the driver will not tell while another stream is captured.
    return _number.value if error == 0 and _status.value == _ACTIVE else 0


_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE
_status_address, _number_address = ctypes.byref(_status), ctypes.byref(_number)


def _zeros(n_words, index):
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return torch.zeros(n_words, dtype=torch.int64, device=f"cuda:{index}")
    from course_lib import cuda

    with cuda.gpus[index]:
        return cuda.to_device(np.zeros(n_words, np.int64))
