"""Settings of a launch: the order threads run in, and how long a loop may spin."""

import contextlib
import contextvars
from collections.abc import Callable
from dataclasses import dataclass, replace

ORDERS = ("forward", "reverse", "random", "interleaved")


@dataclass(frozen=True)
class Options:
    """What `options` sets. A launch reads it once, when it starts."""

    order: str = "forward"
    seed: int = 0
    max_steps: int = 20_000_000
    progress: Callable | None = None
    float_error: Callable | None = None


_current = contextvars.ContextVar("simulator_options", default=Options())  # noqa: B039


def current_options():
    """The `Options` in force here."""
    return _current.get()


def check_order(order):
    """Raise ValueError unless `order` is one of `ORDERS`."""
    if order not in ORDERS:
        raise ValueError(f"order must be one of {', '.join(ORDERS)}; got {order!r}")


@contextlib.contextmanager
def options(**changes):
    """Change how launches inside the `with` block run. Nests; other Python threads are untouched.

    Parameters
    ----------
    order : "forward", "reverse", "random" or "interleaved"
        The order in which threads run between two barriers, and blocks within a grid. A kernel
        whose result depends on it has a race. "interleaved" is forward, but before each store and
        atomic all other threads of the grid have a turn: between `x[i]` and `x[i] = x[i] + 1` they
        load too, so that updates which are not atomic lose changes. It is several times slower,
        keeps all blocks alive at once, and needs the source of every function.
    seed : int
        Seed of the random order.
    max_steps : int
        Iterations of `while` loops that a launch may make without any thread finishing.
        Past it the launch ends with `Deadlock`.
    progress : function or None
        Called as `progress(blocks, total=n)` when a launch starts; must give the blocks back one by
        one. `tqdm` does, and draws a bar.
    float_error : function or None
        Called as `float_error(kind)` from inside the kernel where NumPy's numbers overflow, are
        divided by zero or make NaN of others: kind "overflow", "divide by zero", "invalid value".

    Raises
    ------
    TypeError for an unknown setting, ValueError for a bad value.
    """
    unknown = set(changes) - set(Options.__dataclass_fields__)
    if unknown:
        known = ", ".join(Options.__dataclass_fields__)
        raise TypeError(f"unknown option {sorted(unknown)[0]!r}; there are {known}")
    new = replace(_current.get(), **changes)
    check_order(new.order)
    if not isinstance(new.max_steps, int) or new.max_steps < 1:
        raise ValueError(f"max_steps must be a positive integer; got {new.max_steps!r}")
    token = _current.set(new)
    try:
        yield new
    finally:
        _current.reset(token)
