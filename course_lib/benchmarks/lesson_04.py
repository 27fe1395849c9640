"""What lesson 4 measures: latency, loads in flight, what registers bring, teams, CUDA graphs."""

import math
import time

import numpy as np

from course_lib import bench, cuda
from course_lib.benchmarks import profile_softmax
from course_lib.kernels.softmax import softmax
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import block_max, block_sum, load_vector, store_vector

BLOCK_SIZE = 256
DEVICE = "cuda"
WIDTH = 4  # float32 numbers in 16 bytes
SLOTS = 8  # numbers per lane of `teams_kernel`
ZERO, HUGE, LOWEST = np.float32(0), np.float32(1e30), np.float32(-np.inf)
LINE_BYTES = 128  # what a cache keeps or throws away as one
COMMAND = "python -m course_lib bench lesson_04 --record"


# ---- latency: a chain in which every address is the answer to the request before ----------------


@cuda.jit
def chase_kernel(chain, place, n_steps):
    i = place[0]
    for _ in range(n_steps):
        i = chain[i]
    place[0] = i


FOOTPRINTS = {"L1 cache": 2**14, "L2 cache": 2**23, "device memory": 2**29}


def latency(*, n_steps=20_000, rounds=30):
    """A record of the nanoseconds of one load, by where the number is.

    Each row has `nanoseconds`; `microseconds` is the time of all `n_steps` of one thread.
    """
    import torch

    timings = {}
    for label, n_bytes in FOOTPRINTS.items():
        n_lines = n_bytes // LINE_BYTES
        order = torch.randperm(n_lines, device=DEVICE, dtype=torch.int32) * (LINE_BYTES // 4)
        chain = torch.zeros(n_bytes // 4, dtype=torch.int32, device=DEVICE)
        chain[order.long()] = order.roll(-1)  # one circle through all lines
        place = order[:1].clone()
        candidates = {
            label: lambda i, chain=chain, place=place: launch(
                chase_kernel, 1, 1, chain, place, n_steps
            )
        }
        timings |= bench.device_times(candidates, calls=2, rounds=rounds)
    rows = [
        _row(label, timing) | {"nanoseconds": round(timing.microseconds * 1e3 / n_steps, 1)}
        for label, timing in timings.items()
    ]
    return _host_record("lesson_04.latency", (n_steps,), "int32", rows)


# ---- in flight: bandwidth of kernels that keep a known number of loads under way -----------------


def _reader(n_loads):
    """A kernel whose threads have `n_loads` loads of 16 bytes under way, never more."""

    @cuda.jit
    def reader_kernel(x, y):
        values = cuda.local.array((n_loads, WIDTH), np.float32)
        step, vector = cuda.gridsize(1), cuda.grid(1)
        n_vectors = x.shape[0] // WIDTH
        total = ZERO
        while vector + (n_loads - 1) * step < n_vectors:
            for u in range(n_loads):
                load_vector(values[u], x, (vector + u * step) * WIDTH)
            for u in range(n_loads):
                for k in range(WIDTH):
                    total += values[u, k]
            vector += n_loads * step
            if total > HUGE:  # never: but the next addresses must wait for these answers
                vector += 1
        y[cuda.grid(1)] = total

    return reader_kernel


@cuda.jit
def narrow_reader_kernel(x, y):
    step, i = cuda.gridsize(1), cuda.grid(1)
    total = ZERO
    while i < x.shape[0]:
        total += x[i]
        i += step
        if total > HUGE:
            i += 1
    y[cuda.grid(1)] = total


READERS = {n_loads: _reader(n_loads) for n_loads in (1, 2, 4)}
#: (loads under way per thread, bytes of each, threads per multiprocessor, which have room for all).
IN_FLIGHT = [
    (1, 4, 256), (1, 4, 512), (1, 4, 1024), (1, 4, 2048),
    (1, 16, 256), (1, 16, 512), (1, 16, 1024), (1, 16, 2048),
    (2, 16, 256), (2, 16, 512), (2, 16, 1024), (2, 16, 2048),
    (4, 16, 256), (4, 16, 512), (4, 16, 1024), (4, 16, 2048),
]  # fmt: skip


def in_flight(*, n=2**27, rounds=30):
    """A record of reading `n` float32 numbers with a known number of bytes under way.

    Each row has `loads` per thread, `load_bytes` of each, `threads` per multiprocessor, bytes
    `in_flight` per multiprocessor, and the `bytes` it reads: whole rounds of all threads.
    """
    import torch

    x = torch.rand(n, device=DEVICE)
    n_chips = bench.device_facts()["multiprocessors"]
    candidates, facts = {}, {}
    for n_loads, n_bytes, n_threads in IN_FLIGHT:
        label = f"{n_threads} threads × {n_loads} × {n_bytes} bytes"
        kernel = READERS[n_loads] if n_bytes == 16 else narrow_reader_kernel
        n_blocks = n_chips * n_threads // BLOCK_SIZE
        y = torch.zeros(n_blocks * BLOCK_SIZE, device=DEVICE)
        n_round = y.numel() * n_loads * n_bytes // 4  # numbers that all threads read at a time
        part = x[: n // n_round * n_round]
        candidates[label] = lambda i, kernel=kernel, n_blocks=n_blocks, part=part, y=y: launch(
            kernel, n_blocks, BLOCK_SIZE, part, y
        )
        candidates[label](0)
        if not math.isclose(y.double().sum().item(), part.double().sum().item(), rel_tol=1e-4):
            raise AssertionError(f"{label} is wrong, so it is not timed")
        facts[label] = {
            "loads": n_loads, "load_bytes": n_bytes, "threads": n_threads,
            "in_flight": n_threads * n_loads * n_bytes, "bytes": 4 * part.numel(),
        }  # fmt: skip
    timings = bench.device_times(candidates, calls=3, rounds=rounds)
    rows = [
        _row(label, timing)
        | facts[label]
        | {"gbps": round(facts[label]["bytes"] / timing.microseconds / 1e3, 1)}
        for label, timing in timings.items()
    ]
    record = _host_record("lesson_04.in_flight", (n,), "float32", rows)
    return record | {"multiprocessors": n_chips}


# ---- steps: from the online rung to the last, one change at a time; rows of 4,096 ----------------

HELD, PIECES = 16, 4  # numbers, and 16-byte pieces, per thread: 256 threads hold 4,096


@cuda.jit
def held_narrow_kernel(x, y, n_cols):
    scratch = cuda.shared.array(32, np.float32)
    values = cuda.local.array(HELD, np.float32)
    start, tid = cuda.blockIdx.x * n_cols, cuda.threadIdx.x
    m, s = LOWEST, ZERO
    for k in range(HELD):
        values[k] = x[start + k * BLOCK_SIZE + tid]
    for k in range(HELD):
        m = max(m, values[k])
    m = block_max(m, scratch)
    for k in range(HELD):
        values[k] = math.exp(values[k] - m)
        s += values[k]
    factor = np.float32(1) / block_sum(s, scratch)
    for k in range(HELD):
        y[start + k * BLOCK_SIZE + tid] = values[k] * factor


@cuda.jit
def held_wide_kernel(x, y, n_cols):
    scratch = cuda.shared.array(32, np.float32)
    values = cuda.local.array((PIECES, WIDTH), np.float32)
    start, tid = cuda.blockIdx.x * n_cols, cuda.threadIdx.x
    m, s = LOWEST, ZERO
    for v in range(PIECES):
        load_vector(values[v], x, start + (v * BLOCK_SIZE + tid) * WIDTH)
    for v in range(PIECES):
        for k in range(WIDTH):
            m = max(m, values[v, k])
    m = block_max(m, scratch)
    for v in range(PIECES):
        for k in range(WIDTH):
            values[v, k] = math.exp(values[v, k] - m)
            s += values[v, k]
    factor = np.float32(1) / block_sum(s, scratch)
    for v in range(PIECES):
        for k in range(WIDTH):
            values[v, k] *= factor
        store_vector(y, start + (v * BLOCK_SIZE + tid) * WIDTH, values[v])


def steps(*, n_rows=8192, rounds=30):
    """A record of softmax over rows of 4,096: `online`, then one change after another."""
    n_cols = BLOCK_SIZE * HELD

    def held(kernel):
        return lambda x, y: launch(kernel, n_rows, BLOCK_SIZE, x, y, n_cols, flat=True)

    candidates = {
        "online: 4 bytes, read twice": _rung("online"),
        "held in registers, 4 bytes": held(held_narrow_kernel),
        "held in registers, 16 bytes": held(held_wide_kernel),
        "registers, as in the library": _rung("registers"),
    }
    return _softmax_record("lesson_04.steps", (n_rows, n_cols), candidates, rounds)


# ---- teams: short rows, and the size of the team that takes one ----------------------------------


@cuda.jit
def teams_kernel(x, y, team):
    values = cuda.local.array(SLOTS, np.float32)
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    m, s = LOWEST, ZERO
    for k in range(SLOTS):
        col = k * team + rank
        values[k] = x[row, col] if col < n_cols else LOWEST
    for k in range(SLOTS):
        m = max(m, values[k])
    step = team // 2
    while step > 0:
        m = max(m, cuda.shfl_xor_sync(0xFFFFFFFF, m, step))
        step //= 2
    for k in range(SLOTS):
        values[k] = math.exp(values[k] - m)
        s += values[k]
    step = team // 2
    while step > 0:
        s += cuda.shfl_xor_sync(0xFFFFFFFF, s, step)
        step //= 2
    for k in range(SLOTS):
        col = k * team + rank
        if col < n_cols:
            y[row, col] = values[k] / s


def teams(*, shape=(2**19, 64), rounds=30):
    """A record of softmax over short rows, by teams of several sizes."""
    n_rows = shape[0]

    def team_of(team):
        n_blocks = math.ceil(n_rows * team / BLOCK_SIZE)
        return lambda x, y: launch(teams_kernel, n_blocks, BLOCK_SIZE, x, y, team)

    candidates = {"a block of 256 threads (warp)": _rung("warp")}
    candidates |= {f"a team of {team} lanes": team_of(team) for team in (32, 16, 8)}
    candidates["registers, as in the library"] = _rung("registers")
    return _softmax_record("lesson_04.teams", shape, candidates, rounds)


def _rung(variant):
    return lambda x, y: softmax.forward(x, variant=variant, out=y)


def _softmax_record(name, shape, candidates, rounds):
    import torch

    n_bytes = 2 * 4 * math.prod(shape)
    sets = bench.buffer_sets(n_bytes)
    sources = [torch.randn(shape, device=DEVICE) for _ in range(sets)]
    targets = [torch.empty(shape, device=DEVICE) for _ in range(sets)]
    truth = torch.softmax(sources[0].double(), -1)
    calls = {}
    for label, candidate in candidates.items():
        targets[0].fill_(math.nan)
        candidate(sources[0], targets[0])
        if not torch.allclose(targets[0].double(), truth, rtol=1e-5, atol=1e-7):
            raise AssertionError(f"{label} is wrong, so it is not timed")
        calls[label] = lambda i, candidate=candidate: candidate(
            sources[i % sets], targets[i % sets]
        )
    copies = {"copy": lambda i: targets[i % sets].copy_(sources[i % sets])}
    timings = bench.device_times(calls | copies, calls=max(5, sets), rounds=rounds)
    copy = timings.pop("copy")
    rows = [bench.row(label, "ours", timing, n_bytes, copy) for label, timing in timings.items()]
    digest = kernel_hashes()[name]
    return bench.make_record(name, shape, "float32", n_bytes, copy, rows, digest, COMMAND)


# ---- graphs: a hundred small softmaxes, one after the other --------------------------------------


def graphs(*, shape=(128, 200), calls=100, rounds=30):
    """A record of the time from the first of `calls` calls to the end of the last, per call.

    Host and device together: called from Python one by one, and replayed from one CUDA graph.
    """
    import torch

    x = torch.randn(shape, device=DEVICE)
    y = torch.empty_like(x)
    bodies = {
        "torch.softmax": lambda: torch.softmax(x, -1, out=y),
        "our kernel": lambda: softmax.forward(x, out=y),
    }
    candidates = {}
    for label, body in bodies.items():
        graph = _captured(body, calls)
        candidates[f"{label}, {calls} calls"] = lambda body=body: [body() for _ in range(calls)]
        candidates[f"{label}, one graph of {calls}"] = graph.replay
    samples = {label: [] for label in candidates}
    for turn in range(rounds + 2):
        for label, candidate in candidates.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            candidate()
            torch.cuda.synchronize()
            if turn >= 2:
                samples[label].append((time.perf_counter() - start) * 1e6 / calls)
    kinds = {label: "peer" if label.startswith("torch") else "ours" for label in candidates}
    rows = [
        _row(label, bench.Timing.of(found)) | {"kind": kinds[label]}
        for label, found in samples.items()
    ]
    return _host_record("lesson_04.graphs", shape, "float32", rows)


def _captured(body, calls):
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            body()
    return graph


def _row(label, timing):
    return {
        "label": label,
        "kind": "ours",
        "microseconds": round(timing.microseconds, 3),
        "quartiles": [round(q, 3) for q in timing.quartiles],
    }


def _host_record(name, shape, dtype, rows):
    return bench.host_record(name, shape, dtype, rows, kernel_hashes()[name], COMMAND)


def kernel_hashes():
    """{name of a record: hash of the kernels measured}, the profiler's record among them."""
    rungs = profile_softmax.kernels()
    measured = {
        "lesson_04.latency": [chase_kernel],
        "lesson_04.in_flight": [narrow_reader_kernel, *READERS.values()],
        "lesson_04.steps": [held_narrow_kernel, held_wide_kernel, *rungs],
        "lesson_04.teams": [teams_kernel, *rungs],
        "lesson_04.graphs": softmax.FORWARD["registers"].kernels,
        profile_softmax.NAME: rungs,
    }
    return {name: bench.kernel_hash(kernels) for name, kernels in measured.items()}


def run(*, rounds=30, progress=lambda cases: cases):
    """All records of the lesson."""
    cases = (latency, in_flight, steps, teams, graphs)
    return [measure(rounds=rounds) for measure in progress(cases)]
