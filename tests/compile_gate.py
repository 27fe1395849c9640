"""What every kernel becomes on each chip, compiled without a GPU and written down.

    python tests/compile_gate.py          compile what is new or changed, and write it down
    python tests/compile_gate.py --all    compile everything again (half an hour)
    python tests/compile_gate.py --ptx    write down the PTX hashes that Hopper lacks

To compile everything takes too long for each run of the tests, and a kernel that nobody changed
becomes what it became before. So `course_lib/compiled/<module>.json` holds the registers, stack,
shared memory and float64 instructions of every specialisation for the chips that may run it, under
a key: a hash of everything the kernel's source reaches, its argument types, its options, and of
what compiles it.
The tests hold all of it to the limits, and compile what these files don't know, and a few that they
do. A chip that was added to the list later may be lacking for a while; the tests know how often.
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
RECORDS = HERE.parent / "course_lib" / "compiled"
HOPPER = (9, 0)
#: What kernels are compiled for: T4, A100, A10 and RTX 30, L4 and RTX 40, H100 and H200.
CHIPS = [(7, 5), (8, 0), (8, 6), (8, 9), HOPPER]
#: B200, and RTX 50: of each kernel the first specialisation alone is compiled for them.
SAMPLED_CHIPS = [(10, 0), (12, 0)]
#: (labels, from which chip on the launchers choose such a kernel, up to which). Whatever needs no
#: more than a chip has runs on later ones too, but for `wgmma`: PTX has it for sm_90a alone, and on
#: later chips the launchers go back to `mma.sync`.
NEEDS = [
    (re.compile(labels), since, until)
    for labels, since, until in (
        (r"^linear tensor_core |^attention tensor_core .* (float32|bfloat16)$", (8, 0), None),
        # 7.5 has too little shared memory for these.
        (r"^attention tensor_core (mma 32, 1, 256|(dk, dv|dq) mma 32, 1, )", (8, 0), None),
        (r"^conv2d\.(halo|pixel_sums|(gather|dweight) tensor) ", (8, 0), None),
        (r"^conv2d\.(forward|dx|dweight) channels-last ", (8, 0), None),
        # These work in clusters of blocks.
        (r"^conv2d\.halo .* by_|^conv2d\.pixel_sums .* together ", HOPPER, None),
        (r"^squeeze_excite\.\w+ (resident|batched), ", HOPPER, None),
        (r"\b(warpgroup|wide) |^attention tensor_core (dk, dv|dq) atomic ", HOPPER, HOPPER),
    )
]
DOUBLE = re.compile(r"\S+\.f64\S*")
#: What says nothing of the machine code: comments, where a line came from, and numba's note of each
#: function, in an order of its own.
_BESIDE = re.compile(r"//.*|^\s*\.(?:file|loc|section)\b.*|^\.common .*\b_ZN08NumbaEnv.*", re.M)
_NAME = re.compile(r"\b(?:_Z|_cudapy_)[\w$]+")  # of a function or array, with modules and versions
#: So many may be new or changed for all of them to be compiled; else one for each kernel is.
FEW = 24
#: Of what is known, one in so many is compiled again, to see that the records tell the truth.
SPOT = 128


class Case(NamedTuple):
    """One specialisation; those of one kernel have the same `kernel`."""

    module: str
    label: str
    kernel: str
    chips: list  # that it is compiled for
    key: str


class Found(NamedTuple):
    """What a case became on one chip; `doubles` are its float64 instructions.

    `shared_bytes` and `ptx`, the hash of its PTX, are None where it was compiled before they were
    written down.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    doubles: list
    ptx: str = None


def runs_on(label, chip):
    """Whether the launchers may choose what has this label on a chip."""
    return all(
        since <= chip and (until is None or chip <= until)
        for labels, since, until in NEEDS if labels.search(label)
    )  # fmt: skip


def chips_for(label, sampled):
    """What a specialisation is compiled for."""
    chips = CHIPS + SAMPLED_CHIPS if sampled else CHIPS
    return [chip for chip in chips if runs_on(label, chip)]


@functools.cache
def modules():
    """Names of the modules whose kernels are compiled: each operation's, and two beside them."""
    from course_lib.operations import OPERATIONS

    of_operations = [operation.module.__name__ for operation in OPERATIONS.values()]
    names = dict.fromkeys(name.rpartition(".")[2] for name in of_operations)
    return (*names, "all_reduce", "batches")


# ---- what is known ----------------------------------------------------------------------------


def load(folder=RECORDS):
    """{label: (key, {chip: Found})} of all that is written down."""
    known = {}
    for path in sorted(folder.glob("*.json")):
        for label, (key, rows) in json.loads(path.read_text(encoding="utf-8")).items():
            known[label] = key, {_chip_of(name): Found(*row) for name, row in rows.items()}
    return known


def save(cases, known, folder=RECORDS):
    """Write down what is known of `cases`: a file for each module, a line for each case."""
    from course_lib.runtime.compile.compiler import compiled_by

    folder.mkdir(exist_ok=True)
    (folder / "compiled_by.txt").write_text(json.dumps(compiled_by()) + "\n", encoding="utf-8")
    for module in modules():
        lines = []
        for case in cases:
            if case.module == module and is_known(case, known):
                key, found = known[case.label]
                chips = [chip for chip in case.chips if chip in found]
                rows = {_name_of(chip): found[chip] for chip in chips}
                rows = {name: row if row.ptx else row[:-1] for name, row in rows.items()}
                row = json.dumps([key, rows])
                lines.append(f"{json.dumps(case.label, ensure_ascii=False)}: {row}")
        text = "{\n" + ",\n".join(lines) + "\n}\n"
        (folder / f"{module}.json").write_text(text, encoding="utf-8")


def _name_of(chip):
    return ".".join(map(str, chip))


def _chip_of(name):
    return tuple(map(int, name.split(".")))


def is_known(case, known):
    """Whether `case` was compiled as it is today, for some chip at least."""
    return case.label in known and known[case.label][0] == case.key


def lacking(case, known):
    """The chips that `case`, as it is today, was not compiled for."""
    found = known[case.label][1] if is_known(case, known) else {}
    return [chip for chip in case.chips if chip not in found]


def choose(cases, known, everything=False):
    """[(case, chips)]: what a run of the tests compiles."""
    if everything:
        return [(case, case.chips) for case in cases]
    new = [case for case in cases if not is_known(case, known)]
    if len(new) <= FEW:
        chosen = [(case, case.chips) for case in new]
    else:
        of_kernel = {}
        for case in new:
            of_kernel.setdefault(case.kernel, []).append(case)
        chosen = []
        for number, same in enumerate(of_kernel.values()):
            # For Hopper and, in turns, for another; in turns also what it is made for.
            case = same[number // len(CHIPS) % len(same)]
            others = [chip for chip in case.chips if chip != HOPPER]
            turn = [others[number % len(others)]] if others else []
            chosen.append((case, turn + [HOPPER]))
    # Which these are, nobody chooses, and a kernel that changes puts others in their place.
    spot = []
    for case in cases:
        drawn, rest = divmod(int(case.key, 16), SPOT)
        if is_known(case, known) and rest == 0:
            spot.append((case, [case.chips[drawn % len(case.chips)]]))
    return chosen + spot


# ---- compiling, which needs the real numba.cuda -----------------------------------------------

_compilable = {}  # by label: kernel and argument types


def list_cases():
    """Every specialisation of every kernel."""
    from course_lib.runtime.compile.compiler import case_key, fingerprint, source_key
    from course_lib.runtime.host.launch import argument_type

    cases, numbers, functions, digest_of = [], {}, set(), functools.cache(fingerprint)
    for name in modules():
        module = importlib.import_module(f"course_lib.kernels.{name}")
        for label, kernel, parts in module.specialisations():
            types = [argument_type(p) for p in parts]
            number = numbers.setdefault(id(kernel), len(numbers))
            function = kernel.py_func.__module__, kernel.py_func.__qualname__
            chips = chips_for(label, function not in functions)
            functions.add(function)
            key = case_key(source_key(digest_of(kernel), types, kernel.targetoptions))
            assert label not in _compilable, f"two specialisations are called {label}"
            _compilable[label] = kernel, types
            named = f"{number} {kernel.py_func.__name__}"
            cases.append(Case(name, label, named, chips, key))
    return cases


def compile_case(label, chips):
    """{chip: Found} of the case with that label."""
    from course_lib.runtime.compile import compiler

    try:
        return {
            chip: Found(**facts, doubles=DOUBLE.findall(text), ptx=ptx_hash(text))
            for chip, facts, text in compiler.survey(*_compilable[label], chips)
        }
    except Exception as error:
        error.add_note(f"while {label} was compiled for {chips}")
        raise


def ptx_hash(text):
    """Hash of what a PTX text does, whatever its functions and arrays are called."""
    names = {}
    text = _NAME.sub(lambda found: f"name{names.setdefault(found[0], len(names))}",
                     _BESIDE.sub("", text))
    lines = [line.strip() for line in text.splitlines()]
    return hashlib.sha256("\n".join(filter(None, lines)).encode()).hexdigest()[:16]


def compile_new(cases, known, everything, jobs):
    """Add to `known` what isn't in it yet, or all, in `jobs` processes."""
    new = [(case, case.chips if everything else lacking(case, known)) for case in cases]
    # What nobody has seen compiled comes first, then what lacks a chip.
    new = sorted(((c, chips) for c, chips in new if chips), key=lambda row: is_known(row[0], known))
    print(f"{len(new)} of {len(cases)} to compile, {sum(len(chips) for _, chips in new)} times")
    began = time.monotonic()
    # A forked process has imported everything, and has the kernels, which can't be sent.
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=fork) as pool:
        futures = {pool.submit(compile_case, case.label, chips): case for case, chips in new}
        try:
            for i, future in enumerate(concurrent.futures.as_completed(futures), 1):
                case = futures[future]
                before = known[case.label][1] if is_known(case, known) else {}
                known[case.label] = case.key, before | future.result()
                if i % 20 == 0 or i == len(new):
                    print(f"{i:5} in {time.monotonic() - began:.0f} s", flush=True)
        except BaseException:  # Ctrl-C too: what waits is not compiled, what is done is kept
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def hash_ptx(label):
    """Hash of the PTX for Hopper of the case with that label; nothing is made of it."""
    from course_lib.runtime.compile import compiler

    return ptx_hash(compiler.ptx(*_compilable[label], HOPPER))


def hash_new(cases, known, jobs):
    """Add to `known` the hash of Hopper's PTX where what is known has none; saved now and then."""
    new = [
        case for case in cases
        if is_known(case, known) and HOPPER in (found := known[case.label][1])
        if found[HOPPER].ptx is None
    ]  # fmt: skip
    fork = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=fork) as pool:
        for i, (case, digest) in enumerate(
            zip(new, pool.map(hash_ptx, [case.label for case in new]), strict=True), 1
        ):
            found = known[case.label][1]
            found[HOPPER] = found[HOPPER]._replace(ptx=digest)
            if i % 20 == 0:
                print(f"{i:5} of {len(new)}", flush=True)
                save(cases, known)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--all", action="store_true", help="compile everything again")
    parser.add_argument("--ptx", action="store_true", help="hash the PTX that Hopper lacks")
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
            if options.ptx:
                hash_new(cases, known, options.jobs)
            else:
                compile_new(cases, known, options.all, options.jobs)
        finally:
            save(cases, known)  # what was compiled before it was interrupted, too


if __name__ == "__main__":
    main()
