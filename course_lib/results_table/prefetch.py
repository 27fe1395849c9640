"""What it gains to copy the next batch to the GPU during a step."""

from .cases import when
from .markdown import percent, table


def copies(records):
    """Steps on batches that are there, are copied when needed, or come during the step before."""
    records = [record for record in records if record["name"] == "prefetch.training"]
    if not records:
        return ""
    lines = [
        [
            f"{record['shape'][1]:,}",
            percent(record["copy_share"]),
            row["label"],
            f"{row['microseconds'] / 1e3:.2f}",
            "–" if row["copies_hidden"] is None else percent(row["copies_hidden"]),
        ]
        for record in records
        for row in record["rows"]
    ]
    columns = {"features": "--:", "a copy's share": "--:", "batches": "---"} | dict.fromkeys(
        ("ms", "of the copies hidden"), "--:"
    )
    return (
        f"A step of four linear layers in one CUDA graph, on {records[0]['shape'][0]:,} samples: a "
        "copy's share is what copying when needed adds to the step; hidden is the part of the "
        f"copies' time in which kernels ran. Measured {when(records[0])}.\n\n"
        f"{table(columns, lines)}"
    )
