"""Time this simulator against numba-cuda's own: `python -m course_lib.simulator.benchmark`.

Both run the same source in one process with default settings; ours checks every index, the other
does not. Results are checked against NumPy. Exit status 1 if a result is wrong or a bar missed.
"""

import argparse
import importlib.util
import os
import pathlib
import statistics
import sys
import time

import numpy as np

from . import install, is_installed, uninstall


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
    path = pathlib.Path(__file__).with_name("benchmark_kernels.py")
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _run(kernel, grid, block, args, expected):
    """(seconds of one launch, whether its result was right)."""
    out = args[-1]
    out[...] = 0
    start = time.perf_counter()
    kernel[grid, block](*args)
    seconds = time.perf_counter() - start
    return seconds, np.allclose(out, expected, rtol=1e-4, atol=1e-4)


def measure(runs=3, ours_per_run=5):
    """Rows (title, bar, our median seconds, stock median seconds or None, right) per kernel.

    The two take turns, so that a busy machine slows both.

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
            _run(getattr(ours, name), *launch)  # rewrites the kernel
            mine, theirs = [], []
            for _ in range(runs):
                mine += [_run(getattr(ours, name), *launch) for _ in range(ours_per_run)]
                if bar is not None:
                    theirs.append(_run(getattr(stock, name), *launch))
            right = all(ok for _, ok in mine + theirs)
            rows.append((title, bar, statistics.median(s for s, _ in mine),
                         statistics.median(s for s, _ in theirs) if theirs else None, right))
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
    print(f"{'kernel':44}{'ours':>10}{'stock':>12}{'faster':>10}{'bar':>8}")
    missed = False
    for title, bar, seconds, reference, right in rows:
        if bar is None:
            comparison = f"{'cannot':>12}{'-':>10}{'-':>8}"
        else:
            ratio = reference / seconds
            missed = missed or ratio < bar
            comparison = f"{reference * 1e3:>9.0f} ms{ratio:>9.0f}x{bar:>7}x"
        missed = missed or not right
        print(f"{title:44}{seconds * 1e3:>7.2f} ms{comparison}{'' if right else '  WRONG'}")
    print("medians; the stock simulator has no warp shuffles")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
