"""JupyterLab as `make lab` starts it. Your own Jupyter settings still apply on top."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

c = get_config()  # noqa: F821 - Jupyter provides it

# The root is the repository, not the notebook's folder, and the lesson is opened by its address:
# `jupyter lab notebooks/00_start_here.ipynb` would make `notebooks` the root.
c.ServerApp.root_dir = str(ROOT)
c.LabApp.default_url = "/lab/tree/notebooks/00_start_here.ipynb"

# Only this machine can reach the server, and only with its token. That is also what makes it
# safe to start as root, the usual user in a container.
c.ServerApp.ip = "127.0.0.1"
c.ServerApp.allow_root = True

# Open tabs are remembered here, apart from those of your other projects.
c.LabApp.workspaces_dir = str(ROOT / ".jupyter" / "workspaces")

# The file browser shows what a learner reads; the notebooks' sources are for an editor.
c.ContentsManager.hide_globs = ["__pycache__", "*.pyc", "build.py", "conftest.py", "src"]
