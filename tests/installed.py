"""The wheel, unpacked as an installer does it, and the environment of its user."""

import contextlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def unpacked(folder):
    """Build the wheel, and unpack it into a part of `folder` that nobody may write to."""
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True, timeout=200)
    (wheel,), site = folder.glob("*.whl"), folder / "site packages"
    assert wheel.stat().st_size < 15e6
    zipfile.ZipFile(wheel).extractall(site)
    subprocess.run(["chmod", "-R", "a-w", site], check=True)
    try:
        yield site
    finally:
        subprocess.run(["chmod", "-R", "u+w", site], check=True)


def in_site(site, data, **variables):
    """The environment of a user of the wheel without HOME, whose data lie in `data`."""
    ours = str(ROOT), str(ROOT / "tests")
    others = [p for p in os.environ["PYTHONPATH"].split(os.pathsep) if p not in ours]
    kept = {k: v for k, v in os.environ.items() if k not in ("HOME", "COURSE_LIB_PROGRESS")}
    paths = os.pathsep.join([str(site), *others])
    return kept | {"PYTHONPATH": paths, "XDG_DATA_HOME": str(data)} | variables
