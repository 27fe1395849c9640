"""Attention on a GPU: ours beside each backend of PyTorch's `scaled_dot_product_attention`.

Forward and backward, causal and not, in bfloat16 with 16,384 tokens in all and up to as many
(forward 65,536) in a sequence, and one size in float32. Backends are forced, and those that refuse
are named in the record; FlexAttention is compiled, and forward a kernel in Triton takes part. The
backward pass of each is the one that PyTorch's autograd runs, flash a second time as
`torch.use_deterministic_algorithms` has it; ours is deterministic, and a second time adds dq up by
atomics. Two heads of each result are checked against float64 before anything is timed. Arithmetic
is the limit, so rows say TFLOP/s, and the record what the chip could do at most; beside them, what
each allocates at its peak beyond its operands.
"""

import contextlib
import functools
import importlib.util
import math

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from course_lib.benchmarks import gpu, peaks
from course_lib.benchmarks.case import (
    COMPILED,
    Case,
    Work,
    compiled,
    distance,
    judge,
    rotating,
    runner,
    size,
)
from course_lib.kernels import attention as kernels
from course_lib.kernels.operation import AUTO
from course_lib.runtime.host.launch import on_gpu

TOKENS, WIDTH = 16384, 2048  # of all sequences, of all heads
#: (B, H, T, D): sequences, heads, the tokens of each sequence, the elements of a head.
SHAPES = [
    *((TOKENS // T, WIDTH // D, T, D) for D in (64, 128) for T in (512, 2048, 16384)),
    (1, 8, 65536, 64),
]  # fmt: skip
IN_FLOAT32 = [(8, 12, 512, 64)]
#: Measured with every rung and way; the others with the default alone.
LADDER = [(8, 32, 2048, 64), *IN_FLOAT32]
#: Measured beside FlexAttention, which takes long to compile.
FLEX = [(8, 32, 2048, 64), (8, 16, 2048, 128)]
DTYPES = ("bfloat16", "float32")
DIRECTIONS = ("forward", "backward")
N_DIMS = 4
COMMAND = "python -m course_lib bench attention --record"
IN_TRITON = 16, 32, 64, 128  # elements of a head that its kernel takes
LONGEST_CALL = 100_000  # µs; a slower rung is left out, and the record says so
MOST_COMPOSED = 1 << 30  # scores; beyond it what stores them all is no candidate
BACKENDS = {
    "SDPA flash": SDPBackend.FLASH_ATTENTION, "SDPA cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA efficient": SDPBackend.EFFICIENT_ATTENTION, "SDPA math": SDPBackend.MATH,
}  # fmt: skip
OURS, DETERMINISTIC = "ours", "SDPA flash, deterministic"
ATOMIC = "tensor_core/atomic"
#: Errors allowed before anything is timed: ‖found − true‖ ÷ ‖true‖, float64 being true.
TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-2, "float16": 2e-3}


def cases(*, shapes=None, dtypes=None):
    """Both directions, causal and not; of `shapes`, (B, H, T, D), alone if given."""
    for dtype in dtypes or DTYPES:
        fixed = IN_FLOAT32 if dtype == "float32" else SHAPES
        for shape in map(tuple, fixed if shapes is None else shapes):
            for direction in DIRECTIONS if shape[2] <= TOKENS else DIRECTIONS[:1]:
                for causal in (False, True):
                    yield _case(shape, dtype, direction, causal)


def draw(generator):
    """A shape that nobody chose."""
    T = size(generator, 17, 4096)
    return size(generator, 1, 8), size(generator, 1, 16), T, size(generator, 16, 256, 8)


def _case(shape, dtype, direction, causal):
    B, H, T, D = shape
    n_arrays, n_products = (4, 2) if direction == "forward" else (8, 5)
    pairs = T * (T + 1) // 2 if causal else T * T
    build = functools.partial(_build, shape, dtype, direction, causal)
    return Case(
        f"attention.{direction}" + ".causal" * causal, shape, dtype, COMMAND,
        n_arrays * math.prod(shape) * getattr(torch, dtype).itemsize, build, default=OURS,
        flops=2 * n_products * B * H * pairs * D, longest=LONGEST_CALL, facts={"causal": causal},
    )  # fmt: skip


class Buffers:
    """One set of q, k, v and do, what ours saves for its backward pass, and the graphs of peers."""

    def __init__(self, make, shape, dtype, causal, direction):
        self.q, self.k, self.v, self.do = (make.normal(*shape, dtype=dtype) for _ in range(4))
        self.causal, self.graphs = causal, {}
        if direction == "backward" and not make.is_empty:
            self.saved = kernels.forward(self.q, self.k, self.v, causal=causal)
        elif direction == "backward":
            self.saved = torch.empty_like(self.q), make.empty(*shape[:3])

    def ours(self, direction, variant):
        """[o], or [dq, dk, dv], by a rung of ours."""
        options = dict(causal=self.causal, variant=variant)
        if direction == "forward":
            return [kernels.forward(self.q, self.k, self.v, **options)[0]]
        return [*kernels.backward(self.do, self.q, self.k, self.v, *self.saved, **options)]

    def theirs(self, direction, label, function):
        """The same by a function of q, k and v; its graph is kept, so that backward runs alone."""
        if direction == "forward":
            return [function(self.q, self.k, self.v)]
        if label not in self.graphs:
            # Autograd runs a backward pass on the stream of its forward pass: the one of captures.
            with torch.enable_grad(), gpu.on_stream_of_captures():
                leaves = [x.detach().requires_grad_() for x in (self.q, self.k, self.v)]
                self.graphs[label] = function(*leaves), leaves
        o, leaves = self.graphs[label]
        with _deterministic() if label == DETERMINISTIC else contextlib.nullcontext():
            return [*torch.autograd.grad(o, leaves, self.do, retain_graph=True)]

    def truth(self, direction, head):
        """The same of one (sequence, head) in float64."""
        q, k, v, do = (x[head].double() for x in (self.q, self.k, self.v, self.do))
        weights = q @ k.T * len(q[0]) ** -0.5
        if self.causal:
            weights.masked_fill_(_later(len(q), q.device), -math.inf)
        weights = weights.softmax(-1)
        o = weights @ v
        if direction == "forward":
            return [o]
        dv = weights.T @ do
        dscores = (do @ v.T).sub_((do * o).sum(-1, keepdim=True)).mul_(weights)
        dscores *= len(q[0]) ** -0.5
        return [dscores @ k, dscores.T @ q, dv]


@contextlib.contextmanager
def _deterministic():
    """PyTorch's algorithms are deterministic; new memory is not filled, which would take time."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True
        torch.use_deterministic_algorithms(False)


def _later(T, device):
    return torch.ones(T, T, dtype=torch.bool, device=device).triu_(1)


def _build(shape, dtype, direction, causal, make, n_sets):
    sets = [Buffers(make, shape, dtype, causal, direction) for _ in range(n_sets)]
    ladder = kernels.FORWARD if direction == "forward" else kernels.BACKWARD
    variants = {OURS: AUTO}
    if shape in LADDER:
        refusing = ("mma", "warpgroup", "atomic") if dtype == "float32" else ("split",)
        variants |= {v: v for v in ladder.variants if v.partition("/")[2] not in refusing}
    if direction == "backward" and shape[-1] <= 128 and dtype != "float32":
        variants[ATOMIC] = ATOMIC
    ours = {
        label: rotating(lambda one, variant=variant: one.ours(direction, variant), sets)
        for label, variant in variants.items()
    }
    refusals, candidates = {}, {}

    def peers():
        for label, function in _functions(shape, dtype, causal, direction).items():
            call = rotating(
                lambda one, label=label, function=function: one.theirs(direction, label, function),
                sets,
            )
            try:
                call(0)
            except RuntimeError as refusal:
                refusals[label] = str(refusal).partition("\n")[0]
            else:
                candidates[label] = call
        return candidates

    def right():
        heads = {(0, 0), (shape[0] - 1, shape[1] - 1)}
        expected = {head: sets[0].truth(direction, head) for head in heads}
        return lambda label, found, _: max(
            judge(label, distance(one[head], true), TOLERANCE[dtype])
            for head in heads for one, true in zip(found, expected[head], strict=True)
        )  # fmt: skip

    return Work(
        ours, peers, right,
        facts=lambda: {
            "peaks_tflops": peaks.peaks(), "refused": refusals,
            "peak_bytes": {label: _peak(call) for label, call in (ours | candidates).items()},
        },
    )  # fmt: skip


def _functions(shape, dtype, causal, direction):
    """{label: function(q, k, v)} of PyTorch's; forward in bfloat16, of Triton's too."""
    B, H, T, D = shape
    found = {}
    for label, backend in BACKENDS.items():
        if backend is SDPBackend.MATH and B * H * T * T > MOST_COMPOSED:
            continue
        found[label] = functools.partial(_by_backend, backend, causal)
    if direction == "backward":
        found[DETERMINISTIC] = found["SDPA flash"]
    found[COMPILED] = compiled(functools.partial(F.scaled_dot_product_attention, is_causal=causal))
    if (direction, dtype) == ("forward", "bfloat16") and D in IN_TRITON and on_gpu():
        if importlib.util.find_spec("triton"):
            found["Triton"] = _by_triton(causal)
    if shape in FLEX and on_gpu():
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        flex = compiled(flex_attention)
        mask = create_block_mask(_may_look, None, None, T, T) if causal else None
        found["FlexAttention, compiled"] = lambda q, k, v: flex(q, k, v, block_mask=mask)
    return found


def _by_triton(causal):
    from course_lib.benchmarks import attention_triton

    best = []

    def attend(q, k, v):
        if not best:
            best.append(attention_triton.tuned(q, k, v, causal=causal))
        return best[0](q, k, v)

    return attend


def _may_look(b, h, i, j):
    return i >= j


def _by_backend(backend, causal, q, k, v):
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def _peak(call):
    """Bytes that a call allocates at its peak, beside what is there before it."""
    if not on_gpu():
        return 0
    for _ in range(2):
        gpu.synchronize()
        before = gpu.allocated()
        gpu.reset_peak()
        call(0)
    gpu.synchronize()
    return gpu.peak() - before


run = runner(cases, rounds=7)
