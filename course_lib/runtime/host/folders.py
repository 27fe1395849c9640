"""Where the course's files lie, in a clone or in an installed package, and where a user's own go.

A wheel has notebooks and records inside the package, in `resources`, laid out as a clone has them.
"""

import os
import sys
from importlib import resources
from pathlib import Path

from course_lib.runtime.host.home import home

PACKAGE = Path(str(resources.files("course_lib")))
RESOURCES = PACKAGE / "resources"


def clone():
    """Return the folder of the clone that this package is part of; None where it is installed."""
    return None if RESOURCES.is_dir() else PACKAGE.parent


def resource(path):
    """Return where something lies that came with the course, such as "data/results"."""
    return (clone() or RESOURCES) / path


def written(path):
    """Return where something that the course writes goes: in a clone, else to the user's data."""
    folder = clone()
    if folder is None or not os.access(folder, os.W_OK):
        folder = user_data()
    return folder / path


def user_data():
    """Return the folder of the user's own files; it need not be there yet."""
    if sys.platform == "win32":
        data = Path(os.environ.get("LOCALAPPDATA") or home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        data = home() / "Library" / "Application Support"
    else:
        data = Path(os.environ.get("XDG_DATA_HOME") or home() / ".local" / "share")
    return data / "course_lib"
