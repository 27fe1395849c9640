"""How long training takes, told from its first steps."""

import time

import torch

STEPS, SECONDS = 50, 5.0  # until it is told, whichever is over first


class Estimate:
    """Calls `say` with a sentence after some of the `n_steps` of `task`; `say` may be None.

    The first step is left out: kernels are compiled and memory is found there.
    """

    def __init__(self, task, n_steps, say):
        self.device = getattr(task, "device", None)
        self.n_steps, self.say, self.done, self.start = n_steps, say, 0, None

    def step(self):
        """A step has been made."""
        if self.say is None:
            return
        self.done += 1
        if self.done == 1:
            self.start = self._now()
            return
        timed = self.done - 1
        if timed >= STEPS or time.monotonic() - self.start >= SECONDS:
            seconds = (self._now() - self.start) / timed * self.n_steps
            self.say(f"{self.n_steps:,} steps take about {duration(seconds)}, validation aside.")
            self.say = None

    def _now(self):
        # The GPU goes on while Python is at the next step already.
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic()


def duration(seconds):
    """Seconds as a reader wants them."""
    for name, length in (("hour", 3600), ("minute", 60)):
        if seconds >= 1.5 * length:
            return f"{seconds / length:.0f} {name}s"
    return f"{max(1, round(seconds))} second{'s' * (seconds >= 1.5)}"
