"""What lesson 2 measures: histograms, row sums, three suspects, and sums of another order."""

import math

import numpy as np

from course_lib import bench, cuda
from course_lib.runtime.compile.fingerprint import fingerprint
from course_lib.runtime.host.launch import launch

BLOCK_SIZE = 256
N_BINS = 256
FULL_MASK = 0xFFFFFFFF
COMMAND = "python -m course_lib bench lesson_02 --record"


# ---- histograms --------------------------------------------------------------------------------


@cuda.jit
def histogram_race(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        counts[x[i]] += 1


@cuda.jit
def histogram_atomic(x, counts):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(counts, x[i], 1)


@cuda.jit
def histogram_shared(x, counts):
    local = cuda.shared.array(N_BINS, np.int32)
    for k in range(cuda.threadIdx.x, N_BINS, cuda.blockDim.x):
        local[k] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(local, x[i], 1)
    cuda.syncthreads()
    for k in range(cuda.threadIdx.x, N_BINS, cuda.blockDim.x):
        cuda.atomic.add(counts, k, local[k])


# ---- row sums: x (n_rows, n_cols) to y (n_rows) --------------------------------------------------


@cuda.jit
def row_sum_one_thread(x, y):
    row = cuda.grid(1)
    if row < x.shape[0]:
        total = np.float32(0)
        for col in range(x.shape[1]):
            total += x[row, col]
        y[row] = total


@cuda.jit
def row_sum_interleaved(x, y):
    s = cuda.shared.array(BLOCK_SIZE, np.float32)
    row, tid = cuda.blockIdx.x, cuda.threadIdx.x
    total = np.float32(0)
    for col in range(tid, x.shape[1], BLOCK_SIZE):
        total += x[row, col]
    s[tid] = total
    cuda.syncthreads()
    step = 1
    while step < BLOCK_SIZE:
        i = 2 * step * tid
        if i < BLOCK_SIZE:
            s[i] += s[i + step]
        cuda.syncthreads()
        step *= 2
    if tid == 0:
        y[row] = s[0]


@cuda.jit
def row_sum_halves(x, y):
    s = cuda.shared.array(BLOCK_SIZE, np.float32)
    row, tid = cuda.blockIdx.x, cuda.threadIdx.x
    total = np.float32(0)
    for col in range(tid, x.shape[1], BLOCK_SIZE):
        total += x[row, col]
    s[tid] = total
    cuda.syncthreads()
    step = BLOCK_SIZE // 2
    while step > 0:
        if tid < step:
            s[tid] += s[tid + step]
        cuda.syncthreads()
        step //= 2
    if tid == 0:
        y[row] = s[0]


@cuda.jit
def row_sum_warp(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        total = np.float32(0)
        for col in range(lane, x.shape[1], 32):
            total += x[row, col]
        step = 16
        while step > 0:
            total += cuda.shfl_down_sync(FULL_MASK, total, step)
            step //= 2
        if lane == 0:
            y[row] = total


ROW_SUMS = {  # label: kernel, blocks for n_rows rows
    "one thread per row": (row_sum_one_thread, lambda n_rows: math.ceil(n_rows / BLOCK_SIZE)),
    "tree, neighbours first": (row_sum_interleaved, lambda n_rows: n_rows),
    "tree, halves": (row_sum_halves, lambda n_rows: n_rows),
    "one warp per row": (row_sum_warp, lambda n_rows: math.ceil(n_rows * 32 / BLOCK_SIZE)),
}


# ---- the suspects of course_lib/teach/exercises/suspects.py, for rows of a multiple of 32 -----


@cuda.jit
def first(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        rounds = x.shape[1] // 32
        total = np.float32(0)
        for k in range(rounds):
            total += x[row, 32 * k + 31 - lane]
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(FULL_MASK, total, step)
        if lane == 0:
            y[row] = total


@cuda.jit
def second(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        rounds = x.shape[1] // 32
        total = np.float32(0)
        for k in range(rounds):
            total += x[row, rounds * lane + k]
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(FULL_MASK, total, step)
        if lane == 0:
            y[row] = total


@cuda.jit
def third(x, y):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < x.shape[0]:
        rounds = x.shape[1] // 32
        total = np.float32(0)
        for k in range(rounds):
            total += x[row, 32 * k + (5 * lane + k) % 32]
        for step in (16, 8, 4, 2, 1):
            total += cuda.shfl_down_sync(FULL_MASK, total, step)
        if lane == 0:
            y[row] = total


# ---- sums of all elements, in an order that is fixed or not --------------------------------------


@cuda.jit
def sum_atomic(x, total):
    i = cuda.grid(1)
    if i < x.size:
        cuda.atomic.add(total, 0, x[i])


@cuda.jit
def sum_fixed(x, total):
    """One block, so that the order is always the same; `total` has one element."""
    s = cuda.shared.array(BLOCK_SIZE, np.float32)
    tid = cuda.threadIdx.x
    own = np.float32(0)
    for i in range(tid, x.size, BLOCK_SIZE):
        own += x[i]
    s[tid] = own
    cuda.syncthreads()
    step = BLOCK_SIZE // 2
    while step > 0:
        if tid < step:
            s[tid] += s[tid + step]
        cuda.syncthreads()
        step //= 2
    if tid == 0:
        total[0] = s[0]


# ---- measuring -----------------------------------------------------------------------------------


def run(*, rounds=30, progress=lambda cases: cases):
    """All records of the lesson."""
    cases = (
        lambda: histograms(rounds=rounds),
        lambda: row_sums(rounds=rounds),
        lambda: suspects(rounds=rounds),
        lambda: float_sums(rounds=rounds),
    )
    return [measure() for measure in progress(cases)]


def histograms(*, n=2**26, rounds=30):
    """A record of three histograms of `n` pixels, those of the lesson's photograph over and over.

    Beside its time, each row has `counted_percent`: how many of the pixels it counted.
    """
    import torch

    pixels = torch.from_numpy(np.resize(_photograph(), n))
    sets = bench.buffer_sets(n)
    sources = [pixels.to("cuda") for _ in range(sets)]
    counts = torch.zeros(N_BINS, dtype=torch.int32, device="cuda")
    grids = {
        "plain += (wrong)": (histogram_race, math.ceil(n / BLOCK_SIZE)),
        "atomics": (histogram_atomic, math.ceil(n / BLOCK_SIZE)),
        "atomics in shared memory": (histogram_shared, 8 * bench.device_facts()["multiprocessors"]),
    }
    candidates = {
        label: lambda i, kernel=kernel, grid=grid: launch(
            kernel, grid, BLOCK_SIZE, sources[i % sets], counts
        )
        for label, (kernel, grid) in grids.items()
    }
    truth = torch.bincount(sources[0].long(), minlength=N_BINS)
    percent = {}
    for label, candidate in candidates.items():
        counts.zero_()
        candidate(0)
        if "wrong" not in label and not torch.equal(counts.long(), truth):
            raise AssertionError(f"{label} is wrong, so it is not timed")
        percent[label] = round(100 * counts.sum().item() / n, 3)
    timings, copy = _timed(candidates, n, sets, rounds)
    rows = [
        bench.row(label, "ours", timing, n, copy) | {"counted_percent": percent[label]}
        for label, timing in timings.items()
    ]
    return bench.make_record(
        "lesson_02.histogram", (n,), "uint8", n, copy, rows, fingerprint(histogram_shared), COMMAND
    )


def row_sums(kernels=None, *, shape=(131072, 512), rounds=30):
    """A record of the sums of each row of a float32 matrix.

    `kernels` has for each label a kernel `(x, y)` and a function from the number of rows to the
    number of blocks, of 256 threads each; by default those of this file.
    """
    return _row_sums("lesson_02.row_sum", kernels or ROW_SUMS, shape, rounds, row_sum_halves)


def suspects(kernels=(first, second, third), *, shape=(65536, 1024), rounds=30):
    """A record of the three kernels of the detective exercise: row sums by one warp per row."""
    warps = ROW_SUMS["one warp per row"][1]
    named = {
        name: (kernel, warps)
        for name, kernel in zip(("first", "second", "third"), kernels, strict=True)
    }
    return _row_sums("lesson_02.suspects", named, shape, rounds, second)


def _row_sums(name, kernels, shape, rounds, hashed):
    import torch

    n_rows, n_cols = shape
    n_bytes = 4 * n_rows * (n_cols + 1)
    sets = bench.buffer_sets(n_bytes)
    sources = [torch.randn(shape, device="cuda") for _ in range(sets)]
    targets = [torch.empty(n_rows, device="cuda") for _ in range(sets)]
    candidates = {
        label: lambda i, kernel=kernel, n_blocks=blocks(n_rows): launch(  # noqa: B008
            kernel, n_blocks, BLOCK_SIZE, sources[i % sets], targets[i % sets]
        )
        for label, (kernel, blocks) in kernels.items()
    }
    truth = sources[0].double().sum(1)
    for label, candidate in candidates.items():
        targets[0].fill_(math.nan)
        candidate(0)
        if not torch.allclose(targets[0].double(), truth, rtol=1e-5, atol=1e-3):
            raise AssertionError(f"{label} is wrong, so it is not timed")
    timings, copy = _timed(candidates, n_bytes, sets, rounds)
    rows = [bench.row(label, "ours", timing, n_bytes, copy) for label, timing in timings.items()]
    return bench.make_record(
        name, shape, "float32", n_bytes, copy, rows, fingerprint(hashed), COMMAND
    )


def float_sums(*, n=2**20, repeats=12, rounds=30):
    """A record of the sums of the same `n` float32 numbers, each taken `repeats` times.

    Each row has its `sums`; the record has the `exact` sum, taken in float64.
    """
    import torch

    numbers = (np.random.default_rng(0).random(n) * 2).astype(np.float32)
    x = torch.from_numpy(numbers).to("cuda")
    total = torch.zeros(1, device="cuda")
    candidates = {
        "float atomics": lambda i: launch(
            sum_atomic, math.ceil(n / BLOCK_SIZE), BLOCK_SIZE, x, total
        ),
        "fixed order": lambda i: launch(sum_fixed, 1, BLOCK_SIZE, x, total),
    }
    sums = {}
    for label, candidate in candidates.items():
        sums[label] = []
        for _ in range(repeats):
            total.zero_()
            candidate(0)
            sums[label].append(total.item())
    timings = bench.device_times(candidates, rounds=rounds)
    rows = [
        {
            "label": label,
            "kind": "ours",
            "microseconds": round(timing.microseconds, 3),
            "quartiles": [round(q, 3) for q in timing.quartiles],
            "sums": sums[label],
        }
        for label, timing in timings.items()
    ]
    record = bench.host_record(
        "lesson_02.float_sums", (n,), "float32", rows, fingerprint(sum_atomic), COMMAND
    )
    return record | {"exact": float(numbers.astype(np.float64).sum())}


def _photograph():
    """The pixels of the lesson's photograph, 512 × 512, one byte each."""
    import matplotlib.cbook
    import matplotlib.image

    with matplotlib.cbook.get_sample_data("grace_hopper.jpg") as file:
        photo = matplotlib.image.imread(file, format="jpg")
    return photo[20:532].mean(axis=2).astype(np.uint8).ravel()


def _timed(candidates, n_bytes, sets, rounds):
    """Timings of the candidates, and that of a copy that moves as many bytes."""
    import torch

    half = n_bytes // 2
    source, target = (torch.zeros(half, dtype=torch.uint8, device="cuda") for _ in range(2))
    copies = {"copy": lambda i: target.copy_(source)}
    timings = bench.device_times(candidates | copies, calls=max(5, sets), rounds=rounds)
    copy = timings.pop("copy")
    return timings, copy


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    measured = {
        "histogram": histogram_shared, "row_sum": row_sum_halves, "suspects": second,
        "float_sums": sum_atomic,
    }  # fmt: skip
    return {f"lesson_02.{name}": fingerprint(kernel) for name, kernel in measured.items()}
