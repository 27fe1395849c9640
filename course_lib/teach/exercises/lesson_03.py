"""Lesson 03: softmax, from one thread per row to one pass for maximum and sum.

| exercise | the kernel gets | what is new |
|---|---|---|
| softmax_naive | x, y of (n_rows, n_cols); a thread per row | subtracting the maximum |
| count_the_bytes | nothing: it returns an answer | passes over a row |
| softmax_shared | the same; a block per row | two reductions in one memory |
| softmax_warp | the same; a warp per row, blocks of whole warps | the butterfly |
| online_merge | m1, s1, m2, s2, m, s of n elements | merging maxima with their sums |
| softmax_online | x, y; a warp per row | maximum and sum in one pass |

All arrays are float32. Blocks of `softmax_shared` have 32, 64, 128 or 256 threads. The online
softmax is that of Milakov and Gimelshein, "Online normalizer calculation for softmax", 2018.
"""

import math

import numpy as np

from course_lib import cuda, reference
from course_lib.runtime import intrinsics
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.work import Shares, Spares, Uses
from course_lib.teach.exercise import Exercise, Tolerance, case

MINUS_INF = np.float32(-np.inf)
MOST = float(np.finfo(np.float32).max)
ZERO, ONE = np.float32(0), np.float32(1)

#: x − max is rounded: by 4e-6 at most where exp of it is not 0 (numbers up to 88). So is each of
#: the additions, and exp turns what is added to its argument into a factor.
_SOFTMAX = Tolerance(
    2e-5, 1e-30, "x − max and some hundred additions are rounded to float32; below 1e-30 is 0"
)


#: Where rows have one element far above all others, so that nobody may overlook it: the first, the
#: last, the first of a team's second round, and some that only the later rounds of a tree bring in.
_PEAKS = (0, 32, -1, 10, 21, 3, 47, 64)


def _scores(rng, shape, kind):
    """Return rows in which it shows when the maximum is missing, wrong, or that of another row."""
    if kind == "spread":
        return numbers(rng, shape, 8.0)
    if kind == "lowest":  # as low as float32 goes: of each row only the largest is left
        return (-MOST * (1 - 0.02 * rng.random(shape))).astype(np.float32)
    if kind == "ends":  # from the lowest to the highest: the distance is infinite in float32
        return (rng.choice([-MOST, MOST], shape) * rng.random(shape)).astype(np.float32)
    offset = {"above": 1e4, "below": -1e5}.get(kind, 0.0)
    x = numbers(rng, shape, {"flat": 1e-6}.get(kind, 4.0 if offset else 1.0), offset)
    n_rows, n_cols = shape
    if kind == "rows":  # no two rows alike: with the maximum of another one, exp is 0 or infinite
        x += (500 * rng.permutation(n_rows)[:, None]).astype(np.float32)
    if kind == "spike":
        for row in range(n_rows):
            x[row, _PEAKS[row] % n_cols] += 200 + 10 * row
    if kind == "masked":
        mask = rng.random(shape) < 0.5
        mask[np.arange(n_rows), rng.integers(0, n_cols, n_rows)] = False  # a number in each row
        x[mask] = -np.inf
    return x


def _score_cases(rng, launches):
    return [case(grid, block, x=_scores(rng, shape, kind)) for shape, kind, grid, block in launches]


@cuda.jit
def softmax_naive(x, y):
    n_rows, n_cols = x.shape
    row = cuda.grid(1)
    if row < n_rows:
        largest = MINUS_INF
        for col in range(n_cols):
            largest = max(largest, x[row, col])
        total = np.float32(0)
        for col in range(n_cols):
            total += math.exp(x[row, col] - largest)
        for col in range(n_cols):
            y[row, col] = math.exp(x[row, col] - largest) / total


def _naive_cases(rng):
    launches = [
        ((1, 1), "above", 1, 32),
        ((0, 3), "plain", 1, 32),
        ((2, 0), "plain", 1, 8),
        ((1, 2), "below", 1, 1),
        ((3, 1), "below", 1, 32),
        ((2, 5), "masked", 2, 1),
        ((3, 4), "plain", 1, 8),
        ((8, 10), "spike", 1, 8),
        ((5, 9), "spread", 3, 2),
        ((33, 3), "rows", 2, 32),
        ((9, 20), "above", 2, 8),
        ((10, 17), "masked", 3, 4),
        ((1, drawn(rng, 1030, 1100)), "flat", 1, 32),
        ((4, 6), "lowest", 1, 8),
        ((7, 5), "ends", 1, 8),
        ((drawn(rng, 1030, 1100), 2), "rows", 3, 384),
    ]
    return _score_cases(rng, launches)


SOFTMAX_NAIVE = Exercise(
    name="softmax_naive",
    title="Softmax that never overflows",
    solution=softmax_naive,
    reference=reference.softmax,
    cases=_naive_cases,
    tolerance=_SOFTMAX,
    once=True,
    about=(Spares("x"),),
    forbids=("float64-promotion",),
    hints=(
        "`exp` of a large number is infinite. Subtract a number from the whole row first, so that "
        "no element is above 0. Which number do you subtract, and what do you need to know it?",
        "Three loops, one after the other: the first finds the largest element of the row, the "
        "second adds up `exp(x - largest)`, the third writes. Start the maximum at minus infinity: "
        "a row may be all negative.",
        "```python\nfor col in range(n_cols):\n    largest = max(largest, ...)\n"
        "for col in range(n_cols):\n    total += math.exp(x[row, col] - ...)\n```",
    ),
)


def count_the_bytes():
    one_pass = 4096 * 1000 * 4  # every number of the array once, 4 bytes each
    return 4 * one_pass, 3 * one_pass, 2 * one_pass


COUNT_THE_BYTES = Exercise(
    name="count_the_bytes",
    title="What softmax asks of memory",
    solution=count_the_bytes,
    kind="answer",
    outputs=("bytes with three passes", "bytes with two passes", "bytes at the least"),
    hints=(
        "Count how often the kernel reads each number of `x`, and how often it writes each of `y`.",
        "Three loops read the row three times; the last of them also writes it. A kernel of two "
        "passes does without one reading. At the least, each number is read once and written once.",
        "```python\none_pass = 4096 * 1000 * 4\nreturn ... * one_pass, ... * one_pass, ...\n```",
    ),
)


@cuda.jit
def softmax_shared(x, y):
    s = cuda.shared.array(256, np.float32)
    row, t, n_cols = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[1]
    largest = MINUS_INF
    for col in range(t, n_cols, cuda.blockDim.x):
        largest = max(largest, x[row, col])
    s[t] = largest
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step:
            s[t] = max(s[t], s[t + step])
        cuda.syncthreads()
        step //= 2
    largest = s[0]
    cuda.syncthreads()  # all have read it: s may be used again
    total = np.float32(0)
    for col in range(t, n_cols, cuda.blockDim.x):
        total += math.exp(x[row, col] - largest)
    s[t] = total
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step:
            s[t] += s[t + step]
        cuda.syncthreads()
        step //= 2
    for col in range(t, n_cols, cuda.blockDim.x):
        y[row, col] = math.exp(x[row, col] - largest) / s[0]


def _shared_cases(rng):
    launches = [
        ((1, 1), "above", 1, 32),
        ((2, 0), "plain", 2, 32),
        ((1, 5), "below", 1, 32),
        ((3, 2), "plain", 3, 64),
        ((1, 33), "spread", 1, 32),
        ((2, 40), "masked", 2, 32),
        ((1, 64), "below", 1, 64),
        ((2, 100), "spread", 2, 64),
        ((8, 70), "spike", 8, 64),
        ((1, 129), "flat", 1, 128),
        ((1, 300), "above", 1, 256),
        ((3, 9), "lowest", 3, 32),
        ((12, 6), "ends", 12, 32),
        ((2, drawn(rng, 1030, 1300)), "rows", 2, 256),
    ]
    return _score_cases(rng, launches)


SOFTMAX_SHARED = Exercise(
    name="softmax_shared",
    title="Softmax, a block per row",
    solution=softmax_shared,
    reference=reference.softmax,
    cases=_shared_cases,
    tolerance=_SOFTMAX,
    once=True,
    about=(Spares("x"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "Two trees, one after the other, in the same memory. The second one overwrites `s[0]`. Who "
        "may still have to read it?",
        "After the first tree every thread takes `s[0]` into a variable of its own. Then a "
        "barrier, since a fast thread must not write into `s` before a slow one has read. Then "
        "each thread adds up its share of `exp(x - largest)`, and the second tree is that of "
        "`block_sum`.",
        "```python\nlargest = s[0]\ncuda.syncthreads()\n"
        "for col in range(t, n_cols, cuda.blockDim.x):\n    total += ...\ns[t] = total\n"
        "...  # the tree of block_sum\n```",
    ),
)


@cuda.jit
def softmax_warp(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        largest = MINUS_INF
        for col in range(lane, x.shape[1], 32):
            largest = max(largest, x[row, col])
        for k in range(5):
            largest = max(largest, cuda.shfl_xor_sync(0xFFFFFFFF, largest, 1 << k))
        total = np.float32(0)
        for col in range(lane, x.shape[1], 32):
            total += math.exp(x[row, col] - largest)
        for k in range(5):
            total += cuda.shfl_xor_sync(0xFFFFFFFF, total, 1 << k)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - largest) / total


def _warp_cases(rng):
    launches = [
        ((1, 1), "above", 1, 32),
        ((2, 0), "plain", 2, 32),
        ((1, 5), "below", 1, 64),
        ((3, 2), "plain", 1, 96),
        ((1, 33), "spread", 1, 32),
        ((2, 40), "masked", 1, 64),
        ((1, 64), "below", 2, 32),
        ((5, 31), "rows", 2, 96),
        ((8, 70), "spike", 2, 128),
        ((1, drawn(rng, 1030, 1060)), "above", 1, 32),
        ((2, 19), "lowest", 1, 64),
        ((drawn(rng, 33, 40), 5), "ends", 4, 320),
        ((3, 7), "flat", 1, 128),
        ((drawn(rng, 12, 14), drawn(rng, 113, 130)), "rows", 1, 512),
    ]
    return _score_cases(rng, launches)


SOFTMAX_WARP = Exercise(
    name="softmax_warp",
    title="Softmax, a warp per row",
    solution=softmax_warp,
    reference=reference.softmax,
    cases=_warp_cases,
    tolerance=_SOFTMAX,
    once=True,
    about=(Spares("x"), Uses("shuffles", point=False), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "With `shfl_down_sync` only lane 0 has the result in the end. Here all lanes need the "
        "maximum, and all need the sum.",
        "`cuda.shfl_xor_sync(0xFFFFFFFF, value, 1 << k)` for k = 0 … 4: in each of the five rounds "
        "two lanes exchange what they have, and both combine it. In the end all have the same.",
        "```python\nfor k in range(5):\n"
        "    largest = max(largest, cuda.shfl_xor_sync(0xFFFFFFFF, largest, ...))\n```",
    ),
)


@cuda.jit
def online_merge(m1, s1, m2, s2, m, s):
    i = cuda.grid(1)
    if i < m1.size:
        largest = max(m1[i], m2[i])
        m[i] = largest
        if largest == MINUS_INF:  # neither part has a number yet
            s[i] = np.float32(0)
        else:
            s[i] = s1[i] * math.exp(m1[i] - largest) + s2[i] * math.exp(m2[i] - largest)


def _merge_reference(m1, s1, m2, s2):
    m = np.maximum(m1, m2)
    zero = np.isneginf(m)
    base = np.where(zero, 0.0, m)
    return m, np.where(zero, 0.0, s1 * np.exp(m1 - base) + s2 * np.exp(m2 - base))


def _merge_cases(rng):
    return [
        case(grid, block, **_pairs(rng, n))
        for n, grid, block in [
            (0, 1, 32),
            (1, 1, 1),
            (1, 1, 32),
            (2, 2, 1),
            (5, 1, 8),
            (33, 2, 32),
            (64, 2, 32),
            (97, 7, 16),
            (drawn(rng, 1030, 1300), 3, 512),
        ]
    ]


def _pairs(rng, n):
    """Return maxima and sums of two parts: near, far, equal, and without any number."""
    m1, m2 = numbers(rng, n, 2.0), numbers(rng, n, 2.0)
    s1, s2 = (1 + 9 * rng.random((2, n))).astype(np.float32)
    place = np.arange(n)
    for every, offset in ((1, 1e4), (2, -1e4)):
        m1[place % 8 == every] += np.float32(offset)
        m2[place % 8 == every] += np.float32(offset)
    m1[place % 8 == 3] += np.float32(300)  # the smaller one vanishes
    m2[place % 8 == 6] += np.float32(300)
    m2[place % 8 == 5] = m1[place % 8 == 5]
    for m in (m1, m2):  # as low as float32 goes: in one of them, or in both
        m[place % 48 == 10] = -3e38
        m[place % 48 == 34] = -MOST
    m1[place % 48 == 15] = -3.3e38
    m1[place % 48 == 43], m2[place % 48 == 43] = MOST, -MOST  # infinitely far apart in float32
    for m, s, without in ((m1, s1, (4, 9)), (m2, s2, (4, 20))):
        m[np.isin(place % 48, without)] = -np.inf
        s[np.isin(place % 48, without)] = 0
    return {"m1": m1, "s1": s1, "m2": m2, "s2": s2}


ONLINE_MERGE = Exercise(
    name="online_merge",
    title="Merging two maxima with their sums",
    solution=online_merge,
    reference=_merge_reference,
    cases=_merge_cases,
    once=True,
    tolerance=Tolerance(
        5e-6, 0.0, "the difference of two maxima is rounded, then exp, two products and a sum are"
    ),
    outputs=("m", "s"),
    forbids=("float64-promotion",),
    hints=(
        "The larger maximum is that of both. A sum that was made with another maximum has to be "
        "brought to it before it can be added.",
        "`s1` is a sum of `exp(x - m1)`. Times `exp(m1 - m)` it is a sum of `exp(x - m)`. Where "
        "both maxima are minus infinity, nothing was summed yet: the sum is 0.",
        "```python\nlargest = max(m1[i], m2[i])\nif largest == MINUS_INF:\n    s[i] = ...\nelse:\n"
        "    s[i] = s1[i] * math.exp(m1[i] - ...) + s2[i] * ...\n```",
    ),
)


@cuda.jit
def softmax_online(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        m, s = MINUS_INF, ZERO
        for col in range(lane, x.shape[1], 32):
            value = x[row, col]
            if value > m:
                s = s * math.exp(m - value) + ONE
                m = value
            elif value != MINUS_INF:
                s += math.exp(value - m)
        for k in range(5):
            m2 = cuda.shfl_xor_sync(0xFFFFFFFF, m, 1 << k)
            s2 = cuda.shfl_xor_sync(0xFFFFFFFF, s, 1 << k)
            m, s = intrinsics.online_merge(m, s, m2, s2)
        for col in range(lane, x.shape[1], 32):
            y[row, col] = math.exp(x[row, col] - m) / s


SOFTMAX_ONLINE = Exercise(
    name="softmax_online",
    title="Softmax in two passes",
    solution=softmax_online,
    reference=reference.softmax,
    cases=_warp_cases,
    tolerance=_SOFTMAX,
    once=True,
    about=(Spares("x", point=True), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "A single number `x` is a part of its own: its maximum is `x`, its sum is 1. So reading "
        "one more number is a merge with (x, 1).",
        "If the number is larger than `m`, the sum is brought to it, `s * exp(m - value)`, ONE is "
        "added, and it is the new `m`. If not, `exp(value - m)` is added. Minus infinity adds "
        "nothing: leave it out, since −∞ − (−∞) is not a number.",
        "```python\nif value > m:\n    s = s * math.exp(...) + ONE\n    m = value\n"
        "elif value != MINUS_INF:\n    s += ...\n```",
    ),
)
