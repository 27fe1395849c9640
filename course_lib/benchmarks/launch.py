"""What a launch costs the host: ours beside PyTorch's operators and plain numba-cuda."""

import torch

from course_lib import bench, cuda
from course_lib.runtime.compile.fingerprint import fingerprint
from course_lib.runtime.host.launch import launch

NAME, SHAPE = "launch.host", (128, 200)
COMMAND = "python -m course_lib bench launch --record"


@cuda.jit
def touch_kernel(x, y):
    """As little work as a kernel of two arrays can do: the time is the launch."""
    i = cuda.grid(1)
    if i == 0:
        y[0, 0] = x[0, 0]


def run(*, rounds=30, progress=lambda cases: cases):
    """One record, of host times: µs until the host may go on, the GPU not waited for."""
    x = torch.randn(SHAPE, device="cuda")
    y = torch.empty_like(x)
    candidates = {
        "numba-cuda": lambda: touch_kernel[100, 256](x, y),
        "runtime.launch": lambda: launch(touch_kernel, 100, 256, x, y),
        "torch.softmax": lambda: torch.softmax(x, -1),
        "torch.relu": lambda: torch.relu(x),
    }
    for _ in progress(["host time of a launch"]):
        timings = bench.host_times(candidates, rounds=rounds)
    reference = timings["torch.softmax"]
    rows = [
        {
            "label": label,
            "kind": "peer" if label.startswith("torch") else "ours",
            "microseconds": round(timing.microseconds, 3),
            "quartiles": [round(q, 3) for q in timing.quartiles],
            "ratio_to_softmax": round(timing.microseconds / reference.microseconds, 2),
        }
        for label, timing in timings.items()
    ]
    digest = kernel_hashes()[NAME]
    return [bench.host_record(NAME, SHAPE, "float32", rows, digest, COMMAND)]


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {NAME: fingerprint(touch_kernel)}
