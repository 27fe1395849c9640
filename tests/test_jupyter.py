"""After a mistake, work goes on: mistakes made in a notebook's own kernel, and what follows them.

The kernel is started as JupyterLab starts it. Each mistake is a cell that a learner might run; the
test looks at the error as the notebook shows it. After each, the cells of `goes_on` do right
things: a launch, the sanitizer, the tracer and a check. All mistakes happen in one session, one
after another, and in another session in the opposite order, with nothing between them.
"""

import json
import os
import re
from pathlib import Path

import pytest
from jupyter_client import KernelManager

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 250  # for one cell, which takes 2 where nothing else runs

#: What a notebook never shows: files of the course and those that it calls, the names that cells
#: are compiled under, and IPython's own trouble with an error.
ABSURD = re.compile(r"(course_lib/.*|/ast|/contextlib)\.py|ipykernel_\d|Unexpected exc|\b1 were"
                    r"|During handling")

START = """
from unittest.mock import patch
import numpy as np
from course_lib import cuda, simulator
from course_lib.teach.checking import check as checking
from course_lib.teach import check, hint, progress, solution

x = np.arange(-8, 8, dtype=np.float32)
y = np.zeros_like(x)
"""

KERNEL = "@cuda.jit\ndef f(x, y):\n    i = cuda.grid(1)\n"
UNGUARDED = KERNEL.replace("f(", "relu(") + "    y[i] = max(x[i], np.float32(0))\n"
ENDLESS = "if i == 0:\n    print('running')\nwhile i < 100:\n    y[0] = i"


def kernel(body, launch="f[1, 16](x, y)"):
    """A cell that defines a kernel and launches it."""
    return KERNEL + "".join(f"    {line}\n" for line in body.splitlines()) + launch


def patient(cell):
    """The cell, with the simulator's limit for loops out of the way."""
    return "with simulator.options(max_steps=10**10):\n    " + cell.replace("\n", "\n    ")


def checked(exercise, body, seconds=None):
    """Two cells, as in a lesson: a wrong answer, and its check, with `seconds` for its limit."""
    text = f"@cuda.jit\ndef {exercise}(x, y):\n    # wrong\n"
    text += "".join(f"    {line}\n" for line in body.splitlines())
    check = f"check({exercise!r}, {exercise})"
    if seconds is not None:
        check = f"with patch.object(checking, 'TIME_LIMIT', {seconds}):\n    {check}"
    return text, check


#: Mistake -> (its cells, the name of the error, what the notebook must say about it).
MISTAKES = {
    # In a kernel.
    "a read out of bounds": (
        UNGUARDED + "relu[1, 32](x, y)", "OutOfBounds",
        "x[i] is read outside the array: index 16, but x has shape (16,); thread (16, 0, 0) of "
        "block (0, 0, 0), line 4 of the cell"),
    "a write out of bounds": (
        kernel("y[i + 1] = 1"), "OutOfBounds", "y[i + 1] is written outside the array: index 16"),
    "an undefined name": (kernel("y[i] = zero"), "NameError", "name 'zero' is not defined"),
    "text plus a number": (
        kernel("y[i] = 'one' + x[i]"), "TypeError", "----> 4     y[i] = 'one' + x[i]"),
    "an unknown attribute of cuda": (
        kernel("y[i] = cuda.thread.x"), "AttributeError", "has no attribute 'thread'"),
    "a failed assertion": (
        kernel("assert x[i] > 0"), "AssertionError", "raised in thread (0, 0, 0) of block"),
    "an error raised in a kernel": (
        kernel("if x[i] == 0:\n    raise ValueError('a zero')"), "ValueError",
        "a zero\nraised in thread (8, 0, 0) of block (0, 0, 0)"),
    "a kernel that returns a value": (
        kernel("return x[i]"), "TypeError", "Write it into an array"),
    "too much shared memory": (
        kernel("s = cuda.shared.array(100_000, np.float32)\ns[i] = 1"), "LaunchError",
        "49,152 bytes of static shared memory; f declares 400,000"),
    "a launch inside a kernel": (
        "@cuda.jit\ndef g(x, y):\n    f[1, 16](x, y)\ng[1, 1](x, y)", "TypeError",
        "f[1, 16](...) is launched inside a kernel, and only the host launches kernels"),
    "recursion without an end": (
        "@cuda.jit(device=True)\ndef again(v):\n    return again(v) + 1\n\n"
        + kernel("y[i] = again(x[i])"), "RecursionError", "----> 3     return again(v) + 1"),
    "lanes that wait at different places": (
        kernel("if i < 5:\n    cuda.syncthreads()\nelse:\n    cuda.syncwarp()"), "Deadlock",
        "block (0, 0, 0): threads 0-4 wait at a block barrier at line 5 of the cell"),
    "a shuffle that leaves its own lane out": (
        kernel("y[i] = cuda.shfl_down_sync(0xffff0000, x[i], 1)"), "MaskError",
        "mask 0xffff0000, which leaves that lane out"),
    "a loop without an end": (
        "with simulator.options(max_steps=100_000):\n    "
        + kernel("while i < 100:\n    y[0] = i").replace("\n", "\n    "), "Deadlock",
        "endless loop in f: 100,000 loop iterations passed and no thread finished"),
    "a kernel interrupted": (
        patient(kernel(ENDLESS)), "KeyboardInterrupt", "f[1, 16](x, y)"),
    "an interrupt while the simulator handles an error": (
        (UNGUARDED, "with patch('course_lib.simulator.engine.report._out_of_bounds', "
         "side_effect=KeyboardInterrupt):\n    relu[1, 32](x, y)"),
        "KeyboardInterrupt", "relu[1, 32](x, y)"),
    # In a launch.
    "too many threads": (
        "f[1, 2048](x, y)", "LaunchError", "blockDim.x is 2,048: the limit is 1,024"),
    "no block": ("f[0, 16](x, y)", "LaunchError", "gridDim.x is 0: a launch needs at least 1"),
    "a float for a number of threads": (
        "f[1, 16.0](x, y)", "TypeError", "blockdim must be a sequence of integers, got [16.0]"),
    "one number in the brackets": (
        "f[16](x, y)", "LaunchError", "a launch needs kernel[grid, block]"),
    "no brackets": ("f(x, y)", "LaunchError", "write f[grid, block](...)"),
    "an argument too few": (
        "f[1, 16](x)", "TypeError", "f takes 2 arguments; 1 was given"),
    "a list for an array": ("f[1, 16]([1.0], y)", "TypeError", "argument 1 of f is a list"),
    "an array of objects": (
        "f[1, 16](x.astype(object), y)", "TypeError", "argument 1 of f is an array of Python obj"),
    # While something watches.
    "too many threads under sanitize": (
        "with simulator.sanitize():\n    f[1, 2048](x, y)", "LaunchError", "the limit is 1,024"),
    "a wrong kernel under sanitize": (
        kernel("y[i] = zero", "with simulator.sanitize() as report:\n    f[1, 16](x, y)"),
        "NameError", "name 'zero' is not defined"),
    "a wrong kernel under trace": (
        UNGUARDED + "with simulator.trace() as t:\n    relu[1, 32](x, y)", "OutOfBounds",
        "x[i] is read outside the array: index 16"),
    "both watch at once": (
        UNGUARDED + "with simulator.trace(), simulator.sanitize():\n    relu[1, 16](x, y)",
        "RuntimeError", "traced or sanitized, not both at once"),
    "an error beside a sanitized launch": (
        "with simulator.sanitize() as report:\n    raise ValueError('mine')", "ValueError", "mine"),
    "a sanitized kernel interrupted": (
        patient(kernel(ENDLESS, "with simulator.sanitize():\n    f[1, 16](x, y)")),
        "KeyboardInterrupt", "f[1, 16](x, y)"),
    # In a check, and in the learner's other tools.
    "a wrong answer": (
        (UNGUARDED, "check('relu', relu)"), "CheckFailed", "relu: out-of-bounds in line 4"),
    "an answer in NumPy's functions": (
        checked("relu", "i = cuda.grid(1)\nif i < x.size:\n    y[i] = np.exp(x[i])"),
        "CheckFailed", "np.exp does not work in a kernel"),
    "an answer that lets lanes leave a barrier out": (
        checked("block_sum", "i = cuda.threadIdx.x\nwhile i == 0:\n    cuda.syncthreads()"),
        "CheckFailed", "barrier-mismatch"),
    "an answer whose loop does not advance": (
        checked("relu", "i = cuda.grid(1)\nwhile i < x.size:\n    y[i] = x[i]"),
        "CheckFailed", "line 5, `while i < x.size:`"),
    "an answer that takes a thousand million steps": (
        checked("relu", "total = 0\nfor i in range(10**9):\n    total += i", seconds=0.5),
        "CheckFailed", "relu: stopped, because it did not end in "),
    "an answer that writes far outside": (
        checked("relu", "for i in range(-(10**6), 10**6):\n    y[i] = 0", seconds=0.5),
        "CheckFailed", "out-of-bounds"),
    "an answer that writes far outside shared memory": (
        checked("block_sum", "s = cuda.shared.array(32, np.float32)\ns[10**12] = 1"),
        "CheckFailed", "out-of-bounds"),
    "an answer of the wrong type": (
        "def bytes_in_flight(gbps, latency_ns, n_multiprocessors, n_threads):\n"
        "    return 'many', 'few'\n\n"
        "check('bytes_in_flight', bytes_in_flight)", "CheckFailed", "bytes_in_flight: it returned"),
    "a check of a launch": (
        "check('relu', f[1, 16])", "TypeError", "it got relu[grid, block]: leave the brackets"),
    "a check of nothing": ("check('relu', print())", "TypeError", "it got None, which is what"),
    "a check of a number": ("check('relu', 3)", "TypeError", "it got a value of type int"),
    "a check of a plain function": (
        "def relu(x, y):\n    pass\n\ncheck('relu', relu)", "TypeError",
        "it got a plain function: is @cuda.jit missing above it?"),
    "an exercise that does not exist": (
        "check('rleu', f)", "UnknownExercise", "no exercise is called 'rleu': did you mean 'relu'"),
    "the arguments of check swapped": (
        "check(f, 'relu')", "TypeError", "the name of the exercise comes first, as text"),
    "a typing error in hint": ("hint('rleu')", "UnknownExercise", "did you mean 'relu'?"),
    "a solution of nothing": ("solution('rleu')", "UnknownExercise", "did you mean 'relu'?"),
    "progress of nothing": ("progress(reset='rleu')", "UnknownExercise", "did you mean 'relu'?"),
    "a check interrupted": (
        "with patch.object(checking, 'TIME_LIMIT', 1_000):\n    check('column_sum', spinning)",
        "KeyboardInterrupt", "check('column_sum', spinning)"),
    # Not ours at all.
    "a colon forgotten": ("@cuda.jit\ndef f(x, y)\n    y[0] = 1", "SyntaxError", "expected ':'"),
    "a division by zero": ("1 / 0", "ZeroDivisionError", "division by zero"),
    # When IPython shows a file, it leaves marks on every kind of operator that stands there.
    "an error of NumPy's": (
        "np.linalg.inv(np.zeros((2, 2)))", "LinAlgError", "Singular matrix"),
}  # fmt: skip

SPINNING = """
@cuda.jit
def spinning(x, y):
    if cuda.grid(1) == 0:
        print("running")
    for i in range(100_000_000):
        y[0] = x[0, 0]
"""

RIGHT = """
@cuda.jit
def relu(x, y):
    i = cuda.grid(1)
    if i < x.size:
        y[i] = max(x[i], np.float32(0))

@cuda.jit
def reverse(x, y):
    s = cuda.shared.array(16, np.float32)
    i = cuda.threadIdx.x
    s[i] = x[i]
    cuda.syncthreads()
    if not i < 0 and (i >= 0 or i == 1):
        y[i] = s[(15 - i + 32) * 3 % 48 // 3] / 1 * -(-1) - (~i & 3 | 4 ^ i >> 1) * 0

@cuda.jit
def race(x, y):
    s = cuda.shared.array(16, np.float32)
    i = cuda.threadIdx.x
    s[i] = x[i]
    y[i] = s[15 - i]

relu[2, 16](x, y)
print(y.tolist())
reverse[1, 16](x, y)
print(y.tolist())
"""
SANITIZED = """
with simulator.sanitize() as report:
    relu[2, 16](x, y)
    reverse[1, 16](x, y)
print(report)
with simulator.sanitize() as report:
    race[1, 16](x, y)
print([(finding.kind, finding.line) for finding in report.findings])
"""
TRACED = """
with simulator.trace() as t:
    reverse[1, 16](x, y)
print(t.table())
"""
CHECKED = "progress(reset='relu')\ncheck('relu', relu)"


class Session:
    """A notebook's kernel, as JupyterLab starts it, and what it has shown."""

    def __init__(self, folder):
        self.progress = folder / "progress.json"
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {name: value for name, value in os.environ.items()
                       if not name.startswith("COURSE_LIB_")}
        environment |= {"PYTHONPATH": paths, "COURSE_LIB_PROGRESS": str(self.progress),
                        "COURSE_LIB_SIMULATOR": "1"}
        self.manager = KernelManager(kernel_name="python3")
        self.manager.start_kernel(cwd=str(ROOT / "notebooks"), env=environment)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(SECONDS)

    def close(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)

    def run(self, cell):
        """Run a cell: (the name of its error or None, all that it shows, as text).

        A cell that prints "running" is interrupted, as by the button with the square.
        """
        error, shown = None, []

        def show(message):
            nonlocal error
            content = message["content"]
            if message["msg_type"] == "stream":
                shown.append(content["text"])
                if "running" in content["text"]:  # its end of line may come by itself
                    self.manager.interrupt_kernel()
            elif message["msg_type"] == "error":
                error = content["ename"]
                shown.append("\n".join(content["traceback"]))
            elif "data" in content:
                shown.append(content["data"].get("text/plain", ""))

        self.client.execute_interactive(cell, output_hook=show, timeout=SECONDS)
        return error, re.sub(r"\x1b\[[\d;]*m", "", "".join(shown))


@pytest.fixture
def session(tmp_path):
    started = Session(tmp_path)
    yield started
    started.close()


def goes_on(session):
    """What is wrong with a right notebook that goes on in this session: yields sentences."""
    values = [float(v) for v in range(-8, 8)]
    relu = [max(v, 0.0) for v in values]
    expected = {
        RIGHT: f"{relu}\n{values[::-1]}\n",
        SANITIZED: "nothing found\n[('race', 21)]\n",
        TRACED: None,
        CHECKED: None,
    }
    for cell, text in expected.items():
        error, shown = session.run(cell)
        if error or text is not None and shown != text:
            yield f"{cell}\nshows\n{shown}"
        elif cell is TRACED and not all(site in shown for site in ("x[i]", "s[i]", "s[(15 - i")):
            yield f"the trace shows\n{shown}"
        elif cell is CHECKED and "✓ relu — " not in shown:
            yield f"the check shows\n{shown}"
    recorded = json.loads(session.progress.read_text())["exercises"]["relu"]
    if not recorded.get("solved") or recorded["attempts"] != 1:
        yield f"recorded is {recorded}"


@pytest.mark.parametrize("order", [1, -1], ids=["forwards", "backwards"])
def test_after_every_mistake_work_goes_on(session, order):
    assert session.run(START + SPINNING) == (None, "")
    faults = list(goes_on(session))
    assert not faults, faults
    for mistake, (cells, name, says) in list(MISTAKES.items())[::order]:
        assert session.run(KERNEL + "    y[i] = x[i]\n") == (None, "")  # the f of launches
        *before, last = (cells,) if isinstance(cells, str) else cells
        for cell in before:
            assert session.run(cell) == (None, "")
        error, shown = session.run(last)
        if error != name or says not in shown:
            faults.append(f"{mistake}: {error}, not {name} with {says!r}\n{shown}")
        if absurd := ABSURD.search(shown):
            faults.append(f"{mistake}: it shows {absurd[0]!r}\n{shown}")
        if order == 1:
            faults += [f"after {mistake}: {fault}" for fault in goes_on(session)]
    faults += [f"after all: {fault}" for fault in goes_on(session)]
    assert not faults, "\n\n".join(faults)


def test_a_fault_of_the_course_shows_where_it_is(session):
    assert session.run(START + KERNEL + "    y[i] = x[i]\n") == (None, "")
    session.run("from course_lib.simulator.engine import kernel\nkernel.build_program = None")
    error, shown = session.run("f[1, 16](x, y)")
    assert error == "TypeError" and "course_lib/simulator/engine/kernel.py:" in shown
