"""Pictures of parts and wholes: what a network's time, bytes or operations are made of."""

from matplotlib.patches import Rectangle

from .picture import INK, OURS, PAPER, Picture, caption, ink_on, require_dict

_SHADES = ("#e3e7ec", "#c3cbd5", "#a3aebb", "#f0f2f5", "#d4dae2", "#b4bdc9")
_HATCHES = ("", "..", "\\\\", "--", "xx")


def shares(wholes, *, highlight="", xlabel="share (%)", title="", device="", date="", alt=None):
    """Draw what each whole is made of: a bar of 100 % for each, cut into its parts.

    Args:
        wholes: dict from a label to a dict from a part to its amount, in any unit; none negative.
        highlight: the part that the picture is about, drawn dark; its share is written in bold.
        xlabel: what the shares are of.
        title, device, date: heading, and where and when it was measured.
        alt: alternative text; by default every share.

    Raises:
        ValueError: nothing to draw, a negative amount, or a whole of nothing.
    """
    require_dict("wholes", wholes)
    if not wholes or not all(wholes.values()):
        raise ValueError("shares needs at least one whole, and a part in each")
    percent = {label: _percent(label, parts) for label, parts in wholes.items()}
    names = list(dict.fromkeys(name for parts in percent.values() for name in parts))
    others = [name for name in names if name != highlight]
    shades = {name: _SHADES[number % len(_SHADES)] for number, name in enumerate(others)}
    hatches = {name: _HATCHES[number % len(_HATCHES)] for number, name in enumerate(others)}
    styles = {name: {"facecolor": shades[name], "hatch": hatches[name]} for name in others}
    styles[highlight] = {"facecolor": OURS}
    alt = alt or f"{xlabel}: " + "; ".join(
        f"{label}: " + ", ".join(f"{name} {value:.1f}" for name, value in parts.items())
        for label, parts in percent.items()
    )
    figure = Picture(0.62 * len(percent) + 1.3 + 0.25 * -(-len(names) // 3), alt)
    axes = figure.subplots()
    for place, parts in enumerate(percent.values()):
        left = 0.0
        for name, value in parts.items():
            axes.barh(place, value, left=left, height=0.6, edgecolor=INK, **styles[name])
            if value >= 4:
                weight = "bold" if name == highlight else "normal"
                shade = styles[name]["facecolor"]
                box = {"facecolor": shade, "edgecolor": "none", "pad": 1}
                axes.text(left + value / 2, place, f"{value:.0f}", ha="center", va="center",
                          color=ink_on(shade), fontweight=weight, bbox=box)
            left += value
        if 0 < parts.get(highlight, 0) < 4:  # too thin to write into
            axes.text(100.8, place, f"{highlight} {parts[highlight]:.1f}", va="center",
                      fontsize=9.5, fontweight="bold", clip_on=False)
    axes.set_yticks(range(len(percent)), list(percent))
    axes.set(ylim=(len(percent) - 0.5, -0.5), xlim=(0, 100), xlabel=xlabel)
    axes.set_title(title, loc="left", fontweight="bold")
    marks = [Rectangle((0, 0), 1, 1, edgecolor=INK, **styles[name]) for name in names]
    figure.legend(marks, names, loc="outside lower center", ncols=3, frameon=False,
                  facecolor=PAPER)
    caption(axes, device, date)
    return figure


def _percent(label, parts):
    total = sum(parts.values())
    if min(parts.values()) < 0 or not total > 0:
        raise ValueError(f"the parts of {label!r} must be 0 or more and not all 0, not {parts}")
    return {name: 100 * value / total for name, value in parts.items()}
