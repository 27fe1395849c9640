"""Linear layers on a GPU: our rungs beside cuBLAS, in float32, TF32 and bfloat16.

Forward (with bias), and the three gradients, at 4096³ and at sizes of the Fashion-MNIST network.
Every candidate is checked against float64 before anything is timed, and its error is kept: float32
by split TF32 is to be as exact as cuBLAS with TF32 switched off. Arithmetic is the limit of large
products, so rows say TFLOP/s, and the record what the chip could do at most.
"""

import functools
import math
import time

import torch
import torch.nn.functional as F

from course_lib import bench
from course_lib.benchmarks import peaks
from course_lib.kernels import gemm
from course_lib.kernels import linear as kernels

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
DEVICE = "cuda"
COMMAND = "python -m course_lib bench linear --record"
PEER = "cuBLAS"
REPLAY = 4_000  # µs that one replay of a captured graph may take
LONGEST_CALL = 400_000  # µs; a slower rung is left out, and the record says so
MOST_CALLS = 60
#: Errors allowed before anything is timed: ‖found − true‖ ÷ ‖true‖, float64 being true.
TOLERANCE = {"float32": 1e-5, "tf32": 1e-3, "bfloat16": 6e-3, "float16": 8e-4}


def run(*, shapes=SHAPES, dtypes=DTYPES, directions=DIRECTIONS, rounds=10,
        progress=lambda cases: cases):  # fmt: skip
    """Check, then time, each case; of `shapes`, (M, I, O), alone. Returns records."""
    cases = [
        (tuple(shape), dtype, precision, suffix, direction)
        for shape in shapes
        for dtype in dtypes
        for precision, suffix in PRECISIONS[dtype]
        for direction in directions
    ]
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    try:
        return bench.collected(_measure(*case, rounds) for case in progress(cases))
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


class Buffers:
    """One set of what a layer reads: x, weight, bias and dy."""

    def __init__(self, shape, dtype):
        M, n_in, n_out = shape
        kind = getattr(torch, dtype)
        self.x = torch.randn(M, n_in, device=DEVICE).to(kind)
        self.weight = (torch.randn(n_out, n_in, device=DEVICE) / math.sqrt(n_in)).to(kind)
        self.bias = torch.randn(n_out, device=DEVICE).to(kind)
        self.dy = torch.randn(M, n_out, device=DEVICE).to(kind)


def ours(buffers, direction, precision, variant=None):
    """[y], or [dx, dweight, dbias], by a rung of ours."""
    chosen = dict(precision=precision, variant=variant)
    if direction == "forward":
        return [kernels.forward(buffers.x, buffers.weight, buffers.bias, **chosen)]
    return list(kernels.backward(buffers.dy, buffers.x, buffers.weight, **chosen))


def theirs(buffers, direction):
    """The same by PyTorch, whose matrix products are cuBLAS's."""
    if direction == "forward":
        return [F.linear(buffers.x, buffers.weight, buffers.bias)]
    dy = buffers.dy
    return [dy @ buffers.weight, dy.t() @ buffers.x, dy.sum(0)]


def truth(buffers, direction):
    """The same in float64."""
    double = Buffers.__new__(Buffers)
    for name, tensor in vars(buffers).items():
        setattr(double, name, tensor.double())
    return theirs(double, direction)


def errors(found, expected):
    """‖found − expected‖ ÷ ‖expected‖ of each; NaN where an element is."""
    pairs = zip(found, expected, strict=True)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in pairs]


def _measure(shape, dtype, precision, suffix, direction, rounds):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    M, n_in, n_out = shape
    itemsize = getattr(torch, dtype).itemsize
    n_products = 1 if direction == "forward" else 2
    flops = 2 * M * n_in * n_out * n_products
    n_bytes = (M * n_in + n_out * n_in + M * n_out) * itemsize * n_products
    sets = bench.buffer_sets(n_bytes)
    buffers = [Buffers(shape, dtype) for _ in range(sets)]
    candidates, left_out = {}, {}
    for variant in _variants(shape, dtype, precision, direction):
        candidates[variant] = lambda i, variant=variant: ours(
            buffers[i % sets], direction, precision, variant
        )
    candidates[PEER] = lambda i: theirs(buffers[i % sets], direction)
    expected, found, calls = truth(buffers[0], direction), {}, {}
    allowed = TOLERANCE[precision if dtype == "float32" else dtype]
    for label in list(candidates):
        found[label] = max(_checked(label, candidates[label](0), expected, allowed))
        microseconds = _once(candidates[label])
        calls[label] = max(1, min(max(MOST_CALLS, sets), int(REPLAY / microseconds)))
        if microseconds > LONGEST_CALL and label != PEER:
            left_out[label] = f"a call takes {microseconds / 1e3:,.0f} ms"
            del candidates[label], calls[label]
    del expected
    timings = bench.device_times(candidates, calls=calls, rounds=rounds)
    rows = [_row(label, timing, flops, found[label]) for label, timing in timings.items()]
    name = f"linear.{direction}{suffix}"
    record = bench.host_record(name, shape, dtype, rows, kernel_hashes()[name], COMMAND)
    return record | {
        "default": _default(buffers[0].x), "left_out": left_out, "precision": precision,
        "flops": flops, "bytes": n_bytes, "peaks_tflops": _peaks(),
    }  # fmt: skip


def _variants(shape, dtype, precision, direction):
    default = _default(torch.empty(0, device=DEVICE))
    if shape not in LADDER or (dtype, precision, direction) != ("float32", "float32", "forward"):
        return [default]
    known = list(kernels.VARIANTS)
    return known[: known.index(default) + 1]


def _default(x):
    return gemm.chosen(None, x)


def _checked(label, found, expected, allowed):
    wrong = errors(found, expected)
    if not all(error <= allowed for error in wrong):
        told = ", ".join(f"{error:.2e}" for error in wrong)
        raise AssertionError(f"{label} is wrong, so it is not timed: errors {told}")
    return wrong


def _row(label, timing, flops, error):
    return {
        "label": label,
        "kind": "peer" if label == PEER else "ours",
        "microseconds": round(timing.microseconds, 3),
        "quartiles": [round(quartile, 3) for quartile in timing.quartiles],
        "tflops": round(flops / timing.microseconds / 1e6, 2),
        "error": float(f"{error:.3e}"),
    }


def _once(candidate):
    """µs that one call takes, roughly."""
    _synchronize()
    start = time.perf_counter()
    candidate(0)
    _synchronize()
    return max(1.0, (time.perf_counter() - start) * 1e6)


def _synchronize():
    torch.cuda.synchronize()


def _peaks():
    return peaks.peaks()


@functools.cache
def _hash():
    unused = gemm.few_rows.KERNELS.values()  # none of SHAPES has so few
    functions = {
        id(kernel): kernel for _, kernel, _ in kernels.specialisations() if kernel not in unused
    }
    return bench.kernel_hash((*functions.values(), gemm.plan.choose))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    suffixes = dict.fromkeys(suffix for each in PRECISIONS.values() for _, suffix in each)
    return {f"linear.{way}{suffix}": _hash() for way in DIRECTIONS for suffix in suffixes}
