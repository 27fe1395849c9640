"""Squeeze and excitation in float64 on the device, and what a candidate is held to.

The NumPy reference takes seconds for the tensors that are measured; this takes milliseconds, and a
test holds the two together.
"""

import torch

CHUNK = 1 << 24  # elements taken to float64 at once
# The largest error allowed before anything is timed: of y and dx relative to the plane's largest
# value (dx: to the sum of its two terms), of the weights' gradients to the largest. 16-bit results
# are rounded by half a unit. Peers round what their operators hand to one another, and their
# convolutions may use TF32, hence their own.
TOLERANCE = {"float32": 1e-5, "bfloat16": 2.0**-8, "float16": 2.0**-11}
PEER_TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2, "float16": 2e-2}
#: How much more is allowed where numbers of either sign are summed over planes and images.
SUMS = 10


class Expected:
    """What a `Block` must give for buffer set 0, forward or both ways."""

    def __init__(self, block, direction):
        self.dtype, self.both = block.dtype, direction == "both"
        self.x, self.dy = (each[block.layout] for each in (block.sets[0].x, block.sets[0].dy))
        weight1, bias1, weight2, bias2 = (w.flatten(1).double() if w.dim() > 1 else w.double()
                                          for w in block.weights)  # fmt: skip
        P = self.x[0, 0].numel()
        mean = self._planes(lambda x, dy: x.sum((2, 3))) / P
        hidden = mean @ weight1.t() + bias1
        half = hidden.sigmoid()
        self.gate = ((hidden * half) @ weight2.t() + bias2).sigmoid()
        if not self.both:
            return
        ds = self._planes(lambda x, dy: (dy * x).sum((2, 3)))
        dlogit = ds * self.gate * (1 - self.gate)
        dhidden = (dlogit @ weight2) * half * (1 + hidden * (1 - half))
        self.share = dhidden @ weight1 / P
        self.sums = {
            "dweight1": dhidden.t() @ mean,
            "dbias1": dhidden.sum(0),
            "dweight2": dlogit.t() @ (hidden * half),
            "dbias2": dlogit.sum(0),
        }

    def _chunks(self):
        """Slices of the images, and these images in float64."""
        step = max(1, CHUNK // self.x[0].numel())
        for start in range(0, len(self.x), step):
            part = slice(start, start + step)
            yield part, self.x[part].double(), self.dy[part].double() if self.both else None

    def _planes(self, function):
        return torch.cat([function(x, dy) for _, x, dy in self._chunks()])

    def check(self, label, found, *, ours):
        """Raise AssertionError if `found`, y and with backward the gradients, is not right."""
        tolerance = (TOLERANCE if ours else PEER_TOLERANCE)[self.dtype]
        y, *gradients = found
        if len(gradients) != 5 * self.both:
            raise AssertionError(f"{label} gave {len(found)} results, so it is not timed")
        for part, x, dy in self._chunks():
            gate = self.gate[part, :, None, None]
            _compare(label, "y", y[part], x * gate, 0, tolerance)
            if self.both:
                share = self.share[part, :, None, None]
                expected = dy * gate + share
                _compare(label, "dx", gradients[0][part], expected, share.abs(), tolerance)
        if not self.both:
            return
        for (name, expected), actual in zip(self.sums.items(), gradients[1:], strict=True):
            error = (actual.double().reshape(expected.shape) - expected).abs().max()
            _judge(label, name, (error / expected.abs().max()).item(), SUMS * tolerance)


def _compare(label, name, found, expected, more, tolerance):
    scale = expected.abs().amax((2, 3), keepdim=True) + more
    error = (found.double() - expected).abs() / scale
    _judge(label, name, error.max().item(), tolerance)


def _judge(label, name, error, tolerance):
    if error != error:
        raise AssertionError(f"{label} left elements of {name} unwritten, so it is not timed")
    if not error <= tolerance:
        raise AssertionError(f"{label} is wrong, so it is not timed: {name} by {error:.2e}")
