"""Where the time of a step goes: a trace to look through, and a table."""

import os
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

TRACE, TABLE = "trace.json", "profile.txt"
WAIT, STEPS, ROWS = 3, 5, 20


class Profiled:
    """A task for `loop.fit` that is `task`, and profiles some of its first steps.

    output  the folder for `trace.json`, which Perfetto and chrome://tracing show, and `profile.txt`
    say     called with the table
    """

    def __init__(self, task, output, say=None):
        self.task, self.output, self.say = task, Path(output), say
        total = task.epochs * task.steps_per_epoch
        self.wait = min(WAIT, total // 2)
        self.last = min(self.wait + STEPS, total)
        self.done, self.profile = 0, None

    def __getattr__(self, name):
        return getattr(self.task, name)

    def train_step(self, step):
        """A step of the task."""
        if self.done == self.wait:
            kinds = [ProfilerActivity.CPU]
            if self.task.device.type == "cuda":
                kinds.append(ProfilerActivity.CUDA)
            self.profile = profile(activities=kinds, profile_memory=True)
            self.profile.start()
        self.task.train_step(step)
        self.done += 1
        if self.done == self.last and self.profile is not None:
            self._end()

    def _end(self):
        if self.task.device.type == "cuda":
            torch.cuda.synchronize(self.task.device)
        self.profile.stop()
        part = self.output / f"{TRACE}.part"
        self.profile.export_chrome_trace(str(part))
        os.replace(part, self.output / TRACE)
        on = "cuda" if self.task.device.type == "cuda" else "cpu"
        table = self.profile.key_averages().table(sort_by=f"self_{on}_time_total", row_limit=ROWS)
        (self.output / TABLE).write_text(table + "\n", encoding="utf-8")
        if self.say is not None:
            told = f"{self.last - self.wait} steps:\n{table}\nThe trace is {self.output / TRACE}."
            self.say(told)
        self.profile = None
