"""One variant of ours beside PyTorch and float64, element by element.

An element is right when it lies within tolerance · scale of the float64 result. The scale is a
magnitude of the element's own row (`operations.Pass.scale`), because rounding errors grow with the
terms that a result is made of: softmax's of 50,000 classes are near 1e-5, where an absolute 1e-5
would let everything pass, and a gradient may be the small difference of large terms. Half-width
results that are smaller than their dtype's smallest step are right when they are off by no more.

Without PyTorch, ours run on NumPy's arrays in the simulator, beside float64 alone.
"""

import contextlib
import math
import time
from unittest import mock

import ml_dtypes
import numpy as np

from course_lib import SIMULATED, device, simulator
from course_lib.compare.errors import Comparison
from course_lib.kernels.operation import AUTO
from course_lib.operations import DIRECTIONS, OPERATIONS
from course_lib.operations.numbers import HAS_TORCH, Draw, torch
from course_lib.runtime.host import arrays, launch

__all__ = ["DIRECTIONS", "OPERATIONS", "PLACES", "Comparison", "UsageError", "compare"]

PLACES = ("gpu", "simulator")
#: What is allowed by default: about two roundings of the dtype.
TOLERANCES = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3}
CHUNK = 1 << 22  # elements compared at a time: in float64 they take memory
PILOT = 1 << 12  # elements of the trial that tells how long the simulator will take
LONG_SECONDS = 10


class UsageError(ValueError):
    """What was asked for does not exist; the message says what does."""


def compare(name, shape=None, *, variant=AUTO, dtype="float32", direction="forward", tolerance=None,
            seed=0, place=None, progress=None, warn=print):
    """Run one pass of operation `name` on random numbers of `shape`. Returns a `Comparison`.

    shape     None: a small one, that of the operation's `example`
    direction "forward", "backward" to the input, or "weights": backward to the weights
    place     "gpu" or "simulator"; None: where kernels run on this machine
    progress  None, or a function like `tqdm` for the simulator's blocks
    warn      called with a sentence when the simulator will take more than `LONG_SECONDS`

    Raises UsageError for what does not exist, or not here.
    """
    if shape is None and name in OPERATIONS:
        shape = OPERATIONS[name].example
    found = _pass(name, shape, dtype, direction)
    if variant not in (AUTO, *found.variants):
        raise UsageError(
            f"{name} {direction} has no variant {variant!r}; "
            f"there are {', '.join(found.variants)}, and {AUTO!r}"
        )
    tolerance = TOLERANCES[dtype] if tolerance is None else tolerance
    if not 0 <= tolerance < math.inf:
        raise UsageError(f"a tolerance is a number from 0 on, not {tolerance}")
    with _running_in(place) as on_gpu:
        inputs = _inputs(found, shape, dtype, seed, "cuda" if on_gpu else "cpu")
        chosen = found.default(inputs) if variant == AUTO else variant
        try:
            bar = contextlib.nullcontext() if on_gpu else simulator.options(progress=progress)
            # Poisoning comes first: for it PyTorch imports its compiler, which takes seconds, and
            # is no place to be when the warning has just invited a Ctrl-C.
            with _poisoned_memory():
                if not on_gpu:
                    _warn_if_long(found, shape, dtype, chosen, warn)
                with bar:
                    ours = found.ours(*inputs.values(), variant=chosen)
        except (ValueError, arrays.ArrayError) as error:  # such as a row too long for this variant
            raise UsageError(f"{name} {direction} of {_times(shape)}: {error}") from error
        peer = found.peer(*inputs.values()) if HAS_TORCH else None
        where = f"on the GPU ({torch.cuda.get_device_name()})" if on_gpu else "in the simulator"
    default = ", the default" if variant == AUTO else ""
    limits = ml_dtypes.finfo(arrays.dtype_name(ours))
    result = Comparison(
        f"{name} {direction} of {_times(shape)} {dtype}: variant {chosen}{default}, {where}",
        tolerance,
        found.scale_in_words,
        resolution=float(limits.smallest_normal) * float(limits.eps),
    )
    for rows in [slice(0, None)] if found.whole else _parts([*inputs.values(), ours]):
        some = {key: _double(value, rows) for key, value in inputs.items()}
        with np.errstate(all="ignore"):  # a GPU does not warn either
            truth = found.truth(*some.values())
            scale = found.scale(truth, *some.values())
        result.add(rows.start, some, _double(ours, rows), _double(peer, rows), truth, scale)
    return result


def _pass(name, shape, dtype, direction):
    """The `Pass` asked for, if it takes such a shape and dtype."""
    if name not in OPERATIONS:
        raise UsageError(f"there is no operation {name!r}; there are {', '.join(OPERATIONS)}")
    operation = OPERATIONS[name]
    if direction not in operation.passes:
        known = ", ".join(operation.passes)
        raise UsageError(f"{name} has no direction {direction!r}; there are {known}")
    if not shape:
        example = _times((4, 5, 6, 7)[: operation.n_dims])
        raise UsageError(f"{name} needs a shape, such as {example}")
    if dtype not in operation.dtypes:
        raise UsageError(f"{name} takes {', '.join(operation.dtypes)}; not {dtype!r}")
    if operation.n_dims not in (None, len(shape)):
        raise UsageError(f"{name} takes {operation.layout}; not {_times(shape)}")
    return operation.passes[direction]


def _times(shape):
    return " x ".join(map(str, shape))


@contextlib.contextmanager
def _running_in(place):
    """Launches run in `place`; yields whether that is a GPU."""
    if place not in (None, *PLACES):
        raise UsageError(f"there is no device {place!r}; there are {', '.join(PLACES)}")
    if place == "gpu" and SIMULATED:
        raise UsageError(device.why_no_gpu())
    if place is None and not SIMULATED and device.count() == 0:
        raise UsageError(device.why_no_gpu())
    if SIMULATED or place == "simulator":
        with launch.in_simulator():
            yield False
    else:
        yield True


@contextlib.contextmanager
def _poisoned_memory():
    """New memory is filled with NaN, so that what a kernel leaves unwritten is seen."""
    if not HAS_TORCH:
        empty, empty_like = map(_poisoning, (np.empty, np.empty_like))
        with mock.patch.multiple(np, empty=empty, empty_like=empty_like):
            yield
        return
    deterministic = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = filling


def _poisoning(make):
    def made(*args, **options):
        found = make(*args, **options)
        if found.dtype.kind not in "biu":
            found[...] = np.nan
        return found

    return made


def _inputs(found, shape, dtype, seed, place):
    if not -(2**63) <= seed < 2**64:
        raise UsageError(f"a seed has 64 bits; {seed} has more")
    if max(shape) >= 2**63:
        raise UsageError(f"a size has 63 bits; {_times(shape)} has more")
    try:
        return found.inputs(_random(shape, dtype, seed, place))
    except (RuntimeError, MemoryError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{_times(shape)} cannot be made here: {reason}") from error


def _random(shape, dtype, seed, place):
    # Made on the CPU: the same numbers everywhere.
    numbers = 3 * Draw(seed).normal(tuple(shape))
    if HAS_TORCH:
        return numbers.to(place, getattr(torch, dtype))
    return numbers.astype(getattr(ml_dtypes, dtype, dtype))


def _warn_if_long(found, shape, dtype, variant, warn):
    """Say how long the simulator will take, from a trial with fewer elements."""
    small = list(shape)
    while math.prod(small) > PILOT:
        longest = small.index(max(small))
        small[longest] = -(-small[longest] // 2)
    if math.prod(shape) <= 4 * math.prod(small):
        return
    inputs = found.inputs(_random(small, dtype, 0, "cpu")).values()
    for _ in range(2):  # the first also rebuilds the kernel for the simulator
        start = time.perf_counter()
        found.ours(*inputs, variant=variant)
        seconds = time.perf_counter() - start
    seconds *= math.prod(shape) / math.prod(small)
    if seconds > LONG_SECONDS:
        how_long = f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"
        warn(f"In the simulator this will take about {how_long}; Ctrl-C ends it.")


def _parts(values):
    """Slices of the first axis, about `CHUNK` elements each. Every operation acts within a row."""
    tensors = [value for value in values if _is_array(value)]
    n = tensors[0].shape[0]
    step = n  # vectors alone: one row
    if any(tensor.ndim > 1 for tensor in tensors):
        step = CHUNK // max(1, *(math.prod(tensor.shape[1:]) for tensor in tensors))
    step = max(1, step)
    return [slice(start, start + step) for start in range(0, n, step)]


def _double(value, rows):
    """Some rows of a tensor or array as a float64 array; anything else as it is."""
    if not _is_array(value):
        return value
    value = value[rows] if value.ndim else value
    if isinstance(value, np.ndarray | np.generic):
        return value.astype(np.float64)
    return value.detach().double().cpu().numpy()


def _is_array(value):
    return isinstance(value, np.ndarray) or arrays.is_tensor(value)
