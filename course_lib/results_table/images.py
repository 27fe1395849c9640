"""Networks for photographs: softmax's share, Tiny-ImageNet trained to the end, two pathways."""

from .cases import CAPTURED, when
from .markdown import percent, table


def softmax_shares(records):
    """Which share of the GPU's time softmax takes, in a sentence."""
    for record in records:
        if record["name"] == "tiny_imagenet.softmax":
            parts = "; ".join(
                f"{row['label']}: {percent(row['share'], 2)} of "
                f"{row['whole_microseconds'] / 1e3:.2f} ms" for row in record["rows"]
            )  # fmt: skip
            return (
                f"Of the GPU's time, by PyTorch's profiler, batch {record['shape'][0]}: {parts}; "
                f"measured {when(record)}."
            )
    return ""


def runs(records):
    """What networks know of Tiny-ImageNet's validation images after training, by recipe."""
    for record in records:
        if record["name"] == "tiny_imagenet.runs":
            stopped = record.get("stopped", {})
            lines = [
                [row["label"], "ours" if row["kind"] == "ours" else "PyTorch's",
                 _recipe(row["recipe"]), len(row["history"]), percent(row["accuracy"], 1),
                 f"{row['microseconds'] / 6e7:.1f}"]
                for row in record["rows"]
            ]  # fmt: skip
            columns = {"run": "---", "layers": "---", "recipe": "---"} | dict.fromkeys(
                ("epochs", "right", "minutes"), "--:"
            )
            ends = "".join(f" {name} ended {why}." for name, why in stopped.items())
            return (
                "Trained on Tiny-ImageNet by `train images`: how many of its 10,000 validation "
                "images are told right, of 200 classes. Several runs shared the GPU, so the "
                f"minutes are no measure of speed.{ends} Measured {when(record)}."
                f"\n\n{table(columns, lines)}"
            )
    return ""


def _recipe(recipe):
    """A recipe in words."""
    words = [
        f"{recipe['optimizer']} {recipe['learning_rate']:g}", f"batch {recipe['batch_size']}",
        recipe["precision"],
    ]  # fmt: skip
    for key, name in (("weight_decay", "decay"), ("label_smoothing", "smoothing"),
                      ("mixup", "MixUp"), ("cutmix", "CutMix")):  # fmt: skip
        if recipe.get(key):
            words.append(f"{name} {recipe[key]:g}")
    return ", ".join(words + ["averaged weights"] * recipe.get("model_ema", False))


def switches(records):
    """Samples a second with each switch alone, and with the fastest together."""
    return "\n\n".join(map(_switches, records))


def _peak(record, row):
    """GB at the peak of a step; a dash for a captured one that was measured at its replay.

    A graph's pool holds the memory of its step, and PyTorch counts it only while it is captured.
    """
    if CAPTURED in row["label"] and record.get("captured_peaks") != "while captured":
        return "–"
    return f"{row['peak_bytes'] / 1e9:.2f}"


def _switches(record):
    naive = record["rows"][0]
    peaks = [_peak(record, row) for row in record["rows"]]
    lines = [
        [row["label"], f"{row['microseconds'] / 1e3:.2f}", f"{row['samples_per_second']:,.0f}",
         f"{naive['microseconds'] / row['microseconds']:.2f}", peak]
        for row, peak in zip(record["rows"], peaks, strict=True)
    ]  # fmt: skip
    lines += [[label, "–", "–", "–", "–"] for label in record["left_out"]]
    columns = {"switches": "---"} | dict.fromkeys(
        ("ms", "samples/s", "times as fast as the first", "peak GB"), "--:"
    )
    kind = "training step" if record["name"].endswith("training") else "forward pass"
    N, _, height, width = record["shape"]
    failed = "".join(f" {label} is left out: {why}." for label, why in record["left_out"].items())
    missing = " The peaks of captured steps are not recorded." * ("–" in peaks)
    return (
        f"A {kind} of {N} images of {height} × {width} with their brightness, "
        f"{record['depth']}, {record['channels']} channels, each switch alone, then together; "
        f"the fastest: {record['fastest']}, {record['ratio']:.2f} times as fast as the naive "
        f"program.{failed}{missing} Measured {when(record)}.\n\n{table(columns, lines)}"
    )
