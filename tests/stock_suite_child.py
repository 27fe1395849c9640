"""One process of the stock suite: runs test modules of numba-cuda under one simulator.

Started by `stock_suite.py`, never by pytest. `NUMBA_ENABLE_CUDASIM=1` makes `numba.cuda` the
stock simulator; with `ours` the public names of that module are then replaced by those of
`course_lib.simulator.cuda`, before any test module is imported. Each outcome is one JSON line in
the log, written as soon as it is known, so that a killed process loses nothing.
"""

import argparse
import importlib
import json
import os
import pathlib
import signal
import sys
import time
import types

os.environ["NUMBA_ENABLE_CUDASIM"] = "1"

import pytest  # noqa: E402

MESSAGE_LENGTH = 400


class TooSlow(BaseException):
    """Raised in a test that passed its time limit; no `except Exception` may swallow it."""


class Recorder:
    """A pytest plugin that writes the outcome of every test to the log."""

    def __init__(self, log, per_test, counter=int, skips=None, prepare=lambda module: None):
        self.log = log
        self.prepare = prepare
        self.skips = skips or {}
        self.per_test = per_test
        self.counter = counter
        self.current = None

    def write(self, **record):
        self.log.write(json.dumps(record) + "\n")
        self.log.flush()

    @pytest.fixture
    def initialize_from_pytest_config(self, request):
        """numba-cuda's own conftest, which isn't shipped, sets this on every test class."""
        request.instance._dump_failed_filechecks = False

    def pytest_collection_modifyitems(self, items):
        for item in items:
            self.prepare(item.module)
            if item.nodeid in self.skips:
                item.add_marker(pytest.mark.skip(reason=self.skips[item.nodeid]))

    def pytest_collectreport(self, report):
        if report.failed:
            self.write(test=report.nodeid, outcome="error", message=last_line(report.longreprtext))
        elif report.skipped:
            self.write(test=report.nodeid, outcome="skip", message=skip_reason(report))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        self.write(test=item.nodeid, outcome="started")
        self.result, self.message = "pass", ""
        launches, begun = self.counter(), time.perf_counter()
        try:
            return (yield)
        finally:
            self.write(
                test=item.nodeid,
                outcome=self.result,
                message=self.message[:MESSAGE_LENGTH],
                seconds=round(time.perf_counter() - begun, 2),
                launches=self.counter() - launches,
            )

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        def expired(signum, frame):
            raise TooSlow(f"longer than {self.per_test} s")

        signal.signal(signal.SIGALRM, expired)
        signal.alarm(self.per_test)
        try:
            return (yield)
        except TooSlow as error:
            # An ordinary failure from here on: pytest treats a BaseException as a request to stop.
            self.result = "timeout"
            raise AssertionError(str(error)) from None
        finally:
            signal.alarm(0)

    def pytest_runtest_logreport(self, report):
        if report.outcome == "failed":
            if report.longreprtext.strip() == "Unexpected success":
                self.result = "xpass"
            elif self.result != "timeout":
                self.result = "fail" if report.when == "call" else "error"
            self.message = self.message or last_line(report.longreprtext)
        elif report.outcome == "skipped" and self.result == "pass":
            self.result = "xfail" if hasattr(report, "wasxfail") else "skip"
            self.message = skip_reason(report)


def last_line(text):
    """The line of a pytest report that names the error."""
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return " | ".join(errors[-2:]) if errors else (lines[-1] if lines else "")


def skip_reason(report):
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


def stand_in_for_filecheck():
    """numba-cuda's tests import `filecheck` to look at PTX, which no simulator has."""
    for name in ("matcher", "options", "parser", "finput"):
        module = types.ModuleType(f"filecheck.{name}")
        module.Matcher = module.Options = module.Parser = module.FInput = None
        module.pattern_for_opts = None
        sys.modules[f"filecheck.{name}"] = module
    sys.modules["filecheck"] = types.ModuleType("filecheck")


def overlay_subprocesses(here):
    """Some tests run a script in a new Python: it starts with the same overlay."""
    code = f"import sys; sys.path[:0] = {[str(here), str(here.parent)]}\n"
    code += "import stock_suite_overlay; stock_suite_overlay.replace_simulator()\n"
    pathlib.Path("sitecustomize.py").write_text(code)
    paths = [os.getcwd(), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("simulator", choices=["stock", "ours"])
    parser.add_argument("log", type=pathlib.Path)
    parser.add_argument("--per-test", type=int, default=60)
    parser.add_argument("--done", type=pathlib.Path, help="a file of test ids not to run again")
    parser.add_argument("modules", nargs="+")
    options = parser.parse_args()

    try:
        importlib.import_module("filecheck")
    except ImportError:
        stand_in_for_filecheck()
    overlay = ()  # the stock simulator's launches aren't counted: always 0
    if options.simulator == "ours":
        here = pathlib.Path(__file__).parent
        sys.path[:0] = [str(here), str(here.parent)]
        import stock_suite
        import stock_suite_overlay

        counter = stock_suite_overlay.apply()
        overlay = (counter, stock_suite.load_skips(), stock_suite_overlay.fill_names)
        overlay_subprocesses(here)
    from numba import cuda

    root = pathlib.Path(cuda.__file__).parent
    while not (root / "tests" / "cudapy").is_dir():
        root = root.parent
    root = root / "tests"
    arguments = [str(root / module) for module in options.modules]
    if options.done:
        arguments += [f"--deselect={test}" for test in options.done.read_text().split("\n") if test]
    with options.log.open("a") as log:
        pytest.main(
            [
                "-q",
                "--no-header",
                "--tb=short",
                "-pno:cacheprovider",
                "-pno:xdist",
                "-pno:timeout",
                "-pno:randomly",
                "-c",
                os.devnull,
                f"--rootdir={root}",
                "--import-mode=importlib",
                # One module that cannot be imported must not keep the others from running.
                "--continue-on-collection-errors",
                *arguments,
            ],
            plugins=[Recorder(log, options.per_test, *overlay)],
        )
    os._exit(0)  # the stock simulator may have left threads that never end


if __name__ == "__main__":
    main()
