"""What a softmax costs the host: `nn.Softmax` beside PyTorch's, and where the microseconds go.

The GPU is not waited for, so this is the time until Python may go on. Calls are timed under
`no_grad`, and with autograd recording. The parts are differences between calls that contain one
another, from the medians of the same run; they add up to `nn.Softmax`, recorded.
"""

import hashlib
import inspect

import torch

from course_lib import bench, nn, ops
from course_lib.kernels.softmax import softmax
from course_lib.ops import registration
from course_lib.runtime.host import launch as launching
from course_lib.runtime.host.launch_cache import cached_launch
from course_lib.runtime.host.specialisation import PreparedLaunch

SHAPE = (128, 200)
COMMAND = "python -m course_lib bench host --record"
NAME = "softmax.host"


def run(*, rounds=30, progress=lambda cases: cases):
    """One record. Its rows have `kind`, and calls that record for autograd a label that says so."""
    x = torch.randn(SHAPE, device="cuda")
    leaf = x.clone().requires_grad_()
    ours, theirs = nn.Softmax(dim=-1), torch.nn.Softmax(dim=-1)
    operator = torch.ops.course_lib.softmax.default
    torch.testing.assert_close(ours(x), theirs(x))
    launch, by_numba = _launches(x)
    silent = {
        "torch.nn.Softmax": lambda: theirs(x),
        "torch.softmax": lambda: torch.softmax(x, -1),
        "nn.Softmax": lambda: ours(x),
        "ops.softmax": lambda: ops.softmax(x),
        "kernels.softmax": lambda: softmax.forward(x),
        "torch.ops.course_lib.softmax": lambda: operator(x, -1, None),
        "numba-cuda": by_numba,
        "launch": launch,
        "new tensor": lambda: torch.empty_like(x),
    }
    recorded = {
        "torch.nn.Softmax": lambda: theirs(leaf),
        "torch.softmax": lambda: torch.softmax(leaf, -1),
        "nn.Softmax": lambda: ours(leaf),
        "ops.softmax": lambda: ops.softmax(leaf),
        "torch.ops.course_lib.softmax": lambda: operator(leaf, -1, None),
    }
    rows = []
    for _ in progress(["host time of a softmax"]):
        with torch.no_grad():
            times = bench.host_times(silent, rounds=rounds)
        with_graph = bench.host_times(recorded, rounds=rounds)
    parts = [(label, times.pop(label)) for label in ("launch", "new tensor")]
    rows += _calls(times, "")
    rows += _calls(with_graph, ", recorded")
    rows += _parts(times, with_graph, dict(parts))
    digest = kernel_hashes()[NAME]
    return [bench.host_record(NAME, SHAPE, "float32", rows, digest, COMMAND)]


def _launches(x):
    """The bare launch that a softmax of `x` comes to: prepared, and numba-cuda's own way."""
    y = torch.empty_like(x)
    with launching.recorded() as launches:
        softmax.forward(x, out=y)
    ((kernel, grid, block, args, options),) = launches
    prepared = launching.prepare(kernel, grid, block, *args, **options)
    addresses = x.data_ptr(), y.data_ptr()
    flat = [arg.view(-1) if torch.is_tensor(arg) else arg for arg in args]
    configured = kernel[grid, block]
    return lambda: prepared.launch(addresses), lambda: configured(*flat)


def _calls(times, suffix):
    peer = times["torch.nn.Softmax"].microseconds
    return [
        {
            "label": label + suffix,
            "kind": "peer" if label in ("torch.nn.Softmax", "torch.softmax") else "ours",
            "microseconds": round(timing.microseconds, 3),
            "quartiles": [round(q, 3) for q in timing.quartiles],
            "ratio_to_module": round(timing.microseconds / peer, 2),
        }
        for label, timing in times.items()
    ]


def _parts(times, recorded, parts):
    micros = {label: timing.microseconds for label, timing in (times | parts).items()}
    forward, function, module = (
        micros[label] for label in ("kernels.softmax", "ops.softmax", "nn.Softmax")
    )
    found = {
        "the driver's launch": micros["launch"],
        "a tensor for y": micros["new tensor"],
        "the prepared launch looked up": forward - micros["launch"] - micros["new tensor"],
        "who wants a say?": function - forward,
        "the module's call": module - function,
        "autograd's node": recorded["nn.Softmax"].microseconds - module,
    }
    return [
        {"label": f"part: {label}", "kind": "ours", "microseconds": round(value, 3)}
        for label, value in found.items()
    ]


def kernel_hashes():
    """{name of the record: hash of the kernels and of the host's functions measured}."""
    host = (
        registration.Operator.__call__, registration.dispatcher_is_idle, cached_launch,
        PreparedLaunch.launch,
    )  # fmt: skip
    # By their text: what they refer to differs between a GPU and the simulator.
    texts = [bench.kernel_hash(softmax.FORWARD["registers"].kernels), *map(inspect.getsource, host)]
    return {NAME: hashlib.sha256("\n".join(texts).encode()).hexdigest()}
