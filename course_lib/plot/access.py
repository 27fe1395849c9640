"""Pictures of a trace: which addresses a warp asks for, and which banks its lanes wait for.

Both take a trace (`simulator.trace()`): an object whose `sites` have `source`, `line`, `op`,
`space`, `size`, `itemsize`, `base`, `addresses` `(requests, 32)` in bytes with -1 for a lane that
takes no part, and `warps` `(requests, 2)`, the numbers of block and warp.
"""

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, to_rgb
from matplotlib.patches import Rectangle

from .memory import SENT, UNTOUCHED
from .picture import INK, LIMIT, PAPER, WIDTH_INCHES, Picture, ink_on

SECTOR_BYTES = 32
BANKS = 32
LANES = 32
MOST_SITES = 4
NARROW_INCHES = 5  # below, letters are smaller and fewer
MOST_SECTORS = 40  # in one panel: more make the cells too narrow to see
#: From light to dark, so that lanes keep their order in grey.
LANE_COLOURS = LinearSegmentedColormap.from_list("lanes", ["#d6e8f7", "#6ba3d0", "#0f3557"])
_COUNTS = {1: "one", 2: "two", 3: "three", 4: "four"}


def access_map(trace, site=None, *, steps=None, verdicts=True, title="", alt=None,
               width_inches=WIDTH_INCHES, height_inches=None):
    """Draw which elements of global memory the lanes of a warp touch, request after request.

    Each line is one request: what the 32 lanes of a warp ask for at once. Each outlined box is a
    sector of 32 bytes that is sent for it; the cells inside are elements, coloured by the lane that
    asked for them, pale where nobody did. A store sends nothing back: pale is what shares a sector
    with what was written. Where cells are too narrow for the lanes' numbers, a number stands beside
    the only lane of a sector, and "0–7" across a sector of lanes in their order.

    Args:
        trace: what `simulator.trace()` gave.
        site: one of `trace.sites`, or its source text; by default up to four, most bytes first.
        steps: at most so many requests of each site are drawn; by default 8, or 4 when there are
            more than two sites.
        verdicts: write the code of each site and the sectors per request above its panel; without,
            only the array's name, for a reader who is to count.
        title: heading of the picture.
        alt: alternative text; by default the sectors per request of every site.
        width_inches, height_inches: of the picture; by default as high as its panels need.

    Raises:
        ValueError: the trace has no such site.
    """
    sites = _chosen(trace, site, "global", lambda s: -s.sectors)
    steps = steps or (8 if len(sites) <= 2 else 4)
    panels = [_AccessPanel(s, steps, width_inches, verdicts) for s in sites]
    alt = alt or "Addresses of a warp. " + " ".join(f"{p.heading}: {p.verdict}." for p in panels)
    heights = [0.3 * len(panel.rows) + 0.95 for panel in panels]
    height = height_inches or sum(heights) + 0.5 + (0.3 if title else 0)
    figure = Picture(height, alt, width_inches=width_inches)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, place in zip(panels, axes, strict=True):
        panel.draw(place)
    pale = {panel.site.op for panel in panels if panel.pale}
    words = [word for op, word in (("load", "sent, but nobody asked"),
                                   ("store", "in the same sector, not written")) if op in pale]
    if pale - {"load", "store"}:
        words.append("in the same sector")
    _lane_legend(figure, [(SENT, "; ".join(words))] if words else [], width_inches)
    if title and width_inches > NARROW_INCHES:
        figure.suptitle(title, fontweight="bold")
    elif title:
        figure.suptitle(title, fontweight="bold", fontsize=9.5, x=0.035, ha="left")
    return figure


def bank_map(trace, site=None, *, title="", alt=None):
    """Draw which banks of shared memory the lanes of a warp want, for each site's worst request.

    Each of the 32 banks gives one word of 4 bytes in a turn. The lanes that want different words
    of one bank stand above each other, one turn each: the height is the time. Several lanes that
    want the same word share a cell.

    Args:
        trace: what `simulator.trace()` gave.
        site: one of `trace.sites`, or its source text; by default up to four, worst first.
        title: heading of the picture.
        alt: alternative text; by default the turns of every site.

    Raises:
        ValueError: the trace has no such site.
    """
    sites = _chosen(trace, site, "shared", lambda s: -s.bank_ways)
    panels = [_BankPanel(s) for s in sites]
    alt = alt or "Banks of shared memory. " + " ".join(f"{p.heading}: {p.verdict}." for p in panels)
    cell = 0.24 if sum(panel.turns for panel in panels) <= 24 else 0.15
    heights = [max(cell * panel.turns, 0.3) + 0.85 for panel in panels]
    figure = Picture(sum(heights) + 0.5 + (0.3 if title else 0), alt)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    for panel, place in zip(panels, axes, strict=True):
        panel.draw(place, cell)
    _lane_legend(figure, [])
    if title:
        figure.suptitle(title, fontweight="bold")
    return figure


def _chosen(trace, site, space, order):
    """The sites to draw: the one asked for, or the first few in the order of `order`."""
    there = [s for s in trace.sites if s.space == space and len(s.addresses)]
    if site is not None:
        there = [s for s in there if s is site or s.source == site]
    if not there:
        wanted = f"no site {getattr(site, 'source', site)!r} in {space} memory" if (
            site is not None) else f"no access to {space} memory"
        raise ValueError(f"the trace has {wanted}")
    return sorted(sorted(there, key=order)[:MOST_SITES], key=lambda s: s.line)


def _heading(site):
    return f"{site.source} ({site.op}, line {site.line})"


def _number(value):
    return f"{value:,.0f}" if abs(value - round(value)) < 0.005 else f"{value:,.1f}"


class _AccessPanel:
    """One site of an access map: which requests and which sectors are drawn, and what to say."""

    def __init__(self, site, steps, width_inches, verdicts):
        self.site, self.width_inches, self.verdicts = site, width_inches, verdicts
        self.heading = _heading(site)
        self.pale = False  # known once it is drawn
        self.rows = _first_requests(site, steps)
        self.per_sector = max(1, SECTOR_BYTES // site.itemsize)
        self.sent = [_sectors(site.addresses[row], site.size) for row in self.rows]
        shown = np.unique(np.concatenate(self.sent))
        while len(shown) > MOST_SECTORS and len(self.rows) > 1:
            self.rows, self.sent = self.rows[:-1], self.sent[:-1]
            shown = np.unique(np.concatenate(self.sent))
        # Sectors that do not follow each other in memory are drawn with a gap between them.
        gaps = np.concatenate([[0], np.cumsum(np.diff(shown) > 1)])
        self.left = {int(sector): int(place * self.per_sector + gap * max(1, self.per_sector // 4))
                     for place, (sector, gap) in enumerate(zip(shown, gaps, strict=True))}
        self.width = max(self.left.values()) + self.per_sector
        sectors = site.sectors_per_request
        word = "sector" if sectors == 1 else "sectors"
        moved = _number(site.sectors * SECTOR_BYTES)
        # What memory takes in the end is less than the sectors of all stores: L2 collects them.
        moved = f"written, in sectors of {moved}" if site.op == "store" else (
            f"asked for, {moved} moved")
        self.verdict = f"{_number(sectors)} {word} per request; {_number(site.bytes)} bytes {moved}"

    def draw(self, axes):
        site, canvas = self.site, np.full((len(self.rows), self.width, 3), to_rgb(PAPER))
        side = (self.width_inches - 1.6) / self.width * 72  # points
        numbered = side > 7.5  # all lanes or none
        size = min(7.5, 0.72 * side)
        for line, row in enumerate(self.rows):
            cells = self.cells(site.addresses[row])
            for sector, left in self.left.items():
                canvas[line, left:left + self.per_sector] = to_rgb(UNTOUCHED)
                if sector in self.sent[line]:
                    canvas[line, left:left + self.per_sector] = to_rgb(SENT)
            self.pale |= len(cells) < len(self.sent[line]) * self.per_sector
            if not numbered:
                self.name_lanes(axes, line, cells, side)
            for place, lanes in cells.items():
                colour = LANE_COLOURS(lanes[0] / (LANES - 1))
                canvas[line, place] = colour[:3]
                text = str(lanes[0]) if len(lanes) == 1 else f"{len(lanes)} lanes"
                if numbered if len(lanes) == 1 else side > 4.4 * len(text):
                    axes.text(place, line, text, ha="center", va="center", fontsize=size,
                              color=ink_on(colour[:3]))
            for sector in self.sent[line]:
                axes.add_patch(Rectangle((self.left[int(sector)] - 0.5, line - 0.46),
                                         self.per_sector, 0.92, facecolor="none",
                                         edgecolor=LIMIT, linewidth=1.3, zorder=4))
        axes.imshow(canvas, aspect="auto", interpolation="nearest")
        axes.set_ylim(len(self.rows) - 0.5, -0.5)
        small = 0 if self.width_inches > NARROW_INCHES else 2  # points less
        axes.set_yticks(range(len(self.rows)), self.labels(), fontsize=8 - small / 2)
        ticks = self.ticks()
        axes.set_xticks([left for left, _ in ticks], [text for _, text in ticks],
                        fontsize=8 - small / 2)
        axes.set_xlabel(f"element of {site.array} (its place in memory)", fontsize=9 - small)
        verdict = self.verdict.replace("; ", ";\n") if small else self.verdict
        heading = f"{self.heading}\n{verdict}"
        if not self.verdicts:
            heading = f"{site.op}s of {site.array}"
        axes.set_title(heading, loc="left", fontsize=10 - small)
        for edge in ("top", "right", "left"):
            axes.spines[edge].set_visible(False)

    def name_lanes(self, axes, line, cells, side):
        """Name the lanes of a sector whose cells are too narrow for a number each.

        The only lane of a sector stands in the pale part beside its cell; lanes in their order
        are named by the first and the last, across the sector.
        """
        for sector in self.sent[line]:
            left = self.left[int(sector)]
            inside = [c for c in range(left, left + self.per_sector) if c in cells]
            if not inside or any(len(cells[column]) > 1 for column in inside):
                continue
            lanes = list(dict.fromkeys(cells[column][0] for column in inside))
            first, last = lanes[0], lanes[-1]
            before, after = inside[0] - left, left + self.per_sector - 1 - inside[-1]
            if len(lanes) == 1 and side * max(before, after) > 6:  # points: room for two digits
                start = left if before > after else inside[-1] + 1
                axes.text(start + (max(before, after) - 1) / 2, line, str(first), ha="center",
                          va="center", fontsize=5.5, color=INK)
            step = 1 if last > first else -1
            room = side * self.per_sector > 16  # points, for "24–31": all sectors or none
            if len(lanes) > 1 and room and lanes == list(range(first, last + step, step)):
                middle = LANE_COLOURS(lanes[len(lanes) // 2] / (LANES - 1))[:3]
                options = {"color": ink_on(middle)}
                if len(inside) <= inside[-1] - inside[0]:  # dark and pale cells take turns
                    options = {"color": INK, "bbox": {"facecolor": PAPER, "edgecolor": "none",
                                                      "alpha": 0.85, "pad": 0.8}}
                axes.text((inside[0] + inside[-1]) / 2, line, f"{first}–{last}", ha="center",
                          va="center", fontsize=5.5, **options)

    def cells(self, addresses):
        """Column of the canvas -> lanes that ask for that element."""
        found = {}
        for lane in np.flatnonzero(addresses >= 0).tolist():
            for byte in range(0, self.site.size, self.site.itemsize):
                address = int(addresses[lane]) + byte
                column = self.left[address // SECTOR_BYTES] + (
                    address % SECTOR_BYTES // self.site.itemsize)
                found.setdefault(column, []).append(lane)
        return found

    def labels(self):
        """What each line is: the warp, the step of the warp, or both."""
        warps = [tuple(self.site.warps[row]) for row in self.rows]
        blocks = {block for block, _ in warps}
        names = [f"warp {warp}" if len(blocks) == 1 else f"block {block}, warp {warp}"
                 for block, warp in warps]
        counts = [warps[:place].count(warp) for place, warp in enumerate(warps)]
        if len(set(warps)) == 1 and len(warps) > 1:
            return [f"step {count}" for count in counts]
        if not any(counts):
            return names
        return [f"{name}, step {count}" for name, count in zip(names, counts, strict=True)]

    def ticks(self):
        """(column, index of the element there) for the starts of some sectors."""
        sectors = list(self.left)
        most = 9 if self.width_inches > NARROW_INCHES else 4
        every = max(1, -(-len(sectors) // most))
        found = []
        for sector in sectors[::every]:
            index = (sector * SECTOR_BYTES - self.site.base) // self.site.itemsize
            found.append((self.left[sector], f"{max(index, 0):,}"))
        return found


def _first_requests(site, steps):
    """Numbers of the first requests, those of the first warp before those of the next."""
    order = sorted(range(min(len(site.addresses), 4096)),
                   key=lambda row: (*map(int, site.warps[row]), row))
    return order[:steps]


def _sectors(addresses, size):
    taken = addresses[addresses >= 0]
    return np.unique(np.concatenate([(taken + byte) // SECTOR_BYTES
                                     for byte in {0, *range(SECTOR_BYTES, size, SECTOR_BYTES),
                                                  size - 1}]))


class _BankPanel:
    """One site of a bank map: the turns of its worst request."""

    def __init__(self, site):
        self.site = site
        self.heading = _heading(site)
        self.parts = max((self.turns_of(row) for row in range(min(len(site.addresses), 512))),
                         key=lambda parts: sum(len(part) for part in parts))
        self.turns = sum(len(part) for part in self.parts)
        fewest = sum(len(part) > 0 for part in self.parts)
        worst = max(len(part) for part in self.parts)
        word = "turn" if self.turns == 1 else "turns"
        self.verdict = f"{self.turns} {word}, no bank is asked twice"
        if fewest > 1:
            part = "half" if len(self.parts) == 2 else "quarter"
            self.verdict = (f"{self.turns} turns, one for each {part} of the warp, no bank is "
                            f"asked twice in one")
        if self.turns > fewest:
            self.verdict = (f"{self.turns} {word} instead of {_COUNTS.get(fewest, fewest)}: "
                            f"{worst} different words of one bank are wanted at once")

    def turns_of(self, row):
        """For each part of the warp that is served at once: turns of {bank: lanes}."""
        addresses, size = self.site.addresses[row], self.site.size
        n_parts = max(1, min(size, 16) // 4)
        parts = []
        for lanes in np.split(np.arange(LANES), n_parts):
            wanted = {}
            for lane in lanes.tolist():
                for byte in range(0, size, 4) if addresses[lane] >= 0 else ():
                    word = (int(addresses[lane]) + byte) // 4
                    wanted.setdefault(word % BANKS, {}).setdefault(word, []).append(lane)
            depth = max((len(words) for words in wanted.values()), default=0)
            parts.append([{bank: list(words.values())[turn] for bank, words in wanted.items()
                           if turn < len(words)} for turn in range(depth)])
        return parts

    def draw(self, axes, cell):
        turn = 0
        axes.set_facecolor(UNTOUCHED)
        for part in self.parts:
            for banks in part:
                for bank, lanes in banks.items():
                    colour = LANE_COLOURS(lanes[0] / (LANES - 1))
                    axes.add_patch(Rectangle((bank - 0.5, turn), 1, 1, facecolor=colour,
                                             edgecolor=PAPER, linewidth=0.6))
                    text = str(lanes[0]) if len(lanes) == 1 else f"×{len(lanes)}"
                    axes.text(bank, turn + 0.5, text, ha="center", va="center",
                              fontsize=8 if cell > 0.2 else 6.5, color=ink_on(colour[:3]))
                turn += 1
            if 0 < turn < self.turns and len(self.parts) > 1:
                axes.axhline(turn, color=INK, linewidth=1.4)
        axes.set(xlim=(-0.5, BANKS - 0.5), ylim=(0, self.turns))
        every = max(1, -(-self.turns // 4))
        ticks = sorted({0, *range(every - 1, self.turns, every)})
        axes.set_yticks([tick + 0.5 for tick in ticks], [f"turn {tick + 1}" for tick in ticks],
                        fontsize=8)
        axes.set_xticks(range(0, BANKS, 4 if BANKS > 8 else 1))
        axes.tick_params(labelsize=8)
        axes.set_xlabel("bank of shared memory", fontsize=9)
        axes.set_title(f"{self.heading}\n{self.verdict}", loc="left", fontsize=10)


def _lane_legend(figure, extra, width_inches=WIDTH_INCHES):
    lanes = [0, 10, 21, 31] if width_inches > NARROW_INCHES else [0, 31]
    handles = [Rectangle((0, 0), 1, 1, facecolor=LANE_COLOURS(lane / (LANES - 1)), edgecolor=INK,
                         linewidth=0.5) for lane in lanes]
    labels = [f"lane {lane}" for lane in lanes]
    for colour, label in extra:
        handles.append(Rectangle((0, 0), 1, 1, facecolor=colour, edgecolor=LIMIT))
        labels.append(label)
    wide = width_inches > NARROW_INCHES
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False,
                  fontsize=9 if wide else 6.5, columnspacing=None if wide else 0.9,
                  handlelength=None if wide else 1.2)
