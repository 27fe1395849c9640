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

from course_lib import reference
from course_lib.benchmarks.case import (
    COMPILED,
    EAGER,
    Case,
    Work,
    compiled,
    copies,
    judge,
    rotating,
    runner,
    size,
)
from course_lib.kernels import bn_relu_softmax, softmax_dropout

SHAPES = [(1024, 1000), (49152, 1024), (16384, 8192)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 2
DIRECTIONS = ("forward", "backward", "both")
COMMAND = "python -m course_lib bench fused_softmax --record"
P, SEED, EPS = 0.1, 2014, 1e-5
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

    def __init__(self, make, shape, dtype):
        self.x = make.normal(*shape, dtype=dtype, scale=3)
        self.dz = make.normal(*shape, dtype=dtype)
        self.z, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)
        self.outputs = {"forward": [self.z], "backward": [self.dx], "both": [self.z, self.dx]}
        _, self.stats = softmax_dropout.forward(self.x, P, SEED, 0, out=self.z)
        if not make.is_empty:
            self.y = F.softmax(self.x, -1)
            self.mask = torch.rand(shape, device=make.device) >= P

    def ours_forward(self, variant):
        _, self.stats = softmax_dropout.forward(self.x, P, SEED, 0, variant=variant, out=self.z)
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

    def __init__(self, make, shape, dtype):
        self.x, self.dy = (make.normal(*shape, dtype=dtype) for _ in range(2))
        mean, weight, bias = (make.normal(shape[1]) for _ in range(3))
        self.parameters = mean, make.uniform(shape[1], low=0.5), weight, bias
        self.y, self.dx = torch.empty_like(self.x), torch.empty_like(self.x)
        self.outputs = {"forward": [self.y], "backward": [self.dx], "both": [self.y, self.dx]}
        if make.is_empty:
            return
        # Where z is nearly 0, rounding would decide what ReLU does.
        z = F.batch_norm(self.x.float(), *self.parameters, eps=EPS)
        self.x[z.abs() < 1e-4] += 0.5
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
        sums = torch.zeros(2, 2, len(mean), dtype=torch.double, device=self.x.device)
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


def cases(*, shapes=None, dtypes=None):
    """Both operations in each direction at each shape, (rows, columns), and dtype."""
    for shape in map(tuple, shapes or SHAPES):
        for dtype in dtypes or DTYPES:
            for operation in OPERATIONS.values():
                for direction in DIRECTIONS:
                    yield _case(operation, direction, shape, dtype)


def draw(generator):
    """A shape that nobody chose."""
    n_cols = size(generator, 16, 8192)
    return size(generator, 16, max(17, (1 << 27) // n_cols)), n_cols


def _case(operation, direction, shape, dtype):
    n_bytes = operation.n_arrays[direction] * math.prod(shape) * getattr(torch, dtype).itemsize
    build = functools.partial(_build, operation, direction, shape, dtype, n_bytes)
    name = f"{operation.name}.{direction}"
    default = operation.module.FORWARD.auto[0]
    return Case(name, shape, dtype, COMMAND, n_bytes, build, default=default)


def _build(operation, direction, shape, dtype, n_bytes, make, n_sets):
    sets = [operation(make, shape, dtype) for _ in range(n_sets)]
    function = getattr(operation, f"peer_{direction}")

    def ours(one, rung):
        if direction == "forward":
            return one.ours_forward(rung)
        if direction == "backward":
            return one.ours_backward(rung)
        return one.ours_forward(rung)[0], one.ours_backward(rung)[1]

    def peer(function):
        return rotating(lambda one: function(*one.arguments(direction)), sets)

    def judged(label, found, is_ours):
        tolerance = (_TOLERANCE if is_ours else _PEER_TOLERANCE)[dtype]
        if label == "naive":
            tolerance += max(shape) * ROUNDING
        sets[0].check(label, *found, is_ours, tolerance)

    return Work(
        {
            rung: rotating(lambda one, rung=rung: ours(one, rung), sets)
            for rung in operation.module.FORWARD
        },
        lambda: {EAGER: peer(function), COMPILED: peer(compiled(function))},
        lambda: judged,
        sets[0].outputs[direction],
        lambda: copies(make, n_bytes, n_sets),
    )


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
    judge(label, (np.abs(_double(found) - expected) / scale).max(), tolerance)


run = runner(cases, rounds=20)
