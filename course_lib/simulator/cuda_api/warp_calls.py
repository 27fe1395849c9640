"""Instructions that a whole warp carries out together, such as a product of matrices.

    _multiply = simulator.whole_warp("multiply_add", compute)   # at module level
    answer = _multiply(payload)                                 # in a twin, in every lane

`compute` is called once for the warp, with the list of its 32 lanes' payloads, and returns the list
of what each lane gets. Such an instruction has no mask: if a lane takes no part, that is an error,
because what a GPU does then is undefined.
"""

from course_lib.simulator import errors
from course_lib.simulator.cuda_api.primitives import Primitive
from course_lib.simulator.engine.report import position, ranges, where
from course_lib.simulator.engine.scheduler import FULL_MASK, WARP_SIZE, warp_operation


def whole_warp(name, compute):
    """A primitive for twins: hands over a payload, and gives this lane's part of the answer."""

    def together(group):
        if len(group) < WARP_SIZE:
            missing = ranges(lane for lane in range(WARP_SIZE) if lane not in group)
            thread = next(iter(group.values()))[0]
            place = position(thread)
            error = errors.MaskError(
                f"{name} is carried out by all 32 lanes of a warp, but lanes {missing} take no "
                f"part; let every lane call it; block {thread.b.index}"
                + (f", {where(*place[:2])}" if place else ""))
            error.place = place
            raise error
        answers = compute([group[lane][1] for lane in range(WARP_SIZE)])
        for lane, answer in enumerate(answers):
            group[lane][0].value = answer

    def call(thread, payload):
        return warp_operation, together, FULL_MASK, payload

    call.__doc__ = f"{name}, by all lanes of a warp."
    return Primitive(f"simulator.whole_warp.{name}", call, "blocking")
