"""Records as pictures: the ladder of one, and how the rungs fare as rows grow longer."""

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
