"""Several GPUs on the results page: training on them, and sums over them."""

from .cases import when
from .markdown import percent, table


def several_gpus(records):
    """Both tables. "" where nothing of it is recorded."""
    return "\n\n".join(filter(None, (training(records), all_reduces(records))))


def training(records):
    """Images per second on one GPU and on several, with the same batch on each."""
    records = [record for record in records if record["name"].startswith("data_parallel.")]
    lines, left_out = [], []
    for record in records:
        network, world = record["name"].partition(".")[2], record["shape"][0]
        rates = {row["label"]: row.get("images_per_second") for row in record["rows"]}
        for label in (each.removesuffix(", 1 GPU") for each in rates if each.endswith(", 1 GPU")):
            one, several = rates[f"{label}, 1 GPU"], rates[f"{label}, {world} GPUs"]
            lines.append(
                [
                    f"`{network}`",
                    record["dtype"],
                    record["shape"][1],
                    label,
                    f"{one:,.0f}",
                    world,
                    f"{several:,.0f}",
                    f"{several / one:.2f}",
                    when(record),
                ]
            )
        for label, why in record.get("left_out", {}).items():
            left_out.append(f"Without {label} of `{network}` in {record['dtype']}: {why}.")
    if not lines:
        return ""
    columns = {
        "network": "---",
        "type": "---",
        "images a GPU": "--:",
        "step": "---",
        "images/s, 1 GPU": "--:",
        "GPUs": "--:",
        "images/s": "--:",
        "times as many": "--:",
        "measured": "---",
    }
    sentences = ["A step is forward, loss, backward, the exchange of all gradients and SGD."]
    sentences += filter(None, map(_exchange, records))
    return f"{table(columns, lines)}\n\n{' '.join(sentences + left_out)}"


def _exchange(record):
    """How much of NCCL's work lies under the backward pass, in a sentence; "" where unknown."""
    if "exchange_hidden" not in record:
        return ""
    network = record["name"].partition(".")[2]
    alone = next(row for row in record["rows"] if row["kind"] == "part")
    alone = alone["microseconds"]
    return (
        f"Of `{network}` in {record['dtype']}, {record['gradient_bytes'] / 1e6:,.0f} MB are "
        f"exchanged, by NCCL alone in {alone:,.0f} µs; in a step that is not captured, NCCL's "
        f"kernels lie under others for {percent(record['exchange_hidden'])} of their time."
    )


def all_reduces(records):
    """An all-reduce by our rungs and by NCCL, by the length of the buffers."""
    records = [record for record in records if record["name"] == "all_reduce"]
    if not records:
        return ""
    labels = [row["label"] for row in records[0]["rows"]]
    lines = []
    for record in records:
        rows = {row["label"]: row for row in record["rows"]}
        best = max(rows.values(), key=lambda row: row["bus_gbps"])
        lines.append(
            [
                record["shape"][0],
                f"{record['shape'][1]:,}",
                *(f"{rows[label]['microseconds']:,.0f}" for label in labels),
                f"{best['bus_gbps']:,.1f}",
                f"{record['link_gbps']:,.1f}",
            ]
        )
    columns = {"GPUs": "--:", "numbers": "--:"}
    columns |= dict.fromkeys([f"{label}, µs" for label in labels], "--:")
    columns |= {"fastest, bus GB/s": "--:", "copy, GB/s": "--:"}
    return (
        f"An all-reduce of float32 numbers, as Python sees it, measured {when(records[0])}. Bus "
        "GB/s: what each GPU must send at least, over the time; beside it a copy of as many bytes "
        f"from each GPU to the next.\n\n{table(columns, lines)}"
    )
