"""Record the device memory that squeeze and excitation reads and writes, as Nsight Compute counts.

On a machine with a GPU, from the project's folder:

    METRICS=$(python -m course_lib.benchmarks.profile_squeeze_excite --metrics)
    ncu --csv --page raw --print-units base --cache-control none --clock-control none \\
        --metrics $METRICS python -m course_lib.benchmarks.profile_squeeze_excite --launch > ncu.csv
    python -m course_lib.benchmarks.profile_squeeze_excite --read ncu.csv --record

`--launch` calls every rung forward, and torchvision's module, on each batch of 32 that
EfficientNet-B4 has and the L2 cache has no room for. `--read` prints the table; `--record` keeps it
in data/results as the records "squeeze_excite.profile". The caches are left as they are, for what
one kernel leaves there is what the next may find. What a call has written stays there too, until
something drives it out: so each is called several times in a row, and the last call counts, which
pays for the one before as the next one would for it. A marker, a kernel of its own, stands before
and after that call.
"""

import argparse
import csv
import math
import sys

import numpy as np
import torch

from course_lib import bench, cuda
from course_lib.benchmarks import squeeze_excite as benchmark
from course_lib.benchmarks.case import EAGER, Make
from course_lib.benchmarks.profile_softmax import UNITS
from course_lib.kernels.operation import AUTO
from course_lib.runtime.host import device
from course_lib.runtime.host.launch import launch

NAME = benchmark.PROFILE
COMMAND = "python -m course_lib.benchmarks.profile_squeeze_excite --read ncu.csv --record"
BATCH = 32
SETTLING = 2  # calls before the one that counts
MARKER = "segment_marker_kernel"
#: Field of a row of the record -> ncu's metric; summed over the kernels of a call.
METRICS = {
    "nanoseconds": "gpu__time_duration.sum",
    "dram_read_bytes": "dram__bytes_read.sum",
    "dram_write_bytes": "dram__bytes_write.sum",
}


@cuda.jit
def segment_marker_kernel(x):
    """Does next to nothing: it stands between calls, in ncu's list of kernels."""
    x[0] = np.float32(0)


def cases(l2_bytes):
    """(shape, dtype) of what is profiled: batches larger than the L2 cache."""
    found = [
        ((BATCH, C, side, side), dtype)
        for dtype in benchmark.DTYPES
        for C, side, _ in benchmark.SIZES
    ]
    return [(shape, dtype) for shape, dtype in found if _size(shape, dtype) > l2_bytes]


def _size(shape, dtype):
    return math.prod(shape) * getattr(torch, dtype).itemsize


def labels():
    """Of the candidates, in the order in which they are called."""
    return [*benchmark.EVERY_SIZE["contiguous"], AUTO, EAGER]


def launch_all(place="cuda"):
    """Call every candidate in every case, between markers."""
    make = Make(place)
    x = make.empty(1)
    for shape, dtype in cases(device.properties().l2_bytes):
        block = benchmark.Block(shape, dtype, "contiguous", 1, make)
        for label in labels():
            if label == EAGER:
                candidate = block.module(block.theirs, "forward", "contiguous")
            else:
                candidate = block.rung(label, "forward")
            for _ in range(SETTLING):
                candidate(0)
            launch(segment_marker_kernel, 1, 1, x)
            candidate(0)
            launch(segment_marker_kernel, 1, 1, x)
        del block, candidate
    if make.device.type == "cuda":
        torch.cuda.synchronize()


def read(path, l2_bytes):
    """{(shape, dtype): rows of its record}, from what `ncu --csv --page raw` printed.

    Raises ValueError if the file holds no such table, lacks a metric, has an unknown unit, or other
    segments than `launch_all` leaves.
    """
    with open(path, encoding="utf-8", newline="") as file:
        lines = [line for line in file if line.startswith('"')]
    table = list(csv.DictReader(lines))
    if not table or "Kernel Name" not in table[0]:
        raise ValueError(f"{path} holds no table of `ncu --csv --page raw`")
    units, *listed = table
    if missing := [metric for metric in METRICS.values() if metric not in units]:
        raise ValueError(f"{path} has no {missing[0]}: pass ncu the metrics of --metrics")
    factors = {field: _factor(field, units[metric]) for field, metric in METRICS.items()}
    segments = _segments(listed)
    wanted = [(case, label) for case in cases(l2_bytes) for label in labels()]
    if len(segments) != len(wanted) or not all(segments):
        raise ValueError(
            f"{path} must hold {len(wanted)} calls between markers, each of a kernel at least; it "
            f"holds {len(segments)}, of {', '.join(str(len(each)) for each in segments)} kernels"
        )
    found = {}
    for (case, label), segment in zip(wanted, segments, strict=True):
        found.setdefault(case, []).append(_row(label, segment, factors, _size(*case)))
    return found


def _segments(listed):
    """The kernels of each call that counts: those between the first marker and the second, …"""
    segments, inside = [], False
    for kernel in listed:
        if MARKER in kernel["Kernel Name"]:
            inside = not inside
            if inside:
                segments.append([])
        elif inside:
            segments[-1].append(kernel)
    return segments


def _factor(field, unit):
    if unit not in UNITS[field]:
        raise ValueError(
            f"{METRICS[field]} is in {unit!r}, and {', '.join(UNITS[field])} are known"
        )
    return UNITS[field][unit]


def _row(label, segment, factors, n_bytes):
    sums = dict.fromkeys(METRICS, 0.0)
    for kernel in segment:
        for field, metric in METRICS.items():
            text = kernel[metric].replace(",", "")
            if not text or not math.isfinite(float(text)):
                raise ValueError(f"ncu gave no {metric} for {kernel['Kernel Name']} of {label}")
            sums[field] += float(text) * factors[field]
    moved = sums["dram_read_bytes"] + sums["dram_write_bytes"]
    return {
        "label": label,
        "kind": "peer" if label == EAGER else "ours",
        "kernels": len(segment),
        "microseconds": round(sums.pop("nanoseconds") / 1e3, 3),
        **{field: round(value) for field, value in sums.items()},
        "sizes_of_x": round(moved / n_bytes, 3),
    }


def records(found):
    """The records, one for each case."""
    digest = benchmark.kernel_hashes()[NAME]
    return [
        bench.host_record(NAME, shape, dtype, rows, digest, COMMAND)
        | {"bytes": _size(shape, dtype), "default": AUTO}
        for (shape, dtype), rows in found.items()
    ]


def table(found):
    """The rows as text, a line for each case: bytes moved in sizes of x."""
    lines = [f"{'sizes of x, read + written':40}" + "".join(f"{each:>16}" for each in labels())]
    for (shape, dtype), rows in found.items():
        name = f"{'x'.join(map(str, shape))} {dtype}"
        lines.append(f"{name:40}" + "".join(f"{row['sizes_of_x']:>16.2f}" for row in rows))
    return "\n".join(lines)


def main(arguments=None):
    """See the module's text. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m course_lib.benchmarks.profile_squeeze_excite",
        description=__doc__.partition("\n")[0],
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--metrics", action="store_true", help="print ncu's metrics, for ncu")
    what.add_argument("--launch", action="store_true", help="call what is to be profiled")
    what.add_argument("--read", metavar="CSV", help="what ncu printed")
    parser.add_argument("--record", action="store_true", help="keep it in data/results")
    options = parser.parse_args(arguments)
    if options.metrics:
        print(",".join(METRICS.values()))
        return 0
    if device.use_simulator():
        print("Device memory is counted on a GPU: --launch and --read need one")
        return 1
    if options.launch:
        launch_all()
        return 0
    found = read(options.read, device.properties().l2_bytes)
    print(table(found))
    if options.record:
        print(f"Recorded in {bench.save_records(records(found))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
