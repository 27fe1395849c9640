"""README.md, RESULTS.md and docs/: what in them is generated, and whether it is in step.

A part between `<!-- name:begin -->` and `<!-- name:end -->` is generated; `Project.parts` says from
what. RESULTS.md is generated as a whole, and so are the pictures in docs/pictures.
"""

import re

from course_lib import bench, results_table
from course_lib.benchmarks import BENCHMARKS, pending
from course_lib.readme import lessons, pictures
from course_lib.readme.places import FOLDER, ROOT

RESULTS = "RESULTS.md"
_MARKS = re.compile(r"<!-- ([\w-]+):begin -->\n.*?<!-- \1:end -->", re.DOTALL)


class Project:
    """What the documents are generated from, read once."""

    def __init__(self, recordings=None):
        """recordings: of the devices, as `bench.load_records` returns them; default: all kept."""
        self.recordings = bench.recordings() if recordings is None else recordings
        self.triptych = pictures.triptych()
        self.of_records = pictures.of_records(self.recordings)

    @property
    def drawings(self):
        """Every picture, as `pictures.Drawing`."""
        return self.triptych + self.of_records

    def parts(self):
        """{name of a part: its text}."""
        return {
            "triptych": self._triptych,
            "lessons": lessons.table,
            "results": self._results,
            "operations": _operations,
            "benchmarks": _benchmarks,
            "pending": lambda: self._of_the_first(_pending),
            "promises": lambda: self._of_the_first(results_table.promises),
            "tape": lambda: self._of_the_first(
                lambda recording: results_table.beside_numpy(recording["records"])
            ),
        }

    def documents(self):
        """{file name: (text as it is, text as it should be)}."""
        names = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
        found = {}
        for name in names:
            before = (ROOT / name).read_text(encoding="utf-8")
            found[name] = before, self.filled(before)
        path = ROOT / RESULTS
        before = path.read_text(encoding="utf-8") if path.exists() else ""
        found[RESULTS] = before, results_table.page(self.recordings, self._links())
        return found

    def filled(self, text):
        """`text` with every generated part written again. Raises KeyError for an unknown one."""
        parts = self.parts()

        def write(found):
            name = found[1]
            return f"<!-- {name}:begin -->\n{parts[name]()}\n<!-- {name}:end -->"

        return _MARKS.sub(write, text)

    def _links(self):
        return {d.name: (d.path.relative_to(ROOT).as_posix(), d.alt) for d in self.of_records}

    def _triptych(self):
        pixels = round(100 * pictures.SMALL["width_inches"])
        images = [f'<img src="{d.path.relative_to(ROOT).as_posix()}" width="{pixels}" '
                  f'alt="{d.alt}">' for d in self.triptych]  # fmt: skip
        return "\n".join(images)

    def _results(self):
        links = self._links()
        parts = ["![{1}]({0})".format(*links["results"])] if "results" in links else []
        for recording in self.recordings[:1]:
            parts.append(results_table.verdict(results_table.cases(recording["records"])))
            if drawn := results_table.drawn_sentence(recording["records"]):
                parts.append(drawn)
            parts.append(results_table.conditions(recording))
        if others := [recording["device"]["name"] for recording in self.recordings[1:]]:
            parts[-1] += f" Some of it on an **{'** and an **'.join(others)}**, too: RESULTS.md."
        return "\n\n".join(parts) or "Not measured yet."

    def _of_the_first(self, render):
        """What is rendered of the device of which most is recorded."""
        return next(filter(None, map(render, self.recordings[:1])), "Not measured yet.")


def run(*, check=False):
    """Write what is out of step, or with `check` only say so. The names of what was (is)."""
    project = Project()
    documents = project.documents()
    late = [name for name, (before, after) in documents.items() if before != after]
    stale = [drawing for drawing in project.drawings if not drawing.is_drawn()]
    kept = {drawing.path for drawing in project.drawings}
    unused = [path for path in FOLDER.glob("*.png") if path not in kept]
    if not check:
        for name in late:
            (ROOT / name).write_text(documents[name][1], encoding="utf-8")
        for drawing in project.drawings:  # all: how they are drawn may have changed
            drawing.save()
        for path in unused:
            path.unlink()
    pngs = [drawing.path for drawing in stale] + unused
    return late + [path.relative_to(ROOT).as_posix() for path in pngs]


def _operations():
    from course_lib import compare

    return ", ".join(f"`{name}`" for name in compare.OPERATIONS) + "."


def _pending(recording):
    n_cases, n_missing = pending.count(recording)
    return (
        f"Of the {n_cases:,} cases of operations, {n_missing:,} have never been measured on the "
        f"{recording['device']['name']}: most of them are drawn shapes."
    )


def _benchmarks():
    return ", ".join(f"`{name}`" for name in BENCHMARKS) + "."
