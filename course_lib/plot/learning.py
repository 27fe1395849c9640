"""How a network learnt, epoch by epoch: loss and accuracy, and how it weighs its pathways."""

from matplotlib.ticker import MaxNLocator

from .basic import LINES
from .picture import Picture, caption

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


def integration_weights(history, *, title="", device="", date="", alt=None):
    """Draw how a network weighed its two pathways, epoch by epoch, one panel for each point.

    Args:
        history: a list of one dict for each epoch, with `epoch` and `integration_weights`: for each
            point a dict from what is weighted to its weight, as
            ``ContinuousIntegrationModel.get_integration_weights()`` returns it.
        title: heading of the whole.
        device, date: where and when this was recorded, for the line underneath.
        alt: alternative text; by default the first and last weights.

    Raises:
        ValueError: no epoch, one without weights, or with other points or names than the first.
    """
    points = _points(history)
    epochs = [entry["epoch"] for entry in history]
    names = list(points[next(iter(points))])
    alt = alt or f"Weights from epoch {epochs[0]} to {epochs[-1]}: " + "; ".join(
        f"{point}: " + ", ".join(f"{n} from {w[0]:.2f} to {w[-1]:.2f}" for n, w in series.items())
        for point, series in points.items()
    )
    columns = len(points) if len(points) < 4 else 2 if len(points) == 4 else 3
    rows = -(-len(points) // columns)
    figure = Picture(2.6 * rows + 0.7, alt)
    grid = figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=True)
    highest = max(max(weights) for series in points.values() for weights in series.values())
    for axes, (point, series) in zip(grid.flat, points.items(), strict=False):
        for i, (name, weights) in enumerate(series.items()):
            # Weights begin alike: markers of three sizes do not hide each other.
            form = LINES[i] | {"markersize": 8 - 1.5 * i, "markevery": max(1, len(epochs) // 8)}
            axes.plot(epochs, weights, label=name, linewidth=2, **form)
        axes.set_title(point, loc="left", fontsize=11)
        axes.set(xlabel="epoch", ylabel="weight (share of the sum)")
        axes.label_outer()
        if list(points).index(point) + columns >= len(points):  # nothing below
            axes.set_xlabel("epoch")
            axes.tick_params(labelbottom=True)
            last = axes
        axes.set_ylim(0, min(1, 1.15 * highest) + 0.02)
        axes.set_xlim(epochs[0] - 0.5, epochs[-1] + 0.5)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.25)
    for axes in grid.flat[len(points):]:
        axes.set_axis_off()
    caption(last, device, date)
    handles, _ = grid.flat[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=len(names), frameon=False)
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def _points(history):
    """{point: {name: [weight of each epoch]}}."""
    if not history:
        raise ValueError("integration_weights needs at least one epoch")
    for entry in history:
        if not entry.get("integration_weights"):
            raise ValueError(f"epoch {entry.get('epoch')} has no integration_weights")
    first = {point: list(of) for point, of in history[0]["integration_weights"].items()}
    for entry in history:
        found = {point: list(of) for point, of in entry["integration_weights"].items()}
        if found != first:
            raise ValueError(f"epoch {entry['epoch']} has weights of {found}, the first {first}")
    if any(len(of) > len(LINES) or not of for of in first.values()):
        raise ValueError(f"1 to {len(LINES)} weights of a point can be told apart, not {first}")
    return {
        point: {name: [e["integration_weights"][point][name] for e in history] for name in of}
        for point, of in first.items()
    }
