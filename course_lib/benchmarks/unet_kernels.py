"""Which kernels a training step of the U-Net launches, and how long they take (torch.profiler).

Kernels are told by their names: ours bear the module that they are of, cuDNN's and PyTorch's what
they do. A transposed convolution is launched as the gradient of a convolution, by either side, so
the two are one family.
"""

import re

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from course_lib import bench

NAME = "unet.kernels"
#: Family -> what the names of its kernels are known by, in any case; the first that fits counts.
FAMILIES = {
    "Adam": r"optimizers|multi_tensor_apply|adam",
    "loss": r"cross_entropy|nll_loss|softmax",
    "batch norm, ReLU within": r"batch_?norm|bn_fw|bn_bw|cudnn.*norm",
    "max pooling": r"max_?pool",
    "convolution, transposed too": r"conv_transpose2d|conv2d|convolve|implicit|xmma|cutlass|gemm|"
    r"[fdw]grad|fprop|winograd|cudnn|nchwtonhwc|nhwctonchw|fft",
    "ReLU": r"relu|threshold|clamp|activation",
    "concatenation": r"catarray",
}
REST = "copies, sums, fills"
STEPS, WARM_UP = 3, 3


def measure(steps, shape, dtype, command, kernel_hash):
    """The record of `steps`, {who: function that makes a step}; the first of them is ours."""
    rows, whole = [], {}
    for who, step in steps.items():
        for _ in range(WARM_UP):
            step()
        spent = by_family(device_events(step, STEPS))
        whole[who] = sum(spent.values()) / STEPS
        if not whole[who]:
            raise AssertionError(f"the profiler saw no kernel of {who}")
        kind = "ours" if who == next(iter(steps)) else "peer"
        rows += [_row(who, family, kind, us / STEPS, whole[who]) for family, us in spent.items()]
    record = bench.host_record(NAME, shape, dtype, rows, kernel_hash, command)
    return record | {"step_microseconds": {who: round(us, 1) for who, us in whole.items()}}


def _row(who, family, kind, us, whole):
    return {
        "label": f"{who}: {family}", "kind": kind, "family": family, "microseconds": round(us, 1),
        "share": round(us / whole, 4),
    }  # fmt: skip


def family_of(name):
    """The family of a kernel's name; `REST` where none is known by it."""
    for family, known_by in FAMILIES.items():
        if re.search(known_by, name, re.IGNORECASE):
            return family
    return REST


def by_family(events):
    """{family: µs of its kernels}, those that have any, the longest first."""
    found = {}
    for name, start, end in events:
        family = family_of(name)
        found[family] = found.get(family, 0.0) + end - start
    return dict(sorted(found.items(), key=lambda item: -item[1]))


def device_events(step, steps=1):
    """[(name, start, end)] in µs of what the GPU did in `steps` calls: kernels, copies, fills."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]


def share_hidden(events, known_by="HtoD"):
    """How much of the time of some events, 0 to 1, kernels were running; None without any.

    known_by  what their names have in them; by default copies from the host
    """
    hidden, kernels = [], []
    for name, start, end in events:
        if known_by in name:
            hidden.append((start, end))
        elif not re.match("Memcpy|Memset", name):
            kernels.append((start, end))
    runs = []  # of kernels, of one or several streams: the time that they cover
    for start, end in sorted(kernels):
        if runs and start <= runs[-1][1]:
            runs[-1][1] = max(runs[-1][1], end)
        else:
            runs.append([start, end])
    whole = sum(end - start for start, end in hidden)
    covered = sum(
        max(0.0, min(end, last) - max(start, first))
        for start, end in hidden
        for first, last in runs
    )
    return covered / whole if whole else None
