"""Run every notebook and every GPU test on this machine's GPU: ``python tests/on_a_gpu.py``.

A GPU may be lent for minutes only. So each notebook and each test file is an item of its own, whose
outcome is written to ``on_a_gpu.json`` as it happens, with a hash of all that it depends on: the
item itself, the library and what tests share. Started again with that file (``--done``), what has
passed with the same hash is left out. At the time limit the run stops, and names what comes next.

The folder of the results is ``$OUT``, or ``--out``. The output of what failed is in
``on_a_gpu.log``. Exit status 0: all has passed; 1: something has failed; 3: time ran out before.
"""

import argparse
import concurrent.futures
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STATE, LOG = "on_a_gpu.json", "on_a_gpu.log"
SLOW = "08_", "09_"  # lessons whose kernels take minutes to compile: they start first
SHOWN = 6000  # characters of a failed item's output that the log keeps


def items():
    """Names of all that is run, in order: solved notebooks, exercise notebooks, test files."""
    for folder in ("notebooks/solutions", "notebooks"):
        found = sorted(str(p.relative_to(ROOT)) for p in (ROOT / folder).glob("*.ipynb"))
        yield from sorted(found, key=lambda item: not item.split("/")[-1].startswith(SLOW))
    for path in sorted((ROOT / "tests").glob("**/test_*.py")):
        if wants_gpu(path.read_text()):
            yield str(path.relative_to(ROOT))


def wants_gpu(text):
    """Whether a test file has tests that need a GPU, or tests that run wherever kernels run."""
    return "mark.gpu" in text or runs_anywhere(text)


def runs_anywhere(text):
    return "PLACE" in text or "operands" in text


def hashes():
    """{item: hash of all that it depends on}."""
    shared = _hash(*(ROOT / "course_lib").rglob("*.py"))
    helpers = _hash(*(p for p in (ROOT / "tests").rglob("*.py") if "test_" not in p.name))
    return {
        item: _hash(ROOT / item, words=shared + (helpers if item.endswith(".py") else ""))
        for item in items()
    }


def _hash(*paths, words=""):
    found = hashlib.sha256(words.encode())
    for path in sorted(paths):
        found.update(str(path.relative_to(ROOT)).encode())
        found.update(_contents(path))
    return found.hexdigest()[:16]


def _contents(path):
    """What is run: the sources of a notebook's cells, without its outputs."""
    if path.suffix != ".ipynb":
        return path.read_bytes()
    return json.dumps([cell["source"] for cell in json.loads(path.read_text())["cells"]]).encode()


def run(item, seconds):
    """{"passed": whether, "seconds": …, "summary": pytest's last line}, and the whole output."""
    # Many processes compile at once: what takes a minute alone may take five.
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--timeout=540"]
    environment = os.environ | {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"}
    if item.endswith(".ipynb"):
        command += ["--nbval-lax"]
        if "solutions" in item:
            environment["COURSE_LIB_STRICT"] = "1"
    else:
        command += ["-p", "no:nbval"]
        command += [] if runs_anywhere((ROOT / item).read_text()) else ["-m", "gpu"]
    began = time.monotonic()
    try:
        done = subprocess.run(
            [*command, item], cwd=ROOT, env=environment, timeout=seconds,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = None, (error.stdout or b"").decode(errors="replace")
    lines = output.strip().splitlines()
    return {
        "passed": code in (0, 5),  # 5: no test was chosen
        "ended": code is not None,
        "seconds": round(time.monotonic() - began, 1),
        "summary": lines[-1].strip("= ") if lines else "",
        "failed": [line.split(" ")[0] for line in lines if " FAILED" in line or " ERROR" in line],
    }, output


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", default=os.environ.get("OUT", "."), help="folder of the results")
    parser.add_argument("--done", help="an earlier on_a_gpu.json: what passed is left out")
    parser.add_argument("--minutes", type=float, default=9.0, help="when to stop")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 2) // 2))
    parser.add_argument("--only", default="", help="items whose name has this in it")
    parser.add_argument("--first", default="", help="the item to begin with, such as a run's next")
    options = parser.parse_args(arguments)
    end = time.monotonic() + 60 * options.minutes
    folder = Path(options.out)
    done = json.loads(Path(options.done).read_text()) if options.done else {}
    current = hashes()
    state = {k: v for k, v in done.items() if v["passed"] and v["hash"] == current.get(k)}
    waiting = [item for item in current if item not in state and options.only in item]
    if options.first in waiting:
        place = waiting.index(options.first)
        waiting = waiting[place:] + waiting[:place]
    print(f"{len(state)} have passed before, {len(waiting)} to run, {_device()}", flush=True)
    (folder / LOG).write_text("")

    def finish(item):
        left = end - time.monotonic()
        if left < 5:
            return item, None, ""
        return item, *run(item, left)

    unfinished = []
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        for future in concurrent.futures.as_completed([pool.submit(finish, i) for i in waiting]):
            item, found, output = future.result()
            if found is None or not found["ended"]:
                unfinished.append(item)
                continue
            state[item] = found | {"hash": current[item]}
            (folder / STATE).write_text(json.dumps(state, indent=1))
            print("passed" if found["passed"] else "FAILED", item, found["summary"], flush=True)
            if not found["passed"]:
                with (folder / LOG).open("a") as log:
                    log.write(f"\n##### {item} {found['failed']}\n{output[-SHOWN:]}\n")
    failed = [item for item, found in state.items() if not found["passed"]]
    passed = len(state) - len(failed)
    print(f"{passed} passed, {len(failed)} failed, {len(unfinished)} not finished")
    for item in failed:
        print("FAILED", item, *state[item]["failed"])
    if unfinished:
        print("next:", min(unfinished, key=waiting.index))
    return 1 if failed else 3 if unfinished else 0


def _device():
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


if __name__ == "__main__":
    sys.exit(main())
