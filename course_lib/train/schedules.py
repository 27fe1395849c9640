"""How the learning rate goes: its share of the highest, step by step."""

import math


def cosine(step, total, rise):
    """It rises in the first `rise` of the `total` steps, then falls to 0 along a cosine."""
    if step < rise:
        return (step + 1) / rise
    return (1 + math.cos(math.pi * (step - rise) / max(1, total - rise))) / 2


def one_cycle(step, total, rise):
    """It rises along a cosine from 1/25 in `rise` steps, or without one in 30 %, then falls to 0.

    Smith and Topin, "Super-Convergence" (2017), in the form of PyTorch's OneCycleLR.
    """
    rise = rise or max(1, round(0.3 * total))
    if step < rise:
        return 1 - (1 - 1 / 25) * (1 + math.cos(math.pi * step / rise)) / 2
    return (1 + math.cos(math.pi * (step - rise) / max(1, total - rise))) / 2


def constant(step, total, rise):
    """It rises in the first `rise` steps, and stays."""
    return min(1.0, (step + 1) / rise) if rise else 1.0


SCHEDULES = {"cosine": cosine, "one_cycle": one_cycle, "constant": constant}
