"""What whole networks are timed with on a GPU: waiting for it, its memory, its precision."""

import contextlib
import gc

import torch

from course_lib.runtime.host.launch import on_gpu


def synchronize():
    """Wait until the GPU has done all it was given."""
    torch.cuda.synchronize()


def collect():
    """Give back what nobody holds any longer."""
    gc.collect()
    torch.cuda.empty_cache()


def allocated():
    """Bytes of the GPU's memory that are held now."""
    return torch.cuda.memory_allocated()


def reset_peak():
    """Let `peak` begin anew."""
    torch.cuda.reset_peak_memory_stats()


def peak():
    """The most bytes that were held at a time since `reset_peak`."""
    return torch.cuda.max_memory_allocated()


#: How `peak_of` takes the peak of a captured step; records without it took that of a replay.
CAPTURED_PEAKS = "while captured"


def peak_of(step, *, captured):
    """Bytes held at the peak of a step that `step()` makes, once its kernels are there.

    What a captured step allocates lies in its graph's pool, and is counted only while the step is
    captured: by the second call, as `GraphTrainer` has it.
    """
    for _ in range(1 if captured else 4):  # cuDNN tries its algorithms, which takes memory
        step()
    synchronize()
    collect()
    reset_peak()
    step()
    synchronize()
    return peak()


def allow_tf32(allowed):
    """Whether PyTorch, and our layers, may use TF32 in convolutions and matrix products."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = allowed


@contextlib.contextmanager
def on_stream_of_captures():
    """In this block, work is put on the stream that `torch.cuda.graph` captures.

    Autograd runs a backward pass on the stream of its forward pass.
    """
    if not on_gpu():
        yield
        return
    if torch.cuda.graph.default_capture_stream is None:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            pass  # the first capture makes it
    stream, here = torch.cuda.graph.default_capture_stream, torch.cuda.current_stream()
    stream.wait_stream(here)
    with torch.cuda.stream(stream):
        yield
    here.wait_stream(stream)
