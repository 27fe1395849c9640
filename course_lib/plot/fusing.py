"""Pictures of fusing: what a chain of kernels moves, and what it makes of the same work."""

from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from .picture import INK, LIMIT, PAPER, PEER, Picture, require_dict

READ, WRITE = "#cfe3f5", PEER


def arrays_moved(chains, *, title="", alt=None):
    """Draw what chains of kernels read and write, in sizes of the array, one kernel after another.

    Args:
        chains: dict from a label to a list of kernels `(name, reads, writes)`: how many arrays each
            of them reads and writes; fractions are allowed. The last chain is the one to compare
            with: its total is drawn as a line through all.
        title: heading of the picture.
        alt: alternative text; by default every number.

    Raises:
        ValueError: no chains, an empty one, or a kernel that moves a negative number of arrays.
    """
    require_dict("chains", chains)
    if not chains or not all(chains.values()):
        raise ValueError("arrays_moved needs at least one chain, and a kernel in each")
    moved = [each for kernels in chains.values() for _, *both in kernels for each in both]
    if min(moved) < 0 or not max(moved) > 0:
        raise ValueError(f"kernels move some arrays and none less than 0, not {moved}")
    totals = {
        label: sum(reads + writes for _, reads, writes in kernels)
        for label, kernels in chains.items()
    }
    alt = alt or "Arrays moved: " + "; ".join(
        f"{label} {totals[label]:.3g}, that is " + ", ".join(
            f"{name} reads {reads:.3g} and writes {writes:.3g}" for name, reads, writes in kernels
        )
        for label, kernels in chains.items()
    )
    figure = Picture(0.95 * len(chains) + 1.5, alt)
    axes = figure.subplots()
    for place, (label, kernels) in enumerate(chains.items()):
        left = 0.0
        for name, reads, writes in kernels:
            for width, style in ((reads, {"facecolor": READ}),
                                 (writes, {"facecolor": WRITE, "hatch": "///"})):
                if width:
                    axes.barh(place, width, left=left, height=0.42, edgecolor=INK, **style)
                left += width
            start = left - reads - writes
            axes.text((start + left) / 2, place - 0.36, name, ha="center", va="center",
                      fontsize=9.5, bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1})
            axes.plot([start + 0.03, left - 0.03], [place - 0.25] * 2, color=INK, linewidth=1)
        axes.text(left + 0.06, place, f"{totals[label]:.3g}", va="center", fontweight="bold",
                  bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 1})
    last = list(totals)[-1]
    axes.axvline(totals[last], color=LIMIT, linestyle="--", linewidth=2, zorder=0.5)
    axes.set_yticks(range(len(chains)), list(chains))
    axes.set(ylim=(len(chains) - 0.6, -0.7), xlim=(0, max(totals.values()) * 1.1),
             xlabel="arrays moved (sizes of the array)")
    axes.set_title(title, loc="left", fontweight="bold")
    marks = [Rectangle((0, 0), 1, 1, facecolor=READ, edgecolor=INK),
             Rectangle((0, 0), 1, 1, facecolor=WRITE, edgecolor=INK, hatch="///"),
             Line2D([], [], color=LIMIT, linestyle="--", linewidth=2)]
    figure.legend(marks, ["read", "written", f"{last}: {totals[last]:.3g}"],
                  loc="outside lower center", ncols=3, frameon=False)
    return figure
