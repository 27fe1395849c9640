"""Transposed convolutions on a GPU: ours beside cuDNN, torch.compile and a copy.

Filters of 2 × 2 with stride 2, as a U-Net's way up has them; forward and the gradients of x and
weight, each by itself, in float32, TF32 and bfloat16. Every candidate is checked against float64
before anything is timed, and its error is kept. cuDNN searches for its fastest algorithm (benchmark
mode), and gets the images in either memory format. Rows say how much of a copy's bandwidth is
reached with the bytes that must be moved, and TFLOP/s: with many channels arithmetic is the limit.
"""

import functools
import math

import torch
import torch.nn.functional as F

from course_lib import bench
from course_lib.benchmarks.conv2d import DIRECTIONS, FORMATS, MODES, OTHER, error
from course_lib.benchmarks.limits import copies, fastest_copy
from course_lib.kernels import conv2d
from course_lib.kernels import conv_transpose2d as kernels

#: (N, C, K, H): images, their channels, those of the result, height and width.
SHAPES = [(8, 128, 64, 128), (8, 256, 128, 64), (8, 512, 256, 32), (8, 1024, 512, 16)]
#: Measured with every rung, in float32; the others with the default alone.
LADDER = [(4, 64, 32, 32)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 4
SIDE = 2  # of the filter, and the stride
DEVICE = "cuda"
COMMAND = "python -m course_lib bench conv_transpose2d --record"
OURS, PEER, COMPILED = "ours", "cuDNN", "torch.compile"
CALLS = 20
_aten = torch.ops.aten


def run(*, shapes=None, dtypes=DTYPES, directions=DIRECTIONS, rounds=10,
        progress=lambda cases: cases):  # fmt: skip
    """Check, then time, each case; of `shapes`, (N, C, K, H), alone if given. Returns records."""
    cases = [
        (tuple(shape), mode, direction)
        for shape in (SHAPES + LADDER if shapes is None else shapes)
        for mode in MODES
        if mode.dtype in dtypes
        for direction in directions
    ]
    cudnn = torch.backends.cudnn
    before = cudnn.allow_tf32, cudnn.benchmark
    cudnn.benchmark = True
    try:
        return bench.collected(_measure(*case, rounds) for case in progress(cases))
    finally:
        cudnn.allow_tf32, cudnn.benchmark = before


class Buffers:
    """One set of what a transposed convolution and its gradients read, in both formats."""

    def __init__(self, shape, dtype):
        N, C, K, H = shape
        tensors = {
            "x": torch.randn(N, C, H, H, device=DEVICE),
            "weight": torch.randn(C, K, SIDE, SIDE, device=DEVICE) / math.sqrt(C),
            "dy": torch.randn(N, K, SIDE * H, SIDE * H, device=DEVICE),
        }
        for name, tensor in tensors.items():
            tensor = tensor.to(getattr(torch, dtype))
            formats = {k: tensor.contiguous(memory_format=f) for k, f in FORMATS.items()}
            setattr(self, name, formats)


def ours(buffers, direction, mode, variant):
    """y, dx or dweight, by a rung of ours."""
    x, weight, dy = (each[mode.layout] for each in (buffers.x, buffers.weight, buffers.dy))
    options = {"stride": SIDE, "precision": mode.precision, "variant": variant}
    if direction == "forward":
        return kernels.forward(x, weight, **options)
    needs = direction == "dx", direction == "dweight", False
    found = kernels.backward(dy, x, weight, with_bias=False, needs=needs, **options)
    return found[DIRECTIONS.index(direction) - 1]


def theirs(x, weight, dy, direction):
    """The same by PyTorch, whose transposed convolutions on a GPU are cuDNN's."""
    if direction == "forward":
        return F.conv_transpose2d(x, weight, stride=SIDE)
    needs = [direction == "dx", direction == "dweight", False]
    step, none, one = [SIDE] * 2, [0, 0], [1, 1]
    found = _aten.convolution_backward(dy, x, weight, None, step, none, one, True, none, 1, needs)
    return found[DIRECTIONS.index(direction) - 1]


def sizes(shape):
    """(FLOPs, elements that must be moved), whatever the direction."""
    N, C, K, H = shape
    pixels = N * H * H
    return 2 * pixels * C * K * SIDE**2, pixels * C + C * K * SIDE**2 + pixels * K * SIDE**2


def _measure(shape, mode, direction, rounds):
    torch.backends.cudnn.allow_tf32 = mode.precision == "tf32"
    flops, n_elements = sizes(shape)
    n_bytes = n_elements * getattr(torch, mode.dtype).itemsize
    sets = bench.buffer_sets(n_bytes)
    buffers = [Buffers(shape, mode.dtype) for _ in range(sets)]
    candidates = _candidates(buffers, shape, direction, mode)
    first = [each["contiguous"].double() for each in vars(buffers[0]).values()]
    expected = theirs(*first, direction)
    found, left_out = {}, {}
    for label in list(candidates):
        try:
            _poison(expected, mode.dtype)
            found[label] = _checked(label, candidates[label](0), expected, mode.allowed)
        except ValueError as refusal:  # a rung says what it does not take
            left_out[label] = str(refusal)
            del candidates[label]
    del expected, first
    candidates |= copies(n_bytes, sets)
    timings = bench.device_times(candidates, calls=max(CALLS, sets), rounds=rounds)
    copy = fastest_copy(timings)
    rows = []
    for label, timing in timings.items():
        is_ours = label == OURS or label in kernels.VARIANTS
        row = bench.row(label, "ours" if is_ours else "peer", timing, n_bytes, copy)
        if label in found:
            row["tflops"] = round(flops / timing.microseconds / 1e6, 2)
            row["error"] = float(f"{found[label]:.3e}")
        rows.append(row)
    name = f"conv_transpose2d.{direction}{mode.suffix}"
    record = bench.make_record(
        name, shape, mode.dtype, n_bytes, copy, rows, kernel_hashes()[name], COMMAND
    )
    return record | {
        "default": OURS, "left_out": left_out, "precision": mode.precision, "layout": mode.layout,
        "flops": flops,
    }  # fmt: skip


def _candidates(buffers, shape, direction, mode):
    """{label: function(i)}: rungs where the ladder is measured, the default, and the peers."""
    sets, variants = len(buffers), {OURS: kernels.DEFAULT}
    if shape in LADDER and mode is MODES[0]:
        variants = {rung: rung for rung in kernels.VARIANTS} | variants
    found = {
        label: lambda i, variant=variant: ours(buffers[i % sets], direction, mode, variant)
        for label, variant in variants.items()
    }
    torch.compiler.reset()  # or it gives up after a few functions, and runs them eagerly
    compiled = torch.compile(
        functools.partial(theirs, direction=direction), dynamic=False, fullgraph=True,
        mode="max-autotune-no-cudagraphs",
    )  # fmt: skip

    def peer(function, layout):
        return lambda i: function(*(each[layout] for each in vars(buffers[i % sets]).values()))

    eager = functools.partial(theirs, direction=direction)
    found[PEER] = peer(eager, mode.layout)
    found[f"{PEER}, {OTHER[mode.layout]}"] = peer(eager, OTHER[mode.layout])
    found[COMPILED] = peer(compiled, mode.layout)
    return found


def _poison(like, dtype):
    """Fill with NaN the memory that a candidate is given next: another's result may be there."""
    spoilt = [
        torch.full(like.shape, math.nan, device=DEVICE, dtype=getattr(torch, dtype))
        for _ in range(3)
    ]
    del spoilt


def _checked(label, found, expected, allowed):
    wrong = error(found, expected)
    if not wrong <= allowed:
        raise AssertionError(f"{label} is wrong, so it is not timed: error {wrong:.2e}")
    return wrong


@functools.cache
def _hash():
    listed = [*kernels.specialisations(), *conv2d.specialisations()]
    functions = {id(kernel): kernel for _, kernel, _ in listed}
    decide = kernels.default_variant, kernels.upsample2x.fault, conv2d.default_variant
    return bench.kernel_hash((*functions.values(), *decide))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {f"conv_transpose2d.{way}{mode.suffix}": _hash() for way in DIRECTIONS for mode in MODES}
