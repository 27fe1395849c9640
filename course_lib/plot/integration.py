"""What a network that sees on two pathways weighs, epoch by epoch."""

from .networks import STYLES
from .picture import Picture

PREFIX = "integration_"


def integration_weights(history, *, title="", alt=None):
    """Draw the weights of each point of integration beside each other, over the epochs.

    Args:
        history: a list of one dict for each epoch, with `epoch` and
            `integration_<point>_<what is weighted>`, which sum to 1 at each point.
        title: heading of the whole.
        alt: alternative text; by default the last weights.

    Raises:
        ValueError: no epoch, or none of these weights.
    """
    names = [name for name in (history[0] if history else ()) if name.startswith(PREFIX)]
    if not names:
        raise ValueError("integration_weights needs an epoch with integration weights")
    points = {}
    for name in names:
        point, _, part = name.removeprefix(PREFIX).rpartition("_")
        points.setdefault(point, {})[part] = [entry[name] for entry in history]
    alt = alt or f"Weights after epoch {history[-1]['epoch']}: " + "; ".join(
        f"{point}: " + ", ".join(f"{part} {values[-1]:.2f}" for part, values in parts.items())
        for point, parts in points.items()
    )
    figure = Picture(3.2, alt)
    panels = figure.subplots(1, len(points), squeeze=False, sharey=True)[0]
    epochs = [entry["epoch"] for entry in history]
    for axes, (point, parts) in zip(panels, points.items(), strict=True):
        for (part, values), style in zip(parts.items(), STYLES, strict=False):
            axes.plot(epochs, values, label=part, linewidth=1.8, **style)
        axes.set(xlabel="epoch", ylim=(0, 1))
        axes.set_title(point, fontsize=11)
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("weight (sum 1)")
    panels[0].legend(frameon=False)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure
