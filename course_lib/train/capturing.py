"""Capturing CUDA graphs, and branches in them: launches that the next ones need not wait for.

The launches of a stream follow one another, also in a graph. Kernels too small to fill the GPU run
side by side if the graph says that they do not depend on each other.
"""

import contextlib
import gc

import torch


@contextlib.contextmanager
def capture(graph, **options):
    """As `torch.cuda.graph`, but no garbage is collected meanwhile.

    A graph that nobody holds any more may be found just then, and its end would end the capture.
    What would wait for the GPU, in any thread, raises before it does: a capture that is spoilt
    leaves PyTorch's generator and allocator unusable. The current stream is the same afterwards,
    also where capturing failed.
    """
    enabled, stream = gc.isenabled(), torch.cuda.current_stream()
    gc.disable()
    try:
        with torch.cuda.graph(graph, **options), _nobody_waits():
            yield
    finally:
        torch.cuda.set_stream(stream)
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _nobody_waits():
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class Branch:
    """``with branch(tensor): launches`` while a graph is captured; at the end, ``branch.join()``.

    The launches follow all that the captured stream has launched so far, and the branch's own. What
    that stream launches next does not wait for them before `join`. Until then the memory of
    `tensor` is not used anew, whoever else lets go of it.
    """

    def __init__(self):
        self.stream, self.held = torch.cuda.Stream(), []

    @contextlib.contextmanager
    def __call__(self, tensor):
        self.held.append(tensor)
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            yield

    def join(self):
        """Let what the captured stream launches next follow the branch."""
        torch.cuda.current_stream().wait_stream(self.stream)
        self.held.clear()
