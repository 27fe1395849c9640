"""How ours fares at drawn shapes, beside PyTorch eager: a table and a sentence.

Speed is PyTorch's time ÷ ours: at 1 both are equal, at 0.5 ours takes twice as long.
"""

import statistics

from .cases import measured
from .markdown import percent, table

SHORT = 10  # µs of PyTorch's time, below which what a launch costs decides
#: A difference of so many µs is not held against ours where PyTorch takes less than the other.
FORGIVEN, BRIEF = 3, 5
TWICE = 0.5
_COLUMNS = {
    "Pass": "---", "Type": "---", "PyTorch takes": "---", "Timed": "--:", "Speed, mean": "--:",
    "Slower": "--:", "Twice as slow": "--:", "Worst": "--:", "Its shape": "---",
    "Beside torch.compile": "--:",
}  # fmt: skip


def drawn(records):
    """Those of `records` that are of drawn shapes."""
    return [record for record in records if record["name"].startswith("drawn.")]


def timed(record):
    """The cases of a record that were timed."""
    return [case for case in record["cases"] if "ours" in case]


def failed(records):
    """[(record, case)] of what was wrong, or refused."""
    return [(record, case) for record in records for case in record["cases"] if "failed" in case]


def speed(case, peer="eager"):
    """The peer's time ÷ ours."""
    return case[peer] / case["ours"]


def is_twice_as_slow(case):
    """Whether ours takes over twice as long, and not by little of very short times."""
    brief = case["eager"] < BRIEF and case["ours"] - case["eager"] <= FORGIVEN
    return speed(case) < TWICE and not brief


def drawn_table(records):
    """A line for each pass, type and length of PyTorch's time. "" where nothing was timed."""
    lines = []
    for record in drawn(records):
        name = record["name"].removeprefix("drawn.").removesuffix(".tf32")
        kind = "TF32" if record["tf32"] else record["dtype"]
        for words, is_in in ((f"< {SHORT} µs", True), (f"≥ {SHORT} µs", False)):
            cases = [case for case in timed(record) if (case["eager"] < SHORT) == is_in]
            if cases:
                lines.append([f"`{name}`", kind, words, *_line(cases)])
    return table(_COLUMNS, lines) if lines else ""


def _line(cases):
    worst = min(cases, key=speed)
    compiled = [speed(case, "compiled") for case in cases if case.get("compiled")]
    layout = "" if worst["layout"] == "contiguous" else f" ({worst['layout']})"
    return [
        len(cases), f"{statistics.geometric_mean(map(speed, cases)):.2f}",
        _share(speed(case) < 1 for case in cases), _share(map(is_twice_as_slow, cases)),
        f"{speed(worst):.2f}", worst["label"] + layout,
        f"{statistics.geometric_mean(compiled):.2f} ({len(compiled)})" if compiled else "",
    ]  # fmt: skip


def _share(flags):
    return percent(statistics.mean(map(bool, flags)))


def drawn_sentence(records):
    """All of them in three sentences. "" where nothing was timed."""
    found = drawn(records)
    every = [(record, case) for record in found for case in timed(record)]
    if not every:
        return ""
    cases = [case for _, case in every]
    seeds = sorted({record["seed"] for record in found})
    mean = statistics.geometric_mean(map(speed, cases))
    record, worst = min(every, key=lambda pair: speed(pair[1]))
    name = record["name"].removeprefix("drawn.").removesuffix(".tf32")
    return (
        f"At shapes that nobody chose ({len(cases):,} passes of drawn problems, seed "
        f"{' and '.join(map(str, seeds))}; {measured(found)}), ours runs at {mean:.2f} times "
        f"the speed of PyTorch eager in the geometric mean. It is slower in "
        f"{_share(speed(case) < 1 for case in cases)} of them, and takes over twice as long in "
        f"{percent(statistics.mean(map(is_twice_as_slow, cases)), 1)}. The worst: `{name}` of "
        f"{worst['label']} at {speed(worst):.2f} times PyTorch's speed."
    )


def drawn_report(records):
    """The sentence, the table, and what failed."""
    lines = [f"- `{record['name']}` {record['dtype']} of {case['label']}: {case['failed']}"
             for record, case in failed(drawn(records))]  # fmt: skip
    parts = drawn_sentence(records), drawn_table(records)
    if lines:
        parts += ("Not timed:\n\n" + "\n".join(lines),)
    return "\n\n".join(filter(None, parts))
