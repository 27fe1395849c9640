"""How a network learnt: loss and accuracy, epoch by epoch."""

from matplotlib.ticker import MaxNLocator

from .basic import LINES
from .picture import Picture

_PANELS = (("loss", "loss (nats)", 1), ("accuracy", "accuracy (% of images)", 100))


def learning_curves(history, *, title="", alt=None):
    """Draw loss and accuracy of training and validation beside each other.

    Args:
        history: a list of one dict for each epoch, with `epoch`, `loss`, `accuracy` and perhaps
            `validation_loss` and `validation_accuracy`; accuracies from 0 to 1.
        title: heading of the whole.
        alt: alternative text; by default the first and last numbers.

    Raises:
        ValueError: no epoch.
    """
    if not history:
        raise ValueError("learning_curves needs at least one epoch")
    epochs = [entry["epoch"] for entry in history]
    series = {
        name: [entry[name] for entry in history]
        for quantity, _, _ in _PANELS
        for name in (quantity, f"validation_{quantity}")
        if name in history[0]
    }
    alt = alt or f"From epoch {epochs[0]} to {epochs[-1]}: " + "; ".join(
        f"{name.replace('_', ' ')} from {values[0]:.3g} to {values[-1]:.3g}"
        for name, values in series.items()
    )
    figure = Picture(3.6, alt)
    for axes, (quantity, label, factor) in zip(figure.subplots(1, 2), _PANELS, strict=True):
        names = {"training": quantity, "validation": f"validation_{quantity}"}
        for (words, name), line in zip(names.items(), LINES, strict=False):
            if name in series:
                values = [factor * value for value in series[name]]
                every = max(1, len(epochs) // 12)
                axes.plot(epochs, values, label=words, markevery=every, linewidth=2, **line)
        axes.set(xlabel="epoch", ylabel=label)
        axes.set_ylim(0, 103 if quantity == "accuracy" else 1.05 * max(axes.dataLim.ymax, 0.1))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure
