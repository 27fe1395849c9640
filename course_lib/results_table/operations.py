"""The part of the page that every operation has: its cases, and those that are lost."""

import statistics

from .cases import by_operation, compact, losses, measured
from .markdown import folded, percent, table

_OVERVIEW = {
    "operation": "---", "cases": "--:", "slower": "--:", "share": "--:", "median": "--:",
    "best": "--:", "worst": "--:", "the worst is": "---",
}  # fmt: skip
_GROUPS = {
    "record": "---", "type": "---", "slower": "--:", "ratio": "--:", "largest": "---",
    "ours, µs": "--:", "peer, µs": "--:", "peer": "---", "our rate": "--:",
}  # fmt: skip
_LOST = {
    "record": "---", "type": "---", "shape": "---", "ours, µs": "--:", "peer, µs": "--:",
    "peer": "---", "ratio": "--:",
}  # fmt: skip


def overview(found, linked=True):
    """One line for each operation: how many cases, how many of them lost, the worst of all."""
    lines = []
    for operation, group in by_operation(found).items():
        ratios = [case.ratio for case in group]
        worst = max(group, key=lambda case: case.ratio)
        named = f"`{worst.name}`, {compact(worst.record['shape'])}, {worst.arithmetic}"
        lost = len(losses(group))
        lines.append([
            f"[{operation}](#{anchor(operation)})" if linked else operation, len(group),
            lost, percent(lost / len(group)), f"{statistics.median(ratios):.2f}",
            f"{min(ratios):.2f}", f"{max(ratios):.2f}", named,
        ])  # fmt: skip
    return table(_OVERVIEW, lines)


def anchor(heading):
    """The link to a heading, as a page on GitHub has it."""
    kept = "".join(c for c in heading.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def section(operation, group):
    """What is recorded of one operation, under its heading, with its losses."""
    lost, worst = losses(group), max(group, key=lambda case: case.ratio)
    said = f"Ours is slower than the fastest peer in {len(lost)} of {len(group)} cases"
    if lost:
        said += f"; the worst takes {worst.ratio:.2f} times as long"
    peers = sorted({row["label"].partition(",")[0] for case in group
                    for row in case.record["rows"] if row["kind"] == "peer"})  # fmt: skip
    ours = ", ".join(dict.fromkeys(f"`{case.ours['label']}`" for case in group))
    text = [
        f"## {operation}",
        f"{said}. Ours: {ours}. Peers: {', '.join(peers)}. "
        f"Measured {measured([case.record for case in group])}.",
    ]
    text.append(table(_GROUPS, [_line(each) for each in _split(group)]))
    if lost:
        lines = [
            [f"`{case.name}`", case.arithmetic, compact(case.record["shape"]),
             _time(case.ours), _time(case.peer), case.peer["label"], f"{case.ratio:.2f}"]
            for case in lost
        ]  # fmt: skip
        text.append(folded(f"Slower cases: {len(lost)}", table(_LOST, lines)))
    if absent := _left_out(group):
        text.append(absent)
    return "\n\n".join(text)


def _split(group):
    """The cases of one name and one type together."""
    parts = {}
    for case in group:
        parts.setdefault((case.name, case.arithmetic), []).append(case)
    return parts.values()


def _line(group):
    largest, ratios = max(group, key=lambda case: case.work), [case.ratio for case in group]
    between = f"{min(ratios):.2f}"
    if len(ratios) > 1:
        between += f"\N{NO-BREAK SPACE}–\N{NO-BREAK SPACE}{max(ratios):.2f}"
    ours, peer = largest.ours, largest.peer
    return [
        f"`{largest.name}`", largest.arithmetic, f"{len(losses(group))} of {len(group)}",
        between, compact(largest.record["shape"]), _time(ours), _time(peer), peer["label"],
        _rate(ours),
    ]  # fmt: skip


def _time(row):
    time = row["microseconds"]
    return f"{time:,.0f}" if time >= 1000 else f"{time:.1f}"


def _rate(row):
    """What a row reaches, in the unit that it is measured in; in brackets, of the limit."""
    if "percent_of_copy" in row:
        return f"{row['gbps']:,.0f} GB/s ({percent(row['percent_of_copy'] / 100)})"
    if "tflops" in row:
        return f"{row['tflops']:.3g} TFLOP/s"
    if "images_per_second" in row:
        return f"{row['images_per_second']:,.0f} images/s"
    return ""


def _left_out(group):
    """Which rungs were not timed everywhere, and why."""
    reasons = {}
    for case in group:
        for label, why in (case.record.get("left_out") or {}).items():
            reasons.setdefault(label, []).append(why)
    if not reasons:
        return ""
    said = [f"`{label}` in {len(whys)} ({whys[0]})" for label, whys in reasons.items()]
    return f"Of the rungs, not timed in all cases: {'; '.join(said)}."
