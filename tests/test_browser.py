"""A learner's first minutes: `make lab`, a real browser, a mistake, and the first lesson run to its
end; and those of one who has installed the wheel.

Lessons run in a copy of the course, so that nothing here changes a tracked file. Set
COURSE_SCREENSHOTS to a folder to keep the pictures this test takes.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from installed import in_site

ROOT = Path(__file__).resolve().parent.parent
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
# Everything a browser would otherwise ask the network for; as root it needs --no-sandbox.
BROWSER_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
SECONDS = 1000  # Playwright counts in milliseconds

pytestmark = pytest.mark.timeout(420)

#: The first exercise of lesson 1, typed by a learner: past the end first, and then as it should be.
ANSWER = """@cuda.jit
def relu(x, y):
    i = cuda.grid(1)
    if i {} x.size:
        y[i] = max(x[i], np.float32(0))


check("relu", relu)"""
CELL = """async (index) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    await notebook.scrollToItem(index, 'smart');
    return notebook.widgets[index].node;
}"""
HAS_RUN = """([index, before]) => {
    const { model } = window.jupyterapp.shell.currentWidget.content.widgets[index];
    return model.executionState === 'idle' && ![before, null].includes(model.executionCount);
}"""
READY = "async () => await window.jupyterapp.shell.currentWidget.context.sessionContext.ready"
RUN_ALL = """async () => {
    const app = window.jupyterapp;
    await app.shell.currentWidget.context.sessionContext.ready;
    await app.commands.execute('notebook:run-all-cells');
}"""
OUTPUTS = """() => window.jupyterapp.shell.currentWidget.content.widgets.map((cell, index) => ({
    index,
    type: cell.model.type,
    source: cell.model.sharedModel.getSource(),
    count: cell.model.type === 'code' ? cell.model.executionCount : null,
    outputs: cell.model.type === 'code' ? cell.model.outputs.toJSON() : [],
}))"""
SHOW_PICTURES = """async (index) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    await notebook.scrollToItem(index, 'smart');
    const images = [...notebook.widgets[index].node.querySelectorAll('.jp-OutputArea img')];
    await Promise.all(images.map(image => image.decode()));
    images.forEach(image => image.scrollIntoView());
    return images.map(image => ({
        width: image.naturalWidth,
        shown: image.getBoundingClientRect().width * image.getBoundingClientRect().height,
    }));
}"""


@pytest.fixture(scope="module")
def browser_path():
    found = [path for path in map(shutil.which, BROWSERS) if path]
    if not found:
        pytest.skip(f"no browser here: none of {', '.join(BROWSERS)} is installed")
    return found[0]


@pytest.fixture(scope="module")
def screenshots(tmp_path_factory):
    folder = os.environ.get("COURSE_SCREENSHOTS")
    folder = Path(folder) if folder else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def lab(browser_path, tmp_path_factory):
    """The address that `make lab` prints, in a copy of the course, for a user new to Jupyter."""
    pytest.importorskip("jupyterlab")
    course = tmp_path_factory.mktemp("course")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy2(ROOT / name, course / name)
    for name in (".jupyter", "course_lib", "data", "notebooks"):
        ignored = shutil.ignore_patterns("__pycache__", ".ipynb_checkpoints", "workspaces")
        shutil.copytree(ROOT / name, course / name, ignore=ignored)
    home = tmp_path_factory.mktemp("home")
    new_user = {f"JUPYTER_{kind}_DIR": str(home / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    log = home / "log"
    # This test runs where the course is installed, wherever that is: nothing is to be set up.
    (course / ".venv").symlink_to(sys.prefix)
    command = [
        "make",
        "--old-file=.venv/.installed",
        "lab",
        "LAB_ARGS=--no-browser --port=0 --expose-app-in-browser",
    ]
    paths = os.pathsep.join([str(course), os.environ["PYTHONPATH"]])
    environment = {**os.environ, **new_user, "PYTHONPATH": paths, "IPYTHONDIR": str(home)}
    environment |= {"COURSE_LIB_PROGRESS": str(home / "progress.json")}
    with _running(command, course, environment, log) as address:
        yield address


@contextlib.contextmanager
def _running(command, folder, environment, log):
    """The address that a command prints, which is ended afterwards."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield _address(process, log)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _address(process, log):
    deadline = time.monotonic() + 250
    while time.monotonic() < deadline and process.poll() is None:
        found = re.search(r"http://127\.0\.0\.1:\d+/\S*\?token=\w+", log.read_text())
        if found:
            return found[0]
        time.sleep(0.1)
    raise AssertionError(f"no address was printed:\n{log.read_text()}")


@pytest.fixture
def page(browser_path, tmp_path):
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as tool:
        browser = tool.chromium.launch_persistent_context(
            tmp_path / "user",
            executable_path=browser_path,
            headless=True,
            args=BROWSER_ARGUMENTS,
            viewport={"width": 1400, "height": 1000},
        )
        yield browser.pages[0]
        browser.close()


def open_notebook(page, address):
    page.goto(address, timeout=250 * SECONDS)
    # Notebooks left open before come back first, so it is this one that is waited for.
    path = re.search(r"/lab/tree/([^?]*)", address)[1]
    page.wait_for_function(
        "path => window.jupyterapp?.shell.currentWidget?.context?.path === path",
        arg=path,
        timeout=250 * SECONDS,
    )
    page.locator(".jp-NotebookPanel:visible .jp-Cell").first.wait_for(timeout=250 * SECONDS)


def test_make_lab_opens_the_first_notebook_and_nothing_else(lab, page, screenshots):
    assert "/lab/tree/notebooks/00_start_here.ipynb?token=" in lab
    open_notebook(page, lab)
    page.wait_for_timeout(3 * SECONDS)  # news and updates would be offered only after a while
    page.screenshot(path=screenshots / "first.png")
    assert page.locator(".jp-Dialog").count() == 0
    assert page.locator(".Toastify__toast").count() == 0
    listed = page.locator(".jp-DirListing-itemName").all_inner_texts()
    assert "00_start_here.ipynb" in listed and "solutions" in listed
    assert "src" not in listed and "build.py" not in listed


def type_and_run(page, index, text=None):
    """Replace the source of a cell by `text` and press Shift+Enter; the texts then shown below."""
    cell = page.evaluate_handle(CELL, index).as_element()
    cell.query_selector(".cm-content").click()
    if text is not None:
        page.keyboard.press("Control+A")
        page.keyboard.insert_text(text)
    before = page.evaluate(OUTPUTS)[index]["count"]
    page.keyboard.press("Shift+Enter")
    page.wait_for_function(HAS_RUN, arg=[index, before], timeout=250 * SECONDS)
    page.evaluate(CELL, index)
    return [output.inner_text() for output in cell.query_selector_all(".jp-OutputArea-output")]


NEGATIVE = """from course_lib import cuda
import numpy as np
from course_lib.teach import check, progress


@cuda.jit
def negative(x, y):
    col, row = cuda.grid(2)
    y[row, col] = {}


check("negative", negative)"""


def test_the_wheel_opens_the_lessons_in_a_folder_and_keeps_progress(site, page, tmp_path):
    home = tmp_path / "a home"
    (home / "CONFIG").mkdir(parents=True)
    settings = home / "CONFIG" / "jupyter_lab_config.py"
    settings.write_text("c.LabApp.expose_app_in_browser = True\n")
    kinds = {f"JUPYTER_{kind}_DIR": str(home / kind) for kind in ("CONFIG", "DATA", "RUNTIME")}
    environment = in_site(site, home / "data", IPYTHONDIR=str(home / "ipython"), **kinds)
    command = [sys.executable, "-m", "course_lib", "lab", "my lessons", "--no-browser", "--port=0"]
    with _running(command, home, environment, home / "log") as address:
        assert "/lab/tree/00_start_here.ipynb?token=" in address
        open_notebook(page, address)
        page.evaluate(READY)
        code = [c["index"] for c in page.evaluate(OUTPUTS) if c["type"] == "code"]
        (wrong,) = type_and_run(page, code[0], NEGATIVE.format("x[row, col] - 1"))
        assert wrong.startswith("CheckFailed negative: ") and "Traceback" not in wrong
        (right,) = type_and_run(page, code[0], NEGATIVE.format("np.float32(1) - x[row, col]"))
        assert right.startswith("✓ negative — ")
        page.evaluate("""async () => await
            window.jupyterapp.shell.currentWidget.context.sessionContext.restartKernel()""")
        (shown,) = type_and_run(
            page, code[1], "from course_lib.teach import progress\nprogress()"
        )
        assert "✓ solved" in shown and re.search(r"\b1 of \d+ exercises solved", shown)
    assert (home / "data" / "course_lib" / "progress.json").is_file()


def test_a_wrong_answer_and_then_the_right_one(lab, page, screenshots):
    open_notebook(page, lab.replace("00_start_here", "01_threads_and_memory"))
    page.evaluate(READY)
    sources = [cell["source"] for cell in page.evaluate(OUTPUTS)]
    (imports,) = (i for i, text in enumerate(sources) if "from course_lib.teach import" in text)
    (exercise,) = (i for i, text in enumerate(sources) if 'check("relu", relu)' in text)
    assert type_and_run(page, imports) == []

    (wrong,) = type_and_run(page, exercise, ANSWER.format("<="))
    page.screenshot(path=screenshots / "wrong_answer.png")
    assert wrong.startswith("CheckFailed relu: out-of-bounds in line 5, `y[i] = max(x[i], ")
    assert "reads `x[1]` on line 5, but `x` has 1 element" in wrong and "Traceback" not in wrong

    (right,) = type_and_run(page, exercise, ANSWER.format("<"))
    page.screenshot(path=screenshots / "right_answer.png")
    assert right.startswith("✓ relu — ")


def test_the_first_lesson_runs_from_end_to_end(lab, page, screenshots):
    open_notebook(page, lab.replace("00_start_here", "01_threads_and_memory"))
    page.set_default_timeout(240 * SECONDS)
    page.evaluate(RUN_ALL)
    cells = page.evaluate(OUTPUTS)
    code = [cell for cell in cells if cell["type"] == "code" and cell["source"].strip()]
    assert code and all(cell["count"] is not None for cell in code)
    errors = [
        f"{output['ename']}: {output['evalue']} in\n{cell['source']}"
        for cell in code
        for output in cell["outputs"]
        if output["output_type"] == "error"
    ]
    assert not errors, "\n\n".join(errors)

    page.screenshot(path=screenshots / "lesson.png")
    pictures = []
    for cell in code:
        images = [output for output in cell["outputs"] if "image/png" in output.get("data", {})]
        for image in images:
            assert image["metadata"]["image/png"]["alt"], "a picture without a description"
        if images:
            shown = page.evaluate(SHOW_PICTURES, cell["index"])
            page.screenshot(path=screenshots / f"lesson_cell_{cell['index']:02}.png")
            assert shown, f"no picture is shown below\n{cell['source']}"
            pictures += shown
    assert pictures, "the lesson shows no picture"
    assert all(p["width"] > 100 and p["shown"] > 100 * 100 for p in pictures), pictures
