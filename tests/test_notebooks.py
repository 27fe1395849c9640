"""The notebooks are what their sources say, and keep the rules of a lesson."""

import ast
import importlib.util
import os
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from course_lib import bench
from course_lib.teach.exercise import exercises, python_function

nbformat = pytest.importorskip("nbformat")
pytest.importorskip("jupytext")

ROOT = Path(__file__).resolve().parents[1]


def load_build():
    """Return notebooks/build.py as a module."""
    spec = importlib.util.spec_from_file_location("build", ROOT / "notebooks" / "build.py")
    module = importlib.util.module_from_spec(spec)
    with mock.patch.dict(os.environ):  # it asks for the simulator, which is not for other tests
        spec.loader.exec_module(module)
    return module


build = load_build()
LESSONS = {source.stem: source for source in build.sources()}


def read(path):
    return nbformat.read(path, as_version=4)


def calls(notebook, functions):
    """Return the first argument of each call of one of `functions`, with the function's name."""
    found = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") in functions:
                    if node.args and isinstance(node.args[0], ast.Constant):
                        found.append((node.func.id, node.args[0].value))
    return found


def code_of(notebook):
    """Return the source of all code cells."""
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def definition(source, name):
    """Return the syntax tree of the function called `name`, as text."""
    (node,) = [n for n in ast.parse(source).body if getattr(n, "name", "") == name]
    return ast.dump(node)


# ---- the lessons -----------------------------------------------------------------------------


def test_there_are_lessons():
    assert len(LESSONS) >= 2
    assert not build.strays()


@pytest.mark.parametrize("lesson", LESSONS)
def test_notebooks_are_in_step_with_their_source(lesson):
    build.in_step(LESSONS[lesson])


@pytest.mark.parametrize("lesson", LESSONS)
def test_learner_gets_no_solution(lesson):
    notebook = read(build.learner_path(LESSONS[lesson]))
    text = "\n".join(cell.source for cell in notebook.cells)
    cells = {c.metadata["exercise"]: c for c in notebook.cells if "exercise" in c.metadata}
    assert cells
    for name, cell in cells.items():
        function = python_function(exercises()[name].solution)
        source = exercises()[name].source()
        assert "TODO" in cell.source
        assert source.strip() not in text
        assert definition(cell.source, function.__name__) != definition(source, function.__name__)


@pytest.mark.parametrize("lesson", LESSONS)
def test_exercises_of_a_lesson(lesson):
    notebook = read(build.learner_path(LESSONS[lesson]))
    own = {name for name, each in exercises().items() if each.lesson == lesson[:2]}
    named = calls(notebook, {"check", "hint", "solution", "use"})
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            named += re.findall(r"\b(check|hint|solution|use)\(\"(\w+)\"", cell.source)
    assert {name for _, name in named} <= set(exercises())
    in_cells = {c.metadata["exercise"] for c in notebook.cells if "exercise" in c.metadata}
    checked = {name for function, name in named if function == "check"}
    imported = re.findall(r"(?m)^from course_lib\.teach import (.*)$", code_of(notebook))
    assert "solution" in ", ".join(imported).split(", ")  # the last hint names it
    hinted = {name for function, name in named if function == "hint"}
    assert in_cells == own == checked
    assert checked <= hinted
    for cell in notebook.cells:
        if "exercise" in cell.metadata:
            assert f'check("{cell.metadata["exercise"]}", ' in cell.source


@pytest.mark.parametrize("lesson", LESSONS)
def test_solved_notebook_passes_every_check(lesson):
    notebook = read(build.solved_path(LESSONS[lesson]))
    for cell in notebook.cells:
        assert "TODO" not in re.sub(r"(?m)^from .* import .*$", "", cell.source) or (
            cell.cell_type == "markdown"
        )
        if "exercise" in cell.metadata:
            printed = "".join(output.get("text", "") for output in cell.outputs)
            assert f"✓ {cell.metadata['exercise']} — " in printed


@pytest.mark.parametrize("lesson", LESSONS)
def test_stored_outputs_show_todays_records(lesson):
    changed = build.outdated(read(build.solved_path(LESSONS[lesson])))
    assert not changed, f"measured again since: python notebooks/build.py {lesson[:2]}"


@pytest.mark.parametrize("lesson", LESSONS)
def test_records_are_read_where_the_build_sees_it(lesson):
    """`bench.find` notes what was looked for; nobody sees what a cell takes by itself.

    Nor what has changed since a date, which `results_table.when` says.
    """
    for cell in read(build.solved_path(LESSONS[lesson])).cells:
        if cell.cell_type == "code":
            for node in ast.walk(ast.parse(cell.source)):
                if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
                    key = getattr(node.slice, "value", None)
                    assert key != "records", ast.unparse(node)
                    assert key != "date" or "['source']" in ast.unparse(node), ast.unparse(node)


def test_lesson_13_hands_its_kernels_arrays_without_gaps():
    """numba copies no others to a GPU; dy is a part of a concatenation's gradient."""
    cells = read(build.solved_path(LESSONS["13_transposed_convolution"])).cells
    (cell,) = [cell.source for cell in cells if cell.source.startswith("forth = use(")]
    handed = []
    names = {"np": np, "use": lambda name, function: function, "transposed_by_dx": None}
    names["transposed_backward"] = lambda *arguments: handed.extend(arguments[:3]) or (0, 0)
    exec(cell, names)
    dy, x, weight = np.ones((2, 4, 6, 6))[:, 1:3], np.ones((2, 3, 3, 3)), np.ones((3, 2, 2, 2))
    options = {"stride": 2, "padding": 0, "with_bias": True, "needs": (True,) * 3}
    names["YourTransposed"].backward(dy, x, weight, **options)
    assert len(handed) == 3
    assert all(array.flags.c_contiguous for array in handed)


# ---- the builder -----------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of notebooks of the test's own; write sources into src/."""
    monkeypatch.setattr(build, "FOLDER", tmp_path)
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "src").mkdir()
    return tmp_path


def write(folder, *cells):
    source = folder / "src" / "00_small.py"
    source.write_text("\n\n".join(cells) + "\n")
    return source


STUB = """# %% exercise="relu"
@cuda.jit
def relu(x, y):
    i = cuda.grid(1)
    y[i] = TODO


check("relu", relu)"""


def test_stub_becomes_the_solution(folder):
    learner, solved = build.make_forms(write(folder, "# %% [markdown]\n# Hello", STUB))
    assert learner.cells[1].source == STUB.split("\n", 1)[1]
    expected = exercises()["relu"].source() + '\n\ncheck("relu", relu)'
    assert solved.cells[1].source == expected
    assert [cell.id for cell in learner.cells] == [cell.id for cell in solved.cells]


def test_solution_only_cells(folder):
    source = write(folder, "# %%\n1", '# %% tags=["solution-only"]\n2', "# %%\n3")
    learner, solved = build.make_forms(source)
    assert [cell.source for cell in learner.cells] == ["1", "3"]
    assert [cell.source for cell in solved.cells] == ["1", "2", "3"]


def test_ids_stay_when_cells_are_edited_added_and_moved(folder):
    def ids(*cells):
        _, solved = build.make_forms(write(folder, *cells))
        (folder / "solutions").mkdir(exist_ok=True)
        nbformat.write(solved, build.solved_path(folder / "src" / "00_small.py"))
        return {cell.source.split("\n")[0]: cell.id for cell in solved.cells}

    first = ids("# %%\na = 1", STUB, "# %%\nb = 2", "# %%\nc = 3")
    assert len(set(first.values())) == 4
    edited = ids("# %%\na = 1", STUB, "# %%\nb = 22", "# %%\nc = 3")
    assert edited["b = 22"] == first["b = 2"]
    assert edited["@cuda.jit"] == first["@cuda.jit"]
    added = ids("# %%\nz = 0", "# %%\na = 1", STUB, "# %%\nb = 22", "# %%\nc = 3")
    assert {k: v for k, v in added.items() if k != "z = 0"} == edited


def test_equal_cells_have_different_ids(folder):
    learner, _ = build.make_forms(write(folder, "# %%\na = 1", "# %%\na = 1"))
    assert learner.cells[0].id != learner.cells[1].id


LONG = "\n".join(f"a{n} = {n}" for n in range(13))
LONG_KERNEL = "@cuda.jit\ndef kernel(x):\n" + "\n".join(f"    x[{n}] = {n}" for n in range(34))


@pytest.mark.parametrize(
    "cell, says",
    [
        (f"# %%\n{LONG}", "longer than 12 lines"),
        (f"# %%\n{LONG_KERNEL}", "kernel is longer than 35"),
        ('# %% tags=["vary"]\n1', "unknown tag 'vary'"),
        ('# %% exercises="relu"\n1', "unknown option 'exercises'"),
        ('# %% exercise="relu"\n1', "must define relu once"),
        (STUB.replace("TODO", "0"), "must have a TODO"),
    ],
    ids=["cell", "kernel", "tag", "option", "definition", "no todo"],
)
def test_rules_for_sources(folder, cell, says):
    with pytest.raises(build.BuildError, match=says):
        build.make_forms(write(folder, cell))


def test_kernels_are_not_counted_as_lines_of_the_cell(folder):
    kernel = "\n".join(LONG_KERNEL.split("\n")[:30])
    build.make_forms(write(folder, f"# %%\n{kernel}\n\n\nx = 1"))


def stream(text, name="stdout"):
    return nbformat.v4.new_output("stream", text=text, name=name)


def picture(**metadata):
    data = {"image/png": "aGVsbG8=", "text/plain": "A picture"}
    return nbformat.v4.new_output("display_data", data=data, metadata=metadata)


def html(text):
    return nbformat.v4.new_output("display_data", data={"text/html": text})


@pytest.mark.parametrize(
    "output, says",
    [
        (stream("see /mnt/ada/course/x.py"), "a path"),
        (stream("see D:\\ada\\course"), "a path"),
        (stream(f"in {ROOT}"), "a path"),
        (stream("<object at 0x7f1483f9b010>"), "a memory address"),
        (html("<b>ipykernel_12/34.py</b>"), "a path"),
        (stream("careful", "stderr"), "a warning"),
        (nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[]), "an error"),
        (picture(), "no description"),
        (None, "output is missing"),
    ],
    ids=["unix", "windows", "root", "address", "html", "stderr", "error", "alt", "missing"],
)
def test_rules_for_outputs(output, says):
    cell = nbformat.v4.new_code_cell("print(1)", execution_count=1)
    cell.outputs = [output] if output else []
    notebook = nbformat.v4.new_notebook(cells=[cell])
    with pytest.raises(build.BuildError, match=says):
        build.check_outputs(Path("small"), notebook)


def test_good_outputs_pass():
    cell = nbformat.v4.new_code_cell("print(1)", execution_count=1)
    cell.outputs = [
        stream("1/2 of 3/4, 10 GB/s, x[0] // y, n / tmp, 0x1f"),
        picture(**{"image/png": {"alt": "A picture"}}),
        html("<table><tr><td>relu</td></tr></table>"),
    ]
    build.check_outputs(Path("small"), nbformat.v4.new_notebook(cells=[cell]))


def test_the_machines_name_is_found(monkeypatch):
    monkeypatch.setattr(build.socket, "gethostname", lambda: "difference-engine")
    cell = nbformat.v4.new_code_cell(
        "print(1)", execution_count=1, outputs=[stream("on difference-engine")]
    )
    with pytest.raises(build.BuildError, match="machine's name"):
        build.check_outputs(Path("small"), nbformat.v4.new_notebook(cells=[cell]))


def test_build_runs_and_stays_in_step(folder):
    source = write(
        folder,
        "# %%\nimport numpy as np\n\nfrom course_lib import cuda\n"
        "from course_lib.teach import TODO, check, progress",
        STUB,
        "# %%\nprogress()",
        '# %% tags=["varies"]\nimport time\n\nprint(time.time())',
        "# %%\nfrom course_lib import bench\n\n"
        'shown = bench.find(bench.load_records(), name="lesson_09.dx")',
    )
    with pytest.raises(build.BuildError, match="is missing"):
        build.in_step(source)
    build.build(source)
    build.in_step(source)
    solved = read(build.solved_path(source))
    assert solved.cells[1].outputs[0].text.startswith("✓ relu")
    assert "✓ solved" in solved.cells[2].outputs[0].data["text/html"]
    assert solved.cells[3].outputs == []
    assert list(solved.metadata["records"]) == ['{"name": "lesson_09.dx"}']
    assert build.outdated(solved) == []
    learner = read(build.learner_path(source))
    assert all(cell.outputs == [] for cell in learner.cells)
    assert "version" not in learner.metadata.language_info

    source.write_text(source.read_text() + "\n# %%\nprint(2)\n")
    with pytest.raises(build.BuildError, match="out of step"):
        build.in_step(source)


def test_a_notebook_is_outdated_when_its_records_change(tmp_path, monkeypatch):
    def save(**speeds):
        records = [dict(name=n, dtype="float32", shape=None, gbps=s) for n, s in speeds.items()]
        facts = {"name": "NVIDIA Test 9"}
        for name in speeds:
            (tmp_path / "nvidia-test-9" / f"{name}.json").unlink(missing_ok=True)
        bench.save_records(records, facts=facts, folder=tmp_path)

    save(relu=20, swish=10)
    monkeypatch.setattr(bench, "RESULTS_FOLDER", tmp_path)
    log = tmp_path / "reads.jsonl"
    with mock.patch.dict(os.environ, COURSE_LIB_READS=str(log)):
        records = bench.load_records("NVIDIA Test 9")
        assert len(bench.find(records, name="relu", dtype="float32")) == 1
        assert len(bench.find(records, name="gelu*")) == 0
    notebook = nbformat.v4.new_notebook(metadata={"records": build._reads(log)})
    assert build.outdated(notebook) == []
    save(swish=11)  # the notebook does not show it
    assert build.outdated(notebook) == []
    save(gelu_tanh=5)  # it had looked for one, and would find one now
    assert build.outdated(notebook) == ['{"name": "gelu*"}']
    save(relu=21)
    assert '{"dtype": "float32", "name": "relu"}' in build.outdated(notebook)
    with pytest.raises(build.BuildError, match="build it again"):
        build.outdated(nbformat.v4.new_notebook())


def test_build_refuses_what_differs_between_runs(folder):
    source = write(folder, "# %%\nimport os\n\nprint(os.getpid())")
    with pytest.raises(build.BuildError, match="two runs differ"):
        build.build(source)
    assert not build.learner_path(source).exists()


def test_failed_check_is_short_in_jupyter(folder):
    wrong = STUB.replace("TODO", "x[i]").split("\n", 1)[1]
    setup = "from course_lib import cuda\nfrom course_lib.teach import check"
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(setup), nbformat.v4.new_code_cell(wrong)]
    )
    with pytest.raises(build.BuildError) as caught:
        build.run(notebook)
    shown = str(caught.value).split("------------------\n")[-1]
    assert "CheckFailed relu: " in shown
    assert len(shown.splitlines()) < 14 and "Traceback" not in shown
    assert "ipykernel" not in shown and str(ROOT) not in shown
    assert "line 4, `y[i] = x[i]`" in shown, shown
