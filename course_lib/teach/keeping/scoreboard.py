"""By whose kernels a network runs: each exercise's own where it has passed, and what was launched.

    board = Scoreboard()
    board.use("conv2d_direct")
    board.launch("conv1", "conv2d_direct", y.size, x, weight, bias, y, 1, 0)
    board.show()

Nothing is counted but launches that have happened: `launch` is what starts a kernel, and it counts
when the launch has returned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from course_lib.teach.checking.check import use
from course_lib.teach.display import show_table, user_facing
from course_lib.teach.exercise import Exercise, find

YOURS, COURSES = "yours", "the course's"

_HEADER = ("layer", "kernel", "lesson", "whose", "launches", "threads")


@dataclass
class _Row:
    launches: int = 0
    threads: int = 0


class Scoreboard:
    """Kernels of exercises by name, each with whose it is, and their launches by layer."""

    def __init__(self):
        self._kernels: dict[str, Callable] = {}
        self._rows: dict[tuple[str, str], _Row] = {}

    @user_facing
    def use(self, name: str, obj: Callable | None = None) -> None:
        """Take the kernel that `use(name, obj)` returns, and print the line that says whose it is.

        Raises
        ------
        UnknownExercise: there is no exercise called `name`.
        TypeError: its solution is no kernel, so that nothing could be launched.
        """
        exercise = find(name)
        if exercise.kind != "kernel":
            raise TypeError(f"a scoreboard launches kernels, and {name} is a {exercise.kind}")
        self._kernels[name] = use(name, obj)

    @user_facing
    def launch(self, layer: str, name: str, threads: int, *arguments, block=128, grid=None) -> None:
        """Launch the kernel `name` on blocks of `block` threads, and count that for `layer`.

        There are as many blocks as `threads` need, at least one; or `grid`, where that is given, in
        as many dimensions as `block`. Raises ValueError unless `use(name)` has come before.
        """
        if name not in self._kernels:
            has = ", ".join(self._kernels) or "none"
            raise ValueError(f"the scoreboard has no kernel {name!r}, it has {has}: use it first")
        grid = max(1, -(-threads // _product(block))) if grid is None else grid
        self._kernels[name][grid, block](*arguments)
        row = self._rows.setdefault((layer, name), _Row())
        row.launches += 1
        row.threads += _product(grid) * _product(block)

    def whose(self, name: str) -> str:
        """Return "yours" or "the course's" for a kernel that `use` has taken."""
        return COURSES if self._kernels[name] is find(name).solution else YOURS

    @property
    def launches(self) -> dict[str, int]:
        """How many launches were of your kernels, and of the course's."""
        found = {YOURS: 0, COURSES: 0}
        for (_, name), row in self._rows.items():
            found[self.whose(name)] += row.launches
        return found

    def clear(self) -> None:
        """Forget the launches, and keep the kernels."""
        self._rows.clear()

    @user_facing
    def show(self) -> None:
        """Show each layer's kernels in the order of their first launch, whose, and how many."""
        rows = [
            (layer, name, _lesson(find(name)), self.whose(name), f"{row.launches:,}",
             f"{row.threads:,}")
            for (layer, name), row in self._rows.items()
        ]  # fmt: skip
        count = self.launches
        summary = f"launches: yours {count[YOURS]:,}, the course's {count[COURSES]:,}"
        show_table(_HEADER, rows, summary)


def _product(sizes: int | tuple[int, ...]) -> int:
    count = 1
    for size in sizes if isinstance(sizes, tuple) else (sizes,):
        count *= int(size)
    return count


def _lesson(exercise: Exercise) -> str:
    return exercise.lesson.lstrip("0") or "0"
