"""The README's table of measured results, drawn from records. Takes data, returns text."""

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

    One table for each device, in it one line for each operation and type: the top rung of the
    ladder beside the fastest peer of the same run, at the largest shape measured. The last column
    is the least and the greatest ratio among all its shapes, so that no slow one is left out.
    Below it, one line for each record of host times. Records without a peer are a lesson's own and
    stay there.
    """
    tables = []
    for recording in recordings:
        records = [record for record in recording["records"] if _rows(record, "peer")]
        of_device = [record for record in records if "copy_gbps" in record]
        of_host = [record for record in records if "copy_gbps" not in record]
        if of_device:
            tables.append(_table(recording["device"], of_device))
        tables += [_host(record) for record in of_host]
    return "\n\n".join(tables)


def _host(record):
    times = [f"{row['label']} {row['microseconds']:.1f} µs" for row in record["rows"]]
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
    # Rows stand in teaching order: the last of ours is the top rung.
    return _rows(record, "ours")[-1]


def _peer(record):
    return min(_rows(record, "peer"), key=lambda row: row["microseconds"])


def _rows(record, kind):
    return [row for row in record["rows"] if row["kind"] == kind]


def _ratio(record):
    return _ours(record)["microseconds"] / _peer(record)["microseconds"]
