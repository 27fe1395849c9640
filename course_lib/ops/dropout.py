"""Dropout as an operator of PyTorch."""

import contextlib

import torch

from course_lib.kernels import dropout as kernels
from course_lib.ops.checks import require
from course_lib.ops.registration import Operator, require_floating_point

# What fixes the mask is drawn inside of the operator, when it runs, and goes to the backward pass
# as a tensor on the CPU: as in `fused_softmax`. A CUDA graph would keep these very numbers. While
# one is captured, a seed is drawn on the GPU instead, by PyTorch's generator, which every replay
# moves on; and `drawn` is that seed, of one element, where x is.

# How many blocks want that now. One number for all threads, because a backward pass that computes
# its forward pass again does so in a thread of autograd's.
_wanted = 0


@contextlib.contextmanager
def seeds_on_device():
    """Dropout in this block draws as in a captured CUDA graph: the same masks, captured or not."""
    global _wanted
    _wanted += 1
    try:
        yield
    finally:
        _wanted -= 1


def _draws_on_device(x):
    return _wanted > 0 or x.is_cuda and torch.cuda.is_current_stream_capturing()


def _seed_on(device):
    return torch.randint(-(2**63), 2**63 - 1, (1,), device=device)


def draw(x, n_elements):
    """(seed, offset) for a mask of so many elements, from PyTorch's generator of x's device.

    The generator moves on.
    """
    if not x.is_cuda:
        return int(torch.randint(-(2**63), 2**63 - 1, ())), 0
    generator = torch.cuda.default_generators[x.get_device()]
    seed, offset = generator.initial_seed(), generator.get_offset()
    generator.set_offset(offset + -(-n_elements // 8) * 8)  # counts by eight, as the kernels do
    return seed - (seed >> 63 << 64), offset  # a tensor holds signed numbers


def draw_outside_graphs(x, n_elements, name):
    """`draw`; RuntimeError that says why `name` can't, where a CUDA graph is being captured."""
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{name} can't be captured in a CUDA graph: each replay would drop the same elements. "
            "Leave it out of the graph, or use torch.nn.functional.dropout"
        )
    return draw(x, n_elements)


def _draw(x):
    return draw(x, x.numel())


def _check(x, p):
    require_probability(p)


def _check_backward(grad_output, drawn, p):
    require_probability(p)
    if drawn.numel() == 1:  # a seed that was drawn on the device
        require(drawn, "drawn", shape=(1,), dtypes=(torch.int64,))
        if drawn.device != grad_output.device:
            raise RuntimeError(f"drawn is on {drawn.device}, and not on {grad_output.device}")
    else:
        require_drawn(drawn)


def require_probability(p):
    if not 0 <= p <= 1:  # NaN is refused too
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")


def require_drawn(drawn):
    """RuntimeError unless `drawn` is a (seed, offset) as `_draw` gives it."""
    require(drawn, "drawn", shape=(2,), dtypes=(torch.int64,))
    if drawn.device.type not in ("cpu", "meta"):
        raise RuntimeError(f"drawn must be on the CPU, not on {drawn.device}")


def _kernel(x, p):
    require_floating_point("dropout", x.dtype)
    if _draws_on_device(x):
        seed = _seed_on(x.device)
        return kernels.forward(x, p, seed, 0), seed
    seed, offset = _draw(x)
    return kernels.forward(x, p, seed, offset), torch.tensor((seed, offset))


def _backward_kernel(grad_output, drawn, p):
    if drawn.numel() == 1:
        return kernels.backward(grad_output, p, drawn, 0)
    return kernels.backward(grad_output, p, *drawn.tolist())


def _by_torch(x, p):
    seed, offset = _draw(x)
    return _backward_by_torch(x, drawn := torch.tensor((seed, offset)), p), drawn


def _backward_by_torch(x, drawn, p):
    generator = torch.Generator().manual_seed(int(drawn[0]))
    y = torch.empty_like(x)
    kept = torch.empty(x.numel(), dtype=x.dtype).bernoulli_(1 - p, generator=generator)
    kept = (kept / (1 - p) if p < 1 else kept).to(x.device)
    # In the order of memory, as the kernels count.
    torch.mul(x, kept.as_strided(y.shape, y.stride()), out=y)
    return y


def _save(ctx, inputs, outputs):
    _, ctx.p = inputs
    y, drawn = outputs
    ctx.strides = y.stride()
    ctx.mark_non_differentiable(drawn)
    ctx.save_for_backward(drawn)


def _gradient(ctx, grad_output, _):
    (drawn,) = ctx.saved_tensors
    if grad_output.stride() != ctx.strides:  # elements are counted in the order of memory
        dy = grad_output.new_empty_strided(grad_output.shape, ctx.strides)
        grad_output = dy.copy_(grad_output)
    return _backward(grad_output, drawn, ctx.p), None


def _refuse_vmap(info, in_dims, *inputs):
    # One by one, which is what vmap would resort to, it would pass over vmap's own `randomness`.
    raise RuntimeError(
        "course_lib.dropout can't be mapped by torch.vmap: give it the whole batch, or use "
        "torch.nn.functional.dropout"
    )


_backward = Operator(
    "dropout_backward",
    "(Tensor grad_output, Tensor drawn, float p) -> Tensor",
    kernel=_backward_kernel,
    on_cpu=_backward_by_torch,
    fake=lambda grad_output, drawn, p: torch.empty_like(grad_output),
    check=_check_backward,
    on_host=("drawn",),
    title="DropoutBackward",
)
_dropout = Operator(
    "dropout",
    "(Tensor x, float p) -> (Tensor, Tensor)",
    kernel=_kernel,
    on_cpu=_by_torch,
    fake=lambda x, p: (torch.empty_like(x), torch.empty(2, dtype=torch.int64, device="cpu")),
    check=_check,
    save=_save,
    gradient=_gradient,
    title="Dropout",
    vmap=_refuse_vmap,
    tags=(torch.Tag.nondeterministic_seeded,),
)


def dropout(input, p=0.5, training=True, inplace=False):
    """Dropout, as `torch.nn.functional.dropout`: 0 with probability `p`, or else times 1/(1 − p).

    input  float32, float16 or bfloat16, any shape and memory format

    The mask is fixed by the state of PyTorch's generator of input's device, so `torch.manual_seed`
    and `torch.utils.checkpoint` hold it fast; it is another one than PyTorch would draw, and `p` is
    rounded to a multiple of 2⁻¹⁶. No mask is stored. In a captured CUDA graph every replay draws
    anew: one small launch more. Raises ValueError for a `p` out of range, and RuntimeError for
    second gradients.
    """
    require_probability(p)
    if not training or p == 0:
        return input
    if inplace:
        return input.copy_(_dropout(input.clone(), float(p))[0])
    return _dropout(input, float(p))[0]
