"""NVIDIA's compute-sanitizer on our kernels, and beside our own sanitizer.

``python tests/sanitize.py`` runs every kernel variant under it. memcheck finds accesses out of
bounds and misaligned ones, racecheck finds hazards on shared memory. Exit status 0 when both are
clean.

``python tests/sanitize.py cases`` runs the planted bugs of `course_lib.simulator.cases` that one of
its tools can see, and says where the two agree. Exit status 0 when they do on all of them.

Both need a GPU and the CUDA toolkit's `compute-sanitizer`.
"""

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
ERROR_STATUS = 9  # of a run in which compute-sanitizer found something
LAUNCHES = ROOT / "tests" / "sanitize_launches.py"


def compare_cases():
    """How many planted bugs compute-sanitizer misses that it can see, by what their cases say."""
    from course_lib.simulator.cases import CASES

    planted = [case for case in CASES.values() if case.kind is not None]
    seen = [case for case in planted if case.gpu_tool]
    with ThreadPoolExecutor(6) as pool:
        found = list(pool.map(_found_by_tool, seen))
    for case, hit in zip(seen, found, strict=True):
        verdict = "agree" if hit else "MISSED by compute-sanitizer"
        print(f"{case.name:38}{case.kind:24}{case.gpu_tool:12}{verdict}")
    for case in planted:
        if not case.gpu_tool:
            print(f"{case.name:38}{case.kind:24}{'-':12}not run: {case.gpu_reason}")
    print(f"{sum(found)} of {len(seen)} agree; {len(planted) - len(seen)} are none of its business")
    return len(seen) - sum(found)


def _found_by_tool(case):
    command = ["-m", "course_lib.simulator.cases", "--gpu", case.name]
    try:
        done = _under(case.gpu_tool, command, capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == ERROR_STATUS or " hazard" in done.stdout.replace("0 hazards", "")


def _under(name, arguments, **options):
    """Run Python with `arguments` under compute-sanitizer's tool `name`."""
    # Without PyTorch's cache every array is an allocation of its own, with ends that can be seen.
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    command = ["compute-sanitizer", "--tool", name, "--error-exitcode", str(ERROR_STATUS)]
    return subprocess.run(
        [*command, sys.executable, *arguments], env=environment, cwd=ROOT, **options
    )


def main(arguments):
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit")
        return 2
    if arguments == ["cases"]:
        return 1 if compare_cases() else 0
    worst = 0
    for name in TOOLS:
        print(f"== {name}", flush=True)
        worst = max(worst, _under(name, [str(LAUNCHES)]).returncode)
    return worst


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
