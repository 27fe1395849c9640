"""The README's tables of measured results, drawn from records. Take data, return text."""

import math

SOFTMAX_SHAPE = [8192, 4096]  # large enough that memory is the limit

#: Records that the large table leaves to other parts of the README, or to lessons.
_ELSEWHERE = (
    "softmax.table", "softmax.profile", "squeeze_excite.profile", "efficientnet.step",
    "efficientnet.inference", "kernel_cache.first_call",
)  # fmt: skip
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
    Below it, whole networks whose layers were replaced, and one line for each record of host
    times. A lesson's own records, a profiler's, and those without a peer, stay there; other parts
    of the README are drawn by `softmax` and `squeeze_excite`.
    """
    tables = []
    for recording in recordings:
        records = [
            record
            for record in recording["records"]
            if _rows(record, "peer")
            and not record["name"].startswith("lesson_")
            and record["name"] not in _ELSEWHERE
            and record["name"].partition(".")[0] not in ("linear", "conv2d", "fashion_mnist")
        ]
        of_device = [record for record in records if "copy_gbps" in record]
        of_host = [record for record in records if "copy_gbps" not in record]
        whole = [record for record in of_host if record["name"].startswith("replace_layers.")]
        if of_device:
            tables.append(_table(recording["device"], of_device))
        if whole:
            tables.append(_replaced(recording["device"], whole))
        tables += [_host(record) for record in of_host if record not in whole]
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


def squeeze_excite(recordings):
    """Markdown: what squeeze and excitation gains alone and in a network, on each device.

    And what the cache on disk spares a process. Empty where none of it is recorded.
    """
    parts = []
    for recording in recordings:
        device, records = recording["device"], recording["records"]
        blocks = [r for r in records if r["name"] in ("squeeze_excite.forward",
                                                      "squeeze_excite.both")]  # fmt: skip
        if blocks:
            parts.append(_block_table(device, blocks))
        if profiled := [r for r in records if r["name"] == "squeeze_excite.profile"]:
            parts.append(_moved(device, profiled))
        if steps := [r for r in records if r["name"].startswith("efficientnet.")]:
            parts.append(_network_table(device, steps))
        parts += [
            _first_calls(device, r) for r in records if r["name"] == "kernel_cache.first_call"
        ]
    return "\n\n".join(parts)


def when(record):
    """The date of a record; and that its kernels have changed since, where it says so.

    A record may have the field `stale` until it is measured again, which replaces it.
    """
    return record["date"] + (", kernels changed since" if record.get("stale") else "")


def block_speedups(records, peer, prefix=""):
    """How many times as fast the default rung is as `peer`, a number for each record that has it.

    peer    "torch.compile", or "PyTorch eager" in whichever memory format is the faster
    prefix  "python_" for the times that Python sees, else those of the device
    """
    found = []
    for record in records:
        times = [
            row[f"{prefix}microseconds"]
            for row in record["rows"]
            if row["label"].partition(", ")[0] == peer
        ]
        if times:
            found.append(min(times) / _ours(record)[f"{prefix}microseconds"])
    return found


def _block_table(device, records):
    dates = sorted({record["date"] for record in records})
    lines = [
        "Squeeze and excitation at the sizes of EfficientNet-B4, how many times as fast as "
        f"PyTorch: geometric mean, and the least. **{device['name']}**, measured {dates[-1]}.",
        "",
        _row(["direction", "batch", "type", "sizes", "eager, device", "eager, from Python",
              "torch.compile, device", "torch.compile, from Python"]),
        _row(["---", "--:", "---", "--:", *["--:"] * 4]),
    ]  # fmt: skip
    groups = {}
    for record in records:
        case = record["name"].partition(".")[2], record["shape"][0], record["dtype"]
        groups.setdefault(case, []).append(record)
    every = {}
    for (direction, *_), group in groups.items():
        every.setdefault((direction, "all", "all"), []).extend(group)
    for case, group in sorted(groups.items(), reverse=True) + sorted(every.items(), reverse=True):
        cells = [case[0].replace("both", "forward + backward"), *map(str, case[1:])]
        cells.append(str(len(group)))
        for peer in ("PyTorch eager", "torch.compile"):
            for prefix in ("", "python_"):
                cells.append(_mean_and_least(block_speedups(group, peer, prefix)))
        lines.append(_row(cells))
    return "\n".join(lines)


def _mean_and_least(ratios):
    if not ratios:
        return "–"
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.2f} ({min(ratios):.2f})"


def _moved(device, records):
    labels = [row["label"] for row in records[0]["rows"]]
    lines = [
        "Device memory read and written by the forward pass, in sizes of x, as Nsight Compute "
        f"counts it. **{device['name']}**, measured {records[0]['date']}.",
        "",
        _row(["x", "type", *labels]),
        _row(["---", "---", *["--:"] * len(labels)]),
    ]
    for record in records:
        shape = " × ".join(f"{size:,}" for size in record["shape"])
        moved = [f"{row['sizes_of_x']:.2f}" for row in record["rows"]]
        lines.append(_row([shape, record["dtype"], *moved]))
    return "\n".join(lines)


def _network_table(device, records):
    N, *_, side = records[0]["shape"]
    lines = [
        f"EfficientNet-B4, {N} images of {side} × {side}, before and after the swap. "
        f"**{device['name']}**, measured {when(records[0])}.",
        "",
        _row(["", "type", "PyTorch, ms", "ours, ms", "times as fast",
              "share of the blocks in a CUDA graph", "predicted for that", "measured"]),
        _row(["---", "---", *["--:"] * 6]),
    ]  # fmt: skip
    for record in records:
        before, after = (row["microseconds"] / 1e3 for row in record["rows"][:2])
        law = record.get("amdahl")
        explained = [""] * 3
        if law:
            explained = [
                f"{law['share']:.1%}", f"{law['predicted_ratio']:.3f}",
                f"{law['measured_ratio']:.3f}",
            ]  # fmt: skip
        name = {"step": "training step"}.get(record["name"].partition(".")[2], "inference")
        cells = [name, record["dtype"], f"{before:.1f}", f"{after:.1f}", f"{record['ratio']:.3f}"]
        lines.append(_row(cells + explained))
    return "\n".join(lines)


def _first_calls(device, record):
    lines = [
        "The first call of a process, with nothing compiled and with the cache filled. "
        f"**{device['name']}**, measured {when(record)}.",
        "",
        _row(["", "cold, ms", "warm, ms", "times as fast"]),
        _row(["---", *["--:"] * 3]),
    ]
    rows = {row["label"]: row for row in record["rows"]}
    for label, cold in rows.items():
        what, _, state = label.rpartition(", ")
        if state == "cold":
            warm = rows[f"{what}, warm"]
            times = [f"{row['microseconds'] / 1e3:,.0f}" for row in (cold, warm)]
            lines.append(_row([what, *times, f"{warm['speedup']:.1f}"]))
    return "\n".join(lines)


def _host(record):
    # Parts of a call, which add up to it, are for the lesson that takes it apart.
    whole = [row for row in record["rows"] if not row["label"].startswith("part: ")]
    times = [f"{row['label']} {row['microseconds']:.1f} µs" for row in whole]
    return f"`{record['name']}`, on the host's clock: {', '.join(times)}."


def _replaced(device, records):
    N, *_, side = records[0]["shape"]
    lines = [
        f"A training step of {N} images of {side} × {side}, all layers replaced by ours "
        f"(`nn.replace_layers`), each side in its faster layout. **{device['name']}**, measured "
        f"{when(records[0])}.",
        "",
        _row(["network", "type", "ours, ms", "PyTorch eager, ms", "torch.compile, ms",
              "ours ÷ the faster", "error of our gradients ÷ PyTorch's"]),
        _row(["---", "---", *["--:"] * 5]),
    ]  # fmt: skip
    for record in records:
        ours, *peers = (row["microseconds"] / 1e3 for row in record["rows"][:3])
        errors = record["gradient_errors"]
        cells = [record["name"].partition(".")[2], record["dtype"]]
        cells += [f"{time:.1f}" for time in (ours, *peers)]
        cells += [f"{ours / min(peers):.2f}", f"{errors['ours'] / errors['PyTorch eager']:.2f}"]
        lines.append(_row(cells))
    return "\n".join(lines)


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
