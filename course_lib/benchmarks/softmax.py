"""Softmax on a GPU: our rungs beside PyTorch eager, torch.compile, Triton and a copy.

Forward at every shape and dtype beside all three, backward beside eager; log-softmax at one shape.
Before anything is timed it is checked, against float64. Ends with the readers' table
(`softmax_table`): what a batch of 128 rows of 200 classes costs.
"""

import importlib.util
import math

import numpy as np
import torch

from course_lib import bench, reference
from course_lib.benchmarks import softmax_table
from course_lib.benchmarks.limits import copies, fastest_copy
from course_lib.benchmarks.softmax_table import decisions
from course_lib.kernels import softmax

SHAPES = [
    (128, 200), (128, 1000), (1024, 10000), (49152, 512), (16384, 1024), (8192, 4096),
    (4096, 50304), (2048, 131072),
]  # fmt: skip
LOG_SHAPES = [(8192, 4096)]
DTYPES = ("float32", "bfloat16")
N_DIMS = 2
COMMAND = "python -m course_lib bench softmax --record"
SAMPLE = 1 << 19  # elements checked at each end: float64 on the CPU takes its time
LONGEST_CALL = 50_000  # µs; a slower rung is left out, and the record says so
TUNED_ELEMENTS = 1 << 28  # in one replay while the settings of Triton are chosen
REPLAY = 5_000  # µs that one replay of a captured graph may take
SHORTEST_SPLIT = 4096  # columns from which on `split` is timed: it is for long rows
# The largest error allowed before anything is timed: forward relative to the row's largest |y|,
# backward to its largest |y| times its largest |dy|; log-softmax, see `_expected`. A
# peer is allowed four times as much: it is not under test.
_TOLERANCE = {"float32": 1e-6, "bfloat16": 4e-3, "float16": 5e-4}
_aten = torch.ops.aten
_EAGER = {
    "softmax.forward": lambda x, out: torch.softmax(x, -1, out=out),
    "log_softmax.forward": lambda x, out: torch.log_softmax(x, -1, out=out),
    "softmax.backward": lambda dy, y, out: _aten._softmax_backward_data.out(
        dy, y, -1, y.dtype, grad_input=out
    ),
    "log_softmax.backward": lambda dy, y, out: _aten._log_softmax_backward_data.out(
        dy, y, -1, y.dtype, out=out
    ),
}


def run(*, names=None, shapes=SHAPES, dtypes=DTYPES, rounds=20, progress=lambda cases: cases):
    """Check, then time, each case. Returns records, the readers' table among them.

    Of `names`, such as ["softmax.forward"], only these. Raises ValueError for a shape that is not
    (n_rows, n_cols), both positive.
    """
    for shape in shapes:
        if len(shape) != 2 or not all(shape):
            raise ValueError(f"a shape is (rows, columns), both positive; not {tuple(shape)}")
    cases = [
        (operation, direction, tuple(shape), dtype)
        for shape in shapes
        for dtype in dtypes
        for operation in softmax.OPERATIONS.values()
        for direction in ("forward", "backward")
        if operation is softmax.softmax or tuple(shape) in LOG_SHAPES
        if names is None or f"{operation.name}.{direction}" in names
    ]
    records = [_measure(*case, rounds) for case in progress(cases)]
    if names is None or "softmax.table" in names:
        records += softmax_table.run(rounds=rounds)
    return records


def kernel_hash(operation, direction):
    """Of all that the default variant may launch, at any shape, and of what decides it."""
    variants = operation.VARIANTS if direction == "forward" else operation.BACKWARD_VARIANTS
    return bench.kernel_hash((*variants["registers"], *variants["split"], *decisions()))


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    today = {
        f"{operation.name}.{direction}": kernel_hash(operation, direction)
        for operation in softmax.OPERATIONS.values()
        for direction in ("forward", "backward")
    }
    return today | {"softmax.table": softmax_table.kernel_hash()}


def _measure(operation, direction, shape, dtype, rounds):
    name, forward = f"{operation.name}.{direction}", direction == "forward"
    n_arrays = 2 if forward else 3
    n_bytes = n_arrays * math.prod(shape) * getattr(torch, dtype).itemsize
    sets = bench.buffer_sets(n_bytes)
    inputs = [_inputs(operation, forward, shape, dtype) for _ in range(sets)]
    outputs = [torch.empty_like(inputs[0][0]) for _ in range(sets)]
    expected = _expected(operation, forward, inputs[0])

    ours, left_out = _ours(operation, forward, shape, inputs, outputs)
    peers = {"PyTorch eager": _in_place(_EAGER[name], inputs, outputs)}
    if forward:
        peers |= _forward_peers(operation, inputs, outputs)
    calls = {}
    for label, candidate in (ours | peers).items():
        outputs[0].fill_(math.nan)
        tolerance = _TOLERANCE[dtype] * (1 if label in ours else 4)
        _check(label, candidate(0), expected, tolerance)
        microseconds = _once(candidate)
        if microseconds > LONGEST_CALL and label in ours:
            left_out[label] = f"a call takes {microseconds / 1e3:,.0f} ms"
            del ours[label]
        # Enough calls to drown the start of a graph, but slow candidates need no more than one.
        calls[label] = max(1, min(max(60, sets), int(REPLAY / microseconds)))
    candidates = ours | peers | copies(n_bytes, sets)
    calls |= dict.fromkeys(candidates.keys() - calls.keys(), max(calls.values()))
    timings = bench.device_times(candidates, calls=calls, rounds=rounds)
    copy = fastest_copy(timings)
    rows = [
        bench.row(label, "ours" if label in ours else "peer", timing, n_bytes, copy)
        for label, timing in timings.items()
    ]
    record = bench.make_record(
        name, shape, dtype, n_bytes, copy, rows, kernel_hash(operation, direction), COMMAND
    )
    return record | {"default": _default(forward, shape), "left_out": left_out}


def _default(forward, shape):
    return softmax.default_variant(shape[-1], 1 if forward else 2)


def _inputs(operation, forward, shape, dtype):
    x = torch.randn(shape, device="cuda").mul_(3).to(getattr(torch, dtype))
    return (x,) if forward else (torch.randn_like(x), operation.forward(x))


def _ours(operation, forward, shape, inputs, outputs):
    """({rung: function(i)}, {rung: why it is left out})."""
    call = operation.forward if forward else operation.backward
    candidates, left_out = {}, {}
    for variant in operation.VARIANTS if forward else operation.BACKWARD_VARIANTS:
        default = variant == _default(forward, shape)
        if variant == "split" and shape[-1] < SHORTEST_SPLIT and not default:
            left_out[variant] = f"it is for rows of {SHORTEST_SPLIT:,} elements and more"
            continue

        def launch(*operands, variant=variant):
            call(*operands[:-1], variant=variant, out=operands[-1])

        candidate = _in_place(launch, inputs, outputs)
        try:
            candidate(0)
        except ValueError as error:  # rows too long for this rung
            left_out[variant] = str(error)
        else:
            candidates[variant] = candidate
    return candidates, left_out


def _in_place(function, inputs, outputs):
    """candidate(i) that lets `function` write buffer set `i`, and returns what was written."""
    sets = len(inputs)

    def candidate(i):
        function(*inputs[i % sets], outputs[i % sets])
        return outputs[i % sets]

    return candidate


def _forward_peers(operation, inputs, outputs):
    log = operation is softmax.log_softmax
    torch.compiler.reset()  # or it gives up after a few functions, and runs them eagerly
    function = torch.log_softmax if log else torch.softmax
    # Its best of several schedules each; the mode that bears the name also tunes by descent,
    # which takes minutes for all shapes.
    options = {"max_autotune": True}
    compiled = torch.compile(lambda x: function(x, -1), dynamic=False, options=options)
    kept = [None] * len(inputs)

    def compiled_candidate(i):
        # Its outputs are kept as long as ours: memory that is written again at once would still
        # be in the cache.
        kept[i % len(kept)] = compiled(*inputs[i % len(kept)])
        return kept[i % len(kept)]

    return {"torch.compile": compiled_candidate} | _triton(log, inputs, outputs)


def _triton(log, inputs, outputs):
    if importlib.util.find_spec("triton") is None:
        return {}
    from course_lib.benchmarks import softmax_triton

    xs = [x for (x,) in inputs]
    calls = max(1, min(60, TUNED_ELEMENTS // xs[0].numel()))
    best = softmax_triton.tuned(xs, outputs, log=log, calls=calls)
    return {} if best is None else {"Triton": best}


def _once(candidate):
    """µs that one call takes, roughly: the start of a launch counts too."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    candidate(0)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _ends(tensor):
    """Whole rows from both ends, which stand for all: float64 on the CPU takes its time."""
    n_rows = min(tensor.shape[0], max(1, SAMPLE // tensor.shape[1]))
    return torch.cat([tensor[:n_rows], tensor[-n_rows:]]).double().cpu().numpy()


def _expected(operation, forward, inputs):
    """(the right result, the scale of its rows' errors), of the sampled rows."""
    arrays = [_ends(tensor) for tensor in inputs]
    suffix = "" if forward else "_backward"
    truth = getattr(reference, f"{operation.name}{suffix}")(*arrays)
    largest = [np.abs(array).max(axis=-1, keepdims=True) for array in (truth, *arrays)]
    if forward:
        return truth, largest[0]
    if operation is softmax.softmax:
        return truth, largest[1] * largest[2]
    # dy is summed over the row, and the partial sums of n numbers of either sign grow like √n.
    partial_sum = largest[1] * math.sqrt(truth.shape[-1])
    return truth, np.maximum(
        largest[1], np.exp(arrays[1]).max(axis=-1, keepdims=True) * partial_sum
    )


def _check(label, result, expected, tolerance):
    if result.isnan().any():
        raise AssertionError(f"{label} left elements unwritten, so it is not timed")
    truth, scale = expected
    error = (np.abs(_ends(result) - truth) / scale).max()
    if not error <= tolerance:
        raise AssertionError(f"{label} is wrong, so it is not timed: error {error:.2e}")
