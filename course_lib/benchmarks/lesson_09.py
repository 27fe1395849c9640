"""What lesson 9 measures: the gradient of x scattered with atomics, and gathered.

The two kernels of the lesson, a thread for each result of the forward pass or for each pixel, and
nothing else about them is different. A second run of each on the same input tells how many numbers
of dx have other bits.
"""

import numpy as np
import torch

from course_lib import bench, cuda
from course_lib.runtime.host.launch import launch

#: (N, C, K, H), filters of 3 × 3 with padding 1.
SHAPES = [(8, 32, 32, 28)]
N_DIMS = 4
DEVICE = "cuda"
BLOCK_SIZE = 256
ALLOWED = 1e-5  # ‖found − true‖ ÷ ‖true‖, before anything is timed
COMMAND = "python -m course_lib bench lesson_09 --record"
NAME = "lesson_09.dx"
ZERO = np.float32(0)


@cuda.jit
def scatter_dx_kernel(dy, weight, dx, stride, padding):
    C, H, W = dx.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = dy.shape[1:]
    i = cuda.grid(1)
    if i < dy.size:
        n, k, p, q = i // (K * P * Q), i // (P * Q) % K, i // Q % P, i % Q
        for c in range(C):
            for r in range(R):
                for s in range(S):
                    h, w = p * stride - padding + r, q * stride - padding + s
                    if h >= 0 and h < H and w >= 0 and w < W:
                        cuda.atomic.add(dx, (n, c, h, w), dy[n, k, p, q] * weight[k, c, r, s])


@cuda.jit
def gather_dx_kernel(dy, weight, dx, stride, padding):
    C, H, W = dx.shape[1:]
    R, S = weight.shape[2:]
    K, P, Q = dy.shape[1:]
    i = cuda.grid(1)
    if i < dx.size:
        n, c, h, w = i // (C * H * W), i // (H * W) % C, i // W % H, i % W
        total = ZERO
        for r in range(R):
            for s in range(S):
                down, right = h + padding - r, w + padding - s
                p, q = down // stride, right // stride
                met = down % stride == 0 and right % stride == 0
                if met and p >= 0 and p < P and q >= 0 and q < Q:
                    for k in range(K):
                        total += dy[n, k, p, q] * weight[k, c, r, s]
        dx[n, c, h, w] = total


KERNELS = {"scattered with atomics": scatter_dx_kernel, "gathered": gather_dx_kernel}


def run(*, shapes=SHAPES, rounds=10, progress=lambda cases: cases):
    """Check, then time, both; a record for each of `shapes`, (N, C, K, H)."""
    return [_measure(tuple(shape), rounds) for shape in progress(shapes)]


def _measure(shape, rounds):
    N, C, K, H = shape
    dy, weight = torch.randn(N, K, H, H, device=DEVICE), torch.randn(K, C, 3, 3, device=DEVICE)
    dx = torch.empty(N, C, H, H, device=DEVICE)
    expected = torch.nn.grad.conv2d_input(dx.shape, weight.double(), dy.double(), padding=1)
    candidates = {
        label: lambda i, kernel=kernel: _launch(kernel, dy, weight, dx)
        for label, kernel in KERNELS.items()
    }
    differing = {}
    for label, candidate in candidates.items():
        candidate(0)
        first = dx.clone()
        wrong = ((first.double() - expected).norm() / expected.norm()).item()
        if not wrong <= ALLOWED:
            raise AssertionError(f"{label} is wrong, so it is not timed: error {wrong:.2e}")
        candidate(1)
        differing[label] = int((dx != first).sum())
    timings = bench.device_times(candidates, calls=10, rounds=rounds)
    rows = [
        {
            "label": label, "kind": "ours", "microseconds": round(timing.microseconds, 3),
            "quartiles": [round(quartile, 3) for quartile in timing.quartiles],
            "differing": differing[label],
        }
        for label, timing in timings.items()
    ]  # fmt: skip
    return bench.host_record(NAME, shape, "float32", rows, kernel_hashes()[NAME], COMMAND)


def _launch(kernel, dy, weight, dx):
    """Both begin with dx at 0, which only one of them needs: the same work around them."""
    dx.zero_()
    n_threads = dy.numel() if kernel is scatter_dx_kernel else dx.numel()
    launch(kernel, -(-n_threads // BLOCK_SIZE), BLOCK_SIZE, dy, weight, dx, 1, 1)


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {NAME: bench.kernel_hash(KERNELS.values())}
