"""Every planted bug is found on its line, and nothing is found in correct kernels."""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest
from sanitizer_cases import CASES, run
from sanitizer_cases import __main__ as command
from sanitizer_cases.case import Outcome, correct, planted

from course_lib import simulator
from course_lib.simulator.sanitizer.findings import KINDS

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from zoo import CASES as ZOO  # noqa: E402

PLANTED = [name for name, case in CASES.items() if case.kind is not None]
CORRECT = [name for name, case in CASES.items() if case.kind is None]
ORDERS = ["forward", "reverse", "random"]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_bug_is_found_where_it_is(name, order):
    outcome = run(CASES[name], order)
    assert outcome.right, outcome.report
    for finding in outcome.report:
        assert finding.kernel == name
        assert finding.message.count(";") >= 1, "it must say what would mend it"
        assert finding.source and finding.count >= 1


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_kernel_is_clean(name, order):
    assert not run(CASES[name], order).report


def test_there_are_enough_of_both_and_of_every_kind():
    assert len(PLANTED) >= 90
    assert len(CORRECT) >= 80
    assert {CASES[name].kind for name in PLANTED} == set(KINDS)
    assert {"spin_lock", "last_block_with_fences", "warp_synchronous_tree",
            "double_buffered_tile"} <= set(CORRECT)


def test_every_planted_bug_says_which_tool_sees_it_or_why_none_does():
    for name in PLANTED:
        case = CASES[name]
        assert case.gpu_tool in ("memcheck", "racecheck", "synccheck", "initcheck", None)
        assert case.gpu_tool or case.gpu_reason
    with pytest.raises(ValueError, match="a tool that sees it or a reason"):
        planted("race", 1, 1, lambda: ())
    with pytest.raises(RuntimeError, match="hang"):
        from sanitizer_cases import run_on_gpu

        run_on_gpu(CASES["nobody_sets_the_flag"])


def test_the_table_notices_a_wrong_judgement():
    missed, alarm = CASES["reversed_without_barrier"], CASES["reversed_with_barrier"]
    with simulator.sanitize() as nothing:
        alarm.launch(alarm.arguments())
    with simulator.sanitize() as something:
        missed.launch(missed.arguments())
    assert not Outcome(missed, nothing).right
    assert not Outcome(alarm, something).right
    assert Outcome(missed, something).right and Outcome(alarm, nothing).right


def test_two_cases_cannot_share_a_name():
    with pytest.raises(ValueError, match="two cases"):
        correct(1, 1, lambda: ())(CASES["spin_lock"].kernel)


def test_the_command_prints_the_table(capsys):
    assert command.main([]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert len(rows) == len(CASES) + 2
    assert rows[-1].endswith("0 judged wrongly")


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_is_clean_and_gives_the_same_results(name, order):
    from test_zoo import check
    from test_zoo import run as run_plan

    seed = np.random.SeedSequence().entropy
    plan = ZOO[name](np.random.default_rng(seed))
    with simulator.options(order=order, seed=seed % 2**32), simulator.sanitize() as report:
        results = run_plan(plan)
    assert not report, report
    check(plan, results, seed)


COMPILE_ALL = """
import tempfile, os, json, re
from course_lib.runtime.compile import compiler
from sanitizer_cases import CASES, run
from numba.cuda.typing.typeof import Purpose, typeof
os.environ[compiler.CACHE_VARIABLE] = tempfile.mkdtemp()
wrong = {}

def jumps_to_itself(text):
    # A loop in the PTX in which nothing happens but the jump, and the test of what is known.
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line and not line.startswith(("//", "."))]
    places = {line[:-1]: n for n, line in enumerate(lines) if line.endswith(":")}
    for n, line in enumerate(lines):
        jump = re.search(r"bra(?:\\.uni)?\\s+([$]\\w+)", line)
        if jump and places.get(jump[1], n) < n:
            inside = [part for part in lines[places[jump[1]]:n] if not part.endswith(":")]
            if all(part.startswith("setp.") for part in inside):
                return True
    return False

for case in CASES.values():
    types = tuple(typeof(value, Purpose.argument) for value in case.arguments())
    try:
        if case.cluster == 1:  # numba.cuda has no names for what clusters do
            compiler.compile_kernel(case.kernel, types, (9, 0))
        if case.kernel.py_func.__module__.endswith(".polls"):
            endless = jumps_to_itself(compiler.ptx(case.kernel, types, (9, 0)))
            if endless != (case.kind == "endless-poll"):
                wrong[case.name] = f"endless as compiled: {endless}"
    except Exception as error:
        wrong[case.name] = str(error)
    if not run(case).right:
        wrong[case.name] = "judged wrongly as a real numba.cuda kernel"
print(json.dumps(wrong))
"""


def test_every_case_compiles_for_a_gpu_and_is_judged_there_as_well():
    """With the real numba.cuda, launches under the sanitizer run here all the same."""
    if importlib.util.find_spec("numba_cuda") is None:
        pytest.skip("numba-cuda isn't installed: nothing to compile with")
    environment = dict(os.environ, COURSE_LIB_SIMULATOR="0", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", COMPILE_ALL], env=environment,
                          capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == {}
