"""What `python -m course_lib bench --all` has to measure: what is missing or stale, cheapest first.

Operations are measured case by case, fixed shapes and drawn ones, and each is saved at once; whole
programs, whose benchmarks have no cases, come last.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from typing import NamedTuple

from course_lib import bench, benchmarks
from course_lib.benchmarks import case as one
from course_lib.benchmarks import launches
from course_lib.runtime.host import device

ROUNDS = 30  # about, of the timed replays of each candidate
START = 5  # s, about, that a case takes beside its replays
GBPS = 0.5  # at which tensors are made and checked


class Pending(NamedTuple):
    """Something to measure; `measure()` gives its records."""

    label: str
    why: str
    seconds: float  # about
    measure: Callable


def count(held):
    """(how many cases of operations there are, how many of them a device has no record of)."""
    known = {bench.identity(record) for record in held["records"]}
    cases = [(case.name, case.dtype, case.shape) for _, module in _modules()
             for case in _cases(module)]  # fmt: skip
    return len(cases), sum(case not in known for case in cases)


def _modules():
    for name in benchmarks.BENCHMARKS:
        yield name, importlib.import_module(f"course_lib.benchmarks.{name}")


def _cases(module):
    return (*module.cases(), *one.drawn(module)) if hasattr(module, "cases") else ()


def pending(held):
    """The `Pending` of a device, cheapest first.

    held  {"device": …, "records": […]}, as `bench.load_records` gives it
    """
    known = {bench.identity(record): record for record in held["records"]}
    found, programs = [], []
    for name, module in _modules():
        if cases := _cases(module):
            for case in cases:
                record = known.get((case.name, case.dtype, case.shape))
                if (why := _why(record, held["device"])) is not None:
                    found.append(_of_case(case, record, why))
            found += _beside_cases(module, name, held)
        elif (why := _why_program(module, name, held)) is not None:
            programs.append(Pending(name, why, float("inf"), module.run))
    return sorted(found, key=lambda each: each.seconds) + programs


def _why(record, facts):
    if record is None:
        return "missing"
    stale, why = launches.stale(record, facts)
    return f"stale: {why}" if stale else None


def _beside_cases(module, name, held):
    """Stale records that a benchmark of cases makes beside them, such as the readers' table."""
    for record in held["records"]:
        if launches.benchmark_name(record["command"]) == name and "launches" not in record:
            if (why := _why(record, held["device"])) is not None:
                run = functools.partial(module.run, names=[record["name"]])
                yield Pending(record["name"], why, START, run)


def _why_program(module, name, held):
    if any(p.default is p.empty for p in inspect.signature(module.run).parameters.values()):
        return None  # it needs what only the user has
    if getattr(module, "N_GPUS", 0) > device.count():
        return None
    wanted = getattr(module, "kernel_hashes", dict)()
    for record in held["records"]:
        wanted.pop(record["name"], None)
        if launches.benchmark_name(record["command"]) == name:
            if (why := _why(record, held["device"])) is not None:
                return f"{record['name']} is {why}"
    return f"{next(iter(wanted))} is missing" if wanted else None


def _of_case(case, record, why):
    shape = "x".join(map(str, case.shape))
    rows = record["rows"] if record else []
    times = [max(one.REPLAY, row["microseconds"]) * ROUNDS / 1e6 for row in rows]
    seconds = START + case.n_bytes / (GBPS * 1e9) + sum(times)
    label = f"{case.name} {shape} {case.dtype}"
    return Pending(label, why, seconds, lambda: [one.measure(case)])


def listing(found):
    """What is pending as text, and how long all of it takes."""
    lines = [
        f"{each.label}: {each.why}"
        + (f" (about {each.seconds:.0f} s)" if each.seconds < float("inf") else "")
        for each in found
    ]
    seconds = sum(each.seconds for each in found if each.seconds < float("inf"))
    total = f"{len(found)} to measure, about {seconds / 60:.0f} minutes without whole programs"
    return "\n".join([*lines, total if found else "Nothing is missing or stale."])
