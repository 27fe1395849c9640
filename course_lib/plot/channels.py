"""Pictures of channels that are weighed: gates, what is still in a cache, blocks that wait."""

import numpy as np
from matplotlib.patches import Rectangle

from .picture import INK, OURS, PAPER, PEER, Picture, ink_on, require_dict

#: What an access is: colour, hatch and the letter in its box. Told apart by all three.
ACCESSES = {
    "first": ("#cfe3f5", "", "r", "read for the first time"),
    "again": (OURS, "", "L2", "read again, from L2"),
    "late": ("#b3261e", "xxx", "R", "read again, from memory"),
    "write": (PEER, "///", "w", "written"),
}
#: What a block does.
WORK = {
    "pool": {"facecolor": "#cfe3f5"},
    "scale": {"facecolor": OURS},
    "wait": {"facecolor": PAPER, "hatch": "xxx"},
}
MOST_STEPS = 40
HATCHES = ("", "///", "...", "xx")


def channel_gates(gates, names, *, ylabel="gate (0 shuts a channel, 1 leaves it)", title="",
                  alt=None):
    """Draw a bar for each channel's gate, for several pictures side by side.

    Args:
        gates: dict from a picture's name to numbers `(n_channels,)`; four pictures at most.
        names: the channels' names.
        ylabel: what a bar means.
        title: heading of the picture.
        alt: alternative text; by default every number.

    Raises:
        ValueError: no pictures, or too many, or not a number for each channel.
    """
    require_dict("gates", gates)
    gates = {name: np.asarray(own, dtype=np.float64) for name, own in gates.items()}
    if not 0 < len(gates) <= len(HATCHES):
        raise ValueError(f"channel_gates needs 1 to {len(HATCHES)} pictures, not {len(gates)}")
    for name, own in gates.items():
        if own.shape != (len(names),):
            raise ValueError(f"{name!r} has gates {own.shape} for {len(names)} channels")
    alt = alt or f"{ylabel}: " + "; ".join(
        f"{name}: "
        + ", ".join(f"{channel} {gate:.2f}" for channel, gate in zip(names, own, strict=True))
        for name, own in gates.items()
    )
    figure = Picture(3.2, alt)
    axes = figure.subplots()
    width = 0.8 / len(gates)
    fills = (OURS, PEER, "#cfe3f5", PAPER)
    for place, (name, own) in enumerate(gates.items()):
        left = np.arange(len(names)) - 0.4 + width * place
        axes.bar(left, own, width, align="edge", label=name, facecolor=fills[place],
                 hatch=HATCHES[place], edgecolor=INK)
        for x, gate in zip(left, own, strict=True):
            axes.text(x + width / 2, gate + 0.02, f"{gate:.2f}", ha="center", va="bottom",
                      fontsize=9)
    axes.set_xticks(range(len(names)), names)
    axes.set(ylim=(0, 1.15 * max(1.0, *(own.max() for own in gates.values()))), ylabel=ylabel)
    axes.set_title(title, loc="left", fontweight="bold")
    figure.legend(loc="outside lower center", ncols=len(gates), frameon=False)
    return figure


def cache_walk(walks, *, title="", alt=None):
    """Draw in which order pictures are read and written, and what the second reading finds in L2.

    Args:
        walks: dict from a heading to a list of `(picture, access)` in the order of time: the number
            of a picture, and one of "first" (read for the first time), "again" (read again, from
            L2), "late" (read again, from memory) and "write".
        title: heading of the whole.
        alt: alternative text; by default how much each walk takes from memory.

    Raises:
        ValueError: no walks, an empty one, one too long to be drawn, or an unknown access.
    """
    require_dict("walks", walks)
    walks = {heading: list(steps) for heading, steps in walks.items()}
    if not walks or not all(walks.values()):
        raise ValueError("cache_walk needs at least one walk, and a step in each")
    longest = max(len(steps) for steps in walks.values())
    if longest > MOST_STEPS:
        raise ValueError(f"{longest} steps are too many to draw: {MOST_STEPS} at most")
    if unknown := {kind for steps in walks.values() for _, kind in steps} - set(ACCESSES):
        raise ValueError(f"unknown access {min(unknown)!r}; there are {', '.join(ACCESSES)}")
    moved = {heading: sum(kind != "again" for _, kind in steps) for heading, steps in walks.items()}
    alt = alt or "Order of reading and writing. " + "; ".join(
        f"{heading}: {moved[heading]} pictures moved, {_count(steps, 'again')} second readings "
        f"from L2 and {_count(steps, 'late')} from memory"
        for heading, steps in walks.items()
    )
    n_pictures = 1 + max(picture for steps in walks.values() for picture, _ in steps)
    figure = Picture((0.24 * n_pictures + 0.85) * len(walks) + 0.8, alt)
    panels = figure.subplots(len(walks), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (heading, steps) in zip(panels, walks.items(), strict=True):
        for time, (picture, kind) in enumerate(steps):
            colour, hatch, letter, _ = ACCESSES[kind]
            axes.add_patch(Rectangle((time, picture - 0.5), 1, 1, facecolor=colour, hatch=hatch,
                                     edgecolor=INK, linewidth=0.8))
            box = {"facecolor": colour, "edgecolor": "none", "pad": 0.8}
            axes.text(time + 0.5, picture, letter, ha="center", va="center", fontsize=8,
                      color=ink_on(colour), bbox=box)
        axes.set(xlim=(0, longest), ylim=(n_pictures - 0.5, -0.5), yticks=range(n_pictures),
                 ylabel="picture")
        axes.tick_params(labelsize=8)
        axes.set_title(f"{heading}: {moved[heading]} pictures moved", loc="left", fontsize=11)
    panels[-1].set_xlabel("time (steps; in each, one picture is read or written)")
    seen = [kind for kind in ACCESSES if any(k == kind for s in walks.values() for _, k in s)]
    marks = [Rectangle((0, 0), 1, 1, facecolor=ACCESSES[kind][0], hatch=ACCESSES[kind][1],
                       edgecolor=INK) for kind in seen]
    figure.legend(marks, [f"{ACCESSES[kind][2]}: {ACCESSES[kind][3]}" for kind in seen],
                  loc="outside lower center", ncols=len(seen), frameon=False)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def work_items(schedules, *, unit="steps", title="", alt=None):
    """Draw what blocks do and when they wait, a line for each block.

    Args:
        schedules: dict from a heading to a list of `(block, begin, end, kind, label)`: the block's
            number, two times in `unit`, one of "pool", "scale" and "wait", and what stands in the
            box.
        unit: unit of the times.
        title: heading of the whole.
        alt: alternative text; by default how long all takes, and how much of it is waiting.

    Raises:
        ValueError: no schedules, an empty one, an unknown kind, or a span that ends too early.
    """
    require_dict("schedules", schedules)
    schedules = {heading: list(spans) for heading, spans in schedules.items()}
    if not schedules or not all(schedules.values()):
        raise ValueError("work_items needs at least one schedule, and a span in each")
    for block, begin, end, kind, _ in sum(schedules.values(), []):
        if kind not in WORK or end < begin:
            raise ValueError(f"block {block} cannot {kind!r} from {begin} to {end}")
    ends = {heading: max(span[2] for span in spans) for heading, spans in schedules.items()}
    waited = {
        heading: sum(end - begin for _, begin, end, kind, _ in spans if kind == "wait")
        for heading, spans in schedules.items()
    }
    said = {
        heading: f"{heading}: done after {ends[heading]:.1f} {unit}, {waited[heading]:.1f} waited"
        for heading in schedules
    }
    alt = alt or "What blocks do. " + "; ".join(said.values())
    n_blocks = 1 + max(span[0] for spans in schedules.values() for span in spans)
    figure = Picture((0.45 * n_blocks + 0.75) * len(schedules) + 0.9, alt)
    panels = figure.subplots(len(schedules), 1, sharex=True, squeeze=False)[:, 0]
    for axes, (heading, spans) in zip(panels, schedules.items(), strict=True):
        for block, begin, end, kind, label in spans:
            axes.barh(block, end - begin, left=begin, height=0.7, edgecolor=INK, **WORK[kind])
            axes.text((begin + end) / 2, block, label, ha="center", va="center", fontsize=9,
                      color=ink_on(WORK[kind]["facecolor"]))
        axes.set(xlim=(0, 1.02 * max(ends.values())), ylim=(n_blocks - 0.5, -0.5))
        axes.set_yticks(range(n_blocks), [f"block {block}" for block in range(n_blocks)])
        axes.set_title(said[heading], loc="left", fontsize=11)
    panels[-1].set_xlabel(f"time ({unit})")
    marks = [Rectangle((0, 0), 1, 1, edgecolor=INK, **style) for style in WORK.values()]
    figure.legend(marks, list(WORK), loc="outside lower center", ncols=len(WORK), frameon=False)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def _count(steps, kind):
    return sum(each == kind for _, each in steps)
