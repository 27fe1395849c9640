"""What a command found, as text, JSON, SARIF 2.1.0 or commands of a GitHub workflow."""

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from course_lib.scripts.finding import START, shown_path

FORMATS = "text", "json", "sarif", "github"
_SARIF = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
_ABOUT = {
    "race": "Two threads of a block touch one element, one writes it, and nothing orders them",
    "race-between-blocks": "Two blocks touch one element, one writes it, and nothing orders them",
    "uninitialised-read": "Memory is read that nobody has written",
    "out-of-bounds": "An index is negative, or past the end of its array",
    "barrier-divergence": "Threads of a block wait at different barriers",
    "barrier-mismatch": "A barrier waits for threads that have passed it by",
    "exited-before-barrier": "Threads of a warp have returned before a barrier of the others",
    "shuffle-inactive-lane": "A shuffle reads from a lane that takes no part",
    "shared-aliasing": "Two views of dynamic shared memory overlap",
    "read-after-exit": "The shared memory of a block is read after the block has exited",
    "deadlock": "No thread can go on, or none ends",
    "endless-poll": "A loop waits for memory that the compiler need not read again",
    "not-compilable": "numba.cuda cannot compile the kernel",
    "launch-error": "A GPU would refuse the launch",
    "float64-promotion": "The machine code computes in float64 where float32 was meant",
    "integer-width": "numba widens an integer that NumPy leaves narrow",
    "spill": "Values do not fit in the registers",
}
_WORKFLOW = {"error": "error", "warning": "warning", "note": "notice"}


@dataclass
class Result:
    """What a command has to say.

    Attributes
    ----------
    command : "sanitize", "trace" or "lint"
    program : str
        The script's name.
    status : int
        The exit status.
    findings : list of Found
    launched : dict
        {name of a kernel: its launches}
    checked : int
        Launches that were looked at to their end.
    order : str
    unchecked : list of str
        Sentences: what was not looked at, and why.
    notes : list of str
        Other sentences.
    sites : list of dict
        What a trace counted for each access.
    text : str
        A trace as a table.
    """

    command: str
    program: str
    status: int = 0
    findings: list = field(default_factory=list)
    launched: dict = field(default_factory=dict)
    checked: int = 0
    order: str = "forward"
    unchecked: list = field(default_factory=list)
    notes: list = field(default_factory=list)
    sites: list = field(default_factory=list)
    text: str = ""

    def summary(self):
        """One sentence: how much was found in how much."""
        count = len(self.findings)
        found = f"{count or 'no'} finding{'' if count == 1 else 's'}"
        launches = many(sum(self.launched.values()), "launch", "launches")
        kernels = many(len(self.launched), "kernel", "kernels")
        done = {"sanitize": "checked", "trace": "traced", "lint": "compiled"}[self.command]
        rest = f", {self.checked} of them {done}" if (
            self.checked != sum(self.launched.values())) else ""
        if self.command == "trace":
            return f"{launches} of {kernels}{rest}"
        return f"{found} in {launches} of {kernels}{rest}"


def many(count, one, several):
    """"1 launch", "2 launches"."""
    return f"{count} {one if count == 1 else several}"


def written(result, kind):
    """The result in one of FORMATS."""
    return {"text": _text, "json": _json, "sarif": _sarif, "github": _github}[kind](result)


def _text(result):
    lines = []
    for found in result.findings:
        times = f" ({found.count} times)" if found.count > 1 else ""
        lines.append(f"{shown_path(found.filename)}:{found.line}: {found.kind}: "
                     f"{found.message}{times}")
        lines += [f"    {part}" for part in (found.source, found.launch) if part]
        lines.append("")
    lines += [result.text, ""] if result.text else []
    lines += [f"{each}." for each in (*result.notes, *result.unchecked)]
    return "\n".join([*lines, f"{result.command}: {result.summary()}."])


def _json(result):
    data = {"version": 1, "command": result.command, "program": result.program,
            "status": result.status, "order": result.order, "launches": result.launched,
            "checked": result.checked, "findings": [each.as_data() for each in result.findings],
            "sites": result.sites, "unchecked": result.unchecked, "notes": result.notes}
    return json.dumps(data, indent=2)


# -- SARIF ---------------------------------------------------------------------------------------


def _sarif(result):
    from course_lib import __version__

    kinds = list(dict.fromkeys(each.kind for each in result.findings))
    rules = [{"id": kind, "shortDescription": {"text": f"{_ABOUT.get(kind, kind)}."}}
             for kind in kinds]
    notices = [{"level": level, "message": {"text": f"{each}."}}
               for level, parts in (("warning", result.unchecked), ("note", result.notes))
               for each in parts]
    run = {
        "tool": {"driver": {"name": f"course_lib {result.command}", "version": __version__,
                            "rules": rules}},
        "invocations": [{"executionSuccessful": result.status in (0, 1),
                         "exitCode": result.status, "toolExecutionNotifications": notices}],
        "originalUriBaseIds": {"%SRCROOT%": {"uri": f"{Path(START).as_uri()}/"}},
        "results": [_sarif_result(each, kinds.index(each.kind)) for each in result.findings],
        "columnKind": "unicodeCodePoints",
    }
    return json.dumps({"$schema": _SARIF, "version": "2.1.0", "runs": [run]}, indent=2)


def _sarif_result(found, rule):
    data = {"ruleId": found.kind, "ruleIndex": rule, "level": found.level,
            "message": {"text": found.message}, "occurrenceCount": found.count,
            "locations": [_location(found.filename, found.line, found.source)]}
    others = [line for line in dict.fromkeys(found.lines) if line != found.line]
    if others:
        data["relatedLocations"] = [_location(found.filename, line) for line in others]
    if found.launch:
        data["locations"][0]["logicalLocations"] = [
            {"name": found.launch.kernel, "kind": "function"}]
        data["properties"] = {"launch": str(found.launch)}
    return data


def _location(filename, line, source=""):
    cell = _cell(filename)
    region = {"startLine": max(line, 1)}
    if source:
        region["snippet"] = {"text": source}
    if cell is not None:
        # Lines of a cell are none of the file's.
        return {"physicalLocation": {"artifactLocation": _artifact(cell[0])},
                "message": {"text": f"cell {cell[1]}, line {line}"}}
    return {"physicalLocation": {"artifactLocation": _artifact(filename), "region": region}}


def _cell(filename):
    """(notebook, number) of the name of a notebook's cell, else None."""
    found = re.fullmatch(r"<(.*), cell (\d+)>", filename)
    return found and (found[1], int(found[2]))


def _artifact(filename):
    path = Path(shown_path(filename))
    if path.is_absolute():
        return {"uri": path.as_uri()}
    return {"uri": quote(path.as_posix()), "uriBaseId": "%SRCROOT%"}


# -- a workflow of GitHub ------------------------------------------------------------------------


def _github(result):
    lines = []
    for found in result.findings:
        cell = _cell(found.filename)
        places = {"file": shown_path(cell[0] if cell else found.filename).replace(os.sep, "/")}
        if not cell:
            places["line"] = found.line
        where = f"cell {cell[1]}, line {found.line}: " if cell else ""
        launch = f"\n{found.launch}" if found.launch else ""
        lines.append(_workflow(_WORKFLOW[found.level], f"{where}{found.message}{launch}",
                               **places, title=found.kind))
    lines += [_workflow("warning", f"{each}.") for each in result.unchecked]
    lines += [_workflow("notice", f"{each}.") for each in result.notes]
    return "\n".join([*lines, f"{result.command}: {result.summary()}."])


def _workflow(command, message, **properties):
    """`::error file=a.py,line=3::message`, with what would end a part of it escaped."""
    def escaped(value, more=()):
        text = str(value).replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
        for mark in more:
            text = text.replace(mark, f"%{ord(mark):02X}")
        return text

    parts = ",".join(f"{key}={escaped(value, ':,')}" for key, value in properties.items())
    return f"::{command}{' ' * bool(parts)}{parts}::{escaped(message)}"


# -- a trace -------------------------------------------------------------------------------------


def site_data(site):
    """A TracedSite as a dictionary that JSON can hold."""
    data = {key: getattr(site, key) for key in (
        "source", "line", "filename", "function", "op", "space", "array", "requests", "lanes",
        "active_lanes", "bytes")}
    if site.space == "global":
        return data | {"sectors_per_request": site.sectors_per_request,
                       "bytes_moved": site.bytes_moved}
    return data | {"bank_ways": site.bank_ways}
