"""What squeeze and excitation gains: at each batch size, and in bytes moved."""

import math

from .cases import Case, measured, size
from .markdown import table

RECORDS = "squeeze_excite.forward", "squeeze_excite.both"


def render(records):
    """Markdown of both. "" where neither is recorded."""
    parts = []
    if blocks := [record for record in records if record["name"] in RECORDS]:
        parts.append(_block_table(blocks))
    if profiled := [r for r in records if r["name"] == "squeeze_excite.profile"]:
        parts.append(_moved(profiled))
    return "\n\n".join(parts)


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
            found.append(min(times) / Case(record).ours[f"{prefix}microseconds"])
    return found


def mean(ratios):
    """The geometric mean."""
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _block_table(records):
    groups, every = {}, {}
    for record in records:
        case = record["name"].partition(".")[2], record["shape"][0], record["dtype"]
        groups.setdefault(case, []).append(record)
    for (direction, *_), group in groups.items():
        every.setdefault((direction, "all", "all"), []).extend(group)
    lines = []
    for case, group in sorted(groups.items(), reverse=True) + sorted(every.items(), reverse=True):
        cells = [case[0].replace("both", "forward + backward"), *case[1:], len(group)]
        for peer in ("PyTorch eager", "torch.compile"):
            for prefix in ("", "python_"):
                ratios = block_speedups(group, peer, prefix)
                cells.append(f"{mean(ratios):.2f} ({min(ratios):.2f})" if ratios else "–")
        lines.append(cells)
    columns = {"direction": "---", "batch": "--:", "type": "---", "sizes": "--:"} | dict.fromkeys(
        ("eager, device", "eager, from Python", "torch.compile, device",
         "torch.compile, from Python"), "--:")  # fmt: skip
    return (
        "Squeeze and excitation at the sizes of EfficientNet-B4, how many times as fast as "
        f"PyTorch: geometric mean, and the least; measured {measured(records)}. PyTorch's dense "
        f"layers, which are convolutions, may use TF32; ours do not.\n\n{table(columns, lines)}"
    )


def _moved(records):
    labels = [row["label"] for row in records[0]["rows"]]
    lines = [
        [size(record["shape"]), record["dtype"],
         *(f"{row['sizes_of_x']:.2f}" for row in record["rows"])]
        for record in records
    ]  # fmt: skip
    columns = {"x": "---", "type": "---"} | dict.fromkeys(labels, "--:")
    return (
        "Device memory read and written by the forward pass, in sizes of x, as Nsight Compute "
        f"counts it; measured {measured(records)}.\n\n{table(columns, lines)}"
    )
