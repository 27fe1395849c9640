"""Wrong kernels and launchers behind a rung: each is rejected by the property that is meant for it.

The operation takes from each row its mean, y = x − x̄; images are a row of channels at each pixel.
A block works on a row, and its threads add up partial sums in shared memory. Without a fault it
keeps every promise; each of `MISTAKES` is one fault, of the kernel or of the launcher.
"""

import math

import numpy as np
import torch
from contract.cases import Subject
from numba import float32

from course_lib import cuda
from course_lib.kernels.operation import AUTO, Ladder, Rung
from course_lib.operations.numbers import gradient
from course_lib.operations.passes import Operation, Pass
from course_lib.runtime.host import arrays, outputs
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import load, store

THREADS = 32
N_SUMS = THREADS + 1  # the last is for atomics
DTYPES = ("float32", "float16", "bfloat16")

#: What is wrong -> the property that rejects it.
MISTAKES = {
    "the last column is not summed": "truth",
    "the last row is left out": "truth",
    "columns beyond a warp are left out": "truth",
    "results keep eight bits": "truth",
    "the mean is not taken off": "truth",
    "the input is written to": "unchanged",
    "strides are ignored": "views",
    "strides are ignored in some layout": "layouts",
    "channels-last images are read as rows": "formats",
    "NaN is swallowed": "nonfinite",
    "infinity becomes the largest number": "nonfinite",
    "no rows are a grid of no blocks": "empty",
    "one element is written past out": "out",
    "out is not what is returned": "out",
    "out's strides are ignored": "out",
    "out may lie in what is read": "out",
    "sums are added in the order of threads": "bits",
    "the result depends on the call": "bits",
    "a barrier is missing": "sanitizer",
    "shared memory is read before it is written": "sanitizer",
    "a column past the row is read": "sanitizer",
    "half a warp waits": "sanitizer",
    "a tensor is returned for NumPy arrays": "numpy",
    "columns are not counted": "refused",
    "any dtype is taken": "refused",
    "an unknown rung runs": "refused",
}
#: Those that make one element of the truth's gradient wrong, for `gradients`.
WRONG_TRUTHS = ("the gradient lacks the mean", "the gradient is halved")


def centring_kernel(fault):
    """The kernel with this fault, or with none."""
    short = 1 if fault == "the last column is not summed" else 0
    stride = 1 << 20 if fault == "columns beyond a warp are left out" else THREADS
    rounds, racing = fault == "results keep eight bits", fault == "a barrier is missing"
    unwritten = fault == "shared memory is read before it is written"
    past, halves = fault == "a column past the row is read", fault == "half a warp waits"
    changes, atomic = fault == "the input is written to", fault.startswith("sums are added")
    swallows, clamps = fault == "NaN is swallowed", fault.startswith("infinity becomes")
    alone = fault == "the mean is not taken off"

    @cuda.jit
    def kernel(x, y, n_cols, shift):
        sums = cuda.shared.array(N_SUMS, float32)
        tid, start = cuda.threadIdx.x, cuda.blockIdx.x * n_cols
        total = float32(0)
        for col in range(tid, n_cols - short, stride):
            total += load(x, start + col)
        if past and load(x, start + n_cols + tid * n_cols * 64) > float32(1e30):
            total = float32(0)
        if atomic:
            if tid == 0:
                sums[THREADS] = float32(0)
            cuda.syncthreads()
            cuda.atomic.add(sums, THREADS, total)
            cuda.syncthreads()
            total = sums[THREADS]
        else:
            if not unwritten or tid < THREADS - 1:
                sums[tid] = total
            if halves:
                if tid < THREADS // 2:
                    cuda.syncthreads()
            elif not racing:
                cuda.syncthreads()
            total = float32(0)
            for other in range(THREADS):
                total += sums[other]
        mean = float32(0) if alone else total / float32(n_cols)
        for col in range(tid, n_cols, stride):
            value = load(x, start + col) - mean + shift
            if rounds:
                value = math.floor(value * float32(256)) / float32(256)
            if swallows and value != value:
                value = float32(0)
            if clamps:
                value = min(max(value, float32(-3e38)), float32(3e38))
            store(y, start + col, value)
            if changes:
                store(x, start + col, value)

    return kernel


class Centring:
    """`forward(x)` and `backward(dy, x)`, with one fault or none."""

    def __init__(self, fault=""):
        self.fault, self.calls = fault, 0
        self.kernel = centring_kernel(fault)
        self.ladder = Ladder(Rung("planted", self.launch, (self.kernel,)), auto="planted")

    def launch(self, x, y):
        n_rows = math.prod(y.shape[:-1])
        rows = n_rows - (self.fault == "the last row is left out")
        if rows > 0 and y.shape[-1] or self.fault == "no rows are a grid of no blocks":
            shift = float(self.calls) if self.fault == "the result depends on the call" else 0.0
            launch(self.kernel, rows, THREADS, x, y, y.shape[-1], shift, flat=True)

    def forward(self, x, *, variant=AUTO, out=None):
        fault = self.fault
        if fault != "an unknown rung runs":
            self.ladder.require(variant)
        arrays.require(x, "x", dtypes=None if fault == "any dtype is taken" else DTYPES)
        self.calls += 1
        if fault == "a tensor is returned for NumPy arrays" and isinstance(x, np.ndarray):
            x = torch.from_numpy(x)
        images = x.ndim == 4
        if fault.startswith("strides are ignored") or fault.startswith("channels-last") and images:
            x = x.as_strided(x.shape, torch.empty(x.shape).stride(), x.storage_offset())
        x = x.movedim(1, -1) if images else x
        x = x if fault == "the input is written to" else arrays.contiguous(x)
        if out is None or images:
            y = arrays.empty(tuple(x.shape), like=x)
            self.launch(x, y)
            y = y.movedim(-1, 1) if images else y
            return y if out is None else self.filled(out, y, x)
        if fault == "out is not what is returned":
            return self.forward(x, variant="planted")
        if fault == "out may lie in what is read":
            out.copy_(torch.zeros_like(out))
        elif fault == "out's strides are ignored":
            out = out.as_strided(out.shape, torch.empty(out.shape).stride(), out.storage_offset())
        else:
            outputs.output(out, x.shape, like=x, reads={"x": x})
        self.launch(x, out)
        if fault == "one element is written past out":
            out.as_strided((1,), (1,), out.storage_offset() + out.numel()).fill_(0)
        return out

    def filled(self, out, y, x):
        return outputs.output(out, y.shape, like=x, reads={"x": x}).copy_(y)

    def backward(self, dy, x, *, variant=AUTO, out=None):
        """The gradient of `forward` at x, which only has to have dy's shape."""
        if self.fault != "columns are not counted":
            arrays.require(x, "x", shape=tuple(dy.shape), dtypes=(arrays.dtype_name(dy),))
            if x.device != dy.device:
                raise arrays.ArrayError(f"x must be on {dy.device}, as dy is, not on {x.device}")
        return self.forward(dy, variant=variant, out=out)


def centred(x):
    axis = 1 if x.ndim == 4 else -1
    return x - x.mean(axis=axis, keepdims=True) if x.size else x


def operation(fault=""):
    """The `Operation`, with this fault or none."""
    ours = Centring(fault)

    def truth(dy, x):
        if x.shape != dy.shape:
            raise ValueError(f"x of {x.shape} with dy of {dy.shape}")
        if fault == WRONG_TRUTHS[0]:
            return dy
        return centred(dy) / (2 if fault == WRONG_TRUTHS[1] else 1)

    def scale(truth, x, *_):
        return np.broadcast_to(np.abs(x).max(initial=0.0), truth.shape)

    def peer(x, *_):
        return (x.float() - x.float().mean(1 if x.ndim == 4 else -1, keepdim=True)).to(x.dtype)

    facts = dict(scale=scale, scale_in_words="the largest |x|", whole=True, out=True)
    return Operation(
        None,
        forward=Pass(ours.ladder, lambda x: {"x": x}, ours.forward, peer, centred, **facts),
        backward=Pass(
            ours.ladder, lambda x: {"dy": gradient(x), "x": x}, ours.backward, peer,
            truth, **facts,
        ),
    )  # fmt: skip


def planted(fault="", direction="forward", dtype="float32"):
    """The `Subject` of one pass."""
    found = operation(fault)
    return Subject("planted", direction, "planted", dtype, found, found.passes[direction])
