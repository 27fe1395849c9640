"""Lesson 16: any device, fewer bits, less memory, and a step without the host.

| exercise | it gets | what is new |
|---|---|---|
| pick_device | a name, and two functions that look for a GPU | three devices, one of them named |
| round_bits | x and y as uint32, how many bits to keep; any launch | rounding, ties to even |
| unscale | g, scale, y, found; any launch | a flag that many may raise |
| next_scale | found, scale, good, …; one thread | a decision without the host |
| clip | g, squares, max_norm, y; any launch | one factor for all |
| ema | weight, average, steps, decay, y; any launch | a number that is read from memory |

Arrays are float32, but those of `round_bits` are uint32 (the bits of float32 numbers), and `found`,
`good` and `steps` are whole numbers. `scale`, `found`, `good` and `steps` have one element.
"""

import math

import numpy as np

from course_lib import cuda
from course_lib.teach.checking.cases import drawn, numbers, spread
from course_lib.teach.checking.deadline import TimeUp
from course_lib.teach.checking.work import Spares
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case

ZERO, ONE, INF, TINY = np.float32(0), np.float32(1), np.float32(np.inf), np.float32(1e-6)
NEW, LARGEST = np.float32(10), np.finfo(np.float32).max
EXPONENT = 0x7F800000  # the eight bits of a float32's exponent
SHORT = object()  # of a case of `clip`: gradients so short that TINY shows


# ---- pick_device -----------------------------------------------------------------------------


def pick_device(wanted, find_mps, find_cuda):
    if wanted not in (None, "auto", "mps", "cuda", "cpu"):
        raise ValueError(f"the device must be auto, mps, cuda or cpu, not {wanted!r}")
    if wanted in (None, "auto", "mps") and find_mps():
        return "mps", "float16"
    if wanted in (None, "auto", "cuda") and (capability := find_cuda()) is not None:
        return "cuda", "bfloat16" if capability >= (8, 0) else "float16"
    if wanted in ("mps", "cuda"):
        raise ValueError(f"there is no {wanted} here")
    return "cpu", "bfloat16"


_DEVICES, _HALVES = ("mps", "cuda", "cpu"), ("float16", "bfloat16")
_REFUSED = (-1.0, -1.0)


class WrongChoice(Exception):
    """What was wanted, and what was done, in words."""


def _picked_reference(wanted, mps, major, minor):
    wanted = str(wanted)
    here = {"mps": mps, "cuda": major > 0, "cpu": True}
    order = _DEVICES if wanted in ("None", "auto") else (wanted,)
    found = next((name for name in order if here.get(name)), None)
    if found is None:
        return np.array(_REFUSED)
    half = found == "cpu" or found == "cuda" and major >= 8
    return np.array([_DEVICES.index(found), half], np.float64)


def _unlike(run, done):
    """Return the error that says what should have been `done` instead."""
    device, half = (int(place) for place in run.expected["choice"])
    expected = f"a ValueError that names {str(run.wanted)!r}"
    if device >= 0:
        expected = repr((_DEVICES[device], _HALVES[half]))
    cuda = f"CUDA {int(run.major)}.{int(run.minor)}" if run.major else "no CUDA"
    here = f"{'MPS' if run.mps else 'no MPS'} and {cuda}"
    return WrongChoice(f"it {done}\n  expected  {expected}\n  machine   {here}")


def _pick(function, run):
    """Let it choose on a machine that is made up: the places of what it returns in both lists."""
    refused = run.expected["choice"][0] < 0
    wanted, asked = None if str(run.wanted) == "None" else str(run.wanted), []

    def find_mps():
        asked.append("find_mps")
        return bool(run.mps)

    def find_cuda():
        asked.append("find_cuda")
        return (int(run.major), int(run.minor)) if run.major else None

    try:
        found = function(wanted, find_mps, find_cuda)
    except TimeUp:
        raise
    except Exception as error:
        if refused and isinstance(error, ValueError) and wanted in str(error):
            return np.array(_REFUSED)
        if not refused and not isinstance(error, ValueError):
            raise
        done = f"raised {type(error).__name__}: {error}"
        raise _unlike(run, done).with_traceback(error.__traceback__) from None
    if not isinstance(found, tuple) or len(found) != 2:
        raise TypeError(f"it returned {found!r}, not a device and a precision")
    for value, known in zip(found, (_DEVICES, _HALVES), strict=True):
        if value not in known:
            raise ValueError(f"it returned {value!r}, which is none of {', '.join(known)}")
    choice = np.array([_DEVICES.index(found[0]), _HALVES.index(found[1])], np.float64)
    if not np.array_equal(choice, run.expected["choice"]):
        raise _unlike(run, f"returned {found!r}")
    name = {"cpu": "the CPU", "mps": "MPS", "cuda": "CUDA"}.get(wanted)
    if name and (others := [each for each in asked if each != f"find_{wanted}"]):
        raise ValueError(f"{name} was asked for by name, and {others[0]}() was called all the same")
    return choice


def _picked_cases(rng):
    new, old = (drawn(rng, 9, 12), drawn(rng, 0, 6)), (drawn(rng, 5, 6), drawn(rng, 0, 2))
    machines = [
        ("None", False, (0, 0)),
        ("None", False, new),
        ("None", False, (7, 5)),
        ("None", True, new),
        ("None", True, (0, 0)),
        ("auto", False, (8, 0)),
        ("auto", True, (0, 0)),
        ("auto", False, (0, 0)),
        ("cpu", True, new),
        ("cpu", False, (0, 0)),
        ("cuda", True, (8, drawn(rng, 6, 9))),
        ("cuda", True, (7, 5)),
        ("cuda", False, (0, 0)),
        ("cuda", True, (0, 0)),
        ("cuda", False, old),
        ("mps", True, new),
        ("mps", False, new),
        ("mps", False, (0, 0)),
        ("gpu", True, new),
        ("CUDA", False, new),
        ("cuda:0", True, new),
        ("cp", False, new),
        ("cpu:0", False, (0, 0)),
        ("mps:0", True, new),
        ("AUTO", True, new),
        ("none", False, new),
        ("", True, (0, 0)),
        ("cuda", False, (12, 0)),
    ]
    return [
        case(1, 1, wanted=np.str_(wanted), mps=np.bool_(mps), major=np.int64(major),
             minor=np.int64(minor))
        for wanted, mps, (major, minor) in machines
    ]  # fmt: skip


PICK_DEVICE = Exercise(
    name="pick_device",
    title="MPS, CUDA or the CPU, and how many bits",
    solution=pick_device,
    kind="function",
    reference=_picked_reference,
    cases=_picked_cases,
    tolerance=Tolerance(0.0, 0.0, "a device and a precision, or a refusal"),
    outputs=("choice",),
    dtype=np.float64,
    call=_pick,
    hints=(
        "There are two kinds of caller. One says nothing and takes what is there. The other names "
        "a device: what would they think of a run that quietly went elsewhere?",
        "Refuse unknown names first. Ask `find_mps()` only of those who would take it: None, auto "
        "and mps. Then the same with `find_cuda()`. Whoever named one of the two and comes past "
        "both has asked for what is not here: a ValueError that names it. The rest is the CPU.",
        '```python\nif wanted in (None, "auto", "mps") and find_mps():\n    return ...\n'
        'if wanted in (None, "auto", "cuda") and (capability := find_cuda()) is not None:\n'
        '    return "cuda", "bfloat16" if capability >= ... else "float16"\n'
        'if wanted in ("mps", "cuda"):\n    raise ValueError(...)\n```',
    ),
)


# ---- round_bits ------------------------------------------------------------------------------


@cuda.jit
def round_bits(x, kept, y):
    drop = 23 - kept
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        bits = np.int64(x[i])
        if bits & EXPONENT != EXPONENT:
            odd = (bits >> drop) & 1
            bits = (bits + (1 << (drop - 1)) - 1 + odd) >> drop << drop
        y[i] = bits


def _round_reference(x, kept):
    """Round in float64, where the numbers of one spacing are whole numbers, ties to even."""
    with np.errstate(invalid="ignore"):  # of the NaN that signals
        value = x.view(np.float32).astype(np.float64)
    finite = np.isfinite(value)
    _, exponent = np.frexp(np.where(finite, value, 1.0))
    spacing = 2.0 ** (np.maximum(exponent - 1, -126) - float(kept))
    rounded = np.round(np.where(finite, value, 1.0) / spacing) * spacing
    with np.errstate(over="ignore"):
        bits = rounded.astype(np.float32).view(np.uint32)
    return np.where(finite, bits, x).astype(np.int64)


def _round_cases(rng):
    launches = [
        (1, 10, "plain", 1, 32),
        (0, 7, "plain", 1, 32),
        (2, 7, "ties", 2, 1),
        (3, 10, "plain", 1, 32),
        (6, 10, "ties", 1, 4),
        (8, 3, "ties", 1, 32),
        (9, 7, "extreme", 1, 32),
        (20, 2, "plain", 2, 8),
        (33, 10, "extreme", 2, 32),
        (40, drawn(rng, 11, 19), "ties", 1, 64),
        (41, 22, "ties", 1, 64),
        (42, 1, "ties", 1, 64),
        (90, 7, "plain", 2, 32),
        (drawn(rng, 1030, 1200), drawn(rng, 4, 9), "ties", 2, 256),
    ]
    return [
        case(grid, block, x=_bits(rng, n, kept, kind), kept=np.int64(kept))
        for n, kept, kind, grid, block in launches
    ]


def _bits(rng, n, kept, kind):
    """Return the bits of n float32 numbers; some lie in the middle between two that can be kept."""
    bits = spread(rng, n).view(np.uint32)
    drop = 23 - kept
    if kind == "ties":
        bits = (bits >> drop << drop) | np.uint32(1 << (drop - 1))
        bits[::4] += np.uint32(1)  # just above the middle, and just below it
        bits[3::4] -= np.uint32(1)
        bits[:2] = np.array([0x3F800000, 0xBF800000 | 1 << drop])[:n] | (1 << (drop - 1))
    if kind == "extreme":
        ends = [np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, 0.0, -0.0, 1e-40]
        bits[: len(ends)] = np.array(ends, np.float32).view(np.uint32)
        bits[len(ends)] = 0x7F800001  # a NaN, whose only bit is the last one
    return bits.astype(np.uint32)


ROUND_BITS = Exercise(
    name="round_bits",
    title="TF32 and bfloat16, bit by bit",
    solution=round_bits,
    reference=_round_reference,
    cases=_round_cases,
    tolerance=EXACT,
    dtype=np.uint32,
    call=lambda kernel, run: run.launch(kernel, run.x, run.kept, run.y),
    once=True,
    about=(Spares("x"),),
    hints=(
        "To cut off the last `drop` bits, shift right and left again. That rounds towards 0. What "
        "would you have to add before, so that it rounds to the nearest?",
        "Half of what is cut off, `1 << (drop - 1)`, rounds ties upwards. One less rounds them "
        "downwards. What you want depends on the last bit that stays, `(bits >> drop) & 1`: add "
        "half, less 1, plus that bit. Where all bits of the exponent are 1 (infinity, NaN), leave "
        "the number alone: a carry, or a bit that is cut off, would make another of it.",
        "```python\nif bits & EXPONENT != EXPONENT:\n    odd = (bits >> drop) & 1\n"
        "    bits = (bits + (1 << (drop - 1)) ... ) >> drop << drop\n```",
    ),
)


# ---- unscale ---------------------------------------------------------------------------------


@cuda.jit
def unscale(g, scale, y, found):
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        y[i] = g[i] / scale[0]
        if not abs(y[i]) < INF:
            y[i] = ZERO
            found[0] = 1


def _unscale_reference(g, scale):
    with np.errstate(over="ignore"):  # a number may become infinite only here
        finite = np.isfinite((g / scale[0]).astype(np.float32))
    return np.where(finite, g, 0.0) / scale[0], np.array([not finite.all()], np.int64)


def _unscale_cases(rng):
    launches = [
        (1, "plain", 1, 32),
        (0, "plain", 1, 32),
        (1, "NaN", 1, 16),
        (2, "last", 2, 1),
        (5, "minus", 1, 4),
        (6, "plain", 1, 32),
        (7, "largest", 1, 32),
        (8, "as they are", 1, 64),
        (8, "enlarged", 1, 32),
        (9, "zero", 1, 32),
        (33, "last", 1, 32),
        (40, "all", 2, 16),
        (64, "NaN", 2, 32),
        (70, "plain", 3, 32),
        (90, "last", 1, 64),
        (99, "first", 1, 32),
        (drawn(rng, 1030, 1200), "last", 2, 256),
    ]
    scales = {"as they are": 1.0, "enlarged": 0.25, "first": 2.5}
    return [
        case(grid, block, g=_scaled(rng, n, kind),
             scale=np.array([scales.get(kind, 2.0 ** rng.integers(3, 17))], np.float32))
        for n, kind, grid, block in launches
    ]  # fmt: skip


def _scaled(rng, n, kind):
    g = numbers(rng, n, 300.0, 200.0)
    if kind == "last":
        g[-1] = np.inf
    if kind == "minus":
        g[n // 2] = -np.inf
    if kind == "NaN":
        g[rng.integers(n)] = np.nan
    if kind == "all":
        g[:] = rng.choice([np.inf, -np.inf, np.nan], n)
    if kind == "first":  # of each thread: good ones come after it
        g[:32:2] = rng.choice([np.inf, -np.inf, np.nan], 16)
    if kind == "zero":
        g[:] = 0.0
    if kind in ("largest", "as they are", "enlarged"):  # finite; divided by 1/4, no longer
        g[:3] = LARGEST, -LARGEST, 0.0
    return g


def _unscaled(kernel, run):
    """Launch it with a `found` of 0; what `y` holds before is anybody's guess."""
    run.found[:] = 0
    run.launch(kernel, run.g, run.scale, run.y, run.found)


UNSCALE = Exercise(
    name="unscale",
    title="Gradients brought back, and looked at",
    solution=unscale,
    reference=_unscale_reference,
    cases=_unscale_cases,
    tolerance=Tolerance(1e-6, 0.0, "one quotient is rounded"),
    outputs=("y", "found"),
    dtype={"y": np.float32, "found": np.int32},
    call=_unscaled,
    about=(Spares("g"),),
    forbids=("float64-promotion",),
    hints=(
        "Each thread divides its gradients. If the result is infinite or NaN, it becomes 0, and a "
        "flag goes up. What of two threads that find one at the same time?",
        "`abs(y[i]) < INF` is true for every finite number, and false for infinities and for NaN. "
        "Whoever finds such a one writes 1 to `found[0]`. Several threads may do so: all of them "
        "write the same, and none reads it. Nobody writes a 0: it is there already.",
        "```python\ny[i] = g[i] / scale[0]\nif not abs(y[i]) < ...:\n    y[i] = ZERO\n"
        "    found[0] = ...\n```",
    ),
)


# ---- next_scale ------------------------------------------------------------------------------


@cuda.jit
def next_scale(found, scale, good, growth, backoff, interval, new_scale, new_good):
    if cuda.grid(1) == 0:
        larger = scale[0] * growth
        if found[0] != 0:
            new_scale[0], new_good[0] = scale[0] * backoff, 0
        elif good[0] + 1 == interval:
            new_scale[0] = larger if larger < INF else scale[0]
            new_good[0] = 0
        else:
            new_scale[0], new_good[0] = scale[0], good[0] + 1


def _scale_reference(found, scale, good, growth, backoff, interval):
    if found[0]:
        return scale * backoff, np.array([0])
    if good[0] + 1 < interval:
        return scale, good + 1
    larger = scale * growth
    return np.where(larger > np.finfo(np.float32).max, scale, larger), np.array([0])


def _scale_cases(rng):
    # found, good steps before, interval, exponent of the scale
    far, later = drawn(rng, 66_000, 70_000), drawn(rng, 3, 9)
    situations = [
        (0, 0, 5, 16, 1, 1),
        (1, 0, 5, 16, 1, 48),
        (0, later, later + 1, 10, 1, 32),
        (0, later, later + 2, 12, 2, 32),
        (1, 4, 5, 8, 1, 16),
        (1, 2, 4, 3, 1, 64),
        (0, 0, 1, 15, 1, 32),
        (0, 9, 20, 14, 3, 8),
        (0, 6, 7, 127, 1, 32),  # no larger one
        (1, 6, 7, 127, 2, 64),
        (3, 1, 4, 9, 1, 96),
        (0, far - 1, far, 16, 2, 256),
    ]
    plain = [
        case(grid, block, found=np.array([found], np.int32),
             scale=np.array([2.0**exponent], np.float32), good=np.array([good], np.int32),
             growth=np.float32(2.0 ** drawn(rng, 1, 4)),
             backoff=np.float32(0.5 ** drawn(rng, 1, 4)), interval=np.int64(interval))
        for found, good, interval, exponent, grid, block in situations
    ]  # fmt: skip
    # No powers of two; and the largest power that there is, which is not infinite yet.
    numbers = [(0, 2.5, 1.5, 0.75), (1, 2.5, 1.5, 0.375), (0, 2.0**126, 2.0, 0.5)]
    return plain + [
        case(2, 96, found=np.array([found], np.int32), scale=np.array([scale], np.float32),
             good=np.array([3], np.int32), growth=np.float32(growth), backoff=np.float32(backoff),
             interval=np.int64(4))
        for found, scale, growth, backoff in numbers
    ]  # fmt: skip


NEXT_SCALE = Exercise(
    name="next_scale",
    title="A scale that finds itself",
    solution=next_scale,
    reference=_scale_reference,
    cases=_scale_cases,
    outputs=("new_scale", "new_good"),
    dtype={"new_scale": np.float32, "new_good": np.int32},
    call=lambda kernel, run: run.launch(
        kernel, run.found, run.scale, run.good, run.growth, run.backoff, run.interval,
        run.new_scale, run.new_good,
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "There are three outcomes: the step overflowed; it was the last of a whole row of good "
        "ones; or it was a good one like others. Write down both numbers for each.",
        "Overflow: scale · backoff, and count from 0 again. If this good step makes the row "
        "`interval` long: scale · growth (if that is still below INF), and count from 0. Else the "
        "scale stays, and the count is one more. One thread of the grid does it, the others "
        "nothing.",
        "```python\nif found[0] != 0:\n    new_scale[0], new_good[0] = scale[0] * ..., 0\n"
        "elif good[0] + 1 == interval:\n    new_scale[0] = larger if larger < INF else ...\n"
        "    new_good[0] = ...\nelse:\n    ...\n```",
    ),
)


# ---- clip ------------------------------------------------------------------------------------


@cuda.jit
def clip(g, squares, max_norm, y):
    total = ZERO
    for k in range(squares.size):
        total += squares[k]
    factor = min(max_norm / (math.sqrt(total) + TINY), ONE)
    for i in range(cuda.grid(1), g.size, cuda.gridsize(1)):
        y[i] = g[i] * factor


def _clip_reference(g, squares, max_norm):
    return g * min(1.0, max_norm / (np.sqrt(squares.sum()) + 1e-6))


def _clip_cases(rng):
    # Numbers, parts that the squares were added up in, max_norm's share of the norm, launch: of
    # whole warps, as those who add up together need them.
    launches = [
        (1, 1, 0.5, 1, 32),
        (1, 1, 2.0, 1, 32),
        (0, 1, 0.5, 1, 32),
        (3, 2, 0.25, 1, 32),
        (4, 3, 1.5, 2, 32),
        (2, 1, None, 1, 32),
        (3, 1, SHORT, 1, 32),
        (5, 2, 0.0, 1, 32),
        (9, 4, 0.1, 1, 32),
        (33, 2, 3.0, 2, 32),
        (40, 5, 0.9, 1, 32),
        (70, 7, 0.01, 1, 64),
        (20, drawn(rng, 260, 290), 0.4, 1, 32),
        (drawn(rng, 1030, 1200), drawn(rng, 5, 20), rng.uniform(0.2, 0.7), 2, 256),
    ]
    found = []
    for n, parts, share, grid, block in launches:
        # A part of the gradients: the others are another kernel's, but their squares count.
        everything = numbers(rng, n + 3 * parts, 2.0, 1.5).astype(np.float64)
        if share is None:
            everything[:] = 0.0
        if share is SHORT:  # a norm of three times TINY
            share, everything = 0.5, everything * (3e-6 / np.linalg.norm(everything))
        squares = np.array([part @ part for part in np.array_split(everything, parts)])
        norm = np.sqrt(squares.sum())
        found.append(case(
            grid, block, g=everything[:n].astype(np.float32), squares=squares.astype(np.float32),
            max_norm=np.float32(1.0 if share is None else share * norm),
        ))  # fmt: skip
    return found


CLIP = Exercise(
    name="clip",
    title="All gradients made shorter alike",
    solution=clip,
    reference=_clip_reference,
    cases=_clip_cases,
    tolerance=Tolerance(1e-5, 1e-7, "a sum of up to 290 squares, a root, a quotient, a product"),
    call=lambda kernel, run: run.launch(kernel, run.g, run.squares, run.max_norm, run.y),
    once=True,
    about=(Spares("g"),),
    repeatable=True,
    forbids=("float64-promotion",),
    hints=(
        "The norm is one number for all gradients of all layers together. You have the sums of "
        "squares of its parts. What must happen to gradients whose norm is small enough?",
        "Add `squares` up, take the root: that is the norm. The factor is `max_norm / (norm + "
        "TINY)`, but never more than 1: clipping makes nothing longer. Each thread may work the "
        "factor out for itself, since there are few parts.",
        "```python\nfor k in range(squares.size):\n    total += ...\n"
        "factor = min(max_norm / (math.sqrt(total) + TINY), ...)\n```",
    ),
)


# ---- ema -------------------------------------------------------------------------------------


@cuda.jit
def ema(weight, average, steps, decay, y):
    n = np.float32(steps[0])
    kept = min(decay, (ONE + n) / (NEW + n))
    for i in range(cuda.grid(1), y.size, cuda.gridsize(1)):
        y[i] = average[i] + (ONE - kept) * (weight[i] - average[i])


def _ema_reference(weight, average, steps, decay):
    kept = min(decay, (1 + steps[0]) / (10 + steps[0]))
    return kept * average + (1 - kept) * weight


def _ema_cases(rng):
    short, long = (0.9, 0.99), (0.998, 0.9995)  # between which the decay is drawn
    launches = [
        (1, 0, short, 1, 32),
        (0, 3, short, 1, 32),
        (2, 5, short, 2, 1),
        (3, 200, short, 1, 32),
        (5, 300, long, 1, 32),
        (7, 1, short, 1, 4),
        (33, 40, short, 2, 32),
        (40, 100_000, short, 1, 16),
        (65, 12, long, 3, 32),
        (90, 1000, short, 1, 64),
        (drawn(rng, 1030, 1200), drawn(rng, 20, 60), short, 2, 256),
    ]
    return [
        case(grid, block, weight=numbers(rng, n, 2.0, 1.5), average=numbers(rng, n, 1.0, -3.0),
             steps=np.array([steps]), decay=np.float32(rng.uniform(*decays)))
        for n, steps, decays, grid, block in launches
    ]  # fmt: skip


EMA = Exercise(
    name="ema",
    title="An average of all the weights there were",
    solution=ema,
    reference=_ema_reference,
    cases=_ema_cases,
    tolerance=Tolerance(1e-5, 2e-6, "a few products and sums in float32, of numbers below 10"),
    call=lambda kernel, run: run.launch(
        kernel, run.weight, run.average, run.steps, run.decay, run.y
    ),
    once=True,
    about=(Spares("weight"), Spares("average")),
    forbids=("float64-promotion",),
    hints=(
        "First the share of the average that is kept in this step: which of the two numbers is "
        "it? Then each thread mixes its weights.",
        "`kept` is the smaller one of `decay` and (1 + n) / (10 + n), with n as a float32. The new "
        "average is the old one and (1 − kept) of the way to the weight.",
        "```python\nn = np.float32(steps[0])\nkept = min(decay, ...)\n"
        "y[i] = average[i] + (ONE - kept) * (...)\n```",
    ),
)
