"""Lesson 02: reductions.

| exercise | the kernel gets | what is new |
|---|---|---|
| histogram | x of n uint8, counts of 256 int32, all 0 | the atomic |
| histogram_shared | the same, any launch | shared memory, two barriers |
| block_sum | x of (n_rows, n_cols), y of n_rows; a block per row | the tree |
| warp_sum | the same; a warp per row, blocks of whole warps | the shuffle |
| find_the_slow_one | nothing: it returns an answer | reading an access map |
| global_avg_pool | x of (N, C, H, W), y of (N, C); a block per plane | all of it together |
| global_avg_pool_backward | dy of (N, C), dx of (N, C, H, W); a block per plane | its gradient |

Arrays are float32 where nothing else is said. Blocks of `block_sum` and `global_avg_pool` have
32, 64, 128 or 256 threads.
"""

import numpy as np

from course_lib import cuda
from course_lib.teach.checking.cases import drawn, numbers, with_zeros
from course_lib.teach.checking.work import Shares, Spares, Uses
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case
from course_lib.teach.exercises.lesson_01 import guarded

#: What float32 leaves of a sum. An order of additions that rounds more often than any sensible
#: one, one after the other, misses by 6e-4 of the largest number for 700 that are alike.
_SUM = Tolerance(
    0.0, 1e-3, "float32 rounds each of up to 1,300 additions, in whatever order", scaled=True
)
_MEAN = Tolerance(
    0.0, 6e-6, "float32 rounds each of up to 1,500 additions, in whatever order", scaled=True
)


@cuda.jit
def histogram(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(counts, x[i], 1)


def _grey(rng, n):
    # Most pictures have a few grey levels that are common, so that many threads meet in one bin.
    values = np.where(rng.random(n) < 0.4, rng.integers(0, 256), 256 * rng.beta(2, 5, n))
    values[: min(n, 5)] = np.array([255, 0, 0, 3, 255])[: min(n, 5)]
    return values.astype(np.uint8)


def _histogram_cases(rng):
    return [case(grid, block, x=_grey(rng, n)) for n, grid, block in guarded(rng)]


HISTOGRAM = Exercise(
    name="histogram",
    title="Count the grey levels",
    solution=histogram,
    reference=lambda x: np.bincount(x, minlength=256),
    cases=_histogram_cases,
    tolerance=EXACT,
    outputs=("counts",),
    dtype=np.int32,
    start=0,
    hints=(
        "To count one up is three steps: read, add, write. What if another thread reads between "
        "your read and your write?",
        "`cuda.atomic.add(array, index, value)` does the three steps in one, so that no other "
        "thread gets in between. The bin is the grey level itself, `x[i]`.",
        "```python\nif i < x.size:\n    cuda.atomic.add(counts, ..., 1)\n```",
    ),
)


@cuda.jit
def histogram_shared(x, counts):
    mine = cuda.shared.array(256, np.int32)
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        mine[level] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(mine, x[i], 1)
    cuda.syncthreads()
    for level in range(cuda.threadIdx.x, 256, cuda.blockDim.x):
        cuda.atomic.add(counts, level, mine[level])


def _histogram_shared_cases(rng):
    # Blocks of fewer threads than levels, and of more; fewer threads than elements, and more.
    launches = [
        (0, 1, 32),
        (1, 1, 32),
        (2, 1, 1),
        (5, 2, 8),
        (40, 2, 64),
        (65, 3, 32),
        (97, 1, 128),
        (200, 2, 33),
        (257, 1, 288),
        (300, 2, 96),
        (drawn(rng, 1030, 1500), 2, 512),
    ]
    return [case(grid, block, x=_grey(rng, n)) for n, grid, block in launches]


HISTOGRAM_SHARED = Exercise(
    name="histogram_shared",
    title="A histogram for each block",
    solution=histogram_shared,
    reference=lambda x: np.bincount(x, minlength=256),
    cases=_histogram_shared_cases,
    tolerance=EXACT,
    outputs=("counts",),
    dtype=np.int32,
    start=0,
    about=(Uses("shared memory"), Shares(evenly=True)),
    hints=(
        "Three parts: the block's own counters are set to 0, the block counts, the block adds "
        "what it has to `counts`. Between two parts, who has to wait for whom?",
        "There may be fewer threads than levels, or more: let each part be a loop that starts at "
        "the thread's own number. Counting is atomic in shared memory as well, since the threads "
        "of a block meet there; `cuda.syncthreads()` stands between the parts.",
        "```python\ncuda.syncthreads()\nfor i in range(cuda.grid(1), x.size, ...):\n"
        "    cuda.atomic.add(mine, x[i], 1)\n...\n```",
    ),
)


@cuda.jit
def block_sum(x, y):
    partial = cuda.shared.array(256, np.float32)
    row, t = cuda.blockIdx.x, cuda.threadIdx.x
    total = np.float32(0)
    for col in range(t, x.shape[1], cuda.blockDim.x):
        total += x[row, col]
    partial[t] = total
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        y[row] = partial[0]


def _row_cases(rng, launches):
    kinds = ((1.0, 0.0), (1.0, 100.0), (1e-6, 0.0))
    return [
        case(grid, block, x=numbers(rng, shape, *kinds[k % 3]) + _of_rows(rng, shape, k % 3))
        for k, (shape, grid, block) in enumerate(launches)
    ]


def _of_rows(rng, shape, kind):
    """Return what makes the rows of every second case differ from each other."""
    return (rng.uniform(-20, 20, (shape[0], 1)) * (kind == 1)).astype(np.float32)


def _block_sum_cases(rng):
    n_rows = drawn(rng, 9, 12)
    launches = [
        ((1, 1), 1, 32),
        ((2, 0), 2, 32),
        ((1, 5), 1, 32),
        ((3, 2), 3, 64),
        ((2, 33), 2, 32),
        ((1, 64), 1, 64),
        ((2, 100), 2, 128),
        ((1, 127), 1, 128),
        ((1, 300), 1, 256),
        ((3, 129), 3, 64),
        ((1, 400), 1, 128),
        ((n_rows, 3), n_rows, 32),
        ((2, drawn(rng, 1030, 1300)), 2, 256),
    ]
    return _row_cases(rng, launches)


BLOCK_SUM = Exercise(
    name="block_sum",
    title="The sum of a row, by a tree",
    solution=block_sum,
    reference=lambda x: x.sum(axis=1),
    cases=_block_sum_cases,
    tolerance=_SUM,
    about=(Spares("x"), Shares(evenly=True)),
    hints=(
        "First each thread adds up its share of the row, as in a grid-stride loop, but with the "
        "block's threads only. Then 128 numbers become 64, and 32, until one is left.",
        "In a round of `step`, thread `t < step` adds `partial[t + step]` to its own. All threads, "
        "also those with nothing to add, meet at a barrier before the next round, and before the "
        "first: somebody else wrote what you are about to read.",
        "```python\nwhile step > 0:\n    if t < step:\n        partial[t] += ...\n    ...\n"
        "    step //= 2\n```",
    ),
)


@cuda.jit
def warp_sum(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = np.float32(0)
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        step = 16
        while step > 0:
            total += cuda.shfl_down_sync(0xFFFFFFFF, total, step)
            step //= 2
        if lane == 0:
            y[row] = total


def _warp_sum_cases(rng):
    launches = [
        ((1, 1), 1, 32),
        ((2, 0), 2, 32),
        ((1, 5), 1, 64),
        ((3, 2), 1, 96),
        ((2, 33), 2, 32),
        ((1, 64), 1, 32),
        ((5, 31), 2, 96),
        ((3, 100), 1, 128),
        ((7, 40), 2, 128),
        ((1, drawn(rng, 1030, 1100)), 1, 32),
        ((drawn(rng, 33, 40), 3), 4, 320),
        ((drawn(rng, 12, 15), drawn(rng, 150, 170)), 1, 512),
    ]
    return _row_cases(rng, launches)


WARP_SUM = Exercise(
    name="warp_sum",
    title="The sum of a row, without shared memory",
    solution=warp_sum,
    reference=lambda x: x.sum(axis=1),
    cases=_warp_sum_cases,
    tolerance=_SUM,
    about=(Uses("shuffles"), Spares("x"), Shares(evenly=True)),
    hints=(
        "The tree is the same as before, with 16 for its first step. But a lane can read a "
        "register of another lane, so there is nothing to store and no barrier.",
        "`cuda.shfl_down_sync(0xFFFFFFFF, total, step)` gives a lane the `total` of the lane "
        "`step` further on. All 32 lanes must call it. In the end lane 0 has the sum.",
        "```python\nwhile step > 0:\n    total += cuda.shfl_down_sync(0xFFFFFFFF, total, ...)\n"
        "    step //= 2\n```",
    ),
)


def find_the_slow_one():
    return "second", 32  # its loads: 32 sectors a request, where the others have 4


FIND_THE_SLOW_ONE = Exercise(
    name="find_the_slow_one",
    title="Three kernels, one of them slow",
    solution=find_the_slow_one,
    kind="answer",
    outputs=("name", "sectors per request of its loads"),
    hints=(
        "Do not read the kernels: let each of them run under the tracer, and look at what one "
        "request touches.",
        "All three load the same bytes with the same number of requests. Compare "
        "`sectors_per_request` of the loads, in `t.table()`.",
        "```python\nwith simulator.trace() as t:\n    first[...](x, y)\nprint(t.table())\n```",
    ),
)


@cuda.jit
def global_avg_pool(x, y):
    N, C, H, W = x.shape
    partial = cuda.shared.array(256, np.float32)
    n, c, t = cuda.blockIdx.x // C, cuda.blockIdx.x % C, cuda.threadIdx.x
    total = np.float32(0)
    for i in range(t, H * W, cuda.blockDim.x):
        total += x[n, c, i // W, i % W]
    partial[t] = total
    cuda.syncthreads()
    step = cuda.blockDim.x // 2
    while step > 0:
        if t < step:
            partial[t] += partial[t + step]
        cuda.syncthreads()
        step //= 2
    if t == 0:
        y[n, c] = partial[0] / np.float32(H * W)


#: Shapes and threads per block: planes of one pixel, of fewer pixels than threads, and of more.
_PLANES = [
    ((1, 1, 1, 1), 32),
    ((1, 2, 1, 3), 32),
    ((2, 1, 3, 1), 32),
    ((2, 3, 2, 5), 64),
    ((1, 3, 7, 6), 32),
    ((3, 2, 4, 9), 32),
    ((1, 2, 8, 8), 64),
    ((1, 2, 11, 12), 128),
    ((1, 1, 17, 19), 256),
    ((1, 1, 20, 20), 128),
]


def _planes(rng):
    """Return the shapes above, some with one large length, and a drawn one above all of them."""
    return [
        *_PLANES,
        ((drawn(rng, 5, 7), 2, 1, 3), 32),
        ((1, drawn(rng, 9, 12), 2, 3), 32),
        ((1, 1, drawn(rng, 260, 280), 1), 64),
        ((1, 1, 1, drawn(rng, 260, 280)), 32),
        ((1, 2, drawn(rng, 13, 15), drawn(rng, 90, 100)), 256),
    ]


def _pool_cases(rng):
    return [
        case(n * c, block, x=numbers(rng, (n, c, h, w), 1.0, 100.0 * (k % 2)))
        for k, ((n, c, h, w), block) in enumerate(_planes(rng))
    ]


GLOBAL_AVG_POOL = Exercise(
    name="global_avg_pool",
    title="Global average pooling",
    solution=global_avg_pool,
    reference=lambda x: x.mean(axis=(2, 3)),
    cases=_pool_cases,
    tolerance=_MEAN,
    about=(Spares("x"), Shares(evenly=True)),
    hints=(
        "A plane is the `H * W` numbers of one channel of one picture. Its mean is its sum, which "
        "`block_sum` knows how to find, divided once by `H * W`.",
        "Block `b` has the plane of picture `b // C`, channel `b % C`. Number the plane's "
        "elements from 0 to `H * W - 1`: element `i` is in row `i // W` and column `i % W`.",
        "```python\nfor i in range(t, H * W, cuda.blockDim.x):\n    total += x[n, c, i // W, ...]\n"
        "...  # the tree of block_sum\n```",
    ),
)


@cuda.jit
def global_avg_pool_backward(dy, dx):
    N, C, H, W = dx.shape
    n, c = cuda.blockIdx.x // C, cuda.blockIdx.x % C
    share = dy[n, c] / np.float32(H * W)
    for i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):
        dx[n, c, i // W, i % W] = share


def _pool_backward_cases(rng):
    # The kernel does not get x, whose values the gradient does not need. It is here for its shape.
    return [
        case(
            n * c, block, dy=with_zeros(rng, numbers(rng, (n, c), 2.0, 0.5)),
            x=numbers(rng, (n, c, h, w)),
        )
        for (n, c, h, w), block in _planes(rng)
    ]


GLOBAL_AVG_POOL_BACKWARD = Exercise(
    name="global_avg_pool_backward",
    title="The gradient of global average pooling",
    solution=global_avg_pool_backward,
    reference=lambda dy, x: np.broadcast_to(
        dy[:, :, None, None] / (x.shape[2] * x.shape[3]), x.shape
    ),
    cases=_pool_backward_cases,
    tolerance=Tolerance(3e-7, 0.0, "one division, or a reciprocal and a product, in float32"),
    outputs=("dx",),
    call=lambda kernel, run: run.launch(kernel, run.dy, run.dx),
    once=True,
    primal=lambda x: x.mean(axis=(2, 3)),
    hints=(
        "Every pixel of a plane went into the mean with the same weight. So every pixel gets the "
        "same share of the gradient that comes in.",
        "The weight is `1 / (H * W)`. All the threads of a block read the same `dy[n, c]`; each "
        "writes to its own pixels of the plane.",
        "```python\nfor i in range(cuda.threadIdx.x, H * W, cuda.blockDim.x):\n"
        "    dx[n, c, i // W, i % W] = ...\n```",
    ),
)
