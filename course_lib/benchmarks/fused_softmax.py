"""Fused softmax kernels on a GPU: our rungs beside PyTorch's chain of operators and a copy.

Softmax with dropout, and batch normalisation with ReLU and softmax: forward, backward, and both one
after the other; the chain eager and by torch.compile. Before anything is timed it is checked,
against float64. Another generator draws another mask: a peer of dropout is held to its own.
"""

import functools
import math

import numpy as np
import torch
import torch.nn.functional as F

from course_lib import bench, reference
from course_lib.benchmarks.limits import copies, fastest_copy
from course_lib.kernels import bn_relu_softmax, softmax_dropout

SHAPES = [(1024, 1000), (49152, 1024), (16384, 8192)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 2
DIRECTIONS = ("forward", "backward", "both")
DEVICE = "cuda"
COMMAND = "python -m course_lib bench fused_softmax --record"
P, SEED, EPS = 0.1, 2014, 1e-5
LONGEST_CALL = 50_000  # µs; a slower rung is left out, and the record says so
REPLAY = 5_000  # µs that one replay of a captured graph may take
SAMPLE = 64  # rows that are checked, from both ends
CHUNK = 1 << 24  # elements taken to float64 at once for sums over all rows
# The largest error allowed before anything is timed, relative to the row's largest result, or to
# the largest terms that its gradient is a difference of; `naive` adds numbers one to another, hence
# the rounding of each on top. Rounding z, which may be 10, changes y by as large a factor. A stored
# y is rounded by half a unit, which reaches dx five times at most, its own rounding included. Peers
# round what their operators hand to one another, hence their own.
_TOLERANCE = {"float32": 1e-5, "bfloat16": 5 * 2.0**-9, "float16": 5 * 2.0**-12}
_PEER_TOLERANCE = {"float32": 2e-5, "bfloat16": 1e-1, "float16": 2e-2}
ROUNDING = 2.0**-24
_aten = torch.ops.aten


class SoftmaxDropout:
    """One set of buffers. Every way to compute gives (output or None, gradients)."""

    name, module = "softmax_dropout", softmax_dropout
    n_arrays = {"forward": 2, "backward": 3, "both": 5}  # that must be moved

    def __init__(self, shape, dtype):
        self.x = torch.randn(shape, device=DEVICE).mul_(3).to(dtype)
        self.dz = torch.randn(shape, device=DEVICE).to(dtype)
        self.z, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)
        _, self.stats = softmax_dropout.forward(self.x, P, SEED, 0, out=self.z)
        self.y = F.softmax(self.x, -1)
        self.mask = torch.rand(shape, device=DEVICE) >= P

    def ours_forward(self, variant):
        _, self.stats = softmax_dropout.forward(
            self.x, P, SEED, 0, variant=variant, out=self.z
        )  # fmt: skip
        return self.z, ()

    def ours_backward(self, variant):
        softmax_dropout.backward(
            self.dz, self.x, self.stats, P, SEED, 0, variant=variant, out=self.dx
        )
        return None, (self.dx,)

    def arguments(self, direction):
        """What the peer's function of this direction takes."""
        return {
            "forward": (self.x,),
            "backward": (self.dz, self.y, self.mask),
            "both": (self.x, self.dz),
        }[direction]

    @staticmethod
    def peer_forward(x):
        return F.dropout(F.softmax(x, -1), P), ()

    @staticmethod
    def peer_backward(dz, y, mask):
        """What autograd runs for the chain."""
        g = _aten.native_dropout_backward(dz, mask, 1 / (1 - P))
        return None, (_aten._softmax_backward_data(g, y, -1, y.dtype),)

    @staticmethod
    def peer_both(x, dz):
        y = F.softmax(x, -1)
        z, mask = _aten.native_dropout(y, P, True)
        return z, SoftmaxDropout.peer_backward(dz, y, mask)[1]

    def check(self, label, output, gradients, ours, tolerance):
        n_cols = self.x.shape[1]
        for rows in _ends(len(self.x)):
            x, dz = _double(self.x[rows]), _double(self.dz[rows])
            if ours:
                mask = reference.dropout_mask(x.shape, P, SEED, (rows.start or 0) * n_cols)
            elif output is None:
                mask = _double(self.mask[rows])
            else:
                mask = _double(output[rows]) != 0
                deviation = math.sqrt(P * (1 - P) / mask.size)
                if not abs(mask.mean() - (1 - P)) < 6 * deviation + _underflow(x):
                    raise AssertionError(f"{label} keeps {mask.mean():.1%}, so it is not timed")
            scaled, y = mask / (1 - P), reference.softmax(x)
            if output is not None:
                _compare(label, output[rows], y * scaled, _largest(y), tolerance)
            for dx in gradients:
                g = dz * scaled
                scale, expected = _largest(y) * _largest(g), reference.softmax_backward(g, y)
                _compare(label, dx[rows], expected, scale, tolerance)


class BatchNormReluSoftmax:
    """As `SoftmaxDropout`. The features' numbers are float32, as under autocast."""

    name, module = "bn_relu_softmax", bn_relu_softmax
    n_arrays = {"forward": 2, "backward": 4, "both": 6}

    def __init__(self, shape, dtype):
        self.x, self.dy = (torch.randn(shape, device=DEVICE).to(dtype) for _ in range(2))
        mean, weight, bias = (torch.randn(shape[1], device=DEVICE) for _ in range(3))
        self.parameters = mean, torch.rand(shape[1], device=DEVICE) + 0.5, weight, bias
        # Where z is nearly 0, rounding would decide what ReLU does.
        z = F.batch_norm(self.x.float(), *self.parameters, eps=EPS)
        self.x[z.abs() < 1e-4] += 0.5
        self.y, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)
        bn_relu_softmax.forward(self.x, *self.parameters, eps=EPS, out=self.y)
        self.h = F.relu(F.batch_norm(self.x, *self.parameters, eps=EPS))

    def ours_forward(self, variant):
        bn_relu_softmax.forward(self.x, *self.parameters, eps=EPS, variant=variant, out=self.y)
        return self.y, ()

    def ours_backward(self, variant):
        return None, bn_relu_softmax.backward(
            self.dy, self.y, self.x, *self.parameters, eps=EPS, variant=variant, out=self.dx
        )

    def arguments(self, direction):
        return {
            "forward": (self.x, *self.parameters),
            "backward": (self.dy, self.y, self.h, self.x, *self.parameters),
            "both": (self.dy, self.x, *self.parameters),
        }[direction]

    @staticmethod
    def peer_forward(x, mean, var, weight, bias):
        return F.softmax(F.relu(F.batch_norm(x, mean, var, weight, bias, eps=EPS)), -1), ()

    @staticmethod
    def peer_backward(dy, y, h, x, mean, var, weight, bias):
        """What autograd runs for the chain."""
        dh = _aten._softmax_backward_data(dy, y, -1, y.dtype)
        dz = _aten.threshold_backward(dh, h, 0)
        saved = mean.new_empty(0)  # what forward saves of a batch's own statistics: here, nothing
        return None, _aten.native_batch_norm_backward(
            dz, x, weight, mean, var, saved, saved, False, EPS, [True] * 3
        )

    @staticmethod
    def peer_both(dy, x, *parameters):
        h = F.relu(F.batch_norm(x, *parameters, eps=EPS))
        y = F.softmax(h, -1)
        return y, BatchNormReluSoftmax.peer_backward(dy, y, h, x, *parameters)[1]

    def check(self, label, output, gradients, ours, tolerance):
        parameters = _, var, weight, _ = [_double(p) for p in self.parameters]
        steepest = (np.abs(weight) / np.sqrt(var + EPS)).max()
        for rows in _ends(len(self.x)):
            x, dy = _double(self.x[rows]), _double(self.dy[rows])
            y = reference.bn_relu_softmax(x, *parameters, EPS)
            if output is not None:
                _compare(label, output[rows], y, _largest(y), tolerance)
            if gradients:
                dx, *_ = reference.bn_relu_softmax_backward(dy, y, x, *parameters, EPS)
                scale = _largest(y) * _largest(dy) * steepest
                _compare(label, gradients[0][rows], dx, scale, tolerance)
        for found, sums in zip(gradients[1:], self.sums if gradients else (), strict=True):
            expected, size = sums
            _compare(label, found, expected, _largest(size), tolerance)

    @functools.cached_property
    def sums(self):
        """Of dweight and dbias, in float64: the sum over all rows, and the size of its terms."""
        mean, var, weight, bias = (p.double() for p in self.parameters)
        sums = torch.zeros(2, 2, len(mean), dtype=torch.double, device=DEVICE)
        step = max(1, CHUNK // self.x.shape[1])
        for start in range(0, len(self.x), step):
            x, dy = (t[start : start + step].double() for t in (self.x, self.dy))
            normal = (x - mean) / (var + EPS).sqrt()
            z = normal * weight + bias
            y = F.softmax(F.relu(z), -1)
            dz = y * (dy - (y * dy).sum(-1, keepdim=True)) * (z > 0)
            size = y.amax(-1, keepdim=True) * dy.abs().amax(-1, keepdim=True)
            for factor, into in ((normal, sums[0]), (torch.ones_like(z), sums[1])):
                into[0] += (dz * factor).sum(0)
                into[1] += (size * factor.abs()).sum(0)
        return sums.cpu().numpy()


OPERATIONS = {operation.name: operation for operation in (SoftmaxDropout, BatchNormReluSoftmax)}


def run(*, names=None, shapes=SHAPES, dtypes=DTYPES, rounds=20, progress=lambda cases: cases):
    """Check, then time, each case. Returns records.

    Of `names`, such as ["softmax_dropout.forward"], only these. Raises ValueError for a shape that
    is not (n_rows, n_cols), both positive.
    """
    for shape in shapes:
        if len(shape) != 2 or not all(shape):
            raise ValueError(f"a shape is (rows, columns), both positive; not {tuple(shape)}")
    cases = [
        (operation, direction, tuple(shape), dtype)
        for shape in shapes
        for dtype in dtypes
        for operation in OPERATIONS.values()
        for direction in DIRECTIONS
        if names is None or f"{operation.name}.{direction}" in names
    ]
    return [_measure(*case, rounds) for case in progress(cases)]


def kernel_hash(operation, direction):
    """Of all that the default variant may launch, and of what decides it."""
    module = operation.module
    tables = {"forward": [module.VARIANTS], "backward": [module.BACKWARD_VARIANTS]}
    wanted = tables.get(direction, tables["forward"] + tables["backward"])
    kernels = [kernel for table in wanted for kernel in table[module.DEFAULT]]
    return bench.kernel_hash((*kernels, module.plan))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {
        f"{operation.name}.{direction}": kernel_hash(operation, direction)
        for operation in OPERATIONS.values()
        for direction in DIRECTIONS
    }


def _measure(operation, direction, shape, dtype, rounds):
    kind = getattr(torch, dtype)
    n_bytes = operation.n_arrays[direction] * math.prod(shape) * kind.itemsize
    sets = bench.buffer_sets(n_bytes)
    buffers = [operation(shape, kind) for _ in range(sets)]
    ours, left_out = _ours(operation, direction, buffers), {}
    peers = _peers(operation, direction, buffers)
    calls = {}
    for label, candidate in (ours | peers).items():
        tolerance = (_TOLERANCE if label in ours else _PEER_TOLERANCE)[dtype]
        if label == "naive":
            tolerance += max(shape) * ROUNDING
        for written in (buffers[0].dx, *([] if direction == "backward" else [_output(buffers[0])])):
            written.fill_(math.nan)
        buffers[0].check(label, *candidate(0), label in ours, tolerance)
        microseconds = _once(candidate)
        if microseconds > LONGEST_CALL and label in ours:
            left_out[label] = f"a call takes {microseconds / 1e3:,.0f} ms"
            del ours[label]
        calls[label] = max(1, min(max(60, sets), int(REPLAY / microseconds)))
    candidates = ours | peers | copies(n_bytes, sets)
    calls |= dict.fromkeys(candidates.keys() - calls.keys(), max(calls.values()))
    timings = bench.device_times(candidates, calls=calls, rounds=rounds)
    copy = fastest_copy(timings)
    rows = [
        bench.row(label, "ours" if label in ours else "peer", timing, n_bytes, copy)
        for label, timing in timings.items()
    ]
    record = bench.make_record(
        f"{operation.name}.{direction}", shape, dtype, n_bytes, copy, rows,
        kernel_hash(operation, direction), COMMAND,
    )  # fmt: skip
    return record | {"default": operation.module.DEFAULT, "left_out": left_out}


def _output(buffers):
    return buffers.z if isinstance(buffers, SoftmaxDropout) else buffers.y


def _ours(operation, direction, buffers):
    def call(one, variant):
        if direction == "forward":
            return one.ours_forward(variant)
        if direction == "backward":
            return one.ours_backward(variant)
        return one.ours_forward(variant)[0], one.ours_backward(variant)[1]

    return {
        variant: lambda i, variant=variant: call(buffers[i % len(buffers)], variant)
        for variant in operation.module.VARIANTS
    }


def _peers(operation, direction, buffers):
    function = getattr(operation, f"peer_{direction}")
    torch.compiler.reset()  # or it gives up after a few functions, and runs them eagerly
    compiled = torch.compile(
        function, dynamic=False, fullgraph=True, mode="max-autotune-no-cudagraphs"
    )
    # Results are kept as long as ours: memory that is written again at once would still be in the
    # cache.
    kept = {"PyTorch eager": [None] * len(buffers), "torch.compile": [None] * len(buffers)}

    def call(label, function, i):
        i %= len(buffers)
        kept[label][i] = function(*buffers[i].arguments(direction))
        return kept[label][i]

    return {
        "PyTorch eager": lambda i: call("PyTorch eager", function, i),
        "torch.compile": lambda i: call("torch.compile", compiled, i),
    }


def _once(candidate):
    """µs that one call takes, roughly: the start of a launch counts too."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    candidate(0)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _ends(n_rows):
    """Slices of the rows that are checked; they begin at a number that is at least 0."""
    return slice(0, SAMPLE), slice(max(0, n_rows - SAMPLE), n_rows)


def _double(tensor):
    return tensor.double().cpu().numpy()


def _underflow(x):
    """The share of softmax's results that are too small to tell them from dropped ones."""
    return (reference.softmax(x) < 1e-37).mean()


def _largest(rows):
    return np.abs(rows).max(-1, keepdims=True)


def _compare(label, found, expected, scale, tolerance):
    found = _double(found)
    if np.isnan(found).any():
        raise AssertionError(f"{label} left elements unwritten, so it is not timed")
    error = (np.abs(found - expected) / scale).max()
    if not error <= tolerance:
        raise AssertionError(f"{label} is wrong, so it is not timed: error {error:.2e}")
