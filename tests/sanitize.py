"""NVIDIA's compute-sanitizer on our kernels, and beside our own sanitizer.

``python tests/sanitize.py`` runs every kernel variant under it. memcheck finds accesses out of
bounds and misaligned ones, racecheck finds hazards on shared memory. The parts of
`sanitize_launches` run side by side, a process each; parts that are named run alone. Exit status 0
when all are clean.

``python tests/sanitize.py cases`` runs the planted bugs of `sanitizer_cases` that one of
its tools can see, and says where the two agree. Exit status 0 when they do on all of them.

Both need a GPU and the CUDA toolkit's `compute-sanitizer`.
"""

import os
import shutil
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck")
ERROR_STATUS = 9  # of a run in which compute-sanitizer found something
LAUNCHES = ROOT / "tests" / "sanitize_launches.py"
PROCESSES = max(2, min(12, (os.cpu_count() or 2) - 2))


def compare_cases():
    """How many planted bugs compute-sanitizer misses that it can see, by what their cases say."""
    from sanitizer_cases import CASES

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
    command = ["tests/sanitizer_cases", "--gpu", case.name]
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
    from sanitize_launches import parts

    known = list(parts())
    if unknown := set(arguments) - set(known):
        print(f"no part {', '.join(sorted(unknown))}; there are {', '.join(known)}, and cases")
        return 2
    return 1 if sanitize_launches(arguments or known) else 0


def sanitize_launches(parts):
    """How many of these parts of `sanitize_launches`, under how many tools, are not clean."""
    runs = [(part, tool) for part in parts for tool in TOOLS]
    with ThreadPoolExecutor(PROCESSES) as pool:
        return sum(pool.map(lambda run: _report(*run), runs))


def _report(part, tool):
    """Run one part under one tool and say how it went. Whether it is not clean."""
    command = [str(LAUNCHES), part]
    start = time.monotonic()
    done = _under(tool, command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    verdict = "clean" if done.returncode == 0 else f"NOT CLEAN (status {done.returncode})"
    seconds = time.monotonic() - start
    lines = done.stdout.splitlines()
    calls = next((line for line in lines if " calls: " in line), f"{part} did not end")
    print(f"{tool:10} {verdict}: {calls}, {seconds:.0f} s", flush=True)
    if done.returncode:
        print("\n".join(lines[:60]), flush=True)
    return done.returncode != 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main(sys.argv[1:]))
