"""What a record's calls launch, listed on the chip that it was measured on without one; and so,
whether a record is older than what it measured.

A launch is {kernel, source, ptx, grid, block, cluster, shared_bytes, overlap, scalars}: `source`
hashes all that the kernel's specialisation is made of, and `ptx` the PTX that it becomes, where
the compile gate has written that down (else None).
"""

import functools
import hashlib
import importlib
import json
import math
from pathlib import Path

import numpy as np
import torch

from course_lib import bench
from course_lib.benchmarks import BENCHMARKS
from course_lib.benchmarks.case import Make
from course_lib.kernels import activation, optimizers
from course_lib.runtime.compile import compiler
from course_lib.runtime.compile.fingerprint import fingerprint
from course_lib.runtime.host.launch import Chip, part_name, planning, type_names

_SCALARS = int, float, np.generic
COMPILED = Path(__file__).resolve().parents[1] / "compiled"
GROUPS = " of groups"  # what the labels have of kernels for convolutions in groups alone


def save(records, *, folder=None):
    """`bench.save_records`, operations' records with the launches of their calls."""
    facts = bench.device_facts()
    records = [_bound(record, facts) for record in records]
    return bench.save_records(records, facts=facts, folder=folder)


def _bound(record, facts):
    if (found := listed(record, facts)) is None:
        return record
    return {key: v for key, v in record.items() if key != "kernel_hash"} | {"launches": found}


def stale(record, facts):
    """(whether a record is older than what it measured, why in words).

    facts  what `bench.device_facts` said of the device that it was measured on, which need not be
           here

    A record with launches is stale where one call of a rung would make others there today, or where
    the PTX of a kernel differs; where that is not known, its source. Others go by their hash.
    """
    if "launches" in record:
        why = difference(record["launches"], listed(record, facts))
    else:
        same = source_hashes()[record["name"]] == record["kernel_hash"]
        why = None if same else "the sources of its kernels have changed"
    return why is not None, why


def chip_of(facts):
    """The `Chip` of a device, as `bench.device_facts` describes it."""
    fields = ("shared_bytes", "multiprocessors", "l2_bytes", "name")
    return Chip(tuple(facts["compute_capability"]), *map(facts.get, fields))


def listed(record, facts):
    """{label: [launch]} of one call of each row of ours; None for what is no operation's record."""
    case = case_of(record)
    if case is None:
        return None
    chip, found = chip_of(facts), {}
    with planning(chip) as launches, torch.no_grad():
        calls = case.build(Make("cpu", empty=True), 1).ours
        for label in [row["label"] for row in record["rows"] if row["kind"] == "ours"]:
            before = len(launches)
            try:
                calls.get(label, _no_such_rung)(0)
            except ValueError as refusal:  # a rung that is no more, or does not take this size
                found[label] = str(refusal)
            else:
                found[label] = [_described(*each, chip.capability) for each in launches[before:]]
    return found


def case_of(record):
    """The `Case` of an operation's record, at whatever shape; None of a whole program's."""
    benchmark = benchmark_name(record["command"])
    if benchmark not in BENCHMARKS:
        return None
    benchmark = importlib.import_module(f"course_lib.benchmarks.{benchmark}")
    if not hasattr(benchmark, "cases"):
        return None
    name = record["name"].removesuffix(".drawn")
    cases = benchmark.cases(shapes=[tuple(record["shape"])], dtypes=[record["dtype"]])
    return next((case for case in cases if case.name == name), None)


def benchmark_name(command):
    """What `bench` was told to measure by the command of a record."""
    return command.removeprefix("python -m course_lib bench ").partition(" ")[0]


def _no_such_rung(i):
    raise ValueError("there is no such rung")


def _described(kernel, grid, block, args, options, capability):
    source, ptx = _hashes(kernel, type_names(args, options["flat"]), capability)
    function = kernel.py_func
    return {
        "kernel": f"{function.__module__}:{function.__qualname__}",
        "source": source,
        "ptx": ptx,
        "grid": _sizes(grid),
        "block": _sizes(block),
        "cluster": options["cluster"],
        "shared_bytes": options["shared_bytes"],
        "overlap": options["overlap"],
        "scalars": [_number(one) for arg in args for one in _numbers(arg)],
    }


def _numbers(arg):
    """The numbers of an argument: of a NamedTuple its fields, of an array none."""
    if isinstance(arg, tuple):
        return arg
    return (arg,) if isinstance(arg, _SCALARS) else ()


def _hashes(kernel, types, capability):
    """(hash of the source of a specialisation, hash of its PTX or None where it is not known)."""
    source = compiler.source_key(fingerprint_of(kernel), types, kernel.targetoptions)
    ptx = _ptx_hashes(capability).get(compiler.case_key(source, _compiled_by()))
    return hashlib.sha256(json.dumps(source).encode()).hexdigest()[:16], ptx


fingerprint_of = functools.lru_cache(maxsize=None)(fingerprint)


@functools.cache
def _ptx_hashes(capability):
    """{key of a specialisation: hash of its PTX} of what the compile gate knows for a chip."""
    name, found = ".".join(map(str, capability)), {}
    for path in COMPILED.glob("*.json"):
        for key, rows in json.loads(path.read_text(encoding="utf-8")).values():
            if len(row := rows.get(name, ())) > 4:
                found[key] = row[4]
    return found


@functools.cache
def _compiled_by():
    """What the compile gate compiled with: its keys are found by other Pythons and numbas too."""
    return json.loads((COMPILED / "compiled_by.txt").read_text(encoding="utf-8"))


def _sizes(sizes):
    return list(map(int, sizes)) if isinstance(sizes, tuple) else [int(sizes)]


def _number(scalar):
    number = scalar.item() if hasattr(scalar, "item") else scalar
    return number if not isinstance(number, float) or math.isfinite(number) else str(number)


@functools.cache
def source_hashes():
    """{record name: hash of the sources that it measures, as they are today}, of whole programs."""
    found = {}
    for name in (*BENCHMARKS, "tracer", "drawn"):
        module = importlib.import_module(f"course_lib.benchmarks.{name}")
        found |= getattr(module, "kernel_hashes", dict)()
    return found


def specialisations_hash(listed, keep=None, capability=(9, 0)):
    """One hash of what specialisations become: the PTX of each, else its source. No order matters.

    listed      (label, kernel, argument parts) of each, as a module's `specialisations` yields them
    keep        of a label, whether it takes part; by default all do
    capability  whose PTX it is; by default that of Hopper, which whole programs are measured on and
                the compile gate writes down
    """
    found = []
    for label, kernel, parts in listed:
        if keep is None or keep(label):
            source, ptx = _hashes(kernel, list(map(part_name, parts)), capability)
            found.append(ptx or source)
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest()


def of_kernels(kernels, module):
    """The specialisations of some of a module's kernels; ValueError where one of them has none."""
    kernels = set(kernels)
    found = [each for each in module.specialisations() if each[1] in kernels]
    if missing := kernels - {kernel for _, kernel, _ in found}:
        raise ValueError(f"{module.__name__} lists no specialisation of {missing}")
    return found


def network_hash(modules, activations):
    """One hash of all that a network without groups may launch.

    modules      of kernels
    activations  of `kernels.activation`: of each, what runs by default
    """
    listed = [each for module in modules for each in module.specialisations()]
    for operation in activations:
        for ladder in (operation.FORWARD, operation.BACKWARD):
            (chosen,) = ladder.auto
            listed += of_kernels(ladder[chosen].kernels, activation)
    return specialisations_hash(listed, _in_networks)


def _in_networks(label):
    return GROUPS not in label and not label.startswith(optimizers.STOPPABLE)


def difference(recorded, today):
    """Why launches that were `recorded` are not those of `today`, in words; None if they are."""
    if recorded.keys() != today.keys():
        return "other rungs are timed"
    for label, launches in recorded.items():
        if isinstance(today[label], str):
            return f"{label} is refused: {today[label]}"
        if len(launches) != len(today[label]):
            return f"{label} makes {len(today[label])} launches, not {len(launches)}"
        for before, now in zip(launches, today[label], strict=True):
            if found := _changed(before, now):
                return f"{label}: {found}"
    return None


def _changed(before, now):
    if _name(before) != _name(now):
        return f"{now['kernel']} is launched, not {before['kernel']}"
    for field in before.keys() - {"kernel", "source", "ptx"}:
        if before[field] != now[field]:
            return f"{before['kernel']} has another {field}: {now[field]}, not {before[field]}"
    if before["ptx"] and now["ptx"]:
        return f"{now['kernel']} has other PTX" if before["ptx"] != now["ptx"] else None
    if before["source"] != now["source"]:
        return f"{now['kernel']} has another source, and its PTX is not known"
    return None


def _name(launch):
    """What its kernel is called; not where it is made, which changes nothing that it does."""
    return launch["kernel"].rpartition(":")[2].rpartition(".")[2]
