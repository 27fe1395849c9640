"""Where a training step's time on the device goes, by groups: one is squeeze and excitation.

Two ways that know nothing of each other: PyTorch's profiler, which tells every kernel's time and
what launched it, and the step without its blocks.
"""

import contextlib

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

BLOCK = "squeeze-and-excitation"
GROUPS = ("convolution", "batch norm", BLOCK, "activation", "other")
#: Group -> what is found in the name of an operation, or of one that it is a part of.
WORDS = {
    "convolution": ("conv",),
    "batch norm": ("batch_norm", "batchnorm"),
    "activation": ("silu",),
}
OUR_KERNEL = "squeeze_excite"  # in the name of each of our blocks' kernels


@contextlib.contextmanager
def marked(blocks):
    """Within, the profiler sees a range called `BLOCK` around the forward pass of each block."""
    open_ranges = []

    def begin(module, inputs):
        found = record_function(BLOCK)
        found.__enter__()
        open_ranges.append(found)

    def end(module, inputs, output):
        open_ranges.pop().__exit__(None, None, None)

    handles = [block.register_forward_pre_hook(begin) for block in blocks]
    handles += [block.register_forward_hook(end) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def groups(step, blocks, *, steps=2):
    """{group: µs of device time in one call of `step`}, and "all": that of all kernels."""
    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with marked(blocks), profile(activities=activities) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    events = found.events()
    kernels = [
        event for event in events
        if event.device_type == DeviceType.CUDA and not event.is_user_annotation
    ]  # fmt: skip
    sums = grouped(events, _launched)
    sums[BLOCK] += sum(k.time_range.elapsed_us() for k in kernels if OUR_KERNEL in k.name)
    total = sum(kernel.time_range.elapsed_us() for kernel in kernels)
    sums["other"] += total - sum(sums.values())  # what no operation is known to have launched
    return {name: value / steps for name, value in (sums | {"all": total}).items()}


def _launched(event):
    """µs of the kernels that an operation launched itself; ours are counted by their names."""
    return sum(kernel.duration for kernel in event.kernels if OUR_KERNEL not in kernel.name)


def grouped(events, time_of):
    """{group: the sum of `time_of(event)`} over the operations among a profiler's `events`.

    What runs backward belongs to the blocks if what it is the gradient of does: both bear one
    number, which autograd gives out in the order of the operations.
    """
    events = [event for event in events if event.device_type == DeviceType.CPU]
    numbers = {
        (event.thread, event.sequence_nr)
        for event in events
        if event.sequence_nr >= 0 and any(each.name == BLOCK for each in _above(event))
    }
    sums = dict.fromkeys(GROUPS, 0.0)
    for event in events:
        if spent := time_of(event):
            sums[_group([event, *_above(event)], numbers)] += spent
    return sums


def _above(event):
    while (event := event.cpu_parent) is not None:
        yield event


def _group(chain, numbers):
    for event in chain:
        backward = event.scope == 1 or event.name.startswith("autograd::engine")
        if event.name == BLOCK:
            return BLOCK
        if backward and (event.fwd_thread, event.sequence_nr) in numbers:
            return BLOCK
    for group, words in WORDS.items():
        if any(word in event.name.lower() for event in chain for word in words):
            return group
    return "other"


@contextlib.contextmanager
def removed(blocks):
    """Within, the blocks hand their input on: what a step takes less of time is theirs."""
    for block in blocks:
        block.forward = lambda x: x
    try:
        yield
    finally:
        for block in blocks:
            del block.forward
