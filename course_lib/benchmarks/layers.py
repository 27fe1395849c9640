"""Max pooling, batch normalisation and optimisers on a GPU, beside PyTorch's and a copy.

All of them move memory and compute little, so the limit is a copy of as many bytes. Each is timed
at a size of more than four L2 caches, and at a small one that the Fashion-MNIST network has. What
comes out is checked before: pooling exactly, the rest against float64.

Peers: pooling and batch normalisation by PyTorch's own kernels, batch normalisation by cuDNN's too;
optimisers by ``foreach=True``, which is PyTorch's default on a GPU, and by ``fused=True``. The
optimisers' rows also have the time that a step takes as Python sees it.
"""

import functools
import math
import time

import torch
import torch.nn.functional as F

from course_lib import bench, optim
from course_lib.benchmarks.limits import copies, fastest_copy
from course_lib.kernels import batch_norm, max_pool2d, optimizers

POOLED = [(64, 64, 224, 224), (32, 64, 26, 26), (32, 128, 11, 11)]
#: (kernel size, stride, padding) and the end of the record's name.
WINDOWS = [((2, 2, 0), ""), ((3, 2, 1), ".3x3")]
NORMALISED = [(128, 128, 112, 112), (32, 64, 26, 26)]
LAYOUTS = {"": torch.contiguous_format, ".channels-last": torch.channels_last}
DTYPES = ("float32", "bfloat16")
#: Shapes of the parameters: many large ones, and those of the Fashion-MNIST network.
PARAMETERS = [
    [(4096, 4096)] * 6,
    [(64, 1, 3, 3), (64,), (128, 64, 3, 3), (128,), (256, 3200), (256,), (10, 256), (10,)],
]
#: Optimiser: (class, its options, arrays of the parameters' size that a step reads and writes).
OPTIMISERS = {
    "sgd": ("SGD", dict(lr=1e-3, momentum=0.9), 5),
    "adamw": ("AdamW", dict(lr=1e-3), 7),
}
DEVICE = "cuda"
COMMAND = "python -m course_lib bench layers --record"
EAGER, CUDNN = "PyTorch eager", "cuDNN"
REPLAY, LOOP = 4_000, 4_000  # µs that a replay of a graph, and a loop of calls, may take
LONGEST_CALL = 50_000  # µs; a slower rung is left out, and the record says so
EPS, MOMENTUM = 1e-5, 0.1
#: Errors allowed before anything is timed: ‖found − true‖ ÷ ‖true‖.
TOLERANCE = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}
OF_NAIVE = 2e-3  # a single thread adds up a million numbers, one after the other
SAMPLE = 2  # images, or channels, that are checked, from both ends
_aten = torch.ops.aten


def run(*, names=None, dtypes=DTYPES, rounds=10, progress=lambda cases: cases):
    """Check, then time, each case. Of `names`, as ["max_pool2d", "sgd"], only these operations."""
    cases = []
    for dtype in dtypes:
        for end, layout in LAYOUTS.items():
            for shape in POOLED:
                for window, of_window in WINDOWS:
                    suffix = f"{of_window}{end}"
                    cases.append(("max_pool2d", _pooling, shape, window, dtype, layout, suffix))
            cases += [
                ("batch_norm", _normalising, shape, dtype, layout, end) for shape in NORMALISED
            ]
    if "float32" in dtypes:
        cases += [(name, _updating, name, shapes) for name in OPTIMISERS for shapes in PARAMETERS]

    def measured():
        for operation, measure, *case in progress(cases):
            if names is None or operation in names:
                yield from measure(*case, rounds)
                _empty_cache()

    with torch.no_grad():
        return bench.collected(measured())


# ------------------------------------------------------------------------------- pooling


def _pooling(shape, window, dtype, layout, suffix, rounds):
    kernel_size, stride, padding = window
    options = dict(stride=stride, padding=padding)
    x_bytes = math.prod(shape) * getattr(torch, dtype).itemsize
    sets = bench.buffer_sets(x_bytes)
    x = [_randn(shape, dtype, layout) for _ in range(sets)]
    y, at = max_pool2d.forward(x[0], kernel_size, index_dtype="uint8", **options)
    by_eager, at_64 = F.max_pool2d(x[0], kernel_size, **options, return_indices=True)
    _equal("max_pool2d", y, by_eager)
    dy = [_randn(y.shape, dtype, layout) for _ in range(sets)]
    n_bytes = x_bytes + y.nbytes + at.nbytes
    pair = [kernel_size] * 2, [stride] * 2, [padding] * 2, [1, 1], False

    def ours(i, variant):
        return max_pool2d.forward(
            x[i % sets], kernel_size, index_dtype="uint8", variant=variant, **options
        )

    def ours_backward(i, variant):
        return max_pool2d.backward(dy[i % sets], at, shape, kernel_size, variant=variant, **options)

    forward = {name: functools.partial(ours, variant=name) for name in max_pool2d.VARIANTS}
    backward = {
        name: functools.partial(ours_backward, variant=name)
        for name in max_pool2d.BACKWARD_VARIANTS
    }
    of_eager = _aten.max_pool2d_with_indices(x[0], *pair)[1]
    peers = (
        lambda i: _aten.max_pool2d_with_indices(x[i % sets], *pair),
        lambda i: _aten.max_pool2d_with_indices_backward(dy[i % sets], x[0], *pair, of_eager),
    )
    part = slice(0, SAMPLE)
    true = _aten.max_pool2d_with_indices_backward(
        dy[0][part].double(), x[0][part].double(), *pair, at_64[part]
    )
    for name, candidate in backward.items():
        _close(f"{name} of max_pool2d.backward", candidate(0)[part], true, dtype)
    for name, candidate in forward.items():
        _equal(f"{name} of max_pool2d.forward", candidate(0)[0], by_eager)
    del by_eager, at_64, true
    for direction, ours_, peer in zip(
        ("forward", "backward"), (forward, backward), peers, strict=True
    ):
        name = f"max_pool2d.{direction}{suffix}"
        default = max_pool2d.DEFAULT
        yield _record(name, shape, dtype, n_bytes, sets, ours_, {EAGER: peer}, default, rounds)


# ------------------------------------------------------------------ batch normalisation


def _normalising(shape, dtype, layout, suffix, rounds):
    C = shape[1]
    x_bytes = math.prod(shape) * getattr(torch, dtype).itemsize
    sets = bench.buffer_sets(x_bytes)
    x, dy = ([_randn(shape, dtype, layout).add_(0.2) for _ in range(sets)] for _ in range(2))
    weight, bias, running_var = (torch.rand(C, device=DEVICE) + 0.5 for _ in range(3))
    running_mean = torch.randn(C, device=DEVICE)
    affine, running = (weight, bias), (running_mean, running_var)
    native = _aten.native_batch_norm, _aten.native_batch_norm_backward
    settings = True, MOMENTUM, EPS
    # What the backward passes take: the statistics of the first set.
    _, mean, rstd = batch_norm.forward(x[0], *affine)
    beside_cudnn = _has_cudnn() and dtype == "float32"  # it wants weights of the images' dtype
    _, *of_cudnn = _cudnn(x[0], affine, _copies(running)) if beside_cudnn else (None,)
    fixed = _copies(running)

    def forward(i, variant):
        return batch_norm.forward(x[i % sets], *affine, *running, variant=variant)

    def backward(i, variant):
        return batch_norm.backward(dy[i % sets], x[i % sets], weight, mean, rstd, variant=variant)

    def inference(i, variant):
        return (batch_norm.inference(x[i % sets], *affine, *fixed, variant=variant),)

    def native_backward(i):
        return native[1](
            dy[i % sets], x[i % sets], weight, None, None, mean, rstd, True, EPS, [True] * 3
        )

    def cudnn_backward(i):
        saved_mean, saved_rstd, reserve = of_cudnn
        return _aten.cudnn_batch_norm_backward(
            x[i % sets], dy[i % sets], weight, None, None, saved_mean, saved_rstd, EPS, reserve
        )

    ways = {
        "forward": (forward, batch_norm.VARIANTS, 3, {
            EAGER: lambda i: native[0](x[i % sets], *affine, *running, *settings),
            CUDNN: lambda i: _cudnn(x[i % sets], affine, running),
        }),
        "backward": (backward, batch_norm.BACKWARD_VARIANTS, 5, {
            EAGER: native_backward, CUDNN: cudnn_backward,
        }),
        "inference": (inference, batch_norm.INFERENCE_VARIANTS, 2, {
            EAGER: lambda i: native[0](x[i % sets], *affine, *fixed, False, MOMENTUM, EPS),
        }),
    }  # fmt: skip
    for direction, (function, variants, n_arrays, peers) in ways.items():
        if not beside_cudnn:
            peers.pop(CUDNN, None)
        ours = {name: functools.partial(function, variant=name) for name in variants}
        name = f"batch_norm.{direction}{suffix}"
        true = _true_batch_norm(direction, x[0], dy[0], affine, fixed)
        for label, candidate in (ours | peers).items():
            for found, expected in zip(candidate(0), true, strict=False):
                _close(f"{label} of {name}", _ends(found), expected, dtype)
        yield _record(
            name, shape, dtype, n_arrays * x_bytes, sets, ours, peers, batch_norm.DEFAULT, rounds
        )


def _has_cudnn():
    return torch.backends.cudnn.is_available() and DEVICE == "cuda"


def _cudnn(x, affine, running):
    """(y, mean, rstd, reserve) by cuDNN."""
    return _aten.cudnn_batch_norm(x, *affine, *running, True, MOMENTUM, EPS)


def _true_batch_norm(direction, x, dy, affine, fixed):
    """What a candidate gives first, in float64, of some channels: [y], or [dx, dweight, dbias]."""
    x, dy, weight, bias, mean, var = (
        _ends(t).double() for t in (x, dy, *affine, *fixed)
    )  # fmt: skip
    if direction == "inference":
        return [F.batch_norm(x, mean, var, weight, bias, False, MOMENTUM, EPS)]
    if direction == "forward":
        return [F.batch_norm(x, None, None, weight, bias, True, MOMENTUM, EPS)]
    mean, rstd = x.mean((0, 2, 3)), (x.var((0, 2, 3), correction=0) + EPS).rsqrt()
    return _aten.native_batch_norm_backward(
        dy, x, weight, None, None, mean, rstd, True, EPS, [True] * 3
    )


def _ends(tensor):
    """The first and the last channels, as a tensor of their own."""
    dim = 1 if tensor.dim() == 4 else 0
    last = tensor.shape[dim] - SAMPLE
    return torch.cat([tensor.narrow(dim, 0, SAMPLE), tensor.narrow(dim, last, SAMPLE)], dim)


# ---------------------------------------------------------------------------- optimisers


def _updating(name, shapes, rounds):
    kind, options, n_arrays = OPTIMISERS[name]
    n_elements = sum(map(math.prod, shapes))
    start = [torch.randn(shape, device=DEVICE) for shape in shapes]
    gradients = [torch.randn(shape, device=DEVICE) for shape in shapes]

    def optimiser(classes, **more):
        parameters = [torch.nn.Parameter(p.clone()) for p in start]
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient
        if name != "sgd" and DEVICE == "cuda":
            more["capturable"] = True  # or a graph can't hold it
        made = getattr(classes, kind)(parameters, **options, **more)
        made.step()  # makes the states
        return made

    steps = {
        "ours": optimiser(optim),
        "PyTorch foreach": optimiser(torch.optim, foreach=True),
        "PyTorch fused": optimiser(torch.optim, fused=True),
    }
    first, *others = (made.param_groups[0]["params"] for made in steps.values())
    for label, found in zip(list(steps)[1:], others, strict=True):
        for p, q in zip(first, found, strict=True):
            _close(f"ours of {name}.step, beside {label}", p, q.double(), "float32")
    candidates = {label: lambda i, made=made: made.step() for label, made in steps.items()}
    n_bytes = n_arrays * 4 * n_elements
    record = _record(
        f"{name}.step", (n_elements,), "float32", n_bytes, 1,
        {"ours": candidates.pop("ours")}, candidates, "ours", rounds,
    )  # fmt: skip
    python = {label: (lambda i, made=made: made.step()) for label, made in steps.items()}
    calls = {label: max(3, min(100, int(LOOP / _once(each)))) for label, each in python.items()}
    seen = bench.loop_times(python, calls=calls, rounds=rounds)
    for row in record["rows"]:
        timing = seen[row["label"]]
        row["python_microseconds"] = round(timing.microseconds, 3)
        row["python_quartiles"] = [round(quartile, 3) for quartile in timing.quartiles]
    return [record | {"n_tensors": len(shapes)}]


# ------------------------------------------------------------------------- what all share


def _record(name, shape, dtype, n_bytes, sets, ours, peers, default, rounds):
    # A copy of its own buffers, half of what is moved each, in as many sets.
    candidates = ours | peers | copies(n_bytes, min(sets, bench.buffer_sets(n_bytes)))
    once = {label: _once(candidate) for label, candidate in candidates.items()}
    slow = [label for label in ours if once[label] > LONGEST_CALL and label != default]
    left_out = {label: f"a call takes {once[label] / 1e3:,.0f} ms" for label in slow}
    candidates = {label: each for label, each in candidates.items() if label not in slow}
    calls = {
        label: max(1, min(max(60, sets), int(REPLAY / once[label]))) for label in candidates
    }  # fmt: skip
    timings = bench.device_times(candidates, calls=calls, rounds=rounds)
    copy = fastest_copy(timings)
    rows = [
        bench.row(label, "ours" if label in ours else "peer", timing, n_bytes, copy)
        for label, timing in timings.items()
    ]
    record = bench.make_record(
        name, shape, dtype, n_bytes, copy, rows, kernel_hashes()[name], COMMAND
    )
    return record | {"default": default, "left_out": left_out}


def _randn(shape, dtype, layout):
    found = torch.randn(tuple(shape), device=DEVICE).to(getattr(torch, dtype))
    return found.contiguous(memory_format=layout)


def _copies(tensors):
    return tuple(tensor.clone() for tensor in tensors)


def _equal(label, found, expected):
    if not torch.equal(found, expected):
        raise AssertionError(f"{label} is wrong, so it is not timed: not equal to PyTorch's")


def _close(label, found, expected, dtype):
    error = ((found.double() - expected).norm() / expected.norm()).item()
    allowed = max(OF_NAIVE, TOLERANCE[dtype]) if label.startswith("naive ") else TOLERANCE[dtype]
    if not error <= allowed:
        raise AssertionError(f"{label} is wrong, so it is not timed: error {error:.2e}")


def _once(candidate):
    """µs that one call takes, roughly: the host's work counts too."""
    _synchronize()
    start = time.perf_counter()
    candidate(0)
    _synchronize()
    return max(1.0, (time.perf_counter() - start) * 1e6)


def _synchronize():
    torch.cuda.synchronize()


def _empty_cache():
    torch.cuda.empty_cache()


@functools.cache
def _hash_of(module):
    functions = {id(kernel): kernel for _, kernel, _ in module.specialisations()}
    return bench.kernel_hash(functions.values())


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    pool, norm, steps = map(_hash_of, (max_pool2d, batch_norm, optimizers))
    found = {}
    for layout in LAYOUTS:
        for direction in ("forward", "backward"):
            for _, window in WINDOWS:
                found[f"max_pool2d.{direction}{window}{layout}"] = pool
            found[f"batch_norm.{direction}{layout}"] = norm
        found[f"batch_norm.inference{layout}"] = norm
    return found | {f"{name}.step": steps for name in OPTIMISERS}
