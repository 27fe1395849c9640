"""Record what Nsight Compute counts for every rung of softmax, beside PyTorch's kernel.

On a machine with a GPU, from the project's folder:

    METRICS=$(python -m course_lib.benchmarks.profile_softmax --metrics)
    ncu --csv --page raw --print-units base --clock-control none --metrics $METRICS \\
        python -m course_lib.benchmarks.profile_softmax --launch > ncu.csv
    python -m course_lib.benchmarks.profile_softmax --read ncu.csv --record

`--launch` launches each rung once, forward, on 8,192 rows of 4,096 float32 numbers. `--read` prints
the table; `--record` keeps it in data/results as the record "softmax.profile". ncu empties the
caches before each kernel and repeats it for every few metrics, so its times are a little longer
than those of `python -m course_lib bench softmax`.
"""

import argparse
import csv
import math
import re
import sys

import numpy as np

from course_lib import bench, cuda
from course_lib.kernels.softmax import softmax
from course_lib.runtime.host import device

NAME, SHAPE = "softmax.profile", (8192, 4096)
COMMAND = "python -m course_lib.benchmarks.profile_softmax --read ncu.csv --record"
PEER, PEER_KERNEL = "PyTorch eager", r"cunn_SoftMax|softmax_warp_forward"
_GLOBAL = "l1tex__t_{what}_pipe_lsu_mem_global_op_{op}.sum"
_STALL = "smsp__average_warps_issue_stalled_{reason}_per_issue_active.ratio"
STALLS = (
    "long_scoreboard", "short_scoreboard", "barrier", "wait", "math_pipe_throttle",
    "mio_throttle", "lg_throttle", "not_selected", "drain", "no_instruction",
)  # fmt: skip
#: Field of a row of the record -> ncu's metric. What is missing here is computed in `_derived`.
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram_percent": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
    "l1_hit_percent": "l1tex__t_sector_hit_rate.pct",
    "l2_hit_percent": "lts__t_sector_hit_rate.pct",
    "registers": "launch__registers_per_thread",
    "block_size": "launch__block_size",
    "grid_size": "launch__grid_size",
    "occupancy_possible_percent": "sm__maximum_warps_per_active_cycle_pct",
    "occupancy_percent": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "eligible_warps": "smsp__warps_eligible.avg.per_cycle_active",
    "instructions": "smsp__inst_executed.sum",
    "load_requests": _GLOBAL.format(what="requests", op="ld"),
    "load_sectors": _GLOBAL.format(what="sectors", op="ld"),
    "store_requests": _GLOBAL.format(what="requests", op="st"),
    "store_sectors": _GLOBAL.format(what="sectors", op="st"),
} | {f"stall_{reason}": _STALL.format(reason=reason) for reason in STALLS}
#: What ncu may call the units of the fields that are times and bytes, and how many base units.
UNITS = {
    "nanoseconds": {"ns": 1, "nsecond": 1, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6},
    "dram_read_bytes": {"byte": 1, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9},
}
UNITS["dram_write_bytes"] = UNITS["dram_read_bytes"]
#: Those of the last axis.
RUNGS = {name: rung for name, rung in softmax.FORWARD.items() if name != "strided"}


def kernels():
    """Of all these rungs."""
    return [kernel for rung in RUNGS.values() for kernel in rung.kernels]


def launch():
    """Launch every rung once, and PyTorch's softmax, on the GPU."""
    import torch

    rng = np.random.default_rng(0)
    x = cuda.to_device(rng.standard_normal(SHAPE, dtype=np.float32))
    y = cuda.device_array(SHAPE, np.float32)  # numba's arrays: nothing but softmax is launched
    for variant in RUNGS:
        softmax.forward(x, variant=variant, out=y)
    torch.softmax(torch.as_tensor(x, device="cuda"), -1)
    cuda.synchronize()


def read(path):
    """The rows of the record, from what `ncu --csv --page raw` printed: rungs, then PyTorch.

    Raises ValueError if the file holds no such table, if a rung or a metric is missing, a rung has
    several kernels, or a unit is unknown.
    """
    with open(path, encoding="utf-8", newline="") as file:
        lines = [line for line in file if line.startswith('"')]
    table = list(csv.DictReader(lines))
    if not table or "Kernel Name" not in table[0]:
        raise ValueError(f"{path} holds no table of `ncu --csv --page raw`")
    units, *kernels = table
    if missing := [metric for metric in METRICS.values() if metric not in units]:
        raise ValueError(f"{path} has no {missing[0]}: pass ncu the metrics of --metrics")
    found = {}
    for kernel in kernels:
        label = _label(kernel["Kernel Name"])
        if label in found:
            raise ValueError(f"{path} has two kernels of {label}, and one is expected")
        if label is not None:
            found[label] = _row(label, kernel, units)
    if missing := [label for label in (*RUNGS, PEER) if label not in found]:
        raise ValueError(f"{path} has no kernel of {', '.join(missing)}")
    return [found[label] for label in (*RUNGS, PEER)]


def _label(text):
    """The rung that ncu's name of a kernel belongs to, None if it is no softmax."""
    for variant, rung in RUNGS.items():
        for kernel in rung.kernels:
            name = kernel.py_func.__name__
            # Demangled or not: numba's names end in a code of their own.
            if re.search(rf"(?<![A-Za-z_]){name}(?![A-Za-z0-9_])", text) or (
                text.startswith("_Z") and f"{len(name)}{name}B" in text
            ):
                return variant
    return PEER if re.search(PEER_KERNEL, text) else None


def _row(label, kernel, units):
    row = {"label": label, "kind": "peer" if label == PEER else "ours"}
    for field, metric in METRICS.items():
        text = kernel[metric].replace(",", "")
        if not text or not math.isfinite(float(text)):
            raise ValueError(f"ncu gave no {metric} for {label}")
        row[field] = float(text) * _factor(field, units[metric])
    return _derived(row)


def _factor(field, unit):
    known = UNITS.get(field)
    if known is None:
        return 1
    if unit not in known:
        raise ValueError(f"{METRICS[field]} is in {unit!r}, and {', '.join(known)} are known")
    return known[unit]


def _derived(row):
    n_bytes = 2 * 4 * math.prod(SHAPE)  # read once, written once
    row["microseconds"] = row.pop("nanoseconds") / 1e3
    row["gbps"] = n_bytes / row["microseconds"] / 1e3
    row["load_sectors_per_request"] = row["load_sectors"] / row["load_requests"]
    row["store_sectors_per_request"] = row["store_sectors"] / row["store_requests"]
    return {key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}


def record(rows):
    """The record "softmax.profile"."""
    digest = bench.kernel_hash(kernels())
    return bench.host_record(NAME, SHAPE, "float32", rows, digest, COMMAND)


def table(rows):
    """The rows as text, a line for each field."""
    fields = [field for field in rows[0] if field not in ("label", "kind")]
    lines = [f"{'':28}" + "".join(f"{row['label']:>15}" for row in rows)]
    lines += [f"{field:28}" + "".join(f"{row[field]:>15,.6g}" for row in rows) for field in fields]
    return "\n".join(lines)


def main(arguments=None):
    """See the module's text. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.benchmarks.profile_softmax",
        description=__doc__.partition("\n")[0],
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--metrics", action="store_true", help="print ncu's metrics, for ncu")
    what.add_argument("--launch", action="store_true", help="launch each rung once")
    what.add_argument("--read", metavar="CSV", help="what ncu printed")
    parser.add_argument("--record", action="store_true", help="keep it in data/results")
    options = parser.parse_args(arguments)
    if options.metrics:
        print(",".join(METRICS.values()))
        return 0
    if options.launch:
        if device.use_simulator():
            print("--launch needs a GPU")
            return 1
        launch()
        return 0
    rows = read(options.read)
    print(table(rows))
    if options.record:
        print(f"Recorded in {bench.save_records([record(rows)])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
