"""Lesson 10: the other layers of a network, and what changes its weights.

| exercise | it gets | what is new |
|---|---|---|
| matmul_registers | a of (M, K), b of (N, K), c; 16 threads per tile of 8 × 8 | four sums |
| mma_tile | a of 16·K, b of 8·K, flat, c of (16, 8); one warp | the tensor core |
| channel_moments | x of (N, C, P), mean, variance; a block per channel | Welford, Chan's merge |
| max_pool | x of (planes, H, W), k, stride, y, at | the place of the maximum |
| max_pool_backward | dy, at, k, stride, dx | gathering, no atomics |
| adam_step | p, g, m, v, step, rate, …; any launch | two running means |

Arrays are float32, `at` is int32. The tiles are small, so that the simulator is quick.
"""

import math

import numpy as np

from course_lib import cuda, reference
from course_lib.runtime.intrinsics.matrix import load_word, multiply_add
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.work import Avoids, Spares, Uses
from course_lib.teach.exercise import Exercise, Tolerance, case

ZERO, ONE = np.float32(0), np.float32(1)
SIDE, TILE, DEPTH = 4, 8, 4  # threads along a tile's edge, numbers along it, numbers of k at once


# ---- matmul_registers ------------------------------------------------------------------------


@cuda.jit
def matmul_registers(a, b, c):
    sa = cuda.shared.array((TILE, DEPTH), np.float32)
    sb = cuda.shared.array((TILE, DEPTH), np.float32)
    (M, K), N = a.shape, b.shape[0]
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    row, col = TILE * cuda.blockIdx.y + ty, TILE * cuda.blockIdx.x + tx
    line = TILE * cuda.blockIdx.x + ty  # the row of b that this thread copies
    s00 = s01 = s10 = s11 = ZERO
    for first in range(0, K, DEPTH):
        k = first + tx
        for i in range(0, TILE, SIDE):
            sa[ty + i, tx] = a[row + i, k] if row + i < M and k < K else ZERO
            sb[ty + i, tx] = b[line + i, k] if line + i < N and k < K else ZERO
        cuda.syncthreads()
        for k in range(DEPTH):
            a0, a1 = sa[ty, k], sa[ty + SIDE, k]
            b0, b1 = sb[tx, k], sb[tx + SIDE, k]
            s00 += a0 * b0
            s01 += a0 * b1
            s10 += a1 * b0
            s11 += a1 * b1
        cuda.syncthreads()
    store(c, row, col, s00)
    store(c, row, col + SIDE, s01)
    store(c, row + SIDE, col, s10)
    store(c, row + SIDE, col + SIDE, s11)


@cuda.jit(device=True)
def store(c, row, col, value):
    """c[row, col] = value, where there is such an element."""
    if row < c.shape[0] and col < c.shape[1]:
        c[row, col] = value


def _matmul_cases(rng):
    sizes = [
        (1, 1, 1), (2, 3, 0), (2, 3, 3), (5, 2, 2), (3, 9, 1), (8, 8, 4), (4, 6, 5), (10, 7, 9),
        (271, 1, 1), (1, 269, 2), (1, 1, drawn(rng, 260, 290)),
        (drawn(rng, 25, 31), drawn(rng, 25, 31), drawn(rng, 17, 23)),
    ]  # fmt: skip
    return [
        # Where many are added up, smaller ones: they round by less than the tolerance.
        case((-(-n // TILE), -(-m // TILE)), (SIDE, SIDE),
             a=numbers(rng, (m, k), 1.0, 0.7) * np.float32(0.1 if k > 100 else 1.0),
             b=numbers(rng, (n, k), 1.5, 0.2) * np.float32(0.1 if k > 100 else 1.0))
        for m, n, k in sizes
    ]  # fmt: skip


MATMUL_REGISTERS = Exercise(
    name="matmul_registers",
    title="A matrix product with four sums a thread",
    solution=matmul_registers,
    reference=lambda a, b: a @ b.T,
    cases=_matmul_cases,
    tolerance=Tolerance(1e-6, 1e-5, "float32 rounds sums of up to 290 products"),
    outputs=("c",),
    once=True,
    about=(Uses("shared memory", point=False),),
    forbids=("float64-promotion",),
    hints=(
        "A thread has rows `ty` and `ty + SIDE` of the tile of a, and rows `tx` and `tx + SIDE` of "
        "the tile of b. How many products can it make of these four numbers?",
        "Copy two numbers of each tile, 0 where there is none (also where `k` is past the end). "
        "Barrier. For each of the DEPTH places, load two numbers of each tile and add four "
        "products to four sums. Barrier.",
        "```python\na0, a1 = sa[ty, k], sa[ty + SIDE, k]\nb0, b1 = ...\n"
        "s00 += a0 * b0\ns01 += a0 * b1\n...\n```",
    ),
)


# ---- mma_tile --------------------------------------------------------------------------------


@cuda.jit
def mma_tile(a, b, K, c):
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    ra, rb = cuda.local.array(4, np.uint32), cuda.local.array(2, np.uint32)
    acc = cuda.local.array(4, np.float32)
    for i in range(4):
        acc[i] = ZERO
    for k in range(0, K, 8):
        ra[0] = load_word(a, g * K + k + t)
        ra[1] = load_word(a, (g + 8) * K + k + t)
        ra[2] = load_word(a, g * K + k + t + 4)
        ra[3] = load_word(a, (g + 8) * K + k + t + 4)
        rb[0] = load_word(b, g * K + k + t)
        rb[1] = load_word(b, g * K + k + t + 4)
        multiply_add(acc, 0, ra, 0, rb, 0, a)
    c[g, 2 * t] = acc[0]
    c[g, 2 * t + 1] = acc[1]
    c[g + 8, 2 * t] = acc[2]
    c[g + 8, 2 * t + 1] = acc[3]


def _ten_bits(rng, n):
    # Numbers that TF32 holds exactly, of several sizes: only the sum is rounded.
    found = numbers(rng, n, 2.0, 0.6) * np.float32(2.0) ** rng.integers(-3, 1, n)
    return (found.astype(np.float32).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)


def _mma_cases(rng):
    return [
        case(1, 32, a=_ten_bits(rng, 16 * k), b=_ten_bits(rng, 8 * k), K=np.int64(k))
        for k in (8, 16, 0, 24, 32, 40, 72, 8 * drawn(rng, 13, 20))
    ]


MMA_TILE = Exercise(
    name="mma_tile",
    title="A matrix product on a tensor core",
    solution=mma_tile,
    reference=lambda a, b, K: a.reshape(16, K) @ b.reshape(8, K).T,
    cases=_mma_cases,
    tolerance=Tolerance(1e-6, 1e-4, "sums of up to 160 products, rounded to float32"),
    outputs=("c",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(kernel, run.a, run.b, run.K, run.c),
    once=True,
    about=(Uses("the tensor core"),),
    forbids=("float64-promotion",),
    hints=(
        "Look at the picture of the fragments. Lane 6 has g = 1 and t = 2. Which four numbers of a "
        "does it hold, and in which order?",
        "Row `r`, column `j` of a lies at `r * K + j`. Registers 0 and 1 have column `k + t` of "
        "rows `g` and `g + 8`; registers 2 and 3 have column `k + t + 4` of the same rows. Of b, "
        "register 0 has column `k + t` of row `g`, register 1 column `k + t + 4`.",
        "```python\nra[1] = load_word(a, (g + 8) * K + k + t)\n...\nc[g + 8, 2 * t] = acc[2]\n```",
    ),
)


# ---- channel_moments -------------------------------------------------------------------------


@cuda.jit
def channel_moments(x, mean, variance):
    counts = cuda.shared.array(256, np.float32)
    means = cuda.shared.array(256, np.float32)
    squares = cuda.shared.array(256, np.float32)
    c, t, P = cuda.blockIdx.x, cuda.threadIdx.x, x.shape[2]
    n = m = m2 = ZERO
    for i in range(t, x.shape[0] * P, cuda.blockDim.x):
        value = x[i // P, c, i % P]
        n += ONE
        delta = value - m
        m += delta / n
        m2 += delta * (value - m)
    counts[t], means[t], squares[t] = n, m, m2
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step and counts[t + step] > ZERO:
            n, other = counts[t], counts[t + step]
            delta = means[t + step] - means[t]
            counts[t] = n + other
            means[t] += delta * other / (n + other)
            squares[t] += squares[t + step] + delta * delta * n * other / (n + other)
        cuda.syncthreads()
        step //= 2
    if t == 0:
        mean[c] = means[0]
        variance[c] = squares[0] / counts[0]


def _moments_cases(rng):
    launches = [
        ((1, 1, 1), 32, 0.0),
        ((1, 2, 2), 32, 5.0),
        ((2, 1, 3), 32, 1e4),
        ((3, 2, 5), 64, 1e4),
        ((2, 3, 33), 32, -1e4),
        ((1, 1, 70), 64, 1e4),
        ((5, 1, 40), 128, 1e4),
        ((2, 1, 150), 256, 100.0),
        ((1, 9, 2), 32, 1e4),
        ((3, 2, drawn(rng, 345, 380)), 256, -1e3),
    ]
    return [
        case(shape[1], block, x=numbers(rng, shape, 1.0, offset))
        for shape, block, offset in launches
    ]


CHANNEL_MOMENTS = Exercise(
    name="channel_moments",
    title="Mean and variance in one pass, that hold",
    solution=channel_moments,
    reference=lambda x: (x.mean(axis=(0, 2)), x.var(axis=(0, 2))),
    cases=_moments_cases,
    tolerance=Tolerance(
        2e-5, 1e-6, "float32 rounds a mean as large as the largest input", scaled=True
    ),
    outputs=("mean", "variance"),
    about=(Spares("x"),),
    forbids=("float64-promotion",),
    hints=(
        "What Welford adds is two distances: from the old mean, and from the new one. And two "
        "parts with different means: which distance enters their common variance?",
        "A number: n += ONE, delta = value − m, m += delta / n, m2 += delta · (value − m), with "
        "the *new* m in the last one. Two parts: the mean moves by delta · other / total, and m2 "
        "gets the other's m2 and delta² · n · other / total.",
        "```python\nn += ONE\ndelta = value - m\nm += delta / n\nm2 += delta * ...\n```\n"
        "`squares[t] += squares[t + step] + delta * delta * ... / (n + other)`",
    ),
)


# ---- max_pool --------------------------------------------------------------------------------


@cuda.jit
def max_pool(x, k, stride, y, at):
    i = cuda.grid(1)
    if i < y.size:
        H, W = x.shape[1:]
        OH, OW = y.shape[1:]
        plane, oh, ow = i // (OH * OW), i // OW % OH, i % OW
        best, where = x[plane, oh * stride, ow * stride], oh * stride * W + ow * stride
        for h in range(oh * stride, oh * stride + k):
            for w in range(ow * stride, ow * stride + k):
                if x[plane, h, w] > best:
                    best, where = x[plane, h, w], h * W + w
        y[plane, oh, ow] = best
        at[plane, oh, ow] = where


#: Planes, H, W, window, stride, blocks, threads.
_POOLED = [
    (1, 1, 1, 1, 1, 1, 32),
    (0, 3, 3, 2, 1, 1, 32),
    (1, 2, 2, 2, 2, 1, 32),
    (2, 3, 4, 2, 2, 1, 32),
    (1, 4, 3, 3, 1, 2, 8),
    (3, 5, 4, 2, 2, 2, 16),
    (2, 5, 6, 3, 2, 1, 64),
    (2, 6, 5, 2, 1, 2, 33),
    (3, 4, 7, 2, 3, 3, 32),
    (3, 9, 10, 4, 3, 1, 32),
    (2, 1, 9, 1, 7, 1, 32),
]


def _pools(rng):
    """Return the problems above, two whose options are drawn, and one of a drawn size as well."""
    far = 1, 13, 15, drawn(rng, 6, 7), drawn(rng, 5, 6), 1, 32
    large = 2, drawn(rng, 17, 19), drawn(rng, 19, 21), drawn(rng, 2, 3), drawn(rng, 1, 2), 2, 512
    return [*_POOLED, (2, 7, 8, drawn(rng, 1, 5), drawn(rng, 1, 4), 4, 33), far, large]


def _ties(rng, shape, stride=1):
    # Negative numbers, most of them, and two equal maxima: the first is the maximum's place.
    # Windows far apart have it in their last place.
    x = numbers(rng, shape, 2.0, -6.0)
    if stride > 4:
        x = np.sort(x, axis=None).reshape(shape)
    x[1::2] *= np.float32(1e37)  # every second plane as low as float32 goes, and as high
    if x.size > 1:
        x[0, 0, :2] = x[0].max() + ONE
    return x


def _pool_reference(x, k, stride):
    y, at = reference.max_pool2d(x[None], int(k), stride=int(stride))
    return y[0], at[0]


def _pool_cases(rng):
    found = [
        case(grid, block, x=_ties(rng, (n, H, W), stride), k=np.int64(k), stride=np.int64(stride))
        for n, H, W, k, stride, grid, block in _pools(rng)
    ]
    # Windows of nothing but −∞, which no comparison with −∞ tells from no window at all.
    x = _ties(rng, (2, 4, 6))
    x[-1, 2:] = -np.inf
    many = _ties(rng, (1043, 1, 1))  # planes
    large = _ties(rng, (3, drawn(rng, 21, 22), drawn(rng, 22, 23)))
    options = {name: np.int64(n) for name, n in (("k", drawn(rng, 2, 3)), ("stride", 2))}
    one, two = np.int64(1), np.int64(2)
    return [*found, case(1, 48, x=x, k=two, stride=two), case(3, 384, x=many, k=one, stride=one),
            case(2, 512, x=large, **options)]  # fmt: skip


MAX_POOL = Exercise(
    name="max_pool",
    title="Max pooling, and where the maximum was",
    solution=max_pool,
    reference=_pool_reference,
    cases=_pool_cases,
    outputs=("y", "at"),
    dtype={"y": np.float32, "at": np.int32},
    once=True,
    forbids=("float64-promotion",),
    call=lambda kernel, run: run.launch(kernel, run.x, run.k, run.stride, run.y, run.at),
    hints=(
        "Thread i has output i. Which plane, row and column of y is that, and where does its "
        "window begin in x?",
        "The window begins at row `oh * stride`, column `ow * stride`. Start with its first "
        "element, not with 0 or −∞: all may be negative, or −∞. Take another one only if it is "
        "*larger*, so that of equal ones the first counts. Its place is `h * W + w`.",
        "```python\nfor h in range(oh * stride, oh * stride + k):\n    for w in ...:\n"
        "        if x[plane, h, w] > best:\n            best, where = ..., h * W + w\n```",
    ),
)


# ---- max_pool_backward -----------------------------------------------------------------------


@cuda.jit
def max_pool_backward(dy, at, k, stride, dx):
    i = cuda.grid(1)
    if i < dx.size:
        H, W = dx.shape[1:]
        OH, OW = dy.shape[1:]
        plane, h, w = i // (H * W), i // W % H, i % W
        total = ZERO
        for oh in range(max(0, (h - k) // stride + 1), min(OH, h // stride + 1)):
            for ow in range(max(0, (w - k) // stride + 1), min(OW, w // stride + 1)):
                if at[plane, oh, ow] == h * W + w:
                    total += dy[plane, oh, ow]
        dx[plane, h, w] = total


def _pool_backward_cases(rng):
    found = []
    for n, H, W, k, stride, _, block in _pools(rng):
        x = _ties(rng, (n, H, W), stride)
        at = _pool_reference(x, k, stride)[1].astype(np.int32)
        grid = max(1, -(-n * H * W // block))
        found.append(
            case(grid, block, dy=numbers(rng, at.shape, 1.0, 2.0), at=at, k=np.int64(k),
                 stride=np.int64(stride), x=x)
        )  # fmt: skip
    return found


def _pool_backward_reference(dy, at, k, stride, x):
    n, H, W = x.shape
    if n == 0:
        return np.zeros_like(x)
    return reference.max_pool2d_backward(dy[None], at[None], (1, n, H, W))[0]


MAX_POOL_BACKWARD = Exercise(
    name="max_pool_backward",
    title="The gradient of max pooling, without atomics",
    solution=max_pool_backward,
    reference=_pool_backward_reference,
    cases=_pool_backward_cases,
    tolerance=Tolerance(1e-6, 2e-6, "float32 rounds sums of up to 9 numbers"),
    outputs=("dx",),
    dtype=np.float32,
    call=lambda kernel, run: run.launch(kernel, run.dy, run.at, run.k, run.stride, run.dx),
    once=True,
    about=(Avoids("atomics"), Spares("at")),
    forbids=("float64-promotion",),
    repeatable=True,
    hints=(
        "A thread for each element of x, not of y. Which windows cover row h? The last of them "
        "begins at h or above, the first still reaches h.",
        "Window `oh` covers the rows from `oh * stride` to `oh * stride + k - 1`. So the last one "
        "is `h // stride`, and the first `(h - k) // stride + 1`; none below 0, and none past OH. "
        "The same with columns. Add `dy` where `at` is `h * W + w`.",
        "```python\nfor oh in range(max(0, (h - k) // stride + 1), min(OH, ...)):\n"
        "    for ow in range(...):\n        if at[plane, oh, ow] == ...:\n"
        "            total += ...\n```",
    ),
)


# ---- adam_step -------------------------------------------------------------------------------


@cuda.jit
def adam_step(p, g, m, v, step, rate, new_p, new_m, new_v):
    beta1, beta2 = np.float32(0.9), np.float32(0.999)
    correction1 = ONE - math.pow(beta1, np.float32(step))
    correction2 = ONE - math.pow(beta2, np.float32(step))
    for i in range(cuda.grid(1), p.size, cuda.gridsize(1)):
        new_m[i] = beta1 * m[i] + (ONE - beta1) * g[i]
        new_v[i] = beta2 * v[i] + (ONE - beta2) * g[i] * g[i]
        size = math.sqrt(new_v[i] / correction2) + np.float32(1e-8)
        new_p[i] = p[i] - rate * (new_m[i] / correction1) / size


def _adam_reference(p, g, m, v, step, rate):
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    size = np.sqrt(np.maximum(v, 0) / (1 - 0.999**step)) + 1e-8
    return p - rate * (m / (1 - 0.9**step)) / size, m, v


def _adam_cases(rng):
    launches = [
        (1, 1, 1, 32, 1.0),
        (0, 1, 1, 32, 1.0),
        (2, 2, 1, 32, 1.0),
        (3, 1, 1, 32, 1e-8),  # as small as epsilon
        (5, 3, 2, 4, 1.0),
        (33, 1, 1, 32, 1.0),
        (40, 10, 2, 32, 1.0),
        (70, 100, 1, 64, 1.0),
        (65, 4, 3, 32, 1.0),
        (9, 3, 1, 32, 0.0),  # gradients that have always been 0
        (drawn(rng, 1030, 1200), drawn(rng, 5, 50), 1, 288, 1.0),
    ]
    return [
        case(
            grid, block, p=numbers(rng, n, 1.0, 0.5), g=numbers(rng, n, size, 0.8 * size),
            m=numbers(rng, n, 0.5 * size, 0.2 * size),
            v=np.abs(numbers(rng, n, 0.5)) * np.float32(1 if size == 1 else size * size / 1000),
            step=np.int64(step), rate=np.float32(rng.uniform(0.003, 0.03)),
        )
        for n, step, grid, block, size in launches
    ]  # fmt: skip


ADAM_STEP = Exercise(
    name="adam_step",
    title="One step of Adam",
    solution=adam_step,
    reference=_adam_reference,
    cases=_adam_cases,
    tolerance=Tolerance(
        1e-5, 2e-6, "1 − 0.999 and its powers lose four digits of float32, and v is small"
    ),
    outputs=("new_p", "new_m", "new_v"),
    call=lambda kernel, run: run.launch(
        kernel, run.p, run.g, run.m, run.v, run.step, run.rate, run.new_p, run.new_m, run.new_v
    ),
    once=True,
    forbids=("float64-promotion",),
    hints=(
        "Each weight has two numbers of its own: a running mean of its gradients, and one of their "
        "squares. New: nine tenths of the old, a tenth of the new.",
        "m gets (ONE − beta1) · g, v gets (ONE − beta2) · g². Divide the *new* m by correction1 "
        "and the new v by correction2. The step is rate · m / (√v + 1e-8), and it goes downhill.",
        "```python\nnew_m[i] = beta1 * m[i] + (ONE - beta1) * g[i]\nnew_v[i] = ...\n"
        "size = math.sqrt(...) + np.float32(1e-8)\nnew_p[i] = p[i] - rate * ... / size\n```",
    ),
)
