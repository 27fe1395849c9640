"""One run of a program under a command's observer, and its report."""

import contextlib
import multiprocessing
import os
import sys
import threading

from course_lib import simulator
from course_lib.scripts import failures, finding, formats, processes, running, watching
from course_lib.simulator.observe.real import observing_with

CLEAN, FINDINGS, WRONG_USAGE, SCRIPT_FAILED, NOT_ALL_CHECKED, INTERRUPTED = 0, 1, 2, 3, 4, 130
_WATCHES = {"sanitize": watching.ScriptSanitizer, "trace": watching.ScriptTrace,
            "lint": watching.ScriptLint}
_leave = os._exit


class WatchedRun:
    """A run of `program`, a `running.Program`, with a command's options."""

    def __init__(self, options, program):
        self.options, self.program = options, program
        self.watch = _WATCHES[options.what](options.kernel, options.max_launches)
        self.processes = processes.Processes(self.watch)
        self.failed = self.interrupted = False
        self.unchecked = []
        self._reporting = threading.Lock()

    def status(self):
        """Run the program, write the report, and return the exit status."""
        settings = simulator.options(order=self.options.order, seed=self.options.seed)
        with self._aside(), self._in_time(), self._before_exit():
            with settings, observing_with(self.watch):
                with watching.threads_watched(), watching.tensors_copied():
                    own = self._run()
                    if self.processes.is_forked:  # a child that has come to the script's end
                        self.processes.store(None)
                        return own
                    self._wait()
        return self._report()

    def _run(self):
        """Run the program. The exit status that Python would have given it."""
        try:
            self.program.run()
        except SystemExit as stop:
            if not isinstance(stop.code, int | None):
                print(stop.code, file=sys.stderr)
            own = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            if own:
                self._fails(f"the script ended with exit status {own}")
            return own
        except KeyboardInterrupt:
            self.interrupted = True
            return INTERRUPTED
        except Exception as error:
            self._explain(error)
            return 1
        return 0

    def _explain(self, error):
        """Note an error that has ended the script, as what it is."""
        found, lacking = failures.as_finding(error), failures.as_lacking(error)
        if found is not None:
            # lint may have said so before the launch.
            if found.kind not in {each.kind for each in self.watch.errors}:
                self.watch.errors.append(found)
        elif lacking is not None:
            self.unchecked.append(lacking)
        else:
            running.print_traceback(error)
            self._fails(f"the script failed: {type(error).__name__}")

    def _fails(self, sentence):
        self.failed = True
        self.unchecked.append(sentence)

    def _wait(self):
        """Wait for the threads and processes that Python would wait for at its end."""
        try:
            for thread in threading.enumerate():
                if thread is not threading.current_thread() and not thread.daemon:
                    thread.join()
            self.processes.wait()
        except KeyboardInterrupt:
            self.interrupted = True

    @contextlib.contextmanager
    def _aside(self):
        """Keep the output for the report, unless that is text: the script's goes to the errors."""
        with contextlib.suppress(AttributeError):  # there is none
            sys.stdout.flush()
        try:
            self._output = os.dup(1)
        except OSError:
            self._output = os.open(os.devnull, os.O_WRONLY)
        if self.options.format != "text" and self.options.output is None:
            os.dup2(2, 1)
        yield

    @contextlib.contextmanager
    def _in_time(self):
        """End the process, after its report, where the script takes longer than it may."""
        def end():
            self._fails(f"the script did not end within {self.options.timeout} s")
            status = self._report()
            for child in multiprocessing.active_children():
                child.terminate()
            _leave(status)

        timer = threading.Timer(self.options.timeout or 0, end)
        timer.daemon = True
        if self.options.timeout:
            timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextlib.contextmanager
    def _before_exit(self):
        """Report a script that ends its process at once, too."""
        def left(status):
            if not self.processes.is_forked:
                if status:
                    self._fails(f"the script ended with exit status {status}")
                status = self._report()
            _leave(status)

        os._exit = left
        try:
            yield
        finally:
            os._exit = _leave

    # -- the report ------------------------------------------------------------------------------

    def _report(self):
        """Write the report and return the exit status. The first call never gives way to others."""
        self._reporting.acquire()
        result = self.result()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError, ValueError, OSError):  # closed
                stream.flush()
        try:
            self._write(result)
        except BrokenPipeError:
            pass  # read by something like head, which has seen enough
        except OSError as error:
            print(f"The report cannot be written: {error}", file=sys.stderr)
            result.status = WRONG_USAGE
        self.processes.close()
        return result.status

    def _write(self, result):
        if getattr(self.options, "html", None) is not None:
            from course_lib.scripts import page

            self.options.html.write_text(page.page(self.watch, result), encoding="utf-8")
        text = formats.written(result, self.options.format) + "\n"
        if self.options.output is not None:
            self.options.output.write_text(text, encoding="utf-8")
            return
        encoding = getattr(sys.__stdout__, "encoding", None) or "utf-8"
        with open(self._output, "w", encoding=encoding, errors="replace") as stream:
            stream.write(text)

    def result(self):
        """What was found, as a `formats.Result`."""
        forked, watch, options = self.processes.collected(), self.watch, self.options
        result = formats.Result(
            options.what, self.program.name, order=options.order,
            findings=finding.joined(watch.findings(), forked.findings),
            launched=watch.launched + forked.launched, checked=watch.ended + forked.ended,
            unchecked=[*self.unchecked, *watch.lost, *forked.lost],
        )  # fmt: skip
        if options.what == "trace":
            result.unchecked += _lost_to_trace(forked.launched)
            self._trace(result)
        if not result.launched:
            result.unchecked.append("no kernel was launched")
        elif options.kernel is not None and options.kernel not in result.launched:
            result.unchecked.append(f"no kernel called {options.kernel} was launched; there were "
                                    f"{', '.join(sorted(result.launched))}")
        if begun := watch.begun + forked.begun - result.checked:
            count = formats.many(begun, "launch", "launches")
            result.unchecked.append(f"{count} did not come to an end")
        result.status = self._status(result)
        return result

    def _status(self, result):
        if self.interrupted:
            return INTERRUPTED
        if any(each.level != "note" for each in result.findings):
            return FINDINGS
        if self.failed:
            return SCRIPT_FAILED
        return NOT_ALL_CHECKED if result.unchecked else CLEAN

    def _trace(self, result):
        """Put what the trace counted into the result."""
        trace = self.watch
        result.sites = [formats.site_data(site) for site in trace.sites]
        kernels = dict.fromkeys((each.filename, each.function)
                                for each in (*trace.sites, *trace.branches))
        for filename, function in kernels:
            table = trace.table(
                lambda each, key=(filename, function): (each.filename, each.function) == key)
            result.text += f"{function} in {finding.shown_path(filename)}\n{table}\n\n"
        result.text = result.text.rstrip()


def _lost_to_trace(launched):
    """A sentence about launches whose counts stay in forked processes."""
    if launched:
        yield f"the table lacks {launched.total()} launches of forked processes"
