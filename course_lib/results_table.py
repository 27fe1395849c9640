"""The README's table of measured results, drawn from records. Takes data, returns text."""


def render(recordings):
    """Markdown for `recordings`, a list of record files as `bench.load_records` returns them.

    One table for each device: a line for each measurement, our fastest variant beside the
    fastest peer of the same run.
    """
    return "\n\n".join(_device(recording) for recording in recordings if recording["records"])


def _device(recording):
    dates = sorted({record["date"] for record in recording["records"]})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    lines = [
        f"**{recording['device']['name']}**, measured {when}",
        "",
        "| operation | shape | type | ours | µs | GB/s | % of a copy | peer | µs | ours / peer |",
        "|---|---|---|---|--:|--:|--:|---|--:|--:|",
    ]
    lines += [_line(record) for record in recording["records"]]
    return "\n".join(lines)


def _line(record):
    ours = _fastest(record, "ours")
    peer = _fastest(record, "peer")
    shape = " × ".join(f"{size:,}" for size in record["shape"])
    cells = [f"`{record['name']}`", shape, record["dtype"]]
    cells += [ours["label"], f"{ours['microseconds']:.1f}", f"{ours['gbps']:,.0f}"]
    cells += [f"{ours['percent_of_copy']:.0f}"]
    if peer is None:
        cells += ["–", "–", "–"]
    else:
        ratio = ours["microseconds"] / peer["microseconds"]
        cells += [peer["label"], f"{peer['microseconds']:.1f}", f"{ratio:.2f}"]
    return "| " + " | ".join(cells) + " |"


def _fastest(record, kind):
    rows = [row for row in record["rows"] if row["kind"] == kind]
    return min(rows, key=lambda row: row["microseconds"], default=None)
