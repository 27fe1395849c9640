"""`python -m course_lib sanitize | trace | lint` on scripts that know nothing of the course."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest

from course_lib import simulator
from course_lib.scripts import formats
from course_lib.scripts.finding import Found, LaunchPlace, joined
from course_lib.scripts.watching import ScriptLint
from course_lib.simulator.observe.real import observing_with

ROOT = Path(__file__).resolve().parent.parent
PROGRAMS = ROOT / "tests" / "public_scripts"
#: program -> (what is there, what is in its place, the kind, what is on the line that is named)
PLANTED = {
    "matmul.py": ("cuda.syncthreads()  # before the next tile", "pass", "race", "total +="),
    "reduction.py": ("cuda.syncthreads()  # after each round", "pass", "race", "kept[tid] +="),
    "heat.py": ("grid.sync()  # all", "pass  # all", "race-between-blocks", "new[i] ="),
    "histogram.ipynb": ("cuda.atomic.add(bins, place, 1)", "bins[place] += 1",
                        "race-between-blocks", "bins[place] +="),
    "convolution.ipynb": ("cuda.syncthreads()  # the", "pass  # the", "race", "total +="),
    "zero_suppression.py": ("suppress[3, 32](wave, np.float32(1), 5, out)",
                            "suppress[3, 32](wave, np.float32(1), 5, wave)",
                            "race-between-blocks", "out[i] ="),
}  # fmt: skip
#: Runs every program as `__main__`; a planted race may make its own check fail.
DRIVER = """
import sys
from course_lib.scripts import running
for path in sys.argv[1:]:
    try:
        running.script(path, []).run()
    except AssertionError:
        print("wrong:", path)
"""
KERNEL = """
import numpy as np
from numba import cuda, float32

@cuda.jit
def turn(x):
    s = cuda.shared.array(64, float32)
    t = cuda.threadIdx.x
    s[t] = x[t]
    BARRIER
    x[t] = s[63 - t]

def launch(n=64):
    turn[1, 64](np.ones(n, np.float32))
"""
RACE, CLEAN = KERNEL.replace("BARRIER", "pass"), KERNEL.replace("BARRIER", "cuda.syncthreads()")


def started(command, *arguments, cwd, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COURSE_LIB_SIMULATOR": "0"}
    return subprocess.Popen(
        [sys.executable, "-m", "course_lib", command, *map(str, arguments)], cwd=cwd, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment, **options
    )  # fmt: skip


def ran(*arguments, **options):
    """(exit status, output, errors) of a command."""
    process = started(*arguments, **options)
    out, error = process.communicate(timeout=250)
    return process.returncode, out, error


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """{command: its JSON about the twelve programs; and in "planted" with six races beside}."""
    folder = tmp_path_factory.mktemp("with a space")
    names = sorted(path for path in PROGRAMS.iterdir() if path.suffix in (".py", ".ipynb"))
    planted = []
    for name, (old, new, *_) in PLANTED.items():
        text = (PROGRAMS / name).read_text(encoding="utf-8")
        assert text.count(old) == 1, name
        (folder / name).write_text(text.replace(old, new), encoding="utf-8")
        planted.append(folder / name)
    runs = {"sanitize": names, "trace": names, "lint": names, "planted": planted}
    processes = {
        name: started(name.replace("planted", "sanitize"), "--format", "json", "-c", DRIVER, *paths,
                      cwd=folder)
        for name, paths in runs.items()
    }  # fmt: skip
    said = {name: process.communicate(timeout=250)[0] for name, process in processes.items()}
    return {name: json.loads(text) for name, text in said.items()}


def test_twelve_public_programs_are_clean(programs):
    data = programs["sanitize"]
    assert (data["status"], data["checked"], len(data["launches"])) == (0, 12, 12), data
    assert not data["findings"] + data["unchecked"]


def test_six_planted_races_are_found_and_nothing_else(programs):
    found = {}
    for each in programs["planted"]["findings"]:
        name = re.sub(r"^<|, cell \d+>$", "", Path(each["filename"]).name)
        found.setdefault(name, set()).add((each["kind"], each["source"].partition("=")[0].strip()))
    wanted = {name: {(kind, source.removesuffix("=").strip())}
              for name, (_, _, kind, source) in PLANTED.items()}  # fmt: skip
    assert found == wanted


def test_a_trace_counts_every_program(programs):
    data = programs["trace"]
    assert (data["status"], data["checked"]) == (0, 12), data["unchecked"]
    sites = {(each["function"], each["source"]): each for each in data["sites"]}
    assert sites["add", "a[i]"]["sectors_per_request"] == pytest.approx(125 / 32, rel=0.02)
    assert sites["multiply", "left[tx, j]"]["bank_ways"] > 1
    assert len({each["function"] for each in data["sites"]}) == 13


def test_lint_finds_float64_and_nothing_that_is_not_there(programs):
    data = programs["lint"]
    found = {(each["launch"]["kernel"], each["kind"]) for each in data["findings"]}
    assert found == {
        ("draw", "float64-promotion"), ("estimate_pi", "float64-promotion"),
        ("average", "integer-width"), ("sessionize", "integer-width"),
    }  # fmt: skip
    assert data["checked"] == 12


def test_lint_leaves_the_kernel_of_a_reduction_alone():
    """It is the simulator's own; on a GPU numba has another."""
    watch = ScriptLint()
    with observing_with(watch):
        assert simulator.cuda.reduce(lambda a, b: a + b)(np.ones(4)) == 4
    assert watch.begun == 1 and not watch.findings() + watch.lost


def test_a_deadlock_is_told_at_the_launch(tmp_path):
    waits = "if t: cuda.syncthreads()\n    else: cuda.syncwarp(3)"
    text = KERNEL.replace("BARRIER", waits)
    (tmp_path / "main.py").write_text(text + "launch()", encoding="utf-8")
    status, out, _ = ran("trace", "main.py", cwd=tmp_path)
    assert status == 1 and re.match(r"main.py:\d+: deadlock", out), out


#: What is run -> (exit status, what is said)
ENDS = {
    "clean": (CLEAN + "launch()", 0, "no findings in 1 launch of 1 kernel"),
    "race": (RACE + "launch()", 1, "main.py:11: race: threads 32 and 31"),
    "outside": (CLEAN + "launch(63)", 1, "main.py:9: out-of-bounds"),
    "crash": (CLEAN + "launch()\n1 / 0", 3, "ZeroDivisionError"),
    "own status": ("raise SystemExit(7)", 3, "ended with exit status 7"),
    "at once": (RACE + "launch()\nimport os\nos._exit(0)", 1, "main.py:11: race"),
    "nothing": ("print('hello')", 4, "no kernel was launched"),
    "lacking": ("from numba import cuda\ncuda.compile_ptx(1, 2)", 4, "needs what the simulator"),
    "no source": (CLEAN + "exec('@cuda.jit\\ndef g(x):\\n x[0] = 1')\n"
                  "try: g[1, 1](np.ones(1))\nexcept Exception: pass", 4, "did not come to an end"),
    "a dict": (CLEAN.replace("BARRIER", "x[0] = {}[0]").replace("s[t] =", "s[t] = {1: 2}[1] +")
               + "launch()", 1, "main.py:9: not-compilable"),
    "too large": (CLEAN + "turn[1, 2048](np.ones(1))", 1, "main.py:15: launch-error"),
    "syntax": ("def f(:", 2, "cannot be read as a program"),
    "threads and tensors": (RACE + "import threading, torch\nthread = threading.Thread(target="
                            "turn[1, 64], args=[torch.ones(64)])\nthread.start()", 1, ":11: race"),
    "endless": ("import time\nwhile True: time.sleep(1)", 3, "did not end within 1 s"),
    "forked": (RACE + "import os\nif os.fork() == 0: launch()\nelse: os.wait()", 1,
               "launch 1 in process"),
    "a pool": (RACE + "import multiprocessing as mp\nwith mp.get_context('fork').Pool(2) as pool: "
               "pool.map(launch, [64] * 4)", 1, "in 4 launches of 1 kernel"),
    "spawned": (CLEAN + "import subprocess, sys\nlaunch()\nsubprocess.run([sys.executable, '-c', "
                "'0'])", 4, "were not looked at"),
}  # fmt: skip


def test_exit_statuses(tmp_path):
    def end(name):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "main.py").write_text(ENDS[name][0], encoding="utf-8")
        options = ["--timeout", "1"] if name == "endless" else []
        return ran("sanitize", *options, "main.py", cwd=folder)

    with ThreadPoolExecutor(2) as pool:
        for name, (status, out, error) in zip(ENDS, pool.map(end, ENDS), strict=True):
            _, wanted, words = ENDS[name]
            assert (name, status) == (name, wanted), out + error
            assert words in out + error, name
            assert "Traceback" not in error or name == "crash", error
            assert "scripts/" not in error, name


def test_arguments_belong_to_the_script(tmp_path):
    (tmp_path / "kernels.py").write_text(RACE, encoding="utf-8")
    code = "import kernels, sys; kernels.launch(); print(sys.argv)"
    status, out, error = ran(
        "sanitize", "--format", "github", "-c", code, "--order", "-x", cwd=tmp_path
    )
    assert status == 1 and "['-c', '--order', '-x']" in error
    assert out.startswith("::error file=kernels.py,line=11,title=race::threads ")
    assert ran("sanitize", "-m", "nowhere", cwd=tmp_path)[0] == 2
    assert ran("sanitize", "--kernel", "other", "-m", "kernels", cwd=tmp_path)[0] == 4


@pytest.mark.skipif(sys.platform == "win32", reason="there is no SIGINT to send")
def test_ctrl_c_tells_what_was_found(tmp_path):
    code = RACE + "launch()\nprint('up', flush=True)\nimport time\ntime.sleep(60)"
    process = started("sanitize", "-c", code, cwd=tmp_path, preexec_fn=lambda: signal.signal(
        signal.SIGINT, signal.default_int_handler))  # fmt: skip
    assert process.stdout.readline() == "up\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "<command line>:11: race" in out


def test_a_page_of_a_trace_needs_no_network(tmp_path):
    page = tmp_path / "trace.html"
    status, out, error = ran("trace", "--html", page, "-c", CLEAN + "launch()", cwd=tmp_path)
    text = page.read_text(encoding="utf-8")
    assert status == 0 and "x[t]" in out, error
    assert "2 requests, 4 sectors each; 256 bytes asked for, 256 moved" in text
    assert not re.search(r"https?:|src=|@import|url\(", text)
    assert text.count("<h2>") == 1 and text.count('title="lane 31: ') == 8


# ------------------------------------------------------------------ what is written


PLACE = LaunchPlace(3, "k", (4, 2, 1), (64, 1, 1), "/b/run.py", 9)
FOUND = Found("race", "error", "50% of `x[0]`,\r\nor: all", "a b,c:d.py", 7, "x[0] = 1", (5, 7),
              PLACE, 2)  # fmt: skip
CELL = Found("spill", "warning", "much", "<n b.ipynb, cell 3>", 2)
RESULT = formats.Result("sanitize", "s.py", 1, [FOUND, CELL], {"k": 3}, 2, unchecked=["lost"],
                        notes=["told"])  # fmt: skip


def test_workflow_commands_follow_the_grammar():
    lines = formats.written(RESULT, "github").splitlines()
    part = r"(?:[^%\r\n:,]|%25|%0D|%0A|%3A|%2C)"
    command = re.compile(rf"::(error|warning|notice)(?: (\w+={part}+(?:,\w+={part}+)*))?::(.*)")
    found = [command.fullmatch(line) for line in lines[:-1]]
    assert all(found) and [each[1] for each in found] == ["error", "warning", "warning", "notice"]
    assert found[0][2] == "file=a b%2Cc%3Ad.py,line=7,title=race"
    assert found[0][3].startswith("50%25 of `x[0]`,%0D%0Aor: all%0Alaunch 3: k, grid 4x2, ")
    assert found[1][2] == "file=n b.ipynb,title=spill" and found[1][3].startswith("cell 3, line 2")


def test_sarif_is_valid():
    schema = json.loads((ROOT / "tests" / "sarif_schema.json").read_text(encoding="utf-8"))
    data = json.loads(formats.written(RESULT, "sarif"))
    jsonschema.Draft4Validator(schema).validate(data)
    [run] = data["runs"]
    first, second = run["results"]
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "a%20b%2Cc%3Ad.py", "uriBaseId": "%SRCROOT%"}
    assert place["region"]["startLine"] == 7 and first["relatedLocations"]
    assert second["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "n%20b.ipynb"
    assert [rule["id"] for rule in run["tool"]["driver"]["rules"]] == ["race", "spill"]
    for broken in ({"level": "bad"}, {"message": "text"}, {"colour": 1}):
        with pytest.raises(jsonschema.ValidationError):
            run["results"][0] = first | broken
            jsonschema.Draft4Validator(schema).validate(data)


def test_findings_of_processes_are_joined():
    again = Found.of_data(json.loads(json.dumps(FOUND.as_data())))
    assert again == FOUND
    assert joined([FOUND], [again, CELL]) == [Found(**vars(FOUND) | {"count": 4}), CELL]


# ------------------------------------------------------------------ pytest --cuda-sanitize


def plugin(folder, *options):
    """{name of a test: its failure, or None} of pytest in a process of its own."""
    report = folder / "report.xml"
    installed = {each.value for each in metadata.entry_points(group="pytest11")}
    name = "pytest_cuda_sanitize"
    if name not in installed:
        options += "-p", name
    subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", folder,
         "--junitxml", report, *options, folder],
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        cwd=folder, capture_output=True, timeout=250,
    )  # fmt: skip
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {case.get("name"): next((each.text for each in case), None) for case in cases}


def test_known_wrong_kernels_fail_their_tests(tmp_path):
    from sanitizer_cases import CASES

    wanted = {f"test_case[{name}]": case for name, case in CASES.items()
              if case.kind in (None, "race", "race-between-blocks")}  # fmt: skip
    (tmp_path / "test_kernels.py").write_text(textwrap.dedent("""
        import pytest
        from sanitizer_cases import CASES

        @pytest.mark.parametrize("name", CASES)
        def test_case(name):
            if CASES[name].kind in (None, "race", "race-between-blocks"):
                CASES[name].launch(CASES[name].arguments())

        @pytest.mark.no_cuda_sanitize
        def test_left_alone():
            test_case("reversed_without_barrier")
        """), encoding="utf-8")  # fmt: skip
    found = plugin(tmp_path, "--cuda-sanitize")
    for name, case in wanted.items():
        if case.kind is None:
            assert found[name] is None, found[name]
        else:
            assert f":{case.line}: {case.kind}" in (found[name] or ""), name
    assert len(wanted) > 80 and found["test_left_alone"] is None


def test_without_the_option_nothing_is_imported(tmp_path):
    (tmp_path / "test_imports.py").write_text(
        "import sys\n\ndef test_modules():\n    parts = {name.partition('.')[0] for name in "
        "sys.modules}\n    assert not parts & {'course_lib', 'numba', 'numba_cuda', 'numpy'}\n",
        encoding="utf-8")  # fmt: skip
    assert plugin(tmp_path) == {"test_modules": None}
