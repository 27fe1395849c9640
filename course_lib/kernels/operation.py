"""What every operation says of its passes: a ladder of rungs, and which of them runs.

An operation has a ladder for each of its passes, called `FORWARD`, `BACKWARD` and so on. Its public
functions take ``variant="auto"``, which lets the operation choose; or the name of a rung, which is
then the one that runs; or a rung and one of its ways, such as ``"tensor_core/wgmma"``. What
compares, measures, compiles or tests kernels reads ladders and knows no operation by name.
"""

import contextlib
import functools
from collections.abc import Mapping
from typing import NamedTuple

from course_lib.runtime.host import launch as launching
from course_lib.runtime.host.launch import chip_of

#: What `variant` is where nobody asks for a rung.
AUTO = "auto"
#: The compute capability from which on the course runs at all.
EVERY_CHIP = (7, 5)


class Refusal(NamedTuple):
    """Why a way can't take a problem: what follows "variant 'split/cluster' …"."""

    reason: str


class Way:
    """One strategy of a rung: how it is planned and launched, and its kernels.

    name     what follows the rung's name in `variant`
    plan     function(problem, chip): the plan for `launch`, or a `Refusal` that says what is
             impossible. What is possible and slow is for the rung's `prefer`. A problem is what
             plans depend on, hashable; without `plan`, it is the plan itself
    launch   host function that launches it; all ways of a ladder take the same arguments, first of
             them the plan where the operation makes plans
    kernels  every kernel that it may launch: a tuple, or a function that gives it, for so many
             kernels that each is made only when it is first launched
    needs    the compute capability from which on it runs
    """

    def __init__(self, name, plan, launch, kernels, needs=EVERY_CHIP):
        self.name, self.launch, self.needs = name, launch, needs
        self._plan, self._kernels = plan, kernels

    @functools.cached_property
    def kernels(self):
        found = self._kernels() if callable(self._kernels) else self._kernels
        return tuple(dict.fromkeys(found))

    def refusal(self, chip):
        """The `Refusal` of a chip that is too old; None of others."""
        if chip.capability >= self.needs:
            return None
        needed, has = (".".join(map(str, number)) for number in (self.needs, chip.capability))
        return Refusal(f"needs compute capability {needed}, and this GPU has {has}")

    def plan(self, problem, chip):
        """The plan for `problem` on `chip`, or a `Refusal`."""
        return self.refusal(chip) or (self._plan(problem, chip) if self._plan else problem)


class Rung(Way):
    """What a lesson names: one way to compute a pass, which never refuses; or several ways.

    ways    its ways. Those without a `launch` of the rung's own are tried in their order
    prefer  function(problem, chip): the names of ways to try instead, the best first
    """

    def __init__(self, name, launch=None, kernels=(), needs=EVERY_CHIP, *, ways=(), prefer=None):
        super().__init__(name, None, launch, kernels or self._kernels_of_ways, needs)
        self.ways, self._prefer = tuple(ways) or (self,), prefer
        self._by_name = {way.name: way for way in self.ways}

    def _kernels_of_ways(self):
        return (kernel for way in self.ways for kernel in way.kernels)

    def preferred(self, problem, chip):
        """The ways to try for `problem`, the best first."""
        if self._prefer is None:
            return self.ways
        return map(self._by_name.get, self._prefer(problem, chip))


class Choice(NamedTuple):
    """What runs a problem: its name, as `variant` takes it, the way, and its plan."""

    variant: str
    way: Way
    plan: object

    @property
    def rung(self):
        """The name of its rung."""
        return self.variant.partition("/")[0]


class Ladder(Mapping):
    """The rungs of one pass by name, in teaching order: ``ladder["naive"]`` is a `Rung`.

    auto    names of the rungs that AUTO takes, the first that can run; none where the operation
            chooses by shape as well
    prefer  function(problem, chip): such names, where they depend on the problem
    """

    def __init__(self, *rungs, auto=(), prefer=None):
        self._rungs = {rung.name: rung for rung in rungs}
        #: What `variant` may name: rungs, and each way of a rung of several.
        self._named = {}
        for rung in rungs:
            self._named[rung.name] = rung
            if len(rung.ways) > 1:
                self._named |= {f"{rung.name}/{way.name}": way for way in rung.ways}
        self.auto = (auto,) if isinstance(auto, str) else tuple(auto)
        for name in self.auto:
            self[name]  # there is such a rung
        self._prefer = prefer
        #: What runs on every chip, which is most of what is asked for: found by one look-up.
        self._everywhere = {
            name: way for name, way in self._named.items() if way.needs <= EVERY_CHIP
        }
        if self.auto and self.auto[0] in self._everywhere:
            self._everywhere[AUTO] = self[self.auto[0]]
        self._instead = None  # the rung that AUTO takes within `choosing`

    __hash__ = object.__hash__  # no other ladder is equal

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

    def named(self, variant):
        """The rung or way that `variant` names."""
        return self._named[variant]

    @property
    def variants(self):
        """What `variant` may be beside AUTO: each rung, and behind it its ways if it has some."""
        return tuple(self._named)

    def require(self, variant):
        """Raise ValueError unless `variant` is AUTO, one of the rungs, or a way of one."""
        if variant != AUTO and variant not in self._named:
            known = ", ".join(self._named)
            raise ValueError(f"unknown variant {variant!r}; there are {known}, and {AUTO!r}")

    @contextlib.contextmanager
    def choosing(self, name):
        """Within, AUTO takes the rung or way called `name`, in operators and networks as well.

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

    def choose(self, variant, problem, chip):
        """The `Choice` for `problem` on `chip`; found once.

        Raises ValueError for a variant that there is not, and for one that can't take the problem,
        with the reason.
        """
        if variant == AUTO and self._instead is not None:
            variant = self._instead
        return _chosen(self, variant, problem, chip)

    def plan(self, variant, problem, chip):
        """The `Choice` that `variant` allows, the best; a `Refusal` where none takes `problem`."""
        names, refused = (variant,), None
        if variant == AUTO:
            names = self._prefer(problem, chip) if self._prefer else self.auto
        for name in names:
            found = self._named[name]
            for way in (found,) if found.launch else found.preferred(problem, chip):
                if not isinstance(plan := way.plan(problem, chip), Refusal):
                    return Choice(name if way is found else f"{name}/{way.name}", way, plan)
                # The last one takes most; but what a newer chip could do helps nobody.
                if refused is None or way.refusal(chip) is None:
                    refused = plan
        return refused

    def rung(self, variant, array, chosen=None):
        """The rung or way to run on the chip that `array` is on, where no problem decides.

        chosen  function() that names the rung AUTO takes, where the ladder's `auto` names none

        Raises ValueError for a variant that there is not, or that this chip can't run.
        """
        if (found := self._everywhere.get(variant)) is not None:
            return found
        self.require(variant)
        if variant == AUTO and self._instead is not None:
            variant = self._instead
        if variant != AUTO:
            found, chip = self._named[variant], chip_of(array)
            if refusal := found.refusal(chip):
                can = [name for name, rung in self.items() if not rung.refusal(chip)]
                raise ValueError(_refused(variant, refusal, can))
            return found
        if chosen is not None:
            return self[chosen()]
        for name in self.auto:
            if self[name].needs <= EVERY_CHIP or self[name].needs <= chip_of(array).capability:
                return self[name]
        raise ValueError(f"none of {', '.join(self.auto)} runs on this GPU")


@functools.lru_cache(maxsize=4096)
def _chosen(ladder, variant, problem, chip):
    ladder.require(variant)
    found = ladder.plan(variant, problem, chip)
    if isinstance(found, Refusal):
        others = [r for r in ladder if not isinstance(ladder.plan(r, problem, chip), Refusal)]
        raise ValueError(_refused(variant, found, others))
    return found


def _refused(variant, refusal, others):
    return f"variant {variant!r} {refusal.reason}: use one of {', '.join(others)}"
