"""Global average pooling on a GPU: our rungs beside PyTorch, at the shapes of EfficientNet-B4.

The limit of the forward pass is a kernel that reads as many bytes and writes none, that of the
backward pass one that fills as many bytes.
"""

import math

import numpy as np
import torch

from course_lib import bench, cuda, reference
from course_lib.kernels import global_avg_pool as pool
from course_lib.runtime.fingerprint import fingerprint
from course_lib.runtime.intrinsics import store
from course_lib.runtime.launch import launch

# (channels, side) where EfficientNet-B4 (Tan and Le, 2019) squeezes, for images of 380 × 380, and
# its last pooling.
PLANES = [
    (48, 190), (24, 190), (144, 95), (192, 95), (192, 48), (336, 48), (336, 24), (672, 24),
    (960, 24), (960, 12), (1632, 12), (2688, 12), (1792, 12),
]  # fmt: skip
BATCHES = (1, 8, 32)
LARGE = [(64, 192, 95, 95), (32, 48, 190, 190)]
FORMATS = {"contiguous": torch.contiguous_format, "channels-last": torch.channels_last}
DTYPES = ("float32", "bfloat16")
N_DIMS = 4
COMMAND = "python -m course_lib bench global_avg_pool --record"
SAMPLE = 1 << 21  # elements checked: float64 on the CPU takes its time
_TOLERANCE = {"float32": 2e-6, "bfloat16": 8e-3, "float16": 1e-3}


@cuda.jit
def read_kernel(x, y, length):
    """Read all of x; what is written depends on the sum, so that no read can be left out."""
    start = cuda.blockIdx.x * length
    stop = min(start + length, x.shape[0])
    total = pool.vector_sum(x, min(start, stop), stop, 0, cuda.threadIdx.x, pool.BLOCK_SIZE)
    if total == np.float32(-1e30):
        store(y, 0, total)


def run(*, batches=BATCHES, planes=PLANES, large=LARGE, shapes=None, dtypes=DTYPES,
        formats=FORMATS, directions=("forward", "backward"), rounds=15,
        progress=lambda cases: cases):
    """Check, then time, each case: of `shapes`, N·C·H·W, alone if given. Returns records."""
    if shapes is None:
        shapes = [(N, C, side, side) for N in batches for C, side in planes] + list(large)
    cases = [
        (direction, shape, dtype, layout)
        for shape in shapes
        for dtype in dtypes
        for layout in formats
        for direction in directions
    ]
    return [_measure(*case, rounds) for case in progress(cases)]


def _measure(direction, shape, dtype, layout, rounds):
    N, C, H, W = shape
    kind = getattr(torch, dtype)
    n_bytes = N * C * (H * W + 1) * kind.itemsize
    sets = bench.buffer_sets(n_bytes)
    images = [
        torch.randn(shape, device="cuda").to(kind, memory_format=FORMATS[layout])
        for _ in range(sets)
    ]
    planes = [torch.randn(N, C, device="cuda").to(kind) for _ in range(sets)]
    measure = _forward if direction == "forward" else _backward
    candidates, check, limit, kernel = measure(images, planes, layout, sets)
    ours = [label for label in candidates if label != "PyTorch eager"]
    for label, candidate in candidates.items():
        check(label, candidate, _TOLERANCE[dtype] * (1 if label in ours else 4))
    candidates["limit"] = limit
    timings = bench.device_times(candidates, calls=max(20, sets), rounds=rounds)
    least = timings.pop("limit")
    rows = [
        bench.row(label, "ours" if label in ours else "peer", timing, n_bytes, least)
        for label, timing in timings.items()
    ]
    name = f"global_avg_pool.{direction}" + ("" if layout == "contiguous" else f".{layout}")
    record = bench.make_record(
        name, shape, dtype, n_bytes, least, rows, fingerprint(kernel), COMMAND
    )
    return record | {"limit": "read" if direction == "forward" else "fill"}


def _forward(images, planes, layout, sets):
    candidates = {
        variant: lambda i, variant=variant: pool.forward(
            images[i % sets], variant=variant, out=planes[i % sets]
        )
        for variant in pool.VARIANTS
    }
    candidates["PyTorch eager"] = lambda i: torch.mean(
        images[i % sets], (2, 3), out=planes[i % sets]
    )

    def check(label, candidate, tolerance):
        planes[0].fill_(math.nan)
        candidate(0)
        if planes[0].isnan().any():
            raise AssertionError(f"{label} left elements unwritten, so it is not timed")
        some = _some_planes(images[0])
        x = images[0].flatten(0, 1)[:some].double().cpu().numpy()[None]
        expected, actual = reference.global_avg_pool(x)[0], planes[0].flatten()[:some]
        _compare(label, actual.double().cpu().numpy(), expected, np.abs(x).mean(), tolerance)

    n = images[0].numel()
    n_blocks = min(132 * 8, math.ceil(n / 4096))
    length = math.ceil(n / n_blocks / 1024) * 1024

    def limit(i):
        launch(
            read_kernel, n_blocks, pool.BLOCK_SIZE, images[i % sets], planes[i % sets], length,
            flat=True,
        )  # fmt: skip

    kernel = pool.vectorised_block_kernel
    if layout != "contiguous":
        kernel = pool.nhwc.vectorised_kernel
    return candidates, check, limit, kernel


def _backward(images, planes, layout, sets):
    N, C, H, W = images[0].shape
    last = layout != "contiguous"
    candidates = {
        variant: lambda i, variant=variant: pool.backward(
            planes[i % sets], (H, W), channels_last=last, variant=variant, out=images[i % sets]
        )
        for variant in pool.BACKWARD_VARIANTS
    }
    # What autograd runs for mean((2, 3)).
    candidates["PyTorch eager"] = lambda i: torch.div(
        planes[i % sets][:, :, None, None].expand(N, C, H, W), H * W, out=images[i % sets]
    )

    def check(label, candidate, tolerance):
        images[0].fill_(math.nan)
        candidate(0)
        if images[0].isnan().any():
            raise AssertionError(f"{label} left elements unwritten, so it is not timed")
        some = _some_planes(images[0])
        dy = planes[0].flatten()[:some].double().cpu().numpy()
        expected = reference.global_avg_pool_backward(dy[None], (H, W))[0]
        actual = images[0].flatten(0, 1)[:some].double().cpu().numpy()
        _compare(label, actual, expected, np.abs(expected).max(), tolerance)

    def limit(i):
        images[i % sets].fill_(1)

    kernel = pool.nhwc.vectorised_backward_kernel if last else pool.vectorised_backward_kernel
    return candidates, check, limit, kernel


def _some_planes(images):
    return max(1, SAMPLE // math.prod(images.shape[2:]))


def _compare(label, actual, expected, scale, tolerance):
    error = np.abs(actual - expected).max() / scale
    if not error <= tolerance:  # a NaN fails too
        raise AssertionError(f"{label} is wrong, so it is not timed: error {error:.2e}")
