"""What is in the repository, and what must not be."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from course_lib import cli, results_table

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")

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
    assert all(re.fullmatch(r"data/(results/[\w.-]+\.json|[\w-]+\.png)", name) for name in data)


def test_continuous_integration_runs_what_everybody_runs():
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert script.splitlines()[-1] == "make test"
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


def test_versions_agree():
    import course_lib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert course_lib.__version__ == project["version"]
    assert re.search(rf"^## {re.escape(project['version'])}\b", changes, re.MULTILINE)


# ----------------------------------------------------------------------------- README


def test_readme_is_in_step_with_the_measurements():
    assert cli.main(["readme", "--check"]) == 0


def test_links_lead_somewhere():
    for document in ("README.md", "CONTRIBUTING.md", "data/README.md"):
        text = (ROOT / document).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            if "://" not in target:
                assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"


def test_readme_names_every_lesson_by_its_title():
    lessons = sorted((ROOT / "notebooks").glob("[0-9]*.ipynb"))
    assert lessons
    for lesson in lessons:
        cells = json.loads(lesson.read_text(encoding="utf-8"))["cells"]
        title = re.match(r"# (?:\d+ · )?(.*)", "".join(cells[0]["source"]))[1]
        assert f"[{title}](notebooks/{lesson.name})" in README


EXAMPLES = re.findall(r"```python\n(.*?)```\n+```text\n(.*?)```", README, flags=re.DOTALL)


def test_readme_shows_what_each_of_its_examples_prints():
    assert len(EXAMPLES) == README.count("```python") >= 2


@pytest.mark.parametrize(("code", "shown"), EXAMPLES, ids=["kernels", "modules"])
def test_readme_example_runs_as_shown(code, shown, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == shown


# ------------------------------------------------------------------- the results table

def record(name, shape, dtype, date, **microseconds):
    n_bytes = 8
    for size in shape:
        n_bytes *= size
    rows = [
        {
            "label": label,
            "kind": "peer" if label in ("eager", "compiled") else "ours",
            "microseconds": time,
            "gbps": n_bytes / time / 1e3,
            "percent_of_copy": 3000 / time,
        }
        for label, time in microseconds.items()
    ]
    held = dict(name=name, shape=shape, dtype=dtype, date=date, rows=rows)
    return held if name.endswith("host") else held | dict(bytes=n_bytes, copy_gbps=4200.0)


RECORDING = {
    "device": {"name": "NVIDIA H200"},
    "records": [
        record(
            "relu.forward", [4096, 4096], "float32", "2026-11-21",
            naive=60.0, vectorised=32.04, eager=33.5, compiled=35.0,
        ),
        record(
            "relu.forward", [128, 200], "float32", "2026-11-21",
            naive=2.0, vectorised=2.2, eager=2.5, compiled=2.0,
        ),
        record("relu.backward", [1000003], "bfloat16", "2026-11-23", naive=8.0, eager=8.4),
        record("lesson.order", [64, 64], "float32", "2026-11-25", rows=1.0, columns=9.0),
        record("launch.host", [128, 200], "float32", "2026-11-25", numba=50.04, eager=6.0),
    ],
}


def test_the_table_sets_the_top_rung_beside_the_fastest_peer():
    text = results_table.render([RECORDING])
    assert "**NVIDIA H200**, measured 2026-11-21 to 2026-11-23" in text
    forward, backward, _, host = text.splitlines()[-4:]
    assert forward == (
        "| `relu.forward` | float32 | 4,096 × 4,096 | vectorised | 4,189 | 94 "
        "| eager | 0.96 | 0.96 to 1.10 |"
    )
    assert backward == (
        "| `relu.backward` | bfloat16 | 1,000,003 | naive | 1,000 | 375 "
        "| eager | 0.95 | 0.95 to 0.95 |"
    )
    assert host == "`launch.host`, on the host's clock: numba 50.0 µs, eager 6.0 µs."


def test_the_table_replaces_only_what_stands_between_the_marks():
    text = f"before\n{cli.RESULTS_BEGIN}\nold\n{cli.RESULTS_END}\nafter\n"
    once = cli.with_results(text, [RECORDING])
    assert once.startswith("before\n<!--") and once.endswith("-->\nafter\n") and "old" not in once
    assert cli.with_results(once, [RECORDING]) == once
    assert "relu" not in cli.with_results(once, [])
