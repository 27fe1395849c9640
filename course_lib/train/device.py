"""On what a run computes, and how: one policy for all that trains.

`choose` finds the device, `settled` sets PyTorch up for it, `compiled` and `checkpointed` change
how a network computes (in which arithmetic, `step` says). What concerns MPS follows PyTorch's
documentation and is tested with stand-ins: no Apple hardware has run it.
"""

import contextlib
import copy
import re

import torch
from torch.torch_version import TorchVersion

from course_lib import device
from course_lib.models.pathways import rest_in_backward_passes

from .randomness import repeatable
from .step import PRECISIONS, arithmetic, autocast

ORDER = "mps", "cuda", "cpu"
TWO = "two devices are for a network of two pathways, in `train images`"
MENDED = "2.14"  # the first PyTorch with channels-last batch norm right on MPS
AMPERE = 8, 0  # the first compute capability with TF32 and bfloat16


def choose(name, precision="float32", known=PRECISIONS):
    """The torch device called `name` that can compute in `precision`, one of those `known`.

    name  "mps", "cuda", "cuda:1", "cpu"; None or "auto": the first of MPS, CUDA and the CPU that is
          here

    Raises ValueError for a device that is not here or lacks the precision.
    """
    if precision not in known:
        raise ValueError(f"precision must be {' or '.join(known)}, not {precision!r}")
    name = device.best(ORDER) if name in (None, "auto") else name
    if "," in name:
        raise ValueError(f"{TWO}: name one here, not {name!r}")
    found = re.fullmatch(r"cpu|mps|cuda(?::(\d+))?", name)
    if not found:
        raise ValueError(
            f"the device must be auto, mps, cpu, cuda, or a GPU by number (cuda:1); not {name!r}"
        )
    if name.startswith("cuda") and int(found[1] or 0) >= device.count():
        raise ValueError(f"there is no {name} here: the CUDA driver reports {device.count()} GPUs")
    if name == "mps" and not _has_mps():
        raise ValueError("there is no mps here: PyTorch finds no GPU of Apple's")
    place = torch.device(name)
    if place.type == "cuda" and precision in ("tf32", "bfloat16"):
        if torch.cuda.get_device_capability(place) < AMPERE:
            chip = torch.cuda.get_device_name(place)
            raise ValueError(f"{chip} has no {precision}: choose float32")
    return place


def choose_all(name, precision="float32"):
    """The torch devices in `name`, one as `choose` takes it, or two, such as "cuda:0,cuda:1".

    Raises ValueError as `choose`, for two devices of different kinds, and for a GPU named twice
    (the CPU may be).
    """
    if name is None or "," not in name:
        return (choose(name, precision),)
    places = tuple(choose(each.strip(), precision) for each in name.split(","))
    if len(places) != 2 or places[0].type != places[1].type:
        raise ValueError(f"devices must be two of one kind, such as cuda:0,cuda:1; not {name!r}")
    if places[0].type != "cpu" and len({place.index or 0 for place in places}) == 1:
        raise ValueError(f"{name!r} names one GPU twice: name two, such as cuda:0,cuda:1, or one")
    return places


def spread(model, places):
    """`model` on one device, or a pathway on each of two. ValueError where it has no pathways."""
    if len(places) == 1:
        return model.to(places[0])
    if not hasattr(model, "spread"):
        raise ValueError(
            f"{TWO}, and {type(model).__name__} has none: name one device, or choose the model "
            "continuous_integration"
        )
    return model.spread(*places)


def _has_mps():
    try:
        return device.best(("mps",)) == "mps"
    except device.DeviceError:
        return False


def half_of(place):
    """The precision of half the bits to train in on `place`: bfloat16 where it is fast."""
    if place.type == "cuda" and torch.cuda.get_device_capability(place) < AMPERE:
        return "float16"
    return "float16" if place.type == "mps" else "bfloat16"


def sums_dtype(place):
    """The widest floating dtype on `place`: MPS has no float64."""
    return torch.float32 if place.type == "mps" else torch.float64


def require_channels_last(place):
    """ValueError where PyTorch's batch norm has wrong gradients of channels-last images.

    On MPS it had: github.com/pytorch/pytorch/issues/175189, mended by pull request 188371.
    """
    if place.type == "mps" and TorchVersion(torch.__version__) < MENDED:
        raise ValueError(
            f"PyTorch {torch.__version__} has wrong gradients of channels-last images on MPS: "
            f"leave channels_last out, or install PyTorch {MENDED} or later"
        )


@contextlib.contextmanager
def settled(place, *, precision=None, deterministic=True, benchmark=True, memory_fraction=None):
    """PyTorch set up for a run on `place`; afterwards it, and its generators, are as before.

    precision        float32 or tf32: how float32 is rounded in products; else as it is set
    deterministic    every run computes the same bits
    benchmark        cuDNN tries its algorithms and takes the fastest; not if deterministic
    memory_fraction  the share of the GPU's memory that this process may take; None: all

    Raises ValueError where a memory fraction is asked of a CPU.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(arithmetic(precision))
        if memory_fraction is not None:
            stack.enter_context(_memory_limited(place, memory_fraction))
        if deterministic:
            stack.enter_context(repeatable(place))
        else:
            stack.enter_context(_benchmarked(benchmark))
            stack.enter_context(torch.random.fork_rng([place] if place.type == "cuda" else []))
        yield


@contextlib.contextmanager
def _benchmarked(wanted):
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = wanted
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


@contextlib.contextmanager
def _memory_limited(place, fraction):
    if not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction must be above 0 and 1 at most, not {fraction!r}")
    if place.type == "cpu":
        raise ValueError("memory_fraction is for a GPU's memory, and this run is on the CPU")
    if place.type == "mps":
        torch.mps.set_per_process_memory_fraction(fraction)  # which cannot be asked for
        yield
        return
    index = torch.cuda.current_device() if place.index is None else place.index
    before = torch.cuda.get_per_process_memory_fraction(index)
    torch.cuda.set_per_process_memory_fraction(fraction, index)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(before, index)


def compiled(model, example, *, precision="float32", say=None, **options):
    """`model` as torch.compile makes it; the model itself where that does not work here.

    example  a batch as the model takes it: it is compiled, forward and backward, and thrown away
    say      called with a sentence where it does not work
    options  torch.compile's

    Weights, statistics and gradients stay as they are.
    """
    state = copy.deepcopy(model.state_dict())
    gradients = [p.grad for p in model.parameters()]
    training = model.training
    try:
        found = torch.compile(model, **options)
        for p in model.parameters():
            p.grad = None
        with autocast(example.device, precision):
            found.train()
            found(example).float().square().mean().backward()
            found.eval()
            with torch.no_grad():
                found(example)
    except (torch.cuda.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # whatever compilers stumble over
        if say is not None:
            say(f"torch.compile does not work here ({_said(error)}): the run goes on without.")
        torch._dynamo.reset()
        found = model
    finally:
        model.load_state_dict(state)
        for p, gradient in zip(model.parameters(), gradients, strict=True):
            p.grad = gradient
        model.train(training)
    return found.train(training)


def _said(error):
    """The first line of what an error says; where that only announces the next one, both."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    n = 2 if lines and lines[0].endswith(":") else 1
    return " ".join(lines[:n]) or type(error).__name__


def checkpointed(model):
    """Let `model` compute its activations again in the backward pass; the model.

    It is a network's own switch: `set_grad_checkpointing(True)`, as timm's have, or
    `memory_efficient`, as torchvision's DenseNet has. Running statistics still move once a step.
    Raises ValueError for a network without a switch.
    """
    if hasattr(model, "set_grad_checkpointing"):
        try:
            model.set_grad_checkpointing(True)
        except (AssertionError, NotImplementedError) as error:  # timm's, of networks without
            raise ValueError(f"{_no_switch(model)} ({error})") from None
    else:
        of = [m for m in model.modules() if isinstance(getattr(m, "memory_efficient", 0), bool)]
        if not of:
            raise ValueError(_no_switch(model))
        for module in of:
            module.memory_efficient = True
    if not getattr(model, "moves_statistics_once", False):
        rest_in_backward_passes(model)
    return model


def _no_switch(model):
    return (
        f"{type(model).__name__} has no switch for gradient checkpointing: leave it off, or choose "
        "another network, such as continuous_integration"
    )
