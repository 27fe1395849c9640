"""What every kernel becomes on each chip, compiled without a GPU and written down.

    python tests/compile_gate.py          compile what is new or changed, and write it down
    python tests/compile_gate.py --all    compile everything again (a quarter of an hour)

To compile everything takes too long for each run of the tests, and a kernel that nobody changed
becomes what it became before. So `compiled/<module>.json` holds the registers, stack and float64
instructions of every specialisation for every chip, under a key: a hash of everything the kernel's
source reaches, its argument types, its options, and of what compiles it. The tests hold all of it
to the limits, and compile what these files don't know, and a few that they do.
"""

import argparse
import concurrent.futures
import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import time
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "compiled"
CHIPS = [(7, 5), (8, 0), (9, 0)]
MODULES = (
    "activation", "global_avg_pool", "softmax", "cross_entropy", "softmax_dropout",
    "bn_relu_softmax", "squeeze_excite", "conv2d", "max_pool2d", "batch_norm", "optimizers",
    "linear", "batches", "dropout",
)  # fmt: skip
#: Made for the last of the chips alone: the launcher refuses the others, or the first of them.
LAST_ALONE = "linear tensor_core|conv2d.*(tensor|channels-last|halo|pixel_sums) "
#: So many may be new or changed for all of them to be compiled; else one for each kernel is.
FEW = 24
#: Of what is known, one in so many is compiled again, to see that the records tell the truth.
SPOT = 128


class Case(NamedTuple):
    """One specialisation; those of one kernel have the same `kernel`."""

    module: str
    label: str
    kernel: str
    key: str


class Found(NamedTuple):
    """What a case became on one chip; `doubles` are its float64 instructions."""

    registers: int
    stack_bytes: int
    doubles: list


def chips_of(case):
    return CHIPS[-1:] if re.search(LAST_ALONE, case.label) else CHIPS


# ---- what is known ----------------------------------------------------------------------------


def load(folder=RECORDS):
    """{label: (key, {chip: Found})} of all that is written down."""
    known = {}
    for path in sorted(folder.glob("*.json")):
        for label, (key, *rows) in json.loads(path.read_text(encoding="utf-8")).items():
            chips = CHIPS[-len(rows) :]
            known[label] = key, {chip: Found(*r) for chip, r in zip(chips, rows, strict=True)}
    return known


def save(cases, known, folder=RECORDS):
    """Write down what is known of `cases`: a file for each module, a line for each case."""
    folder.mkdir(exist_ok=True)
    for module in MODULES:
        lines = []
        for case in cases:
            if case.module == module and is_known(case, known):
                key, found = known[case.label]
                row = json.dumps([key, *(found[chip] for chip in chips_of(case))])
                lines.append(f"{json.dumps(case.label, ensure_ascii=False)}: {row}")
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        (folder / f"{module}.json").write_text(text, encoding="utf-8")


def is_known(case, known):
    """Whether `case` was compiled as it is today."""
    return case.label in known and known[case.label][0] == case.key


def choose(cases, known, everything=False):
    """[(case, chips)]: what a run of the tests compiles."""
    if everything:
        return [(case, chips_of(case)) for case in cases]
    new = [case for case in cases if not is_known(case, known)]
    if len(new) <= FEW:
        chosen = [(case, chips_of(case)) for case in new]
    else:
        of_kernel = {}
        for case in new:
            of_kernel.setdefault(case.kernel, []).append(case)
        chosen = []
        for number, same in enumerate(of_kernel.values()):
            # For the last chip and, in turns, for an older one; in turns also what it is made for.
            case = same[number // 2 % len(same)]
            chips = [CHIPS[number % 2], CHIPS[-1]]
            chosen.append((case, [chip for chip in chips if chip in chips_of(case)]))
    # Which these are, nobody chooses, and a kernel that changes puts others in their place.
    spot = [c for c in cases if is_known(c, known) and int(c.key, 16) % SPOT == 0]
    return chosen + [(case, CHIPS[-1:]) for case in spot]


# ---- compiling, which needs the real numba.cuda -----------------------------------------------

_compilable = {}  # by label: kernel and argument types


def list_cases():
    """Every specialisation of every kernel."""
    from course_lib.runtime.compiler import fingerprint, survey
    from course_lib.runtime.launch import array_type, numba_type

    with_what = [fingerprint(survey), *_versions()]
    cases, numbers, digest_of = [], {}, functools.cache(fingerprint)
    for name in MODULES:
        module = importlib.import_module(f"course_lib.kernels.{name}")
        for label, kernel, parts in module.specialisations():
            types = [array_type(*p) if isinstance(p, tuple) else numba_type(p) for p in parts]
            options = sorted((name, repr(value)) for name, value in kernel.targetoptions.items())
            number = numbers.setdefault(id(kernel), len(numbers))
            case = Case(name, label, f"{number} {kernel.py_func.__name__}", "")
            facts = [digest_of(kernel), list(map(str, types)), options, chips_of(case), with_what]
            digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()
            assert label not in _compilable, f"two specialisations are called {label}"
            _compilable[label] = kernel, types
            cases.append(case._replace(key=digest[:16]))
    return cases


def _versions():
    from course_lib.runtime import compiler

    python, *libraries = compiler._versions()
    return [python[:2], *libraries]  # bytecode is the same in all releases of a Python


def compile_case(label, chips):
    """{chip: Found} of the case with that label."""
    from course_lib.runtime import compiler

    try:
        return {
            chip: Found(facts["registers"], facts["stack_bytes"], re.findall(r"\S+\.f64\S*", text))
            for chip, facts, text in compiler.survey(*_compilable[label], chips)
        }
    except Exception as error:
        error.add_note(f"while {label} was compiled for {chips}")
        raise


def compile_new(cases, known, everything, jobs):
    """Add to `known` what isn't in it yet, or all, in `jobs` processes."""
    new = [case for case in cases if everything or not is_known(case, known)]
    print(f"{len(new)} of {len(cases)} to compile")
    began = time.monotonic()
    # A forked process has imported everything, and has the kernels, which can't be sent.
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=fork) as pool:
        futures = {pool.submit(compile_case, case.label, chips_of(case)): case for case in new}
        for i, future in enumerate(concurrent.futures.as_completed(futures), 1):
            case = futures[future]
            try:
                known[case.label] = case.key, future.result()
            except Exception:
                pool.shutdown(cancel_futures=True)
                raise
            if i % 20 == 0 or i == len(new):
                print(f"{i:5} in {time.monotonic() - began:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="compile everything again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--for-tests", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["COURSE_LIB_SIMULATOR"] = "0"
    sys.path.insert(0, str(HERE.parent))
    cases, known = list_cases(), load()
    if options.for_tests:
        rows = [
            [case.label, list(compile_case(case.label, chips).items())]
            for case, chips in choose(cases, known, options.all)
        ]
        print(json.dumps({"cases": cases, "found": rows}))
    else:
        try:
            compile_new(cases, known, options.all, options.jobs)
        finally:
            save(cases, known)  # what was compiled before it was interrupted, too


if __name__ == "__main__":
    main()
