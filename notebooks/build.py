"""Build the notebooks from their sources.

    python notebooks/build.py             build what has changed
    python notebooks/build.py 01 02       build these lessons, changed or not
    python notebooks/build.py --check     only tell whether all is in step; runs nothing

`src/NN_topic.py` (jupytext's percent format) becomes two notebooks: `NN_topic.ipynb`, which a
learner opens, with exercises to fill in and no outputs; and `solutions/NN_topic.ipynb`, solved,
run in the simulator, with its outputs stored.

What a source may say of a cell, after its `# %%`:

`exercise="relu"`
    The cell defines `relu` with `TODO` in it, and checks it. The learner gets it as it is. In the
    solved notebook, the definition is replaced by the solution in
    `course_lib/teach/exercises/lesson_NN.py`, which is the only place that has it.
`tags=["solution-only"]`
    Only the solved notebook has the cell.
`tags=["varies"]`
    What the cell prints is not the same on every machine and in every run (a time, a machine's
    name). Its text is not stored; pictures are.

Stored outputs must be the same in every build. So each notebook is run twice and compared, checks
draw their inputs from a fixed seed, and progress is dated with a fixed day. A path, a memory
address, the machine's name, a warning or a picture without a description fails the build.

A solved notebook also keeps, under `records` in its metadata, which recorded measurements its cells
have looked for, and a hash of what they found. `outdated` compares these with today's records.
"""

from __future__ import annotations

import argparse
import ast
import copy
import difflib
import getpass
import hashlib
import json
import os
import re
import socket
import sys
import tempfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parent

# A copied tree that was never installed must find its own course_lib.
sys.path.insert(0, str(ROOT))
os.environ["COURSE_LIB_SIMULATOR"] = "1"

import jupytext  # noqa: E402
import nbformat  # noqa: E402
from nbclient import NotebookClient  # noqa: E402
from nbclient.exceptions import CellExecutionError  # noqa: E402

METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}

#: Lines of code, without empty ones: of a kernel, and of a cell without its kernels.
KERNEL_LINES, CELL_LINES = 35, 12

#: Seconds that one cell may take in the simulator.
CELL_TIMEOUT = 120

#: Calls that put something on the page. A cell with one of them must have an output.
SHOWS = {"print", "check", "hint", "solution", "progress", "use", "display"}


class BuildError(Exception):
    """A source or an output breaks a rule; the message names the cell."""


def sources() -> list[Path]:
    """Return the sources, in the order of the course."""
    return sorted((FOLDER / "src").glob("[0-9][0-9]_*.py"))


def learner_path(source: Path) -> Path:
    """Return where the notebook with the exercises is."""
    return FOLDER / f"{source.stem}.ipynb"


def solved_path(source: Path) -> Path:
    """Return where the notebook with the solutions is."""
    return FOLDER / "solutions" / f"{source.stem}.ipynb"


# ---- from a source to the two forms --------------------------------------------------------


def make_forms(source: Path) -> tuple[nbformat.NotebookNode, nbformat.NotebookNode]:
    """Return the learner's notebook and the solved one, which has not been run yet."""
    learner = jupytext.read(source, fmt="py:percent")
    learner.metadata = nbformat.from_dict(METADATA)
    learner.nbformat, learner.nbformat_minor = 4, 5
    _set_ids(learner, solved_path(source))
    for cell in learner.cells:
        cell.metadata.pop("lines_to_next_cell", None)  # how jupytext remembers empty lines
        _check_cell(source, cell)
    solved = copy.deepcopy(learner)
    learner.cells = [cell for cell in learner.cells if "solution-only" not in tags(cell)]
    for cell in solved.cells:
        if "exercise" in cell.metadata:
            cell.source = _solve(source, cell)
            _check_length(source, cell)
    return learner, solved


def tags(cell: nbformat.NotebookNode) -> list[str]:
    """Return the cell's tags."""
    return cell.metadata.get("tags", [])


def _set_ids(notebook: nbformat.NotebookNode, earlier: Path) -> None:
    """Let each cell keep the id it had in the `earlier` notebook, also when it was edited.

    A new cell's id is made from its text, so that two people building get the same.
    """
    old = nbformat.read(earlier, as_version=4).cells if earlier.exists() else []
    new = notebook.cells
    # Exercises are compared by their name: their text differs between the two forms.
    before, after = [_identity(c) for c in old], [_identity(c) for c in new]
    matcher = difflib.SequenceMatcher(a=before, b=after, autojunk=False)
    ids: dict[int, str] = {}
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        # Equal cells match one to one; so do as many edited ones as a gap has on both sides.
        if kind in ("equal", "replace"):
            for a, b in zip(range(a0, a1), range(b0, b1), strict=False):
                if old[a].cell_type == new[b].cell_type:
                    ids[b] = old[a].id
    taken = set(ids.values())
    for number, cell in enumerate(new):
        if number not in ids:
            salt = 0
            while (name := _digest(f"{salt}{cell.cell_type}{cell.source}")) in taken:
                salt += 1
            taken.add(name)
            ids[number] = name
        cell.id = ids[number]


def _identity(cell: nbformat.NotebookNode) -> tuple[str, str]:
    return cell.cell_type, cell.metadata.get("exercise") or cell.source


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _solve(source: Path, cell: nbformat.NotebookNode) -> str:
    """Return the text of an exercise's cell with the course's solution in place of the stub."""
    from course_lib.teach.exercise import find, python_function

    exercise = find(cell.metadata["exercise"])
    name = python_function(exercise.solution).__name__
    definitions = [
        node
        for node in ast.parse(cell.source).body
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    if len(definitions) != 1:
        raise _error(source, cell, f"the cell of an exercise must define {name} once")
    if "TODO" not in cell.source:
        raise _error(source, cell, "the cell of an exercise must have a TODO")
    node = definitions[0]
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    lines = cell.source.splitlines()
    lines[first - 1 : node.end_lineno] = exercise.source().rstrip().splitlines()
    return "\n".join(lines)


def _check_cell(source: Path, cell: nbformat.NotebookNode) -> None:
    known = {"exercise", "tags"}
    if unknown := set(cell.metadata) - known:
        raise _error(source, cell, f"unknown option {sorted(unknown)[0]!r}")
    if unknown := set(tags(cell)) - {"solution-only", "varies"}:
        raise _error(source, cell, f"unknown tag {sorted(unknown)[0]!r}")
    if cell.cell_type == "code":
        _check_length(source, cell)


def _check_length(source: Path, cell: nbformat.NotebookNode) -> None:
    lines = cell.source.splitlines()
    rest = set(range(1, len(lines) + 1))
    for node in ast.parse(cell.source).body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            kernel = set(range(node.decorator_list[0].lineno, node.end_lineno + 1))
            rest -= kernel
            if _filled(lines, kernel) > KERNEL_LINES:
                raise _error(source, cell, f"{node.name} is longer than {KERNEL_LINES} lines")
    if _filled(lines, rest) > CELL_LINES:
        raise _error(source, cell, f"without its kernels, longer than {CELL_LINES} lines")


def _filled(lines: list[str], numbers: set[int]) -> int:
    return sum(bool(lines[number - 1].strip()) for number in numbers)


def _error(where: Path, cell: nbformat.NotebookNode, message: str) -> BuildError:
    text = "\n".join("    " + line for line in cell.source.splitlines())
    return BuildError(f"{where.stem}: {message}, in the cell\n{text}")


# ---- running ---------------------------------------------------------------------------------


def run(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return the notebook with its outputs, run in the simulator in the notebooks' folder.

    Raises BuildError when a cell fails.
    """
    notebook = copy.deepcopy(notebook)
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "COURSE_LIB_PROGRESS": str(Path(folder) / "progress.json"),
            "COURSE_LIB_READS": str(Path(folder) / "reads.jsonl"),
            "COURSE_LIB_SEED": "1",
            "COURSE_LIB_SIMULATOR": "1",
            "COURSE_LIB_STRICT": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": os.pathsep.join([str(ROOT), *_path_of(os.environ)]),
            "SOURCE_DATE_EPOCH": "1767225600",  # 2026-01-01
        }
        environment.pop("COURSE_DATA", None)  # nobody's own data in what is stored
        client = NotebookClient(
            notebook,
            timeout=CELL_TIMEOUT,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": str(FOLDER)}},
        )
        try:
            client.execute(env=environment)
        except CellExecutionError as error:
            text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))
            raise BuildError(text) from None
        reads = _reads(Path(folder) / "reads.jsonl")
    notebook.metadata = nbformat.from_dict(METADATA | {"records": reads})
    for cell in notebook.cells:
        if "varies" in tags(cell):
            cell.outputs = [each for each in cell.outputs if "image/png" in each.get("data", {})]
    return notebook


def _reads(log: Path) -> dict[str, str]:
    """Return what the cells have looked for in the records, each with a hash of what was found."""
    lines = log.read_text().splitlines() if log.exists() else []
    reads = [json.loads(line) for line in lines]
    return {json.dumps(each["wanted"], sort_keys=True): each["hash"] for each in reads}


def outdated(notebook: nbformat.NotebookNode) -> list[str]:
    """Return what a solved notebook's cells have looked for in the records, and would find changed.

    The records are those of the first device: a build has no GPU. Raises BuildError for a notebook
    that does not tell what its cells have looked for.
    """
    from course_lib import bench

    if "records" not in notebook.metadata:
        raise BuildError("it does not tell which records it shows: build it again")
    records = next(iter(bench.recordings()))
    return [
        wanted
        for wanted, found in notebook.metadata["records"].items()
        if bench.hash_of(bench.find(records, **json.loads(wanted))) != found
    ]


def _path_of(environment: os._Environ[str]) -> list[str]:
    return [each for each in [environment.get("PYTHONPATH")] if each]


def check_outputs(where: Path, notebook: nbformat.NotebookNode) -> None:
    """Raise BuildError unless every stored output is there and fit to be published."""
    count = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        count += 1
        if cell.execution_count != count:
            raise _error(where, cell, "not run, or run out of order")
        if not cell.outputs and _shows_something(cell) and "varies" not in tags(cell):
            raise _error(where, cell, "an output is missing")
        for output in cell.outputs:
            _check_output(where, cell, output)


def _shows_something(cell: nbformat.NotebookNode) -> bool:
    called = {
        node.func.id
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    return bool(called & SHOWS)


def _check_output(where: Path, cell: nbformat.NotebookNode, output: nbformat.NotebookNode) -> None:
    if output.output_type == "error":
        raise _error(where, cell, f"an error is stored: {output.ename}")
    if output.output_type == "stream" and output.name == "stderr":
        raise _error(where, cell, f"a warning is stored: {output.text.strip()}")
    data = output.get("data", {})
    if "image/png" in data:
        if not output.metadata.get("image/png", {}).get("alt", "").strip():
            raise _error(where, cell, "a picture has no description (alt)")
    texts = [output.get("text", "")]
    texts += [text for kind, text in data.items() if kind.startswith("text/")]
    for text in texts:
        for pattern, what in _forbidden():
            if found := re.search(pattern, text):
                raise _error(where, cell, f"{what} is stored: {found.group()!r}")


def _forbidden() -> list[tuple[str, str]]:
    """Return what no output may hold: patterns, and what they are."""
    patterns = [
        (r"(?<![\w.])/(home|Users|root|tmp|var|opt|mnt|work|usr|content)/\S*", "a path"),
        (r"\b[A-Z]:\\\S+", "a path"),
        (r"\b0x[0-9a-f]{8,}", "a memory address"),
        (r"ipykernel_\d+", "a path"),
    ]
    for place in {str(ROOT), str(Path.home()), sys.prefix, tempfile.gettempdir()}:
        if len(place) > 1:
            patterns.append((re.escape(place) + r"\b", "a path"))
    # Short names would be found inside ordinary words.
    machine = socket.gethostname()
    if len(machine) > 5:
        patterns.append((rf"\b{re.escape(machine)}\b", "the machine's name"))
    user = _user()
    if len(user) > 4:
        patterns.append((rf"\b{re.escape(user)}\b", "the user's name"))
    return patterns


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user need not have a name
        return ""


# ---- all of it -------------------------------------------------------------------------------


def build(source: Path) -> None:
    """Write both notebooks of one source. Raises BuildError; nothing is written then."""
    learner, solved = make_forms(source)
    first, second = run(solved), run(solved)
    check_outputs(solved_path(source), first)
    for one, other in zip(first.cells, second.cells, strict=True):
        if one.get("outputs") != other.get("outputs"):
            raise _error(source, one, 'two runs differ: seed it, or tag it "varies"')
    for path, notebook in ((learner_path(source), learner), (solved_path(source), first)):
        nbformat.validate(notebook)
        path.parent.mkdir(exist_ok=True)
        nbformat.write(notebook, path)
        print(f"wrote {path.relative_to(ROOT)}")


def in_step(source: Path) -> None:
    """Raise BuildError unless both notebooks are what the source says. Runs nothing."""
    learner, solved = make_forms(source)
    for path, wanted in ((learner_path(source), learner), (solved_path(source), solved)):
        if not path.exists():
            raise BuildError(f"{path.relative_to(ROOT)} is missing: run notebooks/build.py")
        stored = nbformat.read(path, as_version=4)
        nbformat.validate(stored)
        if _without_outputs(stored) != _without_outputs(wanted):
            raise BuildError(f"{path.relative_to(ROOT)} is out of step: run notebooks/build.py")
    check_outputs(solved_path(source), stored)
    for cell in nbformat.read(learner_path(source), as_version=4).cells:
        if cell.get("outputs") or cell.get("execution_count"):
            raise _error(learner_path(source), cell, "the learner's notebook has an output")


def _without_outputs(notebook: nbformat.NotebookNode) -> dict:
    bare = copy.deepcopy(dict(notebook))
    bare["metadata"].pop("records", None)  # what the outputs were made from
    for cell in bare["cells"]:
        cell.pop("outputs", None)
        cell.pop("execution_count", None)
    return bare


def strays() -> list[Path]:
    """Return the notebooks that have no source."""
    names = {source.stem for source in sources()}
    found = [*FOLDER.glob("*.ipynb"), *(FOLDER / "solutions").glob("*.ipynb")]
    return [path for path in found if path.stem not in names]


def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return its exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lessons", nargs="*", help="numbers, such as 01; all by default")
    parser.add_argument("--check", action="store_true", help="only check that all is in step")
    options = parser.parse_args(arguments)
    chosen = [s for s in sources() if not options.lessons or s.stem[:2] in options.lessons]
    if len({s.stem[:2] for s in chosen}) < len(set(options.lessons)):
        parser.error(f"there are lessons {', '.join(s.stem[:2] for s in sources())}")
    failed = False
    for source in chosen:
        try:
            in_step(source)
            # A lesson that was named is built again: what its cells call may have changed.
            stale = bool(options.lessons) and not options.check
        except BuildError as error:
            stale = True
            if options.check:
                print(error)
                failed = True
        if stale and not options.check:
            try:
                build(source)
            except BuildError as error:
                print(error)
                failed = True
    for path in strays():
        print(f"{path.relative_to(ROOT)} has no source")
        failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
