"""The README's tables of measured results, drawn from records. Take data, return text."""

SOFTMAX_SHAPE = [8192, 4096]  # large enough that memory is the limit

_COLUMNS = {
    "operation": "---",
    "type": "---",
    "shape": "---",
    "variant": "---",
    "GB/s": "--:",
    "% of the limit": "--:",
    "fastest peer": "---",
    "time ÷ peer's": "--:",
    "… over all shapes": "--:",
}


def render(recordings):
    """Markdown for `recordings`, a list of record files as `bench.load_records` returns them.

    One table for each device, in it one line for each operation and type: the rung that runs by
    default beside the fastest peer of the same run, at the largest shape measured. The last column
    is the least and the greatest ratio among all its shapes, so that no slow one is left out.
    Below it, one line for each record of host times. A lesson's own records, a profiler's, and
    those without a peer, stay there; the readers' table is drawn by `softmax`.
    """
    tables = []
    for recording in recordings:
        records = [
            record
            for record in recording["records"]
            if _rows(record, "peer")
            and not record["name"].startswith("lesson_")
            and record["name"] not in ("softmax.table", "softmax.profile")
        ]
        of_device = [record for record in records if "copy_gbps" in record]
        of_host = [record for record in records if "copy_gbps" not in record]
        if of_device:
            tables.append(_table(recording["device"], of_device))
        tables += [_host(record) for record in of_host]
    return "\n\n".join(tables)


def softmax(recordings):
    """Markdown: the readers' table, and the ladder of softmax at one large shape, of each device.

    Empty where no softmax is recorded.
    """
    parts = []
    for recording in recordings:
        device, records = recording["device"], recording["records"]
        parts += [_readers(device, r) for r in records if r["name"] == "softmax.table"]
        large = {
            record["name"].partition(".")[2]: record
            for record in records
            if record["name"] in ("softmax.forward", "softmax.backward")
            and (record["shape"], record["dtype"]) == (SOFTMAX_SHAPE, "float32")
        }
        if len(large) == 2:
            parts.append(_ladder(device, **large))
    return "\n\n".join(parts)


def _readers(device, record):
    rows, columns = record["shape"]
    lines = [
        f"Softmax of {rows} rows of {columns} classes, {record['dtype']}. **{device['name']}**, "
        f"{record['cpu']}, {record['cpu_threads']} threads; measured {record['date']}.",
        "",
        _row(["", "on the device, µs", "speed-up", "seen from Python, µs", "speed-up"]),
        _row(["---", "--:", "--:", "--:", "--:"]),
    ]
    for row in record["rows"]:
        cells = [row["label"]]
        for prefix in ("", "python_"):
            cells += [f"{row[f'{prefix}microseconds']:.1f}", f"{row[f'{prefix}speedup']:.1f} ×"]
        lines.append(_row(cells))
    return "\n".join(lines)


def _ladder(device, forward, backward):
    """Both directions side by side; a rung that one of them lacks has a dash there."""
    ways = [{row["label"]: row for row in record["rows"]} for record in (forward, backward)]
    shape = " × ".join(f"{size:,}" for size in forward["shape"])
    copies = " and ".join(f"{record['copy_gbps']:,.0f}" for record in (forward, backward))
    lines = [
        f"Softmax of {shape} {forward['dtype']} numbers, rung by rung. **{device['name']}**, where "
        f"a copy of as many bytes reaches {copies} GB/s; measured {forward['date']}.",
        "",
        _row(["", "forward, GB/s", "% of copy", "backward, GB/s", "% of copy"]),
        _row(["---", "--:", "--:", "--:", "--:"]),
    ]
    for label in ways[0] | ways[1]:
        cells = [label]
        for rows in ways:
            row = rows.get(label)
            cells += [f"{row['gbps']:,.0f}", f"{row['percent_of_copy']:.0f}"] if row else ["–"] * 2
        if label in (forward["default"], backward["default"]):
            cells[0] = f"**{label}**, the default"
        lines.append(_row(cells))
    return "\n".join(lines)


def _host(record):
    # Parts of a call, which add up to it, are for the lesson that takes it apart.
    whole = [row for row in record["rows"] if not row["label"].startswith("part: ")]
    times = [f"{row['label']} {row['microseconds']:.1f} µs" for row in whole]
    return f"`{record['name']}`, on the host's clock: {', '.join(times)}."


def _table(device, records):
    dates = sorted({record["date"] for record in records})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    groups = {}
    for record in records:
        groups.setdefault((record["name"], record["dtype"]), []).append(record)
    lines = [f"**{device['name']}**, measured {when}", ""]
    lines += [_row(_COLUMNS), _row(_COLUMNS.values())]
    return "\n".join([*lines, *(_line(group) for group in groups.values())])


def _line(group):
    largest = max(group, key=lambda record: record["bytes"])
    ours, peer = _ours(largest), _peer(largest)
    ratios = [_ratio(record) for record in group]
    shape = " × ".join(f"{size:,}" for size in largest["shape"])
    cells = [f"`{largest['name']}`", largest["dtype"], shape, ours["label"]]
    cells += [f"{ours['gbps']:,.0f}", f"{ours['percent_of_copy']:.0f}", peer["label"]]
    cells += [f"{_ratio(largest):.2f}", f"{min(ratios):.2f} to {max(ratios):.2f}"]
    return _row(cells)


def _row(cells):
    return "| " + " | ".join(cells) + " |"


def _ours(record):
    # What runs by default; elsewhere rows stand in teaching order, the top rung last.
    ours = _rows(record, "ours")
    named = [row for row in ours if row["label"] == record.get("default")]
    return (named or ours)[-1]


def _peer(record):
    return min(_rows(record, "peer"), key=lambda row: row["microseconds"])


def _rows(record, kind):
    return [row for row in record["rows"] if row["kind"] == kind]


def _ratio(record):
    return _ours(record)["microseconds"] / _peer(record)["microseconds"]
