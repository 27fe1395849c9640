"""The processes that a script starts: what forked ones found, and the names of spawned ones.

A forked process runs under the observers that it inherits, and writes what it has found into a
file of its own whenever a launch begins or ends, because it may be ended at any time. A spawned
Python knows nothing of the observers.
"""

import json
import multiprocessing
import multiprocessing.util
import os
import re
import shutil
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from course_lib.scripts.finding import Found
from course_lib.simulator.places import FOLDER

_PYTHON = re.compile(r"(^|[/\\\s])(python|pypy)[\d.]*(\.exe)?(\s|$)")


@dataclass
class Collected:
    """What forked processes found, the counts of `Watch`, and sentences about what is lost."""

    findings: list = field(default_factory=list)
    launched: Counter = field(default_factory=Counter)
    begun: int = 0
    ended: int = 0
    lost: list = field(default_factory=list)


class Processes:
    """Follows the processes that start while `watch` looks at the launches of this one."""

    def __init__(self, watch):
        self.watch, self.owner = watch, os.getpid()
        self.spawned = []
        # No TemporaryDirectory: a forked process would delete it at its end.
        self._folder = Path(tempfile.mkdtemp(prefix="course_lib-"))
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)
        sys.addaudithook(self._heard)
        self._start_of_multiprocessing()

    @property
    def is_forked(self):
        """Whether this is a process that the script forked."""
        return os.getpid() != self.owner

    def _forked(self):
        self.watch.forget()
        self.watch.process = os.getpid()
        ended, wants = self.watch.end, self.watch.wants_launch

        def end():
            ended()
            self.store(None)

        def wants_launch(kernel, grid, block, values):
            self.store(kernel.__name__)
            wanted = wants(kernel, grid, block, values)
            self.store(kernel.__name__ if wanted else None)
            return wanted

        # In a child of a child these are written over the ones that it has inherited.
        self.watch.end, self.watch.wants_launch = end, wants_launch

    def store(self, running):
        """Write down what this forked process has found; `running` names the kernel in hand."""
        file = self._folder / f"{os.getpid()}.json"
        watch = self.watch
        data = {"running": running, "launched": watch.launched, "begun": watch.begun,
                "ended": watch.ended, "lost": watch.lost,
                "findings": [each.as_data() for each in watch.findings()]}
        try:
            file.with_suffix(".new").write_text(json.dumps(data), encoding="utf-8")
            file.with_suffix(".new").replace(file)
        except FileNotFoundError:
            pass  # the script has ended before this process, and says so
        except OSError as error:
            print(f"What process {os.getpid()} finds is lost: {error}", file=sys.stderr)

    def collected(self):
        """What all forked processes did, as a `Collected`."""
        found = Collected()
        for file in sorted(self._folder.glob("*.json")):
            data = json.loads(file.read_text(encoding="utf-8"))
            found.findings += map(Found.of_data, data["findings"])
            found.launched.update(data["launched"])
            found.begun += data["begun"]
            found.ended += data["ended"]
            found.lost += data["lost"]
            if data["running"] is not None:
                found.begun -= 1
                found.lost.append(f"process {file.stem} did not end its launch of "
                                  f"{data['running']}: what was found in it is lost")
        found.lost += [f"process {child.pid} still ran: what it found later is lost"
                       for child in multiprocessing.active_children()]
        found.lost += [f"the kernels of a process that was started were not looked at: {line}"
                       for line in dict.fromkeys(self.spawned)]
        return found

    @staticmethod
    def wait():
        """Wait for the processes that Python would wait for at its end."""
        for child in multiprocessing.active_children():
            if not child.daemon:
                child.join()

    def close(self):
        """Delete what forked processes wrote."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # -- spawned processes -----------------------------------------------------------------------

    def _heard(self, event, args):
        if event == "subprocess.Popen" and not self.is_forked:
            words = args[1] if isinstance(args[1], str) else [*map(os.fsdecode, args[1])]
            words = words.split() if isinstance(words, str) else words
            self._note([os.fsdecode(args[0] or words[0]), *words[1:]])

    def _start_of_multiprocessing(self):
        start = multiprocessing.util.spawnv_passfds

        def started(path, args, passfds):
            self._note([os.fsdecode(each) for each in args])
            return start(path, args, passfds)

        multiprocessing.util.spawnv_passfds = started

    def _note(self, words):
        line = " ".join(words)
        ours = any(word.startswith(FOLDER) for word in words)
        if not _PYTHON.search(line) or ours or "multiprocessing.resource_tracker" in line:
            return
        way = re.search(r"from multiprocessing\.(spawn|forkserver) import", line)
        self.spawned.append(f"one of multiprocessing's start method {way[1]} (fork is followed)"
                            if way else line)
