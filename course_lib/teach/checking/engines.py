"""What runs a kernel for a check: the simulator, in an order of threads, or a GPU."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

import course_lib
from course_lib import simulator
from course_lib.runtime.host.launch import in_simulator
from course_lib.simulator.observe.observer import Observer
from course_lib.simulator.observe.real import observing_with
from course_lib.teach.checking.fences import FencedArray
from course_lib.teach.checking.writers import Writers

#: Loop iterations without any thread finishing, after which a launch counts as endless. Cases have
#: a few hundred elements, so that right kernels stay far below.
MAX_STEPS = 50_000


class Findings(list):
    """The sanitizer's findings, each with the way to it: `way(finding)` are its (file, line).

    The last is where it was found; those before it call what it is in.
    """

    def __init__(self):
        super().__init__()
        self._ways = {}

    def append(self, finding):
        """Add one, found right now."""
        super().append(finding)
        frame, way = sys._getframe(1), []
        while frame is not None:
            if "__unit__" in frame.f_globals:  # of a kernel, or of what it calls
                way.append((frame.f_code.co_filename, frame.f_lineno))
            frame = frame.f_back
        self._ways[id(finding)] = way[::-1]

    def way(self, finding) -> list[tuple[str, int]]:
        """Return the way to a finding; empty where it was found after the launch."""
        return self._ways.get(id(finding), [])


class Simulator:
    """Runs kernels in the simulator, with the threads of a block in a given order.

    With `sanitized`, under the sanitizer: `findings` are what it found in the last run, `twice` is
    an element that two threads wrote, if that was to be looked for, `borrowed` an input that was
    written, and `foreign` an element of an output that is somebody else's and was. `got` are the
    outputs of the last run that was right, and `results` a `Snapshot` of what the learner's
    function returned in it.
    """

    simulated = True

    def __init__(self, order: str, seed: int, sanitized: bool = False, max_steps: int = MAX_STEPS):
        self.order, self.seed, self.sanitized = order, seed, sanitized
        self.max_steps = max_steps
        self.findings, self.twice, self.borrowed, self.got = [], None, None, {}
        self.results = self.foreign = None
        self.observer: Observer | None = None  # one more that watches the launches

    def prepare(self, array: FencedArray):
        """Return the array that a kernel is given."""
        return array.view

    def launch(self, kernel, grid, block, *arguments):
        """Run `kernel`, whether a real one or a simulated one, on NumPy arrays."""
        simulator.run(kernel, grid, block, *arguments)

    def finish(self, array: FencedArray, given) -> None:
        """Bring what the kernel left in `given` back into `array`."""

    @contextlib.contextmanager
    def active(self, run) -> Iterator[None]:
        """Let every launch inside, also those of a launcher, happen in this simulator."""
        with contextlib.ExitStack() as stack:
            options = simulator.options(order=self.order, seed=self.seed, max_steps=self.max_steps)
            stack.enter_context(options)
            if not course_lib.SIMULATED:
                stack.enter_context(_real_kernels_simulated())
                stack.enter_context(in_simulator())
            if self.observer is not None:
                stack.enter_context(observing_with(self.observer))
            if self.sanitized:
                report = stack.enter_context(simulator.sanitize())
                self.findings = report.findings = Findings()
                inputs = {n: array for n, array in run.arrays.items() if n in run.case.inputs}
                outputs = {n: array for n, array in run.arrays.items() if n not in inputs}
                writers = stack.enter_context(observing_with(Writers(outputs, inputs, run.others)))
            yield
            if self.sanitized:
                self.twice = writers.twice if run.exercise.once else None
                self.borrowed, self.foreign = writers.borrowed, writers.foreign


class Gpu:
    """Runs kernels on the GPU, on copies of the arrays, fences included."""

    simulated = False
    order = "forward"
    findings, twice, borrowed, foreign, got = (), None, None, None, {}

    @staticmethod
    def available() -> bool:
        """Tell whether there is a GPU."""
        return not course_lib.SIMULATED and course_lib.cuda.is_available()

    def __init__(self):
        self._buffers = {}

    def prepare(self, array: FencedArray):
        """Return the array that a kernel is given."""
        buffer = course_lib.cuda.to_device(array.buffer)
        self._buffers[id(array)] = buffer
        return array.middle(buffer)

    def launch(self, kernel, grid, block, *arguments):
        """Launch `kernel` and wait for it, so that its errors appear here."""
        kernel[grid, block](*arguments)
        course_lib.cuda.synchronize()

    def finish(self, array: FencedArray, given) -> None:
        """Bring what the kernel left in `given` back into `array`."""
        self._buffers[id(array)].copy_to_host(array.buffer)

    @contextlib.contextmanager
    def active(self, run) -> Iterator[None]:
        """Launches go to the GPU by themselves, without numba's warnings that they are small.

        Nor does numba warn that a launcher's own NumPy arrays are copied there and back.
        """
        with warnings.catch_warnings():
            for what in ("Grid size [0-9]+ will likely result", "Host array used in CUDA kernel"):
                warnings.filterwarnings("ignore", f".*{what}")
            yield


@contextlib.contextmanager
def _real_kernels_simulated() -> Iterator[None]:
    """Send `kernel[grid, block](...)` of real numba kernels to the simulator.

    A launcher starts its kernels itself. On a machine with a GPU they are the real thing, so this
    is where a wrong one is kept away from the GPU.
    """
    from numba.cuda.dispatcher import CUDADispatcher

    def configured(kernel, configuration):
        grid, block, *rest = configuration
        shared = rest[1] if len(rest) > 1 else 0
        return lambda *arguments: simulator.run(kernel, grid, block, *arguments, shared=shared)

    def forall(kernel, count, tpb=0, stream=0, sharedmem=0):
        block = tpb or 128
        return configured(kernel, (max(1, -(-count // block)), block, stream, sharedmem))

    saved = {name: getattr(CUDADispatcher, name) for name in ("__getitem__", "forall")}
    CUDADispatcher.__getitem__, CUDADispatcher.forall = configured, forall
    try:
        yield
    finally:
        for name, function in saved.items():
            setattr(CUDADispatcher, name, function)
