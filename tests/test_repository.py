"""What is in the repository, and what must not be."""

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Traces of one machine: its folders, and the addresses its packages came from. Each pattern is
# spelt so that it does not match itself.
MACHINE = re.compile(
    r"/wor[k]/|/tm[p]/|/roo[t]/|/hom[e]/|/User[s]/|[C]:\\\\User|python[h]osted|py[p]i\.org"
    r"|registry\.np[m]|de[b]\.debian|/\.librar[y]|/far[m]"
)
OPEN_ENDS = re.compile(r"(#|%|//)\s*(TOD[O]|FIXM[E]|XX[X])\b")
REAL_DATA = re.compile(r"shared/dat[a]")
ONLY_CI_NAMES_REAL_DATA = {".ci/run"}


def tracked():
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    return [name for name in names.decode().split("\0") if name and (ROOT / name).is_file()]


def lines_that_match(pattern, allowed=()):
    for name in tracked():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # a picture
        if name not in allowed:
            for number, line in enumerate(text.splitlines(), 1):
                if found := pattern.search(line):
                    yield f"{name}:{number}: {found[0]}"


def test_no_file_tells_whose_machine_it_was_made_on():
    assert list(lines_that_match(MACHINE)) == []


def test_no_open_ends():
    assert list(lines_that_match(OPEN_ENDS)) == []


def test_only_continuous_integration_knows_where_real_data_lies():
    assert list(lines_that_match(REAL_DATA, ONLY_CI_NAMES_REAL_DATA)) == []


def test_patterns_match_what_they_are_for():
    assert MACHINE.search("open('" + "/ho" + "me/ada/x')") and not MACHINE.search("notebooks/src")
    assert OPEN_ENDS.search("x = 1  # " + "TO" + "DO: y") and not OPEN_ENDS.search("return TODO")


def test_no_large_files():
    assert [name for name in tracked() if (ROOT / name).stat().st_size > 2 * 2**20] == []


def test_no_lock_file_and_no_data():
    names = tracked()
    assert "uv.lock" not in names
    data = {name for name in names if name.startswith("data/")} - {"data/README.md"}
    assert all(re.fullmatch(r"data/results/[\w-]+/\w+\.json", name) for name in data)


def test_continuous_integration_runs_what_everybody_runs():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.splitlines()[-1] == "make test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_workflows_run_the_same_and_publish_what_is_released():
    yaml = pytest.importorskip("yaml")
    test, publish = (
        yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text(encoding="utf-8"))
        for name in ("test", "publish")
    )
    assert test["jobs"]["test"]["steps"][-1] == {"run": ".ci/run"}
    job = publish["jobs"]["publish"]
    assert publish[True] == {"release": {"types": ["published"]}}  # YAML reads `on` as true
    assert job["permissions"] == {"id-token": "write"} and "publish" in job["steps"][-1]["uses"]


def test_the_steps_of_the_dockerfile_install_and_start_the_lessons(monkeypatch):
    from course_lib import cli, lab

    text = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
    steps = [line.split(" ", 1) for line in text.splitlines() if line and line[0] != "#"]
    copied = {path for name, text in steps if name == "COPY" for path in text.split()[:-1]}
    # Its commands run as a script, with functions in place of what needs a network, or a root.
    script = ["set -e"] + [f'{n}() {{ echo "{n} $@"; }}' for n in ("apt-get", "python", "rm")]
    script += [text for name, text in steps if name in ("ARG", "RUN")]
    done = subprocess.run(["bash", "-c", "\n".join(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "python -m pip install --no-cache-dir .[lessons]"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    parts = project["tool"]["hatch"]["build"]["targets"]["wheel"]["only-include"]
    assert {"pyproject.toml", "README.md", "LICENSE", *parts} == copied
    assert all((ROOT / path).exists() for path in copied)
    monkeypatch.setattr(lab, "run", lambda *given, **options: (*given, options))
    folder, options = cli.main(json.loads(steps[-1][1])[3:])
    assert str(folder) == "/lessons" and options == dict(browser=False, port=8888, ip="0.0.0.0")
    container = ROOT / ".devcontainer"
    build = json.loads((container / "devcontainer.json").read_text(encoding="utf-8"))["build"]
    assert (container / build["dockerfile"]).resolve() == ROOT / "Dockerfile"


def test_versions_agree():
    import course_lib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert course_lib.__version__ == project["version"]
    assert re.search(rf"^## {re.escape(project['version'])}\b", changes, re.MULTILINE)
