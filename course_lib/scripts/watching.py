"""The observers that look at the launches of a script: one for each of the commands."""

import contextlib
import contextvars
import functools
import linecache
import os
import re
import sys
import threading
from collections import Counter

from course_lib import simulator
from course_lib.scripts.finding import Found, LaunchPlace
from course_lib.simulator.engine.kernel import Kernel
from course_lib.simulator.engine.signatures import fingerprint
from course_lib.simulator.observe.observer import Observer
from course_lib.simulator.observe.real import run_on_copies
from course_lib.simulator.places import FOLDER
from course_lib.simulator.sanitizer.checking import Checking
from course_lib.simulator.sanitizer.findings import Report
from course_lib.simulator.sanitizer.sanitizer import Sanitizer
from course_lib.simulator.tracing.trace import Trace

_OWN_FOLDER = os.path.dirname(__file__) + os.sep
#: How serious what `lint` finds is. Integers that numba widens are right more often than not.
_LINT_LEVELS = {"float64-promotion": "warning", "spill": "warning", "integer-width": "note"}


class Watch(Observer):
    """Chooses the launches that a command looks at, and counts them.

    Parameters
    ----------
    kernel : str or None
        Only kernels with this name.
    most : int or None
        Only so many launches of each kernel.

    Attributes
    ----------
    launched : Counter
        {name of a kernel: its launches}
    begun, ended : int
        Launches that were looked at, and those of them that came to their end.
    errors, lost : list
        Findings about launches as such, and sentences about what could not be looked at.
    process : int
        0, or the number of this process if it was forked.
    """

    def __init__(self, kernel=None, most=None):
        self.kernel, self.most = kernel, most
        self.process, self._here = 0, threading.local()
        self.forget()

    def forget(self):
        """Begin anew: what was seen belongs to the process that this one was forked from."""
        self.launched, self.begun, self.ended = Counter(), 0, 0
        self.errors, self.lost = [], []

    def wants_launch(self, kernel, grid, block, values):
        name = kernel.__name__
        self.launched[name] += 1
        if self.kernel not in (None, name) or (self.most or sys.maxsize) < self.launched[name]:
            return False
        self.begun += 1
        filename, line = calling_line()
        number = self.launched.total()
        self.place = LaunchPlace(number, name, grid, block, filename, line, self.process)
        return True

    @property
    def place(self):
        """The LaunchPlace of this thread's last launch."""
        return self._here.place

    @place.setter
    def place(self, place):
        self._here.place = place

    def findings(self):
        """What was found, as a list of `Found`."""
        return list(self.errors)

    def end(self):
        """A launch that was begun has ended."""
        self.ended += 1


class ScriptSanitizer(Watch, Sanitizer):
    """Looks for races and everything else that `simulator.sanitize` finds."""

    def forget(self):
        super().forget()
        self.report, self._places = Report(), {}

    def execution(self, launch):
        return _Checking(launch, self.reports(launch), self)

    def report_of(self, launch):
        return _LaunchReport(self.report, self._places, self.place)

    def findings(self):
        found = [Found(each.kind, "error", each.message, each.filename, each.line, each.source,
                       each.lines, self._places[id(each)], each.count) for each in self.report]
        return found + self.errors


class _LaunchReport:
    """The script's report, in which new findings are marked as those of one launch."""

    def __init__(self, report, places, place):
        self.again, self._report, self._places, self._place = report.again, report, places, place

    def add(self, key, finding):
        self._places[id(finding)] = self._place
        self._report.add(key, finding)


class _Checking(Checking):
    def __init__(self, launch, reports, watch):
        super().__init__(launch, reports)
        self._watch = watch

    def launch_end(self):
        super().launch_end()
        self._watch.end()


class ScriptTrace(Watch, Trace):
    """Counts what warps ask of memory."""

    def __init__(self, kernel=None, most=None):
        Trace.__init__(self)
        Watch.__init__(self, kernel, most)

    def execution(self, launch):
        tracing = super().execution(launch)
        ended = tracing.launch_end

        @functools.wraps(ended)
        def launch_end():
            ended()
            self.end()

        tracing.launch_end = launch_end
        return tracing


class ScriptLint(Watch):
    """Compiles every kernel for the types that it is launched on, and lets it run as it is."""

    def __init__(self, kernel=None, most=None):
        super().__init__(kernel, most)
        self._seen = set()

    def wants_launch(self, kernel, grid, block, values):
        key = kernel, tuple(map(fingerprint, values))
        if super().wants_launch(kernel, grid, block, values):
            own = kernel.py_func.__code__.co_filename.startswith(FOLDER)  # cuda.reduce's
            if key not in self._seen and not own:
                self._seen.add(key)
                self._lint(kernel, values)
            self.end()
        return False

    def _lint(self, kernel, values):
        known = {(each.kind, each.filename, each.line, each.message) for each in self.errors}
        try:
            answer = simulator.lint(kernel, *values)
        except simulator.LintError as error:
            if not error.refused:
                told = [line for line in str(error).splitlines() if not line.startswith("During")]
                self.lost.append(f"lint failed for {kernel.__name__}: {told[-1]}")
                return
            self.errors.append(_not_compilable(kernel.py_func.__code__, str(error), self.place))
            return
        for each in answer:
            if (each.kind, each.filename, each.line, each.message) not in known:
                self.errors.append(Found(each.kind, _LINT_LEVELS[each.kind], each.message,
                                         each.filename, each.line, each.source, launch=self.place))


def _not_compilable(code, message, place):
    """The Found for numba's message about a kernel, at the line that it names."""
    told = re.findall(re.escape(code.co_filename) + r" \((\d+)\)", message)
    line = int(told[-1]) if told else code.co_firstlineno
    message = " ".join(message.split())
    message = message if len(message) <= 300 else f"{message[:300]}…"
    return Found("not-compilable", "error", message, code.co_filename, line,
                 linecache.getline(code.co_filename, line).strip(), launch=place)


def calling_line():
    """(file, line) of the code outside the simulator that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((FOLDER, _OWN_FOLDER)):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@contextlib.contextmanager
def threads_watched():
    """Inside, a new Python thread is under the observers and options of the one that starts it."""
    start = threading.Thread.start

    def started(thread):
        run, context = thread.run, contextvars.copy_context()
        thread.run = lambda: context.run(run)
        return start(thread)

    threading.Thread.start = started
    try:
        yield
    finally:
        threading.Thread.start = start


@contextlib.contextmanager
def tensors_copied():
    """Inside, a kernel launched on tensors of a GPU runs on copies, which are copied back."""
    launch = Kernel.launch

    def launched(kernel, grid, block, args, shared_bytes=0, options=None, cluster=1):
        if any(getattr(each, "is_cuda", False) for each in args):
            run_on_copies(kernel, grid, block, args, shared_bytes, cluster)
        else:
            launch(kernel, grid, block, args, shared_bytes, options, cluster)

    Kernel.launch = launched
    try:
        yield
    finally:
        Kernel.launch = launch
