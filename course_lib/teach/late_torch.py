"""PyTorch for exercises: imported when it is used, since it takes seconds and not all need it."""

import importlib


class _Later:
    """A module that is imported when something in it is asked for."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        return getattr(importlib.import_module(self._name), attribute)


torch = _Later("torch")


def warm_up():
    """Let PyTorch do all that it does late and once, before the clock of a check runs.

    A first gradient and a first tensor without numbers take seconds: imports, and the start of a
    GPU. Half an import, stopped by the clock, would leave the session broken.
    """
    torch.ones(1, requires_grad=True).sum().backward()
    torch.empty_like(torch.empty(1, device="meta")).new_empty(1).mean()
