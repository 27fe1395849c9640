"""The progress record: a small JSON file that survives restarts, crashes and two notebooks.

Where it is: the file named by `COURSE_LIB_PROGRESS`; else `progress.json` in the project folder
(ignored by git), which stays with a copy kept on a mounted drive; else, when the package was
installed without its folder or the folder can't be written, in the user's data folder.

The file may be deleted at any time. Each update takes a lock, reads the file again, changes one
exercise and replaces the file in one step, so that two notebooks never undo each other's work and
an interrupted write leaves the old file. The version before the last is kept as `.bak`. A file
that can't be read is moved aside, never overwritten; one from a newer course is left alone. When
nothing can be written the record is kept in memory, and the learner is told once.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from course_lib.runtime.host import folders

FORMAT = 1

#: Seconds to wait for another notebook to finish its own update, milliseconds on a quick disk.
LOCK_TIMEOUT = 10.0

#: What an entry may hold, and how its kinds are called.
_KINDS = {
    "tried": str, "solved": str, "attempts": int, "hints": int, "solution_seen": bool, "kept": dict,
}  # fmt: skip
_IN_WORDS = {str: "text", int: "a count", bool: "true or false", dict: "an object"}

_unsaved: dict[str, dict] = {}
_told: set = set()


class _LeftAlone(Exception):
    """The file must not be written; the message says why."""


def path() -> Path:
    """Return the file that holds the progress record."""
    chosen = os.environ.get("COURSE_LIB_PROGRESS")
    if chosen:
        return Path(chosen).expanduser()
    return folders.written("progress.json")


def today() -> str:
    """Return the date as YYYY-MM-DD; that of `SOURCE_DATE_EPOCH` when set, as builds do."""
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    if epoch:
        return datetime.datetime.fromtimestamp(int(epoch), datetime.UTC).date().isoformat()
    return datetime.date.today().isoformat()


def load() -> dict[str, dict]:
    """Return what is recorded of each exercise, by name.

    Each entry may hold `tried` and `solved` (dates), `attempts` and `hints` (counts),
    `solution_seen` (true) and `kept` (see `course_lib.teach.keeping.kept`).
    """
    try:
        recorded = _read(path())
    except ValueError:
        _save(lambda entries: None)  # sets the broken file right, under the lock
        return load()
    except (OSError, _LeftAlone) as error:
        _tell(error)
        recorded = {}
    return {name: dict(entry) for name, entry in (recorded | _unsaved).items()}


def update(name: str, change: Callable[[dict], None]) -> dict:
    """Let `change` edit the entry of one exercise in place, save it, and return the entry."""
    entry: dict = {}

    def edit(entries: dict[str, dict]) -> None:
        nonlocal entry
        entry = entries.setdefault(name, {})
        change(entry)

    _save(edit)
    return entry


def forget(name: str | None = None) -> None:
    """Remove the entry of one exercise, or all of them."""

    def edit(entries: dict[str, dict]) -> None:
        if name is None:
            entries.clear()
        else:
            entries.pop(name, None)

    _save(edit)


def _save(edit: Callable[[dict[str, dict]], None]) -> None:
    file = path()
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with _locked(file):
            # What could not be saved earlier goes in now.
            entries = _read_or_recover(file) | _unsaved
            edit(entries)
            _write(file, entries)
        _unsaved.clear()
    except (OSError, _LeftAlone) as error:
        _tell(error)
        entries = load()
        edit(entries)
        _unsaved.clear()
        _unsaved.update(entries)


def _read(file: Path) -> dict[str, dict]:
    """Return the entries in `file`, none if it does not exist. Raises ValueError if broken."""
    try:
        return _parse(file.read_bytes())
    except FileNotFoundError:
        return {}


def _read_or_recover(file: Path) -> dict[str, dict]:
    """Like `_read`, but move a broken file aside and use its backup. The lock must be held."""
    try:
        return _read(file)
    except ValueError as error:
        aside = _move_aside(file)
        try:
            entries = _parse(_backup(file).read_bytes())
            rest = "the last good copy is used"
        except (OSError, ValueError):
            entries, rest = {}, "a new record is begun"
        print(f"The progress record {file} can't be read: {error}. It is now {aside.name}; {rest}.")
        return entries


def _parse(data: bytes) -> dict[str, dict]:
    """Return the entries. Raises ValueError for a broken or foreign file."""
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):  # also what isn't UTF-8
        raise ValueError("it is not JSON") from None
    if not isinstance(content, dict) or content.get("course") != "course_lib":
        raise ValueError("it is not a progress record")
    version = content.get("format")
    if isinstance(version, int) and version > FORMAT:
        raise _LeftAlone(
            f"it was written by a newer version of the course (format {version}, "
            f"this one knows {FORMAT}) and is left as it is: update the course"
        )
    entries = content.get("exercises")
    if version != FORMAT or not isinstance(entries, dict):
        raise ValueError("it is not a progress record")
    if not all(isinstance(entry, dict) for entry in entries.values()):
        raise ValueError("an entry is not an object")
    for name, entry in entries.items():
        _drop_what_is_odd(name, entry)
    return entries


def _drop_what_is_odd(name: str, entry: dict) -> None:
    """Take out what somebody has written by hand and nobody could count or show; say so once."""
    for field, kind in _KINDS.items():
        value = entry.get(field)
        if value is None or type(value) is kind and not (kind is int and value < 0):
            continue
        del entry[field]
        if (path(), name, field) not in _told:
            _told.add((path(), name, field))
            print(
                f"The progress record has {field!r} of {name} as {value!r}, "
                f"which is not {_IN_WORDS[kind]}: it is left out."
            )


def _write(file: Path, entries: dict[str, dict]) -> None:
    """Replace `file` in one step, keeping the version before as its backup."""
    content = {"course": "course_lib", "format": FORMAT, "exercises": entries}
    handle, name = tempfile.mkstemp(prefix=f".{file.name}.", dir=file.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as temporary:
            json.dump(content, temporary, indent=1)
            temporary.flush()
            os.fsync(temporary.fileno())
        if file.exists():
            shutil.copyfile(file, _backup(file))
        os.replace(name, file)
    except BaseException:
        # Also on Ctrl-C: the old file is still whole, and nothing is left lying around.
        Path(name).unlink(missing_ok=True)
        raise


def _backup(file: Path) -> Path:
    return file.with_name(file.name + ".bak")


def _move_aside(file: Path) -> Path:
    """Rename `file` to progress.broken-<date>.json, numbered if that is taken."""
    stem = f"{file.stem}.broken-{today()}"
    aside = file.with_name(stem + file.suffix)
    number = 2
    while aside.exists():
        aside = file.with_name(f"{stem}-{number}{file.suffix}")
        number += 1
    os.replace(file, aside)
    return aside


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    """Hold the record's lock. The system drops it when a process dies, so it can't go stale."""
    with open(file.with_name(file.name + ".lock"), "a+b") as lock:
        deadline = time.monotonic() + LOCK_TIMEOUT
        while not _try_lock(lock.fileno()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"another notebook has kept {file.name} locked")
            time.sleep(0.005)
        try:
            yield
        finally:
            _unlock(lock.fileno())


if sys.platform == "win32":
    import msvcrt

    def _try_lock(handle: int) -> bool:
        os.lseek(handle, 0, os.SEEK_SET)
        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

    def _unlock(handle: int) -> None:
        os.lseek(handle, 0, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_UNLCK, 1)

else:
    try:
        import fcntl
    except ImportError:  # a browser, where nobody else runs
        fcntl = None

    def _try_lock(handle: int) -> bool:
        try:
            if fcntl is not None:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            # Some network drives know no locks. Saving in one step is still safe there.
            if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
                raise
        return True

    def _unlock(handle: int) -> None:
        if fcntl is not None:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _tell(error: Exception) -> None:
    """Say why the record is not saved, once for each file."""
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    if path() not in _told:
        _told.add(path())
        print(
            f"Your progress is kept only until the kernel stops. "
            f"The record {path()} can't be used: {reason}."
        )
