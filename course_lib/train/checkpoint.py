"""Checkpoints that are whole or not there, and that only their own run goes on from.

A checkpoint is written beside its place, forced to the disk, and then renamed into place, so a
process killed at any moment leaves the one before it. Nothing but tensors and plain Python values
is in it, so that reading one runs no code.
"""

import contextlib
import os
import pickle
import zipfile
from pathlib import Path

import torch

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
    """Call `write(file)` and have what it wrote at `path`, all of it or nothing."""
    # Always the same name, so that runs that were killed leave one such file at most.
    part = path.with_name(f"{path.name}.part")
    try:
        with open(part, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    with contextlib.suppress(OSError):  # not every file system can do this to a folder
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


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
    except (OSError, EOFError, RuntimeError, ValueError, pickle.UnpicklingError, KeyError) as error:
        raise damaged from error
    except zipfile.BadZipFile as error:
        raise damaged from error
    if not isinstance(content, dict) or "format" not in content:
        raise damaged
    if content["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {content['format']}; this version of the course reads {FORMAT}. "
            "Use the version that wrote it, or start a new run in another folder."
        )
    if content.keys() != set(KEYS):
        raise damaged
    return content


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
