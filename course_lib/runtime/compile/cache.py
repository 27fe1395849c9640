"""Compiled kernels on disk: one file each, which any process may read, write and delete.

A file is named by its kernel's key. It holds, in this order, a SHA-256 of all that follows, the
length of the head, the head (JSON: what the kernel is), the machine code, and the compressed PTX
that it was made from. A file appears whole or not at all, and one that is cut short or damaged
counts as none. Nothing here needs a GPU or numba.

Who may write here decides what the GPU runs in the user's name, so a folder that others may write
to is refused.
"""

import contextlib
import hashlib
import json
import os
import re
import stat
import struct
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path

from course_lib.runtime.host.home import home

#: Environment variable naming the folder that holds compiled kernels.
CACHE_VARIABLE = "COURSE_LIB_CACHE"
#: Counts into every key: a file of another layout is never opened by mistake.
LAYOUT = 2

_OURS = re.compile(r"[0-9a-f]{64}\.kernel")
_TIMES = re.compile(r"[0-9a-f]{64}\.times")  # of a layer: nn.replace_layers keeps them here
_UNFINISHED = re.compile(r"[0-9a-f]{64}\.[A-Za-z0-9_]+\.unfinished")
_WRITING_TAKES = 60  # seconds, at the very most: an unfinished file that is older was abandoned
_DIGEST = 32
#: What the head of every file of this layout says, and of which type.
_HEAD = {
    "name": str, "registers": int, "stack_bytes": int, "shared_bytes": int, "cooperative": bool,
    "signature": str, "compute_capability": list, "key": str, "module": str, "qualname": str,
    "argtypes": list, "options": list, "cubin_bytes": int,
}  # fmt: skip


class CacheError(RuntimeError):
    """A folder of compiled kernels that is not the user's alone; the message says what to do."""


@dataclass(frozen=True)
class Entry:
    """One file of the cache. `head` is what it says of its kernel, {} where it is damaged."""

    path: Path
    n_bytes: int
    built: float
    head: dict

    @property
    def key(self):
        """What the kernel is known by here: 64 hexadecimal digits."""
        return self.path.stem


def cache_folder():
    """The folder of compiled kernels: ``COURSE_LIB_CACHE`` or the user's cache folder."""
    if folder := os.environ.get(CACHE_VARIABLE):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or home() / ".cache"
    return Path(base) / "course_lib" / "kernels"


def path_of(key):
    """Where the kernel of this key is kept."""
    return cache_folder() / f"{key}.kernel"


def fault(folder):
    """What lets somebody else write to `folder`, as (what is so, command that mends it), or None.

    The folder need not be there yet.
    """
    if not hasattr(os, "geteuid"):  # Windows: users' folders are their own there
        return None
    try:
        facts = os.stat(folder)
    except OSError:
        return None
    if facts.st_uid not in (os.geteuid(), 0):
        owner = f"belongs to another user (number {facts.st_uid})"
        return owner, f"export {CACHE_VARIABLE}=~/.course_lib_kernels"
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = f"may be written to by others (mode {stat.S_IMODE(facts.st_mode):o})"
        return mode, f"chmod go-w {folder}"
    return None


def require_own(folder):
    """Raise CacheError where somebody else may write to `folder`; it need not be there yet."""
    if (found := fault(folder)) is None:
        return
    why, command = found
    cure = ""
    if command.startswith("chmod"):
        cure = f"empty it (python -m course_lib kernels --clear) and run {command}, or "
    raise CacheError(
        f"The folder of compiled kernels {folder} {why}, who could so choose what your GPU runs: "
        f"{cure}name another folder in {CACHE_VARIABLE}."
    )


def save(path, head, cubin, ptx):
    """Keep a kernel at `path`: `head` (a dict that JSON can hold), machine code, PTX text.

    A folder that can't be written costs speed, not correctness: then nothing is kept. Raises
    CacheError, as `load` and `machine_code` do, for a folder that is not the user's alone.
    """
    require_own(path.parent)
    text = json.dumps(head | {"cubin_bytes": len(cubin)}).encode()
    body = struct.pack("<I", len(text)) + text + cubin + zlib.compress(ptx.encode())
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Under another name first, so that a reader never sees half a file.
        handle, temporary = tempfile.mkstemp(".unfinished", f"{path.stem}.", path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(body).digest() + body)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise


def load(path):
    """(head, machine code) of the file at `path`; None where there is none, or a damaged one."""
    if (found := _read(path)) is None:
        return None
    head, rest = found
    return head, rest[: head["cubin_bytes"]]


def machine_code(path):
    """(machine code, PTX text) of the file at `path`; ValueError where it is gone or damaged."""
    if (found := _read(path)) is None:
        raise ValueError(f"{path} is gone or damaged")
    head, rest = found
    length = head["cubin_bytes"]
    try:
        return rest[:length], zlib.decompress(rest[length:]).decode()
    except (zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is gone or damaged") from error


def _read(path):
    require_own(path.parent)
    try:
        data = path.read_bytes()
    except OSError:
        return None
    body = data[_DIGEST:]
    if hashlib.sha256(body).digest() != data[:_DIGEST]:
        return None
    try:
        (length,) = struct.unpack_from("<I", body, 0)
        head, rest = json.loads(body[4 : 4 + length]), body[4 + length :]
    except (struct.error, ValueError, RecursionError):  # whole, but of another layout
        return None
    return (head, rest) if _is_head(head) and head["cubin_bytes"] <= len(rest) else None


def _is_head(head):
    """Whether `head` says what a kernel's does, so that who reads it need not ask again."""
    return (
        isinstance(head, dict)
        and all(isinstance(head.get(name), kind) for name, kind in _HEAD.items())
        and isinstance(head.get("file", 0), str | None)
        and list(map(type, head["compute_capability"])) == [int, int]
        and all(isinstance(text, str) for text in head["argtypes"])
        and head["cubin_bytes"] >= 0
    )


def entries():
    """Every `Entry` of the cache, damaged ones too. Leaves out what goes while it looks.

    Raises CacheError for a folder that is not the user's alone.
    """
    found = []
    require_own(cache_folder())
    for path in _ours(_OURS):
        with contextlib.suppress(OSError):
            facts = path.stat()
            whole = _read(path)
            head = {} if whole is None else whole[0]
            found.append(Entry(path, facts.st_size, facts.st_mtime, head))
    return found


def clear():
    """Delete every kernel of the cache, and every layer's times. Returns (files, their bytes).

    Other processes may go on meanwhile: what they have loaded stays with them, and what they look
    for in vain they compile. Raises OSError if a file can't be deleted, once the others are gone.
    """
    number, n_bytes, refused = 0, 0, None
    abandoned = (path for path in _ours(_UNFINISHED) if _age(path) > _WRITING_TAKES)
    for path in (*_ours(_OURS), *_ours(_TIMES), *abandoned):
        try:
            size = path.stat().st_size
            path.unlink()
        except FileNotFoundError:  # another process was faster
            continue
        except OSError as error:
            refused = error
            continue
        number, n_bytes = number + 1, n_bytes + size
    if refused is not None:
        raise refused
    return number, n_bytes


def _age(path):
    try:
        return time.time() - path.stat().st_mtime
    except OSError:
        return 0


def _ours(pattern):
    """Our files in the cache's folder: by their names, no folders and no links to elsewhere."""
    try:
        paths = sorted(cache_folder().iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    return [
        path
        for path in paths
        if pattern.fullmatch(path.name) and path.is_file() and not path.is_symlink()
    ]
