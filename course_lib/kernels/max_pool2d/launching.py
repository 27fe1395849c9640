"""Launching the rungs that move one element at a time, and the ReLU of what they make.

`images` are x, y and the indices, or dy, the indices and dx.
"""

import functools
import math

from course_lib.kernels.max_pool2d import ladder, plan
from course_lib.kernels.max_pool2d.fixed import NOWHERE
from course_lib.runtime.host import arrays
from course_lib.runtime.host.launch import launch

BLOCK_SIZE = 256


def element_a_thread(result, inner):
    """Blocks, and threads of a block, where a thread makes an element of `result`."""
    return math.ceil(arrays.size_of(result) / BLOCK_SIZE), BLOCK_SIZE


def row_a_block(result, inner):
    """The same where a block makes a row, of `inner` channels that lie side by side."""
    N, C, height, width = result.shape
    return N * C // inner * height, min(BLOCK_SIZE, 32 * math.ceil(width * inner / 32))


def _launch_forward(kernel, blocks_of, images, window, channels_last, relu):
    x, y, indices = images
    inner = x.shape[1] if channels_last else 1
    n_blocks, block = blocks_of(y, inner)
    launch(kernel, n_blocks, block, *images, inner, in_plane(indices), *window, flat=True)
    apply_relu(y, indices, relu)


def _launch_backward(kernel, blocks_of, images, window, channels_last):
    _, indices, dx = images
    inner = dx.shape[1] if channels_last else 1
    n_blocks, block = blocks_of(dx, inner)
    launch(kernel, n_blocks, block, *images, inner, in_plane(indices), *window, flat=True)


launch_naive = functools.partial(_launch_forward, ladder.naive_kernel, element_a_thread)
launch_rows = functools.partial(_launch_forward, ladder.rows_kernel, row_a_block)
launch_naive_backward = functools.partial(
    _launch_backward, ladder.naive_backward_kernel, element_a_thread
)
launch_rows_backward = functools.partial(_launch_backward, ladder.rows_backward_kernel, row_a_block)


def apply_relu(y, indices, relu):
    """ReLU of what kernels of any window have made, if it is asked for."""
    if relu:
        n, nowhere = arrays.size_of(y), -1 if in_plane(indices) else NOWHERE
        n_blocks = plan.ceil_div(n, plan.RELU_THREADS)
        launch(ladder.relu_kernel, n_blocks, plan.RELU_THREADS, y, indices, nowhere, flat=True)


def in_plane(indices):
    """Whether indices count the places of a plane, not of a window."""
    return arrays.dtype_name(indices) != "uint8"
