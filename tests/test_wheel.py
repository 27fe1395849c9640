"""The wheel: what is in it, what runs from it, and the lessons in a user's folder."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from installed import in_site

from course_lib import bench, cli, lab
from course_lib.runtime.host import folders

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = ("torch", "numba_cuda", "matplotlib", "jupyterlab", "tqdm", "yaml", "array_api_compat")

#: Beside what it says, no line of it fails.
BASE = f"""
import os, sys
sys.modules |= dict.fromkeys({EXTRAS!r})
import numpy as np
from course_lib import bench, cli, cuda, reference, simulator
from course_lib.kernels import softmax
from course_lib.runtime.host import folders

@cuda.jit
def shift(x, y):
    s, t = cuda.shared.array(64, np.float32), cuda.threadIdx.x
    s[t] = x[t]
    y[t] = s[63 - t]

x = np.arange(64, dtype=np.float32)
with simulator.sanitize() as report:
    shift[1, 64](x, np.empty_like(x))
with simulator.trace() as trace:
    shift[1, 64](x, np.empty_like(x))
assert "race" in str(report.findings[0]) and trace.sites
y = softmax.softmax.forward(x[None])
assert np.allclose(y, reference.softmax(x[None]))
assert len(bench.load_records()["records"]) > 1000
for arguments in (["doctor"], ["compare", "layer_norm", "--direction", "all"]):
    assert cli.main(arguments) == 0
assert cli.main(["train", "leaves"]) == cli.main(["readme"]) == cli.main(["lab", "mine"]) == 1
assert folders.clone() is None
print(folders.written("data"))
"""


def test_the_wheel_has_lessons_and_records_and_no_sources_of_lessons(site):
    resources = site / "course_lib" / "resources"
    for path in ("notebooks/*.ipynb", "notebooks/solutions/*.ipynb", "data/results/*/*.json"):
        there = {file.relative_to(resources) for file in resources.glob(path)}
        assert there == {file.relative_to(ROOT) for file in ROOT.glob(path)} != set()
    assert [path.name for path in resources.rglob("*.py")] == ["jupyter_lab_config.py"]
    names = {path.name.partition("-")[0] for path in site.iterdir()}
    assert names == {"course_lib", "pytest_cuda_sanitize.py"}


def test_the_base_runs_without_a_clone_or_an_extra(site, tmp_path):
    work = tmp_path / "a folder"
    work.mkdir()
    (work / "base.py").write_text(BASE, encoding="utf-8")
    told = dict(capture_output=True, text=True, timeout=250)
    environment = in_site(site, tmp_path / "data")
    done = subprocess.run([sys.executable, "base.py"], cwd=work, env=environment, **told)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(tmp_path / "data" / "course_lib" / "data")
    assert "PyTorch" not in done.stdout.partition("layer_norm forward")[2]
    said = done.stderr.splitlines()
    assert "is not installed. Add it with:  " in said[0] and said[0].endswith("'course_lib[torch]'")
    assert "jupyterlab is not installed" in said[-1] and (work / "mine" / lab.FIRST).is_file()


# ------------------------------------------------------------------ lessons in a folder


def test_lessons_are_put_once_and_updated_unless_they_were_changed(tmp_path, monkeypatch):
    folder = tmp_path / "my lessons"
    new, beside = lab.put(folder)
    assert beside == [] and {lab.FIRST, "glossary.md", f"solutions/{lab.FIRST}"} <= set(new)
    assert lab.put(folder) == ([], [])
    names = sorted(path.name for path in folder.iterdir() if path.suffix == ".ipynb")
    (folder / names[0]).write_text("mine")
    (folder / names[1]).unlink()
    assert lab.put(folder) == ([names[1]], [])  # there is no news of what is the user's

    edition = tmp_path / "edition"
    edition.mkdir()
    for name, text in zip(names, "abc", strict=False):
        (edition / name).write_text(text)
    monkeypatch.setattr(lab, "lessons", lambda: {name: edition / name for name in names[:3]})
    update = names[0].replace(".ipynb", ".update.ipynb")
    assert lab.put(folder) == (names[1:3], [update])
    assert (folder / names[0]).read_text() == "mine" and (folder / update).read_text() == "a"
    assert lab.put(folder) == ([], [])
    (folder / update).write_text("mine, too")
    (edition / names[0]).write_text("d")
    assert lab.put(folder) == ([], [names[0].replace(".ipynb", ".update-2.ipynb")])
    assert (folder / update).read_text() == "mine, too"


@pytest.mark.parametrize("noted", ["{", "[1]"])
def test_what_lies_there_is_the_users_where_nobody_knows(noted, tmp_path):
    (tmp_path / lab.FIRST).write_text("mine")
    (tmp_path / "glossary.md").mkdir()
    (tmp_path / lab.PUT).write_text(noted)
    assert lab.put(tmp_path)[1] == ["00_start_here.update.ipynb", "glossary.update.md"]
    assert (tmp_path / lab.FIRST).read_text() == "mine" and lab.put(tmp_path) == ([], [])


def test_an_interrupted_copy_leaves_no_half_a_file(tmp_path, monkeypatch, capsys):
    def stop(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(lab.os, "replace", stop)
        lab.put(tmp_path)
    assert [*tmp_path.iterdir()] == []
    assert len(lab.put(tmp_path)[0]) == len(lab.lessons())
    assert cli.main(["lab", str(tmp_path / lab.FIRST)]) == 1  # which is no folder
    assert f"no lessons can be put into {tmp_path / lab.FIRST}: " in capsys.readouterr().err


def test_jupyterlab_opens_the_first_lesson_in_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "theirs")
    monkeypatch.setattr(lab.os, "execve", lambda *call: call)
    monkeypatch.setattr(lab.importlib.util, "find_spec", lambda name: name)
    program, arguments, environment = cli.main(["lab", str(tmp_path), "--no-browser", "--port=9"])
    assert arguments[:4] == [sys.executable, "-P", "-m", "jupyterlab"]  # no module from this folder
    assert program == sys.executable and arguments[-2:] == ["--no-browser", "--port=9"]
    assert f"--ServerApp.root_dir={tmp_path}" in arguments
    assert f"--LabApp.default_url=/lab/tree/{lab.FIRST}" in arguments
    assert environment["HOME"] and environment["JUPYTER_CONFIG_PATH"].endswith(":theirs")


@pytest.mark.parametrize("port", ["65536", "99999", "-1", "http"])
def test_a_port_that_there_is_not_is_refused(port, capsys, monkeypatch):
    monkeypatch.setattr(lab.os, "execve", None)  # would take the place of these tests
    with pytest.raises(SystemExit):
        cli.main(["lab", f"--port={port}"])
    assert f"a number from 0 to 65535; not '{port}'" in capsys.readouterr().err


# ------------------------------------------------------------------ what is written


def test_an_installed_course_keeps_its_records_with_the_users_data(tmp_path, monkeypatch):
    assert folders.clone() == ROOT and folders.written("data") == ROOT / "data"
    held = bench.recordings()[0]
    name, record = held["device"]["name"], held["records"][0]
    monkeypatch.setattr(bench, "OWN_RESULTS", tmp_path)
    bench.save_records([record | {"date": "later"}], facts=held["device"])
    assert [path.name for path in tmp_path.iterdir()] == [bench.results_path(name).name]
    found = bench.load_records(name)["records"]
    assert len(found) == len(held["records"]) and found[0]["date"] == "later"
    monkeypatch.setattr(folders, "RESOURCES", tmp_path)
    monkeypatch.delenv("COURSE_LIB_COMMIT", raising=False)
    assert re.fullmatch(r"version [\d.]+", bench.commit())
