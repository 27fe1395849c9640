"""What a case is, and how it is run: in the simulator under the sanitizer, or on a GPU."""

import inspect
import re
from dataclasses import dataclass

import numpy as np

from course_lib.simulator import options, run_on_copies, sanitize

#: Iterations of waiting loops before a launch counts as stuck.
MAX_STEPS = 20_000
CASES = {}


@dataclass
class Case:
    """One kernel and one launch of it.

    Attributes
    ----------
    kind : str or None
        What the sanitizer must find, and nothing else; None for a correct kernel.
    also : tuple of str
        Further kinds that are true of the kernel as well.
    gpu_tool : str or None
        The tool of NVIDIA's compute-sanitizer that can see the bug; None for correct kernels, and
        for bugs it cannot see or that would hang a GPU: `gpu_reason` tells why.
    cluster : int
        Blocks in a cluster. A case with clusters runs in the simulator alone.
    mended : bool
        True for a correct kernel that has the bug, and its mark, if its last argument is 0.
    """

    name: str
    kernel: object
    kind: str | None
    grid: object
    block: object
    arguments: object
    shared: int = 0
    also: tuple = ()
    gpu_tool: str | None = None
    gpu_reason: str = ""
    cluster: int = 1
    mended: bool = False

    @property
    def line(self):
        """The line marked with `# BUG`; 0 for a correct kernel.

        Raises
        ------
        ValueError if a planted bug has no mark, or a correct kernel has one.
        """
        lines, first = inspect.getsourcelines(self.kernel.py_func)
        marked = [first + k for k, text in enumerate(lines) if re.search(r"# BUG\b", text)]
        if len(marked) != (self.kind is not None or self.mended):
            raise ValueError(f"{self.name}: {len(marked)} lines are marked with BUG")
        return 0 if self.kind is None else marked[0]

    def launch(self, arrays):
        """Launch the kernel on arrays, whatever it runs on."""
        if self.cluster > 1:
            run_on_copies(self.kernel, self.grid, self.block, arrays, self.shared, self.cluster)
            return
        self.kernel[self.grid, self.block, 0, self.shared](*arrays)


@dataclass
class Outcome:
    """What the sanitizer said about a case, and whether that is right."""

    case: Case
    report: object

    @property
    def hits(self):
        """The findings of the right kind at the right line."""
        return [finding for finding in self.report
                if finding.kind == self.case.kind and finding.line == self.case.line]

    @property
    def right(self):
        """True if the bug was found, and nothing that isn't there."""
        if self.case.kind is None:
            return not self.report
        allowed = {self.case.kind, *self.case.also}
        return bool(self.hits) and set(self.report.kinds()) <= allowed


def planted(kind, grid, block, arguments, *, tool=None, reason="", also=(), shared=0, cluster=1,
            mended=None):
    """Register a kernel with one bug; its line ends with `# BUG`. Goes above `@cuda.jit`.

    `mended` names a second, correct case of a kernel whose last parameter says whether it is
    mended: 1 there, 0 in the planted one.
    """
    if (tool is None) != bool(reason):
        raise ValueError("a planted bug needs either a tool that sees it or a reason")

    def register(kernel):
        given = arguments
        if mended is not None:
            given = _ending_in(0, arguments)
            _register(Case(mended, kernel, None, grid, block, _ending_in(1, arguments), shared,
                           (), None, "a correct kernel", cluster, mended=True))
        return _register(Case(kernel.py_func.__name__, kernel, kind, grid, block, given, shared,
                              also, tool, reason, cluster))

    return register


def correct(grid, block, arguments, *, shared=0, cluster=1):
    """Register a correct kernel, one that looks like a bug or is easily taken for one."""
    def register(kernel):
        return _register(Case(kernel.py_func.__name__, kernel, None, grid, block, arguments,
                              shared, (), None, "a correct kernel", cluster))

    return register


def _ending_in(last, arguments):
    return lambda: (*arguments(), last)


def _register(case):
    if case.name in CASES:
        raise ValueError(f"two cases are called {case.name}")
    CASES[case.name] = case
    return case.kernel


def run(case, order="forward"):
    """Run a case in the simulator under the sanitizer: an `Outcome`."""
    arrays = case.arguments()
    with options(order=order, max_steps=MAX_STEPS), sanitize() as report:
        case.launch(arrays)
    return Outcome(case, report)


def run_on_gpu(case):
    """Launch a case on the GPU, on device arrays of its own, and wait for it.

    Raises
    ------
    RuntimeError for a case that would hang, and for one with clusters.
    """
    from numba import cuda

    if case.cluster > 1:
        raise RuntimeError(f"{case.name}: numba.cuda has no names for clusters")
    if "hang" in case.gpu_reason:
        raise RuntimeError(f"{case.name}: {case.gpu_reason}")
    arrays = [cuda.to_device(value) if isinstance(value, np.ndarray) else value
              for value in case.arguments()]
    case.launch(arrays)
    cuda.synchronize()


def floats(*shapes):
    """A callable that gives float32 arrays: 1, 2, 3 … in the first, zeros in the others."""
    def make():
        first, *others = shapes
        values = np.arange(1, np.prod(first) + 1, dtype=np.float32).reshape(first)
        return (values, *(np.zeros(shape, np.float32) for shape in others))

    return make


def ints(*shapes, modulus=None):
    """Like `floats`, for int32; the first array counts from 0, modulo `modulus`."""
    def make():
        first, *others = shapes
        values = np.arange(np.prod(first), dtype=np.int32).reshape(first)
        return (values % modulus if modulus else values,
                *(np.zeros(shape, np.int32) for shape in others))

    return make
