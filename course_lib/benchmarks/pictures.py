"""Records as pictures: the ladder of one, how the rungs fare as rows grow longer, and what squeeze
and excitation gains.
"""

from course_lib import plot

#: What is new on each rung, in a few words, by operation.
NOTES = {
    "softmax": {
        "naive": "a thread for each row",
        "shared": "a block for each row, a tree",
        "warp": "shuffles instead of the tree",
        "online": "maximum and sum in one pass",
        "registers": "each row read once, 16 bytes at a time",
        "split": "held in the shared memory of blocks",
    },
}
NOTES["squeeze_excite"] = {
    "separate": "a kernel for each step",
    "two_pass": "all between the two readings of x in one of them",
    "fused": "one kernel; the second reading from the chip",
}
NOTES["log_softmax"] = NOTES["softmax"]


def ladder(record, device_name, *, title=None):
    """The `plot.ladder` of a record of device times."""
    notes = NOTES.get(record["name"].partition(".")[0], {})
    shape = " × ".join(f"{size:,}" for size in record["shape"])
    return plot.ladder(
        [row | {"note": notes.get(row["label"])} for row in record["rows"]],
        record["copy_gbps"],
        title=title or f"{record['name']}, {shape}, {record['dtype']}",
        device=device_name,
        date=record["date"],
    )


def sweep(records, device_name, *, least_bytes):
    """The `plot.sweep` over the length of rows, of records of one name and dtype.

    Of those that move at least `least_bytes`: below, caches blur what memory allows. None where
    fewer than three lengths are left. Of two records with rows of one length the larger counts.
    """
    by_length = {}
    for record in sorted(records, key=lambda record: record["bytes"]):
        if record["bytes"] >= least_bytes:
            by_length[record["shape"][-1]] = record
    if len(by_length) < 3:
        return None
    lengths = sorted(by_length)
    found = [{row["label"]: row for row in by_length[length]["rows"]} for length in lengths]
    kinds = {label: row["kind"] for rows in found for label, row in rows.items()}
    order = sorted(kinds, key=lambda label: kinds[label] != "ours")  # stable: ours come first
    rows = [
        {
            "label": label,
            "kind": kinds[label],
            "percent": [rows.get(label, {}).get("percent_of_copy") for rows in found],
        }
        for label in order
    ]
    record = by_length[lengths[-1]]
    return plot.sweep(
        lengths,
        rows,
        xlabel="numbers in a row",
        title=f"{record['name']}, {record['dtype']}",
        device=device_name,
        date=record["date"],
    )


def block_speedups(records, device_name):
    """The `plot.speedups` of squeeze and excitation: records of one name and dtype, by batch.

    On the device, against PyTorch eager in whichever memory format is the faster. None where there
    are more batches than a picture has room for.
    """
    sizes = list(dict.fromkeys(tuple(record["shape"][1:]) for record in records))
    batches = sorted({record["shape"][0] for record in records})
    if len(batches) > 4:
        return None
    ratios = {tuple(record["shape"]): _eager_ratio(record) for record in records}
    first = records[0]
    return plot.speedups(
        [f"{C}\n{H}²" if H == W else f"{C}\n{H} × {W}" for C, H, W in sizes],
        {f"batch {N}": [ratios.get((N, *size)) for size in sizes] for N in batches},
        goal=2.75,
        ylabel="times as fast as PyTorch eager",
        title=f"{first['name']}, {first['dtype']}",
        device=device_name,
        date=first["date"],
    )


def _eager_ratio(record):
    times = {row["label"]: row["microseconds"] for row in record["rows"]}
    eager = min(time for label, time in times.items() if label.startswith("PyTorch eager"))
    return eager / times[record["default"]]


def step_times(records, device_name):
    """The `plot.step_times` of records "efficientnet.step", before and after the swap."""
    bars = {
        f"{record['dtype']}, {when}": {group: time / 1e3 for group, time in parts.items()}
        for record in records
        for when, parts in record["profile"].items()
    }
    return plot.step_times(
        bars,
        highlight="squeeze-and-excitation",
        title="A training step of EfficientNet-B4, before and after the swap",
        device=device_name,
        date=records[0]["date"],
    )


def bytes_moved(record, device_name):
    """The `plot.bytes_moved` of a record "squeeze_excite.profile"; PyTorch stands first."""
    rows = [
        {
            "label": row["label"],
            "read": row["dram_read_bytes"] / record["bytes"],
            "written": row["dram_write_bytes"] / record["bytes"],
        }
        for row in sorted(record["rows"], key=lambda row: row["kind"] == "ours")
    ]
    shape = " × ".join(f"{size:,}" for size in record["shape"])
    return plot.bytes_moved(
        rows,
        goal=2.4,
        title=f"Squeeze and excitation, forward, x of {shape} {record['dtype']} numbers",
        device=device_name,
        date=record["date"],
    )
