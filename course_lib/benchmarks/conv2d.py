"""Convolutions on a GPU: ours beside cuDNN, in float32, TF32 and bfloat16.

Filters of 3 × 3 with padding 1, forward and the gradients of x and weight, each by itself. Every
candidate is checked against float64 before anything is timed, and its error is kept: what is
called float32 is to be as exact as cuDNN with TF32 switched off. cuDNN searches for its fastest
algorithm (benchmark mode), and gets the images in either memory format. Arithmetic is the limit of
these sizes, so rows say TFLOP/s, and the record what the chip could do at most.
"""

import functools
import math
import time
from typing import NamedTuple

import torch
import torch.nn.functional as F

from course_lib import bench
from course_lib.benchmarks import peaks
from course_lib.kernels import conv2d as kernels

#: (N, C, K, H): images, their channels, filters, height and width.
SHAPES = [(32, 64, 128, 64), (32, 128, 128, 56), (64, 256, 256, 28)]
#: Measured with every rung, in float32; the others with the default alone.
LADDER = [(8, 32, 32, 28)]
DIRECTIONS = ("forward", "dx", "dweight")
DTYPES = ("float32", "bfloat16")
N_DIMS = 4
TAPS, PADDING = 3, 1
DEVICE = "cuda"
COMMAND = "python -m course_lib bench conv2d --record"
OURS, PEER = "ours", "cuDNN"
REPLAY = 4_000  # µs that one replay of a captured graph may take
LONGEST_CALL = 400_000  # µs; a slower rung is left out, and the record says so
MOST_CALLS = 60


class Mode(NamedTuple):
    """How numbers are multiplied and where they lie; `limit` is the peak that bounds it."""

    dtype: str
    precision: str
    layout: str
    suffix: str  # of the record's name
    limit: str
    allowed: float  # error before anything is timed: ‖found − true‖ ÷ ‖true‖, float64 being true


MODES = (
    Mode("float32", "float32", "contiguous", "", "fma", 5e-5),
    Mode("float32", "tf32", "contiguous", ".tf32", "tf32", 1e-3),
    Mode("bfloat16", "float32", "channels-last", ".channels-last", "bfloat16", 6e-3),
)
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
OTHER = {"contiguous": "channels-last", "channels-last": "contiguous"}


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
    """One set of what a convolution and its gradients read: x, weight and dy, in both formats."""

    def __init__(self, shape, dtype):
        N, C, K, H = shape
        scale = 1 / math.sqrt(C * TAPS * TAPS)
        tensors = {
            "x": torch.randn(N, C, H, H, device=DEVICE),
            "weight": torch.randn(K, C, TAPS, TAPS, device=DEVICE) * scale,
            "dy": torch.randn(N, K, H, H, device=DEVICE),
        }
        for name, tensor in tensors.items():
            tensor = tensor.to(getattr(torch, dtype))
            formats = {k: tensor.contiguous(memory_format=f) for k, f in FORMATS.items()}
            setattr(self, name, formats)


def ours(buffers, direction, mode, variant):
    """y, dx or dweight, by a rung of ours."""
    x, weight, dy = (each[mode.layout] for each in (buffers.x, buffers.weight, buffers.dy))
    options = {"padding": PADDING, "precision": mode.precision, "variant": variant}
    if direction == "forward":
        return kernels.forward(x, weight, **options)
    needs = direction == "dx", direction == "dweight", False
    return kernels.backward(dy, x, weight, with_bias=False, needs=needs, **options)[
        DIRECTIONS.index(direction) - 1
    ]


def theirs(x, weight, dy, direction):
    """The same by PyTorch, whose convolutions on a GPU are cuDNN's."""
    if direction == "forward":
        return F.conv2d(x, weight, padding=PADDING)
    needs = [direction == "dx", direction == "dweight", False]
    pad, one = [PADDING] * 2, [1, 1]
    return torch.ops.aten.convolution_backward(
        dy, x, weight, None, one, pad, one, False, [0, 0], 1, needs
    )[DIRECTIONS.index(direction) - 1]


def error(found, expected):
    """‖found − expected‖ ÷ ‖expected‖; NaN where an element is."""
    return ((found.double() - expected).norm() / expected.norm()).item()


def _measure(shape, mode, direction, rounds):
    torch.backends.cudnn.allow_tf32 = mode.precision == "tf32"
    N, C, K, H = shape
    itemsize = getattr(torch, mode.dtype).itemsize
    flops = 2 * N * K * H * H * C * TAPS * TAPS
    n_bytes = (N * C * H * H + K * C * TAPS * TAPS + N * K * H * H) * itemsize
    sets = bench.buffer_sets(n_bytes)
    buffers = [Buffers(shape, mode.dtype) for _ in range(sets)]
    candidates = _candidates(buffers, shape, direction, mode)
    first = [each["contiguous"].double() for each in vars(buffers[0]).values()]
    expected = theirs(*first, direction)
    found, calls, left_out = {}, {}, {}
    for label in list(candidates):
        try:
            _poison(expected, mode.dtype)
            found[label] = _checked(label, candidates[label](0), expected, mode.allowed)
        except ValueError as refusal:  # a rung says what it does not take
            left_out[label] = str(refusal)
            del candidates[label]
            continue
        microseconds = _once(candidates[label])
        calls[label] = max(1, min(max(MOST_CALLS, sets), int(REPLAY / microseconds)))
        if microseconds > LONGEST_CALL and not label.startswith(PEER):
            left_out[label] = f"a call takes {microseconds / 1e3:,.0f} ms"
            del candidates[label], calls[label]
    del expected, first
    timings = bench.device_times(candidates, calls=calls, rounds=rounds)
    rows = [_row(label, timing, flops, found[label]) for label, timing in timings.items()]
    name = f"conv2d.{direction}{mode.suffix}"
    record = bench.host_record(name, shape, mode.dtype, rows, kernel_hashes()[name], COMMAND)
    return record | {
        "default": OURS, "left_out": left_out, "precision": mode.precision, "layout": mode.layout,
        "flops": flops, "bytes": n_bytes, "limit": mode.limit, "peaks_tflops": _peaks(),
    }  # fmt: skip


def _candidates(buffers, shape, direction, mode):
    """{label: function(i)}: rungs where the ladder is measured, the default, and cuDNN twice."""
    sets, variants = len(buffers), {OURS: kernels.DEFAULT}
    if shape in LADDER and mode is MODES[0]:
        special = "depthwise", "few_channels"
        variants = {rung: rung for rung in kernels.VARIANTS if rung not in special} | variants
    found = {
        label: lambda i, variant=variant: ours(buffers[i % sets], direction, mode, variant)
        for label, variant in variants.items()
    }
    for layout in (mode.layout, OTHER[mode.layout]):
        label = PEER if layout == mode.layout else f"{PEER}, {layout}"
        found[label] = lambda i, layout=layout: theirs(
            *(each[layout] for each in vars(buffers[i % sets]).values()), direction
        )
    return found


def _poison(like, dtype):
    """Fill with NaN the memory that a candidate is given next: another's result may be there."""
    shape, kind = like.shape, getattr(torch, dtype)
    spoilt = [torch.full(shape, math.nan, device=DEVICE, dtype=kind) for _ in range(3)]
    del spoilt


def _checked(label, found, expected, allowed):
    wrong = error(found, expected)
    if not wrong <= allowed:
        raise AssertionError(f"{label} is wrong, so it is not timed: error {wrong:.2e}")
    return wrong


def _row(label, timing, flops, error):
    return {
        "label": label,
        "kind": "peer" if label.startswith(PEER) else "ours",
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
    functions = {id(kernel): kernel for _, kernel, _ in kernels.specialisations()}
    return bench.kernel_hash((*functions.values(), kernels.default_variant))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {f"conv2d.{way}{mode.suffix}": _hash() for way in DIRECTIONS for mode in MODES}
