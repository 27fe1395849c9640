"""Softmax, rung by rung: the table that readers know, and the ladder at one large shape."""

from .cases import measured, size, when
from .markdown import table

SHAPE = [8192, 4096]  # large enough that memory is the limit


def readers(records):
    """The batch of 128 rows of 200 classes: on the device, and seen from Python. "" if not there.

    What Python sees begins with the call and ends when the result is there.
    """
    return "\n\n".join(_readers(record) for record in records if record["name"] == "softmax.table")


def _readers(record):
    n_rows, columns = record["shape"]
    lines = []
    for row in record["rows"]:
        cells = [row["label"]]
        for prefix in ("", "python_"):
            cells += [f"{row[f'{prefix}microseconds']:.1f}", f"{row[f'{prefix}speedup']:.1f} ×"]
        lines.append(cells)
    return (
        f"Softmax of {n_rows} rows of {columns} classes, {record['dtype']}; the CPU is an "
        f"{record['cpu']}, {record['cpu_threads']} of its threads used; measured {when(record)}."
        "\n\n"
    ) + table({"": "---", "on the device, µs": "--:", "speed-up": "--:",
               "seen from Python, µs": "--:", "speed-up ": "--:"}, lines)  # fmt: skip


def ladder(records):
    """Both directions at one large shape, rung by rung. "" where they are not recorded."""
    large = {
        record["name"].partition(".")[2]: record
        for record in records
        if record["name"] in ("softmax.forward", "softmax.backward")
        and (record["shape"], record["dtype"]) == (SHAPE, "float32")
    }
    return _ladder(**large) if len(large) == 2 else ""


def _ladder(forward, backward):
    """A rung that one direction lacks has a dash there."""
    ways = [{row["label"]: row for row in record["rows"]} for record in (forward, backward)]
    copies = " and ".join(f"{record['copy_gbps']:,.0f}" for record in (forward, backward))
    lines = []
    for label in ways[0] | ways[1]:
        cells = [label]
        for rows in ways:
            row = rows.get(label)
            cells += [f"{row['gbps']:,.0f}", f"{row['percent_of_copy']:.0f}"] if row else ["–"] * 2
        if label in (forward["default"], backward["default"]):
            cells[0] = f"**{label}**, the default"
        lines.append(cells)
    return (
        f"Softmax of {size(forward['shape'])} {forward['dtype']} numbers, rung by rung, where a "
        f"copy of as many bytes reaches {copies} GB/s; measured "
        f"{measured([forward, backward])}.\n\n"
    ) + table({"": "---", "forward, GB/s": "--:", "% of copy": "--:", "backward, GB/s": "--:",
               "% of copy ": "--:"}, lines)  # fmt: skip
