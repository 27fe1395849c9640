"""`python -m course_lib kernels`: what was compiled, what became of it, and where it lies.

Reads the cache on disk; needs no GPU. A kernel of the course is held against its source of today.
"""

import datetime
import importlib
import importlib.util
import itertools
import os
import re
import shutil
import subprocess
import tempfile
import types
from dataclasses import dataclass
from pathlib import Path

from course_lib.kernels.operation import Ladder
from course_lib.runtime.compile import cache, compiler
from course_lib.runtime.compile.fingerprint import fingerprint

CURRENT, CHANGED, UNKNOWN, DAMAGED = "as built", "changed", "not known", "damaged"
GONE = "gone"
LEGEND = {
    CHANGED: "the source, or a version, is no longer what it was built from: nothing here uses it",
    UNKNOWN: "typed into a notebook, or in a file of yours: not held against its source",
    DAMAGED: "cut short or overwritten: it will be compiled again",
}
SHOWN = 12  # digits of a key that are shown; a kernel may be asked for by fewer
DISASSEMBLERS = {"nvdisasm": ["-c"], "cuobjdump": ["-sass"]}


class NotFound(ValueError):
    """What was asked for is not there, or is not one thing; the text is for the reader."""


@dataclass(frozen=True)
class Row:
    """One compiled kernel as the list shows it. Numbers are None where the file is damaged."""

    key: str
    operation: str
    label: str  # which rung, and of what, where the operation tells
    kernel: str
    signature: str
    chip: str
    registers: int | None
    shared_bytes: int | None
    stack_bytes: int | None
    n_bytes: int
    built: float
    source: str
    path: Path

    def about(self):
        """What a word in the list may be looked for in."""
        fields = (
            self.key, self.operation, self.label, self.kernel, self.signature, self.chip,
            self.source,
        )  # fmt: skip
        return " ".join(fields).lower()


def rows(word=""):
    """A `Row` for each compiled kernel in which `word` occurs, by operation, kernel and chip."""
    entries = cache.entries()
    sources = _sources(entries)
    found = [_row(entry, *sources[entry.path]) for entry in entries]
    found = [row for row in found if word.lower() in row.about()]
    order = ("operation", "kernel", "label", "chip", "signature", "built")
    return sorted(found, key=lambda row: [getattr(row, field) for field in order])


def _row(entry, source, label):
    head = entry.head
    if not head:
        return Row(entry.key, "?", "", "?", "?", "?", None, None, None, entry.n_bytes, entry.built,
                   source, entry.path)  # fmt: skip
    return Row(
        key=entry.key,
        operation=operation_of(head["module"]),
        label=label,
        kernel=head["qualname"].rpartition(".")[2],
        signature=short_signature(head["argtypes"]),
        chip="sm_{}{}".format(*head["compute_capability"]),
        registers=head["registers"],
        shared_bytes=head["shared_bytes"],
        stack_bytes=head["stack_bytes"],
        n_bytes=entry.n_bytes,
        built=entry.built,
        source=source,
        path=entry.path,
    )


def operation_of(module):
    """What the list calls a module: the operation of course_lib.kernels that it is a part of."""
    parts = module.split(".")
    if parts[:2] == ["course_lib", "kernels"] and len(parts) > 2:
        return parts[2]
    return "notebook or script" if module == "__main__" else module.removeprefix("course_lib.")


def short_signature(argtypes):
    """Argument types as a reader wants them: arrays in numba's short form, equal ones counted."""
    runs = [(text, len(list(run))) for text, run in itertools.groupby(map(_short, argtypes))]
    return ", ".join(text if number == 1 else f"{number} × {text}" for text, number in runs)


def _short(argtype):
    found = re.fullmatch(r"array\((\w+), (\d+)d, ([ACF])(?:, .*)?\)", argtype)
    if found is None:
        return argtype.replace("__nv_bfloat16", "bfloat16")
    dtype, n_dims, order = found[1], int(found[2]), found[3]
    axes = [":"] * n_dims
    if axes and order in "CF":
        axes[-1 if order == "C" else 0] = "::1"
    return f"{dtype.removeprefix('__nv_')}[{', '.join(axes)}]"


# ------------------------------------------------------------------- is it still the source?


def _sources(entries):
    """{path of an entry: (what has become of its source, its label)}."""
    digests, newest = {}, {}
    for entry in sorted(entries, key=lambda entry: entry.built):
        if entry.head:
            newest[_identity(entry)] = entry.path
    return {entry.path: _source(entry, newest, digests) for entry in entries}


def _identity(entry):
    """What two builds of one kernel have in common."""
    head = entry.head
    chip = tuple(head["compute_capability"])
    return head["file"], head["module"], head["qualname"], head["signature"], chip


def _source(entry, newest, digests):
    head = entry.head
    if not head:
        return DAMAGED, ""
    module = head["module"]
    if module.startswith("course_lib."):
        if module not in digests:
            digests[module] = _digests(module)
        return _held_against(head, digests[module])
    # Another's module is not imported only to be looked at: that would run it. But what was built
    # again since then is what it was no more.
    replaced = "<locals>" not in head["qualname"] and newest[_identity(entry)] != entry.path
    return (CHANGED if replaced else UNKNOWN), ""


def _held_against(head, digests):
    if digests in (None, GONE):
        return (UNKNOWN if digests is None else CHANGED), ""
    today = digests.get(head["qualname"], {})
    for digest, label in today.items():
        if compiler.is_current(head, digest):
            return CURRENT, label
    # Made by a function, for a purpose that nobody here knows of: it may be made again.
    return (UNKNOWN if "<locals>" in head["qualname"] and not today else CHANGED), ""


def _digests(module):
    """{qualified name: {fingerprint: label}} of the kernels of `module` as they are today.

    None where the module can't be imported, GONE where there is no such module any more.
    """
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        return GONE if f"{module}.".startswith(f"{error.name}.") else None  # or what it needs is
    except Exception:
        return None
    found = {}
    for kernel, label in _kernels(imported):
        function = kernel.py_func
        if function.__module__ == module:
            found.setdefault(function.__qualname__, {}).setdefault(fingerprint(kernel), label)
    return found


def _kernels(module):
    """(kernel, label) of what `module` holds, or the operation hands out that it is a part of."""
    parts = module.__name__.split(".")
    if parts[:2] == ["course_lib", "kernels"]:
        operation = importlib.import_module(".".join(parts[:3]))
        labels, ways = {}, _ways(operation)
        for label, kernel, _ in getattr(operation, "specialisations", tuple)():
            labels.setdefault(id(kernel), (kernel, []))[1].append(label)
        for kernel, found in labels.values():
            yield kernel, ", ".join((_common(found), *ways.get(id(kernel), ())))
    for length in range(len(parts), 2, -1):
        holder = importlib.import_module(".".join(parts[:length]))
        yield from ((kernel, "") for kernel in _held(vars(holder), set()))


def _ways(operation):
    """{id of a kernel: names of the ways that may launch it}, of rungs of several ways."""
    found = {}
    for holder in (operation, *getattr(operation, "OPERATIONS", {}).values()):
        for ladder in vars(holder).values():
            for name in ladder.variants if isinstance(ladder, Ladder) else ():
                for kernel in ladder.named(name).kernels if "/" in name else ():
                    found.setdefault(id(kernel), {})[name] = None
    return found


def _common(labels):
    """The words with which all labels begin, without the type that most of them end in."""
    if len(labels) == 1:
        return labels[0]
    columns = zip(*map(str.split, labels), strict=False)
    words = itertools.takewhile(lambda column: len(set(column)) == 1, columns)
    return " ".join(each[0] for each in words).rstrip(",")


def _held(value, seen):
    """The kernels in `value`: a kernel, or a dict, list or tuple of such, however deep."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(getattr(value, "py_func", None), types.FunctionType):
        yield value
    elif isinstance(value, (dict, list, tuple, set, frozenset)):
        for each in list(value.values() if isinstance(value, dict) else value):
            yield from _held(each, seen)


# ------------------------------------------------------------------------------ as text


def table(found, *, paths=False):
    """The rows as text: a line of numbers for each kernel, and under it its signature."""
    if not found:
        return ""
    head = ["key", "kernel", "chip", "registers", "shared", "stack", "size", "built", "source"]
    cells = [head, *map(_cells, found)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(head))]
    lines, operation = [_line(head, widths)], None
    for row, texts in zip(found, cells[1:], strict=True):
        if row.operation != operation:
            operation = row.operation
            lines += ["", operation]
        lines.append(_line(texts, widths))
        lines.append(f"    {row.label} ({row.signature})".replace("  (", " ("))
        if paths:
            lines.append(f"    {row.path}")
    return "\n".join(lines)


def _cells(row):
    numbers = [row.registers, row.shared_bytes, row.stack_bytes]
    built = datetime.datetime.fromtimestamp(row.built).isoformat(" ", "minutes")
    counts = ["?" if number is None else f"{number:,}" for number in numbers]
    return [row.key[:SHOWN], row.kernel, row.chip, *counts, size(row.n_bytes), built, row.source]


def _line(texts, widths):
    # Numbers to the right: registers, shared, stack, size.
    cells = [
        text.rjust(width) if 3 <= column <= 6 else text.ljust(width)
        for column, (text, width) in enumerate(zip(texts, widths, strict=True))
    ]
    return "  ".join(cells).rstrip()


def size(n_bytes):
    """A number of bytes as a reader wants it."""
    if n_bytes < 1000:
        return f"{n_bytes} bytes"
    return f"{n_bytes / 1e3:,.1f} kB" if n_bytes < 1e6 else f"{n_bytes / 1e6:,.1f} MB"


def summary(found):
    """How many kernels, how large, where; and what the marks mean that stand in the list."""
    folder = cache.cache_folder()
    if not found:
        return f"No compiled kernel in {folder}."
    number = f"{len(found)} compiled kernel{'s' * (len(found) != 1)}"
    lines = [f"{number}, {size(sum(row.n_bytes for row in found))}, in {folder},"]
    lines += ["each in a file named by its whole key. Registers and stack are a thread's; stack is"]
    lines += ["spilled registers and indexed local arrays; shared is a block's static memory."]
    seen = {row.source for row in found}
    lines += [f"  {mark}: {text}" for mark, text in LEGEND.items() if mark in seen]
    return "\n".join(lines)


# ------------------------------------------------------------------------- PTX and SASS


def find_one(name):
    """The one kernel that is called `name`, or whose key begins so; NotFound tells what there is.

    Where several of a name are there, of which all but one are of an older source, it is that one.
    """
    readable = [row for row in rows() if row.source != DAMAGED]
    named = [row for row in readable if row.kernel == name]
    found = named or [row for row in readable if name and row.key.startswith(name.lower())]
    if len(found) > 1:
        found = [row for row in found if row.source != CHANGED] or found
    if len(found) == 1:
        return found[0]
    if found:
        times = f"{name} is compiled {len(found)} times; name one by its key"
        raise NotFound(f"{times}:\n{table(found)}")
    known = sorted({row.kernel for row in readable})
    raise NotFound(
        f"no kernel called {name}, and no key that begins so, in {cache.cache_folder()}"
        + (f"; there are {', '.join(known)}" if known else ", which is empty")
    )


def ptx(row):
    """The PTX that this kernel was made from, under a heading; NotFound where it is damaged."""
    return f"{_heading(row)}\n{_machine_code(row)[1]}"


def sass(row):
    """The machine instructions of this kernel, under a heading; NotFound without a disassembler."""
    cubin, _ = _machine_code(row)
    failures = []
    for tool in disassemblers():
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "kernel.cubin"
            file.write_bytes(cubin)
            command = [tool, *DISASSEMBLERS[Path(tool).stem], file]
            done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            return f"{_heading(row)}\n{done.stdout}"
        failures.append(f"{tool}: {done.stderr.strip()}")
    if failures:
        raise NotFound("no disassembler could read this kernel:\n" + "\n".join(failures))
    raise NotFound(
        "SASS needs nvdisasm or cuobjdump, and neither is on PATH, in CUDA_HOME or among the "
        "installed packages. Both come with NVIDIA's CUDA toolkit and with Triton: "
        "pip install triton"
    )


def _machine_code(row):
    try:
        return cache.machine_code(row.path)
    except ValueError as error:
        raise NotFound(str(error)) from None


def _heading(row):
    numbers = f"{row.registers} registers, {row.stack_bytes} bytes of stack per thread"
    return (
        f"// {row.kernel} of {row.label or row.operation}, {row.chip}: {numbers}, "
        f"{row.shared_bytes} bytes of shared memory\n// ({row.signature})\n// {row.path}"
    )


def disassemblers():
    """Paths of the tools here that print the instructions of a cubin, the best first."""
    folders = [Path(os.environ[name]) / "bin" for name in ("CUDA_HOME", "CUDA_PATH")
               if os.environ.get(name)]  # fmt: skip
    for name, pattern in (("nvidia", "*/bin"), ("triton", "backends/nvidia/bin")):
        spec = importlib.util.find_spec(name)
        for folder in (spec and spec.submodule_search_locations) or ():
            folders += sorted(Path(folder).glob(pattern))
    for tool in DISASSEMBLERS:
        places = [shutil.which(tool), *(shutil.which(tool, path=folder) for folder in folders)]
        yield from dict.fromkeys(place for place in places if place)


# ---------------------------------------------------------------------------- the command


def run(word="", *, ptx_of=None, sass_of=None, clear=False, paths=False):
    """What the command prints. Raises NotFound for a name that isn't there, OSError as `clear`."""
    if clear:
        number, n_bytes = cache.clear()
        deleted = f"{number} file{'s' * (number != 1)}, {size(n_bytes)}"
        return f"Deleted from {cache.cache_folder()}: {deleted}."
    if ptx_of is not None:
        return ptx(find_one(ptx_of))
    if sass_of is not None:
        return sass(find_one(sass_of))
    found = rows(word)
    if word and not found:
        return f"No compiled kernel in {cache.cache_folder()} has {word!r} in its line."
    return "\n\n".join(filter(None, [table(found, paths=paths), summary(found)]))
