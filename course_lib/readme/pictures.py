"""The pictures of README.md and RESULTS.md, from the records, a notebook and the simulator."""

import hashlib
import io
import json
import linecache
import re
from dataclasses import dataclass, field

from PIL import Image, PngImagePlugin

from course_lib import plot, results_table
from course_lib.readme.places import FOLDER, ROOT

#: Inches: three of the first size stand side by side.
SMALL = {"width_inches": 2.7, "height_inches": 2.55}
EXERCISE_NOTEBOOK, EXERCISE = "notebooks/solutions/02_reductions.ipynb", "histogram"
RACE = """\
@cuda.jit
def edges(x, y):
    s = cuda.shared.array(64, np.float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    left = s[max(t - 1, 0)]
    y[t] = abs(s[t] - left)
"""
STRIDE = """\
@cuda.jit
def every_second(x, y):
    i = cuda.grid(1)
    if i < y.size:
        y[i] = x[2 * i]
"""
COLOURS = 28  # of a picture; README loads them all
_FACTS, _ALT = "Drawn from", "Description"  # what a PNG says of itself


@dataclass
class Drawing:
    """A picture to be: its file, what it says in words, what it is drawn from, and how."""

    name: str
    alt: str
    draw: object
    facts: list = field(default_factory=list)

    @property
    def path(self):
        """Where the picture lies."""
        return FOLDER / f"{self.name}.png"

    @property
    def digest(self):
        """A hash of everything that the picture shows."""
        text = json.dumps([self.alt, self.facts], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()

    def is_drawn(self):
        """Whether the file is there, and drawn from the same."""
        try:
            with Image.open(self.path) as found:
                return found.text.get(_FACTS) == self.digest and found.text.get(_ALT) == self.alt
        except OSError:
            return False

    def save(self):
        """Draw it, and write down in the file what it was drawn from."""
        said = PngImagePlugin.PngInfo()
        said.add_text(_FACTS, self.digest)
        said.add_itxt(_ALT, self.alt)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with Image.open(io.BytesIO(self.draw().png(colours=COLOURS))) as picture:
            picture.save(self.path, pnginfo=said, optimize=True)


def triptych():
    """Drawings of an exercise, of a race that the simulator names, and of an access map."""
    return [_exercise(), _race(), _access()]


def of_records(recordings):
    """Drawings of all results and of softmax's ladder, of the first device; [] without records."""
    return [drawing for recording in recordings[:1]
            for drawing in (_results(recording), _softmax(recording)) if drawing]  # fmt: skip


def _exercise():
    """The cell as the solved notebook stores it, with what its check printed."""
    notebook = json.loads((ROOT / EXERCISE_NOTEBOOK).read_text(encoding="utf-8"))
    for found in notebook["cells"]:
        source = "".join(found["source"])
        if f'check("{EXERCISE}"' in source and found.get("outputs"):
            printed = "".join("".join(o.get("text", "")) for o in found["outputs"])
            break
    else:
        raise LookupError(f"{EXERCISE_NOTEBOOK} has no exercise {EXERCISE}")
    title = "Your kernel is checked"
    source = re.sub(r"\n\n+", "\n\n", source)
    alt = (f"An exercise of lesson 2: the kernel {EXERCISE}, which adds to counts with an atomic, "
           f"and its check: {_plain(printed)}")
    return Drawing("exercise", alt, lambda: plot.cell(source, printed, title=title, alt=alt,
                                                      **SMALL), [title, source, printed])


def _race():
    """A kernel without its barrier, run under the sanitizer, which names the lines."""
    from course_lib import simulator

    x, y = _floats(64), _floats(64)
    with simulator.sanitize() as report:
        _kernel(RACE, "edges")[1, 64](x, y)
    (found,) = report.findings
    said, title = str(found), "The simulator names the bug"
    marked = sorted({int(line) for line in re.findall(r"\bline (\d+)", said)})
    alt = f"A kernel whose threads read what their neighbours write, and what is said of it: {said}"
    return Drawing("race", alt, lambda: plot.cell(RACE, said, marked=marked, title=title, alt=alt,
                                                  **SMALL), [title, RACE, said])


def _access():
    """What a warp asks for when it takes every second number."""
    from course_lib import simulator

    x, y = _floats(64), _floats(32)
    with simulator.trace() as trace:
        _kernel(STRIDE, "every_second")[1, 32](x, y)
    sites = [[site.source, site.op, site.sectors_per_request, int(site.bytes)]
             for site in trace.sites]  # fmt: skip
    alt = "An access map of y[i] = x[2 * i]: " + "; ".join(
        f"each warp's {op} of {source} takes {sectors:g} sectors of 32 bytes"
        for source, op, sectors, _ in sites
    )
    title = "You see what a warp touches"
    return Drawing("access", alt, lambda: plot.access_map(trace, title=title, alt=alt, **SMALL),
                   [title, STRIDE, sites])  # fmt: skip


def _results(recording):
    found = results_table.cases(recording["records"])
    if not found:
        return None
    groups = {operation: sorted(case.ratio for case in group)
              for operation, group in results_table.by_operation(found).items()}  # fmt: skip
    alt = ("Every recorded operation a row, every shape and type a dot: our time divided by the "
           "fastest peer's, on a logarithmic axis. " + _plain(results_table.verdict(found)))
    dates = sorted({case.record["date"] for case in found})
    where = {"device": recording["device"]["name"], "date": f"{dates[0]} to {dates[-1]}"}
    return Drawing("results", alt, lambda: plot.ratios(groups, alt=alt, **where),
                   [groups, where])  # fmt: skip


def _softmax(recording):
    from course_lib.benchmarks import pictures

    for record in recording["records"]:
        wanted = ["softmax.forward", "float32", results_table.SOFTMAX_SHAPE]
        if [record["name"], record["dtype"], record["shape"]] == wanted:
            break
    else:
        return None
    name = recording["device"]["name"]
    alt = "Bars of GB/s, every rung of softmax beside the peers, and the limit set by a copy: " + (
        ", ".join(f"{row['label']} {row['gbps']:,.0f}" for row in record["rows"]))  # fmt: skip
    shape = " × ".join(f"{size:,}" for size in record["shape"])
    title = f"Softmax of {shape} {record['dtype']} numbers"

    def draw():
        return pictures.ladder(record, name, title=title)

    return Drawing("softmax", alt, draw, [record["rows"], record["date"], name, title])


def _plain(text):
    return " ".join(text.replace("`", "").replace("**", "").split())


def _floats(n):
    import numpy as np

    return np.arange(n, dtype=np.float32)


def _kernel(source, name):
    """The kernel in `source`, whose lines are counted from 1, as those of a notebook's cell are."""
    import numpy as np

    from course_lib import cuda

    file = f"<{name}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    names = {"cuda": cuda, "np": np, "__name__": "__main__"}
    exec(compile(source, file, "exec"), names)
    return names[name]
