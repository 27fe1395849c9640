"""EfficientNet-B4 on a GPU, before and after its squeeze-and-excitation blocks run our kernels.

A training step (forward, loss, backward, AdamW) and inference, of 32 images of 380 × 380, in
float32 (TF32 allowed) and in bfloat16 by autocast, contiguous and channels-last, in turns. A
profile says where the step's time goes, and Amdahl's law what swapping the blocks can bring: both
stand beside what is measured. A slow host holds such a step up, which launches thousands of
kernels; so the step is also replayed as a CUDA graph, which takes as long as its kernels.
"""

import copy
import time

import torch
import torchvision

from course_lib import bench
from course_lib.benchmarks import gpu, network_profile
from course_lib.benchmarks.case import FORMATS
from course_lib.benchmarks.network_profile import BLOCK
from course_lib.benchmarks.squeeze_excite import kernel_hash
from course_lib.nn import replace_layers

SHAPE = (32, 3, 380, 380)
DTYPES = ("float32", "bfloat16")
N_CLASSES = 5
STEP, INFERENCE = "efficientnet.step", "efficientnet.inference"
COMMAND = "python -m course_lib bench efficientnet --record"
DEVICE = "cuda"
BEFORE, AFTER = "PyTorch eager", "ours"
WARM_UP = 3  # steps before any is timed: cuDNN tries its algorithms
TOLERANCE = 1e-5  # of the outputs, ‖a − b‖ ÷ ‖b‖, in float32 without TF32


def run(*, dtypes=DTYPES, rounds=8, progress=lambda cases: cases):
    """Check, then time, each type. Returns records: a training step, and inference."""
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    before = cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32
    try:
        check()
        cudnn.benchmark = cudnn.allow_tf32 = matmul.allow_tf32 = True
        return bench.collected(
            record for dtype in progress(dtypes) for record in _measure(dtype, rounds)
        )
    finally:
        cudnn.benchmark, cudnn.allow_tf32, matmul.allow_tf32 = before


def network():
    """What is measured, as torchvision makes it."""
    return torchvision.models.efficientnet_b4(num_classes=N_CLASSES)


def check():
    """AssertionError if the network says something else once its blocks are swapped."""
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    theirs = network().eval().to(DEVICE)
    ours = copy.deepcopy(theirs)
    n_swapped, n_blocks = swap_blocks(ours), len(blocks_of(theirs))
    if n_swapped != n_blocks:
        raise AssertionError(f"only {n_swapped} of {n_blocks} blocks were swapped")
    x = torch.randn(2, *SHAPE[1:], device=DEVICE)
    with torch.no_grad():
        expected = theirs(x)
        error = ((ours(x) - expected).norm() / expected.norm()).item()
    if not error <= TOLERANCE:
        raise AssertionError(f"the outputs are wrong, so nothing is timed: by {error:.2e}")


def blocks_of(model):
    """The squeeze-and-excitation blocks, swapped or not."""
    return [m for m in model.modules() if isinstance(m, torchvision.ops.SqueezeExcitation)]


def swap_blocks(model):
    """Let the squeeze-and-excitation blocks alone run our kernels. Returns how many there are."""
    return len(replace_layers(model, types=[torchvision.ops.SqueezeExcitation]).replaced)


class Training:
    """A network, its optimiser and a batch, in one layout."""

    def __init__(self, model, dtype, layout, *, swap):
        self.model = model.to(DEVICE, memory_format=FORMATS[layout])
        if swap:
            swap_blocks(self.model)
        self.blocks = blocks_of(self.model)
        self.layout, self.autocast = layout, dtype != "float32"
        self.kind = getattr(torch, dtype)
        self.x = torch.randn(SHAPE, device=DEVICE).to(memory_format=FORMATS[layout])
        self.target = torch.randint(N_CLASSES, SHAPE[:1], device=DEVICE)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=True, capturable=DEVICE == "cuda"
        )

    def _outputs(self):
        with torch.autocast(DEVICE, self.kind, enabled=self.autocast):
            return self.model(self.x)

    def step(self):
        """One step of training."""
        self.model.train()
        self.optimiser.zero_grad(set_to_none=True)
        loss = torch.nn.functional.cross_entropy(self._outputs().float(), self.target)
        loss.backward()
        self.optimiser.step()

    def infer(self):
        """One batch without gradients."""
        self.model.eval()
        with torch.no_grad():
            self._outputs()


def _measure(dtype, rounds):
    model = network()
    candidates = {
        (who, layout): Training(copy.deepcopy(model), dtype, layout, swap=who == AFTER)
        for layout in FORMATS
        for who in (BEFORE, AFTER)
    }
    for name, method in ((STEP, "step"), (INFERENCE, "infer")):
        functions = {case: getattr(each, method) for case, each in candidates.items()}
        device, host = times(functions, rounds)
        layouts = {who: better_layout(device, who) for who in (BEFORE, AFTER)}
        rows = [_row(case, layouts, device, host) for case in _in_order(functions, layouts)]
        record = bench.host_record(name, SHAPE, dtype, rows, kernel_hashes()[name], COMMAND)
        before, after = (row["microseconds"] for row in rows[:2])
        record |= {"default": AFTER, "layouts": layouts, "ratio": round(before / after, 4)}
        record |= {"tf32": True, "autocast": dtype != "float32"}
        if name == STEP:
            record |= explained(candidates, layouts[BEFORE], rounds)
        yield record


def times(functions, rounds):
    """({label: Timing} between events on the device, {label: Timing} by the host's clock)."""
    device, host = ({label: [] for label in functions} for _ in range(2))
    for turn in range(WARM_UP + rounds):
        for label, function in functions.items():
            start, end = _event(), _event()
            gpu.synchronize()
            begun = time.perf_counter()
            start.record()
            function()
            end.record()
            gpu.synchronize()
            elapsed = time.perf_counter() - begun
            if turn >= WARM_UP:
                device[label].append(start.elapsed_time(end) * 1e3)
                host[label].append(elapsed * 1e6)
    return [
        {label: bench.Timing.of(found) for label, found in samples.items()}
        for samples in (device, host)
    ]


def better_layout(timings, who):
    """The memory format in which this side's network is faster."""
    return min(FORMATS, key=lambda layout: timings[who, layout].microseconds)


def _in_order(cases, layouts):
    """Each side in its better layout, before and after; then the others."""
    return sorted(cases, key=lambda case: (layouts[case[0]] != case[1], case[0] != BEFORE))


def _row(case, layouts, device, host):
    who, layout = case
    return {
        "label": who if layouts[who] == layout else f"{who}, {layout}",
        "kind": "ours" if who == AFTER else "peer",
        "microseconds": round(device[case].microseconds, 1),
        "quartiles": [round(quartile, 1) for quartile in device[case].quartiles],
        "python_microseconds": round(host[case].microseconds, 1),
        "python_quartiles": [round(quartile, 1) for quartile in host[case].quartiles],
        "images_per_second": round(SHAPE[0] / host[case].microseconds * 1e6, 1),
    }


def explained(candidates, layout, rounds):
    """The fields of a record that explain its ratio, in one layout.

    Profiles, the step as a CUDA graph, and Amdahl's law for that.
    """
    pair = {"before": candidates[BEFORE, layout], "after": candidates[AFTER, layout]}
    profiles = {when: network_profile.groups(each.step, each.blocks) for when, each in pair.items()}
    graphs = {when: _as_graph(each, rounds) for when, each in pair.items()}
    by_removal = {}
    for when, each in pair.items():
        with network_profile.removed(each.blocks):
            by_removal[when] = round(graphs[when] - _as_graph(each, rounds), 1)
    blocks = [profiles[when][BLOCK] for when in pair]
    kernels = {when: round(found["all"], 1) for when, found in profiles.items()}
    return {
        "profile_layout": layout,
        "profile": {
            when: {group: round(found[group], 1) for group in network_profile.GROUPS}
            for when, found in profiles.items()
        },
        "kernel_microseconds": kernels,
        "graph_microseconds": graphs,
        "blocks_by_removal": by_removal,
        "amdahl": amdahl(*graphs.values(), *blocks),
    }


def _as_graph(training, rounds):
    """µs of a step that is replayed as a CUDA graph."""
    found = bench.device_times({"step": lambda _: training.step()}, calls=1, rounds=rounds)
    return round(found["step"].microseconds, 1)


def amdahl(before, after, block_before, block_after):
    """What a step should gain, and does, from µs of the step and of its blocks, before and after.

    If a part that takes the share f becomes s times as fast, the whole becomes 1 / (1 − f + f/s)
    times as fast.
    """
    share, speedup = block_before / before, block_before / block_after
    possible = block_before * (1 - 1 / speedup)
    return {
        "share": round(share, 4),
        "block_speedup": round(speedup, 3),
        "predicted_ratio": round(1 / (1 - share + share / speedup), 4),
        "limit_ratio": round(1 / (1 - share), 4) if share < 1 else None,
        "measured_ratio": round(before / after, 4),
        "possible_microseconds": round(possible, 1),
        "saved_microseconds": round(before - after, 1),
        "saved_of_possible": round((before - after) / possible, 3) if possible else None,
    }


def kernel_hashes():
    """{record name: hash of our kernels that take part}."""
    return {STEP: kernel_hash("both"), INFERENCE: kernel_hash("forward")}


def _event():
    return torch.cuda.Event(enable_timing=True)
