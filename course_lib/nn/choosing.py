"""Which layers gain by our kernels: each is timed as an example calls it, beside PyTorch's own."""

import contextlib
import copy
import functools
import gc
import hashlib
import json
import os
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import torch

import course_lib
from course_lib import bench
from course_lib.nn import calls
from course_lib.runtime.compile import cache
from course_lib.runtime.host import device

OURS, THEIRS = "ours", "PyTorch"
#: How a step is timed: the GPU's work alone, as in a captured graph, or as Python sees it.
DEVICE, PYTHON = "device", "python"
GAIN = 0.02  # the share of PyTorch's time that a layer must gain, beyond the quartiles of both
ROUNDS, MOST_CALLS, LEAST_CALLS = 10, 20, 3
ROUND_TAKES = 5_000  # µs of one round of calls, or as long as the least number of them takes


class Layer(NamedTuple):
    """A layer that our kernels can run.

    name     its first name in the model
    classes  [(module, PyTorch's class, ours)]: its own, and those of the layers that it holds,
             which come along
    """

    name: str
    module: torch.nn.Module
    classes: tuple

    def turned(self, ours):
        """[(module, class)] for the layer to be ours, or PyTorch's."""
        return [(module, kinds[ours]) for module, *kinds in self.classes]


class Timed(NamedTuple):
    """What was measured of a layer: all its calls in one pass, and their way back.

    looks   what its first call was given, in words
    calls   how often the example called it
    times   {"device" or "python": {"ours" or "PyTorch": `bench.Timing`}}; of eager steps without
            "device" where no graph can hold the layer
    """

    name: str
    module: torch.nn.Module
    looks: str
    calls: int
    times: dict

    def gains(self, way):
        """Whether ours is faster by over 2 %, beyond the quartiles of both."""
        if way not in self.times:
            return False
        ours, theirs = self.times[way][OURS], self.times[way][THEIRS]
        return ours.quartiles[1] <= (1 - GAIN) * theirs.quartiles[0]

    def told(self, way):
        """Both times, in words."""
        times = self.times.get(way) or self.times[PYTHON]
        ours, theirs = (times[who].microseconds for who in (OURS, THEIRS))
        return f"ours takes {ours:.1f} µs and PyTorch's {theirs:.1f} µs"


class Choice(NamedTuple):
    """What came of it.

    stay   {module: why it stays PyTorch's}
    timed  [Timed]
    note   a sentence about the whole
    """

    stay: dict
    timed: list
    note: str

    @classmethod
    def of(cls, layers, stay, timed, note):
        """With what a layer holds told of as well; `stay` is by layer."""
        found = {}
        for layer in layers:
            if (why := stay.get(layer.module)) is not None:
                for part, _, _ in layer.classes:
                    held = part is not layer.module
                    found[part] = f"{layer.name!r}, which holds it, stays: {why}" if held else why
        return cls(found, timed, note)

    @classmethod
    def nothing(cls, layers, reason, timed=()):
        """No layer is chosen."""
        stay = dict.fromkeys((layer.module for layer in layers), reason)
        return cls.of(layers, stay, list(timed), f"Every layer stays PyTorch's: {reason}.")


def choose(model, classes, example, captured):
    """The `Choice` among the layers that our kernels can run.

    classes   [(name, module, PyTorch's class, ours)] in the order of `model.named_modules()`
    example   what the model is called with, as `replace_layers` takes it
    captured  whether a step is one CUDA graph, so that Python's time does not count

    The model is as before afterwards. Raises ValueError where it does not take the example.
    """
    layers = _layers(classes)
    if any(hasattr(part, "_orig_mod") or part._compiled_call_impl for part in model.modules()):
        raise ValueError("the model is compiled: choose its layers first, and compile it then")
    args, kwargs = calls.arguments(example)
    place = calls.place_of(model, args, kwargs)
    if (reason := why_not_on(place)) is not None:
        return Choice.nothing(layers, reason)
    ways = (DEVICE,) if captured else (DEVICE, PYTHON)
    with _as_before(model, place):
        try:
            noted = calls.noted(model, [layer.module for layer in layers], args, kwargs)
        except torch.OutOfMemoryError:
            return Choice.nothing(layers, "memory ran out as the model computed the example")
        except Exception as error:
            raise ValueError(
                f"the model does not take example_inputs, and is as it was: {_said(error)}"
            ) from error
        timed, stay = [], {}
        for layer in layers:
            found = _timed(layer, noted[layer.module], ways)
            if isinstance(found, str):
                stay[layer.module] = found
            else:
                timed.append(found)
        return _decided(model, layers, timed, stay, (args, kwargs), ways)


def why_not_on(place):
    """Why nothing is timed on the torch device `place`; None where our kernels run there."""
    if place.type != "cuda":
        return f"our kernels gain on an NVIDIA GPU, and the model is on {place}"
    return device.why_no_gpu()


def measure(candidates, ways):
    """{way: {label: `bench.Timing`}} of functions that enqueue call number i of a round."""
    n_calls = {}
    for label, step in candidates.items():
        step(0)  # kernels are compiled, and cuDNN tries its algorithms
        torch.cuda.synchronize()
        start = time.perf_counter()
        step(0)
        torch.cuda.synchronize()
        taken = (time.perf_counter() - start) * 1e6
        n_calls[label] = max(LEAST_CALLS, min(MOST_CALLS, round(ROUND_TAKES / taken)))
    timers = {DEVICE: _times_in_graphs, PYTHON: bench.loop_times}
    return {way: timers[way](candidates, calls=n_calls, rounds=ROUNDS) for way in ways}


def _times_in_graphs(candidates, **options):
    """As `bench.device_times`; raises before it captures what would wait for the GPU.

    A capture that is spoilt leaves PyTorch's generator unusable, also by a graph of before that the
    garbage collector ends meanwhile.
    """
    mode, collects = torch.cuda.get_sync_debug_mode(), gc.isenabled()
    torch.cuda.set_sync_debug_mode("error")
    gc.disable()
    try:
        for step in candidates.values():
            step(0)
        torch.cuda.set_sync_debug_mode(mode)
        return bench.device_times(candidates, **options)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
        if collects:
            gc.enable()


# ---- one layer -----------------------------------------------------------------------------------


def _layers(classes):
    """Each `Layer`: what one holds comes along with it, and is none itself."""
    found, seen = [], set()
    for name, module, _, ours in classes:
        if module in seen:
            continue
        parts = set(module.modules()) if ours.holds_layers else {module}
        seen |= parts
        kinds = {part: (theirs, mine) for _, part, theirs, mine in classes if part in parts}
        found.append(Layer(name, module, tuple((part, *both) for part, both in kinds.items())))
    return found


def _timed(layer, noted, ways):
    """A `Timed`, or why there is none."""
    if not noted:
        return "the example did not call it"
    try:
        each = {call: _times_of(layer, call, ways) for call in dict.fromkeys(noted)}
    except torch.OutOfMemoryError:
        return "memory ran out when it was timed"
    except Exception as error:
        return f"it failed when it was timed: {_said(error)}"
    times = {}
    for way in ways:
        if all(way in found for found in each.values()):
            rows = {who: [each[call][way][who] for call in noted] for who in (OURS, THEIRS)}
            sums = {who: map(sum, zip(*found, strict=True)) for who, found in rows.items()}
            times[way] = {who: bench.Timing(us, (low, up)) for who, (us, low, up) in sums.items()}
    return Timed(layer.name, layer.module, str(noted[0]), len(noted), times)


def _times_of(layer, call, ways):
    """{way: {who: [median, lower quartile, upper quartile]}}: measured once, and kept."""
    key = json.dumps([ways, _conditions(), calls.options_of(layer.module), repr(call)])
    digest = hashlib.sha256(key.encode()).hexdigest()
    if digest not in _kept:
        found = _read(digest, key)
        if found is None:
            times = _measured(layer, call, ways)
            found = {
                way: {who: [t.microseconds, *t.quartiles] for who, t in each.items()}
                for way, each in times.items()
            }
            _write(digest, {"key": key, "times": found})
        _kept[digest] = found
    return _kept[digest]


def _measured(layer, call, ways):
    try:
        return measure(_candidates(layer, call), ways)
    except torch.OutOfMemoryError:
        raise
    except Exception:
        if len(ways) == 1:
            raise
    return measure(_candidates(layer, call), ways[-1:])  # an eager step needs no graph


def _candidates(layer, call):
    """{who: a `calls.Step`} of a copy of the layer without its hooks."""
    memo = {}
    for part in layer.module.modules():
        for name, hooks in vars(part).items():
            if "hooks" in name and isinstance(hooks, dict):
                memo[id(hooks)] = type(hooks)()
    copied, given = copy.deepcopy(layer.module, memo), call.made()
    found = {}
    for who in (THEIRS, OURS):
        classes = [(memo[id(part)], kind) for part, kind in layer.turned(who == OURS)]
        found[who] = calls.Step(copied, classes, *given, grad=call.grad, autocast=call.autocast)
    return found


# ---- the whole -----------------------------------------------------------------------------------


def _decided(model, layers, timed, stay, given, ways):
    """Of the layers that gain, by one way of timing or the other, those of the fastest step."""
    chosen = {}
    for way in ways:
        found = {each.module for each in timed if each.gains(way)}
        if found and found not in chosen.values():
            chosen[way] = found
    if not chosen:
        stay |= {each.module: each.told(ways[-1]) for each in timed}
        return Choice.of(layers, stay, timed, "Every layer stays PyTorch's: none gains.")
    grad, autocast = torch.is_grad_enabled(), calls.autocast_now()
    _with_fresh_leaves(model)
    steps = {}
    for label, mine in {THEIRS: set(), **chosen}.items():
        classes = [pair for layer in layers for pair in layer.turned(layer.module in mine)]
        steps[label] = calls.Step(model, classes, *given, grad=grad, autocast=autocast)
    try:
        times = measure(steps, ways[-1:])[ways[-1]]
    except torch.OutOfMemoryError:
        return Choice.nothing(layers, "memory ran out when the whole step was timed", timed)
    except Exception as error:
        reason = f"the whole step failed when it was timed: {_said(error)}"
        return Choice.nothing(layers, reason, timed)
    best = min(chosen, key=lambda way: times[way].microseconds)
    ours, theirs = times[best], times[THEIRS]
    n, ms = len(chosen[best]), [t.microseconds / 1e3 for t in (ours, theirs)]
    told = f"a step takes {ms[0]:.2f} ms with {n} of {len(layers)} ours and {ms[1]:.2f} ms without"
    if ours.quartiles[0] > theirs.quartiles[1]:
        return Choice.nothing(layers, told, timed)
    stay |= {each.module: each.told(best) for each in timed if each.module not in chosen[best]}
    return Choice.of(layers, stay, timed, f"Layers that gain are ours: {told}.")


def _with_fresh_leaves(model):
    """Parameters become others, of the same memory: a step that the model has done before has tied
    its own to the stream of that step, which no graph can hold."""
    fresh = {}
    for part in model.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                leaf = torch.nn.Parameter(parameter.detach(), parameter.requires_grad)
                part._parameters[name] = fresh.setdefault(id(parameter), leaf)


@contextlib.contextmanager
def _as_before(model, place):
    """In this block the model may compute: its parameters, buffers, attributes and classes, and the
    random numbers of its device, are afterwards as before."""
    parts = [(part, type(part), dict(vars(part))) for part in model.modules()]
    held = [(f, dict(f)) for part, _, _ in parts for f in (part._buffers, part._parameters)]
    contents = [(buffer, buffer.clone()) for buffer in model.buffers()]
    on_gpu = place.type == "cuda"
    with torch.random.fork_rng([place] if on_gpu else []):
        try:
            with torch.cuda.device(place) if on_gpu else contextlib.nullcontext():
                yield
        finally:
            torch.clear_autocast_cache()
            if on_gpu:
                torch.cuda.empty_cache()  # of graphs that are gone
            for part, kind, state in parts:
                part.__class__ = kind
                vars(part).clear()
                vars(part).update(state)
            for found, before in held:
                found.clear()
                found.update(before)
            with torch.no_grad():
                for buffer, content in contents:
                    buffer.copy_(content)


def _said(error):
    """The first line of an error, with its class."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


# ---- what is kept --------------------------------------------------------------------------------

_kept = {}  # digest of a key -> times


def _conditions():
    """What bears on every layer's time: device, versions, sources, how products are rounded."""
    index = torch.cuda.current_device() if device.count() else None
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    return {
        "device": None if index is None else str(device.properties(index)),
        "driver": device.driver_version(),
        "versions": bench.versions(),
        "sources": sources(),
        "float32": [torch._C._get_fp32_precision_getter("cuda", of) for of in ("matmul", "conv")],
        "float16": str(matmul.allow_fp16_reduced_precision_reduction),
        "bfloat16": str(matmul.allow_bf16_reduced_precision_reduction),
        "cudnn": [cudnn.enabled, cudnn.benchmark, cudnn.deterministic],
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "filled": torch.utils.deterministic.fill_uninitialized_memory,
    }


@functools.cache
def sources():
    """A hash of what runs on the way to a kernel: whoever edits one times it anew."""
    found = hashlib.sha256()
    package = Path(course_lib.__file__).parent
    for folder in ("kernels", "nn", "ops", "runtime"):
        for path in sorted((package / folder).rglob("*.py")):
            found.update(path.read_bytes())
    return found.hexdigest()


def _path(digest):
    return cache.cache_folder() / f"{digest}.times"


def _read(digest, key):
    """What is kept on disk under a key; None where there is nothing, or a damaged file."""
    cache.require_own(_path(digest).parent)
    try:
        found = json.loads(_path(digest).read_text())
        return found["times"] if found["key"] == key else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(digest, content):
    """A folder that can't be written costs time alone."""
    path = _path(digest)
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(".unfinished", f"{digest}.", path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        os.replace(temporary, path)
