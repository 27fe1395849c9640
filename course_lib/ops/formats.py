"""Whether images are contiguous or channels-last, as PyTorch reads their strides."""

import torch

from course_lib.runtime.host.arrays import reads_channels_last


def memory_format(*images):
    """Channels-last if PyTorch takes any of these N·C·H·W tensors for that, else contiguous.

    PyTorch gives what it computes the format of its input, or that of the weights.
    """
    last = any(map(reads_channels_last, images))
    return torch.channels_last if last else torch.contiguous_format


def empty(shape, *images, dtype=None):
    """A new tensor, of the dtype and device of the first image and the format of all of them."""
    return torch.empty(
        shape, dtype=dtype or images[0].dtype, device=images[0].device,
        memory_format=memory_format(*images),
    )  # fmt: skip
