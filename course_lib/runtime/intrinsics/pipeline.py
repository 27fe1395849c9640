"""Copies in flight, in the order in which they began: a pipeline through shared memory.

`shared.wait_for_copies` waits for everything that a thread has begun to copy. A kernel that works
on one tile while the next ones are on their way must wait for the oldest only. So copies are
*grouped*, and waited for by group:

    for tile in range(3):
        ...                           # copy_async(…) for this tile
        end_group()
    wait_for_groups_but(2)            # the first tile is there; two are still on their way

============================ ===================================================================
`end_group()`                all that this thread began to copy since the last call is a group,
                             also if that is nothing (PTX cp.async.commit_group)
`wait_for_groups_but(n)`     until no more than the last `n` groups of this thread are on their
                             way; with n above 7, as with 7 (PTX cp.async.wait_group)
============================ ===================================================================

Before sm_80 `shared.copy_async` is a load and a store, and neither does anything. Each is machine
code (`ptx.pipeline`) and a twin, as told in `intrinsics`. A kernel that groups its copies waits
with these two alone.
"""

from course_lib import simulator
from course_lib.runtime.intrinsics import twins

MOST_GROUPS = 7  # that can be left on their way


def _end_group():
    simulator.postponed.add(None)


def _wait_for_groups_but(n):
    items = simulator.postponed.take()
    ended = 0
    for item in items:
        if item is None:
            ended += 1
    arrived = ended - min(n, MOST_GROUPS)
    for item in items:
        if arrived <= 0:
            simulator.postponed.add(item)
        elif item is None:
            arrived -= 1
        else:
            simulator.postponed.finish(item)


#: Name of an intrinsic -> what it does in the simulator.
TWINS = {"end_group": _end_group, "wait_for_groups_but": _wait_for_groups_but}

_here = twins.in_use(TWINS, "course_lib.runtime.intrinsics.ptx.pipeline")
end_group, wait_for_groups_but = _here["end_group"], _here["wait_for_groups_but"]
