"""How two pathways of a network run beside each other, and how little of them is kept.

Nothing here has parameters, and nothing changes a result: streams and recomputation are about time
and memory alone.
"""

import contextlib
import functools

import torch
from torch.compiler import is_compiling
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def both(first, second, x, y, parallel=True):
    """(first(x), second(y)) for two modules that know nothing of each other.

    parallel  run them at the same time where x is on a GPU: the second has a stream of its own,
              which starts after all that the caller's stream has been given, and which that stream
              waits for at the end. So a CUDA graph that captures the one captures both; autograd
              runs each backward pass where its forward pass ran. On a CPU, and where torch.compile
              or torch.fx traces, one runs after the other, as without it. If y is on another GPU,
              the two run at the same time anyway: kernels of each GPU go to its own stream.
    """
    on_gpu = parallel and type(x) is torch.Tensor and x.is_cuda and y.device == x.device
    if not on_gpu or is_compiling():
        return first(x), second(y)
    here, beside = torch.cuda.current_stream(x.device), _stream(x.device.index)
    beside.wait_stream(here)
    y.record_stream(beside)  # its memory is not another's before `beside` has read it
    try:
        with torch.cuda.stream(beside):
            there = second(y)
        result = first(x)
    finally:
        here.wait_stream(beside)  # after an error, too: a captured graph must end on one stream
    there.record_stream(here)
    return result, there


@functools.cache
def _stream(index):
    return torch.cuda.Stream(index)


def recomputed(module, *inputs):
    """module(*inputs). Of what it computes inside, the backward pass gets nothing: it computes it
    again from the inputs, by `torch.utils.checkpoint`.

    The module must draw no random numbers. Its batch norms move their running statistics once, in
    the forward pass. Raises RuntimeError where autograd's hooks are disabled, as torch.func does.
    """
    # torch.compile can't trace the question.
    if not is_compiling() and not torch._C._autograd._saved_tensors_hooks_is_enabled():
        raise RuntimeError(
            "torch.func (grad, vjp, jacrev ...) can't go through what is computed again: set "
            "memory_efficient = False, or use backward or torch.autograd.grad"
        )
    options = dict(use_reentrant=False, preserve_rng_state=False)
    if not is_compiling():  # which knows what a batch norm writes, and does not write it again
        options["context_fn"] = functools.partial(_contexts, module)
    return checkpoint(module, *inputs, **options)


def _contexts(module):
    return contextlib.nullcontext(), _StatisticsAtRest(module)


class _StatisticsAtRest:
    """Batch norms go on normalising by the batch, and move their statistics by nothing at all.

    It is entered once for each backward pass, so more than once where a graph is retained.
    """

    def __init__(self, module):
        self._norms = _norms_of(module)

    def __enter__(self):
        for norm in self._norms:
            _rest(norm)

    def __exit__(self, *_):
        for norm in self._norms:
            _go_on(norm)


def rest_in_backward_passes(model):
    """Let batch norms move their statistics in forward passes alone, whoever computes them again.

    For networks that call `torch.utils.checkpoint` themselves.
    """
    for norm in _norms_of(model):
        norm.register_forward_pre_hook(_before_norm)
        norm.register_forward_hook(_after_norm, always_call=True)


def _before_norm(norm, inputs):
    if is_compiling():
        return
    _go_on(norm)  # what an interrupted pass has left
    if torch._C._current_graph_task_id() != -1:  # within a backward pass
        _rest(norm)


def _after_norm(norm, inputs, y):
    if not is_compiling():
        _go_on(norm)


def _norms_of(module):
    return [layer for layer in module.modules() if isinstance(layer, _BatchNorm)]


def _rest(norm):
    norm._moves_by = norm.momentum, norm.num_batches_tracked
    norm.momentum, norm.num_batches_tracked = 0.0, None


def _go_on(norm):
    if "_moves_by" in vars(norm):
        norm.momentum, norm.num_batches_tracked = norm._moves_by
        del norm._moves_by
