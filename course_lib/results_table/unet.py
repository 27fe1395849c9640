"""The U-Net: training steps, the tape beside NumPy, hidden copies, shares, and chips left out."""

from .cases import arithmetic, measured, when
from .markdown import percent, table


def training(records):
    """A training step of our module beside PyTorch's, and the peak of memory."""
    records = [record for record in records if record["name"].startswith("unet.training")]
    if not records:
        return ""
    lines = []
    for record in records:
        rows = {row["label"]: row for row in record["rows"]}
        ours = rows[record["default"]]
        eager = min((row for label, row in rows.items() if label.startswith("PyTorch eager")),
                    key=lambda row: row["microseconds"])  # fmt: skip
        others = [rows.get(label) for label in ("ours, captured", "torch.compile",
                                                "PyTorch captured")]  # fmt: skip
        lines.append([
            arithmetic(record), record["shape"][0], _ms(ours), _ms(eager), *map(_ms, others),
            f"{ours['images_per_second']:,.0f}", f"{record['ratio']:.2f}",
            *(f"{row['peak_bytes'] / 1e9:.2f}" for row in (ours, eager)),
        ])  # fmt: skip
    columns = {"precision": "---", "batch": "--:"} | dict.fromkeys(
        ("our module, ms", "PyTorch eager, ms", "ours captured, ms", "torch.compile, ms",
         "PyTorch captured, ms", "ours, images/s", "times as fast as eager", "peak GB: ours",
         "PyTorch eager "), "--:")  # fmt: skip
    side = records[0]["shape"][-1]
    return (
        f"A training step (forward, loss, backward, Adam) of images of {side} × {side}, depth "
        f"{records[0]['depth']}, {records[0]['channels']} channels, each side in its faster "
        "layout, bfloat16 channels-last; peaks are of GPU memory, weights included; measured "
        f"{measured(records)}.\n\n{table(columns, lines)}"
    )


def kernels(records):
    """What families of kernels a step's time on the GPU goes to, of either side."""
    return "\n\n".join(_kernels(record) for record in _named(records, "unet.kernels"))


def _kernels(record):
    families = {}
    for row in record["rows"]:
        families.setdefault(row["family"], {})[row["kind"]] = row
    ours, eager = record["step_microseconds"].values()
    lines = [
        [family, *(cell for kind in ("ours", "peer") for cell in _kernel_cells(sides.get(kind)))]
        for family, sides in families.items()
    ]
    columns = {"kernels": "---"} | dict.fromkeys(
        ("ours, ms", "share", "PyTorch eager, ms", "share "), "--:"
    )
    return (
        f"Where the GPU's time in such a step goes, in {arithmetic(record)}, batch "
        f"{record['shape'][0]}, by PyTorch's profiler: {ours / 1e3:.1f} ms of kernels, PyTorch "
        f"eager {eager / 1e3:.1f} ms; measured {when(record)}.\n\n{table(columns, lines)}"
    )


def _kernel_cells(row):
    return (f"{row['microseconds'] / 1e3:.2f}", percent(row["share"], 1)) if row else ("–", "–")


def _ms(row):
    return f"{row['microseconds'] / 1e3:.1f}" if row else "–"


def tape(records):
    """What is recorded of the learner's own U-Net, beside the cases of `training`."""
    parts = (beside_numpy, _prefetch, _shares, _folds)
    return "\n\n".join(filter(None, (part(records) for part in parts)))


def _named(records, name):
    return [record for record in records if record["name"] == name]


def beside_numpy(records):
    """The tape's steps on the GPU, and the same lines on NumPy."""
    if not (records := _named(records, "unet.tape")):
        return ""
    lines = [
        [record["depth"], record["shape"][0],
         *(f"{row['microseconds'] / 1e3:,.1f}" for row in record["rows"]),
         f"{record['speedup']:.0f}", record["bars"]["speedup"]]
        for record in sorted(records, key=lambda record: record["depth"])
    ]  # fmt: skip
    columns = dict.fromkeys(
        ("depth", "batch", "GPU, ms", "NumPy, ms", "times as fast", "asked for"), "--:"
    )
    record = records[0]
    return (
        f"One training step on the learner's own tape, on the GPU and on NumPy ({record['cpu']}, "
        f"{record['cpu_threads']} threads), {record['channels']} channels; measured "
        f"{measured(records)}.\n\n{table(columns, lines)}"
    )


def _prefetch(records):
    for record in _named(records, "unet.prefetch"):
        rates = {row["label"]: f"{row['images_per_second']:,.0f}" for row in record["rows"]}
        return (
            f"With data from the host, `prefetch` reaches {percent(record['ratio'], 1)} of the "
            "rate with data that is on the GPU already ("
            + ", ".join(f"{label} {rate}" for label, rate in rates.items())
            + f" images/s); {percent(record['copies_hidden'])} of the copies' time lies under "
            f"kernels; measured {when(record)}."
        )
    return ""


def _shares(records):
    for record in _named(records, "unet.shares"):
        lines = [
            [row["label"], f"{row['forward_microseconds'] / 1e3:.2f}",
             f"{row['backward_microseconds'] / 1e3:.2f}", percent(row["share"], 1)]
            for row in sorted(record["rows"], key=lambda row: -row["microseconds"])
        ]  # fmt: skip
        columns = {"operation": "---"} | dict.fromkeys(
            ("forward, ms", "backward, ms", "share of the step"), "--:"
        )
        return (
            f"Where a step of {record['shape'][0]} images on the tape goes, "
            f"{record['step_microseconds'] / 1e3:.1f} ms on the GPU; measured {when(record)}."
            f"\n\n{table(columns, lines)}"
        )
    return ""


def _folds(records):
    for record in _named(records, "unet.folds"):
        lines = [
            [label, _seeds(record, label), f"{iou:.3f}",
             *(f"{each:.3f}" for each in record["iou_by_fold"][label])]
            for label, iou in record["iou"].items()
        ]  # fmt: skip
        lines.append(["difference", "", f"{record['difference']:+.3f}",
                      *(f"{each:+.3f}" for each in record["difference_by_fold"])])  # fmt: skip
        columns = {"": "---"} | dict.fromkeys(
            ("seeds", "IoU", *(f"fold {i + 1}" for i in range(len(record["folds"])))), "--:"
        )
        published = ", ".join(f"{name} {iou}" for name, iou in record["published"].items())
        whose = "drawn scenes" if record["drawn"] else "11 chips of Sen1Floods11"
        names = "; ".join(
            f"{i + 1}: {', '.join(names)}" for i, names in enumerate(record["folds"])
        )
        return (
            f"Water in {whose}, each left out once, pooled over all: intersection over union after "
            f"{record['epochs']} epochs, depth {record['depth']}, {record['channels']} channels; "
            "both networks from the same weights, in the same order. The best threshold of the "
            f"other folds: {record['threshold']:.3f}. Published, on other chips: {published} "
            f"({record['source']}). Folds: {names}. Measured {when(record)}."
            f"\n\n{table(columns, lines)}"
        )
    return ""


def _seeds(record, label):
    return sum(row["label"] == label for row in record["rows"])
