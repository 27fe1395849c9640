"""The learning rates of an optimiser's groups, where a captured CUDA graph reads them."""

import torch

from course_lib.optim.fused import Fused


class Rates:
    """Puts ``rate of the group · schedule(step)`` where the optimiser finds it, before each step.

    schedule   a function of the step's number (`train.schedules`), or None
    on_device  whether the rates are float32 tensors on the parameters' device, which a graph reads
               anew at each replay; else they are plain numbers

    A number that somebody puts into a group meanwhile is taken up as its new rate. Without a
    schedule, a tensor that is a group's rate already stays there: whoever holds it may fill it.
    """

    def __init__(self, optimizer, schedule, device, on_device):
        self.optimizer, self.schedule, self.device = optimizer, schedule, device
        self.on_device, self.groups = on_device, list(optimizer.param_groups)
        self.theirs = [
            group["lr"] if schedule is None and isinstance(group["lr"], torch.Tensor) else None
            for group in self.groups
        ]
        self.base = [float(group["lr"]) for group in self.groups]
        self.now = [None] * len(self.groups)
        self.tensors = [
            torch.full((), rate, device=device) if on_device and theirs is None else None
            for rate, theirs in zip(self.base, self.theirs, strict=True)
        ]

    def set(self, step):
        """The rates of step number `step`; whether a plain number is another one than before."""
        if len(self.optimizer.param_groups) != len(self.groups):
            raise ValueError(
                f"the optimiser has {len(self.optimizer.param_groups)} groups of parameters, and "
                f"had {len(self.groups)} when its trainer was made: make another trainer"
            )
        factor = 1.0 if self.schedule is None else float(self.schedule(step))
        changed = False
        for i, group in enumerate(self.groups):
            if self.theirs[i] is None:
                changed |= self._set(i, group, factor)
        return changed

    def _set(self, i, group, factor):
        tensor = self.tensors[i]
        if self.now[i] is not None and group["lr"] is not tensor and group["lr"] != self.now[i]:
            self.base[i] = float(group["lr"])
        rate, before = self.base[i] * factor, self.now[i]
        self.now[i] = rate
        if tensor is None:
            group["lr"] = rate
            return before is not None and rate != before
        group["lr"] = tensor
        if rate != before:
            tensor.fill_(rate)
        return False

    def of_groups(self):
        """What each group's rate is before the schedule."""
        return [
            base if theirs is None else float(theirs)
            for base, theirs in zip(self.base, self.theirs, strict=True)
        ]

    def restore(self, of_groups):
        """Begin again with what `of_groups` gave, in the groups that the optimiser has today."""
        self.groups, self.base = list(self.optimizer.param_groups), list(of_groups)
        self.now = [None] * len(self.groups)
        for group, rate, theirs in zip(self.groups, self.base, self.theirs, strict=True):
            group["lr"] = rate if theirs is None else theirs.fill_(rate)


def takes_tensors(optimizer):
    """Whether a step reads learning rates from the GPU's memory.

    PyTorch's ``capturable=True`` alone reads a rate on the device of its parameters only, so a
    network on several devices has plain numbers there.
    """
    if isinstance(optimizer, Fused):
        return True
    groups = optimizer.param_groups
    on_one = len({p.device for group in groups for p in group["params"]}) < 2
    return all(bool(g.get("fused") or g.get("capturable") and on_one) for g in groups)
