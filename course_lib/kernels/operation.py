"""What every operation says of its passes: a ladder of rungs, and which of them runs.

An operation has a ladder for each of its passes, called `FORWARD`, `BACKWARD` and so on. Its public
functions take ``variant="auto"``, which lets the operation choose, or the name of a rung; the rung
asked for is the one that runs. What compares, measures, compiles or tests kernels reads ladders and
knows no operation by name.
"""

import contextlib
import functools
from collections.abc import Mapping

from course_lib.runtime.host import launch as launching
from course_lib.runtime.host.launch import chip_of

#: What `variant` is where nobody asks for a rung.
AUTO = "auto"
#: The compute capability from which on the course runs at all.
EVERY_CHIP = (7, 5)


class Rung:
    """One way to compute a pass.

    name     what `variant` calls it
    launch   host function that launches it; all rungs of a ladder take the same arguments
    kernels  every kernel that it may launch: a tuple, or a function that gives it, for rungs of so
             many kernels that each is made only when it is first launched
    decides  functions that choose kernel, grid, block and shared memory, where they depend on more
             than the number of elements
    needs    the compute capability from which on it runs
    """

    def __init__(self, name, launch, kernels, decides=(), needs=EVERY_CHIP):
        self.name, self.launch, self.needs = name, launch, needs
        self.decides = tuple(dict.fromkeys(decides))
        self._kernels = kernels

    @functools.cached_property
    def kernels(self):
        found = self._kernels() if callable(self._kernels) else self._kernels
        return tuple(dict.fromkeys(found))


class Ladder(Mapping):
    """The rungs of one pass by name, in teaching order: ``ladder["naive"]`` is a `Rung`.

    auto  names of the rungs that AUTO takes, the first that the chip can run; none where the
          operation chooses by shape as well
    """

    def __init__(self, *rungs, auto=()):
        self._rungs = {rung.name: rung for rung in rungs}
        self.auto = (auto,) if isinstance(auto, str) else tuple(auto)
        for name in self.auto:
            self[name]  # there is such a rung
        #: What runs on every chip, which is most of what is asked for: found by one look-up.
        self._everywhere = {rung.name: rung for rung in rungs if rung.needs <= EVERY_CHIP}
        if self.auto and self.auto[0] in self._everywhere:
            self._everywhere[AUTO] = self[self.auto[0]]
        self._instead = None  # the rung that AUTO takes within `choosing`

    def __getitem__(self, name):
        return self._rungs[name]

    def __iter__(self):
        return iter(self._rungs)

    def __len__(self):
        return len(self._rungs)

    @property
    def kernels(self):
        """Every kernel that any rung may launch, once."""
        return tuple(dict.fromkeys(kernel for rung in self.values() for kernel in rung.kernels))

    def require(self, variant):
        """Raise ValueError unless `variant` is AUTO or one of the rungs."""
        if variant != AUTO and variant not in self._rungs:
            known = ", ".join(self._rungs)
            raise ValueError(f"unknown variant {variant!r}; there are {known}, and {AUTO!r}")

    @contextlib.contextmanager
    def choosing(self, name):
        """Within, AUTO takes the rung called `name`, in operators, modules and networks as well.

        For all threads. Raises ValueError for a rung that there is not; one that this chip can't
        run is refused when it is to run. Noted launches of other choices are not repeated.
        """
        self.require(name)
        before = self._instead, self._everywhere.pop(AUTO, None), launching.choices
        self._instead = None if name == AUTO else name
        launching.choices = (*before[2], (id(self), name))
        try:
            yield
        finally:
            self._instead, everywhere, launching.choices = before
            if everywhere is not None:
                self._everywhere[AUTO] = everywhere

    def rung(self, variant, array, chosen=None):
        """The rung to run on the chip that `array` is on.

        chosen  function() that names the rung AUTO takes, where the ladder's `auto` names none

        Raises ValueError for a variant that there is not, or that this chip can't run.
        """
        if (found := self._everywhere.get(variant)) is not None:
            return found
        self.require(variant)
        if variant == AUTO and self._instead is not None:
            variant = self._instead
        if variant != AUTO:
            found = self[variant]
            if (has := chip_of(array)[0]) < found.needs:
                needed, has = (".".join(map(str, number)) for number in (found.needs, has))
                can = [name for name, rung in self.items() if rung.needs <= chip_of(array)[0]]
                raise ValueError(
                    f"variant {variant!r} needs compute capability {needed}, and this GPU has "
                    f"{has}: use one of {', '.join(can)}"
                )
            return found
        if chosen is not None:
            return self[chosen()]
        for name in self.auto:
            if self[name].needs <= EVERY_CHIP or self[name].needs <= chip_of(array)[0]:
                return self[name]
        raise ValueError(f"none of {', '.join(self.auto)} runs on this GPU")
