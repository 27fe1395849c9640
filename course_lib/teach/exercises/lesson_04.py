"""Lesson 04: softmax at the limit of the chip, its gradient, and its place in PyTorch.

| exercise | it gets | what is new |
|---|---|---|
| bytes_in_flight | four numbers | Little's law |
| softmax_registers | x, y flat, n_cols; a warp per row | a row in registers, 16 bytes at a time |
| softmax_teams | x, y, team; `team` lanes per row | several rows for each warp |
| blocks_per_multiprocessor | two numbers | occupancy |
| softmax_backward | dy, y, dx of (n_rows, n_cols); a warp per row | the gradient of a whole row |
| softmax_function | two launchers | torch.autograd |

All arrays are float32. Rows of `softmax_registers` have at most 128 · VECTORS numbers, a multiple
of 4; those of `softmax_teams` at most SLOTS · team.
"""

import math

import numpy as np

from course_lib import cuda, reference
from course_lib.runtime.host.launch import launch
from course_lib.runtime.intrinsics import load_vector, store_vector, warp_max, warp_sum
from course_lib.teach.checking.cases import drawn, numbers
from course_lib.teach.checking.work import Coalesces, Shares, Spares
from course_lib.teach.exercise import EXACT, Exercise, Tolerance, case
from course_lib.teach.exercises.blocks import require_any_order
from course_lib.teach.late_torch import torch, warm_up

WIDTH = 4  # float32 numbers in 16 bytes
VECTORS = 2  # 16-byte pieces of a row that each lane holds
SLOTS = 8  # numbers of a row that each lane of a team holds
MINUS_INF = np.float32(-np.inf)
MOST = float(np.finfo(np.float32).max)

#: As in lesson 03: x − max is rounded, and exp turns what is added to its argument into a factor.
_SOFTMAX = Tolerance(
    2e-5, 1e-30, "x − max and a few hundred additions are rounded to float32; below 1e-30 is 0"
)


# ---- bytes_in_flight -------------------------------------------------------------------------


def bytes_in_flight(gbps, latency_ns, n_multiprocessors, n_threads):
    whole_chip = gbps * latency_ns  # 10⁹ bytes/s · 10⁻⁹ s: the powers of ten cancel
    per_multiprocessor = whole_chip / n_multiprocessors
    return per_multiprocessor, per_multiprocessor / n_threads


def _flight_reference(gbps, latency_ns, n_multiprocessors, n_threads):
    n_bytes = gbps * 1e9 * (latency_ns * 1e-9)
    return n_bytes / n_multiprocessors, n_bytes / n_multiprocessors / n_threads


def _flight_cases(rng):
    chips = [
        (1, 1, 1, 1),
        (2100, 600, 132, 2048),
        (4200, 600, 132, 2048),
        (320, 400, 40, 1024),
        (900, 450, 80, 2048),
        (100, 1000, 7, 32),
        (1555, 500, 108, 1),
        (3350, 700, 114, 512),
        tuple(drawn(rng, 70_000, 90_000) for _ in range(4)),
        tuple(drawn(rng, 100, 900) for _ in range(4)),
    ]
    return [
        case(
            1, 1,
            gbps=np.float64(gbps * (1 + rng.random())),
            latency_ns=np.float64(ns * (1 + rng.random())),
            n_multiprocessors=np.int64(chip), n_threads=np.int64(threads),
        )
        for gbps, ns, chip, threads in chips
    ]  # fmt: skip


def _numbers_of(function, run):
    """Call a function of plain numbers, and return its numbers as the check wants them."""
    found = function(*(value.item() for value in run.case.inputs.values()))
    wanted = run.exercise.outputs
    if len(wanted) > 1 and not isinstance(found, tuple | list):
        return found
    parts = found if isinstance(found, tuple | list) else (found,)
    dtype = run.exercise.output_dtype(run.case)
    return tuple(
        dtype.type(each) if isinstance(each, int | float | np.number) else each for each in parts
    )


BYTES_IN_FLIGHT = Exercise(
    name="bytes_in_flight",
    title="How much must be under way",
    solution=bytes_in_flight,
    kind="function",
    reference=_flight_reference,
    cases=_flight_cases,
    tolerance=Tolerance(1e-9, 0.0, "a product and two divisions of float64 numbers"),
    outputs=("per_multiprocessor", "per_thread"),
    dtype=np.float64,
    call=_numbers_of,
    hints=(
        "Think of a shop: so many customers come per minute, and each stays for so many minutes. "
        "How many are in the shop?",
        "Bytes under way = bytes per second · seconds that each is under way. GB/s is 10⁹ bytes "
        "per second and a nanosecond is 10⁻⁹ seconds. Then share them out: among the "
        "multiprocessors, and each one's among its threads.",
        "```python\nwhole_chip = gbps * ...\nper_multiprocessor = whole_chip / ...\n"
        "return per_multiprocessor, ...\n```",
    ),
)


# ---- softmax_registers -----------------------------------------------------------------------


@cuda.jit
def softmax_registers(x, y, n_cols):
    values = cuda.local.array((VECTORS, WIDTH), np.float32)
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    start = row * n_cols
    if start < x.size:
        m, s = MINUS_INF, np.float32(0)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = MINUS_INF
            col = (32 * v + lane) * WIDTH
            if col < n_cols:
                load_vector(values[v], x, start + col)
        for v in range(VECTORS):
            for k in range(WIDTH):
                m = max(m, values[v, k])
        m = warp_max(m)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] = math.exp(values[v, k] - m)
                s += values[v, k]
        s = warp_sum(s)
        for v in range(VECTORS):
            for k in range(WIDTH):
                values[v, k] /= s
            col = (32 * v + lane) * WIDTH
            if col < n_cols:
                store_vector(y, start + col, values[v])


def _scores(rng, shape, kind):
    """Return rows in which it shows when the maximum is missing, wrong, or that of another row."""
    if kind == "lowest":  # as low as float32 goes: of each row only the largest is left
        return (-MOST * (1 - 0.02 * rng.random(shape))).astype(np.float32)
    if kind == "ends":  # from the lowest to the highest: the distance is infinite in float32
        return (rng.choice([-MOST, MOST], shape) * rng.random(shape)).astype(np.float32)
    scale, offset = {
        "spread": (8, 0), "high": (1, 1e4), "low": (6, -1e5), "flat": (1e-6, 0)
    }.get(kind, (1, 0))  # fmt: skip
    x = numbers(rng, shape, scale, offset)
    n_rows, n_cols = shape
    if kind == "rows":  # no two rows alike: with the maximum of another one, exp is 0 or infinite
        x += (500 * rng.permutation(n_rows)[:, None]).astype(np.float32)
    if kind == "spike":
        # One element far above the others, in each row at another place, the last one first.
        for row in range(n_rows):
            x[row, (n_cols - 1 - 3 * row) % n_cols] += 200 + 60 * row
    if kind == "masked" and x.size > 1:
        x[-1, -1] = x[0, 0] = -np.inf
    return x


def _registers_cases(rng):
    launches = [
        ((0, 8), "plain", 1, 32),
        ((1, 4), "high", 1, 32),
        ((2, 4), "low", 2, 32),
        ((3, 8), "masked", 1, 96),
        ((2, 36), "spike", 1, 64),
        ((1, 124), "spread", 1, 32),
        ((2, 128), "low", 1, 64),
        ((1, 132), "spike", 1, 32),
        ((3, 100), "spike", 2, 64),
        ((1, 256), "high", 1, 32),
        ((2, 12), "lowest", 1, 128),
        ((drawn(rng, 17, 20), 4), "ends", 2, 320),
        ((drawn(rng, 9, 12), 4 * drawn(rng, 35, 63)), "rows", 1, 512),
    ]
    return [
        case(grid, block, x=_scores(rng, shape, kind).ravel(), n_cols=np.int64(shape[1]))
        for shape, kind, grid, block in launches
    ]


SOFTMAX_REGISTERS = Exercise(
    name="softmax_registers",
    title="A row in registers",
    solution=softmax_registers,
    reference=lambda x, n_cols: reference.softmax(x.reshape(-1, n_cols)).ravel(),
    cases=_registers_cases,
    tolerance=_SOFTMAX,
    call=lambda kernel, run: run.launch(kernel, run.x, run.y, run.n_cols),
    once=True,
    about=(Spares("x", point=True), Spares("x", point=True, pieces=True), Coalesces("x")),
    forbids=("float64-promotion",),
    hints=(
        "A lane takes the 16-byte pieces `lane`, `lane + 32`, `lane + 64`, … of its row. With "
        "which column does piece `32 * v + lane` begin?",
        "Piece number p begins with column `p * WIDTH`, and it is there if that is less than "
        "`n_cols`. Load all pieces first; what is not there stays minus infinity, of which exp is "
        "0. At the end `store_vector` takes the same pieces to the same columns.",
        "```python\ncol = (32 * v + lane) * WIDTH\nif col < n_cols:\n"
        "    load_vector(values[v], x, ...)\n```",
    ),
)


# ---- softmax_teams ---------------------------------------------------------------------------


@cuda.jit(device=True)
def team_max(value, team):
    """Largest `value` of `team` neighbouring lanes; all 32 lanes of the warp must call."""
    step = team // 2
    while step > 0:
        value = max(value, cuda.shfl_xor_sync(0xFFFFFFFF, value, step))
        step //= 2
    return value


@cuda.jit(device=True)
def team_sum(value, team):
    """Sum of `value` over `team` neighbouring lanes; all 32 lanes of the warp must call."""
    step = team // 2
    while step > 0:
        value += cuda.shfl_xor_sync(0xFFFFFFFF, value, step)
        step //= 2
    return value


@cuda.jit
def softmax_teams(x, y, team):
    values = cuda.local.array(SLOTS, np.float32)
    row, rank = cuda.grid(1) // team, cuda.grid(1) % team
    n_cols = x.shape[1] if row < x.shape[0] else 0
    m, s = MINUS_INF, np.float32(0)
    for k in range(SLOTS):
        col = k * team + rank
        values[k] = x[row, col] if col < n_cols else MINUS_INF
        m = max(m, values[k])
    m = team_max(m, team)
    for k in range(SLOTS):
        values[k] = math.exp(values[k] - m)
        s += values[k]
    s = team_sum(s, team)
    for k in range(SLOTS):
        col = k * team + rank
        if col < n_cols:
            y[row, col] = values[k] / s


def _teams_cases(rng):
    team = 2 ** drawn(rng, 2, 3)
    launches = [
        ((0, 3), "plain", 4, 1, 32),
        ((1, 1), "high", 1, 1, 32),
        ((2, 2), "low", 1, 1, 32),
        ((5, 3), "spike", 2, 1, 32),
        ((3, 8), "masked", 1, 1, 32),
        ((7, 10), "spike", 8, 2, 32),
        ((9, 13), "spread", 4, 1, 64),
        ((4, 16), "plain", 2, 1, 32),
        ((3, 33), "high", 16, 2, 32),
        ((5, 64), "low", 8, 1, 64),
        ((3, 70), "spike", 32, 1, 96),
        ((2, 256), "flat", 32, 1, 64),
        ((3, 11), "lowest", 2, 1, 32),
        ((drawn(rng, 260, 280), 2), "ends", 1, 1, 288),
        ((drawn(rng, 40, 60), team * drawn(rng, 5, 7) + drawn(rng, 0, 3)), "rows", team, 1,
         32 * (8 + team)),
    ]
    return [
        case(grid, block, x=_scores(rng, shape, kind), team=np.int64(team))
        for shape, kind, team, grid, block in launches
    ]


SOFTMAX_TEAMS = Exercise(
    name="softmax_teams",
    title="Several rows for each warp",
    solution=softmax_teams,
    reference=lambda x, team: reference.softmax(x),
    cases=_teams_cases,
    tolerance=_SOFTMAX,
    call=lambda kernel, run: run.launch(kernel, run.x, run.y, run.team),
    once=True,
    about=(Spares("x"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "Number all threads of the launch: the first `team` of them have row 0, the next `team` "
        "row 1. What is a thread's row, and which of its team is it?",
        "`row = cuda.grid(1) // team`, `rank = cuda.grid(1) % team`. A thread takes columns "
        "`rank`, `rank + team`, `rank + 2 * team`, …. Threads behind the last row must not leave: "
        "others of their warp wait for them in the shuffles. Give them a row of no columns.",
        "```python\nn_cols = x.shape[1] if row < ... else 0\nfor k in range(SLOTS):\n"
        "    col = k * team + ...\n    values[k] = x[row, col] if col < ... else MINUS_INF\n```",
    ),
)


# ---- blocks_per_multiprocessor ---------------------------------------------------------------


def blocks_per_multiprocessor(n_threads, n_registers):
    n_warps = math.ceil(n_threads / 32)  # of a block
    per_thread = math.ceil(n_registers / 8) * 8
    room = 4 * (16384 // (32 * per_thread))  # warps whose registers fit, in all four parts
    return min(room // n_warps, 64 // n_warps, 32)


def _occupancy_reference(n_threads, n_registers):
    warps = -(-n_threads // 32)
    handed_out = 32 * 8 * -(-n_registers // 8)
    in_a_part = 16384 // handed_out
    return min(4 * in_a_part // warps, 2048 // (32 * warps), 32)


def _occupancy_cases(rng):
    launches = [
        (1, 16), (32, 16), (33, 64), (256, 32), (256, 33), (256, 40), (100, 40), (1024, 16),
        (1024, 64), (1024, 65), (512, 128), (96, 52), (96, 255), (640, 48), (672, 41), (160, 21),
    ]  # fmt: skip
    shift = int(rng.integers(0, 2))  # a register more or less within the same eight
    few = drawn(rng, 9, 24)  # registers: what decides are the warps, and they come whole
    launches += [(32 * drawn(rng, 3, 5) + drawn(rng, 1, 6), few), (drawn(rng, 33, 60), few + 1)]
    launches += [(drawn(rng, 65, 999), drawn(rng, 26, 64)), (1023, drawn(rng, 57, 63))]
    launches.append((drawn(rng, 800, 1024), drawn(rng, 500, 900)))  # not even one
    return [
        case(1, 1, n_threads=np.int64(t), n_registers=np.int64(r - shift if r % 8 == 0 else r))
        for t, r in launches
    ]


BLOCKS_PER_MULTIPROCESSOR = Exercise(
    name="blocks_per_multiprocessor",
    title="How many blocks fit",
    solution=blocks_per_multiprocessor,
    kind="function",
    reference=_occupancy_reference,
    cases=_occupancy_cases,
    tolerance=EXACT,
    outputs=("blocks",),
    dtype=np.float64,  # half a block would show
    call=_numbers_of,
    hints=(
        "Count in warps. How many warps is a block? How many warps does a multiprocessor take, by "
        "each of the rules? The smallest number decides.",
        "A block has `n_threads / 32` warps, rounded up. A warp takes 32 times the registers of a "
        "thread, rounded up to eights. A part of the multiprocessor has room for `16384 // that` "
        "warps, all four parts for four times as many. Blocks come whole: round down.",
        "```python\nn_warps = math.ceil(n_threads / 32)\nroom = 4 * (16384 // ...)\n"
        "return min(room // n_warps, ..., 32)\n```",
    ),
)


# ---- softmax_backward ------------------------------------------------------------------------


@cuda.jit
def softmax_backward(dy, y, dx):
    row, lane = cuda.grid(1) // 32, cuda.threadIdx.x % 32
    if row < y.shape[0]:
        total = np.float32(0)
        for col in range(lane, y.shape[1], 32):
            total += y[row, col] * dy[row, col]
        total = warp_sum(total)
        for col in range(lane, y.shape[1], 32):
            dx[row, col] = y[row, col] * (dy[row, col] - total)


def _backward_cases(rng):
    launches = [
        ((1, 1), "plain", 1, 32),
        ((2, 0), "plain", 1, 64),
        ((1, 2), "plain", 1, 32),
        ((2, 5), "spread", 1, 64),
        ((3, 3), "plain", 2, 64),
        ((1, 33), "plain", 1, 64),
        ((3, 31), "spread", 3, 32),
        ((2, 64), "plain", 1, 96),
        ((5, 40), "spread", 2, 96),
        ((1, drawn(rng, 1030, 1060)), "plain", 1, 32),
        ((drawn(rng, 33, 40), 4), "spread", 4, 320),
        ((drawn(rng, 12, 14), drawn(rng, 113, 130)), "rows", 1, 512),
    ]
    return [case(grid, block, **_gradients(rng, *each)) for *each, grid, block in launches]


def _gradients(rng, shape, kind):
    """Return dy, y and x. The kernel does not get x; finite differences are taken with it."""
    x = _scores(rng, shape, kind)
    y = reference.softmax(x).astype(np.float32) if x.size else x
    return {"dy": numbers(rng, shape, 2.0, 3.0), "y": y, "x": x}


SOFTMAX_BACKWARD = Exercise(
    name="softmax_backward",
    title="The gradient of softmax",
    solution=softmax_backward,
    reference=lambda dy, y, x: y * (dy - (y * dy).sum(axis=1, keepdims=True)),
    cases=_backward_cases,
    tolerance=Tolerance(
        1e-5, 2e-6, "float32 rounds a sum of up to 1,060 products, then a difference", scaled=True
    ),
    outputs=("dx",),
    call=lambda kernel, run: run.launch(kernel, run.dy, run.y, run.dx),
    once=True,
    primal=lambda y, x: reference.softmax(x),
    about=(Spares("y"), Spares("dy"), Shares(evenly=True)),
    forbids=("float64-promotion",),
    hints=(
        "The formula has a sum over the row in it, and each element needs that sum. So there are "
        "two loops, and something between them.",
        "First loop: this lane's share of Σ y · dy. Then all 32 lanes need the whole sum, which "
        "`warp_sum` gives to each of them. Second loop: the formula.",
        "```python\nfor col in range(lane, y.shape[1], 32):\n    total += y[row, col] * ...\n"
        "total = warp_sum(total)\n```",
    ),
)


# ---- softmax_function ------------------------------------------------------------------------


def softmax_function(compute_y, compute_dx):
    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = compute_y(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, dy):
            return compute_dx(dy, *ctx.saved_tensors)

    return Softmax.apply


@cuda.jit
def _softmax_kernel(x, y):
    # One thread per row: the exercise is about what stands around it.
    row = cuda.grid(1)
    if row < x.shape[0]:
        m, s = MINUS_INF, np.float32(0)
        for col in range(x.shape[1]):
            m = max(m, x[row, col])
        for col in range(x.shape[1]):
            s += math.exp(x[row, col] - m)
        for col in range(x.shape[1]):
            y[row, col] = math.exp(x[row, col] - m) / s


@cuda.jit
def _gradient_kernel(dy, y, dx):
    row = cuda.grid(1)
    if row < y.shape[0]:
        total = np.float32(0)
        for col in range(y.shape[1]):
            total += y[row, col] * dy[row, col]
        for col in range(y.shape[1]):
            dx[row, col] = y[row, col] * (dy[row, col] - total)


class _Launcher:
    """A launcher of one of the two kernels above, that counts how often it was called."""

    def __init__(self, name, kernel):
        self.name, self.kernel, self.calls = name, kernel, 0

    def __call__(self, *tensors):
        for tensor in tensors:
            if not isinstance(tensor, torch.Tensor):
                what = type(tensor).__name__
                raise TypeError(f"{self.name} takes tensors; it got a value of type {what}")
        if len({tensor.shape for tensor in tensors}) > 1:
            shapes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors)
            raise TypeError(f"{self.name} takes tensors of one shape; it got {shapes}")
        self.calls += 1
        # A gradient may be one number that is repeated without being copied: `expand`.
        tensors = [tensor.contiguous() for tensor in tensors]
        result = torch.empty_like(tensors[0])
        if result.numel():
            launch(self.kernel, 1, 32, *tensors, result)
        return result


def _train_twice(function, run):
    """Two forward passes, then both backward passes: each must find what it needs."""
    compute_y = _Launcher("compute_y", _softmax_kernel)
    compute_dx = _Launcher("compute_dx", _gradient_kernel)
    apply = function(compute_y, compute_dx)
    if not callable(apply):
        kind = type(apply).__name__
        raise TypeError(f"it must return something to call, Softmax.apply; it returned a {kind}")
    one, other = (_tensor(run.x), -_tensor(run.x))
    one.requires_grad_()
    other.requires_grad_()
    y, y_other = apply(one), apply(other)
    for result in (y, y_other):
        if not isinstance(result, torch.Tensor):
            raise TypeError(f"what it returned gives a {type(result).__name__} for a tensor")
        if not result.requires_grad:
            raise ValueError("its result knows no gradient: it is not on the way back to x")
    y.backward(_tensor(run.dy))
    y_other.sum().backward()
    _require_used(compute_y, 2)
    _require_used(compute_dx, 2)
    dx, dx_other = one.grad, other.grad
    if dx is None or dx_other is None:
        raise ValueError("x has no gradient after y.backward(dy): backward returned None")
    if one.numel() > 6:  # in the smallest cases wrong numbers shall show first
        calls = ((one,), _tensor(run.dy)), ((other,), torch.ones_like(other))
        require_any_order(apply, calls, [[dx], [dx_other]])
        _require_noticed(apply, one)
    return y, y_other, dx, dx_other


def _tensor(array):
    """A copy of the array as a tensor, on the GPU if the array is there."""
    if isinstance(array, np.ndarray):
        return torch.from_numpy(array.copy())
    return torch.from_numpy(array.copy_to_host()).to("cuda")


def _require_noticed(apply, x):
    """Raise unless a change of y between the passes is noticed, as PyTorch notices it."""
    y = apply(x.detach().clone().requires_grad_())
    y.detach().add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
    else:
        raise ValueError(
            "y was changed in place between forward and backward, and nobody noticed: the "
            "gradients are wrong without a word. ctx.save_for_backward keeps watch; a tensor in "
            "any other place, ctx.y for example, is not watched"
        )


def _require_used(launcher, times):
    if launcher.calls != times:
        raise ValueError(
            f"{launcher.name} was called {launcher.calls} times in {times} forward and {times} "
            f"backward passes, and should have been called {times} times"
        )


def _function_reference(x, dy):
    y, other = reference.softmax(x), reference.softmax(-x)
    ones = np.ones_like(x)
    return y, other, _gradient(dy, y), _gradient(ones, other)


def _gradient(dy, y):
    return y * (dy - (y * dy).sum(axis=1, keepdims=True))


def _function_cases(rng):
    warm_up()
    shapes = [(1, 1), (1, 2), (2, 1), (0, 3), (2, 3), (3, 2), (1, 9), (5, 4), (7, 11)]
    shapes.append((drawn(rng, 9, 30), drawn(rng, 17, 30)))
    return [
        case(1, 32, x=_scores(rng, shape, "spread"), dy=numbers(rng, shape, 2.0, 3.0))
        for shape in shapes
    ]


SOFTMAX_FUNCTION = Exercise(
    name="softmax_function",
    title="Your kernels in PyTorch",
    solution=softmax_function,
    kind="launcher",
    reference=_function_reference,
    cases=_function_cases,
    tolerance=Tolerance(
        2e-5, 1e-5, "float32 rounds x − max, two sums and a difference", scaled=True
    ),
    outputs=("y", "y_other", "dx", "dx_other"),
    call=_train_twice,
    hints=(
        "PyTorch calls `forward` on the way to the loss and `backward` on the way back. What does "
        "the gradient of softmax need from the forward pass?",
        "`ctx.save_for_backward(y)` keeps a tensor, and `ctx.saved_tensors` is the tuple of those "
        "that were kept. `backward` returns one gradient for each argument of `forward` after "
        "`ctx`.",
        "```python\ny = compute_y(x)\nctx.save_for_backward(...)\nreturn y\n```",
    ),
)
