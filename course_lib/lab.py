"""The command `lab`: the lessons in a folder of the user's, opened in JupyterLab.

Files that the user has changed stay as they are. An update of such a file is put beside it, as
`01_threads_and_memory.update.ipynb`. `.course_lib.json` in the folder says by hashes which files
are as they were put there.
"""

import contextlib
import hashlib
import importlib.util
import json
import os
import sys
import tempfile
from pathlib import Path

from course_lib.runtime.host import folders
from course_lib.runtime.host.home import home

FOLDER = Path("gpu-lessons")
FIRST = "00_start_here.ipynb"
PUT = ".course_lib.json"


def lessons():
    """Return {path in the user's folder: the file that it is a copy of}."""
    source = folders.resource("notebooks")
    names = [*source.glob("[0-9][0-9]_*.ipynb"), source / "glossary.md"]
    names += source.glob("solutions/[0-9][0-9]_*.ipynb")
    return {path.relative_to(source).as_posix(): path for path in sorted(names)}


def put(folder):
    """Put the lessons into `folder`, or bring them up to date.

    Returns ([files written], [files written beside one that the user has changed]). Raises OSError
    where the folder can't be made or written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    before = _noted(folder)
    noted, new, beside = dict(before), [], []
    for name, source in lessons().items():
        content = source.read_bytes()
        noted[name] = _hash(content)
        if _hash_of(folder / name) == noted[name]:
            continue
        if _hash_of(folder / name) in (None, before.get(name)):
            _write(folder / name, content)
            new.append(name)
        elif before.get(name) != noted[name]:
            update = _free(folder / name, noted[name])
            _write(update, content)
            beside.append(update.relative_to(folder).as_posix())
    if noted != before:
        _write(folder / PUT, json.dumps(noted, indent=1).encode())
    return new, beside


def _noted(folder):
    """{name: hash of what was put there last}; {} where that is not known."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads((folder / PUT).read_bytes())
        if isinstance(found, dict):
            return found
    return {}


def _free(path, digest):
    """Return where an update of `path` goes: over none of the user's files."""
    number = 1
    while True:
        sign = "update" if number == 1 else f"update-{number}"
        update = path.with_name(f"{path.stem}.{sign}{path.suffix}")
        if _hash_of(update) in (None, digest):
            return update
        number += 1


def _hash(content):
    return hashlib.sha256(content).hexdigest()


def _hash_of(path):
    """The hash of a file; None where there is none. Anything else there is the user's."""
    if path.is_file():
        return _hash(path.read_bytes())
    return "no file" if os.path.lexists(path) else None


def _write(path, content):
    """Write a file in one step: an interrupted one leaves what was there."""
    path.parent.mkdir(exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def command(folder, *, browser=True, port=None, ip=None):
    """Return (arguments, environment) of the process that shows `folder` in JupyterLab."""
    arguments = [
        *(sys.executable, "-P", "-m", "jupyterlab"),  # a learner's `random.py` here is no module
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{FIRST}",
        f"--LabApp.workspaces_dir={folder / '.jupyter' / 'workspaces'}",
    ]
    arguments += [] if browser else ["--no-browser"]
    arguments += [] if port is None else [f"--port={port}"]
    arguments += [] if ip is None else [f"--ip={ip}"]
    settings = [str(folders.resource(".jupyter")), os.environ.get("JUPYTER_CONFIG_PATH", "")]
    environment = os.environ | {"JUPYTER_CONFIG_PATH": os.pathsep.join(filter(None, settings))}
    return arguments, {"HOME": str(home())} | environment


def run(folder, *, browser=True, port=None, ip=None):
    """Put the lessons into `folder`, and become JupyterLab; 1 where the folder can't be written.

    Raises ModuleNotFoundError where JupyterLab is not installed.
    """
    folder = Path(folder or FOLDER).absolute()
    try:
        new, beside = put(folder)
    except OSError as error:
        why = f"no lessons can be put into {folder}: {error}"
        print(f"python -m course_lib lab: {why}", file=sys.stderr)
        return 1
    if new:
        print(f"{len(new)} files of the course are in {folder}")
    if beside:
        print("You have changed files of which there are new versions. Those are beside yours:")
        print(*(f"  {name}" for name in beside), sep="\n")
    if importlib.util.find_spec("jupyterlab") is None:
        raise ModuleNotFoundError("No module named 'jupyterlab'", name="jupyterlab")
    sys.stdout.flush()
    arguments, environment = command(folder, browser=browser, port=port, ip=ip)
    return os.execve(arguments[0], arguments, environment)
