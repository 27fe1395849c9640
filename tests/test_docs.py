"""README.md, RESULTS.md and docs: what they print is what happens, and what they say is there."""

import contextlib
import importlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from course_lib import backend, bench, cli, readme

ROOT = Path(__file__).resolve().parent.parent
PAGES = ["README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
TEXTS = {name: (ROOT / name).read_text(encoding="utf-8") for name in (*PAGES, "RESULTS.md")}
FENCE = re.compile(r"^```(\w+)(?: (\w+))?\n(.*?)^```$", re.DOTALL | re.MULTILINE)
#: Commands with such a remark are not run; docs/commands.md says so.
REMARKS = {
    "needs a GPU", "downloads", "takes minutes", "installs", "opens a browser", "after a run",
}  # fmt: skip
SCRIPTS = "sanitize", "trace", "lint"
COMMANDS = (
    "doctor", "lab", "compare", *SCRIPTS, "bench", "kernels", "train", "data", "readme",
)  # fmt: skip
TARGETS = re.findall(r"^([a-z]+):.*## ", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)


@pytest.fixture(scope="module")
def project():
    return readme.Project()


# ------------------------------------------------------------------ run as it is printed


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(backend.SIMULATOR_VARIABLE, raising=False)  # as a reader has it
    yield tmp_path
    backend.set_backend(None)


@pytest.mark.parametrize("name", PAGES)
def test_what_is_printed_runs_as_printed(name, elsewhere, monkeypatch):
    printed, ran = None, 0
    for kind, how, body in FENCE.findall(TEXTS[name]):
        if kind == "yaml":
            Path(re.match(r"# ([\w.]+)\n", body)[1]).write_text(body, encoding="utf-8")
        elif kind == "python":
            printed, ran = _run_python(body, elsewhere), ran + 1
        elif kind == "sh":
            for line in body.splitlines():
                printed, ran = _run_line(line, monkeypatch), ran + 1
        elif kind == "text":
            assert _comparable(printed, how) == _comparable(body, how)
            printed = None
        else:
            pytest.fail(f"{name}: a fence of kind {kind!r}")
    assert ran


def _run_python(code, folder):
    script, output = folder / "example.py", io.StringIO()
    script.write_text(code, encoding="utf-8")
    with contextlib.redirect_stdout(output):
        runpy.run_path(str(script), run_name="__main__")
    return output.getvalue()


def _run_line(line, monkeypatch):
    """What the command printed; None where its remark says that it is not to be run."""
    command, _, remark = line.partition("  # ")
    words = shlex.split(command)
    assert not remark or remark in REMARKS, line
    if words[0] == "make":
        assert words[1] in (*TARGETS, "help"), line
        if remark:
            return None
        return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    if remark:
        _parse(words, monkeypatch)
        return None
    assert words[:3] == ["python", "-m", "course_lib"], line
    if words[3] in SCRIPTS:  # whose script is a process's main program
        done = subprocess.run([sys.executable, *words[1:]], capture_output=True, text=True,
                              env=os.environ | {"PYTHONPATH": str(ROOT)})  # fmt: skip
        assert done.returncode in (0, 1), done.stderr
        return done.stdout
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        assert cli.main(words[3:]) == 0, line
    return output.getvalue()


def _parse(words, monkeypatch):
    """argparse ends the process with status 2 for options that a command does not have."""
    known = ["-m", "course_lib"]  # of python or torchrun
    starts = [i for i in range(len(words)) if words[i : i + 2] == known]
    with monkeypatch.context() as patched:
        for name in COMMANDS:
            patched.setattr(cli, name, lambda options: 0)
        for start in starts:
            assert cli.main(words[start + 2 :]) == 0
    others = {"pip", "python -m pytest"}
    assert starts or any(other in " ".join(words) for other in others), words


def _comparable(text, how):
    """`text` without what depends on the machine: numbers, or all but each line's first word."""
    if how == "varies":
        return [line.split()[:1] for line in text.strip().splitlines()]
    if how == "numbers":
        text = re.sub(r"on the GPU \(.*?\)$", "in the simulator", text, flags=re.MULTILINE)
        text = re.sub(r"-?\d[\d.,]*(e[+-]?\d+)?", "0", text)
        return [" ".join(line.split()) for line in text.strip().splitlines()]
    assert how == ""
    return text


def test_a_page_that_is_wrong_is_seen(elsewhere, monkeypatch):
    for line in ("make nothing", "python -m course_lib doctr  # needs a GPU", "rm -r x",
                 "make lab  # perhaps"):  # fmt: skip
        with pytest.raises((AssertionError, SystemExit)):
            _run_line(line, monkeypatch)
    shown = _comparable("error 1.5e-08 of 1,000\nfine", "numbers")
    assert shown == _comparable("error   2.25e+1 of 7\nfine", "numbers")
    assert shown != _comparable("error 1.5e-08 of 1,000\nwrong", "numbers")
    assert _comparable("x, on the GPU (NVIDIA H200)\n", "numbers") == ["x, in the simulator"]
    assert _comparable("a 1\n", "varies") != _comparable("b 1\n", "varies")


def test_the_convention_is_told():
    for remark in REMARKS:
        assert f"`# {remark}`" in TEXTS["docs/commands.md"]


# -------------------------------------------------------------------- say what is there


@pytest.mark.parametrize("name", PAGES)
def test_names_of_the_library_are_there(name):
    for path in set(re.findall(r"`(course_lib(?:\.\w+)+)`", TEXTS[name])):
        found, *attributes = importlib.import_module("course_lib"), *path.split(".")[1:]
        for i, attribute in enumerate(attributes):
            if not hasattr(found, attribute):
                importlib.import_module(".".join(["course_lib", *attributes[: i + 1]]))
            found = getattr(found, attribute)


def test_every_command_every_target_and_every_benchmark_is_described():
    page = TEXTS["docs/commands.md"]
    examples = "\n".join(body for kind, _, body in FENCE.findall(page) if kind == "sh")
    for command in COMMANDS:
        assert f"## {command}: " in page and f"python -m course_lib {command}" in examples
    for target in TARGETS:
        assert f"| `make {target}" in page, target
    for benchmark in cli.BENCHMARKS:
        assert f"`{benchmark}`" in page, benchmark
    with pytest.raises(SystemExit), contextlib.redirect_stdout(io.StringIO()) as told:
        cli.main(["--help"])
    assert re.search(r"\{([\w,]+)\}", told.getvalue())[1].split(",") == list(COMMANDS)


@pytest.mark.parametrize("name", [*TEXTS, "CONTRIBUTING.md", "data/README.md"])
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    headings = {
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    }
    text = re.sub(r"`[^`]*`", "", text)  # code has brackets of its own
    targets = re.findall(r"\]\(([^)\s]+)\)", text) + re.findall(r'src="([^"]+)"', text)
    for target in targets:
        path, _, anchor = target.partition("#")
        if "://" not in target and path:
            assert ((ROOT / name).parent / path).exists(), target
        if not path:
            assert anchor in headings, target


@pytest.mark.parametrize("name", PAGES)
def test_lessons_that_are_named_exist(name):
    there = {int(path.name[:2]) for path in (ROOT / "notebooks").glob("[0-9][0-9]_*.ipynb")}
    named = re.findall(r"[Ll]essons? (\d+)(?:(?: and |, |–)(\d+))?", TEXTS[name])
    assert {int(number) for pair in named for number in pair if number} <= there
    linked = set(re.findall(r"notebooks/(\d\d_\w+\.ipynb)", TEXTS[name]))
    assert not linked or {int(link[:2]) for link in linked} == there


#: What guides to CUDA C++ extensions name.
THERE = (
    "SqueezeExcitationCUDA", "create_model_cuda", "create_model_enhanced", "load_inline",
    "cudnnSoftmaxForward", "nvprof", "gpu_optimizer.py", "xFormers", "compute-sanitizer",
)  # fmt: skip


def test_names_that_guides_use_are_explained():
    rows = "\n".join(re.findall(r"^\| (.*?) \|", TEXTS["docs/coming_from.md"], re.MULTILINE))
    assert [name for name in THERE if name not in rows] == []


@pytest.mark.parametrize("name", PAGES)
def test_commands_that_look_into_a_run_see_its_kernels(name):
    """`train fashion-mnist` captures its steps: a graph is one launch, and one bar of nsys."""
    for line in TEXTS[name].splitlines():
        if "course_lib train" in line:
            assert not line.startswith("CUDA_LAUNCH_BLOCKING") or "--modules" in line, line
            assert not line.startswith("nsys ") or "--cuda-graph-trace=node" in line, line


def test_folders_of_data_are_called_folders():
    text = (ROOT / "data" / "README.md").read_text(encoding="utf-8")
    assert all(path.is_dir() for path in (ROOT / "data" / "results").iterdir())
    for path in re.findall(r"`((?:results|runs)/[^`]*)`", text):
        assert path.endswith("/"), path


# ------------------------------------------------------------------------ are generated


def test_everything_is_what_the_command_generates(project):
    for name, (before, after) in project.documents().items():
        assert before == after, f"{name} is out of step: run `make readme`"
    assert [d.name for d in project.drawings if not d.is_drawn()] == []


def test_what_is_recorded_is_on_every_page_that_draws_from_it(project):
    assert project.recordings == bench.recordings() != []
    for name, (_, after) in project.documents().items():
        assert "Not measured yet." not in after, name
    assert {"results", "softmax"} <= {drawing.path.stem for drawing in project.of_records}


def test_the_command_says_what_is_out_of_step(project, monkeypatch, capsys):
    monkeypatch.setattr(readme, "Project", lambda: project)
    assert cli.main(["readme", "--check"]) == 0
    assert "in step" in capsys.readouterr().out
    wrong = {"README.md": ("old", "new")}
    monkeypatch.setattr(project, "documents", lambda: wrong, raising=False)
    assert cli.main(["readme", "--check"]) == 1
    assert "Out of step with data/results: README.md." in capsys.readouterr().out


def test_only_what_stands_between_marks_is_written(project):
    text = "a <!-- lessons:begin -->\nold\n<!-- lessons:end --> b"
    once = project.filled(text)
    assert once.startswith("a <!--") and once.endswith("--> b") and "\nold\n" not in once
    assert project.filled(once) == once
    with pytest.raises(KeyError):
        project.filled("<!-- nothing:begin -->\n<!-- nothing:end -->")


def test_without_records_pages_say_so():
    bare = readme.Project([])
    assert bare.of_records == []
    text = bare.filled("<!-- results:begin -->\n<!-- results:end -->")
    assert "\nNot measured yet.\n" in text
    assert "\nNot measured yet.\n" in bare.filled("<!-- promises:begin -->\n<!-- promises:end -->")


def test_readme_is_short_and_its_pictures_are_small(project):
    assert len(TEXTS["README.md"].splitlines()) <= 140
    for drawing in project.drawings:
        assert drawing.path.stat().st_size < 120_000, drawing.name
        assert drawing.alt and "\n" not in drawing.alt and '"' not in drawing.alt
    shown = "".join(TEXTS.values())
    for drawing in project.drawings:
        assert shown.count(f"docs/pictures/{drawing.path.name}") >= 1
        assert drawing.alt in shown


def test_a_picture_knows_what_it_was_drawn_from(project, tmp_path, monkeypatch):
    monkeypatch.setattr(readme.pictures, "FOLDER", tmp_path)
    drawing = project.triptych[0]
    assert not drawing.is_drawn()
    drawing.save()
    assert drawing.is_drawn()
    monkeypatch.setattr(drawing, "facts", ["other"])
    assert not drawing.is_drawn()
    with Image.open(drawing.path) as picture:
        assert picture.text["Description"] == drawing.alt
    drawing.path.write_bytes(b"no picture")
    assert not drawing.is_drawn()


def test_the_triptych_shows_what_the_simulator_found(project):
    exercise, race, access = project.triptych
    assert "✓ histogram" in exercise.alt
    assert "race, line 6" in race.alt and "line 5 writes it" in race.alt
    assert "load of x[2 * i] takes 8 sectors" in access.alt
    assert "store of y[i] takes 4 sectors" in access.alt
