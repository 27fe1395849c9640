"""Where a user's own files go, also for a user without a home folder."""

import os
import tempfile
from pathlib import Path


def home():
    """The user's home folder; without one, a folder named after the user among temporary ones.

    Containers often run as a user whom the system does not know, and with no HOME.
    """
    try:
        return Path.home()
    except RuntimeError:
        user = os.getuid() if hasattr(os, "getuid") else "user"
        return Path(tempfile.gettempdir()) / f"course_lib-{user}"
