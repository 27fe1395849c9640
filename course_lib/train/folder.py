"""The folder of a run: one run at a time writes in it, and what cannot be written is told.

The lock is the system's, on an open file: it ends with its process, however that ends, so a file
that a killed run has left behind stops nobody.
"""

import contextlib
import errno
import os
import sys
from pathlib import Path

LOCK = "running.lock"
#: What systems say that know no locks, as some network drives. There each run goes unguarded.
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)


class FolderError(OSError):
    """A folder that a run cannot use now; the message names it and says how to go on."""


def reason(error):
    """An OSError in a few words."""
    return error.strerror or str(error) or type(error).__name__


@contextlib.contextmanager
def held(folder):
    """Keep `folder`, made if it is not there, from other runs. FolderError says why it can't be."""
    path = Path(folder) / LOCK
    file = _taken(path)
    try:
        yield
    finally:
        if sys.platform == "win32":  # which deletes no open file
            file.close()
        with contextlib.suppress(OSError):
            path.unlink()
        file.close()


def _taken(path):
    """The lock's file, opened and locked."""
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path, "a+b")
        except OSError as error:
            raise FolderError(
                f"The folder {path.parent} cannot be written to ({reason(error)}): name another."
            ) from error
        if not _lock(file):
            file.close()
            raise FolderError(
                f"Another run is writing to {path.parent}: wait until it ends, or name another "
                "folder."
            )
        # The run before may have deleted the file between our opening and our locking it.
        with contextlib.suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                return file
        file.close()


if sys.platform == "win32":
    import msvcrt

    def _lock(file):
        file.seek(0)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except OSError:
            return False
        return True

else:
    import fcntl

    def _lock(file):
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        return True
