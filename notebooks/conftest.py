"""Notebooks under `pytest --nbval-lax`: what their kernels find, wherever pytest is started."""

import os
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A kernel starts in the notebook's folder, where a course that is not installed is out of sight.
_PATHS = [str(ROOT), os.environ.get("PYTHONPATH", "")]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, _PATHS))

# What a test solves is not what you solved. (The folder goes when pytest does.)
_progress = tempfile.TemporaryDirectory()
os.environ["COURSE_LIB_PROGRESS"] = str(Path(_progress.name) / "progress.json")


def pytest_collection_modifyitems(items):
    """Later lessons take longer: first, so that no process ends long before the others."""
    items.sort(key=lambda item: item.path.name, reverse=True)
