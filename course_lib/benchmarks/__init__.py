"""What `python -m course_lib bench` measures: one file per operation, each with a `run`."""

from pathlib import Path


def table(records):
    """The records as text: a line for each, a column for each of its rows."""
    lines = []
    for record in records:
        shape = "x".join(map(str, record["shape"]))
        cells = [f"{row['label']} {_value(row)}" for row in record["rows"]]
        copy = f"copy {record['copy_gbps']:,.0f} GB/s | " if "copy_gbps" in record else ""
        lines.append(f"{record['name']} {shape} {record['dtype']}: {copy}{' | '.join(cells)}")
    return "\n".join(lines)


def _value(row):
    share = f" ({row['percent_of_copy']:.0f}% of copy)" if "percent_of_copy" in row else ""
    return f"{row['microseconds']:.2f} µs{share}"


def save_plots(records, device_name, folder):
    """A PNG for each record of device times, named after it, in `folder` (made if missing)."""
    from course_lib import plot

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for record in records:
        if "copy_gbps" not in record:
            continue
        shape = "x".join(map(str, record["shape"]))
        figure = plot.ladder(
            record["rows"],
            record["copy_gbps"],
            title=f"{record['name']}, {shape}, {record['dtype']}",
            device=device_name,
            date=record["date"],
        )
        figure.savefig(folder / f"{record['name']}-{shape}-{record['dtype']}.png")
