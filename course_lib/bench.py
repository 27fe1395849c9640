"""Measure kernels beside their peers, and keep the records.

Device time comes from CUDA events around replays of a captured graph, so that the host's share is
left out; host time from a clock around many calls. The two are never mixed. Candidates take turns
within every round (interleaved), so that a drifting clock meets them all alike, and each walks
through several sets of buffers, so that a tensor isn't found in the L2 cache by luck.

A record says on what device, with which versions, when, by which command and from which kernel
sources it was measured; notebooks and README draw from it. What `benchmarks.launches` saves lists
each launch of an operation's call too, and tells which records are older than what they measured.
"""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from course_lib.runtime.compile.fingerprint import fingerprint, of_text
from course_lib.runtime.host import device, folders

#: Records that came with the course. An installed one keeps what it measures with the user's data.
RESULTS_FOLDER = folders.resource("data/results")
OWN_RESULTS = None if folders.clone() else folders.written("data/results")
_PACKAGES = ("torch", "triton", "numba", "numba-cuda", "numpy")


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median of the rounds, and their quartiles."""

    microseconds: float
    quartiles: tuple[float, float]

    @classmethod
    def of(cls, samples):
        """From microseconds per call, one for each round."""
        low, _, high = statistics.quantiles(samples, n=4)
        return cls(statistics.median(samples), (low, high))


def device_times(candidates, *, calls=20, rounds=30):
    """Time spent on the GPU, by label.

    candidates  {label: function(i)}; the function enqueues one call, on buffer set `i` of its own
                choosing, on the current stream, and must be capturable in a CUDA graph
    calls       calls in one captured graph, with i = 0, 1, …; or {label: calls}, where some
                candidates take so long that fewer will do
    rounds      timed replays of each graph, candidates taking turns

    Returns {label: Timing}.
    """
    import torch

    if device.count() == 0:
        raise device.DeviceError(f"{device.why_no_gpu()}; device_times measures on one")
    if not isinstance(calls, dict):
        calls = dict.fromkeys(candidates, calls)
    graphs = {label: _capture(function, calls[label]) for label, function in candidates.items()}
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    samples = {label: [] for label in candidates}
    for turn in range(rounds + 2):
        for label, graph in graphs.items():
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            if turn >= 2:  # the first two warm up
                samples[label].append(start.elapsed_time(end) * 1e3 / calls[label])
    return {label: Timing.of(found) for label, found in samples.items()}


def _capture(function, calls):
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for i in range(calls):
            function(i)
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            function(i)
    return graph


def host_times(candidates, *, calls=200, rounds=30):
    """Time the host spends on enqueueing one call, by label; the device is waited for between.

    Keep `calls` under the depth of the launch queue (about 1,000), or the host waits for the GPU.
    """
    import torch

    samples = {label: [] for label in candidates}
    for turn in range(rounds + 2):
        for label, function in candidates.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                function()
            elapsed = time.perf_counter() - start
            if turn >= 2:
                samples[label].append(elapsed * 1e6 / calls)
    torch.cuda.synchronize()
    return {label: Timing.of(found) for label, found in samples.items()}


def call_times(candidates, *, rounds=300):
    """Time of one call as Python sees it, by label: until its result is there.

    candidates  {label: function()}; the device is waited for after each call
    """
    import torch

    samples = {label: [] for label in candidates}
    for turn in range(rounds + 20):
        for label, function in candidates.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            function()
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
            if turn >= 20:
                samples[label].append(elapsed * 1e6)
    return {label: Timing.of(found) for label, found in samples.items()}


def loop_times(candidates, *, calls=50, rounds=20):
    """Time of one of many calls as Python sees them, by label: the device is waited for at the end.

    candidates  {label: function(i)}; what takes longer counts, the host's work or the device's
    calls       as in `device_times`
    """
    import torch

    if device.count() == 0:
        raise device.DeviceError(f"{device.why_no_gpu()}; device_times measures on one")
    if not isinstance(calls, dict):
        calls = dict.fromkeys(candidates, calls)
    samples = {label: [] for label in candidates}
    for turn in range(rounds + 2):
        for label, function in candidates.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for i in range(calls[label]):
                function(i)
            torch.cuda.synchronize()
            elapsed = time.perf_counter() - start
            if turn >= 2:  # the first two warm up
                samples[label].append(elapsed * 1e6 / calls[label])
    return {label: Timing.of(found) for label, found in samples.items()}


class Stopped(KeyboardInterrupt):
    """A benchmark was stopped halfway; `records` are those of the cases before."""

    def __init__(self, records):
        super().__init__(f"after {len(records)} records")
        self.records = records


def collected(records):
    """The records of a generator as a list. Raises `Stopped` with them if Ctrl-C ends it."""
    found = []
    try:
        for record in records:
            found.append(record)
    except KeyboardInterrupt:
        raise Stopped(found) from None
    return found


def buffer_sets(n_bytes, *, index=0, most=24):
    """How many sets of buffers of `n_bytes` make a round outgrow the L2 cache three times."""
    return max(1, min(most, -(-3 * device.properties(index).l2_bytes // max(n_bytes, 1)) + 1))


def row(label, kind, timing, n_bytes, copy):
    """One line of a record. `kind` is "ours" or "peer"; `copy` the Timing of an equal copy."""
    return plain_row(label, kind, timing) | {
        "gbps": round(n_bytes / timing.microseconds / 1e3, 1),
        "percent_of_copy": round(100 * copy.microseconds / timing.microseconds, 1),
    }


def plain_row(label, kind, timing):
    """One line of a record that is held against no copy."""
    return {
        "label": label,
        "kind": kind,
        "microseconds": round(timing.microseconds, 3),
        "quartiles": [round(q, 3) for q in timing.quartiles],
    }


def case_record(case, rows, copy):
    """The record of a `benchmarks.case.Case`; `copy` is the Timing of its limit, if it has one."""
    found = host_record(case.name, case.shape, case.dtype, rows, None, case.command)
    del found["kernel_hash"]  # its launches are listed as it is saved
    found["bytes"] = case.n_bytes
    if copy is not None:
        found["copy_microseconds"] = round(copy.microseconds, 3)
        found["copy_gbps"] = round(case.n_bytes / copy.microseconds / 1e3, 1)
    if case.flops:
        found["flops"] = case.flops
    return found


def make_record(name, shape, dtype, n_bytes, copy, rows, kernel_hash, command):
    """A record of device times; `copy` is the Timing of an equal-sized copy in the same run."""
    return host_record(name, shape, dtype, rows, kernel_hash, command) | {
        "bytes": n_bytes,
        "copy_microseconds": round(copy.microseconds, 3),
        "copy_gbps": round(n_bytes / copy.microseconds / 1e3, 1),
    }


def host_record(name, shape, dtype, rows, kernel_hash, command):
    """A record of host times, and what records of either kind have in common."""
    return {
        "name": name,
        "shape": list(shape),
        "dtype": dtype,
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": command,
        "kernel_hash": kernel_hash,
        "versions": versions(),
        "rows": rows,
    }


def kernel_hash(functions):
    """One hash for all kernels and host functions that take part in what is measured."""
    digests = [fingerprint(function) for function in functions]
    return hashlib.sha256("\n".join(digests).encode()).hexdigest()


def text_hash(functions):
    """One hash for host functions, by their own text: what they call is PyTorch's, say."""
    return hash_of([of_text(function) for function in functions])


def versions():
    """Versions of everything that bears on a measurement."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        found["torch_cuda"] = torch.version.cuda
        found["cudnn"] = torch.backends.cudnn.version()
    return found


def commit():
    """The project's commit, with "+" when files differ from it; "unknown" outside git."""
    if named := os.environ.get("COURSE_LIB_COMMIT"):
        return named
    folder = folders.clone()
    if folder is None:  # what is around an installed course is another project
        return f"version {importlib.metadata.version('course_lib')}"
    try:
        command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return found.stdout.strip() or "unknown"


def device_facts(index=0):
    """What a record says of the GPU it was measured on."""
    found = device.properties(index)
    version = device.driver_version()
    return {
        "name": found.name,
        "compute_capability": list(found.compute_capability),
        "multiprocessors": found.multiprocessors,
        "shared_bytes": found.shared_bytes_per_block_optin,
        "l2_bytes": found.l2_bytes,
        "memory_bytes": found.total_bytes,
        "driver_cuda": f"{version[0]}.{version[1]}",
        "driver": _driver_release(),
    }


def _driver_release():
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found.group() if found else "unknown"


def results_path(name):
    """The folder of what was measured on the device called `name`.

    It holds device.json, which tells what the device is, and a file of records for each operation.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    return RESULTS_FOLDER / slug


def save_records(records, *, facts=None, folder=None):
    """Add `records` to a device's folder; one of the same name, shape and dtype is replaced.

    facts   what `device_facts` said of the device; None: of this one
    folder  stands in for data/results; None: that, or in an installed course `OWN_RESULTS`

    Returns the folder's path.
    """
    facts = facts or device_facts()
    path = results_path(facts["name"])
    if folder := folder or OWN_RESULTS:
        path = Path(folder) / path.name
    path.mkdir(parents=True, exist_ok=True)
    fresh = {}
    for record in records:
        fresh.setdefault(record["name"].partition(".")[0], {})[identity(record)] = record
    for operation, found in fresh.items():
        file = path / f"{operation}.json"
        held = json.loads(file.read_text()) if file.exists() else []
        held = [record for record in held if identity(record) not in found] + [*found.values()]
        held.sort(key=identity)
        _write(file, held)
    _write(path / "device.json", facts)
    return path


def _write(file, held):
    temporary = file.with_suffix(".tmp")
    temporary.write_text(as_text(held))
    os.replace(temporary, file)


def as_text(held):
    """What a file of records holds: JSON with a line for each row, each launch, and other field."""
    text = json.dumps(held, indent=1)
    flat = r'\{\s+"(?:kernel|label)": [^{}]*\}|(?<="versions": )\{[^{}]*\}|(?<="shape": )\[[^]]*\]'
    return re.sub(flat, lambda found: json.dumps(json.loads(found[0])), text) + "\n"


def identity(record):
    """What tells a record from others: name, dtype and shape."""
    shape = record["shape"]
    return record["name"], record["dtype"], shape if shape is None else tuple(shape)


def load_records(name=None):
    """{"device": …, "records": […]} of the device called `name`, or of the only one recorded.

    Returns None where nothing is recorded. With several devices and no name: the one of which most
    is recorded; the one here if there are records of the same names.
    """
    if name is not None:
        return _loaded(results_path(name).name)
    every = recordings()
    if not every or not device.count():
        return every[0] if every else None
    here = load_records(device.properties().name)
    names = [{record["name"] for record in held["records"]} for held in (here, every[0]) if held]
    return here if here and names[0] >= names[1] else every[0]


def recordings():
    """What `load_records` gives, of every device that something is recorded of: most first."""
    names = {path.parent.name for root in _roots() for path in root.glob("*/device.json")}
    return sorted(map(_loaded, sorted(names)), key=lambda held: -len(held["records"]))


def _roots():
    return [RESULTS_FOLDER] if OWN_RESULTS is None else [RESULTS_FOLDER, OWN_RESULTS]


def _loaded(name):
    """What is recorded in the folders called `name`, the user's own first; or None."""
    facts, records = None, {}
    for folder in (root / name for root in _roots()):
        if not (folder / "device.json").exists():
            continue
        facts = json.loads((folder / "device.json").read_text())
        for file in sorted(folder.glob("*.json")):
            if file.name != "device.json":
                records |= {identity(record): record for record in json.loads(file.read_text())}
    return facts and {"device": facts, "records": [*records.values()]}


def find(records, **wanted):
    """The records whose fields equal `wanted`, e.g. ``find(r, name="relu.forward")``.

    A name that ends in a star stands for all that begin like it: ``name="relu.*"``. Where
    `COURSE_LIB_READS` names a file, a line is added to it that tells what was looked for and a
    hash of what was found, so that a stored notebook can be told from one of older records.
    """
    wanted = {key: list(v) if isinstance(v, tuple) else v for key, v in wanted.items()}
    name, exact = wanted.get("name", ""), dict(wanted)
    if name.endswith("*"):
        del exact["name"]
    found = [
        r
        for r in records["records"]
        if r["name"].startswith(name.removesuffix("*"))
        and all(r.get(k) == v for k, v in exact.items())
    ]
    if log := os.environ.get("COURSE_LIB_READS"):
        line = {"wanted": wanted, "hash": hash_of(found)}
        with open(log, "a") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
    return found


def hash_of(found):
    """A short hash of all that records say."""
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode()).hexdigest()[:16]


def times_as_fast(record, fast, slow):
    """How many times as fast the row labelled `fast` is as the one labelled `slow`."""
    times = {row["label"]: row["microseconds"] for row in record["rows"]}
    return times[slow] / times[fast]
