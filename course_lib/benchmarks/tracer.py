"""Compare the tracer's counts with Nsight Compute's, on the kernels of `tracer_patterns`.

On a machine with a GPU, from the project's folder:

    METRICS=$(python -m course_lib.benchmarks.tracer --metrics)
    ncu --csv --page raw --clock-control none --metrics $METRICS \\
        python -m course_lib.benchmarks.tracer --launch > ncu.csv

`--launch` launches each kernel once. Then, there or anywhere else:

    python -m course_lib.benchmarks.tracer --compare ncu.csv --device "NVIDIA H200" --record

runs each kernel under `simulator.trace`, prints both counts side by side, and exits with status 1
if they disagree; `--record` keeps them in data/results. Requests and sectors must be equal; bank
conflicts may differ by 1 % of all turns of the shared memory, because the hardware counts a few
that come from other traffic. Without arguments, the tracer's counts alone are printed.
"""

import argparse
import csv
import re
import sys

from course_lib import bench, cuda, simulator
from course_lib.benchmarks.tracer_patterns import PATTERNS
from course_lib.runtime.compile.fingerprint import fingerprint
from course_lib.runtime.host import device

COMMAND = "python -m course_lib.benchmarks.tracer --compare ncu.csv --record"

_T = "l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum"
_DATA = "l1tex__data_{what}_pipe_lsu_mem_shared_op_{op}.sum"
#: What is compared -> the metrics whose sum it is. An atomic without a use for its result may be
#: executed as a reduction; numba's are atomics either way.
METRICS = {
    "global load requests": [_T.format(what="requests", op="ld")],
    "global load sectors": [_T.format(what="sectors", op="ld")],
    "global store requests": [_T.format(what="requests", op="st")],
    "global store sectors": [_T.format(what="sectors", op="st")],
    "global atomic requests": [_T.format(what="requests", op=op) for op in ("atom", "red")],
    "global atomic sectors": [_T.format(what="sectors", op=op) for op in ("atom", "red")],
    "shared load conflicts": [_DATA.format(what="bank_conflicts", op="ld")],
    "shared store conflicts": [_DATA.format(what="bank_conflicts", op="st")],
    # ncu spells these two the other way round.
    "shared load turns": ["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum"],
    "shared store turns": ["l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum"],
}
#: Share of all shared turns by which conflicts and turns may differ.
TOLERANCE = 0.01


def predicted(pattern):
    """{what: count} of a pattern, from the tracer."""
    arrays = pattern.make()
    with simulator.trace() as trace:
        pattern.kernel[pattern.grid, pattern.block](*arrays)
    counts = dict.fromkeys(METRICS, 0)
    for site in trace.sites:
        label = f"{site.space} {site.op}"
        if site.space == "global":
            counts[f"{label} requests"] += site.requests
            counts[f"{label} sectors"] += site.sectors
        else:
            counts[f"{label} conflicts"] += site.bank_conflicts
            counts[f"{label} turns"] += site.wavefronts
    return counts


def launch():
    """Launch each kernel once on the GPU."""
    for pattern in PATTERNS:
        arrays = [cuda.to_device(array) for array in pattern.make()]
        pattern.kernel[pattern.grid, pattern.block](*arrays)
        cuda.synchronize()


def read_ncu(path):
    """{kernel's name: {metric: count}} from what `ncu --csv --page raw` printed.

    Raises
    ------
    ValueError if there is no table of metrics in the file.
    """
    with open(path, encoding="utf-8", newline="") as file:
        lines = [line for line in file if line.startswith('"')]
    rows = list(csv.DictReader(lines))
    wanted = {metric for metrics in METRICS.values() for metric in metrics}
    if not rows or not wanted & rows[0].keys():
        raise ValueError(f"{path} holds no table of `ncu --csv --page raw` with these metrics")
    found = {}
    for row in rows:
        name = next((p.name for p in PATTERNS if _is_kernel(row["Kernel Name"], p.name)), None)
        if name is not None:  # the second line of the table holds units
            found[name] = {metric: round(float(row[metric].replace(",", "")))
                           for metric in wanted & row.keys() if row[metric]}
    return found


def _is_kernel(text, name):
    """True if ncu's `text`, demangled or not, names the Python function `name`."""
    return bool(re.search(rf"(?<!\w){name}(?!\w)", text)) or (
        text.startswith("_Z") and f"{len(name)}{name}B" in text)


def compare(path):
    """[(pattern, what, predicted, measured, whether they agree)], patterns in their order.

    Counts that are 0 in both are left out; a metric that ncu did not give is measured as None.
    """
    measured = read_ncu(path)
    rows = []
    for pattern in PATTERNS:
        counts, metrics = predicted(pattern), measured.get(pattern.name, {})
        turns = sum(count for what, count in counts.items() if what.endswith("turns"))
        for what, count in counts.items():
            given = [metrics[name] for name in METRICS[what] if name in metrics]
            real = sum(given) if given else None
            if not count and not real:
                continue
            room = TOLERANCE * turns if what.startswith("shared") else 0
            rows.append((pattern, what, count, real,
                         real is not None and abs(count - real) <= room))
    return rows


def records(rows):
    """One record for each pattern, "tracer.<name>", from what `compare` gave."""
    found = []
    for pattern in PATTERNS:
        counts = [{"label": what, "kind": "count", "predicted": count, "measured": real}
                  for other, what, count, real, _ in rows if other is pattern]
        first = pattern.make()[0]
        found.append(bench.host_record(f"tracer.{pattern.name}", first.shape, first.dtype.name,
                                       counts, fingerprint(pattern.kernel), COMMAND))
    return found


def kernel_hashes():
    """{record name: hash of what it measures, as it is today}."""
    return {f"tracer.{pattern.name}": fingerprint(pattern.kernel) for pattern in PATTERNS}


def save(found, device_name):
    """Keep records of a device that already has some, or of the GPU here."""
    held = bench.load_records(device_name)
    return bench.save_records(found, facts=held and held["device"])


def main(arguments=None):
    """See the module's text. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m course_lib.benchmarks.tracer",
                                     description=__doc__.partition("\n")[0])
    parser.add_argument("--metrics", action="store_true", help="print ncu's metrics, for ncu")
    parser.add_argument("--launch", action="store_true", help="launch each kernel once")
    parser.add_argument("--compare", metavar="CSV", help="what ncu printed")
    parser.add_argument("--device", help="the device it was measured on; by default the one here")
    parser.add_argument("--record", action="store_true", help="keep the counts in data/results")
    options = parser.parse_args(arguments)
    if options.metrics:
        print(",".join(metric for metrics in METRICS.values() for metric in metrics))
    elif options.launch:
        if device.use_simulator():
            print("--launch needs a GPU")
            return 1
        launch()
    elif options.compare:
        rows = compare(options.compare)
        print(f"{'pattern':24}{'count':26}{'tracer':>10}{'ncu':>10}")
        for pattern, what, count, real, agree in rows:
            shown = "-" if real is None else f"{real:,}"
            print(f"{pattern.name:24}{what:26}{count:>10,}{shown:>10}{'' if agree else '  differ'}")
        apart = sum(not agree for *_, agree in rows)
        print(f"{len(rows) - apart} of {len(rows)} counts agree")
        if options.record:
            name = options.device or device.properties().name
            print(f"Recorded in {save(records(rows), name)}")
        return 1 if apart else 0
    else:
        for pattern in PATTERNS:
            counts = predicted(pattern)
            shown = ", ".join(f"{what} {count:,}" for what, count in counts.items() if count)
            print(f"{pattern.name}: {shown}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
