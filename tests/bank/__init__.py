"""Kernels that learners write: wrong ones, with what a check must say, and right ones.

A module for each lesson. `@wrong("relu", "never written")` above a kernel says that
`check("relu", kernel)` must fail with a message in which that pattern (a regular expression)
occurs. `@right("relu")` says that it must pass. Most wrong kernels are a right one with a few texts
replaced, which `mistake` (in mistakes.py) enters; those of a make of their own are written out.
"""

from collections.abc import Callable

WRONG: list[tuple[str, object, str]] = []
RIGHT: list[tuple[str, object]] = []


def wrong(exercise: str, says: str) -> Callable:
    """Enter the kernel below as wrong, with a pattern of the message that it must get."""

    def enter(kernel):
        WRONG.append((exercise, kernel, says))
        return kernel

    return enter


def right(exercise: str) -> Callable:
    """Enter the kernel below as right."""

    def enter(kernel):
        RIGHT.append((exercise, kernel))
        return kernel

    return enter
