"""Kernels that never end, or that write where they must not, leave the notebook's kernel alive."""

import os
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parent.parent

START = """
import os
import numpy as np
from course_lib import cuda
from course_lib.teach import CheckFailed, check

def said(name, kernel):
    try:
        check(name, kernel)
    except CheckFailed as error:
        print(os.getpid(), error)
"""

#: What a learner might type, for which exercise, and what the check must say.
HARMFUL = {
    "while without a step": ("relu_grid_stride", "line 5, `while i < x.size:`", """
    i = cuda.grid(1)
    while i < x.size:
        y[i] = x[i]
"""),
    "while that only counts": ("relu", "line 5, `while True:`", """
    i = 0
    while True:
        i += 1
"""),
    "a loop of a thousand million": ("relu", "did not end in line ", """
    total = 0
    for i in range(10**9):
        total += i
"""),
    "two loops of many rounds": ("column_sum", "did not end in line ", """
    for i in range(100_000_000):
        for k in range(100_000_000):
            y[0] = x[0, 0]
"""),
    "a barrier nobody else reaches": ("block_sum", "barrier-mismatch", """
    i = cuda.threadIdx.x
    while i == 0:
        cuda.syncthreads()
"""),
    "writes far outside": ("relu", "out-of-bounds", """
    for i in range(-(10**6), 10**6):
        y[i] = 0
"""),
    "writes far outside shared memory": ("block_sum", "out-of-bounds", """
    s = cuda.shared.array(32, np.float32)
    s[10**12] = 1
"""),
    "recursion without an end": ("relu", "RecursionError", """
    relu_again(x, y)

relu_again = cuda.jit(device=True)(lambda x, y: relu_again(x, y))
"""),
}  # fmt: skip


def cells():
    """The notebook's cells: the imports, and two for each kernel, as in a lesson."""
    yield START
    for name, _, body in HARMFUL.values():
        yield f"@cuda.jit\ndef {name}(x, y):\n    # wrong{body}\n\n"
        yield f"said({name!r}, {name})"
    yield "print(os.getpid(), 'alive')"


def test_the_notebook_kernel_survives(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in cells()])
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {
        **os.environ, "PYTHONPATH": paths, "COURSE_LIB_PROGRESS": str(tmp_path / "progress.json"),
    }  # fmt: skip
    client = NotebookClient(notebook, timeout=60, kernel_name="python3")
    client.execute(cwd=str(tmp_path), env=environment)
    texts = ["".join(o.get("text", "") for o in c.outputs) for c in notebook.cells]
    process = texts[-1].split()[0]
    assert texts[-1] == f"{process} alive\n"
    for (label, (name, says, _)), text in zip(HARMFUL.items(), texts[2:-1:2], strict=True):
        assert text.startswith(f"{process} {name}: "), label  # the same process all the time
        assert says in text, label
