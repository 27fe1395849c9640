"""A picture of a tape: who was made from whom, and the way back."""

from matplotlib.patches import FancyArrowPatch, FancyBboxPatch

from .picture import INK, OURS, PAPER, PEER, Picture

LEAF, RESULT, QUIET = PEER, "#cfe3f5", "#eeeeee"
_MOST = 24
_WIDTH, _HEIGHT, _COLUMN, _ROW = 1.25, 0.74, 1.85, 1.12  # of a box, and from box to box


def tape(tensors, *, order=(), gradients=None, quiet=(), title="", alt=None):
    """Draw a tape from left to right, one box for each tensor, one arrow for each use.

    Args:
        tensors: list of `(name, function, inputs)`, inputs before results: what a tensor is called,
            what the function that made it is called ("" for a leaf), and the names it was made
            from.
        order: names in the order of the way back; each of these boxes is numbered.
        gradients: dict from a name to its gradient, as text.
        quiet: names of tensors that need no gradient; drawn grey, with a broken outline.
        title: heading of the picture.
        alt: alternative text; by default the tape in words.

    Raises:
        ValueError: no tensors, too many, a name that is used twice or not known.
    """
    tensors = [(name, function, tuple(inputs)) for name, function, inputs in tensors]
    gradients = dict(gradients or {})
    if not 0 < len(tensors) <= _MOST:
        raise ValueError(f"{len(tensors)} tensors cannot be drawn: 1 to {_MOST}")
    known = set()
    for name, _, inputs in tensors:
        if name in known:
            raise ValueError(f"two tensors are called {name!r}")
        if missing := [each for each in inputs if each not in known]:
            raise ValueError(f"{name!r} is made from {missing[0]!r}, which does not come before it")
        known.add(name)
    if strangers := [each for each in (*order, *gradients, *quiet) if each not in known]:
        raise ValueError(f"no tensor is called {strangers[0]!r}")

    places = _places(tensors)
    columns = 1 + max(column for column, _ in places.values())
    rows = [row for _, row in places.values()]
    span = max(rows) - min(rows)
    figure = Picture(_ROW * span + _HEIGHT + 0.75 + 0.3 * bool(order), alt or _in_words(
        tensors, order, gradients
    ))
    axes = figure.subplots()
    for name, _, inputs in tensors:
        for place, each in enumerate(inputs):
            again = inputs[:place].count(each)
            _arrow(axes, places, each, name, again, inputs.count(each) > 1)
    for name, function, _ in tensors:
        number = list(order).index(name) + 1 if name in order else 0
        _box(axes, places[name], name, function, gradients.get(name, ""), number, name in quiet)
    # Short tapes are not blown up: a box is as large as in a long one.
    middle, half = _COLUMN * (columns - 1) / 2, max(4.3, (_COLUMN * (columns - 1) + _WIDTH) / 2)
    axes.set(xlim=(middle - half - 0.2, middle + half + 0.2),
             ylim=(_ROW * max(rows) + _HEIGHT / 2 + 0.15, _ROW * min(rows) - _HEIGHT / 2 - 0.22))
    axes.set_aspect("equal")
    axes.set_axis_off()
    axes.set_title(title, loc="left", fontweight="bold")
    if order:
        figure.supxlabel("arrows: what was made from what; numbers: the order of the way back",
                         fontsize=9.5, color="0.25")
    return figure


def _places(tensors):
    """{name: (column, row)}: results right of their inputs, leaves just left of their first use.

    Under `(start, end, column)` it holds where an arrow that passes a column goes through.
    """
    columns = {}
    for name, _, inputs in tensors:
        columns[name] = 1 + max((columns[each] for each in inputs), default=-1)
    for name, _, inputs in tensors:
        users = [columns[other] for other, _, of in tensors if name in of]
        if not inputs and users:
            columns[name] = min(users) - 1
    before = {name: list(dict.fromkeys(inputs)) for name, _, inputs in tensors}
    by_column = {}
    for name in before:
        by_column.setdefault(columns[name], []).append(name)
    for end, inputs in list(before.items()):
        for start in inputs:
            last = start
            for column in range(columns[start] + 1, columns[end]):
                through = start, end, column
                by_column[column].append(through)
                before[through], last = [last], through
            before[end] = [last if each == start else each for each in before[end]]
    places = {}
    for column in sorted(by_column):
        _place_column(column, by_column[column], before, places)
    return places


def _place_column(column, items, before, places):
    """Put the items of a column near the middle of what they come from, and apart."""
    wished = {}
    for place, item in enumerate(items):
        rows = [places[each][1] for each in before[item] if each in places]
        wished[item] = sum(rows) / len(rows) if rows else place - (len(items) - 1) / 2
    # An arrow that passes by goes above a box that wants the same row.
    items = sorted(items, key=lambda item: (wished[item], isinstance(item, str)))
    rows = []
    for item, above in zip(items, [None, *items], strict=False):
        gap = 1.0 if isinstance(item, str) and isinstance(above, str) else 0.68
        rows.append(max(wished[item], rows[-1] + gap) if rows else wished[item])
    shift = (sum(wished.values()) - sum(rows)) / len(rows)
    for item, row in zip(items, rows, strict=True):
        places[item] = (column, row + shift)


def _arrow(axes, places, start, end, again, several):
    (x, y), (to_x, to_y) = ((_COLUMN * c, _ROW * r) for c, r in (places[start], places[end]))
    x += _WIDTH / 2
    for column in range(places[start][0] + 1, places[end][0]):
        middle, row = (_COLUMN * column, _ROW * places[start, end, column][1])
        axes.plot([x, middle - _WIDTH / 2, middle + _WIDTH / 2], [y, row, row], color="0.35",
                  linewidth=1.3, solid_joinstyle="round", zorder=0.8)
        x, y = middle + _WIDTH / 2, row
    bend = (0.22 if again else -0.22) if several else 0.0
    axes.add_patch(FancyArrowPatch(
        (x, y), (to_x - _WIDTH / 2, to_y), arrowstyle="-|>", mutation_scale=13, color="0.35",
        linewidth=1.3, shrinkA=0, shrinkB=1, connectionstyle=f"arc3,rad={bend}",
    ))


def _box(axes, place, name, function, gradient, number, quiet):
    x, y = _COLUMN * place[0], _ROW * place[1]
    colour = QUIET if quiet else RESULT if function else LEAF
    axes.add_patch(FancyBboxPatch(
        (x - _WIDTH / 2 + 0.06, y - _HEIGHT / 2 + 0.06), _WIDTH - 0.12, _HEIGHT - 0.12,
        boxstyle="round,pad=0.06" if function else "square,pad=0.06", facecolor=colour,
        edgecolor=INK, linewidth=1.1, linestyle="--" if quiet else "-",
    ))
    lines = [f"{name} = {function}" if function else name] + [gradient] * bool(gradient)
    for line, text in enumerate(lines):
        axes.text(x, y + 0.26 * (line - (len(lines) - 1) / 2), text, ha="center", va="center",
                  fontsize=9.5, color=INK if line == 0 else OURS,
                  fontweight="bold" if line == 0 else "normal")
    if number:
        axes.text(x - _WIDTH / 2 + 0.02, y - _HEIGHT / 2 + 0.02, str(number), ha="center",
                  va="center", fontsize=9, fontweight="bold", color=PAPER,
                  bbox={"boxstyle": "circle,pad=0.22", "facecolor": OURS, "edgecolor": PAPER})


def _in_words(tensors, order, gradients):
    made = "; ".join(
        f"{name} = {function} of {', '.join(inputs)}" if function else f"{name} is a leaf"
        for name, function, inputs in tensors
    )
    back = f". The way back: {', '.join(order)}" if order else ""
    found = f". Gradients: {', '.join(f'{n} {g}' for n, g in gradients.items())}"
    return f"A tape. {made}{back}{found if gradients else ''}."
