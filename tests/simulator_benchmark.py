"""Time this simulator against numba-cuda's own: `python tests/simulator_benchmark.py`.

Both run the same source in one process with default settings; ours checks every index, the other
does not. Ours is timed under `sanitize()` and under `trace()` too, and must still be four times as
fast as the other, which watches nothing. Results are checked against NumPy. Exit status 1 if a
result is wrong, a bar missed, or the sanitizer finds something.
"""

import argparse
import contextlib
import importlib.util
import os
import pathlib
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from course_lib.simulator import install, is_installed, sanitize, trace, uninstall  # noqa: E402

#: How many times as fast as numba's simulator ours must be while it is watched.
WATCHED_BAR = 4


def _inputs():
    """name -> (title, bar, grid, block, arguments with the output last, expected output)."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(4, 200)).astype(np.float32)
    exponentials = np.exp(rows - rows.max(axis=1, keepdims=True))
    x, y = rng.normal(size=(2, 100_000)).astype(np.float32)
    a, b = rng.normal(size=(2, 64, 64)).astype(np.float32)
    values = rng.normal(size=1024).astype(np.float32)
    return {
        "softmax": ("softmax, 4 blocks x 128 threads, 4 x 200", 100, 4, 128,
                    (rows, np.zeros_like(rows)),
                    exponentials / exponentials.sum(axis=1, keepdims=True)),
        "scale_and_add": ("map over 100,000 elements", 100, 391, 256, (x, y, np.zeros_like(x)),
                          2 * x + y),
        "matmul": ("matmul 64 x 64, 16 x 16 tiles", 50, (4, 4), (16, 16),
                   (a, b, np.zeros_like(a)), a @ b),
        "warp_sum": ("warp-shuffle sum of 1,024", None, 4, 256,
                     (values, np.zeros(1, np.float32)), values.sum()),
    }


def _load(name):
    path = pathlib.Path(__file__).with_name("simulator_benchmark_kernels.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(kernel, grid, block, args, expected, watcher=contextlib.nullcontext):
    """(seconds of one launch, whether its result was right and nothing was found)."""
    out = args[-1]
    out[...] = 0
    start = time.perf_counter()
    with watcher() as report:
        kernel[grid, block](*args)
    seconds = time.perf_counter() - start
    right = np.allclose(out, expected, rtol=1e-4, atol=1e-4)
    return seconds, right and not (watcher is sanitize and report)


def measure(runs=3, ours_per_run=5):
    """Rows (title, bar, medians in seconds, right) per kernel.

    The medians are ours, ours under `sanitize`, ours under `trace`, and the stock simulator's (or
    None). They take turns, so that a busy machine slows all.

    Raises
    ------
    RuntimeError if numba was imported without NUMBA_ENABLE_CUDASIM: its own simulator cannot be
    switched on any more.
    """
    if "numba" in sys.modules and os.environ.get("NUMBA_ENABLE_CUDASIM") != "1":
        raise RuntimeError("set NUMBA_ENABLE_CUDASIM=1 before numba is imported")
    os.environ["NUMBA_ENABLE_CUDASIM"] = "1"
    was_installed = is_installed()
    install()
    ours = _load("benchmark_kernels_ours")
    uninstall()
    try:
        stock = _load("benchmark_kernels_stock")
        rows = []
        for name, (title, bar, *launch) in _inputs().items():
            kernel = getattr(ours, name)
            mine, sanitized, traced, theirs = [], [], [], []
            for watcher in (contextlib.nullcontext, sanitize, trace):
                _run(kernel, *launch, watcher)  # rewrites the kernel
            for _ in range(runs):
                mine += [_run(kernel, *launch) for _ in range(ours_per_run)]
                sanitized.append(_run(kernel, *launch, sanitize))
                traced.append(_run(kernel, *launch, trace))
                if bar is not None:
                    theirs.append(_run(getattr(stock, name), *launch))
            samples = mine, sanitized, traced, theirs
            right = all(ok for sample in samples for _, ok in sample)
            rows.append((title, bar, [statistics.median(s for s, _ in sample) if sample else None
                                      for sample in samples], right))
    finally:
        if was_installed and "numba.cuda" not in sys.modules:
            install()
    return rows


def main(arguments=None):
    """Print the table; 0 if every bar is met and every result right, else 1."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=3,
                        help="launches of numba's simulator; ours takes five for each (default 3)")
    options = parser.parse_args(arguments)
    rows = measure(options.runs)
    print(f"{'kernel':42}{'stock':>10}{'ours':>10}{'faster':>8}{'sanitized':>12}{'faster':>8}"
          f"{'traced':>11}{'faster':>8}")
    missed = False
    for title, bar, (*seconds, reference), right in rows:
        text = f"{title:42}" + (f"{'cannot':>10}" if bar is None else f"{reference * 1e3:>7.0f} ms")
        for own, least, width in zip(seconds, (bar, WATCHED_BAR, WATCHED_BAR), (7, 9, 8),
                                     strict=True):
            text += f"{own * 1e3:>{width}.1f} ms"
            text += f"{'-':>8}" if bar is None else f"{reference / own:>7.0f}x"
            missed = missed or bar is not None and reference / own < least
        missed = missed or not right
        print(text + ("" if right else "  WRONG"))
    bars = ", ".join(f"{bar}x" for _, bar, _, _ in rows if bar is not None)
    print(f"medians; the bars are {bars}, and {WATCHED_BAR}x sanitized or traced; the stock "
          f"simulator has no warp shuffles")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
