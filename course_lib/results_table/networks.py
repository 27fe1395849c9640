"""Whole networks: EfficientNet-B4, networks of our layers alone, Fashion-MNIST; first calls."""

from .cases import arithmetic, measured, rows_of, when
from .markdown import percent, table


def efficientnet(records):
    """Before and after the blocks are swapped, beside what Amdahl's law predicts."""
    records = [record for record in records if record["name"].startswith("efficientnet.")]
    if not records:
        return ""
    lines = []
    for record in records:
        before, after = (row["microseconds"] / 1e3 for row in record["rows"][:2])
        law, explained = record.get("amdahl"), [""] * 3
        if law:
            explained = [
                percent(law['share'], 1), f"{law['predicted_ratio']:.3f}",
                f"{law['measured_ratio']:.3f}",
            ]  # fmt: skip
        name = {"step": "training step"}.get(record["name"].partition(".")[2], "inference")
        times = [f"{before:.1f}", f"{after:.1f}", f"{record['ratio']:.3f}"]
        lines.append([name, arithmetic(record), *times, *explained])
    N, *_, side = records[0]["shape"]
    columns = {"": "---", "type": "---"} | dict.fromkeys(
        ("PyTorch, ms", "ours, ms", "times as fast", "share of the blocks in a CUDA graph",
         "predicted for that", "measured"), "--:")  # fmt: skip
    return (
        f"EfficientNet-B4, {N} images of {side} × {side}, before and after its squeeze-and-"
        f"excitation blocks are swapped; measured {measured(records)}.\n\n{table(columns, lines)}"
    )


#: {label of a row: heading of its column}
_STEPS = {
    "ours": "ours", "PyTorch eager": "PyTorch eager", "torch.compile": "torch.compile",
    "ours, faster": "ours that gain", "ours, captured": "ours, captured",
    "PyTorch eager, captured": "PyTorch, captured",
}  # fmt: skip


def replaced(records):
    """A training step of networks whose layers are all ours, or those of them that gain."""
    records = [record for record in records if record["name"].startswith("replace_layers.")]
    if not records:
        return ""
    lines = []
    for record in records:
        times = {row["label"]: row["microseconds"] / 1e3 for row in record["rows"]}
        errors = record["gradient_errors"]
        lines.append([
            record["name"].partition(".")[2], arithmetic(record), record["shape"][0],
            *(f"{times[who]:.1f}" if who in times else "" for who in _STEPS),
            f"{times['ours'] / min(times['PyTorch eager'], times['torch.compile']):.2f}",
            f"{errors['ours'] / errors['PyTorch eager']:.2f}",
        ])  # fmt: skip
    columns = {"network": "---", "type": "---"} | dict.fromkeys(
        ("images", *_STEPS.values(), "ours ÷ the faster",
         "error of our gradients ÷ PyTorch's"), "--:")  # fmt: skip
    side = records[0]["shape"][-1]
    return (
        f"A training step on images of {side} × {side}, in ms, all layers replaced by ours "
        '(`nn.replace_layers`), or those that gain (`keep="faster"`), each side in its faster '
        "layout; captured is the step as one CUDA graph; measured "
        f"{measured(records)}.\n\n{table(columns, lines)}"
    )


def fashion_mnist(records):
    """Throughput, memory and accuracy of the Fashion-MNIST network."""
    parts = [_throughput(records), _command(records), _accuracy(records)]
    return "\n\n".join(filter(None, parts))


def _throughput(records):
    """Images a second: one captured graph beside the fastest peer, and module by module."""
    records = [r for r in records if r["name"].startswith(("fashion_mnist.training",
                                                           "fashion_mnist.inference"))]  # fmt: skip
    if not records:
        return ""
    lines = []
    for record in records:
        rows = {row["label"]: row for row in record["rows"]}
        peers = sorted(rows_of(record, "peer"), key=_images)
        eager = [row for row in peers if row["label"].startswith("PyTorch eager")][-1]
        ours, modules, peer = rows[record["default"]], rows["ours, modules"], peers[-1]
        lines.append([
            record["name"].split(".")[1], arithmetic(record), record["shape"][0],
            f"{_images(ours):,.0f}", f"{_images(peer):,.0f}",
            f"{_images(ours) / _images(peer):.2f}",
            f"{_images(modules):,.0f}", f"{_images(eager):,.0f}",
            f"{_images(modules) / _images(eager):.2f}",
            *(f"{row['peak_bytes'] / 1e6:.1f}" for row in (ours, peer, modules, eager)),
        ])  # fmt: skip
    columns = {"": "---", "precision": "---", "batch": "--:"} | dict.fromkeys(
        ("ours in one graph", "fastest peer", "times as fast", "our modules", "PyTorch eager",
         "times as fast ", "peak MB: one graph", "fastest peer ", "our modules ",
         "PyTorch eager "), "--:")  # fmt: skip
    return (
        "The Fashion-MNIST network in images per second, as Python sees them, and the peak of GPU "
        f"memory; measured {measured(records)}.\n\n{table(columns, lines)}"
    )


def _images(row):
    return row["images_per_second"]


def _command(records):
    records = [r for r in records if r["name"].startswith("fashion_mnist.command")]
    lines = []
    for record in records:
        ours, peer = (row["images_per_second"] for row in record["rows"])
        lines.append(f"{arithmetic(record)} {ours:,.0f} images/s, {ours / peer:.1f} times as fast")
    if not lines:
        return ""
    return (
        "`train fashion-mnist` as a process of its own, beside an eager PyTorch script that does "
        f"the same in batches of 32: {'; '.join(lines)}; measured "
        f"{measured(records)}."
    )


def _accuracy(records):
    found = [record for record in records if record["name"] == "fashion_mnist.runs"]
    if not found:
        return ""
    (record,), lines = found, []
    for label, accuracy in record["accuracy"].items():
        seconds = [row["microseconds"] / 1e6 for row in record["rows"] if row["label"] == label]
        lines.append([label, len(seconds), percent(accuracy, 2),
                      f"{sorted(seconds)[len(seconds) // 2]:.1f}"])  # fmt: skip
    columns = {"": "---", "seeds": "--:", "mean accuracy": "--:", "seconds": "--:"}
    return (
        f"Accuracy on the 10,000 test images after {record['epochs']} epochs in batches of "
        f"{record['batch_size']}; measured {when(record)}.\n\n{table(columns, lines)}"
    )


def first_calls(records):
    """What compiled kernels kept on disk spare a process."""
    return "\n\n".join(_first_calls(r) for r in records if r["name"] == "kernel_cache.first_call")


def _first_calls(record):
    rows, lines = {row["label"]: row for row in record["rows"]}, []
    for label, cold in rows.items():
        what, _, state = label.rpartition(", ")
        if state == "cold":
            warm = rows[f"{what}, warm"]
            times = [f"{row['microseconds'] / 1e3:,.0f}" for row in (cold, warm)]
            lines.append([what, *times, f"{warm['speedup']:.1f}"])
    columns = {"": "---", "cold, ms": "--:", "warm, ms": "--:", "times as fast": "--:"}
    return (
        "The first call of a process, with nothing compiled and with the cache filled; measured "
        f"{when(record)}.\n\n{table(columns, lines)}"
    )


def host(records):
    """What one call costs the host, a line for each record."""
    found = []
    for record in records:
        if record["name"] in ("launch.host", "softmax.host"):
            # Parts of a call, which add up to it, are for the lesson that takes it apart.
            whole = [row for row in record["rows"] if not row["label"].startswith("part: ")]
            times = [f"{row['label']} {row['microseconds']:.1f} µs" for row in whole]
            found.append(f"`{record['name']}`, on the host's clock: {', '.join(times)}; measured "
                         f"{when(record)}.")  # fmt: skip
    return "\n\n".join(found)
