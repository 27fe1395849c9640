"""A layer's gradients side by side, where a CUDA graph is captured.

The gradient of a layer's input and those of its weights do not wait for each other. But launches of
a stream follow one another, also in a graph made of it; and kernels that are too small to fill the
GPU leave it idle while they do. So, while a stream is captured, weights have a stream of their own.
Both have joined again where the layer's backward pass ends: who asked for the gradients need not
know. Nothing is done so without a graph: two streams cost the host more than they would save.
"""

import torch

_streams = {}  # (device, stream) -> the stream beside it


def gradients(of, needs, like):
    """What ``of(needs)`` returns, gradients of the input and of its weights, where `captured`.

    of     a function of which of them are wanted, which launches what makes these
    needs  whether each is wanted, that of the input first
    like   a tensor on the device
    """
    if not (needs[0] and any(needs[1:])):
        return of(needs)
    current = torch.cuda.current_stream(like.device)
    place = current.device, current.stream_id
    beside = _streams.get(place)
    if beside is None:
        beside = _streams[place] = torch.cuda.Stream(like.device)
    beside.wait_stream(current)
    try:
        with torch.cuda.stream(beside):
            others = of((False, *needs[1:]))
        first = of((True, *(False for _ in needs[1:])))
    finally:
        current.wait_stream(beside)  # after an error, too: a graph must end on one stream
    return first[0], *others[1:]


def captured(like):
    """Whether launches of now for a tensor like this go into a graph."""
    return like.is_cuda and torch.cuda.is_current_stream_capturing()
