"""Checkpoints that are whole or not there, and that only their own run goes on from.

A checkpoint is written beside its place, forced to the disk, and then renamed into place, so a
process killed at any moment leaves the one before it. Nothing but tensors and plain Python values
is in it, so that reading one runs no code.
"""

import contextlib
import io
import os
import zipfile
from pathlib import Path

import torch

from .folder import FolderError, reason

FORMAT = 1
#: What every checkpoint holds; `settings` says what the run was asked to do.
KEYS = ("format", "settings", "step", "history", "state")


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the file and what to do."""


def save(path, *, settings, step, history, state):
    """Put a checkpoint at `path`, in place of the one before it.

    settings  what the run was asked to do, a dict of plain values
    step      how many steps are done
    history   one dict for each epoch that is done
    state     all tensors and numbers that the steps to come depend on
    """
    path = Path(path)
    content = dict(zip(KEYS, (FORMAT, settings, step, history, state), strict=True))
    write_whole(path, lambda file: torch.save(content, file))


def write_whole(path, write):
    """Call `write(file)` and have what it wrote at `path`, all of it or nothing.

    Raises FolderError where it cannot be written; what was at `path` before stays there.
    """
    # Always the same name, so that runs that were killed leave one such file at most.
    part = path.with_name(f"{path.name}.part")
    try:
        with _File(open(part, "wb", buffering=0)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            part.unlink(missing_ok=True)
        # Ending its file, PyTorch hides what stopped it behind errors of its own.
        cause = error
        while isinstance(cause, (RuntimeError, ValueError)) and cause.__context__ is not None:
            cause = cause.__context__
        if isinstance(cause, OSError):
            raise FolderError(_not_written(path, cause)) from error
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise
    with contextlib.suppress(OSError):  # not every file system can do this to a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


class _File(io.BufferedWriter):
    """Closed where writing is broken off: to end it would wait again for a disk that hangs."""

    def write(self, data):
        try:
            return super().write(data)
        except BaseException:
            self.raw.close()
            raise


def _not_written(path, error):
    before = f"the {path.name} before it is whole" if path.exists() else "there is none yet"
    return (
        f"{path.name} cannot be written to the folder {path.parent} ({reason(error)}): {before}. "
        "Make room there, and go on with --resume (in a program, resume=True)."
    )


def load(path):
    """The checkpoint at `path`, a dict of `KEYS`, its tensors on the CPU."""
    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"There is no checkpoint {path}.")
    damaged = CheckpointError(
        f"{path} is no whole checkpoint of this course. Put back a good copy, or move it away and "
        "start the run again."
    )
    try:
        _check_sums(path)
        content = torch.load(path, map_location="cpu", weights_only=True)
    except PermissionError as error:
        raise CheckpointError(f"{path} cannot be read ({reason(error)}).") from error
    except MemoryError:
        raise
    except Exception as error:  # whatever the readers of a foreign file stumble over
        raise damaged from error
    if not isinstance(content, dict) or "format" not in content:
        raise damaged
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}; this version of the course reads {FORMAT}. "
            "Use the version that wrote it, or start a new run in another folder."
        )
    if content.keys() != set(KEYS) or not _of_the_right_kinds(content):
        raise damaged
    return content


def load_of(task, path, known):
    """As `load`, of a run on `task` whose settings hold the names in `known`, each of its type."""
    kept = load(path)
    settings = kept["settings"]
    if settings.get("task") != task:
        raise CheckpointError(
            f"{path} is of a run on {settings.get('task')}, not on {task}: name another."
        )
    for name, kind in known.items():
        if not isinstance(settings.get(name), kind):
            raise CheckpointError(
                f"{path} has {settings.get(name)!r} for its {name}, which no run has: put back a "
                "good copy, or train again."
            )
    return kept


def load_weights(path, model, kept):
    """Load the weights of `kept`, the checkpoint at `path`, into `model`."""
    weights = kept["state"].get("model")
    try:
        model.load_state_dict(weights)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{path} does not hold the weights of its network ({error}): put back a good copy, or "
            "train again."
        ) from error


def _of_the_right_kinds(content):
    history = content["history"]
    return (
        isinstance(content["settings"], dict)
        and isinstance(content["state"], dict)
        and type(content["step"]) is int
        and content["step"] >= 0
        and isinstance(history, list)
        and all(isinstance(entry, dict) for entry in history)
    )


def _check_sums(path):
    """Raise BadZipFile where a byte has changed since it was written; torch.load does not look."""
    with zipfile.ZipFile(path) as archive:
        spoilt = archive.testzip()
    if spoilt is not None:
        raise zipfile.BadZipFile(f"{spoilt} has changed")


def require_same(path, kept, asked):
    """Raise CheckpointError unless the settings `kept` at `path` are those `asked` for now."""
    names = [name for name in kept.keys() | asked.keys() if kept.get(name) != asked.get(name)]
    if names:
        told = "; ".join(
            f"{name} was {kept.get(name)!r}, and is now {asked.get(name)!r}"
            for name in sorted(names)
        )
        raise CheckpointError(
            f"{path} belongs to another run: {told}. Go on with the settings it was made with, or "
            "start a new run in another folder."
        )
