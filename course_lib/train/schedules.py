"""Learning rates that follow from the number of a step alone, so that nothing need be kept of them.

A schedule is a function of a step's number, from 0 on; what it returns is multiplied by the rate
that each group of parameters begins with. Any such function will do.
"""

import math


def constant(*, warm_up=0):
    """1 at every step, after `warm_up` steps in which it rises."""
    require_whole("warm_up", warm_up, 0)
    return lambda step: min(1.0, (step + 1) / warm_up) if warm_up else 1.0


def cosine(total_steps, *, warm_up=0, least=0.0):
    """Rises to 1 in the first `warm_up` steps, then falls to `least` along a cosine.

    At `total_steps` it has reached `least`, and stays there. Raises ValueError for numbers that do
    not go together.
    """
    require_whole("total_steps", total_steps, 1)
    require_whole("warm_up", warm_up, 0)
    if warm_up > total_steps:
        raise ValueError(f"warm_up must be at most the {total_steps} steps in all, not {warm_up}")
    _require_share("least", least)

    def factor(step):
        if step < warm_up:
            return (step + 1) / warm_up
        return _between(1.0, least, (step - warm_up) / max(1, total_steps - warm_up))

    return factor


def one_cycle(total_steps, *, rise=0.3, first=1 / 25, last=1e-4):
    """Rises from `first` to 1 in the share `rise` of the steps, then falls to ``first * last``.

    Both along a cosine, as `torch.optim.lr_scheduler.OneCycleLR` does it, whose ``div_factor`` is
    1 / `first` and ``final_div_factor`` 1 / `last`. After `total_steps` it stays where it ended.
    Source: L. Smith and N. Topin, "Super-convergence" (2018). Raises ValueError for numbers that do
    not go together.
    """
    require_whole("total_steps", total_steps, 1)
    for name, share in (("rise", rise), ("first", first), ("last", last)):
        _require_share(name, share)
    top, end = rise * total_steps - 1, total_steps - 1

    def factor(step):
        if step <= top:
            return _between(first, 1.0, step / top if top > 0 else 1.0)
        return _between(1.0, first * last, (step - top) / (end - top) if end > top else 1.0)

    return factor


def _between(start, end, share):
    """From `start` to `end` along half a wave of the cosine; at `end` from a share of 1 on."""
    return end + (start - end) * (1 + math.cos(math.pi * min(1.0, share))) / 2


def require_whole(name, number, least):
    """Raise ValueError unless `number` is a whole number, `least` or more."""
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise ValueError(f"{name} must be a whole number, {least} or more; not {number!r}")


def _require_share(name, share):
    if not 0 <= share <= 1:
        raise ValueError(f"{name} must be from 0 to 1, not {share!r}")
