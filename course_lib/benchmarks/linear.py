"""Linear layers on a GPU: our rungs beside cuBLAS, in float32, TF32 and bfloat16.

Forward (with bias), and the three gradients, at 4096³ and at sizes of the Fashion-MNIST network.
Every candidate is checked against float64 before anything is timed, and its error is kept: float32
by split TF32 is to be as exact as cuBLAS with TF32 switched off. Arithmetic is the limit of large
products, so rows say TFLOP/s, and the record what the chip could do at most.
"""

import contextlib
import functools
import math

import torch
import torch.nn.functional as F

from course_lib.benchmarks import peaks
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
from course_lib.kernels import linear as kernels
from course_lib.kernels.operation import AUTO
from course_lib.runtime.host.launch import on_gpu

#: (M, I, O): rows, numbers in, numbers out. The last four are the network's, batch 32 and 1024.
SHAPES = [
    (4096, 4096, 4096), (32, 3200, 256), (32, 256, 10), (1024, 3200, 256), (1024, 256, 10),
]  # fmt: skip
#: Measured with every rung, forward in float32; the others with the default alone.
LADDER = [(4096, 4096, 4096), (1024, 3200, 256)]
DTYPES = ("float32", "bfloat16")
#: (precision, suffix of the record's name) by dtype.
PRECISIONS = {
    "float32": [("float32", ""), ("tf32", ".tf32")], "bfloat16": [("float32", "")],
    "float16": [("float32", "")],
}  # fmt: skip
DIRECTIONS = ("forward", "backward")
N_DIMS = 3
COMMAND = "python -m course_lib bench linear --record"
PEER = "cuBLAS"
LONGEST_CALL = 400_000  # µs; a slower rung is left out, and the record says so
#: Errors allowed before anything is timed: ‖found − true‖ ÷ ‖true‖, float64 being true.
TOLERANCE = {"float32": 1e-5, "tf32": 1e-3, "bfloat16": 6e-3, "float16": 8e-4}


def cases(*, shapes=None, dtypes=None):
    """Each precision and direction at each shape; of `shapes`, (M, I, O), alone if given."""
    for shape in map(tuple, shapes or SHAPES):
        for dtype in dtypes or DTYPES:
            for precision, suffix in PRECISIONS[dtype]:
                for direction in DIRECTIONS:
                    yield _case(shape, dtype, precision, suffix, direction)


def draw(generator):
    """A shape that nobody chose."""
    return size(generator, 1, 4096), size(generator, 16, 4096, 8), size(generator, 8, 4096, 2)


@contextlib.contextmanager
def settings(tf32):
    """cuBLAS with TF32 or without."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = tf32
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def _case(shape, dtype, precision, suffix, direction):
    M, n_in, n_out = shape
    n_products = 1 if direction == "forward" else 2
    n_elements = (M * n_in + n_out * n_in + M * n_out) * n_products
    here = torch.empty(0, device="cuda" if on_gpu() else "cpu")
    default = kernels.FORWARD.rung(AUTO, here).name
    return Case(
        f"linear.{direction}{suffix}", shape, dtype, COMMAND,
        n_elements * getattr(torch, dtype).itemsize,
        functools.partial(_build, shape, dtype, precision, direction, default),
        default=default, flops=2 * M * n_in * n_out * n_products, longest=LONGEST_CALL,
        settings=functools.partial(settings, precision == "tf32"), facts={"precision": precision},
    )  # fmt: skip


class Buffers:
    """One set of what a layer reads: x, weight, bias and dy."""

    def __init__(self, make, shape, dtype):
        M, n_in, n_out = shape
        self.x = make.normal(M, n_in, dtype=dtype)
        self.weight = make.normal(n_out, n_in, dtype=dtype, scale=1 / math.sqrt(n_in))
        self.bias = make.normal(n_out, dtype=dtype)
        self.dy = make.normal(M, n_out, dtype=dtype)


def ours(buffers, direction, precision, variant):
    """[y], or [dx, dweight, dbias], by a rung of ours."""
    chosen = dict(precision=precision, variant=variant)
    if direction == "forward":
        return [kernels.forward(buffers.x, buffers.weight, buffers.bias, **chosen)]
    return list(kernels.backward(buffers.dy, buffers.x, buffers.weight, **chosen))


def theirs(x, weight, bias, dy, direction):
    """The same by PyTorch, whose matrix products are cuBLAS's."""
    if direction == "forward":
        return [F.linear(x, weight, bias)]
    return [dy @ weight, dy.t() @ x, dy.sum(0)]


def _build(shape, dtype, precision, direction, default, make, n_sets):
    sets = [Buffers(make, shape, dtype) for _ in range(n_sets)]
    variants = [default]
    if shape in LADDER and (dtype, precision, direction) == ("float32", "float32", "forward"):
        variants = [*kernels.FORWARD.variants]
    eager = functools.partial(theirs, direction=direction)

    def call(function):
        return rotating(lambda one: function(*vars(one).values()), sets)

    def right():
        expected = eager(*(tensor.double() for tensor in vars(sets[0]).values()))
        allowed = TOLERANCE[precision if dtype == "float32" else dtype]
        return lambda label, found, _: max(
            judge(label, distance(a, b), allowed) for a, b in zip(found, expected, strict=True)
        )

    return Work(
        {
            rung: rotating(lambda one, rung=rung: ours(one, direction, precision, rung), sets)
            for rung in variants
        },
        lambda: {PEER: call(eager), COMPILED: call(compiled(eager))},
        right,
        facts=lambda: {"peaks_tflops": peaks.peaks()},
    )


run = runner(cases, rounds=10)
